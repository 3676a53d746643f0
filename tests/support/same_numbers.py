"""Training by a plan beside plain PyTorch in one process: the cases, the plans, the numbers of both and their errors.

Errors are max|a - b| / max|a| per tensor. AdamW divides by |g| + eps, which with the usual eps of 1e-8 makes full-sized
steps of the rounding noise in gradients that are zero by mathematics, in one process as well; eps is 1e-4 here: a tenth
of a typical gradient and 10^4 times the noise. Parameters start random throughout, so that no bias hides behind a zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import nn

from meshwright.executor import Trainer, parallelize
from meshwright.planner.plan.document import AXES, Plan, Recompute, parts_of
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.model.model_profile import LayerProfile, ModelProfile
from support.synthetic import cluster

GLOBAL_BATCH = 8
SEQ_LEN = 16
MAX_NORM = 0.5
TOLERANCE = 1e-5
SEED = 3

Samples = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One plan for one of a test's models; stages: layers per stage; recompute: of all layers, or of one after the
    other; offload: of what layers that are one module keep; more: fields of the shape; fault: a mistake that must not
    go unseen."""

    model: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    stages: tuple[int, ...] = ()
    num_microbatches: int = 2
    virtual: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    recompute: Recompute | tuple[Recompute, ...] = "none"
    reshard: bool = False
    offload: bool = False
    precision: Precision = "fp32"
    fault: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of the plan."""
        each = self.replicate * self.shard * self.tensor * self.more.get("context", 1)
        return each * max(1, len(self.stages) // self.virtual)


@dataclass(frozen=True)
class Numbers:
    """What training gave: per step, then the last step's clipped gradients and the final parameters."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def randomised(model: nn.Module) -> nn.Module:
    """The model with all parameters drawn anew."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def next_tokens(vocabulary: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A model file's batch(size, seq_len): tokens, and the ones that follow."""

    def batch(size: int, seq_len: int = SEQ_LEN) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(vocabulary, (size, seq_len + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def samples(vocabulary: int, num_steps: int) -> Samples:
    """Samples of so many steps, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (num_steps * GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in tokens]


def loss(output: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy in fp32 of logits, which may be an attribute of the output."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose steps do not grow out of noise; fused, which is one operator for all sharded parameters."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True)


def plan_of(case: Case, profile: ModelProfile) -> Plan:
    """The plan of a case."""
    shape = Shape(
        data_replicate=case.replicate,
        data_shard=case.shard,
        tensor=case.tensor,
        pipeline=max(1, len(case.stages) // case.virtual),
        virtual_stages=case.virtual,
        micro_batch=GLOBAL_BATCH // (case.replicate * case.shard) // case.num_microbatches,
        num_microbatches=case.num_microbatches,
        **{"schedule": "1f1b" if case.stages else "none", "mesh_axes": AXES, **case.more},
    )
    layers = iter(profile.layers)
    option = LayerOption(reshard=case.reshard)
    kinds = (case.recompute,) if isinstance(case.recompute, str) else case.recompute
    kind = cycle(kinds)
    stages = [
        [
            replace(option, recompute=next(kind), offload=case.offload)
            if layer.modules == (layer.root,) and has_parts(layer, *kinds)
            else option
            for _, layer in zip(range(size), layers, strict=False)
        ]
        for size in case.stages or (len(profile.layers),)
    ]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN, precision=case.precision, expert_imbalance=1.0)
    return make_plan(profile, cluster(1, case.num_ranks), training, shape, stages)


def has_parts(layer: LayerProfile, *recomputes: Recompute) -> bool:
    """Whether a layer has parameters in all the parts that these name, if they name any."""
    return all(
        any(name.startswith(f"{layer.root}.{part}.") for name in layer.parameters)
        for recompute in recomputes
        for part in parts_of(recompute)
    )


def trainer_of(build: Callable[[], nn.Module], plan: Plan) -> Trainer:
    """A trainer of a model as it trains in one process, too."""
    return parallelize(build, plan, adamw, loss=loss, seed=SEED, max_grad_norm=MAX_NORM)


def numbers_of(trainer: Trainer, given: Samples) -> Numbers:
    """What training on these samples gives, or on what is left of them after a checkpoint."""
    metrics = [trainer.step(batch) for batch in trainer.loader(given)]
    losses, norms = [m.loss for m in metrics], [m.grad_norm for m in metrics]
    return Numbers(losses, norms, trainer.named_gradients(), trainer.full_state_dict())


def numbers_of_one_process(build: Callable[[], nn.Module], given: Samples) -> Numbers:
    """Plain PyTorch, the whole global batch at once."""
    torch.manual_seed(SEED)
    model = build()
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for start in range(0, len(given), GLOBAL_BATCH):
        batch = torch.utils.data.default_collate(given[start : start + GLOBAL_BATCH])
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch)
        value.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(value.item())
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return Numbers(losses, norms, gradients, model.state_dict())


def errors(found: Numbers, expected: Numbers, gradient_floor: float, parameter_floor: float = 0.0) -> dict[str, float]:
    """Relative errors: loss, norm, worst gradient and worst parameter (named). gradient_floor: a tensor counts as at
    least so large, as a share of the largest gradient; parameter_floor: the same of parameters, absolute."""
    largest = max(g.abs().max().item() for g in expected.gradients.values())
    relative = {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(expected.losses, found.losses, strict=True)),
        "norm": max(abs(a - b) / abs(a) for a, b in zip(expected.norms, found.norms, strict=True)),
    }
    assert found.state.keys() == expected.state.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    for kind, ours, theirs, floor in (
        ("gradient", found.gradients, expected.gradients, gradient_floor * largest),
        ("parameter", found.state, expected.state, parameter_floor),
    ):
        worst = max(
            ((a - ours[name]).abs().max().item() / max(a.abs().max().item(), floor), name) for name, a in theirs.items()
        )
        relative[f"{kind} {worst[1]}"] = worst[0]
    return relative
