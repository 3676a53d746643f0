"""Careless and hostile input: corrupted documents and command lines, each answered or refused in a sentence.

A case is what files lie in a folder and what is typed there. It runs in this process; wrong are a traceback, an exit
code of no meaning, a file that is left half-written, one that a refused command has changed, and no answer in time.
"""

import contextlib
import io
import json
import os
import random
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.executor.cli import main
from meshwright.planner.answers.search import search
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine import cluster as cluster_module
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace

Wrong = Literal["", "traceback", "exit code", "half-written", "changed", "no answer"]

_EXIT_CODES = (0, 1, 2, 3)
_LONGEST_S = 60.0

MODEL = """import torch
from torch import nn


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))


def batch(size, seq_len=16):
    return torch.randn(size, seq_len, 8), torch.randn(size, seq_len, 8)


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])
"""

CLUSTER = """[network]
bandwidth = "40 GB/s"
latency = "20 us"

[[hosts]]
count = 1
device = "h100-80gb"
gpus = 2

[[hosts]]
count = 1
device = "a100-80gb"
gpus = 2
"""

SOFTWARE = """[mine]
description = "a stack of ours"
source = "made up to be read"
matmul = 0.9
fusion = 0.6

[mine.memory]
fuses = true
"""

STEPS = '{"plan": "plan.json", "model": "profile.json", "step_time_s": 0.123}\n'

DEEPSPEED = '{"train_batch_size": 16, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
ACCELERATE = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n"

_MACHINE = ["--gpus", "4", "--device", "h100-80gb", "-b", "16"]
_QUICK = ["--time-limit", "1"]

COMMANDS: tuple[list[str], ...] = (
    ["profile.json", *_MACHINE, *_QUICK, "-q"],
    ["profile.json", "--cluster", "cluster.toml", "-b", "16", *_QUICK, "--json"],
    ["profile.json", "--gpus", "2", "--device", "device.toml", "-b", "16", *_QUICK, "-o", "new.json"],
    ["profile.json", *_MACHINE, *_QUICK, "--software", "software.toml", "-o", "new.json", "-q"],
    ["show", "plan.json"],
    ["show", "plan.json", "--model", "profile.json"],
    ["explain", "plan.json", "--model", "profile.json", *_QUICK],
    ["explain", "profile.json", *_MACHINE, *_QUICK, "--why-not", "tp=2"],
    ["compare", "profile.json", *_MACHINE, *_QUICK, "--setup", "fsdp"],
    ["report", "plan.json", "--model", "profile.json", "-o", "report.html", "-q"],
    ["diff", "plan.json", "other.json", "--model", "profile.json"],
    ["export", "plan.json", "--to", "torchtitan", "-o", "out.toml"],
    ["export", "plan.json", "--to", "accelerate"],
    ["check", "profile.json", *_MACHINE, *_QUICK, "--deepspeed", "deepspeed.json"],
    ["check", "profile.json", *_MACHINE, *_QUICK, "--accelerate", "accelerate.yaml"],
    ["sweep", "profile.json", "--gpus", "2,4", "--device", "h100-80gb", "-b", "16", *_QUICK],
    ["calibrate", "--from", "steps.jsonl", "-o", "fitted.toml"],
)
"""What is typed over corrupted documents."""

_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 10**6, 10**12, 10**30, 0.5, -0.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "a", "1", "-1", "x" * 5000, "[/bold]", "\x00", "\ud800", "../.."),
    *(None, True, False, [], {}, [[]], [1], {"a": 1}),
)
_WORDS = (
    *(
        "0",
        "1",
        "-1",
        "2",
        "4",
        "8",
        "3",
        "1.5",
        "1e3",
        "10**6",
        "1000000000000",
        "99999999999999999999999",
        "nan",
        "inf",
    ),
    *(
        "-inf",
        "",
        " ",
        "a",
        "x" * 5000,
        "../" * 2000,
        "\x00",
        "é",
        "[/bold]",
        "plan.json",
        "profile.json",
        "cluster.toml",
    ),
    *(".", "/", "/dev/null", "/dev/full", "/proc/x.json", "nothing/there.json", "out.html", "out.json", "out.toml"),
    *("tp=2", "tensor=2", "pipeline=2", "micro_batch=0", "schedule=zb-v", "data_shard=-1", "=", "a=b", "tp=2 pp=99"),
    *(
        "h100-80gb",
        "cpu",
        "h100",
        "8k",
        "4096",
        "bf16",
        "fp32",
        "fsdp",
        "megatron",
        "ddp",
        "none",
        "full",
        "2,4",
        "1-8",
    ),
    *("--gpus", "--json", "-o", "--", "--help", "-x", "1h", "0.9", "101", "5%", "10 GB", "-5 GB", "throughput"),
)
_FLAGS_APART = frozenset({"verify", "calibrate", "export-weights", "profile", "--measure", "--install-completion"})
"""What runs models or measures this machine for longer than a case may take."""


