"""Imports go left only and in no circle, a class name has one meaning, the planner knows no torch, and what needs no
torch never loads it."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.cli import save_profile
from support.interpreter import modules_after

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {"profiler": set(), "planner": {"profiler"}, "executor": {"profiler", "planner"}}
ABOVE = {
    "profiler.machine": {
        *("profiler.model", "profiler.running", "profiler.hugging_face", "profiler.tensor_cuts", "profiler.semantics")
    },
    "profiler.semantics": {"profiler.machine", "profiler.running", "profiler.hugging_face", "profiler.tensor_cuts"},
    "profiler.running": {"profiler.machine", "profiler.hugging_face", "profiler.tensor_cuts"},
    "profiler.hugging_face": {"profiler.machine", "profiler.tensor_cuts"},
    "planner.plan": {"planner.cost", "planner.solve", "planner.answers", "planner.exchange"},
    "planner.cost": {"planner.solve", "planner.answers", "planner.exchange"},
    "planner.solve": {"planner.answers", "planner.exchange"},
    "planner.answers": {"planner.exchange"},
    "planner.exchange": {"planner.solve", "planner.answers"},
    "executor.parallel": {"executor.state", "executor.measuring", "executor.reporting", "executor.commands"},
    "executor.state": {"executor.measuring", "executor.reporting", "executor.commands"},
    "executor.reporting": {"executor.parallel", "executor.state", "executor.commands", "executor.trainer"},
}
"""Inside a package: what each floor does not know."""


def violations(root: Path) -> list[str]:
    """Imports that break a rule, as "file:line: what"."""
    found = []
    for package, allowed in MAY_IMPORT.items():
        for path in sorted((root / package).rglob("*.py")):
            depth = len(path.relative_to(root).parts) - 1
            floor = ".".join(path.relative_to(root).parts[:-1])
            for node in imports_in(path.read_text()):
                where = f"{path.relative_to(root)}:{node.lineno}"
                within = absolute(node, path.relative_to(root))
                found += [
                    f"{where}: {floor} imports {above}"
                    for above in ABOVE.get(floor, ())
                    if f"{within}.".startswith(f"meshwright.{above}.")
                ]
                for target in imported(node, depth):
                    first, _, rest = target.partition(".")
                    ours = rest.partition(".")[0] if first == "meshwright" else ""
                    if first in MAY_IMPORT:
                        found.append(f"{where}: bare import of {first}; import relatively")
                    if ours and ours != package and ours not in allowed:
                        found.append(f"{where}: {package} imports {ours}")
                    if first == "torch" and package == "planner":
                        found.append(f"{where}: the planner imports torch")
    return found


@cache
def statements_in(source: str) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    """All imports and definitions of classes of a source, wherever they stand."""
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imports_in(source: str) -> list[ast.Import | ast.ImportFrom]:
    """All import statements of a source."""
    return [node for node in statements_in(source) if not isinstance(node, ast.ClassDef)]


def imported(node: ast.Import | ast.ImportFrom, depth: int) -> list[str]:
    """Modules that a node imports; relative ones as meshwright.<package>...; depth: folders below the root."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    if node.level <= depth:
        return [module] if node.level == 0 else []
    return [f"meshwright.{module}"] if module else [f"meshwright.{alias.name}" for alias in node.names]


def absolute(node: ast.Import | ast.ImportFrom, file: Path) -> str:
    """The module that a relative import names, as meshwright.<package>...; else nothing."""
    if isinstance(node, ast.Import) or not node.level:
        return ""
    folder = file.parts[:-1][: len(file.parts) - node.level]
    return ".".join(["meshwright", *folder, *([node.module] if node.module else [alias.name for alias in node.names])])


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle, the first once more at the end; empty where there is none.

    Imports for types only, and within functions, count.
    """
    files = {module_of(path.relative_to(root)): path for folder in MAY_IMPORT for path in (root / folder).rglob("*.py")}
    imports = {
        name: {
            target
            for node in imports_in(path.read_text())
            for target in files_named(node, path.relative_to(root), files)
        }
        for name, path in files.items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def module_of(file: Path) -> str:
    """meshwright.<package>..., of a file; of a package, for its __init__.py."""
    return ".".join(["meshwright", *(file.parent if file.name == "__init__.py" else file.with_suffix("")).parts])


def files_named(node: ast.Import | ast.ImportFrom, file: Path, files: dict[str, Path]) -> set[str]:
    """Which of our modules an import names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in files}
    folder = ["meshwright", *file.parts[: len(file.parts) - node.level]] if node.level else []
    base = ".".join([*folder, *([node.module] if node.module else [])])
    named = (name if (name := f"{base}.{alias.name}") in files else base for alias in node.names)
    return {name for name in named if name in files}


