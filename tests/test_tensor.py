"""Tensor parallelism: exact shards, one collective per distinct input, and refusals before wrong numbers."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from meshwright.executor import parallelize
from meshwright.executor.parallel import tensor, tensor_collectives
from meshwright.executor.parallel.delayed_weights import DelayedWeights
from meshwright.executor.parallel.shared_gradients import SharedGradients, unwatched
from meshwright.executor.parallel.tensor_forwards import SharedInput
from meshwright.executor.parallel.tensor_layout import ParameterCut, TensorLayout
from meshwright.planner.plan.document import ClassPlan, Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.ranks import RankError, run_ranks
from support.synthetic import cluster

VOCABULARY, SEQ_LEN = 1024, 16


def _build() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _batch(size: int, seq_len: int = SEQ_LEN) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (size, seq_len), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


@functools.cache
def _profile() -> ModelProfile:
    return trace(load_model(_build, batch=_batch))


def _plan(
    degree: int = 2, sequence: bool = False, option: LayerOption | None = None, num_microbatches: int = 1
) -> Plan:
    shape = Shape(1, 1, degree, 1, 2 // num_microbatches, num_microbatches, sequence=sequence)
    training = TrainingSpec(global_batch=2, seq_len=SEQ_LEN, precision="fp32")
    options = [
        option if option is not None and layer.modules == (layer.root,) else LayerOption()
        for layer in _profile().layers
    ]
    return make_plan(_profile(), cluster(1, degree), training, shape, [options])


def test_shard_of_fused_parameter_has_a_slice_of_every_part() -> None:
    full = torch.arange(12).view(12, 1)

    shard = ParameterCut(dim=0, parts=(4, 4, 4), degree=2).local(full, rank=1)

    assert shard.flatten().tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("parts", [(12,), (4, 4, 4), (8, 2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_make_the_whole_parameter(parts: tuple[int, ...], dim: int) -> None:
    shape = (12, 5) if dim == 0 else (5, 12)
    full = torch.arange(60).view(shape)
    cut = ParameterCut(dim, parts, degree=2)

    assert torch.equal(cut.full([cut.local(full, rank) for rank in range(2)]), full)


def _collectives(plan: Plan) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(tensor_collectives, name)

        def call(*args: Any) -> torch.Tensor:
            counts[name] += 1
            counts["pending"] += isinstance(args[-1], tensor_collectives.PendingCollective)
            return original(*args)

        return call

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(tensor_collectives, name, counted(name))
    trainer = parallelize(_build, plan, functools.partial(torch.optim.SGD, lr=0.1))
    trainer.step(_batch(2))
    return counts


@pytest.mark.slow
def test_columns_that_read_one_tensor_share_its_collective() -> None:
    counts = run_ranks(_collectives, 2, _plan())[0]

    # Per block: attention and MLP forward, attention and MLP backward. Embedding forward; head backward.
    # Those of backward stay pending.
    assert counts == {"all_reduce": 2 * 4 + 2, "pending": 2 * 2 + 1}


def test_sequence_parallelism_gathers_and_scatters_at_the_cuts() -> None:
    counts = run_ranks(_collectives, 2, _plan(sequence=True))[0]

    # Per block: 2 gathers and 2 scatters forward, and the other way round backward. Where slices begin, a gather
    # backward; where they end, one forward. Embedding and head as without sequence parallelism.
    # What scatters backward stays pending, as does the head's sum.
    assert counts == {"all_gather": 2 * 4 + 2, "reduce_scatter": 2 * 4, "all_reduce": 2, "pending": 2 * 2 + 1}


def test_recompute_repeats_forward_collectives() -> None:
    counts = run_ranks(_collectives, 2, _plan(option=LayerOption("full")))[0]

    # The block's last reduction is not repeated: recompute stops when everything that was saved is there.
    assert counts["all_reduce"] == 2 * 5 + 2


def _lengthened(plan: Plan) -> None:
    trainer = parallelize(_build, plan, functools.partial(torch.optim.SGD, lr=0.1))
    trainer.step(_batch(2, seq_len=2 * SEQ_LEN))


def test_another_length_than_planned_is_refused_under_sequence_parallelism() -> None:
    with pytest.raises(RankError, match=r"has 32 tokens, but the plan gives ranks slices of sequences of 16"):
        run_ranks(_lengthened, 2, _plan(sequence=True))


def _with_classes(plan: Plan, *changed: ClassPlan) -> Plan:
    names = {c.name for c in changed}
    return plan.model_copy(update={"classes": (*changed, *(c for c in plan.classes if c.name not in names))})


def _start(plan: Plan) -> None:
    parallelize(_build, plan, functools.partial(torch.optim.SGD, lr=0.1))


def test_tied_parameters_cut_in_one_place_only_are_refused() -> None:
    with pytest.raises(RankError, match="tied parameters must be cut alike"):
        run_ranks(_start, 2, _with_classes(_plan(), ClassPlan(name="head")))


def test_degree_that_does_not_divide_is_refused() -> None:
    plan = _plan()
    block = next(c for c in plan.classes if "attention" in {cut.kind for cut in c.cuts})
    attention = next(cut for cut in block.cuts if cut.kind == "attention")
    column = attention.columns[0]
    broken = attention.model_copy(update={"parts": {column: (31, 1)}})

    with pytest.raises(RankError, match=r"q_proj\.weight of 32 along dim 0 .* is not divisible by tensor=2"):
        run_ranks(_start, 2, _with_classes(plan, block.model_copy(update={"cuts": (broken,)})))


class _Gated(nn.Module):
    """Between columns and row, features meet a parameter, or something computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, gated: bool = False, twice: bool = False) -> torch.Tensor:
        y = self.up(x) * (1 + self.scale.double().float())
        y = self.down(y * self.gate(x) if gated else y)
        return self.gate(y * self.scale if twice else y)


