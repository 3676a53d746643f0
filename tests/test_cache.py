"""Kept profiles: used without torch while nothing they depend on changes, and never after."""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor.commands import inputs
from meshwright.executor.reporting import terminal
from meshwright.planner.plan.document import load_plan
from meshwright.profiler.model import cache as cache_module
from meshwright.profiler.model import trace as trace_module
from meshwright.profiler.model.cache import ProfileCache, default_folder
from meshwright.profiler.model.load import load_model
from support import slow
from support.cli import run_plan, small_profile
from support.interpreter import modules_after

MODEL = """
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F

import helper_of_the_cached_model

try:
    import option_of_the_cached_model as option
except ImportError:
    option = None

sizes = json.loads(Path("sizes.json").read_text())
width = sizes["width"] + int(os.environ.get("WIDTH_OF_THE_CACHED_MODEL", "0")) + len(os.listdir("parts"))
deeper = Path("deeper").exists()

def model():
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(helper_of_the_cached_model.depth)])

def batch(size, seq_len=4):
    return torch.randn(size, seq_len, width), torch.randn(size, seq_len, width)

def loss(output, batch):
    return F.mse_loss(output, batch[1])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder; the current folder holds a model that reads a helper, a json, a folder and a variable."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WIDTH_OF_THE_CACHED_MODEL", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else torch sets it, here for the second call, too
    monkeypatch.setattr(inputs, "local_gpus", list)
    work = tmp_path / "work"
    (work / "parts").mkdir(parents=True)
    (work / "model.py").write_text(MODEL)
    (work / "helper_of_the_cached_model.py").write_text("depth = 2\n")
    (work / "sizes.json").write_text('{"width": 8}')
    monkeypatch.chdir(work)
    yield tmp_path / "cache" / "profiles"
    sys.modules.pop("helper_of_the_cached_model", None)
    cache_module._imported.clear()


def keep(source: str = "model.py", seq_len: int | None = None, meanwhile: Callable[[], Any] = lambda: None) -> str:
    """Why the profile of a model that was loaded and built under a recording was not kept."""
    cache = ProfileCache(source, seq_len)
    with cache.recording() as recording:
        loaded = load_model(source, seq_len)
        loaded.build()
        loaded.batch(1)
        meanwhile()
    return cache.keep(small_profile(), recording)


def is_kept(source: str = "model.py", seq_len: int | None = None) -> bool:
    return ProfileCache(source, seq_len).look_up() is not None


def entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def replace_in(name: str, old: str, new: str) -> None:
    path = Path(name)
    changed = path.read_text().replace(old, new)
    assert changed != path.read_text()
    path.write_text(changed)


@pytest.mark.slow
def test_the_second_plan_of_an_unchanged_model_needs_no_torch(folder: Path) -> None:
    program = "from meshwright.executor.cli import main\nmain(['model.py', '--gpus', '2', '-q', '-o', {!r}])"
    first = modules_after(program.format("first.json"), Path.cwd())
    second = modules_after(program.format("second.json"), Path.cwd())

    assert "torch" in first
    assert "torch" not in second
    assert load_plan(Path("first.json")).stages == load_plan(Path("second.json")).stages
    assert load_plan(Path("first.json")).model == load_plan(Path("second.json")).model


def test_a_kept_profile_is_the_one_that_was_traced() -> None:
    cache = ProfileCache("model.py", None)
    with cache.recording() as recording:
        traced = trace_module.trace(load_model("model.py"))
    assert cache.keep(traced, recording) == ""

    found = ProfileCache("model.py", None).look_up()

    assert found is not None
    assert found.profile == traced
    assert 0 <= found.age_s < 60


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "the model file": lambda patch: replace_in("model.py", "seq_len=4", "seq_len=5"),
    "an imported file": lambda patch: replace_in("helper_of_the_cached_model.py", "2", "3"),
    "an opened json": lambda patch: replace_in("sizes.json", "8", "9"),
    "an opened json that is gone": lambda patch: Path("sizes.json").unlink(),
    "a variable that was not set": lambda patch: patch.setenv("WIDTH_OF_THE_CACHED_MODEL", "8"),
    "a listed folder": lambda patch: Path("parts/new").touch(),
    "a file that was looked for": lambda patch: Path("deeper").touch(),
    "a module that could not be imported": lambda patch: Path("option_of_the_cached_model.py").touch(),
    "a file that takes the place of a library": lambda patch: Path("torch.py").touch(),
    "the Python that runs": lambda patch: patch.setattr(sys, "version", "3.99"),
    "the import path": lambda patch: patch.setattr(sys, "path", [*sys.path, "/elsewhere"]),
    "the GPUs that are seen": lambda patch: patch.setenv("CUDA_VISIBLE_DEVICES", "7"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_miss(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep() == ""
    assert is_kept()

    CHANGES[change](monkeypatch)

    assert not is_kept()


def test_a_variable_that_was_read_and_is_unset_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH_OF_THE_CACHED_MODEL", "8")
    assert keep() == ""
    assert is_kept()

    monkeypatch.delenv("WIDTH_OF_THE_CACHED_MODEL")

    assert not is_kept()


def test_what_the_model_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep() == ""

    monkeypatch.setenv("ANOTHER_VARIABLE_OF_THE_TEST", "8")
    Path("plan.json").touch()
    Path("another_model.py").touch()

    assert is_kept()


@pytest.mark.parametrize(("source", "seq_len"), [("model.py", 2), ("model.py:model", None), ("./model.py", None)])
def test_another_length_or_source_is_another_entry(source: str, seq_len: int | None) -> None:
    assert keep() == ""

    assert not is_kept(source, seq_len)
    assert keep(source, seq_len) == ""
    assert is_kept(source, seq_len)
    assert is_kept()


def test_a_new_version_of_an_installed_package_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages" / "thing-1.0.dist-info"
    installed.mkdir(parents=True)
    monkeypatch.syspath_prepend(installed.parent)
    assert keep() == ""
    assert is_kept()

    installed.rename(installed.with_name("thing-1.1.dist-info"))

    assert not is_kept()


def test_a_change_of_the_profiler_itself_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shutil.copytree(cache_module._OURS, tmp_path / "ours", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache_module, "_OURS", ours)
    assert keep() == ""
    assert is_kept()

    with (ours / "trace.py").open("a") as file:
        file.write("# changed\n")

    assert not is_kept()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda entry: b"",
    "cut off": lambda entry: entry[:-20],
    "one digit changed": lambda entry: entry[::-1].replace(b"1", b"2", 1)[::-1],
    "not text": lambda entry: b"\xff\n\xff\n\xff",
    "of another version": lambda entry: entry.replace(b"made_at", b"made_on", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_is_replaced(damage: str, folder: Path) -> None:
    assert keep() == ""
    path = entry(folder)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert path.read_bytes() != whole

    assert not is_kept()
    assert keep() == ""
    assert is_kept()


UNTRACKED = {
    "import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])": "subprocess.Popen",
    "import os\nall_of_it = dict(os.environ)": "lists the environment",
    "import os\nos.system('true')": "os.system",
    "import sqlite3\nsqlite3.connect(':memory:').close()": "sqlite3.connect",
    "open('large.bin', 'rb').close()": "larger than",
}


@pytest.mark.parametrize("lines", UNTRACKED)
def test_what_cannot_be_told_is_not_kept(lines: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_LARGEST_FILE", 1_000_000)
    Path("large.bin").write_bytes(bytes(1_000_001))
    Path("model.py").write_text(f"{lines}\n{MODEL}")

    assert UNTRACKED[lines] in keep()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["model.py", "helper_of_the_cached_model.py", "sizes.json"])
def test_a_file_written_while_it_was_read_is_not_kept(name: str, folder: Path) -> None:
    reason = keep(meanwhile=lambda: Path(name).write_text(Path(name).read_text() + " "))

    assert f"{name} was written while it was read" in reason
    assert not folder.exists()


def test_a_helper_edited_after_this_process_imported_it_is_not_kept() -> None:
    assert keep() == ""

    replace_in("helper_of_the_cached_model.py", "2", "33")

    assert "changed after it was imported" in keep()


def test_files_that_the_model_itself_writes_do_not_count() -> None:
    lines = "with open('log.txt', 'a') as log, open('out.txt', 'w') as out:\n    log.write('1')\n    out.write('1')\n"
    Path("model.py").write_text(lines + MODEL)
    assert keep() == ""

    Path("out.txt").unlink()
    Path("log.txt").unlink()

    assert is_kept()


def test_recording_ends_even_when_the_model_fails() -> None:
    before = os.stat, type(os.environ).__getitem__, type(os.environ).__iter__
    Path("model.py").write_text("raise RuntimeError('no')")

    with pytest.raises(ValueError, match="RuntimeError: no"):
        keep()

    assert (os.stat, type(os.environ).__getitem__, type(os.environ).__iter__) == before
    assert cache_module._current is None


@pytest.mark.slow
def test_writers_at_the_same_time_leave_one_whole_entry(folder: Path) -> None:
    cache = ProfileCache("model.py", None)
    with cache.recording() as recording:
        load_model("model.py").build()
    reasons: list[str] = []
    seen: list[bool] = []

    def write_and_read() -> None:
        for _ in range(5):
            reasons.append(cache.keep(small_profile(), recording))
            seen.append(is_kept())

    threads = [threading.Thread(target=write_and_read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(reasons) == {""}
    assert all(seen)
    assert len(list(folder.iterdir())) == 1


def test_the_oldest_entries_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_MOST_ENTRIES", 2)
    folder.mkdir(parents=True)
    left_behind = folder / "killed.partial"
    left_behind.touch()
    os.utime(left_behind, (0, 0))
    for seq_len in (1, 2, 3):
        assert keep(seq_len=seq_len) == ""
        for path in folder.glob("*.profile"):
            os.utime(path, (path.stat().st_atime - 100, path.stat().st_mtime - 100))

    assert [is_kept(seq_len=seq_len) for seq_len in (1, 2, 3)] == [False, True, True]
    assert not left_behind.exists()

    monkeypatch.setattr(cache_module, "_MOST_BYTES", 1)
    assert keep() == ""
    assert not list(folder.iterdir())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that are traced from here on."""
    traced: list[str] = []
    real = trace_module.trace

    def trace(loaded: Any, **options: Any) -> Any:
        traced.append(loaded.name)
        return real(loaded, **options)

    monkeypatch.setattr(trace_module, "trace", trace)
    return traced


