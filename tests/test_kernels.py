"""Seconds of single kernels by shape: their limits, their order, and what their numbers may be."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import components, fit_components
from meshwright.planner.cost.comm_cost import CollectiveKind, GroupLinks, collective_s, direct_s, ring_rates
from meshwright.planner.cost.compute_cost import batches_at, operator_s, table_of
from meshwright.planner.cost.context_cost import pieces_s
from meshwright.planner.cost.expert_cost import EXCHANGE_UNITS, exchange_of, on_one_rank
from meshwright.planner.cost.kernels import (
    OPERAND_TRAFFIC,
    SMALL_TILE,
    ExpertRates,
    KernelFamily,
    ProductRates,
    attention_s,
    bank_products_s,
    families,
    product_s,
    products_s,
)
from meshwright.planner.cost.pieces_cost import beside
from meshwright.planner.cost.software import load_software
from meshwright.profiler.machine.cluster import Device, Group, Link, device_names, load_device
from meshwright.profiler.model.model_profile import Bytes, Costs, OpProfile, TensorCut
from support.synthetic import expert_bank

H100 = load_device("h100-80gb")
PEAK = H100.flops["bf16"]
PLAIN = ProductRates(speed=1.0, fill=0.0, launch=0.0, power=0.0)


def one(*values: float) -> list[np.ndarray]:
    return [np.array([value]) for value in values]


def test_a_product_that_fills_its_waves_takes_its_flops_over_the_speed_of_its_tiles() -> None:
    rows, columns = 256.0 * H100.compute_units, 256.0
    seconds = products_s(*one(rows, 4096.0, columns), H100, PEAK, PLAIN)[0]

    small = 1 + SMALL_TILE * (128 / 256 + 128 / 256)
    assert seconds == pytest.approx(small * 2 * rows * 4096 * columns / PEAK)


def test_a_last_wave_that_is_not_full_costs_more_than_its_share_and_less_than_a_wave() -> None:
    full, more = (products_s(*one(256.0 * n, 4096.0, 256.0), H100, PEAK, PLAIN)[0] for n in (132, 140))

    assert full * 140 / 132 < more < 2 * full


def test_a_long_product_pays_for_power_and_a_short_one_for_filling_its_tiles() -> None:
    filled = PLAIN.model_copy(update={"fill": 512.0})
    hot = PLAIN.model_copy(update={"power": 0.2})
    short, long = one(1024.0, 512.0, 1024.0), one(16384.0, 16384.0, 16384.0)

    def over(sides: list[np.ndarray], rates: ProductRates) -> float:
        seconds = [product_s(*sides, H100, "bf16", PEAK, each)[0] for each in (rates, PLAIN)]
        return float(seconds[0] / seconds[1])

    assert over(short, filled) > 1.5 > 1.05 > over(long, filled)
    assert over(long, hot) == pytest.approx(1.2, abs=0.01)
    assert over(short, hot) < 1.01


def test_a_product_of_few_rows_takes_as_long_as_its_weights_need_to_arrive() -> None:
    seconds = product_s(*one(1.0, 16384.0, 16384.0), H100, "bf16", PEAK, PLAIN)[0]

    assert seconds >= 2 * 16384**2 / H100.bandwidth
    assert seconds < 3 * 2 * 16384**2 / H100.bandwidth


def test_operands_cost_their_unhidden_share() -> None:
    sides = one(8192.0, 8192.0, 8192.0)
    moved = 3 * 2 * 8192**2

    extra = product_s(*sides, H100, "bf16", PEAK, PLAIN) - products_s(*sides, H100, PEAK, PLAIN)

    assert extra[0] == pytest.approx(OPERAND_TRAFFIC * moved / H100.bandwidth)


def test_experts_with_few_tokens_pay_for_tiles_and_weights() -> None:
    rates = ExpertRates(speed=1.0, fill=0.0, weights=1.0, traffic=0.0, permute=1.0, launch=0.0)

    def seconds(tokens: float, count: float) -> float:
        return float(bank_products_s(*one(tokens / count, 2048.0, 2048.0, count), H100, "bf16", PEAK, rates)[0])

    assert seconds(64.0, 64) >= 64 * 2 * 2048**2 / H100.bandwidth
    assert seconds(8192.0, 128) > 1.5 * seconds(8192.0, 8)
    assert seconds(0.0, 64) == pytest.approx(0.0, abs=1e-9)


def attention(heads: float, length: float, width: float, causal: bool = True) -> float:
    """Share of peak."""
    flops = 4 * heads * length**2 * width * (0.5 if causal else 1.0)
    sides = one(flops, heads * length, width, length, 8 * heads * length * width)
    seconds = attention_s(*sides, 2.0, H100, PEAK, families()["hopper"].attention["bf16"])[0]
    return float(flops / seconds / PEAK)


def test_attention_reaches_more_of_its_peak_with_more_heads_longer_sequences_and_wider_heads() -> None:
    assert attention(4, 2048, 128) < attention(16, 2048, 128) < attention(128, 2048, 128)
    assert attention(32, 1024, 128) < attention(32, 8192, 128)
    assert attention(32, 8192, 64) < attention(32, 8192, 128) < attention(32, 8192, 256)
    assert attention(32, 4096, 128) < attention(32, 4096, 128, causal=False)


def test_a_fused_attention_operator_is_priced_by_its_heads() -> None:
    def op(heads: float, width: float) -> OpProfile:
        rows, flops = heads * 4096, 4 * heads * 4096**2 * width / 2
        sides = tuple((value, 0.0, 0.0, 0.0) for value in (rows, width, 4096.0))
        return OpProfile(
            name="_scaled_dot_product_flash_attention",
            module="",
            kind="attention",
            part="forward",
            flops=(flops, 0, 0, 0),
            moved=Bytes(elements=(4 * rows * width, 0, 0, 0)),
            shape=sides,  # type: ignore[arg-type]
        )

    wide, narrow = (operator_s(op(heads, 4096 / heads), H100, "bf16", 2, 1, 1) for heads in (16, 64))

    assert narrow > 1.2 * wide
    slower = H100.model_copy(update={"sustained": H100.sustained / 2})
    assert operator_s(op(16, 256.0), slower, "bf16", 2, 1, 1) == pytest.approx(2 * wide, rel=0.05)


def product_op(module: str, part: str, rows: float, inner: float, columns: float) -> OpProfile:
    sides = tuple((value, 0.0, 0.0, 0.0) for value in (rows, inner, columns))
    flops = (2 * rows * inner * columns, 0.0, 0.0, 0.0)
    return OpProfile(name="mm", module=module, kind="matmul", part=part, flops=flops, shape=sides)  # type: ignore[arg-type]


def test_casts_to_fp8_move_six_bytes_of_each_activation_and_none_of_weights() -> None:
    op = product_op("up", "forward", 4096, 8192, 16384)

    usual, half = (operator_s(op, H100.model_copy(update={"casts": casts}), "fp8", 2, 1, 1) for casts in (1.0, 0.5))

    assert usual - half == pytest.approx(0.5 * 6 * 4096 * 8192 / (H100.bandwidth * H100.bandwidth_efficiency))


def test_a_product_cut_to_hide_an_exchange_is_a_launch_for_each_piece() -> None:
    operators = (product_op("up", "forward", 4096, 8192, 2048), product_op("down", "backward_input", 4096, 8192, 2048))
    empty = dict.fromkeys(("saved", "inputs", "forward_transient", "backward_transient"), Bytes())
    cut = TensorCut(kind="mlp", columns=("up",), rows=("down",), units=(8,), sharded={})

    found = beside(Costs(operators=operators, **empty), [cut], H100, "bf16", 2, 1, 8)

    again = 7 * families()["hopper"].products["bf16"].launch
    assert (found.forward_s, found.backward_s) == pytest.approx((again, again))
    whole = operator_s(operators[0], H100, "bf16", 2, 1, 8)
    assert (found.gathers, found.sums) == (pytest.approx((whole,)), (0.0,))
    assert found.gradient_gathers == pytest.approx((whole,))


def fused_attention(heads: float, length: float, width: float) -> OpProfile:
    rows, flops = heads * length, 4 * heads * length**2 * width / 2
    sides = tuple(
        (0.0, value, 0.0, 0.0) if value == rows else (value, 0.0, 0.0, 0.0) for value in (rows, width, length)
    )
    return OpProfile(
        name="_scaled_dot_product_flash_attention",
        module="",
        kind="attention",
        part="forward",
        flops=(0, flops, 0, 0),
        moved=Bytes(elements=(0, 4 * rows * width, 0, 0)),
        shape=sides,  # type: ignore[arg-type]
    )


def test_a_rings_many_kernels_of_attention_take_longer_than_one() -> None:
    costs = Costs(
        operators=(fused_attention(32, 32768, 128),),
        saved=Bytes(),
        inputs=Bytes(),
        forward_transient=Bytes(),
        backward_transient=Bytes(),
    )

    shares = []
    for context in (2, 8):
        (forward_s, backward_s) = pieces_s(costs, H100, "bf16", 2, 1 / context, 1, context)
        whole_s = operator_s(costs.operators[0], H100, "bf16", 2, 1 / context, 1)
        shares.append(forward_s / whole_s)
        assert backward_s == 0.0

    assert 0.0 < shares[0] < shares[1] < 1.0


def test_each_expert_fills_tiles_of_its_own() -> None:
    """On a device of known kernels a bank's products are as many as experts that a rank holds, of their tokens each."""
    bank, _, products = expert_bank(8, copies=2, width=512, inner=1024)
    table = table_of(products)
    masks = ((np.ones(len(products), dtype=bool), bank.count),)

    amounts = on_one_rank(table, batches_at([1.0], 1), masks, H100, expert=4, imbalance=1.5)

    alone = table.sides @ batches_at([1.0], 1)
    weights = table.parts[2] > 0
    assert amounts.groups[:, 0] == pytest.approx(2.0)
    assert amounts.sides[0][~weights] == pytest.approx(alone[0][~weights] * 1.5 / 2)
    assert amounts.sides[1][weights] == pytest.approx(alone[1][weights] * 1.5 / 2)


