"""What is kept under a key is what would be found anew: keys that leave out what counts are found here."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from importlib import import_module
from itertools import islice
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import numpy as np
import pytest

from benchmarks.planning_time.brute_force import every_plan
from benchmarks.planning_time.instances import Instance, chunked_instance
from meshwright import planner
from meshwright.planner.answers.search import price_setup
from meshwright.planner.cost import kept
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.setups import parse_setup
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.explore import Explorer
from meshwright.planner.solve.layer_lower_bounds import LeastWork
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import Bytes, ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow
from support.instances import FEW
from support.mixtures import mixture_on

GPT = Path(__file__).parent.parent / "benchmarks" / "models" / "gpt.py"

ASKED = FEW[:40]
INTERLEAVED = [chunked_instance(seed, "interleaved", memory) for seed in range(3) for memory in (2e9, 3e9)]
"""Ranks of several stages, some of which must be run again."""


def differs(one: Any, other: Any) -> bool:
    """Whether two results do; of objects of other kinds only by their type."""
    if type(one) is not type(other):
        return True
    if isinstance(one, np.ndarray):
        return not (one.shape == other.shape and np.allclose(one, other, rtol=1e-9, atol=0, equal_nan=True))
    if isinstance(one, float):
        return not (one == other or math.isclose(one, other, rel_tol=1e-9) or (one != one and other != other))
    if isinstance(one, Mapping):
        return list(one) != list(other) or any(differs(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) != len(other) or any(map(differs, one, other))
    if is_dataclass(one):
        return any(differs(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return isinstance(one, int | str | bytes | frozenset | set) and one != other


def keeping_methods() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """(class, name, method) of all methods of the planner that keep what they find."""
    for module in walk_packages(planner.__path__, planner.__name__ + "."):
        for owner in vars(import_module(module.name)).values():
            if isinstance(owner, type) and owner.__module__ == module.name:
                for name, method in vars(owner).items():
                    if getattr(getattr(method, "__code__", None), "co_filename", "") == kept.__file__:
                        yield owner, name, method


@contextmanager
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """While it lasts what a method has kept is compared with what it finds; gives the names of those that differ."""
    wrong, looking = set[str](), [False]

    def watched(name: str, method: Any) -> Callable[..., Any]:
        @wraps(method)
        def both(self: Any, *given: Any) -> Any:
            found = method(self, *given)
            if not looking[0]:
                looking[0] = True
                try:
                    if differs(found, method.__wrapped__(self, *given)):
                        wrong.add(name)
                finally:
                    looking[0] = False
            return found

        return both

    with monkeypatch.context() as patch:
        for owner, name, method in list(keeping_methods()):
            patch.setattr(owner, name, watched(f"{owner.__name__}.{name}", method))
        yield wrong


@pytest.mark.parametrize("asked", slow.but_first([*INTERLEAVED, *ASKED], 1), ids=lambda asked: str(asked.seed))
def test_methods_keep_what_they_would_find(asked: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    with asked_anew(monkeypatch) as wrong:
        explorer = Explorer(asked.profile, asked.cluster, asked.training)
        explorer.explore(asked.pins, math.inf)
        for plan in islice(every_plan(asked), 0, 1_000, 25):
            estimate(plan, asked.profile)

    assert wrong == set()


@functools.cache
def _gpt() -> ModelProfile:
    small = load_model(GPT).small
    assert small is not None
    return trace(small())


@pytest.mark.slow
def test_methods_keep_what_they_would_find_of_a_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are cut, between others that are not, on GPUs that wait for their hosts."""
    profile, cluster = _gpt(), cluster_of(load_device("h100-80gb"), 4)
    training = TrainingSpec(global_batch=8, seq_len=profile.seq_len)
    with asked_anew(monkeypatch) as wrong:
        explorer = Explorer(profile, cluster, training)
        for pins in (Pins(tensor=2), Pins(tensor=2, pipeline=2)):
            explorer.explore(pins, math.inf)
        for words in ("tp=2 sp=on", "tp=2", "tp=2 fsdp", "cp=2 fsdp", "ddp"):
            made = price_setup(parse_setup(words, 4, 4), profile, cluster, training)
            assert made.plan is not None, made.verdict

    assert wrong == set()


def _puts_nothing_off(profile: ModelProfile) -> ModelProfile:
    """Whose layers keep nothing for the gradients of their weights."""
    costs = [each.whole.model_copy(update={"put_off": Bytes()}) for each in profile.classes]
    classes = [c.model_copy(update={"whole": whole}) for c, whole in zip(profile.classes, costs, strict=True)]
    return profile.model_copy(update={"classes": tuple(classes)})


