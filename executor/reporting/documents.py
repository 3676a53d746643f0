"""Files of ours: of which kind one is, and whether one may be written over."""

import json
from pathlib import Path

from ...profiler.document import parsed


def json_kind(path: Path) -> str | None:
    """The "kind" of a JSON document of ours; None for anything else."""
    if path.suffix not in (".json", "") or not path.is_file():
        return None
    try:
        data = parsed(json.loads, path.read_text())
    except ValueError as error:
        if path.suffix == "":
            return None
        raise ValueError(
            f"{path} is not JSON ({error}); MODEL is a model.py, a config.json or a profile.json"
        ) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def check_document(path: Path | None, kind: str) -> None:
    """Raises ValueError if writing `path` is impossible or would replace a file that is not of this kind. What is no
    file, as /dev/null or a pipe, is written to."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else f"lies in no folder: {path.parent} does not exist"
        raise ValueError(f"-o {path} {found}; give a file name in a folder that exists")
    if path.is_file():
        try:
            found_kind = json_kind(path)
        except ValueError:
            found_kind = None
        if found_kind != kind:
            raise ValueError(f"{path} exists and is no {kind} document, so it is not replaced: choose another -o")
