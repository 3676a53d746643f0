"""Best-first branch and bound over the space of shapes: bound, solve by scan, prove by ILP."""

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..profiler.cluster import ClusterSpec
from ..profiler.model_profile import ModelProfile
from .columns import Chain, StagePrices
from .comm_cost import collective_s
from .ilp import solve_master
from .layer_cost import CostModel
from .memory_cost import state_bytes
from .plan import Plan
from .scan import Assignment, scan
from .space import Family, Space
from .stage_cost import allocatable_bytes
from .strategy import LayerOption, Pins, Shape, make_plan
from .training import TrainingSpec

WINDOW = 0.03
"""Shapes that may come this near the best are solved too: runners-up, and finalists of the event simulation."""

SIMPLE = 0.01
"""Among plans this near the best the simplest wins."""

MAX_NEAR = 40
"""Shapes solved inside the window once the best is proven: enough for runners-up, and keeps the search in seconds."""

ALTERNATIVES = 5
"""Other layouts that are shown beside the plan, if there are as many legal ones that fit."""

MAX_SLOW = 60
"""Shapes outside the window that are solved for their sake, at most."""

SLOWEST = 4.0
"""Layouts that take longer than the best by this factor are no alternatives."""

TIE = 0.001
"""Shapes this near the best are put to the ILP as well; all others are bounded, or solved exactly by the scan."""

MAX_TIES = 4
"""At most so many, the best first."""

CUTOFF_SLACK = 1e-5
"""The ILP need only rule out steps shorter than the scan's: longer ones by more than this are cut off."""

