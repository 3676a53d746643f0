"""The wheel holds exactly what the tree holds, under the one import name."""

import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("profiler", "planner", "executor")
THIN = "meshwright"
"""The folder whose files lie in the package itself, beside these packages."""


def expected_files(root: Path) -> set[str]:
    """Every file below the packages that a user needs, as it is named in the wheel."""
    return {
        path.relative_to(root).as_posix() if package == THIN else f"meshwright/{path.relative_to(root).as_posix()}"
        for package in (THIN, *PACKAGES)
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }


def wheel_files(root: Path, folder: Path) -> set[str]:
    """Files of the wheel built from `root`, its metadata left out; built without network."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "-w", str(folder), str(root)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    ignored = ignore_patterns(".git", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".venv", "benchmarks")
    return Path(copytree(ROOT, tmp_path / "tree", ignore=ignored))


def test_the_wheel_holds_what_the_tree_holds(copied_tree: Path, tmp_path: Path) -> None:
    assert wheel_files(copied_tree, tmp_path / "wheel") == expected_files(copied_tree)


@pytest.mark.slow
def test_a_sub_package_that_is_not_listed_is_missed(copied_tree: Path, tmp_path: Path) -> None:
    (copied_tree / "planner" / "deeper").mkdir()
    (copied_tree / "planner" / "deeper" / "__init__.py").write_text('"""Planted."""\n')

    missing = expected_files(copied_tree) - wheel_files(copied_tree, tmp_path / "wheel")

    assert missing == {"meshwright/planner/deeper/__init__.py"}


def test_presets_and_type_markers_are_among_them() -> None:
    files = expected_files(ROOT)

    assert "meshwright/profiler/machine/hardware/h100-80gb.toml" in files
    assert {f"meshwright/{package}/py.typed" for package in PACKAGES} <= files
    assert {"meshwright/__init__.py", "meshwright/__main__.py", "meshwright/py.typed"} <= files
