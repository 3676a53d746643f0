"""Seconds of the host for each pass of a micro-batch through a pipeline stage, beside the same layers in one process.

    python -m benchmarks.execution.host_time

Layers of 16 x 16 weights, so small that all there is is the host's work: Python, autograd, the schedule, and sends and
receives. CPU time of the thread that runs the step, least of the steps, which other processes disturb least; two gloo
ranks; two numbers of micro-batches, so that what a step takes once cancels. Sends through NCCL are issued by other
code: the order of magnitude is what carries over (STAGE_S of planner/cost/software.py).
"""

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.executor import parallelize
from meshwright.executor.measuring.local_ranks import run_local_ranks
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace

RESULTS = Path(__file__).parent / "results"
SCHEDULES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1f1b"},
    "ZB-H1": {"schedule": "zb-h1"},
    "interleaved 1F1B": {"schedule": "interleaved", "virtual_stages": 2},
}
FEW, MANY = 4, 36
"""Micro-batches of a step."""

_LAYERS, _WIDTH, _STEPS, _WARM_UP = 8, 16, 12, 3


class Net(nn.Module):
    """Residual layers that compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def _batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, _WIDTH), torch.randn(size, _WIDTH)


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (output - batch[1]).pow(2).mean()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def plan_of(num_microbatches: int, **fields: Any) -> Plan:
    """On one rank, or in stages on two."""
    profile = trace(load_model(Net, batch=_batch, loss=_loss))
    degrees: dict[str, Any] = {"data_replicate": 1, "data_shard": 1, "tensor": 1, "pipeline": 1, "micro_batch": 2}
    shape = Shape(**degrees | {"num_microbatches": num_microbatches} | fields)
    training = TrainingSpec(global_batch=2 * num_microbatches, precision="fp32")
    layers, count = [LayerOption()] * len(profile.layers), shape.pipeline * shape.virtual_stages
    ends = [i * len(layers) // count for i in range(count + 1)]
    stages = [layers[a:b] for a, b in itertools.pairwise(ends)]
    return make_plan(profile, cluster_of(load_device("cpu"), shape.pipeline, shape.pipeline), training, shape, stages)


def least_s(plan: Plan) -> float:
    """CPU seconds of this rank's thread in the fastest of some steps."""
    trainer = parallelize(Net, plan, _sgd, loss=_loss, seed=0, device="cpu")
    took = []
    for _ in range(_WARM_UP + _STEPS):
        batch = _batch(trainer.samples_per_step)
        started = time.thread_time()
        trainer.step(batch)
        took.append(time.thread_time() - started)
    trainer.close()
    return min(took[_WARM_UP:])


def per_microbatch_s(**fields: Any) -> float:
    """CPU seconds of a rank for one more micro-batch, mean over the ranks."""
    ends = []
    for count in (FEW, MANY):
        plan = plan_of(count, **fields)
        each = run_local_ranks(least_s, plan.degrees.num_devices, plan, timeout_s=600.0)
        ends.append(sum(each) / len(each))
    return (ends[1] - ends[0]) / (MANY - FEW)


def main() -> int:
    """Measure each schedule; print the table, and keep it."""
    alone_s = per_microbatch_s()
    rows = []
    for name, fields in SCHEDULES.items():
        found_s = per_microbatch_s(pipeline=2, **fields)
        passes = 2 * int(fields.get("virtual_stages", 1))
        rows.append(
            {"schedule": name, "microbatch_ms": 1e3 * found_s, "stage_ms": 1e3 * (found_s - alone_s / 2) / passes}
        )
    table = [
        "# The host's time for a stage",
        "",
        f"`python -m benchmarks.execution.host_time`, torch {torch.__version__}; one process takes "
        f"{1e3 * alone_s:.2f} ms for a micro-batch of the same {_LAYERS} layers.",
        "",
        "| schedule | a rank's CPU ms for a micro-batch | beyond its layers, each way through a stage |",
        "|---|---|---|",
        *(f"| {row['schedule']} | {row['microbatch_ms']:.2f} | {row['stage_ms']:.2f} ms |" for row in rows),
    ]
    print("\n".join(table))
    (RESULTS / "host_time.md").write_text("\n".join(table) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
