"""--lora: PEFT's adapters in any model, in its profile, its plan and what verifies that; what is wrong is said."""

import json
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from benchmarks.accuracy.played import SMALLEST_BYTES, play, ranks_to_play
from meshwright.executor.commands.inputs import model_of
from meshwright.planner.answers.search import InfeasibleError, search
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.plan.document import Plan, load_plan
from meshwright.planner.plan.making import reference_of, shape_of
from meshwright.planner.plan.not_run import not_run
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.adapters import Adapters, read_adapters, with_lora
from meshwright.profiler.model.frozen import in_bf16
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.source import file_of
from meshwright.profiler.model.trace import trace
from support.cli import run_plan
from support.synthetic import layer_class, with_experts
from support.synthetic import profile as synthetic

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def net(width):
    return nn.Sequential(nn.Embedding(64, width), *(Block(width) for _ in range(3)), nn.Linear(width, 64))

def model():
    return net(32)

def small():
    return net(16)

def batch(size):
    tokens = torch.randint(64, (size, 9))
    return tokens[:, :-1], tokens[:, 1:]

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
"""

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return "net.py"


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return "config.json"


def test_what_is_said_is_read_and_written_alike() -> None:
    adapters = Adapters(16, 32, 0.05, ("q_proj", "v_proj"))

    assert read_adapters("r=16, alpha=32,dropout=0.05,targets=q_proj+v_proj") == adapters
    assert read_adapters(str(adapters)) == adapters
    assert read_adapters(str(Adapters(4, base="nf4"))) == Adapters(4, base="nf4")
    assert read_adapters({"r": 16, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}) == adapters
    assert with_lora("a/model.py", "r=4") == "a/model.py@lora:r=4"
    assert file_of("a/config.json@vocab%128@lora:r=4,targets=a+b") == Path("a/config.json")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("rank=16", "--lora rank=16: It takes r, alpha, dropout, targets, base, as in --lora r=16,alpha=32"),
        ("r=4,alpah=8", "Did you mean alpha?"),
        ("16", "'16' is no key=value"),
        ("", "'' is no key=value"),
        ("alpha=16", "says no r, the rank"),
        ("r=0", "r=0: give a whole number of at least 1"),
        ("r=4,r=8", "says r twice: 4 and 8"),
        ("r=4,dropout=1", "at least 0 and less than 1"),
        ("r=4,targets=a++b", "names of linear layers with + between them"),
        ("r=4,targets=all-linear+a", "leave out the other names"),
        ("r=4,base=int8", "base=int8: give base=bf16 for a base in 16 bits, base=nf4 for one in 4 (QLoRA)"),
    ],
)
def test_what_cannot_be_read_is_told_with_an_example(said: str, reason: str) -> None:
    with pytest.raises(ValueError, match="--lora") as raised:
        read_adapters(said)

    assert reason in str(raised.value)


def test_without_peft_the_command_that_installs_it_is_told(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)

    assert run_plan(net, "--lora", "r=4", "--gpus", "2", "--device", "cpu") == 2

    assert "pip install 'meshwright[lora]'" in " ".join(capsys.readouterr().err.split())
    assert not Path("plan.json").exists()


def test_adapters_go_with_a_model_that_has_not_got_them_yet(net: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    mw.profile(net, lora="r=4", cache=False).save(tmp_path / "profile.json")

    with pytest.raises(ValueError, match=r"what adapters it has: give the model itself to --lora"):
        mw.plan("profile.json", gpus=2, lora="r=4")
    with pytest.raises(ValueError, match=r"says its adapters already: leave out --lora"):
        mw.plan("net.py@lora:r=4", gpus=2, lora="r=8")


def test_a_plain_module_gets_adapters_at_all_linear_layers_but_the_last(net: str) -> None:
    pytest.importorskip("peft")
    profile = trace(load_model(net, lora="r=4"))

    trained = {p.name for found in profile.classes for p in found.parameters if p.trainable}
    assert trained == {f"{name}.lora_{which}.default.weight" for name in ("up", "down") for which in "AB"}
    assert profile.num_parameters - trace(load_model(net)).num_parameters == 3 * 2 * 4 * (32 + 128)
    assert profile.source == "net.py@lora:r=4"


def test_a_target_that_is_not_there_is_told_with_those_that_are(net: str) -> None:
    pytest.importorskip("peft")

    with pytest.raises(ValueError, match=r"targets=upp: net\.py has no such layer\. Did you mean up\?"):
        load_model(net, lora="r=4,targets=upp+down").build()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_what_is_trained_of_a_hugging_face_model_is_what_peft_chooses_and_its_layers_are_found(llama: str) -> None:
    peft = pytest.importorskip("peft")
    plain, profile = trace(load_model(llama)), trace(load_model(llama, lora="r=4"))

    with torch.device("meta"):
        made = peft.get_peft_model(load_model(llama).build(), peft.LoraConfig(r=4))
    assert [f"base_model.model.{layer.name}" for layer in plain.layers[1:-1]] == [
        layer.name for layer in profile.layers[1:-1]
    ]
    assert profile.num_parameters == sum(p.numel() for p in made.parameters())
    block = profile.classes[profile.layers[2].layer_class]
    assert [cut.kind for cut in block.cuts] == ["attention", "mlp"]
    assert "self_attn.q_proj.lora_B.default" in block.cuts[0].columns


def test_a_module_gets_adapters_too() -> None:
    pytest.importorskip("peft")

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 8), torch.randn(size, 8)

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    found = mw.plan(model, batch=batch, loss=_squares, gpus=2, device="cpu", global_batch=8, lora={"r": 2})

    assert found.profile.num_parameters == 3 * 72 + 2 * 2 * 16
    assert not any(hasattr(each, "lora_A") for each in model.modules())


def _squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (output - batch[1]).square().mean()


def test_a_plan_remembers_its_adapters(net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    flags = ("--gpus", "2", "--device", "cpu", "-b", "8", "-q", "--pin", "pipeline=1", "--pin", "tensor=1")
    assert run_plan(net, *flags, "-o", "plain.json") == 0
    assert run_plan(net, *flags, "--lora", "r=4,targets=up", "-o", "plan.json") == 0

    plan = load_plan(Path("plan.json"))
    assert plan.model.source == "net.py@lora:r=4,targets=up"
    assert plan.model.fingerprint != load_plan(Path("plain.json")).model.fingerprint
    assert mw.load("plan.json").profile.fingerprint == plan.model.fingerprint
    assert model_of(plan, "elsewhere/net.py") == "elsewhere/net.py@lora:r=4,targets=up"
    assert run_plan("explain", "plan.json", "--lora", "r=4") == 2
    assert (
        "the adapters (r=4,targets=up), which the model must have" in mw.load("plan.json").export("accelerate").notes[0]
    )


_FP32, _NF4, _WEIGHT = 4.0, 0.5 + 4 / 64, 32 * 128


def _planned(profile: ModelProfile, pins: Pins) -> Plan:
    training = TrainingSpec(global_batch=16, precision="bf16", seq_len=profile.seq_len)
    return search(profile, cluster_of(load_device("a100-80gb"), 4), training, pins=pins).plan


def test_frozen_linear_layers_but_the_last_are_packed_and_unpacked_before_each_product(net: str) -> None:
    pytest.importorskip("peft")
    plain, packed = (trace(load_model(net, lora=f"r=4{more}")) for more in ("", ",base=nf4"))
    names = {p.name for found in packed.classes for p in found.parameters if p.kept_as == "nf4"}
    block = packed.classes[packed.layers[1].layer_class]
    unpacking = [op for op in block.whole.operators if op.name == "dequantize_nf4"]

    assert names == {"up.base_layer.weight", "down.base_layer.weight"}
    assert packed.num_parameters == plain.num_parameters
    assert packed.fingerprint != plain.fingerprint
    assert [(op.module, op.part) for op in unpacking] == [
        (f"{name}.base_layer", part) for part in ("forward", "backward_input") for name in ("up", "down")
    ]
    assert {op.moved.at(3, 2) for op in unpacking} == {_WEIGHT * (2 + _NF4)}
    assert not block.cuts
    assert any("kept in 4 bits" in note for note in packed.notes)


@pytest.mark.parametrize(("base", "each"), [("nf4", _NF4), ("bf16", 2.0)])
@pytest.mark.parametrize(
    "pins",
    [
        Pins(data_shard=1, tensor=1, pipeline=1, micro_batch=4),
        Pins(data_shard=4, tensor=1, pipeline=1, micro_batch=4),
        Pins(data_shard=2, tensor=1, pipeline=2, micro_batch=4, schedule="1f1b"),
    ],
    ids=["whole", "sharded", "pipeline"],
)
def test_a_base_in_fewer_bits_takes_less_memory_and_is_passed_as_it_is_kept(
    net: str, base: str, each: float, pins: Pins
) -> None:
    """The same plan of both: parameters of a rank, what is gathered of a block, and room for one whole weight."""
    pytest.importorskip("peft")
    profiles = [trace(load_model(net, lora=f"r=4{more}")) for more in ("", f",base={base}")]
    plan = _planned(profiles[0], pins)
    shape, shards = shape_of(plan), plan.degrees.data_shard
    models = [CostModel(profile, plan.cluster, plan.training) for profile in profiles]
    before, after = (
        estimate(plan.model_copy(update={"model": reference_of(profile)}), profile) for profile in profiles
    )

    def in_fewer_bits(place: int) -> int:
        return sum(item.elements for item in models[1].held(models[1].kinds[place], shape) if item.bytes_kept)

    ends = list(accumulate(len(stage.layers) for stage in plan.stages))
    for first, end, now, was in zip([0, *ends], ends, after.memory, before.memory, strict=False):
        saved = was.items["parameters"] - now.items["parameters"]
        assert saved == pytest.approx(sum(map(in_fewer_bits, range(first, end))) * (_FP32 - each) / shards)
    gathered = [model.spread_of(model.kinds[1], shape)[0].gathered for model in models]
    passed = each / 2 if shards > 1 else 0.0
    assert gathered[0] - gathered[1] == pytest.approx(in_fewer_bits(1) * (1 - passed))
    forward = [model.working_bytes(model.kinds[1], shape, LayerOption())[0] for model in models]
    assert forward[1] - forward[0] == pytest.approx(2 * _WEIGHT if base == "nf4" else 0.0)
    assert (after.step_time_s > before.step_time_s) == (base == "nf4")


@pytest.mark.parametrize("base", [pytest.param("", marks=pytest.mark.slow), ",base=bf16"])
@pytest.mark.parametrize(
    "pins",
    [
        pytest.param(Pins(data_shard=4, tensor=1, pipeline=1, micro_batch=4), id="kept"),
        pytest.param(
            Pins(data_shard=2, data_replicate=2, pipeline=1, micro_batch=2, gradient_sync="every", reshard=True),
            id="given back",
            marks=pytest.mark.slow,
        ),
        pytest.param(Pins(data_shard=2, tensor=2, pipeline=1, micro_batch=2), id="cut", marks=pytest.mark.slow),
    ],
)
def test_memory_and_traffic_of_a_frozen_base_are_those_of_the_executor(net: str, pins: Pins, base: str) -> None:
    """What arrives for a forward lies beside what came before it: with gradients that is never the peak."""
    pytest.importorskip("peft")
    Path(net).write_text(NET.replace("net(32)", "net(512)"))
    loaded = load_model(net, lora=f"r=4{base}")
    profile = trace(loaded)
    plan = _planned(profile, pins)
    found = estimate(plan, profile)

    for rank in ranks_to_play(plan):
        played = play(loaded, plan, rank)
        assert found.memory[played.stage].allocated_bytes == pytest.approx(played.peak_bytes, rel=0.01)
        counted = {key: (passed.bytes, passed.calls) for key, passed in played.passed.items()}
        assert counted == {(e.axis, e.kind): (e.bytes, e.calls) for e in found.collectives if e.bytes >= SMALLEST_BYTES}


def test_where_only_a_base_in_16_bits_fits_that_is_a_way_out(net: str) -> None:
    pytest.importorskip("peft")
    Path(net).write_text(NET.replace("net(32)", "net(4096)"))
    plain, half = (trace(load_model(net, lora=f"r=4{more}")) for more in ("", ",base=bf16"))
    device = load_device("a100-80gb")
    job = TrainingSpec(global_batch=1, precision="bf16", seq_len=plain.seq_len)
    leanest = search(plain, cluster_of(device, 1), job, pins=Pins(recompute="full")).plan
    needs = [
        estimate(leanest.model_copy(update={"model": reference_of(each)}), each).memory[0].device_bytes
        for each in (plain, half)
    ]
    small = cluster_of(device.model_copy(update={"memory": sum(needs) / 2 / (1 - job.memory_margin)}), 1)

    with pytest.raises(InfeasibleError, match=r"a base in 16 bits \(--lora r=4,base=bf16\)"):
        search(plain, small, job)
    assert search(half, small, job).estimate.fits
    assert [each.parameters for each in in_bf16(plain).classes] == [each.parameters for each in half.classes]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 4, 1, 1, 1, 4),
        Shape(1, 4, 1, 1, 1, 4, expert=2),
        Shape(1, 2, 2, 1, 1, 4, expert=4, sequence=True),  # over more ranks than shard the rest
        Shape(2, 1, 2, 1, 1, 4, expert=2, sequence=True),
    ],
)
def test_frozen_experts_over_ranks_take_half_in_16_bits(shape: Shape) -> None:
    frozen = _all_frozen(synthetic([with_experts(layer_class("block", 1e9, 1_000_000, 1e6, 1e5), 4)], [0, 0, 0]))
    cluster, job = cluster_of(load_device("a100-80gb"), 4), TrainingSpec(global_batch=16, precision="bf16", seq_len=64)
    whole, half = (CostModel(each, cluster, job) for each in (frozen, in_bf16(frozen)))

    for kind in whole.kinds_of_layers:
        assert half.spread_of(kind, shape)[0].stored == pytest.approx(whole.spread_of(kind, shape)[0].stored / 2)


def _all_frozen(profile: ModelProfile) -> ModelProfile:
    classes = [
        each.model_copy(
            update={"parameters": tuple(one.model_copy(update={"trainable": False}) for one in each.parameters)}
        )
        for each in profile.classes
    ]
    return profile.model_copy(update={"classes": tuple(classes)})


def test_what_is_packed_is_priced_only_and_exported_to_those_that_run_it(
    net: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    job = ("--gpus", "2", "--device", "cpu", "-b", "8", "--pin", "pipeline=1")
    flags = (*job, "-q", "--lora", "r=4,base=nf4", "-o", "plan.json")
    assert run_plan(net, *flags) == 0
    plan = load_plan(Path("plan.json"))

    assert plan.model.name == "net-qlora-r4"
    assert not_run(plan) == {"a base in 4 bits": "one in bf16"}
    assert run_plan("verify", "plan.json") == 2
    words = "which is priced, not run yet: plan with --lora ...,base=bf16"
    assert words in " ".join(capsys.readouterr().err.split())
    assert run_plan("tune", net, *flags, "--budget", "20s") == 2
    assert f"plan tune runs what it measures: the plan has a base in 4 bits, {words}" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(ValueError, match=r"4 bits, which is priced, not run yet: plan with --lora \.\.\.,base=bf16"):
        mw.parallelize(load_model(net, lora="r=4").build, plan, torch.optim.SGD, None)
    notes = mw.load("plan.json").export("accelerate").notes
    assert any("BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in note for note in notes)
    for target in ("megatron", "torchtitan"):
        words = r"keeps no frozen weights in 4 bits; (export to [a-z ]+, or )?plan with --lora \.\.\.,base=bf16"
        with pytest.raises(ValueError, match=words):
            mw.load("plan.json").export(target)
    assert run_plan(net, *flags, "--for", "torchtitan") == 2
    assert "torchtitan keeps no frozen weights in 4 bits" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("base", ["", ",base=bf16"])
@pytest.mark.parametrize(
    "pins", ["tensor=2 data_replicate=2", "data_shard=2 pipeline=2 schedule=1f1b", "data_shard=4 pipeline=1"]
)
@pytest.mark.parametrize("model", ["net", "llama"])
def test_a_plan_with_adapters_is_verified_as_the_model_that_it_says(
    model: str, pins: str, base: str, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("peft")
    source, flags = request.getfixturevalue(model), [word for pin in pins.split() for word in ("--pin", pin)]
    lora, precision = f"r=4,dropout=0.1{base}", "bf16" if base else "fp32"

    job = ("--gpus", "4", "--device", "cpu", "-b", "8", "--precision", precision, "-q")
    assert run_plan(source, "--lora", lora, *job, *flags) == 0

    report = mw.load("plan.json").verify()
    assert report.ok, report.lines
    assert {"loss", "gradients", "parameters"} <= report.largest.keys()
