"""Which constants a race speaks of, fitted to what it measured, and who of the candidates tells most about them."""

from collections.abc import Sequence

from ...planner.cost.refit import COLLECTIVES, KNOBS, MeasuredCollective, MeasuredStep, most_open, refit
from ...profiler.machine.cluster import ClusterSpec, Device
from ...profiler.machine.units import counted
from ...profiler.model.model_profile import ModelProfile
from ..measuring.exchanges import expected_collectives
from .entrants import Entrant

TURN_NOISE = 0.02
"""Standard deviation of the logarithm of a step that took turns with others, around a right model: predictions by
constants fitted to such steps were off by 1.2% in the median (benchmarks/planned_vs_manual)."""

TEACHERS = 3
"""Plans that run a lap for the fit's sake, at most: those whose steps the others leave most open. (Plans that were not
tried come at worst 4.2% off in `python -m benchmarks.tuning.synthetic`; with the best of two other kinds of layouts in
their place it was 36%.)"""

_LINKS = ("link bandwidth", "link latency", "replica overlap", *COLLECTIVES)
_NETWORK = ("network bandwidth", "network latency")


def teachers(
    found: Sequence[Entrant],
    chosen: Sequence[Entrant],
    cluster: ClusterSpec,
    profile: ModelProfile,
    knobs: Sequence[str] | None = None,
) -> list[Entrant]:
    """Of those found the ones, TEACHERS at most, whose steps those chosen would leave most open by the constants of a
    cluster: slow as they may be by all predictions, a lap of each tells constants apart. knobs: as of Job."""
    others = [each for each in found if each.label not in {one.label for one in chosen}]
    plans = [one.plan for one in chosen], [each.plan for each in others]
    names = knobs_of(cluster) if knobs is None else knobs
    exchanged = expected_collectives(chosen[0].plan, profile) if chosen else []
    return [others[i] for i in most_open(_linked(cluster), profile, *plans, TEACHERS, names, TURN_NOISE, exchanged)]


def _linked(cluster: ClusterSpec) -> Device:
    """The device of a cluster with its links."""
    return cluster.device.model_copy(update={"link": cluster.link, "network": cluster.between_hosts})


def fitted(
    cluster: ClusterSpec,
    runs: Sequence[MeasuredStep],
    knobs: Sequence[str] | None = None,
    exchanged: Sequence[MeasuredCollective] = (),
) -> dict[str, float]:
    """Factors on the constants of a cluster's devices that measured steps, and collectives before them, speak of.
    knobs: as of Job."""
    names = knobs_of(cluster) if knobs is None else knobs
    return refit(_linked(cluster), runs, names, noise=TURN_NOISE, exchanged=exchanged).factors


def knobs_of(cluster: ClusterSpec) -> tuple[str, ...]:
    """Constants that what runs on a cluster speaks of."""
    return tuple(knob.name for knob in KNOBS if _speaks(knob.name, cluster))


def _speaks(knob: str, cluster: ClusterSpec) -> bool:
    """Whether anything that runs on a cluster depends on a constant."""
    if knob in _LINKS:
        return cluster.num_devices > 1
    return cluster.num_hosts > 1 if knob in _NETWORK else True


def refitted(base: ClusterSpec, cluster: ClusterSpec, factors: dict[str, float], count: int) -> Device:
    """The device of a cluster after the fit, as a file of its own, which says of each number what it was fitted to."""
    device = cluster.device
    sources = dict(device.sources)
    for knob in KNOBS:
        if knob.name in factors:
            for name in knob.fields:
                ran = f"the measured steps of {counted(count, 'plan')} by plan tune"
                told = f"{knob.name} x {factors[knob.name]:.2f}, fitted to {ran}"
                sources[name] = f"{sources[name]}; {told}" if name in sources else told
    changes = {"link": cluster.link, "network": cluster.between_hosts, "sources": sources}
    if device.memory < base.device.memory:
        sources["memory"] = "measured: a plan that was predicted to need little more ran out of memory"
    return device.model_copy(update=changes)
