"""The graph of a model: what it says of bytes and cuts can be derived by hand; its files and its picture hold it."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import pytest
import torch
from test_architecture import modules_after
from torch import nn

from meshwright.executor.reporting.graph_chart import cut_rows, layer_graph
from meshwright.executor.reporting.graph_files import dot, write_graph
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.legality import legal_cuts
from meshwright.profiler.model.layer_graph import bytes_over, cut_points, graph_of, layers_of, skips
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support.cli import run_plan, save_profile, small_profile, some_plan
from support.synthetic import layer_class, profile

BF16, FP32 = 2, 4
WIDTHS = (8, 16, 32, 16, 8)


class _Skipping(nn.Module):
    """Linear layers of uneven widths; what the third returns is added to the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(WIDTHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        third = self.layers[2](self.layers[1](first)) + first
        return torch.relu(self.layers[3](third))


@cache
def _skipping() -> ModelProfile:
    loaded = load_model(
        _Skipping(), batch=lambda size: (torch.ones(size, 8),), loss=lambda output, batch: output.float().sum()
    )
    return trace(loaded)


@pytest.mark.parametrize("element_bytes", [BF16, FP32])
def test_edges_carry_the_bytes_of_one_sample(element_bytes: int) -> None:
    graph = graph_of(_skipping(), element_bytes)

    made = {maker: size for maker, target, size in graph.edges(data="bytes") if isinstance(maker, int)}
    assert made == {i: element_bytes * WIDTHS[i + 1] for i in range(3)}
    assert all(size == made[t.made_by] for i, t in enumerate(_skipping().tensors) for size in _read_bytes(graph, i))
    assert [graph.nodes[i]["parameters"] for i in layers_of(graph)] == [8 * 16 + 16, 16 * 32 + 32, 32 * 16 + 16, 136]
    assert graph.nodes[3]["flops"] == 3 * 2 * 16 * 8  # forward, and gradients of input and weight


def _read_bytes(graph: nx.DiGraph, tensor: int) -> list[int]:
    return [size for _, _, size in graph.out_edges(("tensor", tensor), data="bytes")]


def test_a_tensor_that_passes_by_a_layer_is_carried_over_every_cut_up_to_its_last_reader() -> None:
    graph = graph_of(_skipping())

    first, second, third = (BF16 * width for width in WIDTHS[1:4])
    assert skips(graph) == [("tensor", 0)]
    assert bytes_over(graph) == [0, first, first + second, third, 0]


def _sharing(num_layers: int, readers: Sequence[Sequence[int]]) -> ModelProfile:
    """A chain with weights that several layers read under one name."""
    chain = profile([layer_class("block", 1e9, 1000, saved=1e6, inputs=1e6)], [0] * num_layers)
    names = [[*layer.parameters] for layer in chain.layers]
    for number, layers in enumerate(readers):
        for layer in layers:
            names[layer] = [f"shared{number}"]
    layers = [layer.model_copy(update={"parameters": tuple(names[i])}) for i, layer in enumerate(chain.layers)]
    return chain.model_copy(update={"layers": tuple(layers)})


def test_stages_begin_where_no_weight_has_readers_on_both_sides() -> None:
    rng = random.Random(0)
    for _ in range(50):
        num_layers = rng.randint(2, 12)
        readers = [rng.sample(range(num_layers), rng.randint(1, min(3, num_layers))) for _ in range(rng.randint(0, 2))]
        model = _sharing(num_layers, readers)
        names = [set(layer.parameters) for layer in model.layers]

        apart = [i for i in range(1, num_layers) if not set().union(*names[:i]) & set().union(*names[i:])]
        assert cut_points(graph_of(model)) == apart
        assert legal_cuts(model) == apart


def test_a_tied_weight_has_a_copy_on_each_side_of_a_cut() -> None:
    model = profile([layer_class("block", 1e9, 1000, saved=1e6, inputs=1e6)], [0] * 4, ties=[(0, 3)])
    graph = graph_of(model)

    assert cut_points(graph) == [1, 2, 3]
    assert graph.nodes["parameter", "layer3.weight"]["tied_to"] == "layer0.weight"
    assert list(graph.successors(("parameter", "layer3.weight"))) == [3]


def test_networkx_reads_back_the_graphml_that_a_profile_is_written_with(tmp_path: Path) -> None:
    saved = tmp_path / "skip.graphml"
    write_graph(graph_of(_skipping()), saved)

    found = nx.read_graphml(saved)
    assert nx.is_directed_acyclic_graph(found)
    assert [node for node in found if node.startswith("layer")] == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert found.edges["layer 1", "tensor 1"]["bytes"] == BF16 * WIDTHS[2]
    assert found.nodes["tensor 1"]["shape"] == "1 32"
    assert found.nodes["layer 1"]["layer_class"] == "Linear.2"


def test_dot_has_every_layer_tensor_and_edge() -> None:
    graph = graph_of(_skipping())
    lines = dot(graph).splitlines()

    assert lines[0] == "digraph {"
    assert lines[-1] == "}"
    assert sum(" [label=" in line for line in lines) == len(graph)
    assert sum(" -> " in line for line in lines) == graph.number_of_edges()
    assert all(f'label="layers.{i}\\nLinear' in "\n".join(lines) for i in range(4))


HOSTILE = 'a"];\n<script>\\ &\x00\x1b'


def _with_name(model: ModelProfile, name: str) -> ModelProfile:
    layers = (model.layers[0].model_copy(update={"name": name}), *model.layers[1:])
    return model.model_copy(update={"layers": layers})


def test_names_cannot_break_out_of_a_file(tmp_path: Path) -> None:
    graph = graph_of(_with_name(small_profile(), HOSTILE))
    write_graph(graph, tmp_path / "hostile.graphml")

    assert '[label="a\\"];\\n<script>\\\\ &\ufffd\ufffd\\nembedding' in dot(graph)
    assert nx.read_graphml(tmp_path / "hostile.graphml").nodes["layer 0"]["name"] == 'a"];\n<script>\\ &\ufffd\ufffd'


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
        "def batch(size):\n"
        "    return torch.ones(size, 8), torch.ones(size, 8)\n"
        "def loss(output, batch):\n"
        "    return (output - batch[1]).square().mean()\n"
    )
    return path


