"""Logits cut by their vocabulary stay so: the loss is computed between ranks, and is that of one process."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.executor import parallelize
from meshwright.executor.measuring.verify import VerifyReport, beside_one_process
from meshwright.executor.parallel.tensor_loss import RanksOfGroup
from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.legality import can_recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import Precision, TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.loaded import LoadedModel
from meshwright.profiler.model.model_profile import ModelProfile, TensorCut
from meshwright.profiler.model.trace import trace
from meshwright.profiler.semantics.logit_shards import shard_logits
from support import slow
from support.ranks import RankError, run_ranks
from support.small_models import CLASSES, GLOBAL_BATCH, VOCABULARY, WIDTH, small_model, small_profile
from support.synthetic import cluster

NUM_STEPS = 5
ROWS, LENGTH, TOTAL = 3, 5, 8

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _flat(logits: torch.Tensor, targets: torch.Tensor, **more: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten(), **more)


LOSSES: dict[str, Loss] = {
    "mean": _flat,
    "sum": partial(_flat, reduction="sum"),
    "each": lambda x, t: _flat(x, t, reduction="none").square().sum(),
    "smoothed": partial(_flat, label_smoothing=0.1),
    "another ignored": partial(_flat, ignore_index=3),
    "classes in the middle": lambda x, t: functional.cross_entropy(x.transpose(1, 2), t),
    "shifted, in fp32, scaled": lambda x, t: _flat((x.float() / 2)[..., :-1, :].contiguous(), t[..., 1:]),
    "one sample": lambda x, t: functional.cross_entropy(x[1], t[1]),
    "some tokens": lambda x, t: functional.cross_entropy(x[t > 2], t[t > 2]),
    "soft cap": lambda x, t: _flat(5.0 * torch.tanh(x / 5.0), t),
    "class weights": lambda x, t: _flat(x, t, weight=torch.arange(1.0, TOTAL + 1).to(x.dtype)),
    "squared normaliser": lambda x, t: _flat(x, t) + 0.1 * x.logsumexp(-1).square().mean(),
    "probabilities": lambda x, t: _flat(x, t) + x.softmax(-1)[..., 2].mean(),
    "of length one": lambda x, t: _flat(functional.normalize(x, dim=-1), t),
}
"""The last four need all classes at once."""


def _differences() -> dict[str, float]:
    """Of losses and of gradients from what plain logits give, on this rank."""
    ranks = RanksOfGroup(dist.group.WORLD)  # type: ignore[arg-type]
    torch.manual_seed(0)
    logits = (4 * torch.randn(ROWS, LENGTH, TOTAL, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(TOTAL, (ROWS, LENGTH))
    targets[0, 1] = -100
    found = {}
    for name, loss in LOSSES.items():
        own_targets = targets.clamp(min=0) if name == "another ignored" else targets
        expected = loss(logits, own_targets)
        [gradient] = torch.autograd.grad(expected, logits)
        own = logits.detach().chunk(ranks.count, -1)[ranks.rank].clone().requires_grad_()
        made = loss(shard_logits(own * 1, ranks), own_targets)
        [own_gradient] = torch.autograd.grad(made, own)
        gap = (own_gradient - gradient.chunk(ranks.count, -1)[ranks.rank]).abs().max()
        found[name] = max(float((made - expected).abs()), float(gap))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_loss_and_gradients_of_shards_are_those_of_all_logits(num_ranks: int) -> None:
    differences = [rank for found in run_ranks(_differences, num_ranks) for rank in found.items()]

    assert len(differences) == num_ranks * len(LOSSES)
    assert [(name, gap) for name, gap in differences if gap > 1e-6] == []


def _written() -> None:
    x = shard_logits(torch.zeros(2, 4), RanksOfGroup(dist.group.WORLD))  # type: ignore[arg-type]
    x[:, 0] = 1.0


def test_writing_into_single_classes_is_refused() -> None:
    with pytest.raises(RankError, match="__setitem__ writes into logits whose classes are divided"):
        run_ranks(_written, 2)


def _head(profile: ModelProfile) -> TensorCut:
    [cut] = [cut for c in profile.classes for cut in c.cuts if cut.kind == "head"]
    return cut


@pytest.mark.parametrize(
    "name",
    slow.but_these(["llama", "mixtral", "large vocabulary", "vit", "auxiliary", "lstm"], {"lstm"}),
)
def test_logits_stay_cut_up_to_a_cross_entropy(name: str) -> None:
    assert _head(small_profile(name)).stays_cut


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _features(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))


NEED_ALL: dict[str, Loss] = {
    "class weights": lambda x, t: functional.cross_entropy(x, t, weight=torch.arange(1.0, CLASSES + 1).to(x)),
    "squares": lambda x, t: functional.cross_entropy(x, t) + x.logsumexp(-1).square().mean(),
    "written": lambda x, t: functional.cross_entropy(x.masked_fill_(torch.arange(CLASSES) == 1, -9.0), t),
}


def _on_batch(loss: Loss, output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss(output, batch[1])


@cache
def _net(loss: str) -> LoadedModel:
    return load_model(_Net, batch=_features, loss=partial(_on_batch, NEED_ALL.get(loss, functional.cross_entropy)))


@pytest.mark.parametrize("loss", NEED_ALL)
def test_logits_are_gathered_for_a_loss_that_needs_all_classes(loss: str) -> None:
    assert not _head(trace(_net(loss))).stays_cut


def _planned(profile: ModelProfile, shape: Shape, recompute: Recompute = "none", precision: Precision = "fp32") -> Plan:
    count = len(profile.layers)
    options = [
        LayerOption(recompute if can_recompute(profile, layer) else "none", shape.reshard) for layer in profile.layers
    ]
    ends = [round(i * count / shape.pipeline) for i in range(shape.pipeline + 1)]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, seq_len=profile.seq_len, precision=precision, optimizer="adamw")
    stages = [options[first:last] for first, last in pairwise(ends)]
    return make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, stages)


def _shape(replicate: int = 1, shard: int = 1, tensor: int = 2, pipeline: int = 1, **more: Any) -> Shape:
    count = GLOBAL_BATCH // (2 * replicate * shard)
    return Shape(replicate, shard, tensor, pipeline, 2, count, **more)


PIPELINE = {"pipeline": 2, "schedule": "1f1b"}

TRAINED: dict[str, tuple[str, Shape, Recompute]] = {
    "own loss, tied, replicas": ("large vocabulary", _shape(2), "none"),
    "own loss, tied, shards, stages, recompute": ("large vocabulary", _shape(shard=2, **PIPELINE), "selective"),
    "loss in the model, shards, stages, slices, recompute": (
        "llama",
        _shape(shard=2, sequence=True, reshard=True, **PIPELINE),
        "full",
    ),
    "loss in the model, parts of sequences and slices of these": ("llama", _shape(context=2, sequence=True), "none"),
    "loss of two parts, four ranks": ("auxiliary", _shape(tensor=4), "none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_a_loss_between_ranks_gives_the_numbers_of_one_process(case: str) -> None:
    name, shape, recompute = TRAINED[case]
    loaded, plan = small_model(name), _planned(small_profile(name), shape, recompute)
    assert _head(small_profile(name)).stays_cut
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        batches = [loaded.batch(GLOBAL_BATCH) for _ in range(NUM_STEPS)]

    report = beside_one_process(VerifyReport(case, (), {}), plan, loaded, batches, timeout_s=120.0)

    assert report.ok, [*report.lines, report.detail]


class _Gathered(TorchDispatchMode):
    """Notes the largest tensor that any operator makes, and calls of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives.append(func._overloadpacket.__name__)
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.largest = max(self.largest, x.numel())
        return out


