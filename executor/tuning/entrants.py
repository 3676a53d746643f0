"""Which plans race: what search, rules of thumb, set-ups and usual layouts name, as far as bands of error overlap."""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...planner.answers.alternatives import family
from ...planner.answers.check import check
from ...planner.answers.search import SearchResult, is_allowed, prediction_of, price_setup
from ...planner.cost.bands import Band, time_band
from ...planner.cost.estimate import Estimate, estimate
from ...planner.cost.layer_cost import CostModel
from ...planner.plan.document import Plan
from ...planner.plan.legality import divisors
from ...planner.plan.not_run import not_run
from ...planner.plan.pins import Pins
from ...planner.plan.setups import IllegalSetupError, parse_setup
from ...planner.plan.training import TrainingSpec
from ...profiler.machine.cluster import ClusterSpec, Device
from ...profiler.model.model_profile import ModelProfile

PRESET_BAND = Band(0.74, 1.35, 0)
"""Measured over predicted where no published run is of the kind and nothing was measured: the widest miss of a choice
by an uncalibrated preset that was seen, 35% (CPU ranks, whose preset has no host time), both ways."""

FITTED_BAND = Band(0.92, 1.09, 185)
"""The same of a device that was fitted to measured steps: the worst of 185 predictions is 8.7% off
(benchmarks/planned_vs_manual)."""

MOST = 16
"""Plans of the first round, at most; more would each get a share of the budget that decides nothing."""

NEWCOMERS = 4
"""Plans that join after a refit, at most: the next one says more about the rest than their predictions do."""

USUAL_S = 20.0
"""Seconds that pricing usual layouts may take, all together."""

_ONE_DEVICE = ("recompute=full", "recompute=selective", "mb=1", "mb=2", "mb=4", "mb=8", "mb=16", "mb=32")
_MOST_STAGES = 8


@dataclass(frozen=True)
class Entrant:
    """A plan that may race, by whom it was named, and its price by the constants of the moment."""

    label: str
    by: str
    plan: Plan
    predicted_s: float


def key_of(plan: Plan) -> str:
    """What a plan decides: equal for plans that run alike."""
    told = plan.model_dump_json(
        exclude={"certificate", "prediction", "alternatives", "cluster", "measured", "versions"}
    )
    return told if in_order(plan) else f"{plan.cluster.first_hosts}{told}"


def in_order(plan: Plan) -> bool:
    """Whether a plan takes the hosts in the order in which they stand."""
    return list(plan.cluster.first_hosts) == sorted(plan.cluster.first_hosts)


def on_cluster(plan: Plan, cluster: ClusterSpec, profile: ModelProfile) -> tuple[Plan, Estimate]:
    """A plan with its price on the same hosts with other constants."""
    alike = len(cluster.kinds) == 1
    hosts = cluster if alike or in_order(plan) else cluster.ordered_by(plan.cluster.first_hosts)
    moved = plan.model_copy(update={"cluster": hosts, "certificate": None, "alternatives": (), "measured": None})
    found = estimate(moved, profile)
    return moved.model_copy(update={"prediction": prediction_of(found)}), found


class Pool:
    """Every plan that was named so far, each once. It only grows: what one set of constants calls slow may be the
    fastest by the next."""

    def __init__(self, profile: ModelProfile, pins: Pins) -> None:
        self._profile, self._pins = profile, pins
        self._found: dict[str, Entrant] = {}

    def add(self, plan: Plan, by: str, label: str = "") -> None:
        """A plan, unless it is there, is not run by the executor, or does not fit; one with hosts in another order than
        they are in takes them as they are."""
        if not in_order(plan):
            hosts = plan.cluster.ordered_by(tuple(sorted(plan.cluster.first_hosts)))
            plan = on_cluster(plan.model_copy(update={"cluster": hosts}), hosts, self._profile)[0]
        key = key_of(plan)
        if key in self._found or not_run(plan) or check(plan, self._profile):
            return
        name = self._free(label or _name(plan))
        priced, found = on_cluster(plan, plan.cluster, self._profile)
        self._found[key] = Entrant(name, by, priced, found.step_time_s)

    def add_result(self, result: SearchResult) -> None:
        """What a search found, and what it was weighed against, as far as the pins allow it."""
        self.add(result.plan, "the search")
        model = CostModel(self._profile, result.plan.cluster, result.plan.training)
        for each in result.alternatives:
            if each.plan is not None and (not each.by_rule or is_allowed(model, self._pins, each.plan)):
                self.add(each.plan, f"rule of thumb: {each.label}" if each.by_rule else "the search")

    def restore(self, label: str, by: str, plan: Plan) -> None:
        """A plan by the label that a record has of it."""
        priced, found = on_cluster(plan, plan.cluster, self._profile)
        self._found[key_of(plan)] = Entrant(label, by, priced, found.step_time_s)

    def label_of(self, plan: Plan) -> str:
        """What a plan is called here."""
        known = self._found.get(key_of(plan))
        return _name(plan) if known is None else known.label

    def priced(self, cluster: ClusterSpec) -> list[Entrant]:
        """All that fit, the fastest first, by the constants of a cluster."""
        again = []
        for each in self._found.values():
            plan, found = on_cluster(each.plan, cluster, self._profile)
            if found.fits:
                again.append(replace(each, plan=plan, predicted_s=found.step_time_s))
        return sorted(again, key=lambda each: each.predicted_s)

    def _free(self, label: str) -> str:
        taken = {each.label for each in self._found.values()}
        numbers = (f"{label} ({i})" for i in range(2, len(taken) + 3))
        return label if label not in taken else next(each for each in numbers if each not in taken)


