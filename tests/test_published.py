"""The scorer of published measurements: rows read and refused, put in the planner's words, priced, and summed up."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import metrics, report, score
from benchmarks.published.clusters import NETWORK_EFFICIENCY, network_bits_per_node, place
from benchmarks.published.grow import profile_of, without_padding
from benchmarks.published.models import Latent, Mixture, Sizes, loaded
from benchmarks.published.pricing import Priced, Pricer, memory_by_metric
from benchmarks.published.rows import DATA, read_folders
from benchmarks.published.settings import CannotPriceError, setting_of
from meshwright.planner.cost.estimate import Estimate, StageMemory
from meshwright.profiler.model.trace import trace
from support import slow
from support.published_rows import data, row


def priced(predicted: float | None, measured: float, fits: bool = True, **changes: Any) -> Priced:
    return Priced(row(measured__step_time_s=measured, **changes), step_s=predicted, fits=fits)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_median_of_equal_weights_lies_between_the_middle_two() -> None:
    assert metrics.quantile([4.0, 1.0, 3.0, 2.0], [1, 1, 1, 1], 0.5) == pytest.approx(2.5)


def test_weight_of_two_halves_counts_as_one_row() -> None:
    whole = metrics.quantile([1.0, 2.0, 5.0], [1, 1, 1], 0.5)

    assert metrics.quantile([1.0, 2.0, 2.0, 5.0], [1, 0.5, 0.5, 1], 0.5) == pytest.approx(whole)


def test_errors_are_logarithms_and_bias_keeps_their_sign() -> None:
    found = metrics.summary([priced(2.0, 1.0), priced(1.0, 2.0), priced(4.0, 1.0)], metrics.time_error)

    assert found is not None
    assert found.n == 3
    assert found.median == pytest.approx(math.log(2))
    assert found.mean == pytest.approx(4 / 3 * math.log(2))
    assert found.bias == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "changes", [{"scoring__score_time": False}, {"scoring__superseded": True}, {"scoring__weight": 0.0}]
)
def test_rows_that_do_not_count_have_no_error(changes: dict[str, Any]) -> None:
    assert metrics.time_error(priced(2.0, 1.0, **changes)) is None


def sweep_of(pairs: list[tuple[float, float]]) -> metrics.Sweep:
    """A sweep of one group, by (predicted, measured); each row has its own micro-batch."""
    rows = [priced(p, m, config__micro_batch=2**i, config__global_batch=512) for i, (p, m) in enumerate(pairs)]
    return metrics.sweeps(rows)[0]


def test_a_sweep_counts_for_the_median_of_tau_by_its_pairs() -> None:
    large = [priced(i, i, scoring__gpu="large", config__micro_batch=i, config__global_batch=512) for i in range(1, 8)]
    small = [
        priced(5 - i, i, scoring__gpu="small", config__micro_batch=i, config__global_batch=512) for i in range(1, 5)
    ]

    tau = report.Scores([*large, *small], without_score=0).document()["tau"]

    assert tau["median"] > 0.5
    assert tau["worst"] == -1.0


def test_tau_is_one_in_order_and_minus_one_in_reverse() -> None:
    assert sweep_of([(1, 1), (2, 2), (3, 3), (4, 4)]).tau == 1.0
    assert sweep_of([(4, 1), (3, 2), (2, 3), (1, 4)]).tau == -1.0


def test_a_tie_in_the_prediction_is_neither_right_nor_wrong() -> None:
    assert sweep_of([(1, 1), (1, 2), (3, 3), (4, 4)]).tau == pytest.approx(5 / 6)


def test_measurements_within_one_percent_are_not_put_in_order() -> None:
    assert sweep_of([(2, 1.000), (1, 1.009), (3, 2), (4, 3)]).pairs == 5


def test_repeats_of_one_configuration_are_no_pair() -> None:
    same = {"config__micro_batch": 2}

    assert metrics.sweeps([priced(1, 1, **same), priced(1, 2, **same)]) == []


def test_layouts_of_another_batch_are_not_compared() -> None:
    rows = [priced(1, 1, config__global_batch=16), priced(1, 2, config__global_batch=32)]

    assert metrics.sweeps(rows) == []


def test_regret_is_what_the_pick_costs_over_the_fastest() -> None:
    assert metrics.regret([(1.0, 1.2), (2.0, 1.0), (3.0, 5.0)]) == pytest.approx(0.2)
    assert metrics.regret([(1.0, 1.2), (1.0, 1.0)]) == pytest.approx(0.1)


def test_failures_found_and_false_alarms_are_counted_apart() -> None:
    failed = {"measured__oom": True, "measured__peak_mem_gb": None, "scoring__score_oom": True}
    rows = [priced(1, 1, False, **failed), priced(1, 1, True, **failed), priced(1, 1, False), priced(1, 1, True)]

    found = metrics.out_of_memory(rows)

    assert (found.recall, found.precision, found.false_alarm_rate) == (0.5, 0.5, 0.5)


def test_running_out_with_room_left_is_fragmentation_and_not_counted() -> None:
    half_full = {"measured__oom": True, "measured__peak_mem_gb": 58.8, "scoring__score_oom": True}

    assert metrics.out_of_memory([priced(1, 1, True, **half_full)]).failures == 0


# --- reading ---------------------------------------------------------------------------------------------------------


def test_step_time_is_published_or_follows_from_tokens_and_the_global_batch() -> None:
    speed = {"measured__step_time_s": None, "measured__tokens_per_s_per_gpu": 1000.0}

    assert row().step_s == 0.01
    assert row(**speed).step_s == pytest.approx(16 * 128 / (1000 * 8))
    assert row(**speed, config__global_batch=None, derived={"step_time_s": 3.0}).step_s == 3.0


@pytest.mark.parametrize(
    ("told", "metric"),
    [
        ("nvidia-smi GB on the first/last stage", "device"),
        ("GiB*1.0737; torch max_memory_reserved, max over ranks", "reserved"),
        ("torch max_memory_allocated, max over ranks (GiB converted to GB); reserved 70.88 GiB", "allocated"),
        ("max allocated GB (as reported)", "allocated"),
        ('paper "Memory (GB)", max over GPUs (definition not stated)', "reserved"),
    ],
)
def test_memory_is_compared_by_the_metric_that_was_measured(told: str, metric: str) -> None:
    assert row(measured__mem_metric=told).memory_metric == metric


def test_a_row_read_on_the_first_host_is_compared_with_its_stages() -> None:
    stages = [
        StageMemory(items={}, allocated_bytes=b, reserved_bytes=b, max_reserved_bytes=b, device_bytes=b, budget_bytes=9)
        for b in (3, 2, 1, 4)
    ]
    found, on_hosts = (
        Estimate.model_construct(memory=tuple(stages)),
        {"cluster__n_gpus": 8, "cluster__gpus_per_node": 4},
    )

    source = "bigscience-workshop/bigscience@9e64edec2a:experiments/tr3m-1B3.md"
    read = {"source": source, "measured__mem_metric": "nvidia-smi GB"}
    assert memory_by_metric(found, row(**on_hosts))["device"] == 4
    assert memory_by_metric(found, row(**on_hosts, **read))["device"] == 3


def test_memory_is_read_as_what_its_source_wrote() -> None:
    zero_bubble = {"source": "Zero Bubble PP Table 6"}
    undefined = {"measured__mem_metric": 'paper "Memory (GB)", max over GPUs (definition not stated)'}
    table = {"source": "pytorch/torchtitan mxfp8.md", "notes": "memory column in GB as published"}

    assert row(**undefined).memory_metric == "reserved"
    assert row(**undefined, **zero_bubble).memory_metric == "allocated"
    assert row(measured__peak_mem_gb=2).memory_bytes == 2e9
    assert row(measured__peak_mem_gb=2, **table).memory_bytes == 2 * 2**30


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[]", "an object with a text `id`"),
        (json.dumps({"id": "x"}), "no object `model`"),
        (json.dumps(data(model={"name": "x"})), "`model.arch`"),
        (json.dumps(data(cluster__n_gpus=0)), "cluster.n_gpus is 0"),
        (json.dumps(data(config__micro_batch=1.5)), "config.micro_batch is 1.5"),
    ],
)
def test_a_malformed_row_is_refused_by_file_and_line(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(json.dumps(data()) + "\n" + line + "\n")

    with pytest.raises(ValueError, match=r"^broken\.jsonl:2: ") as error:
        read_folders([tmp_path])

    assert told in str(error.value)


def test_one_id_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hand.jsonl").write_text(2 * (json.dumps(data()) + "\n"))

    with pytest.raises(ValueError, match="on line 1 already"):
        read_folders([tmp_path])


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no"):
        read_folders([tmp_path])


# --- machines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gigabits"),
    [
        ("4x Omni-Path 100Gb/s per node (JeanZay)", 400),
        ("HDR InfiniBand, 8x200Gb/s per node (Selene)", 1600),
        ("400Gb/s per node (EFA/RoCE)", 400),
        ("InfiniBand NDR 400Gb/s per GPU (Eos-class)", 3200),
        ("not stated (H100, likely 3200Gb/s per node)", 3200),
        ("800Gb/s (as published)", 800),
        ("RoCE RDMA (4 nodes)", None),
        (None, None),
    ],
)
def test_link_rates_count_per_node_or_per_gpu_as_the_text_says(text: str | None, gigabits: float | None) -> None:
    found = network_bits_per_node(text, 8)

    assert found == (None if gigabits is None else gigabits * 1e9)


def test_a_network_that_is_not_told_is_the_platforms_and_said_to_be_assumed() -> None:
    placed = place(row(cluster__n_gpus=16))

    assert placed.assumed == ("inter_node_link",)
    assert placed.cluster.network.bandwidth == pytest.approx(8 * 200e9 / 8 * NETWORK_EFFICIENCY[""])


def test_an_nvl72_rack_is_one_host() -> None:
    rack = {"cluster__gpu": "GB200-186GB", "cluster__gpus_per_node": 4}
    rack["cluster__intra_node_link"] = "NVLink5 1800GB/s, NVL72 domain (72 GPUs)"

    assert place(row(**rack, cluster__n_gpus=64)).cluster.num_hosts == 1
    assert place(row(**rack, cluster__n_gpus=256)).cluster.num_hosts == 4


# --- settings --------------------------------------------------------------------------------------------------------


def test_a_full_row_is_expressed_without_assumptions() -> None:
    setting = setting_of(row())

    assert (setting.assumed, setting.dropped) == ((), ())
    assert (setting.shape.data_shard, setting.shape.reshard, setting.shape.gradient_sync) == (8, True, "every")


def test_a_shard_group_leaves_the_rest_to_replicas() -> None:
    shape = setting_of(row(config__shard_group=2)).shape

    assert (shape.data_replicate, shape.data_shard) == (4, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("micro_batch", 1), ("zero_stage", 3), ("recompute", "if needed")],
)
def test_unknown_fields_get_their_default_and_are_said(field: str, value: object) -> None:
    setting = setting_of(row(**{f"config__{field}": None}))

    assert setting.assumed == (field,)
    known = {
        "micro_batch": setting.shape.micro_batch,
        "zero_stage": 3 if setting.shape.reshard else 1,
        "recompute": setting.recompute,
    }
    assert known[field] == value


@pytest.mark.parametrize(("layers", "pieces"), [(8, 2), (12, 3), (16, 2), (20, 5), (10, 2)])
def test_unknown_pieces_of_stages_divide_their_layers(layers: int, pieces: int) -> None:
    told = {"config__schedule": "interleaved-1f1b", "config__vpp": None, "config__global_batch": 32}

    setting = setting_of(row(**(PIPELINE | told), model__n_layers=layers))

    assert setting.shape.virtual_stages == pieces
    assert "vpp" in setting.assumed
    assert sum(setting.blocks) == layers


def test_an_unknown_batch_is_one_micro_batch_on_each_rank() -> None:
    setting = setting_of(row(config__global_batch=None))

    assert (setting.global_batch, setting.shape.num_microbatches) == (16, 1)


PIPELINE = {"config__dp": 2, "config__pp": 4, "config__zero_stage": 0, "config__schedule": "1f1b"}


MIXED = {
    "model__arch": "moe", "model__n_experts": 8, "model__topk": 2, "model__moe_ffn_hidden": 512,
    "model__n_shared_experts": 0, "model__n_dense_layers": 1,
}  # fmt: skip


def test_context_ranks_come_out_of_the_gpus_and_exchange_as_the_framework_does() -> None:
    titan = setting_of(row(config__cp=2, config__dp=4, config__global_batch=8)).shape
    megatron = setting_of(row(config__cp=2, config__dp=4, config__framework="Megatron-Bridge")).shape

    assert (titan.context, titan.data_shard, titan.context_kind) == (2, 4, "all_gather")
    assert (megatron.context, megatron.sharded_over, megatron.context_kind) == (2, 8, "ring")


@pytest.mark.parametrize(
    ("changes", "expert", "variant", "assumed"),
    [
        ({"config__ep": 4, "config__moe_dispatcher": "hybridep"}, 4, "+once-per-host", ()),
        ({"config__ep": 4, "config__moe_dispatcher": "alltoall"}, 4, "", ()),
        ({"config__ep": 8}, 8, "+once-per-host", ("moe_dispatcher",)),
        ({"config__ep": 8, "notes": "kernels: DeepEP, balanced"}, 8, "+once-per-host", ()),
        ({"config__ep": 6}, 2, "+once-per-host", ("ep as a divisor of ranks and experts", "moe_dispatcher")),
        ({"config__ep": 1}, 1, "", ()),
    ],
)
def test_a_mixture_is_spread_as_its_row_says(
    changes: dict[str, Any], expert: int, variant: str, assumed: tuple[str, ...]
) -> None:
    found = setting_of(row(**MIXED, **({"notes": "balanced routing"} | changes)))

    assert found.shape.expert == expert
    assert found.software == "fsdp2-eager" + variant + "+torchtitan"
    assert found.assumed == assumed


@pytest.mark.parametrize("even", ["forced-balanced routing", "mock data, forced balance", "balanced routing"])
@pytest.mark.parametrize("drawn", [None, "natural routing (unbalanced), untuned", "random init (not force-balanced)"])
def test_routing_that_is_not_forced_even_has_a_busiest_rank(even: str, drawn: str | None) -> None:
    forced, free = (setting_of(row(**MIXED, config__ep=8, notes=notes)) for notes in (even, drawn))

    assert forced.imbalance == 1.0 < free.imbalance
    assert "expert balance" in free.assumed


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({"notes": "kernels: TE + DeepEP, balanced"}, "te-kernels"),
        ({"notes": "model note: (tokendrop); forced-balanced routing"}, "token-drop"),
        ({"notes": "forced-balanced routing; token dropping"}, "token-drop"),
        ({"notes": "HybridEP, EP overlap, CUDA graphs"}, "overlapped-experts"),
        ({"notes": "HybridEP; forced-balanced routing; ep-overlap-on"}, "overlapped-experts"),
        ({"notes": "model note: (dropless); forced-balanced routing"}, "overlapped-experts"),
        ({"notes": "HybridEP, EP overlap, CUDA graphs"}, "part-graphs"),
    ],
)
def test_what_only_notes_tell_of_a_mixture_counts(changes: dict[str, Any], variant: str) -> None:
    told, silent = (setting_of(row(**MIXED, config__ep=8, **given)) for given in (changes, {"notes": "balanced"}))

    assert variant in told.software.split("+")
    assert variant not in silent.software.split("+")


@pytest.mark.parametrize(
    ("precision", "compile", "software", "assumed"),
    [
        (
            "fp8 (torchao float8 tensorwise linear)",
            None,
            "fsdp2-compile+torchtitan+compiled-selective+low-precision-gathers",
            True,
        ),
        ("fp8-tensorwise", False, "fsdp2-eager+torchtitan+low-precision-gathers", False),
        ("fp8-rowwise", True, "fsdp2-compile+torchtitan+compiled-selective", False),
        ("mxfp8_cublas", True, "fsdp2-compile+torchtitan+compiled-selective", False),
        ("bf16", None, "fsdp2-eager+torchtitan", False),
    ],
)
def test_torchtitan_casts_to_fp8_what_it_gathers_with_one_scale(
    precision: str, compile: bool | None, software: str, assumed: bool
) -> None:
    found = setting_of(row(config__precision=precision, config__compile=compile))

    assert found.software == software
    assert ("compile" in found.assumed) == assumed


def test_overlap_that_is_off_does_not_count() -> None:
    found = setting_of(row(**MIXED, config__ep=8, notes="HybridEP; forced-balanced routing; ep-overlap-off"))

    assert "overlapped-experts" not in found.software


def test_a_recipe_that_drops_no_tokens_sends_each_once() -> None:
    recipe = {"config__framework": "Megatron-Bridge/Megatron-Core", "config__recompute": "selective"}
    drops, keeps = (
        setting_of(row(**MIXED, config__ep=8, **recipe, notes=f"model note: ({kind}); forced-balanced routing"))
        for kind in ("tokendrop", "dropless")
    )

    assert "once-per-host" in keeps.software
    assert "once-per-host" not in drops.software


def test_experts_of_a_model_are_in_the_groups_that_it_is_known_for() -> None:
    known, other = (setting_of(row(**MIXED, model__name=name)).sizes.mixture for name in ("DeepSeek-V3-671B", "odd"))

    assert known is not None
    assert other is not None
    assert (known.groups, known.chosen_groups) == (8, 4)
    assert (other.groups, other.chosen_groups) == (1, 1)


@pytest.mark.parametrize(
    ("told", "variant"),
    [
        ("full_iteration", "+graphs"),
        ("local:full_iteration", "+graphs"),
        ("transformer_engine:attn,moe_router", "+part-graphs"),
        ("yes", "+part-graphs"),
        ("none:full_iteration", ""),
        (None, ""),
    ],
)
def test_cuda_graphs_are_those_that_are_switched_on(told: str | None, variant: str) -> None:
    assert setting_of(row(config__cuda_graphs=told)).software == f"fsdp2-eager{variant}+torchtitan"


@pytest.mark.parametrize(
    ("detail", "recompute", "parts"),
    [
        ("modules: mla_up_proj", "none", ("attention.query", "attention.up")),
        ("layernorm+moe_act", "none", ("norm1", "norm2", "feed_forward.experts:elementwise")),
        ("core_attn", "attention", ("attention:attention",)),
    ],
)
def test_single_modules_are_recomputed_beside_the_rest(detail: str, recompute: str, parts: tuple[str, ...]) -> None:
    found = setting_of(row(config__recompute="selective", config__recompute_detail=detail))

    assert (found.recompute, found.repeated) == (recompute, parts)


@pytest.mark.parametrize(
    ("changes", "assumed"),
    [
        ({"model__hidden": None, "model__params_b": 7.0}, "a Llama of as many parameters"),
        ({"model__arch": "moe", "model__name": "New-100B-A10B"}, "a dense model of the active parameters"),
        ({"model__arch": "hybrid-mamba"}, "pattern of layers"),
        ({"model__n_heads": None}, "n_heads"),
        ({"model__attn_type": "MLA"}, "attn_type"),
        ({"config__dp": 4}, "dp"),
        ({"config__micro_batch": 3}, "micro_batch as a divisor"),
        ({"config__global_batch": 15}, "global_batch as a multiple of the data ranks"),
        ({"config__recompute": "something new"}, "recompute"),
        ({**PIPELINE, "config__schedule": "something new"}, "schedule"),
        ({"config__task": "lora"}, "adapters cost nothing"),
    ],
)
def test_what_a_row_leaves_open_is_assumed_aloud(changes: dict[str, Any], assumed: str) -> None:
    found = setting_of(row(**changes))

    assert assumed in found.assumed + found.dropped


def test_a_gpu_without_preset_is_the_nearest_of_its_family() -> None:
    placed = place(row(cluster__gpu="H100-NVL-94GB", cluster__gpu_mem_gb=94))

    assert placed.cluster.device.name.startswith("h100")
    assert placed.cluster.device.memory == pytest.approx(94e9, rel=0.05)
    assert "gpu" in placed.assumed


def test_stages_are_laid_out_as_megatron_writes_them() -> None:
    changes = {**PIPELINE, "config__dp": 4, "config__pp": 2, "config__pp_layout": "Et*2|t*3|(t)*1|ttL"}
    changes |= {"config__vpp": 2, "config__schedule": "interleaved-1f1b", "config__global_batch": 32}

    found = setting_of(row(**changes))

    assert found.blocks == (2, 3, 1, 2)


@pytest.mark.slow
def test_a_profile_without_cuts_prices_a_row_that_cuts_nothing_alike() -> None:
    setting, cluster = setting_of(row(model__n_layers=4)), place(row()).cluster

    fast, plan = Pricer().estimate(setting, cluster)
    full, planned = Pricer(planning=True).estimate(setting, cluster)

    assert plan.model.fingerprint != planned.model.fingerprint
    assert (fast.step_time_s, fast.memory) == (full.step_time_s, full.memory)


@pytest.mark.slow
def test_offloaded_layers_are_the_models_first() -> None:
    each = row(config__cpu_offload_layers=3)

    _, plan = Pricer().estimate(setting_of(each), place(each).cluster)

    away = [layer.name for layer in plan.layers if layer.offload]
    assert away == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.slow
def test_a_mixture_across_ranks_is_priced_with_its_exchanges() -> None:
    each = row(**MIXED, config__ep=8, notes="balanced")

    found, _ = Pricer().estimate(setting_of(each), place(each).cluster)

    sent = {(traffic.axis, traffic.kind): traffic for traffic in found.collectives}
    layers, passes, tokens, told = 7, 4, 2 * 128, 8 * 8
    assert sent["expert", "all_to_all"].bytes == layers * (passes * tokens * 2 * 256 * 2 + told)


@pytest.mark.slow
def test_frozen_weights_have_no_gradients() -> None:
    sizes = setting_of(row(config__task="lora")).sizes

    profile = profile_of("frozen", sizes)

    block = profile.classes[profile.layers[4].layer_class]
    trained = {parameter.name for parameter in block.parameters if parameter.trainable}
    assert trained == {f"norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}
    assert not [op for op in block.whole.operators if op.part == "backward_weight" and op.kind == "matmul"]


@pytest.mark.slow
def test_the_hybrid_that_is_known_by_name_has_its_parameters() -> None:
    changes = {"model__name": "Nemotron-3-Nano-30B-A3B", "model__arch": "hybrid-mamba-moe", "model__n_layers": 52}
    empty = {f"model__{key}": None for key in ("hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab", "pos_emb")}
    sizes = setting_of(row(**changes, **empty, model__gated_mlp=None, model__tied_embeddings=None)).sizes

    assert profile_of("hybrid", sizes).num_parameters == pytest.approx(31.6e9, rel=0.01)


NEMO = {"config__framework": "NeMo/Megatron-Core", "cluster__gpu": "H100-SXM5-80GB", "model__name": "Llama2-7B"}

BEFORE_ZERO_2 = {"config__framework": "Megatron-DeepSpeed", "cluster__gpu": "V100-SXM2-32GB", "software": "2021"}


@pytest.mark.parametrize(
    ("changes", "software", "precision"),
    [
        ({"config__framework": "Megatron-LM", "cluster__gpu": "A100-SXM4-80GB"}, "megatron-2021", "bf16"),
        ({"config__framework": "NeMo/Megatron-Core", "cluster__gpu": "H100-SXM5-80GB"}, "megatron-core", "bf16"),
        (NEMO | {"software": "NeMo 24.03.01"}, "megatron-core+flash-2", "bf16"),
        (NEMO | {"software": "NeMo 24.07", "notes": "GPT/Llama attention: TE fused."}, "megatron-core", "bf16"),
        (NEMO | {"software": "NeMo 24.07", "notes": "GPT attention: TE fused."}, "megatron-core+flash-2", "bf16"),
        (NEMO | {"software": "NeMo 25.04", "config__precision": "fp8"}, "megatron-core", "fp8"),
        (NEMO | {"config__precision": "fp8 (TE delayed scaling)"}, "megatron-core+delayed-scaling", "fp8"),
        ({"config__framework": "torchtitan (FSDP2)", "config__precision": "mxfp8"}, "fsdp2-eager+torchtitan", "fp8"),
        (
            {"config__framework": "torchtitan (FSDP2)", "config__compile": True},
            "fsdp2-compile+torchtitan+compiled-selective",
            "bf16",
        ),
        ({"config__framework": "Composer + PyTorch FSDP1", "config__precision": "nvfp4"}, "fsdp1-flash1", "fp4"),
        ({"config__framework": "DeepSpeed ZeRO-3", "notes": "pre-FlashAttention"}, "zero3-2021", "bf16"),
        ({"config__framework": "Megatron-LM", "notes": "FlashAttention; overlap paths off"}, "megatron-2023", "bf16"),
        ({"config__framework": "Megatron-LM", "cluster__gpu": "H100-SXM5-80GB"}, "megatron-2023", "bf16"),
        ({"config__framework": "InternEvo"}, "megatron-2023+half-gradients+flat-optimizer", "bf16"),
        (BEFORE_ZERO_2, "megatron-2021+deepspeed-2021+deepspeed-bf16", "bf16"),
        (
            BEFORE_ZERO_2 | {"notes": "bf16 here is before the fp32-grad-accumulation optimizer."},
            "megatron-2021+half-gradients+deepspeed-2021",
            "bf16",
        ),
        (
            {"config__framework": "torchtitan (FSDP2)", "software": "torch 2024-03"},
            "fsdp2-eager+torchtitan+fixed-segments",
            "bf16",
        ),
        ({"config__framework": "litgpt + eager"}, "fsdp2-eager+pure-16-bit", "bf16"),
        ({"config__framework": "Megatron-LM", "config__precision": "fp16"}, "megatron-2021+half-gradients", "bf16"),
    ],
)
def test_a_row_says_its_training_stack_and_precision(changes: dict[str, Any], software: str, precision: str) -> None:
    found = setting_of(row(**changes))

    assert (found.software, found.precision) == (software, precision)


@pytest.mark.parametrize(
    ("told", "virtual", "schedule", "stages"),
    [
        ("zb-2p", 1, "zb-h2", 1),
        ("zb-v", 2, "zb-v", 2),
        ("interleaved-1f1b", 2, "interleaved", 2),
        ("interleaved-1f1b (modified)", None, "interleaved", 2),
        ("1f1b", 1, "1f1b", 1),
        ("interleaved-zero-bubble", 2, "zb-h1", 2),
    ],
)
def test_published_schedules_have_a_name_in_the_planner(
    told: str, virtual: int | None, schedule: str, stages: int
) -> None:
    setting = setting_of(row(**{**PIPELINE, "config__schedule": told, "config__vpp": virtual}))

    assert (setting.shape.schedule, setting.shape.virtual_stages, setting.dropped) == (schedule, stages, ())
    assert len(setting.blocks) == 4 * stages


@pytest.mark.parametrize(
    ("framework", "recompute"), [("Megatron-LM", "attention"), ("torchtitan (FSDP2)", "selective")]
)
def test_selective_recompute_is_what_the_framework_calls_so(framework: str, recompute: str) -> None:
    assert setting_of(row(config__recompute="selective", config__framework=framework)).recompute == recompute


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "framework", "blocks"),
    [
        (8, 4, 1, "Megatron-LM", (2, 2, 2, 2)),
        (14, 8, 1, "Megatron-LM", (1, 2, 2, 2, 2, 2, 2, 1)),  # embedding and head count as one each
        (14, 2, 8, "Megatron-LM", (0, *[1] * 14, 0)),
        (78, 12, 1, "Megatron-DeepSpeed", (*[7] * 11, 1)),
        (32, 3, 1, "InternEvo", (11, 11, 10)),
    ],
)
def test_blocks_that_do_not_divide_fall_as_the_framework_puts_them(
    layers: int, pipeline: int, virtual: int, framework: str, blocks: tuple[int, ...]
) -> None:
    changes = {"config__dp": 1, "config__pp": pipeline, "cluster__n_gpus": pipeline, "cluster__gpus_per_node": 1}
    changes |= {"config__vpp": virtual, "config__framework": framework}
    changes["config__schedule"] = "1f1b" if virtual == 1 else "interleaved-1f1b"

    assert setting_of(row(**changes, model__n_layers=layers, config__global_batch=32)).blocks == blocks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__hidden": None}, "model.hidden"),
        ({"config__tp": 3}, "does not divide the 8 GPUs"),
        ({"config__pp": 8, "model__n_layers": 4}, "4 layers on 8 stages"),
    ],
)
def test_what_cannot_be_priced_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotPriceError, match=reason):
        setting_of(row(**changes))


def test_megatron_before_flash_attention_keeps_the_scores() -> None:
    assert setting_of(row(config__framework="Megatron-LM")).sizes.attention == "eager"
    assert setting_of(row(config__framework="Megatron-LM", notes="with FlashAttention")).sizes.attention == "fused"


def test_every_row_of_the_data_is_read_and_put_in_words_or_refused_with_a_reason() -> None:
    rows = read_folders([DATA])
    refused = []
    for each in rows:
        place(each)
        try:
            setting_of(each)
        except CannotPriceError as error:
            refused.append(str(error))

    assert len(rows) == 727
    assert len(refused) < 5
    assert all(refused)


# --- the whole road --------------------------------------------------------------------------------------------------

SMALL = Sizes(
    num_layers=9, width=64, num_heads=4, num_kv_heads=4, head_width=16, feed_forward=256, vocabulary=512, seq_len=64,
    gated=False, rms_norm=False, biases=True, tied=True, positions="learned", attention="eager", dropout=0.1,
)  # fmt: skip
LLAMA = replace(
    SMALL, gated=True, rms_norm=True, biases=False, tied=False, positions="rope", attention="fused", dropout=0.0,
    num_kv_heads=2,
)  # fmt: skip
MIXTURE = replace(LLAMA, mixture=Mixture(8, 2, 32, shared=1, dense_layers=2), latent=Latent(32, 16, 8))
IN_GROUPS = replace(MIXTURE, mixture=Mixture(8, 2, 32, dense_layers=2, groups=4, chosen_groups=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(SMALL, id="gpt"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(MIXTURE, id="mixture"),
        pytest.param(IN_GROUPS, id="mixture in groups"),
    ],
)
def test_repeating_blocks_gives_the_profile_of_the_deep_model(sizes: Sizes) -> None:
    grown, whole = profile_of("model", sizes), without_padding(trace(loaded("model", sizes)), sizes)

    assert grown.model_copy(update={"fingerprint": whole.fingerprint}) == whole


@pytest.mark.slow
def test_parameters_of_known_models_come_out() -> None:
    rows = {each.id: each for each in read_folders([DATA])}
    known = {"fms-v1-nocompile-7b-A100-80": 6.738e9, "titan-8b-n8-eager": 8.03e9, "kor22-t5-22B-full": 22.05e9}

    for name, parameters in known.items():
        setting = setting_of(rows[name])
        assert profile_of(name, setting.sizes).num_parameters == pytest.approx(parameters, rel=2e-3)


@pytest.mark.parametrize(
    "name",
    slow.but_first(
        ["fms-v1-nocompile-7b-A100-80", "kor22-t5-22B-full", "simumax-b200-llama3_70b_l12_tp1_pp2_dp4_mbc4_cef"], 1
    ),
)
def test_published_rows_are_priced_near_their_measurement(name: str) -> None:
    each = next(each for each in read_folders([DATA]) if each.id == name)

    found = Pricer().price(each)

    assert found.dropped == ()
    assert abs(metrics.time_error(found) or 9.0) < 0.35
    assert found.fits


def test_recompute_that_is_not_told_is_the_least_that_nearly_fits() -> None:
    samples = (2, 12288, 49152)
    rows = [row(config__recompute=None, config__micro_batch=n, config__global_batch=8 * n) for n in samples]
    pricer = Pricer()

    recomputed = []
    for each in rows:
        _, plan = pricer.estimate(setting_of(each), place(each).cluster)
        recomputed.append({layer.recompute for layer in plan.layers})

    assert recomputed == [{"none"}, {"none", "selective"}, {"none", "full"}]


def test_the_command_writes_the_figures_and_lists_what_it_could_not_price(tmp_path: Path) -> None:
    lines = [data(), data(id="two", config__micro_batch=1), data(id="three", config__tp=3)]
    (tmp_path / "hand.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    code = score.main([str(tmp_path), "--json", str(tmp_path / "out.json"), "--processes", "1"])

    document = json.loads((tmp_path / "out.json").read_text())
    assert code == 0
    parts = {"time", "memory", "tau", "regret", "oom", "unpriced", "slopes", "inside the bands"}
    assert set(document) == parts
    assert set(document["time"]) == {"dense", "moe", "by"}
    assert document["time"]["dense"]["n"] == 2
    assert document["memory"]["n"] == 2
    assert document["inside the bands"]["step time"]["dense, 16 bit, one host"]["rows"] == 2
    assert document["oom"] == {"recall": None, "false_alarms": 0.0}
    assert [(entry["line"], entry["reason"]) for entry in document["unpriced"]] == [
        (3, "tp x pp x cp = 3 x 1 x 1 does not divide the 8 GPUs")
    ]


def test_the_command_refuses_a_broken_file_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.jsonl").write_text("{")

    assert score.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("broken.jsonl:1: not JSON")