PLANNED = ["model.py", "--gpus", "2", "--setup", "ddp"]
"""Words that have the model profiled, and no search."""


def test_the_terminal_says_that_a_profile_was_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = counted(monkeypatch)
    assert run_plan(*PLANNED) == 0
    assert "--no-cache" not in capsys.readouterr().err
    assert run_plan(*PLANNED) == 0
    said = capsys.readouterr().err
    assert run_plan("profile", "model.py", "-q") == 0
    assert run_plan("compare", "model.py", "--gpus", "2", "--setup", "ddp", "--json") == 0

    assert "ago, nothing has changed since; --no-cache makes it anew" in said
    assert traced == ["model"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", slow.but_first([PLANNED, ["profile", "model.py"]], 1))
def test_no_cache_profiles_anew_and_keeps_nothing(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = counted(monkeypatch)

    assert [run_plan(*words, "-q", "--no-cache") for _ in range(2)] == [0, 0]

    assert traced == ["model", "model"]
    assert not folder.exists()


def test_off_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", "off")
    traced = counted(monkeypatch)

    assert [run_plan(*PLANNED) for _ in range(2)] == [0, 0]

    assert traced == ["model", "model"]
    assert not folder.exists()
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").touch()

    assert run_plan(*PLANNED) == 0

    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "cannot be written: Not a directory" in said[0]


def test_a_kept_profile_brings_the_model_where_it_is_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_plan("profile", "model.py", "-q") == 0
    traced = counted(monkeypatch)

    with terminal.Waiting(quiet=True) as waiting:
        profile, loaded = inputs.read_model("model.py", None, waiting, True, True)

    assert loaded is not None
    assert loaded.build().get_submodule("0").in_features == 8
    assert profile.name == "model"
    assert traced == []


def test_tracing_says_which_layer_it_is_at() -> None:
    said: list[tuple[str, float | None]] = []

    def waiting(label: str, share_done: float | None = None) -> None:
        said.append((label, share_done))

    inputs.read_model("model.py", None, waiting, False)  # type: ignore[arg-type]

    layers = [(label, share) for label, share in said if share is not None]
    assert layers[0] == ("profiling 0", 0.0)
    assert [share for _, share in layers] == sorted(share for _, share in layers)
    assert all(share < 1 for _, share in layers)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 seconds"), (1, "1 second"), (125, "2 minutes"), (3600, "1 hour"), (2e5, "2 days")]
)
def test_an_age_in_words(seconds: float, words: str) -> None:
    assert terminal.age(seconds) == words


def test_the_folder_is_the_one_for_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder() == tmp_path / "cache" / "profiles"
    monkeypatch.delenv("MESHWRIGHT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == tmp_path / ".cache" / "meshwright" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "meshwright" / "profiles"
    monkeypatch.setenv("MESHWRIGHT_CACHE", "off")
    assert default_folder() is None
