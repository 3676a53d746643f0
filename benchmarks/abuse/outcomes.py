"""What becomes of a generated model: planned and verified, refused with a rule, or a failure; and its least form."""

import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.executor.measuring.verify import verify
from meshwright.planner.answers.check import check
from meshwright.planner.answers.search import InfeasibleError, SearchResult, search
from meshwright.planner.plan.document import KEPT_ON_DEVICE, LayerPlan, Plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import ZERO_BUBBLE
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.loaded import LoadedModel, split_inputs
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace

from .generate import Tree, draw, loaded

RANKS = 4
GLOBAL_BATCH = 16
TRIES = 60
"""Smaller trees that are looked at for the least one that still fails."""

_SEARCH_S = 10.0

Kind = Literal["verified", "refused", "failed", "different", "traceback"]
FAILURES: tuple[Kind, ...] = ("failed", "different", "traceback")

_PINS: tuple[dict[str, Any], ...] = (
    {"pipeline": 2, "schedule": "1f1b"},
    {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"pipeline": 2, "schedule": "zb-h2"},
    {"pipeline": 2, "schedule": "interleaved"},
    {"pipeline": 2, "schedule": "zb-v"},
    {"pipeline": 4},
    {"pipeline": 2, "data_shard": 2},
    {"data_shard": 4},
    {"data_shard": 2, "data_replicate": 2},
    {"data_replicate": 4},
    {"data_shard": 4, "micro_batch": 2, "gradient_sync": "every"},
    {"tensor": 2},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "data_shard": 2},
    {"recompute": "full", "micro_batch": 2},
    {"pipeline": 2, "recompute": "full"},
)
_AWAY: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"offload_optimizer": True},
    {"offload_activations": True},
)
"""What waits on the host besides."""


@dataclass(frozen=True)
class Outcome:
    """What became of a model under some pins. words: the rule, or what went wrong."""

    tree: Tree
    pins: dict[str, Any]
    kind: Kind
    words: str = ""


def pins_of(tree: Tree, count: int) -> list[dict[str, Any]]:
    """The plans that a model is asked for: the open question, and some drawn ones. A loss over pairs of samples is
    asked for with a micro-batch."""
    dice, others = random.Random(tree.seed), random.Random(f"away {tree.seed}")
    said = {"micro_batch": 4} if tree.loss == "pairs" else {}
    return [said, *({**said, **pins, **others.choice(_AWAY)} for pins in dice.sample(_PINS, count - 1))]


def outcomes(tree: Tree, plans: int = 3) -> Iterator[Outcome]:
    """What becomes of the model of a tree under so many plans."""
    profile = _profiled(tree)
    if isinstance(profile, Outcome):
        yield profile
        return
    opened: SearchResult | None = None
    for pins in pins_of(tree, plans):
        outcome, found = _outcome(tree, profile, pins)
        if found is not None and opened is None:
            opened = found
        elif found is not None and opened is not None:
            outcome = _narrower(outcome, found, opened)
        yield outcome


def _profiled(tree: Tree) -> ModelProfile | Outcome:
    try:
        return trace(loaded(tree))
    except ValueError as error:
        if trains_alone(loaded(tree)):
            return Outcome(tree, {}, "failed", f"PyTorch trains it on one device, and the profiler says: {error}")
        return Outcome(tree, {}, "refused", str(error))
    except Exception:
        return Outcome(tree, {}, "traceback", traceback.format_exc())


def trains_alone(model: LoadedModel) -> bool:
    """Whether plain PyTorch takes the model forward and backward on one batch."""
    module, batch = model.build(), model.batch(GLOBAL_BATCH)
    try:
        args, kwargs = split_inputs(module, batch, model.loss is not None)
        output = module(*args, **kwargs)
        (output if model.loss is None else model.loss(output, batch)).backward()
    except Exception:
        return False
    return True


def _outcome(tree: Tree, profile: ModelProfile, pins: dict[str, Any]) -> tuple[Outcome, SearchResult | None]:
    kind, words, found = answered(loaded(tree), profile, pins)
    return Outcome(tree, pins, kind, words), found