def test_an_expert_without_tokens_computes_nothing() -> None:
    bank, _, products = expert_bank(8, copies=2, width=512, inner=1024)
    empty = [p.model_copy(update={"shape": ((0.0,) * 4, *p.shape[1:])}) for p in products if p.shape]
    table = table_of(empty)
    masks = ((np.ones(len(products), dtype=bool), bank.count),)

    amounts = on_one_rank(table, batches_at([1.0], 1), masks, load_device("cpu"), expert=4, imbalance=1.5)

    assert np.isfinite(amounts.flops).all()


def test_experts_with_uneven_tokens_fill_more_tiles() -> None:
    even, uneven, alike = (
        products_s(*one(128.0, 4096.0, 4096.0), H100, PEAK, PLAIN, 64.0, skew)[0]
        for skew in ((1.0,), (0.1, 0.1, 0.1, 3.7), (1.0, 1.0))
    )

    assert uneven > 1.2 * even
    assert alike == even


def test_merging_a_rings_outputs_takes_what_the_executor_moves() -> None:
    """With a kernel whose pieces take as long as the whole: fp32 sums of each block's output are left."""
    attention = fused_attention(32, 32768, 128)
    costs = Costs(
        operators=(attention,), saved=Bytes(), inputs=Bytes(), forward_transient=Bytes(), backward_transient=Bytes()
    )
    elements = 32 * 32768 * 128 / 4

    fast, slow = (
        pieces_s(costs, H100.model_copy(update={"bandwidth": speed, "launch": 0.0}), "bf16", 2, 1 / 4, 1, 4)[0]
        for speed in (H100.bandwidth, H100.bandwidth / 2)
    )

    merged_s = (12 + 3 * 26) * elements / (H100.bandwidth * H100.bandwidth_efficiency)
    assert slow - fast >= merged_s
    assert fast >= merged_s


