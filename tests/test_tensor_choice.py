"""Which cuts are applied: the integer program against all choices, and what depends on links and sizes."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.answers.search import search
from meshwright.planner.cost.comm_cost import collective_s
from meshwright.planner.cost.layer_cost import CostModel
from meshwright.planner.cost.tensor_costs import mode_costs
from meshwright.planner.plan.legality import divides, runs_on_slices, sequence_rule, tensor_rule
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.shape import Cuts, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.tensor_choice import CutChoice, Way, added_s, best_ways, tied_cuts
from meshwright.profiler.machine.cluster import ClusterSpec, Link
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile, amount_at
from meshwright.profiler.model.trace import trace
from support.small_models import small_profile
from support.synthetic import cluster, device
from support.zoo import MODELS, zoo_profile

NAMES = st.sampled_from("abcde")


@st.composite
def ways(draw: st.DrawFn) -> list[Way]:
    """A few ways to cut five modules, which read five tensors."""
    entry_s = {name: draw(st.floats(0.0, 3.0)) for name in "abcde"}
    return [
        Way(
            seconds=draw(st.floats(-5.0, 2.0)),
            modules=draw(st.frozensets(NAMES, min_size=1, max_size=3)),
            entries=tuple((name, entry_s[name]) for name in sorted(draw(st.sets(NAMES, max_size=2)))),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


def _least_s(options: list[Way], some: bool) -> float:
    """By trying every choice that cuts no module twice; some: only those that cut one."""
    least = math.inf if some else 0.0
    for size in range(1, len(options) + 1):
        for taken in itertools.combinations(range(len(options)), size):
            modules = [module for i in taken for module in options[i].modules]
            if len(modules) == len(set(modules)):
                least = min(least, added_s(options, frozenset(taken)))
    return least


@settings(max_examples=60)
@given(ways(), st.booleans())
def test_the_program_finds_the_least_of_all_choices(options: list[Way], some: bool) -> None:
    taken, seconds = best_ways(options, some=some)

    modules = [module for i in taken for module in options[i].modules]
    assert len(modules) == len(set(modules))
    assert seconds == pytest.approx(_least_s(options, some), abs=1e-5)


def _slow(bandwidth: float, network: float = 450e9) -> ClusterSpec:
    """Two hosts of two devices."""
    link = Link(bandwidth=bandwidth, latency=1e-6)
    return cluster(2, 2, device(link=link, bandwidth=2e12), Link(bandwidth=network, latency=1e-6))


def _family_s(model: CostModel, shape: Shape, stride: int = 1) -> float:
    """Compute, traffic of tensor ranks so far apart and optimizer of a whole step, as the bound of a family counts
    them."""
    total = elements = 0.0
    for kind in model.kinds:
        seconds = model.compute(kind, shape)
        links = model.links(shape.tensor, stride)
        mode, costs, _ = model.mode(kind, shape)
        sizes = [(c.kind, c.tensor.at(shape.samples, 2, shape.tensor)) for c in costs.collectives if mode != "whole"]
        each = seconds.forward + seconds.backward + sum(collective_s(k, size, links) for k, size in sizes)
        total += shape.num_microbatches * each + model.whole_gradients_s(kind, shape)
        elements += model.elements(kind, shape)[1]
    return total + model.optimizer_s(elements / shape.data, on_host=False)


def _legal(profile: ModelProfile, shape: Shape) -> list[Cuts]:
    """All choices that treat tied cuts alike and leave a layer on slices what it needs."""
    indexed = [(c, i) for c, k in enumerate(profile.classes) for i, cut in enumerate(k.cuts) if divides(cut, 2)]
    groups = tied_cuts(profile, indexed)
    found = []
    for wanted in itertools.product((False, True), repeat=len(groups)):
        taken = [member for group, is_taken in zip(groups, wanted, strict=True) if is_taken for member in group]
        by_class = {c: [i for k, i in taken if k == c] for c, _ in taken}
        slices = [c for c, k in enumerate(profile.classes) if shape.sequence and k.sequence is not None]
        if all(by_class.get(c) and runs_on_slices(profile.classes[c], by_class[c]) for c in slices):
            names = {c: tuple(profile.classes[c].cuts[i].name for i in chosen) for c, chosen in by_class.items()}
            found.append(Cuts(tuple((profile.classes[c].name, cuts) for c, cuts in names.items())))
    return found


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("bandwidth", [1e9, 3.5e9, 1e10, 4e10, 3e11])
@pytest.mark.parametrize("name", ["llama3_8b", pytest.param("whisper_large_v3", marks=pytest.mark.slow)])
def test_the_choices_for_a_model_are_the_best_of_all_where_its_ranks_sit(
    name: str, bandwidth: float, sequence: bool
) -> None:
    profile = zoo_profile(name)
    on = _slow(1e11, network=bandwidth)
    model = CostModel(profile, on, TrainingSpec(global_batch=8, seq_len=profile.seq_len))
    shape = Shape(1, 2, 2, 1, 1, 4, sequence=sequence)

    tried = None, *CutChoice(model).worth_trying(shape)

    for stride in (1, 2):
        steps = {cuts: _family_s(model, replace(shape, cuts=cuts), stride) for cuts in _legal(profile, shape)}
        least = min((seconds for cuts, seconds in steps.items() if any(names for _, names in cuts.by_class)))
        worth = 0.01 * _family_s(model, shape, stride)  # what is not worth it stays cut
        assert min(_family_s(model, replace(shape, cuts=cuts), stride) for cuts in tried) <= least + worth


def _on(bandwidth: float) -> CutChoice:
    profile = zoo_profile("llama3_8b")
    return CutChoice(CostModel(profile, _slow(bandwidth), TrainingSpec(global_batch=8, seq_len=8192)))


def test_on_fast_links_everything_is_cut() -> None:
    assert _on(450e9).worth_trying(Shape(1, 2, 2, 1, 1, 4)) == ()


def test_groups_that_cost_more_than_they_save_stay_whole_on_slow_links() -> None:
    chosen = _on(3.5e9).worth_trying(Shape(1, 2, 2, 1, 1, 4))[0]

    assert chosen.of("LlamaDecoderLayer") == ("mlp:mlp.down_proj",)


def test_where_nothing_saves_time_the_least_that_can_be_cut_is_tried() -> None:
    (chosen,) = _on(1e6).worth_trying(Shape(1, 2, 2, 1, 1, 4))

    assert len([name for _, names in chosen.by_class for name in names]) == 1


@pytest.mark.slow
def test_the_search_leaves_whole_what_is_not_worth_its_collectives() -> None:
    profile = zoo_profile("llama3_8b")
    training = TrainingSpec(global_batch=2, seq_len=8192)
    roomy = device(link=Link(bandwidth=3.5e9, latency=1e-6), memory=640e9)
    found = search(profile, cluster(1, 4, roomy), training, pins=Pins(tensor=2, sequence=False))

    block = next(c for c in found.plan.classes if c.name == "LlamaDecoderLayer")

    assert [cut.kind for cut in block.cuts] == ["mlp"]


def _shallow(name: str, folder: Path, **layers: int) -> ModelProfile:
    """A model of the zoo with fewer layers; its classes are the same."""
    config = json.loads((MODELS / name / "config.json").read_text()) | layers
    (folder / "config.json").write_text(json.dumps(config))
    return trace(load_model(folder))


@pytest.mark.slow
def test_costs_of_some_cuts_are_between_those_of_fewer_and_of_more(tmp_path: Path) -> None:
    whisper = _shallow("whisper_large_v3", tmp_path, encoder_layers=1, decoder_layers=2)
    layer_class = next(c for c in whisper.classes if len(c.cuts) == 3)

    def flops(*chosen: int) -> float:
        return sum(amount_at(op.flops, 1, 2) for op in mode_costs(layer_class, chosen, False).operators)

    saved = [mode_costs(layer_class, chosen, False).saved.at(1, 2, 2) for chosen in ((0,), (0, 2), (0, 1, 2))]
    peaks = [mode_costs(layer_class, c, False).backward_transient.at(1, 2, 2) for c in ((0,), (0, 2), (0, 1, 2))]
    assert flops(0) - flops(0, 2) == pytest.approx(flops() - flops(2))
    assert flops() - flops(0, 1, 2) == pytest.approx(sum(flops() - flops(i) for i in range(3)))
    assert saved == sorted(saved, reverse=True)
    assert peaks == sorted(peaks, reverse=True)
    assert len(mode_costs(layer_class, (0, 2), False).collectives) == 4


@pytest.mark.slow
def test_what_no_degree_divides_stays_whole_beside_what_it_divides(tmp_path: Path) -> None:
    profile = _shallow("gpt2_xl", tmp_path, n_layer=2)  # 25 heads, 6400 features

    assert [tensor_rule(profile, degree) for degree in (2, 4, 8)] == [None] * 3
    assert tensor_rule(profile, 25) is None
    assert tensor_rule(profile, 50) == "tensor=50 does not divide 25 heads (attention of GPT2Block)"


def test_heads_limit_the_degree_where_a_smaller_one_divides_all() -> None:
    why = tensor_rule(zoo_profile("llama3_8b"), 16)

    assert why == "tensor=16 does not divide 8 key-value heads (attention of LlamaDecoderLayer)"


@pytest.mark.slow
def test_tied_weights_are_one_choice() -> None:
    profile = small_profile("large vocabulary")
    cuts = [(c, i) for c, layer_class in enumerate(profile.classes) for i in range(len(layer_class.cuts))]

    sizes = sorted(len(group) for group in tied_cuts(profile, cuts))

    assert sizes[-1] == 2


def test_sequences_are_whole_where_a_slice_is_as_long_as_another_tensor() -> None:
    profile = small_profile("root parameter")
    tensor = next(t for t in profile.tensors if "sequence" in t.dims)
    halved = [size // 2 if dim == "sequence" else size for size, dim in zip(tensor.shape, tensor.dims, strict=True)]
    pooled = profile.model_copy(update={"tensors": (*profile.tensors, tensor.model_copy(update={"shape": halved}))})

    assert sequence_rule(profile, 2) is None
    assert "is as long as the other" in str(sequence_rule(pooled, 2))
    assert sequence_rule(pooled, 4) is None