def names_defined_twice(root: Path) -> dict[str, list[str]]:
    """Class name without its leading underscores -> "file:line" of its definitions, of names that have several.

    Type aliases do not count.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(path for folder in MAY_IMPORT for path in (root / folder).rglob("*.py")):
        for node in statements_in(path.read_text()):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(f"{path.relative_to(root)}:{node.lineno}")
    return {name: places for name, places in found.items() if len(places) > 1}


def test_imports_go_left_only() -> None:
    assert violations(ROOT) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(ROOT) == []


def test_no_class_name_is_defined_twice() -> None:
    assert names_defined_twice(ROOT) == {}


@pytest.mark.parametrize(
    ("file", "source", "line"),
    [
        ("profiler/planted.py", "class Plan:\n    pass", 1),
        ("executor/planted.py", "class _Plan:\n    pass", 1),
        ("planner/plan/planted.py", "class Outer:\n    class Plan:\n        pass", 2),
        ("planner/plan/planted.py", "def build():\n    class __Plan:\n        pass", 2),
    ],
)
def test_a_planted_second_meaning_is_found(tmp_path: Path, file: str, source: str, line: int) -> None:
    for path in ("planner/plan/document.py", file):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "planner" / "plan" / "document.py").write_text("class Plan:\n    pass\n")
    (tmp_path / "planner" / "plan" / "alias.py").write_text("Plan = tuple[int, ...]\n_Plan = list[int]\n")
    assert names_defined_twice(tmp_path) == {}
    (tmp_path / file).write_text(source + "\n")

    found = names_defined_twice(tmp_path)

    assert list(found) == ["Plan"]
    assert sorted(found["Plan"]) == sorted(["planner/plan/document.py:1", f"{file}:{line}"])


@pytest.mark.parametrize(
    "back",
    [
        "from .document import Plan",
        "from ..plan.document import Plan",
        "from . import document",
        "def late():\n    from .document import Plan",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .document import Plan",
        "import meshwright.planner.plan.document",
        "from meshwright.planner.plan.document import Plan",
        "from .between import Plan",
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, back: str) -> None:
    folder = tmp_path / "planner" / "plan"
    folder.mkdir(parents=True)
    (folder / "document.py").write_text("from .display import Shown\n")
    (folder / "between.py").write_text("from .document import Plan\n")
    (folder / "display.py").write_text("import json\n")
    assert circle(tmp_path) == []
    (folder / "display.py").write_text(back + "\n")

    found = circle(tmp_path)

    assert found[0] == found[-1]
    assert {"meshwright.planner.plan.document", "meshwright.planner.plan.display"} <= set(found)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("planner", "import torch"),
        ("planner", "def late():\n    from torch import nn"),
        ("planner", "from ..executor import report"),
        ("planner", "from .. import executor"),
        ("profiler", "from ..planner.plan.document import Plan"),
        ("profiler", "import meshwright.executor.cli"),
        ("executor", "import planner"),
        ("executor", "from planner.plan.document import Plan"),
        ("planner/cost", "from ..solve.space import Space"),
        ("planner/cost", "from .. import answers"),
        ("planner/plan", "from ..cost.estimate import estimate"),
        ("planner/solve", "from ..answers.search import search"),
        ("planner/answers", "from ..exchange.export import export"),
        ("planner/exchange", "def late():\n    from ..answers.check import check"),
        ("profiler/machine", "from ..model.load import load_model"),
        ("profiler/semantics", "from ..tensor_cuts.tensor_flow import Flow"),
        ("executor/parallel", "def late():\n    from ..state.checkpoint import save"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, package: str, line: str) -> None:
    for folder in MAY_IMPORT:
        (tmp_path / folder).mkdir()
    (tmp_path / package).mkdir(exist_ok=True)
    (tmp_path / package / "planted.py").write_text(line + "\n")

    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    "line", ["from ..profiler.machine.units import GIB", "from .plan.document import Plan", "import json"]
)
def test_what_is_allowed_passes(tmp_path: Path, line: str) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "fine.py").write_text(line + "\n")

    assert violations(tmp_path) == []


def test_help_planning_and_comparing_from_a_saved_profile_need_no_torch(tmp_path: Path) -> None:
    job = [str(save_profile(tmp_path)), "--gpus", "2", "--device", "h100-80gb"]
    commands = [["--help"], ["devices"], ["compare", "--help"], job, ["compare", *job, "--setup", "ddp"]]
    run = "try:\n        main(words)\n    except SystemExit as end:\n        assert not end.code"

    loaded = modules_after(f"from meshwright.executor.cli import main\nfor words in {commands}:\n    {run}", tmp_path)

    assert "meshwright.planner.answers.search" in loaded
    assert "torch" not in loaded


@pytest.mark.slow
def test_the_watch_sees_torch(tmp_path: Path) -> None:
    assert "torch" in modules_after("import torch", tmp_path)