def test_stacks_attend_as_fast_as_the_generation_of_their_kernels() -> None:
    old, new = (load_software(name).on(H100).attention_speed for name in ("fsdp1-flash1", "megatron-core"))

    assert old < 0.6 * new


# --- communication ---------------------------------------------------------------------------------------------------


def links(ranks: int, hosts: int = 1, known: bool = True) -> GroupLinks:
    family = families()[H100.kernels]
    group = Group(ranks_per_host=ranks, hosts=hosts)
    return GroupLinks(group, H100.link, H100.network, 8, rings=family.rings if known else None)


@pytest.mark.parametrize("where", [links(2), links(8), links(8, 4)])
def test_pipelines_of_rings_fill_in_the_middle_of_sizes(where: GroupLinks) -> None:
    times = ring_rates("all_gather", where)
    middle = times.latency_s / times.per_byte_s  # as long on the way as under way

    small, even, large = (
        collective_s("all_gather", size, where) / (size * times.per_byte_s + times.latency_s)
        for size in (middle / 1e4, middle, middle * 1e4)
    )

    assert where.rings is not None
    assert even == pytest.approx(1.0 + where.rings.ramp)
    assert (small, large) == (pytest.approx(1.0, abs=0.02), pytest.approx(1.0, abs=0.02))
    assert ring_rates("all_gather", links(8, known=False)).per_root_s == 0.0


