"""The layer-wise choice alone: the best options of every layer of one shape, on devices of less and of more memory."""

import statistics
import time
from dataclasses import dataclass

from meshwright.planner.cost.chain import Chain
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.columns import StagePrices
from meshwright.planner.solve.scan import scan
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile

SHAPE = Shape(1, 8, 1, 1, micro_batch=1, num_microbatches=8, gradient_sync="every")
"""Eight GPUs that share their shards, as little as possible of each micro-batch."""

GPUS = ("a100-40gb", "a100-80gb")
"""Of less and of more memory."""

RUNS = 15
"""In turns, on one device and on the other."""


@dataclass(frozen=True)
class Choice:
    """Options of each of the most frequent layers; median seconds of the choice on GPUS."""

    options: int
    less_s: float
    more_s: float


def options_of_a_block(model: CostModel, pins: Pins) -> int:
    """Recompute x giving parameters back (x activations on the host, if those are asked for) that each layer of the
    most frequent kind chooses from."""
    block = max(set(model.kinds), key=model.kinds.count)
    return len(model.options(block, SHAPE, offered=pins.offered))


def choice(profile: ModelProfile, pins: Pins) -> Choice:
    """What the choice takes, from the coefficients to the options of every layer. Raises ValueError if nothing fits."""
    training, options = TrainingSpec(global_batch=64, seq_len=profile.seq_len), 0
    found: dict[str, list[float]] = {gpu: [] for gpu in GPUS}
    for _ in range(RUNS):
        for gpu in GPUS:
            model = CostModel(profile, cluster_of(load_device(gpu), SHAPE.data), training)
            options = options_of_a_block(model, pins)
            begun = time.perf_counter()
            if scan(StagePrices(Chain(model), SHAPE, None, None, pins.offered)) is None:
                raise ValueError(f"{profile.name} does not fit {SHAPE.data} {gpu}")
            found[gpu].append(time.perf_counter() - begun)
    less, more = (statistics.median(found[gpu]) for gpu in GPUS)
    return Choice(options, less, more)
