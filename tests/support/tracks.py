"""A track on which candidates take what a hidden device would take, for tests of races without any process."""

import random
from collections.abc import Mapping, Sequence

from meshwright.executor.tuning.jobs import Fallen, Lap
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import turned_hosts
from meshwright.planner.plan.document import Plan
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.model.model_profile import ModelProfile

HELD_BESIDE = 100_000_000
"""Bytes that every process has outside of what is predicted."""


class HiddenTrack:
    """Steps are those of the cluster whose constants are truth times those of the announced one, with 0.3% of noise.
    falls: label -> how its job ends; stops_after: laps after which the user presses Ctrl-C."""

    keeps = True

    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        truth: Mapping[str, float],
        falls: Mapping[str, Fallen] | None = None,
        stops_after: int = 10_000,
    ) -> None:
        self._profile, self._cluster = profile, turned_hosts(cluster, truth)
        self._falls, self._stops_after = dict(falls or {}), stops_after
        self._random = random.Random(1)
        self.laps: list[str] = []
        self.closed = False

    def true_s(self, plan: Plan) -> float:
        """Seconds of a step there."""
        return estimate(plan.model_copy(update={"cluster": self._cluster}), self._profile).step_time_s

    def _runs_s(self, plan: Plan, more: Sequence[str]) -> float:
        """Seconds of a step of what runs."""
        return self.true_s(plan)

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float, more: Sequence[str] = ()) -> Lap | Fallen:
        """A lap, or the end that the candidate is to meet."""
        if len(self.laps) == self._stops_after:
            raise KeyboardInterrupt
        self.laps.append(label)
        for words, fallen in self._falls.items():
            if words in label:
                return fallen
        step_s = self._runs_s(plan, more)
        taken = tuple(step_s * self._random.gauss(1.0, 0.003) for _ in range(steps))
        return Lap(taken, 1.0, self._held(plan), "resident")

    def _held(self, plan: Plan) -> tuple[int, ...]:
        """Peak bytes of every rank: as predicted, and HELD_BESIDE more."""
        assert plan.prediction is not None
        ranks = range(plan.degrees.num_devices)
        sizes = plan.prediction.stage_memory_bytes
        return tuple(int(sizes[plan.coordinates(rank)["pipeline"]] + HELD_BESIDE) for rank in ranks)

    def leave(self, label: str) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """The race is over."""
        self.closed = True