def test_all_reduce_between_many_hosts_moves_as_fast_whatever_their_number() -> None:
    """As measured on 4 to 1,024 hosts; between two, trees carry half."""
    two, four, many = (ring_rates("all_reduce", links(8, hosts)).per_byte_s for hosts in (2, 4, 1024))

    assert many == pytest.approx(four, rel=0.04)
    assert many == pytest.approx(2 / H100.network.bandwidth, rel=0.01)
    assert two < 0.8 * four


def test_a_rack_of_many_ranks_sends_through_eight_cards() -> None:
    gb200 = load_device("gb200")
    rack = GroupLinks(
        Group(ranks_per_host=72, hosts=20), gb200.link, gb200.network, 72, rings=families()[gb200.kernels].rings
    )

    per_byte_s = ring_rates("all_reduce", rack).per_byte_s

    assert per_byte_s == pytest.approx(2 / (gb200.network.bandwidth * 8 / 72), rel=0.01)


def test_few_ranks_use_fewer_channels() -> None:
    two, eight = (collective_s("all_gather", 1e9, links(n)) / ((n - 1) / n) for n in (2, 8))

    assert two > 1.2 * eight


def test_a_token_reaches_a_rank_once_however_many_of_its_experts_are_there() -> None:
    rates = families()["hopper"].exchange
    assert rates is not None

    one_expert, all_experts = (direct_s(4096.0, 14336.0, k, links(8), 20, rates) for k in (1.0, 64.0))

    assert all_experts < 8.5 * one_expert
    assert direct_s(4096.0, 14336.0, 8.0, links(1), 20, rates) == 0.0
    assert exchange_of(8 * 4096 * 14336, 8.0, links(8), True, rates, 4096.0) == pytest.approx(
        direct_s(4096.0, 14336.0, 8.0, links(8), EXCHANGE_UNITS, rates)
    )


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_no_fitted_number_ends_on_a_bound_of_its_range() -> None:
    on_bound = []
    for name, family in families().items():
        for table in fit_components.TYPES:
            held = getattr(family, table)
            for dtype, rates in (held if isinstance(held, dict) else {"": held}).items():
                for number in fit_components.PRIORS[table] if rates is not None else ():
                    low, high = fit_components.bounds(table, number)
                    value = getattr(rates, number)
                    fitted = number in rates.model_fields_set
                    if fitted and not low + 0.001 * (high - low) < value < high - 0.001 * (high - low):
                        on_bound.append((name, table, dtype, number, value))

    assert on_bound == []


def test_kernels_that_are_not_known_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no kernels 'hoper'; there are ampere, hopper, .* or leave the line out"):
        load_software("fsdp2-eager").on(H100.model_copy(update={"kernels": "hoper"}))


UNMEASURED = {"cpu", "a10g", "mi300x", "mi325x", "mi355x", "rtx-5090", "rtx-pro-6000"}


def test_every_preset_names_a_family_that_is_known() -> None:
    devices = [load_device(name) for name in device_names()]

    assert {device.kernels for device in devices} <= {"", *families()}
    assert {device.name for device in devices if not device.kernels} == UNMEASURED


def test_a_number_out_of_its_range_is_refused_with_the_range() -> None:
    with pytest.raises(ValueError, match=r"less than or equal to 1.15"):
        ProductRates(speed=1.4, fill=0.0, launch=0.0, power=0.0)
    with pytest.raises(ValueError, match=r"less than or equal to 1"):
        Device.model_validate(H100.model_dump() | {"sustained": 1.4})


# --- the scorer ------------------------------------------------------------------------------------------------------


def rows() -> list[dict[str, object]]:
    source = "ai-dynamo/aiconfigurator@0:x"
    gemm = {"kind": "gemm", "source": source, "gpu": "H100 80GB SXM", "what": "linear layer", "dtype": "bf16"}
    return [
        {**gemm, "m": 4096, "n": 4096, "k": 4096, "time_us": 174.29},
        {**gemm, "m": 1024, "n": 4096, "k": 16384, "time_us": 171.73},
        {**gemm, "gpu": "H20", "m": 1, "n": 1, "k": 1, "time_us": 1.0},
        {**gemm, "dtype": "int4", "m": 1, "n": 1, "k": 1, "time_us": 1.0},
    ]


def test_components_are_scored_by_kind_and_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(tmp_path / "gemm.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows())
    out = tmp_path / "figures.json"

    assert components.main([str(tmp_path), "--json", str(out)]) == 0

    figure = json.loads(out.read_text())["figures"]["GEMM"]["H100 80GB SXM"]
    assert figure["rows"] == 2
    assert figure["p90"] < 0.1
    assert json.loads(out.read_text())["not priced"] == {"no preset for H20": 1, "dtype int4": 1}
    assert "| GEMM | H100 80GB SXM | 2 |" in capsys.readouterr().out


def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"kind": "gemm"}\n[1]\n')

    assert components.main([str(tmp_path)]) == 2
    assert "a.jsonl:2" in capsys.readouterr().err
    assert components.main([str(tmp_path / "none")]) == 2


