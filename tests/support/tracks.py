"""A track on which candidates take what a hidden device would take, for tests of races without any process."""

import random
from collections.abc import Mapping

from meshwright.executor.tuning.jobs import Fallen, Lap
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.refit import turned_hosts
from meshwright.planner.plan.document import Plan
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.model.model_profile import ModelProfile


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

    def lap(self, label: str, plan: Plan, steps: int, limit_s: float) -> Lap | Fallen:
        """A lap, or the end that the candidate is to meet."""
        if len(self.laps) == self._stops_after:
            raise KeyboardInterrupt
        self.laps.append(label)
        for words, fallen in self._falls.items():
            if words in label:
                return fallen
        step_s = self.true_s(plan)
        taken = tuple(step_s * self._random.gauss(1.0, 0.003) for _ in range(steps))
        return Lap(taken, 1.0, (10,) * plan.degrees.num_devices, "resident")

    def leave(self, label: str) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """The race is over."""
        self.closed = True
