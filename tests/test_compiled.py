"""torch.compile of layers: under every kind of parallelism the numbers of eager layers, and what is refused."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from meshwright.executor import parallelize
from meshwright.executor.parallel.compiled import backend_of, compile_around_parts, compile_layers
from meshwright.executor.parallel.recompute import recompute
from meshwright.planner.plan.document import Plan, Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.parted import LENGTH, SAMPLES, WIDTH, Parted, one_layer
from support.ranks import run_ranks
from support.same_numbers import has_parts
from support.small_models import small_profile, verified
from support.small_net import GLOBAL_BATCH, Net, assert_same, batch_of, loss, sgd
from support.synthetic import cluster

SOFTWARE = "fsdp2-compile"


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    torch.compile(Net(), backend="aot_eager")(batch_of(1)[0])  # imports the compiler once, before ranks are forked
    return trace(load_model(Net, batch=batch_of, loss=loss))


def plan_of(
    profile: ModelProfile, option: LayerOption | None = None, stages: tuple[int, ...] = (4,), **changes: Any
) -> Plan:
    degrees = {"data_replicate": 1, "data_shard": 1, "tensor": 1} | changes
    schedule = changes.pop("schedule", "1f1b" if len(stages) > 1 else "none")
    shape = Shape(
        **degrees | {"pipeline": len(stages), "schedule": schedule},
        micro_batch=GLOBAL_BATCH // degrees["data_replicate"] // degrees["data_shard"] // 2,
        num_microbatches=2,
    )
    option, layers = option or LayerOption(), iter(profile.layers)
    options = [
        [
            option if has_parts(layer, option.recompute) else replace(option, recompute="none")
            for _, layer in zip(range(size), layers, strict=False)
        ]
        for size in stages
    ]
    training = TrainingSpec(global_batch=GLOBAL_BATCH, precision="fp32", software=SOFTWARE)
    return make_plan(profile, cluster(1, shape.degrees.num_devices), training, shape, options)


def _two_steps(plan: Plan, backend: str) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after two steps, and how many graphs were compiled."""
    counters.clear()
    trainer = parallelize(Net, plan, sgd, loss=loss, compile=backend)
    batch = batch_of(GLOBAL_BATCH)
    share = next(iter(trainer.loader(list(zip(*batch, strict=True)))))
    trainer.step(share)
    trainer.step(share)
    return trainer.full_state_dict(), counters["stats"]["unique_graphs"]


def eager() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        x, targets = batch_of(GLOBAL_BATCH)
        optimizer.zero_grad()
        loss(model(x), (x, targets)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "degrees"),
    [
        (LayerOption(), {"data_replicate": 2}),
        (LayerOption("full", reshard=True), {"data_shard": 2}),
        (LayerOption("full"), {"tensor": 2}),
        (LayerOption(), {"stages": (2, 2)}),
        (LayerOption("parts:0+2", reshard=True), {"data_shard": 2}),
        (LayerOption("parts:0+2"), {"tensor": 2}),
    ],
    ids=["ddp", "fsdp with recompute", "tp with recompute", "pp", "fsdp with parts", "tp with parts"],
)
def test_compiled_layers_give_the_numbers_of_eager_ones(
    profile: ModelProfile, option: LayerOption, degrees: dict[str, Any]
) -> None:
    found, num_graphs = run_ranks(_two_steps, 2, plan_of(profile, option, **degrees), "aot_eager")[0]

    assert (num_graphs > 0) == ("tensor" not in degrees)  # a cut module breaks the loop of a Sequential, which is eager
    assert_same(found, eager())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "parts:input_layernorm+self_attn+mlp"])
def test_spread_experts_inside_of_compiled_layers_give_the_numbers_of_one_process(recompute: Recompute) -> None:
    mixture = small_profile("mixtral")
    shape = Shape(
        data_replicate=1, data_shard=2, tensor=1, pipeline=1, micro_batch=4, num_microbatches=2, expert=2,
        gradient_sync="every",
    )  # fmt: skip
    options = [LayerOption(recompute if has_parts(layer, recompute) else "none") for layer in mixture.layers]
    training = TrainingSpec(global_batch=16, precision="fp32", software=SOFTWARE)
    plan = make_plan(mixture, cluster(1, 2), training, shape, [options])

    report = verified("mixtral", plan, compile="aot_eager")

    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor compiles for the CPU by a C++ compiler; there is no g++"
)
def test_inductor_gives_the_numbers_of_eager_layers(profile: ModelProfile) -> None:
    plan = plan_of(profile, LayerOption("full", reshard=True), data_shard=2)
    found, num_graphs = run_ranks(_two_steps, 2, plan, "inductor")[0]

    assert num_graphs > 0
    assert_same(found, eager())


@pytest.mark.slow
def test_selective_recompute_keeps_a_layer_eager(profile: ModelProfile) -> None:
    found, num_graphs = run_ranks(_two_steps, 1, plan_of(profile, LayerOption("selective")), "aot_eager")[0]

    assert num_graphs == 0
    assert_same(found, eager())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # the compiler's own look at it
def test_parts_and_what_lies_around_them_are_compiled_apart() -> None:
    """Each part by itself, and the rest in as many pieces as they leave of it; numbers as of the layer uncompiled."""
    runs = []
    for how in ("none", "parts:norm+attention", "eager"):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.ModuleDict({"0": Parted()})
        layer = one_layer("none" if how == "eager" else how)
        made = [] if how == "eager" else compile_layers(model, [layer], "aot_eager")
        recompute(model["0"], layer.recompute)
        made += compile_around_parts(model, [layer], "aot_eager")
        for forward in made:
            forward.on = True
        output = model["0"](torch.linspace(-1, 1, SAMPLES * LENGTH * WIDTH).view(SAMPLES, LENGTH, WIDTH))
        output.square().sum().backward()
        runs.append((len(made), dict(counters["stats"]), [output, *(p.grad for p in model.parameters())]))

    (whole, once, plain), (apart, pieces, parts), (_, _, expected) = runs
    assert (whole, apart) == (1, 3)
    assert pieces["unique_graphs"] > once["unique_graphs"] == 1
    assert pieces["calls_captured"] == once["calls_captured"]
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(parts, expected)


def test_a_plan_for_the_compiling_stack_is_compiled(profile: ModelProfile) -> None:
    plan = plan_of(profile)
    eagerly = plan.model_copy(update={"training": plan.training.model_copy(update={"software": "fsdp2-eager"})})

    assert (backend_of(None, plan), backend_of(False, plan), backend_of("aot_eager", plan)) == (
        "inductor",
        None,
        "aot_eager",
    )
    assert (backend_of(None, eagerly), backend_of(True, eagerly)) == (None, "inductor")


def test_a_backward_in_two_parts_is_refused(profile: ModelProfile) -> None:
    with pytest.raises(ValueError, match=r"zb-h1 does a layer's backward in two parts.* 1f1b or interleaved"):
        backend_of(True, plan_of(profile, stages=(2, 2), schedule="zb-h1"))