@dataclass(frozen=True)
class Case:
    """Files that are not as they should be, and what is typed beside them."""

    seed: int
    typed: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Found:
    """What became of a case; words: the last of the traceback, or what was changed."""

    case: Case
    code: int | None
    wrong: Wrong = ""
    words: str = ""


class Folder:
    """A folder with good documents, in which cases run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "model.py").write_text(MODEL)
        profile = trace(load_model(path / "model.py"), lengths=True)
        profile.save(path / "profile.json")
        training = TrainingSpec(global_batch=16, seq_len=16)
        cluster = cluster_of(load_device("h100-80gb"), 4)
        plan = search(profile, cluster, training, pins=Pins(data_shard=4), time_limit_s=2.0).plan
        plan.save(path / "plan.json")
        plan.save(path / "other.json")
        (path / "cluster.toml").write_text(CLUSTER)
        (path / "device.toml").write_text(_preset("a100-80gb"))
        (path / "software.toml").write_text(SOFTWARE)
        (path / "steps.jsonl").write_text(STEPS)
        (path / "deepspeed.json").write_text(DEEPSPEED)
        (path / "accelerate.yaml").write_text(ACCELERATE)
        self.good = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}

    def tried(self, case: Case) -> Found:
        """What becomes of a case; the folder is as before then."""
        for name, content in case.files:
            (self.path / name).write_bytes(content)
        before = {p.name: p.read_bytes() for p in self.path.iterdir() if p.is_file()}
        found = self._run(case)
        after = {p.name: p.read_bytes() for p in self.path.iterdir() if p.is_file()}
        if not found.wrong:
            found = _looked_at(found, before, after)
        for name in after.keys() - self.good.keys():
            (self.path / name).unlink()
        for name, content in self.good.items():
            if after.get(name) != content:
                (self.path / name).write_bytes(content)
        return found

    def _run(self, case: Case) -> Found:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
        was = os.getcwd()
        os.chdir(self.path)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), _in_time():
                main(case.typed)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else -1
            return Found(case, code, "" if code in _EXIT_CODES else "exit code", str(end.code))
        except TimeoutError:
            return Found(case, None, "no answer", traceback.format_exc())
        except BaseException:
            return Found(case, None, "traceback", traceback.format_exc())
        finally:
            os.chdir(was)
        return Found(case, 0)


def _preset(name: str) -> str:
    return (Path(str(cluster_module.__file__)).parent / "hardware" / f"{name}.toml").read_text()


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"no answer within {_LONGEST_S:.0f} s")

    was = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)


def _looked_at(found: Found, before: dict[str, bytes], after: dict[str, bytes]) -> Found:
    left = [name for name in after if name.endswith(".partial")]
    if left:
        return replace(found, wrong="half-written", words=f"{left[0]} is left")
    for name, content in after.items():
        if content != before.get(name) and found.code != 0:
            return replace(found, wrong="changed", words=f"{name} was written by a command that was refused")
        if content != before.get(name) and name.endswith(".json"):
            try:
                json.loads(content)
            except ValueError:
                return replace(found, wrong="half-written", words=f"{name} is no JSON")
    return found


def drawn_cases(folder: Folder, first: int, count: int) -> Iterator[Case]:
    """Cases of consecutive seeds: two corrupted documents for every careless command line."""
    for seed in range(first, first + count):
        dice = random.Random(seed)
        yield _typed(dice, seed) if seed % 3 == 2 else _corrupted(dice, seed, folder)


def _corrupted(dice: random.Random, seed: int, folder: Folder) -> Case:
    typed = dice.choice(COMMANDS)
    read = [word for word in typed if word in folder.good]
    name = dice.choice(read)
    content = folder.good[name]
    if name.endswith(".json") and dice.random() < 0.7:
        data = json.loads(content)
        for _ in range(dice.randint(1, 2)):
            _change(dice, data)
        return Case(seed, tuple(typed), ((name, json.dumps(data).encode("utf-8", "surrogatepass")),))
    change = dice.choice(_TEXT_CHANGES)
    return Case(seed, tuple(typed), ((name, change(dice, content)),))


def _change(dice: random.Random, data: Any) -> None:
    """Put something else in one place of a document."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            walk(value[key])

    walk(data)
    if not places:
        return
    levels = dice.choice((len(places), len(places), 30))
    where, key = dice.choice(places[:levels])
    if dice.random() < 0.2:
        del where[key]
    elif isinstance(where[key], int | float) and dice.random() < 0.3:
        where[key] *= dice.choice((-1, 0, 2, 10, 1e6, 1e-6))
    else:
        where[key] = dice.choice(_VALUES)