@pytest.mark.parametrize("suffix", [".graphml", ".dot"])
def test_plan_profile_writes_the_graph(
    model_file: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model_file.parent)

    assert run_plan("profile", "model.py", "--graph", f"model{suffix}", "--no-cache") == 0
    assert model_file.with_suffix(suffix).read_text().count("layer 1") >= 2
    assert f"model{suffix}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("model.gexf", "give a name that ends in .graphml or .dot"), ("none/model.dot", "lies in no folder")],
)
def test_a_graph_that_cannot_be_written_is_refused_before_the_work(
    model_file: Path, name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_file = model_file.with_suffix(".json")

    assert run_plan("profile", str(model_file), "-o", str(profile_file), "--graph", str(model_file.parent / name)) == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")
    assert not profile_file.exists()


@pytest.mark.slow
def test_a_plan_from_a_profile_does_not_wait_for_networkx(tmp_path: Path) -> None:
    arguments = [str(save_profile(tmp_path)), "--gpus", "2", "--device", "h100-80gb"]

    loaded = modules_after(f"from meshwright.executor.cli import main\nmain({arguments!r})", tmp_path)

    assert "meshwright.planner.plan.legality" in loaded
    assert "networkx" not in loaded


def _words(plan: Plan, model: ModelProfile) -> list[str]:
    drawn = ElementTree.fromstring(layer_graph(plan, graph_of(model)))
    return [mark.text or "" for mark in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_folds_equal_layers_and_shows_the_cuts() -> None:
    whole, cut = (_words(some_plan(pipeline=stages), small_profile()) for stages in (1, 5))

    assert [words for words in whole if "block" in words] == ["8 × block"]
    assert sum(words.startswith("cut: ") for words in whole) == 0
    assert "2 × block" in cut
    assert "stages 1–3" in cut
    assert (
        sum(words.startswith("cut: 9.54 MiB") for words in cut) == 2
    )  # 1e7 bytes, behind the first and before the last


def test_the_cuts_of_a_plan_carry_what_skips_them() -> None:
    model = small_profile()
    skipping = model.tensors[0].model_copy(update={"last_used_by": 9, "used_by": (1, 9)})
    graph = graph_of(model.model_copy(update={"tensors": (skipping, *model.tensors[1:])}))

    assert cut_rows(some_plan(pipeline=5), graph) == [("after stages 0–3, each", "2", "19.1 MiB")]
    assert 'class="skip"' in layer_graph(some_plan(), graph)
    assert 'class="skip"' not in layer_graph(some_plan(), graph_of(model))