def _name(plan: Plan) -> str:
    """As in "FSDP 8, micro-batch 4"; with what distinguishes variants of a layout."""
    words = [plan.label, f"micro-batch {plan.micro_batch}"]
    kinds = {layer.recompute for layer in plan.layers} - {"none"}
    words += [f"{kind} recompute" for kind in sorted(kinds)]
    return ", ".join(words)


def usual_layouts(cluster: ClusterSpec) -> list[str]:
    """Layouts that people try by hand on so many devices, one of every kind, as --setup says them. Micro-batches of one
    sample are slow, and tell what launching kernels takes."""
    count, per_host = cluster.num_devices, cluster.devices_per_host
    if count == 1:
        return list(_ONE_DEVICE)
    inside = [t for t in divisors(per_host) if t > 1]
    stages = [p for p in divisors(count) if 1 < p <= _MOST_STAGES]
    found = ["ddp", "fsdp", "zero=1", "zero=2", "ddp mb=1"]
    found += [f"hsdp:{size}" for size in inside if size < count]
    found += [f"tp={t}" for t in inside] + [f"tp={t} fsdp" for t in inside if t < count]
    found += [f"pp={p} schedule=1f1b mb=1" for p in stages[:1]]
    for p in stages:
        found += [f"pp={p} schedule=1f1b", f"pp={p} schedule=zb-h1", f"pp={p} schedule=interleaved v=2"]
        found += [f"pp={p} schedule=1f1b fsdp"] if p < count else []
        found += [f"tp={t} pp={p} schedule=1f1b" for t in inside if t * p <= count and count % (t * p) == 0]
    return found


def priced_layouts(
    words: Iterable[str], profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec, seconds: float = USUAL_S
) -> Iterator[tuple[str, Plan]]:
    """(layout in words, its plan, what it leaves open at its best), of those that are legal and fit, in that time."""
    until = time.monotonic() + seconds
    for text in words:
        if time.monotonic() > until:
            return
        try:
            setup = parse_setup(text, cluster.num_devices, cluster.devices_per_host)
        except IllegalSetupError:
            continue
        found = price_setup(setup, profile, cluster, training, max(1.0, until - time.monotonic()))
        if found.plan is not None:
            yield text, found.plan


def band_of(plan: Plan, device: Device) -> Band:
    """How far a prediction may be off, before anything of this race was measured."""
    if any("measured steps" in source for source in device.sources.values()):
        return FITTED_BAND
    return time_band(plan) or PRESET_BAND


def could_be_best(found: Sequence[Entrant], most: int = MOST) -> list[Entrant]:
    """Those whose band reaches below the top of the band of the best predicted one: the best of every family, then the
    others by their predictions, `most` of them.

    found: the fastest first. What users named takes part whatever its prediction.
    """
    if not found:
        return []
    top_s = min(each.predicted_s * band_of(each.plan, each.plan.cluster.device).high for each in found)
    near = [
        each
        for each in found
        if each.predicted_s * band_of(each.plan, each.plan.cluster.device).low <= top_s or each.by == "--setup"
    ]
    return _diverse(near, most)


def _diverse(found: Sequence[Entrant], most: int) -> list[Entrant]:
    """The first, those that users named, the first of each family, then the others in their order; `most`, but every
    one that users named."""
    seen: set[tuple[object, ...]] = set()
    first, rest = [], []
    for each in found:
        kind = (*family(each.plan.degrees), each.plan.schedule)
        if each.by == "--setup" or kind not in seen:
            first.append(each)
            seen.add(kind)
        else:
            rest.append(each)
    named = sum(each.by == "--setup" for each in found)
    ordered = sorted(first, key=lambda each: (each is not found[0], each.by != "--setup"))
    return [*ordered, *rest][: max(most, named + 1)]


def challengers(found: Sequence[Entrant], seen: Collection[str], limit_s: float) -> list[Entrant]:
    """Plans not seen yet that are predicted to take less than a limit, the best of each family first."""
    return _diverse([each for each in found if each.label not in seen and each.predicted_s < limit_s], NEWCOMERS)


def to_beat_s(leader_s: float, predicted_s: float, missed: float) -> float:
    """Predicted seconds below which a plan may beat the leader: its measured step and what the constants miss steps by,
    or what the same constants predict of it where that is more, for plans of a kind share their error; but no more than
    constants were ever seen to err.

    leader_s, predicted_s: of the leader. missed: as of `missed_by`.
    """
    return max(leader_s, min(max(leader_s * (1 + missed), predicted_s), leader_s * FITTED_BAND.high))


def missed_by(ratios: Iterable[float]) -> float:
    """Share by which fitted constants miss the steps that they were fitted to. ratios: predicted over measured."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.sqrt(sum(log**2 for log in logs) / len(logs))