def _watched(**how: bool) -> set[str]:
    module, layout = _Gated(), TensorLayout()
    module.up.forward = unwatched(module.up.forward, differs=True)  # type: ignore[method-assign]
    module.down.forward = unwatched(module.down.forward, differs=False)  # type: ignore[method-assign]
    with SharedGradients(module, layout):
        module(torch.ones(2, 4), **how)
    return layout.partial


def test_parameter_between_columns_and_row_is_found() -> None:
    assert _watched() == {"scale"}


def test_weights_whose_gradient_is_put_off_are_not_taken_for_shared_where_a_mode_sees_operators() -> None:
    module, layout = _Gated(), TensorLayout()
    module.up.forward = unwatched(module.up.forward, differs=True)  # type: ignore[method-assign]
    module.down.forward = unwatched(module.down.forward, differs=False)  # type: ignore[method-assign]

    with FlopCounterMode(display=False), SharedGradients(module, layout):  # type: ignore[no-untyped-call]
        y = module(torch.ones(2, 4))
        # As zero-bubble schedules do, from a node of the graph.
        start, end = (get_gradient_edge(x) for x in (y, module.down.weight))
        (module.down.weight.grad,) = torch.autograd.grad([start], [end], [torch.ones_like(y)])

    assert layout.partial == {"scale"}


def test_activation_that_enters_between_columns_and_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"joins features .* with a whole tensor of \(2, 1\)"):
        _watched(gated=True)


def test_parameter_inside_and_outside_of_a_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale is read between features .* and outside"):
        _watched(twice=True)


def test_a_slice_that_a_module_is_given_twice_is_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []
    monkeypatch.setattr(tensor, "call", lambda function, x, dim, group, pending: gathered.append(x) or x.repeat(2, 1))
    region = tensor._Region.__new__(tensor._Region)
    monkeypatch.setattr(region, "_length", lambda x: (0, 4) if isinstance(x, torch.Tensor) else None, raising=False)
    region.group = None  # type: ignore[assignment]
    shared = SharedInput(None, DelayedWeights([]))
    x, other = torch.ones(2, 3), torch.zeros(2, 3)

    (query, key, scale), more = region.gather_sum(shared, nn.Identity(), (x, x, 2), {"value": other})

    assert [id(each) for each in gathered] == [id(x), id(other)]
    assert query is key
    assert (query.shape, more["value"].shape, scale) == ((4, 3), (4, 3), 2)
