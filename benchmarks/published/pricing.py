"""Prices rows by the project's own road: model on meta -> profile -> plan -> estimate; equal rows and models once."""

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec
from meshwright.profiler.model.model_profile import ModelProfile

from .clusters import place
from .grow import profile_of
from .models import Sizes
from .rows import Row
from .settings import CannotPriceError, Setting, setting_of
from .single_modules import estimate_of

IF_NEEDED: tuple[Recompute, ...] = ("none", "selective", "full")
"""Recompute in the order in which people turn to it. Not full in mixtures: it would send all tokens round again."""

UNSURE = 0.2
"""Share by which a predicted peak may lie above the device before a row that does not tell its recompute is taken to
have turned to more: published runs are tuned to the edge, and our memory of their stacks comes out high. Full recompute
would make all but one of these 53 rows 10-40% too slow."""


@dataclass(frozen=True)
class Priced:
    """A row beside what was predicted for it. Without `step_s` it could not be priced, for the reason given."""

    row: Row
    step_s: float | None = None
    memory_bytes: dict[str, float] = field(default_factory=dict)
    fits: bool | None = None
    assumed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    reason: str = ""
    setting: Setting | None = None


class Pricer:
    """Profiles and estimates of one run, each made once."""

    def __init__(self, *, planning: bool = False) -> None:
        """planning: profiles are for other layouts, too, than those that they are asked for."""
        self._planning = planning
        self._profiles: dict[tuple[Sizes, bool], ModelProfile] = {}
        self._estimates: dict[tuple[Setting, str], tuple[Estimate, Plan]] = {}

    def price(self, row: Row) -> Priced:
        """The row with its prediction, or with the reason why there is none."""
        try:
            placed = place(row)
            setting = setting_of(row)
            if setting.precision not in placed.cluster.device.flops:
                setting = replace(setting, precision="bf16", assumed=(*setting.assumed, "precision"))
            found, _ = self.estimate(setting, placed.cluster)
        except CannotPriceError as error:
            return Priced(row, reason=str(error))
        except Exception as error:  # one odd row must not cost the figures of all others; the page names it
            return Priced(row, reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return Priced(
            row,
            step_s=found.step_time_s,
            memory_bytes=memory_by_metric(found, row),
            fits=found.fits or self._fits_with_more(setting, placed.cluster),
            assumed=(*setting.assumed, *placed.assumed),
            dropped=setting.dropped,
            setting=setting,
        )

    def _fits_with_more(self, setting: Setting, cluster: ClusterSpec) -> bool:
        """Whether a setting whose recompute is not told fits with the most there is."""
        if setting.recompute != "if needed":
            return False
        return self.estimate(replace(setting, recompute="full"), cluster)[0].fits

    def profile(self, setting: Setting) -> ModelProfile:
        """Profile of a setting's model, traced once per run; with what may be cut only where tensor ranks cut it,
        as finding that takes most of the time."""
        key = setting.sizes, self._planning or setting.shape.tensor > 1
        if key not in self._profiles:
            self._profiles[key] = profile_of(setting.name, *key)
        return self._profiles[key]

    def estimate(self, setting: Setting, cluster: ClusterSpec) -> tuple[Estimate, Plan]:
        """Estimate and plan of a setting. Recompute that is not said is the least that nearly fits."""
        key = setting, cluster.model_dump_json()
        if key not in self._estimates:
            profile = self.profile(setting)
            if setting.recompute == "if needed":
                choices = IF_NEEDED[:2] if setting.sizes.mixture else IF_NEEDED
            else:
                choices = (setting.recompute,)
            for recompute in choices:
                plan = plan_of(setting, profile, cluster, recompute)
                found = estimate_of(plan, profile, setting.repeated)
                if all(stage.over_bytes <= UNSURE * stage.budget_bytes for stage in found.memory):
                    break
            self._estimates[key] = found, plan
        return self._estimates[key]


def price_all(rows: Sequence[Row], processes: int | None = None) -> list[Priced]:
    """Every row that counts, priced or with its reason, in their order; rows of one model in one process.

    processes: as many as there are cores if None.
    """
    rows = [row for row in rows if row.is_scored]
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(_model_of(row), []).append(row)
    if processes == 1:
        priced = [found for group in groups.values() for found in _price_group(group)]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            priced = [found for group in pool.map(_price_group, groups.values()) for found in group]
    place_of = {id(row): place for place, row in enumerate(row for group in groups.values() for row in group)}
    return [priced[place_of[id(row)]] for row in rows]


def memory_by_metric(found: Estimate, row: Row) -> dict[str, float]:
    """Predicted bytes by metric on the rank that holds most, of those that the row looks at. Allocators are taken to
    have had memory to spare."""
    stages = found.memory
    if row.memory_is_of_first_host:
        stages = stages[: math.ceil(len(stages) * row.cluster["gpus_per_node"] / row.cluster["n_gpus"])]
    worst = max(stages, key=lambda stage: stage.device_bytes)
    outside = worst.device_bytes - worst.reserved_bytes
    return {
        "allocated": worst.allocated_bytes,
        "reserved": worst.max_reserved_bytes,
        "device": worst.max_reserved_bytes + outside,
    }


def _model_of(row: Row) -> object:
    """What rows of one model have in common."""
    try:
        return setting_of(row).sizes
    except Exception as error:  # named where the row is priced
        return str(error)


def _price_group(rows: Sequence[Row]) -> list[Priced]:
    pricer = Pricer()
    return [pricer.price(row) for row in rows]


def plan_of(setting: Setting, profile: ModelProfile, cluster: ClusterSpec, recompute: Recompute) -> Plan:
    """The plan that runs a setting: embedding on the first stage, head on the last, blocks between.

    The memory margin is zero: the question is what runs, not what one would dare.
    """
    training = TrainingSpec(
        global_batch=setting.global_batch,
        seq_len=setting.sizes.seq_len,
        precision=setting.precision,
        software=setting.software,
        memory_margin=0.0,
        expert_imbalance=setting.imbalance,
    )
    shape = setting.shape
    costs = CostModel(profile, cluster, training)
    is_block = [layer.root.startswith("blocks.") for layer in profile.layers]
    before = is_block.index(True)
    counts = [*setting.blocks]
    counts[0] += before
    counts[-1] += len(is_block) - before - sum(is_block)
    stages: list[list[LayerOption]] = []
    first = 0
    for count in counts:
        left = count if setting.recomputed is None else setting.recomputed
        options = []
        for index in range(first, first + count):
            wanted: Recompute = recompute if is_block[index] and left > 0 else "none"
            left -= is_block[index]
            option = costs.options(costs.kinds[index], shape, wanted, shape.reshard)[0]
            away = is_block[index] and index - before < setting.offloaded
            options.append(replace(option, offload=True) if away else option)
        stages.append(options)
        first += count
    return make_plan(profile, cluster, training, shape, stages)