def expert_layer(tokens: int, ep: int, time_us: float) -> dict[str, object]:
    sizes = {"hidden": 4096, "intermediate": 1024, "num_experts": 64, "topk": 4, "gated": True, "routing": "balanced"}
    place = {"source": "ai-dynamo/aiconfigurator@0:x", "gpu": "H200 SXM", "dtype": "bf16", "kernel": "cutlass"}
    return {"kind": "moe_layer", **place, **sizes, "tokens": tokens, "ep": ep, "time_us": time_us}


def test_an_expert_layer_slower_than_with_more_work_was_not_tuned() -> None:
    rows = [expert_layer(4096, 8, 100.0), expert_layer(4096, 4, 190.0), expert_layer(16384, 8, 1300.0)]
    rows += [expert_layer(16384, 4, 700.0), expert_layer(16384, 2, 1400.0)]

    (part,), reasons = components.parts_of(rows)

    assert sorted(1e6 * part.measured_s) == pytest.approx([100.0, 190.0, 700.0, 1400.0])
    assert reasons == {components.NOT_TUNED: 1}


def all_reduce(num_bytes: int, time_us: float, source: str = "NVIDIA/nccl-tests") -> dict[str, object]:
    place = {"source": source, "gpu": "H100 80GB SXM", "ranks": 8, "nodes": 1}
    return {"kind": "collective", "what": "all_reduce", **place, "bytes": num_bytes, "time_us": time_us}


def test_collectives_that_something_else_took_time_for_are_left_out() -> None:
    disturbed = [all_reduce(2**15, 6349.0), all_reduce(2**20, 30.0), all_reduce(2**28, 1100.0)]
    by_host = [all_reduce(2**20, 46.2, "MooreThreads/SimuMax"), all_reduce(2**28, 1090.0, "MooreThreads/SimuMax")]

    (part,), reasons = components.parts_of([*disturbed, *by_host])

    assert sorted(1e6 * part.measured_s) == pytest.approx([30.0, 1090.0, 1100.0])
    assert sorted(reasons.values()) == [1, 1]


def test_a_fit_finds_the_numbers_that_made_its_rows() -> None:
    parts, _ = components.parts_of(rows()[:1])
    true = ProductRates(speed=0.7, fill=400.0, launch=5e-6, power=0.15)
    sides = [2.0**i for i in range(9, 15)]
    m, n, k = (side.ravel() for side in np.meshgrid(sides, sides, sides))
    shapes = tuple(f"{a} x {b}" for a, b in zip(n, k, strict=True))
    part = replace(parts[0], sizes={"m": m, "n": n, "k": k}, shapes=shapes, measured_s=np.ones(len(m)))
    made = components.predicted_s(part, KernelFamily(products={"bf16": true}, source=""))
    problem = fit_components.Problem("hopper", "GEMM", "bf16", (replace(part, measured_s=made),))

    found = problem.rates(problem.fitted(problem.parts))

    for name in ("speed", "fill", "launch", "power"):
        assert math.log(getattr(found, name) / getattr(true, name)) == pytest.approx(0.0, abs=0.2)  # priors pull
    assert np.abs(np.concatenate([logs for _, logs in fit_components.out_of_fold(problem)])).max() < 0.05


def test_a_ring_of_measured_links_costs_what_it_did() -> None:
    where = GroupLinks(Group(ranks_per_host=8, hosts=1), Link(bandwidth=1e11, latency=1e-6), H100.network, 8)

    assert collective_s("all_gather", 8e9, where) == pytest.approx(7 * 1e9 / 1e11 + 7e-6)


@pytest.mark.parametrize("kind", ["all_reduce", "p2p"])
def test_links_that_all_share_are_shared_by_groups_that_talk_at_once(kind: CollectiveKind) -> None:
    rings, pair = families()["ada"].rings, Group(ranks_per_host=2, hosts=1)
    assert rings is not None
    alone_s, among_others_s = (
        collective_s(kind, 1e9, GroupLinks(pair, H100.link, H100.network, talking, rings=rings)) for talking in (2, 8)
    )

    assert among_others_s / alone_s == pytest.approx(4**rings.shared, rel=0.1)