SOLVER_S = 1e-9
"""The solver's tolerance of 1e-6 ms, which every micro-batch may fall short of: as much as steps of microseconds."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Solved:
    """A shape with its best assignment, as a plan and priced."""

    shape: Shape
    prices: StagePrices
    assignment: Assignment

    @property
    def seconds(self) -> float:
        """Closed form of the step."""
        return self.assignment.seconds


@dataclass
class Outcome:
    """What a search over a space found and proved."""

    solved: list[Solved] = field(default_factory=list)
    bound: float = float("inf")
    complete: bool = True
    total: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    pruned: int = 0
    num_solved: int = 0

    @property
    def best(self) -> Solved | None:
        """The shape of least closed-form step time."""
        return min(self.solved, key=lambda s: s.seconds, default=None)


class Explorer:
    """Searches spaces of one model, cluster and job; caches what all of them share."""

    def __init__(self, profile: ModelProfile, cluster: ClusterSpec, training: TrainingSpec) -> None:
        self.profile = profile
        self.cluster = cluster
        self.training = training
        self.model = CostModel(profile, cluster, training)
        self.chain = Chain(self.model)

    def explore(self, pins: Pins, deadline_s: float, near: int = MAX_NEAR, progress: Progress | None = None) -> Outcome:
        """Solve every shape that could be the best, up to `near` more within the window of it, and (unless near is 0)
        as many as it takes for enough alternatives to show, even slower ones.

        deadline_s: time.monotonic() at which to stop; the outcome then says it is not complete.
        """
        space = Space(self.profile, self.cluster, self.training, pins)
        outcome = Outcome()
        order = itertools.count()
        heap: list[tuple[float, int, Family | StagePrices]] = []
        waiting: dict[Family, int] = {}
        for family in space.families():
            waiting[family] = space.num_shapes(family)
            outcome.total += waiting[family]
            bound = self._family_bound(family)
            if np.isfinite(bound):
                heapq.heappush(heap, (bound, next(order), family))
        outcome.rejected = dict(space.rejected)
        outcome.total += sum(space.rejected.values())
        best = float("inf")
        extra = 0
        while heap:
            bound = heap[0][0]
            layouts = {solved.shape.layout for solved in outcome.solved}
            few = near > 0 and extra < MAX_NEAR + MAX_SLOW and len(layouts) <= ALTERNATIVES
            if not few and (bound >= best * (1 + WINDOW) or (bound >= best and extra >= near)):
                break
            cutoff = best * (SLOWEST if few else 1 + WINDOW)
            if time.monotonic() > deadline_s:
                outcome.complete = False
                outcome.bound = min(outcome.bound, bound)
                break
            _, _, item = heapq.heappop(heap)
            if isinstance(item, Family):
                for shape in space.shapes(item):
                    prices = StagePrices(self.chain, shape, pins.recompute, pins.reshard)
                    leaf_bound = max(bound, self._shape_bound(prices))
                    if leaf_bound < cutoff:
                        heapq.heappush(heap, (leaf_bound, next(order), prices))
                continue
            extra += bound >= best
            outcome.num_solved += 1
            found = scan(item, cutoff)
            if found is not None:
                outcome.solved.append(Solved(item.shape, item, found))
                best = min(best, found.seconds)
                if progress is not None:
                    progress(f"{outcome.num_solved} shapes solved", min(0.9, bound / best))
        outcome.pruned = outcome.total - sum(outcome.rejected.values()) - outcome.num_solved
        if heap and outcome.complete:
            outcome.bound = min(outcome.bound, heap[0][0])
        outcome.bound = min([outcome.bound, *(s.seconds for s in outcome.solved)])
        return outcome

    def _family_bound(self, family: Family) -> float:
        """Seconds that no shape of a family can beat: compute and tensor traffic inside a host, perfect balance, and
        an optimizer sharded over all data ranks. Infinite if even so the memory of all devices does not do."""
        shape = Shape(
            data_replicate=1,
            data_shard=family.data,
            tensor=family.tensor,
            pipeline=family.pipeline,
            micro_batch=family.micro_batch,
            num_microbatches=family.num_microbatches,
            sequence=family.sequence,
            schedule=family.schedule,
        )
        model, runs = self.model, self.chain.runs
        links = model.links(family.tensor, 1)
        counts = np.array([run.length for run in runs], dtype=float)
        state = state_bytes(shape, self.training)
        seconds, elements, kept, passing = [], [], [], []
        for run in runs:
            kind = model.kinds[run.start]
            compute = model.compute(kind, shape)
            traffic = model.tensor_traffic(kind, shape)
            tensor_s = sum(collective_s(item.kind, item.bytes, links) for _, _, item in traffic)
            tensor_s *= 1.0 - model.software.tensor_overlap
            total, trainable = model.elements(kind, shape)
            _, costs, tensor = model.mode(kind, shape)
            saved = costs.saved.at(shape.micro_batch, self.training.compute_bytes, tensor)
            kept_bytes = saved + model.arriving_bytes(kind, shape, recomputed=False)
            if kind.can_recompute:
                full = costs.full.at(shape.micro_batch, self.training.compute_bytes, tensor)
                kept_bytes = min(kept_bytes, full + model.arriving_bytes(kind, shape, recomputed=True))
            seconds.append(compute.forward + compute.backward + tensor_s)
            elements.append(trainable)
            kept.append(
                total * state.sharded_parameters + trainable * (state.sharded_gradients + state.optimizer) + kept_bytes
            )
            passing.append(saved)
        shared = sum(elements * (len(layers) - 1) for layers, elements in self.chain.shared_weights(shape))
        per_element = state.sharded_parameters + state.sharded_gradients + state.optimizer
        need = float(counts @ np.array(kept)) - per_element * shared
        room = allocatable_bytes(shape, model.device, self.training) * family.pipeline
        if need > room or max(passing) > room:
            return float("inf")
        each = np.array(seconds)
        pass_s = float(counts @ each)
        slowest = max(pass_s / family.pipeline, float(each.max()))
        update = max(0.0, float(counts @ np.array(elements)) - shared) / family.data / family.pipeline
        return (family.num_microbatches - 1) * slowest + pass_s + model.optimizer_s(update)

    def _shape_bound(self, prices: StagePrices) -> float:
        """Seconds that no assignment of a shape can beat: fastest options, memory and integrality relaxed."""
        shape, runs = prices.shape, self.chain.runs
        counts = np.array([run.length for run in runs], dtype=float)
        more = shape.num_microbatches
        if shape.pipeline == 1:
            weights = [min(more * c.microbatch_s + c.once_s for c in costs) for costs in prices.costs]
            shared = sum(elements * (len(layers) - 1) for layers, elements in self.chain.shared_weights(shape))
            twice_s = self.model.optimizer_s(shared / shape.data_shard)
            return float(counts @ np.array(weights)) - twice_s
        each = np.array([min(c.microbatch_s for c in costs) for costs in prices.costs])
        pass_s = float(counts @ each)
        slowest = max(pass_s / shape.pipeline, float(each.max()))
        once = np.array([min(c.once_data_s for c in costs) for costs in prices.costs])
        return (more - 1) * slowest + pass_s + float(counts @ once) / shape.pipeline

    def plan_of(self, solved: Solved) -> Plan:
        """The plan of an assignment: within a stage recomputed layers come first, then resharded ones."""
        stages = []
        for choice in solved.assignment.choices:
            options: list[LayerOption] = []
            for _, parts in itertools.groupby(choice.parts, key=lambda part: part[0]):
                ordered = sorted(parts, key=lambda part: (part[1].recompute != "full", not part[1].reshard))
                options += [option for _, option, count in ordered for _ in range(count)]
            stages.append(options)
        return make_plan(self.profile, self.cluster, self.training, solved.shape, stages)

    def prove(self, outcome: Outcome, time_limit_s: float) -> tuple[float, str, str]:
        """(bound, status, solver): for the best shape and near ties the ILP must find what the scan found.

        Near ties are settled one by one, which is faster than one master ILP over them (HiGHS, 405B on 16,384 devices:
        1 s against 5 s for three shapes). The bound holds for the whole space: the ILP's for its shapes, the exact
        scan's for the other solved ones, the relaxation's for the pruned ones. Raises SolverError.
        """
        ranked = sorted(outcome.solved, key=lambda s: s.seconds)
        best = ranked[0].seconds
        ties = [s for s in ranked[:MAX_TIES] if s.seconds <= best * (1 + TIE)]
        bound, optimal, name = outcome.bound, outcome.complete, ""
        deadline = time.monotonic() + time_limit_s
        for tie in ties:
            result = solve_master([tie.prices], tie.seconds * (1 + CUTOFF_SLACK), deadline - time.monotonic())
            assert result is not None, "the ILP finds nothing where the scan has a plan"
            solution = result[0]
            name = solution.solver
            if solution.status == "optimal":
                difference = abs(solution.objective - tie.seconds)
                allowed = 2 * CUTOFF_SLACK * tie.seconds + SOLVER_S * tie.shape.num_microbatches
                assert difference < allowed, f"ILP {solution.objective} and scan {tie.seconds} differ"
            else:
                optimal = False
                bound = min(bound, solution.bound)
        return bound, "optimal" if optimal else "feasible", name