def _largest(plan: Plan) -> tuple[int, int]:
    """(elements of the largest tensor in a step, gathers in it)."""
    loaded = small_model("large vocabulary")
    trainer = parallelize(loaded.build, plan, torch.optim.AdamW, loaded.loss, device="cpu")
    batch = loaded.batch(GLOBAL_BATCH)
    trainer.step(batch)
    with _Gathered() as seen:
        trainer.step(batch)
    trainer.close()
    return seen.largest, sum("gather" in name for name in seen.collectives)


@pytest.mark.slow
def test_no_rank_ever_has_all_logits() -> None:
    profile = small_profile("large vocabulary")
    shape = Shape(1, 1, 2, 1, GLOBAL_BATCH, 1)
    seq_len = profile.seq_len
    assert seq_len is not None

    found = run_ranks(_largest, 2, _planned(profile, shape))

    assert found == [(GLOBAL_BATCH * seq_len * 64 * VOCABULARY // 2, 0)] * 2


def _kinds(profile: ModelProfile) -> Iterator[tuple[str, float]]:
    costs = profile.classes[profile.layers[-1].layer_class].tensor
    assert costs is not None
    for c in costs.collectives:
        yield c.kind, c.tensor.at(1, 4)


def test_the_loss_is_priced_by_numbers_per_token() -> None:
    profile = small_profile("large vocabulary")
    seq_len = profile.seq_len
    assert seq_len is not None

    hidden = 4 * seq_len * WIDTH
    assert sorted(_kinds(profile)) == [("all_reduce", 4 * seq_len), ("all_reduce", 8 * seq_len), ("all_reduce", hidden)]


def test_a_rank_keeps_its_share_of_the_logits() -> None:
    costs = small_profile("large vocabulary").classes[-1].tensor
    assert costs is not None

    one, four = (costs.saved.at(8, 4, tensor) + costs.backward_transient.at(8, 4, tensor) for tensor in (1, 4))

    assert four == pytest.approx(one / 4, rel=0.02)