def answered(
    model: LoadedModel,
    profile: ModelProfile,
    pins: dict[str, Any],
    differs: Callable[[Plan], bool] = lambda plan: True,
) -> tuple[Kind, str, SearchResult | None]:
    """What becomes of a plan with these pins, in words, and the plan. differs: whether a plan is worth a run, which
    costs most of the time; others are returned as verified, unseen."""
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision="fp32")
    cluster = cluster_of(load_device("cpu"), RANKS)
    try:
        found = search(profile, cluster, training, pins=Pins(**pins), time_limit_s=_SEARCH_S)
        if pins.get("offload_activations"):
            found = replace(found, plan=_all_away(found.plan))
        broken = check(found.plan, profile)
        if broken:
            return "failed", f"the plan breaks its own limits: {broken[0]}", found
        if not differs(found.plan):
            return "verified", "", found
        report = verify(found.plan, model, steps=2, profile=profile)
    except (ValueError, InfeasibleError) as error:
        if type(error) not in (ValueError, InfeasibleError):  # a subclass is not one of our sentences
            return "traceback", traceback.format_exc(), None
        return "refused", str(error), None
    except Exception:
        return "traceback", traceback.format_exc(), None
    kind: Kind = "verified" if report.ok else "failed" if report.failure else "different"
    return kind, "" if report.ok else f"{report.title}: {report.lines[-1]}", found


def _all_away(plan: Plan) -> Plan:
    """The plan with the activations of all layers on the host that may be there: on CPUs no search sends them."""

    def away(layer: LayerPlan) -> bool:
        one_module = layer.modules == (layer.root,)
        return one_module and layer.recompute not in KEPT_ON_DEVICE and plan.schedule not in ZERO_BUBBLE

    stages = tuple(
        stage.model_copy(
            update={"layers": tuple(layer.model_copy(update={"offload": away(layer)}) for layer in stage.layers)}
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages})


def _narrower(outcome: Outcome, found: SearchResult, opened: SearchResult) -> Outcome:
    """A narrower question has no better answer than what was proven of the open one."""
    if found.certificate.fastest_s < opened.certificate.bound * (1 - 1e-6):
        bound = opened.certificate.bound
        words = f"takes {found.certificate.fastest_s} s, below the bound of the open question, {bound} s"
        return replace(outcome, kind="failed", words=words)
    return outcome


def shrunken(outcome: Outcome) -> Outcome:
    """The least tree in which the same kind of failure is left."""
    least, tries = outcome, TRIES
    progress = True
    while progress and tries > 0:
        progress = False
        for smaller in _smaller(least.tree):
            tries -= 1
            found = _again(smaller, least.pins)
            if found.kind == outcome.kind:
                least, progress = found, True
                break
            if tries <= 0:
                break
    return least


def _again(tree: Tree, pins: dict[str, Any]) -> Outcome:
    profile = _profiled(tree)
    return profile if isinstance(profile, Outcome) else _outcome(tree, profile, pins)[0]


def _smaller(tree: Tree) -> Iterator[Tree]:
    """Trees with one thing less, the largest steps first."""
    for place in range(len(tree.order) - 1, -1, -1):
        if len(tree.order) > 1:
            yield _without(tree, place)
    for name in ("ties", "skips", "hooks", "writes"):
        kept = getattr(tree, name)
        for i in range(len(kept)):
            yield replace(tree, **{name: kept[:i] + kept[i + 1 :]})
    for name, plain in (("dtype", "float32"), ("batch", "vectors"), ("loss", "mean")):
        if getattr(tree, name) != plain:
            yield replace(tree, **{name: plain})
    for i, kind in enumerate(tree.blocks):
        if kind != "linear":
            yield replace(tree, blocks=(*tree.blocks[:i], "linear", *tree.blocks[i + 1 :]))


def _without(tree: Tree, place: int) -> Tree:
    """The tree without one place of its order, and with what speaks of later places moved."""

    def moved(at: int) -> int:
        return at - 1 if at > place else at

    return replace(
        tree,
        order=tree.order[:place] + tree.order[place + 1 :],
        skips=tuple((moved(a), moved(b)) for a, b in tree.skips if place not in (a, b)),
        writes=tuple(moved(at) for at in tree.writes if at != place),
    )


def drawn(first: int, count: int) -> Iterator[Tree]:
    """The trees of consecutive seeds."""
    return (draw(seed) for seed in range(first, first + count))
