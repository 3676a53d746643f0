"""Whether a file that a command is to write can be written, asked before the work begins."""

import os
import tomllib
from pathlib import Path

from pydantic import ValidationError

from ...profiler.machine.cluster import Device

_BEGINNING = 400
"""Characters of a file that tell what it is: names before the mark have up to 255."""


def check_writable(path: Path, flag: str, *suffixes: str) -> None:
    """Raises ValueError if no file of one of these kinds can be written there, or a .png not be drawn."""
    if path.suffix not in suffixes:
        choices = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise ValueError(f"{flag} {path}: give a name that ends in {choices}")
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else f"lies in no folder: {path.parent} does not exist"
        raise ValueError(f"{flag} {path} {found}; give a file name in a folder that exists")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError(
                f"{flag} {path}: a .png needs matplotlib (pip install matplotlib); .html needs nothing"
            ) from None


def check_replaceable(path: Path, flag: str, kind: str, mark: str) -> None:
    """Raises ValueError if a file is there that holds something and does not say `mark` near its beginning, so is no
    `kind`."""
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        begins = file.read(_BEGINNING)
    if begins and mark not in begins:
        raise ValueError(f"{flag} {path} exists and is no {kind}, so it is not replaced: choose another name")


def check_device_output(path: Path, flag: str = "-o") -> None:
    """Raises ValueError that names the flag if a device file cannot be written there, or would replace something
    else."""
    if path.suffix != ".toml":
        raise ValueError(
            f"{flag} {path}: a device file ends in .toml, so that --device finds it; for example {flag} device.toml"
        )
    if path.is_dir() or not path.parent.is_dir():
        found = "is a folder" if path.is_dir() else f"lies in no folder: {path.parent} does not exist"
        raise ValueError(f"{flag} {path} {found}; give a file name in a folder that exists")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag} {path}: {path.parent} may not be written to; choose another folder")
    if path.exists():
        try:
            Device.model_validate(tomllib.loads(path.read_text()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError):
            rule = f"{path} exists and is no device file, so it is not replaced: choose another {flag}"
            raise ValueError(rule) from None
