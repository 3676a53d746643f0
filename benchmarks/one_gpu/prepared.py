"""Set-ups of models as plans in a folder: made where the cores are, run where the GPU is, read anywhere."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.accuracy import cases
from benchmarks.one_gpu.rank import RankRun
from meshwright.planner.answers.search import InfeasibleError, price_setup, search
from meshwright.planner.plan.document import Plan, load_plan
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile

TOKENS = 8192
"""Of each GPU in a step, but at least one sample."""

SAMPLES = 16
"""Of each GPU in a step, where a model has no tokens."""

_PLANS, _RUNS = "plans.json", "runs.jsonl"


@dataclass(frozen=True)
class Failure:
    """A set-up, or a rank of it, that was not run, and why."""

    model: str
    setup: str
    reason: str


@dataclass(frozen=True)
class Prepared:
    """A set-up of a model, and its plan."""

    model: str
    setup: str
    file: Path
    plan: Plan


def loaded_model(name: str, small: bool) -> LoadedModel:
    """A model of the zoo, or its small version."""
    source = next(source for source in cases.sources() if cases.name_of(source) == name)
    return cases.small(source) if small else cases.whole(source)


@cache
def profile_of(name: str, small: bool) -> ModelProfile:
    """The profile of one."""
    return cases.profile_of(loaded_model(name, small))


def prepare(
    folder: Path, models: Sequence[str], setups: Sequence[str], num_gpus: int, preset: str, small: bool
) -> None:
    """Put the plan of every set-up of every model into the folder, the planned one first."""
    folder.mkdir(parents=True, exist_ok=True)
    told: list[dict[str, str]] = []
    for name in models:
        for number, (setup, plan) in enumerate(_plans(profile_of(name, small), setups, num_gpus, preset).items()):
            if isinstance(plan, str):
                told.append(asdict(Failure(name, setup, plan)))
                continue
            file = f"{name}.{number}.plan.json"
            plan.save(folder / file)
            told.append({"model": name, "setup": setup, "file": file})
    (folder / _RUNS).unlink(missing_ok=True)
    (folder / _PLANS).write_text(json.dumps({"small": small, "gpus": num_gpus, "setups": told}, indent=1) + "\n")


def _plans(profile: ModelProfile, setups: Sequence[str], num_gpus: int, preset: str) -> dict[str, Plan | str]:
    """Set-up -> its plan, or why there is none."""
    machine = cluster_of(load_device(preset), num_gpus)
    samples = SAMPLES if profile.seq_len is None else max(1, TOKENS // profile.seq_len)
    training = TrainingSpec(global_batch=samples * num_gpus, seq_len=profile.seq_len or 1)
    plans: dict[str, Plan | str] = {}
    try:
        plans["planned"] = search(profile, machine, training).plan
    except InfeasibleError as error:
        plans["planned"] = str(error)
    for words in setups:
        candidate = price_setup(parse_setup(words, num_gpus, machine.devices_per_host), profile, machine, training)
        plans[words] = str(candidate.verdict) if candidate.plan is None else candidate.plan
    return plans


def is_prepared(folder: Path) -> bool:
    """Whether plans were put into a folder."""
    return (folder / _PLANS).is_file()


class Folder:
    """Prepared set-ups, and what their ranks did. Raises FileNotFoundError where nothing was prepared."""

    def __init__(self, path: Path) -> None:
        self._runs = path / _RUNS
        told = json.loads((path / _PLANS).read_text())
        self.small: bool = told["small"]
        self.num_gpus: int = told["gpus"]
        self.without = [Failure(**each) for each in told["setups"] if "file" not in each]
        self.prepared = [
            Prepared(each["model"], each["setup"], path / each["file"], load_plan(path / each["file"]))
            for each in told["setups"]
            if "file" in each
        ]

    def add(self, of: Prepared, rank: int, run: RankRun | str) -> None:
        """Keep what a rank did, or why it did nothing."""
        found: dict[str, Any] = {"failed": run} if isinstance(run, str) else asdict(run)
        with self._runs.open("a") as file:
            file.write(json.dumps({"model": of.model, "setup": of.setup, "rank": rank, **found}) + "\n")

    def runs(self, of: Prepared) -> Iterator[tuple[int, RankRun | str]]:
        """(rank, what it did or why it did nothing), of all that were begun."""
        lines = self._runs.read_text().splitlines() if self._runs.exists() else []
        for line in map(json.loads, lines):
            if (line.pop("model"), line.pop("setup")) == (of.model, of.setup):
                yield line["rank"], line["failed"] if "failed" in line else RankRun(**line)