@pytest.mark.parametrize("buffers", slow.but_first([False, True], 0))
def test_what_layers_keep_is_found_for_all_ways_to_hold_weights(buffers: bool, tmp_path: Path) -> None:
    """A search of one model seldom asks for two of them with the same micro-batch and schedule."""
    software = str(tmp_path / "own.toml")
    Path(software).write_text(
        f'[own]\ndescription = "a stack"\nfusion = 0.5\noverlap = 0.3\nsource = "made up"\n'
        f"[own.memory]\nbuffers = {str(buffers).lower()}\n"
    )
    training = TrainingSpec(global_batch=8, seq_len=_gpt().seq_len, software=software)
    explorer = Explorer(_puts_nothing_off(_gpt()), cluster_of(load_device("h100-80gb"), 4), training)
    least, kinds = LeastWork(explorer.chain, explorer.model), explorer.model.kinds_of_layers
    ways = LayerOption("none"), LayerOption("full"), LayerOption("none", offload=True)
    shapes = [
        Shape(replicate, shard, 1, pipeline, 1, 2, schedule=schedule, reshard=reshard, gradient_sync=sync)
        for replicate, shard, pipeline in ((4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2))
        for schedule in (("1f1b", "zb-h1") if pipeline > 1 else ("none",))
        for reshard in (False, True)
        for sync in ("last", "every")
    ]

    for kind in kinds:
        found = [least.of_ways(kind, shape, ways) for shape in shapes]
        alone = [LeastWork(explorer.chain, explorer.model).of_ways(kind, shape, ways) for shape in shapes]
        assert not differs(found, alone), kind


@pytest.mark.parametrize("software", slow.but_first(["fsdp2-eager", "megatron-core"], 0))
def test_methods_keep_what_they_would_find_of_a_mixture(software: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are spread or not, weights that are cast or lie in buffers, hosts that are waited for."""
    with asked_anew(monkeypatch) as wrong:
        asked = mixture_on(1e-5, software, Pins())
        explorer = Explorer(asked.profile, asked.cluster, asked.training)
        for pins in (asked.pins, Pins(expert=2), Pins(expert=2, tensor=2)):
            explorer.explore(pins, math.inf)

    assert wrong == set()


def test_a_key_without_what_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @kept.memo_by(lambda self, number, factor: number)
        def times(self, number: int, factor: int) -> list[np.ndarray[Any, Any]]:
            return [np.array([number * factor])]

    monkeypatch.setattr("test_kept_answers.keeping_methods", lambda: [(Wrong, "times", Wrong.times)])
    with asked_anew(monkeypatch) as wrong:
        product = Wrong()
        for factor in (1, 2):
            product.times(3, factor)

    assert wrong == {"Wrong.times"}


@pytest.mark.parametrize("asked", slow.but_first(ASKED, 1), ids=lambda asked: str(asked.seed))
def test_an_explorer_that_has_answered_before_answers_as_a_new_one(asked: Instance) -> None:
    """Whatever it was asked: other pins, and for plans below a step that none has."""
    used = Explorer(asked.profile, asked.cluster, asked.training)
    questions = [asked.pins, *(replace(asked.pins, recompute=each) for each in ("none", "full"))]
    questions += [replace(asked.pins, reshard=each) for each in (False, True)]

    def best(explorer: Explorer, pins: Pins, cutoff_s: float = math.inf) -> float:
        return min((s.seconds for s in explorer.explore(pins, math.inf, cutoff_s=cutoff_s).solved), default=math.inf)

    expected = [best(Explorer(asked.profile, asked.cluster, asked.training), pins) for pins in questions]
    for pins, seconds in zip(questions, expected, strict=True):
        best(used, pins, (1 - 1e-6) * seconds)
    assert [best(used, pins) for pins in questions] == pytest.approx(expected, rel=1e-9)
    assert [best(used, pins) for pins in reversed(questions)] == pytest.approx(expected[::-1], rel=1e-9)


@pytest.mark.parametrize("asked", ASKED[:8], ids=lambda asked: str(asked.seed))
def test_a_shape_is_solved_again_for_slower_plans(asked: Instance) -> None:
    explorer = Explorer(asked.profile, asked.cluster, asked.training)
    space = Space(asked.profile, asked.cluster, asked.training, asked.pins)
    for family in space.families():
        if family.pipeline == 1:
            prices = explorer.priced(next(space.shapes(family)), asked.pins.recompute)
            first = Explorer(asked.profile, asked.cluster, asked.training).solved(
                prices, family, None, math.inf, math.inf
            )
            if first is not None:
                assert explorer.solved(prices, family, None, 0.5 * first.seconds, math.inf) is None
                assert explorer.solved(prices, family, None, first.seconds, math.inf) is None
                again = explorer.solved(prices, family, None, math.inf, math.inf)
                assert again is not None
                assert again.seconds == first.seconds