_TextChange = Callable[[random.Random, bytes], bytes]

_TEXT_CHANGES: tuple[_TextChange, ...] = (
    lambda dice, text: text[: dice.randrange(len(text))],
    lambda dice, text: b"",
    lambda dice, text: b"[" * 200_000,
    lambda dice, text: b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    lambda dice, text: b"\xef\xbb\xbf" + text,
    lambda dice, text: text.decode().encode("utf-16"),
    lambda dice, text: text.replace(b"0", b"-1", dice.randint(1, 3)),
    lambda dice, text: text.replace(b"1", b"NaN", dice.randint(1, 3)),
    lambda dice, text: text.replace(b"2", b"inf", dice.randint(1, 3)),
    lambda dice, text: text.replace(b"=", b":", 1),
    lambda dice, text: text + text,
    lambda dice, text: _at(dice, text, bytes([dice.randrange(256)])),
    lambda dice, text: _at(dice, text, b"\x00\xff\xfe"),
    lambda dice, text: _at(dice, text, dice.choice((b"}", b"]", b'"', b",", b"\n", b"[/bold]", b"1e999"))),
    lambda dice, text: b"\n".join(dice.sample(lines := text.split(b"\n"), len(lines))),
    lambda dice, text: b"\n".join(line for line in text.split(b"\n") if dice.random() < 0.9),
)


def _at(dice: random.Random, text: bytes, what: bytes) -> bytes:
    place = dice.randrange(len(text))
    return text[:place] + what + text[place + dice.randint(0, 3) :]


def _typed(dice: random.Random, seed: int) -> Case:
    """A command line that was sensible once."""
    typed = list(dice.choice(COMMANDS))
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(len(typed) + 1)
        what = dice.random()
        if what < 0.5 and place < len(typed):
            typed[place] = dice.choice(_WORDS)
        elif what < 0.7 and place < len(typed):
            del typed[place]
        else:
            typed[place:place] = dice.choice(_OPTIONS)
        typed = typed or ["show"]
    typed = [word for word in typed if word not in _FLAGS_APART]
    return Case(seed, tuple(typed))


_OPTIONS: tuple[list[str], ...] = tuple(
    [flag, word]
    for flag in ("--pin", "--max", "--forbid", "--memory-margin", "--recompute", "--space", "--seq-len", "--precision")
    for word in (
        "tensor=2",
        "2",
        "0",
        "-1",
        "nan",
        "full",
        "bf16",
        "interleaved",
        "zb-v",
        "schedule=none",
        "99999999999",
    )
) + tuple(
    [flag, word]
    for flag in ("--for", "--objective", "--price-per-hour", "--instance", "--nodes", "--micro-batch", "--optimizer")
    for word in ("megatron", "1", "0", "-1", "inf", "sgd", "p5.48xlarge", "cost", "1e400")
)


def run(first: int, count: int, tell: Callable[[Found], None]) -> list[Found]:
    """What became of each case; tell: is called with each that is wrong."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CACHE_HOME"] = str(Path(place) / "cache")
        (Path(place) / "folder").mkdir()
        folder = Folder(Path(place) / "folder")
        for case in drawn_cases(folder, first, count):
            found.append(folder.tried(case))
            if found[-1].wrong:
                tell(found[-1])
    return found
