"""Which checkpoints a run's folder holds, and how far each had come. Needs no torch."""

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import NonNegativeInt

from ...profiler.document import Document, Frozen

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class DataPlace(Frozen):
    """The place in the data that a loader of training data has reached."""

    data: str = ""
    """The data that it reads, in words."""
    epoch: NonNegativeInt = 0
    samples: NonNegativeInt = 0
    """Samples of this epoch that all ranks together have taken."""


class Progress(Document):
    """How far a run has come."""

    made_by: ClassVar[str] = "trainer.save(folder)"

    schema_version: Literal[1] = 1
    kind: Literal["meshwright-checkpoint"] = "meshwright-checkpoint"
    steps: NonNegativeInt = 0
    epoch: NonNegativeInt = 0
    samples: NonNegativeInt = 0
    """Samples of this epoch that all ranks together have taken."""
    data: str = ""
    """The data that was read, in words."""
    others: tuple[DataPlace, ...] = ()
    """Places of further loaders that are read in turns with the first one."""
    checksums: bool = False
    """Whether the checkpoint was saved with checksums."""


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, oldest first."""
    found = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda f: (int(f[0][1]), int(f[0][2] or 0)))]


def latest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint in a run's folder, or the folder itself if it is one; None if there is none."""
    if (folder / "state.json").is_file():
        return folder
    return next(reversed(complete_checkpoints(folder)), None)


def read_progress(folder: Path) -> Progress:
    """The progress of the run at a checkpoint. Raises ValueError if the folder is not a checkpoint that this version
    reads."""
    try:
        return Progress.load(folder / "state.json")
    except ValueError as error:
        raise ValueError(f"{folder} is no checkpoint that this version reads: {error}") from None
