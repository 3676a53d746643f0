"""Habits of models that eager PyTorch trains: their plans give the numbers of one process, or a rule is named."""

import re
import warnings
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import rich
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshwright.executor import parallelize
from meshwright.executor.parallel.micro_batches import MicroBatch
from meshwright.executor.parallel.rehearsal import Rehearsal
from meshwright.executor.reporting import terminal
from meshwright.planner.answers.blame import blamed
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.legality import legal_cuts, micro_batch_rule, sharding_rule
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.building import in_evaluation, in_training, on_meta
from meshwright.profiler.model.trace import trace
from support.habits import GLOBAL_BATCH, WIDTH, habit, linear, pairs, planned, run, squared
from support.ranks import RankError, run_ranks


class Merging(nn.Linear):
    """An adapter that is added to its weight for evaluation and taken out again for training (as in loralib)."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH, 4) * 0.1)
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.weight, self.bias)
        return out if self.merged else out + x @ self.down.T @ self.up.T


class Averaging(nn.Module):
    """Takes off a running mean of what it has seen, which it replaces in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        out: torch.Tensor = self.second(h - self.mean)
        return out


class Codes(nn.Module):
    """Replaces each value by the nearest code, and moves codes towards what they stand for, behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.register_buffer("codes", torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        nearest = (h.unsqueeze(-1) - self.codes).abs().argmin(-1)
        out: torch.Tensor = self.second(h + (self.codes[nearest] - h).detach())
        chosen = functional.one_hot(nearest, 8).to(h.dtype)
        means = (chosen * h.detach().unsqueeze(-1)).sum((0, 1)) / chosen.sum((0, 1)).clamp_min(1)
        self.codes.data.mul_(0.5).add_(means, alpha=0.5)
        return out


class ReadsWithoutGradient(nn.Module):
    """Trains no parameter of its own, nor the first layer: both are read under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(WIDTH))
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.first(x + self.offset)
        out: torch.Tensor = self.third(torch.tanh(self.second(x)))
        return out


class Remembering(nn.Module):
    """Adds what it computed of the batch before, which it keeps in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.past: deque[torch.Tensor] = deque(maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.past:
            h = h + 0.1 * self.past[-1].mean()
        self.past.append(h.detach())
        out: torch.Tensor = self.second(h)
        return out


class Bags(nn.Module):
    """Sums of looked-up vectors: offsets say where each sample's begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, WIDTH, mode="sum"), linear(1)

    def forward(self, entries: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.bag(entries, offsets)).squeeze(-1)
        return out


def _bags(size: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(50, (3 * size,)), torch.arange(0, 3 * size, 3), torch.randn(size)


class Noisy(nn.Module):
    """Adds noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x) + torch.randn_like(x))
        return out


class LooksAtItself(nn.Module):
    """Looks at numbers while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        assert self.first.weight.abs().sum().item() > 0
        self.rates = [rate.item() for rate in torch.linspace(0.5, 1.0, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x) * self.rates[1])
        return out


class Hooked(nn.Module):
    """Keeps what a module returns aside, by a hook that is a closure over the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.kept: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(lambda module, args, output: self.kept.__setitem__("first", output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x))) + self.kept["first"]
        return out


class Scaling(Hooked):
    """A hook changes what its module returns: once, on whatever stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: output.mul_(3))
        self.second.register_forward_hook(lambda module, args, output: output * 3)


class Named(nn.Module):
    """Names the device of a layer itself, and holds plain tensors, one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, device="cpu"), linear()
        self.plain = torch.arange(WIDTH) / WIDTH
        self.listed = [torch.ones(WIDTH), 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x) + self.plain) * self.listed[0] * self.listed[1]
        return out


class Ladder(nn.Module):
    """What goes down is kept for the way up: a stage in the middle hands on what its own ReLUs have saved."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(linear() for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = torch.relu(down(x))
            kept.append(x)
        for up in self.up:
            x = torch.relu(up(torch.cat([x, kept.pop()], -1)))
        return x


class WritesAcross(nn.Module):
    """Writes into what its layers return, and goes on with that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(linear()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(x)
            h.mul_(2)
            functional.leaky_relu_(h, 0.3)
            x = h
        return x


class Mapped(nn.Module):
    """Runs a layer on each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.func.vmap(lambda row: torch.tanh(self.first(row)))(x))
        return out


class Force(nn.Module):
    """The gradient of an energy, which is trained to be something."""

    def __init__(self, by_func: bool) -> None:
        super().__init__()
        self.first, self.second, self.by_func = linear(), linear(1), by_func

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x))).sum()
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_func:
            found: torch.Tensor = torch.func.grad(self.energy)(x)
            return found
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(self.energy(x), x, create_graph=True)[0]


class Scripted(nn.Module):
    """Scripted by torch.jit where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(x))


def _partly_scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.script(Scripted()), Scripted())


class Words(nn.Module):
    """An embedding that asks for sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, WIDTH, sparse=True), linear(40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.words(tokens))
        return out


def _words(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(40, (size,)), torch.randn(size, 40)


def _compiled() -> nn.Module:
    inner: Any = torch.compile(nn.Sequential(linear(), nn.Tanh()))
    whole: Any = torch.compile(nn.Sequential(inner, linear()))
    module: nn.Module = whole
    return module


def _old_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(weight_norm(linear()), nn.ReLU(), weight_norm(linear()))


class Twice(nn.Module):
    """Returns what it makes twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = self.layer(torch.relu(state["x"]))
        return {"all": [*state["all"], x], "x": x}


class Gathers(nn.Module):
    """Hands a dict from layer to layer, and reads all that is in it at the end."""

    def __init__(self, hook: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice() for _ in range(3))
        for layer in self.layers if hook else ():
            layer.register_forward_hook(hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"x": x, "all": []}
        for layer in self.layers:
            state = layer(state)
        out: torch.Tensor = sum(state["all"])
        return out


def _doubles(module: nn.Module, given: Any, output: dict[str, Any]) -> None:
    output["x"].mul_(2)


class Between(nn.Module):
    """One module runs between all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))
        self.places = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x + self.places(x[:, :4].argmax(-1))))
        return x


class Mixes(nn.Module):
    """Mixes samples by a share that numpy draws, and returns its loss as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        share = numpy.random.beta(0.4, 0.4)
        x = share * x + (1 - share) * x.flip(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return share * functional.mse_loss(x, y) + (1 - share) * functional.mse_loss(x, y.flip(1))


class Repeats(nn.Module):
    """Has its backward repeat its layers two by two, and what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Dropout(0.1)) for _ in range(4))
        self.first = linear()

    def two(self, number: int, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.layers[number](x))
        return x + torch.tanh(self.layers[number + 1](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in (0, 2):
            x = checkpoint(self.two, number, x, use_reentrant=False)
        return x


class Encoder(nn.Module):
    """Torch's encoder, whose fast path packs what is not padding in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.words, self.encoder = nn.Embedding(40, WIDTH), nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0)
        return out[:, 0]


def _padded(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 40, (size, 6))
    tokens[:, -2:] = 0
    return tokens, torch.randn(size, WIDTH)


class Reordered(nn.Module):
    """Has parameters of integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) > 2, requires_grad=False)
        self.layers = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, self.order] * self.mask
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


BACKBONE = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)


class OnABackbone(nn.Module):
    """Its backbone was made once, for all models of the file, and the loss uses it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.backbone = nn.Sequential(linear(), nn.Tanh(), linear()), BACKBONE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.backbone(self.layers(x))
        return out


class Writes(nn.Module):
    """Changes its weight in the forward, in one of the ways that autograd does not hear of."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.other = way, linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "into .data":
            self.layer.weight.data.clamp_(-0.1, 0.1)
        elif self.way == ".data":
            self.layer.weight.data = self.layer.weight.data.clamp(-0.1, 0.1)
        elif self.way == "tie":
            self.layer.weight = self.other.weight
        return self.other(self.layer(x))  # type: ignore[no-any-return]


def _in_one_memory() -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[2].weight.data = model[0].weight.data  # type: ignore[union-attr]
    return model


class LateBranch(nn.Module):
    """Uses more of itself from its third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.calls = linear(), linear(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        return self.late(x) if self.calls > 2 else x


class Distributed(nn.Module):
    """A variational model by torch.distributions, which look at the numbers that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale, self.decoder = linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.encoder(x))
        found = torch.distributions.Normal(h, functional.softplus(self.scale(h)))
        apart = torch.distributions.kl_divergence(found, torch.distributions.Normal(0.0, 1.0))
        return {"loss": (self.decoder(found.rsample()) - x).square().mean() + apart.mean()}


class State:
    """What a layer returns that is no tensor."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class HandsObjects(nn.Module):
    """Hands objects of its own from layer to layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()

        def forward(self, state: State) -> State:
            return State(torch.tanh(self.linear(state.h)))

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(self.first(x))
        for layer in self.layers:
            state = layer(state)
        return state.h


class ByItself(nn.Module):
    """Computes with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(2))
        self.biases = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        return x


class Crops(nn.Module):
    """Takes a list with a tensor for each sample, which are of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.layers(torch.stack([crop.mean(0) for crop in crops]))
        return out


def _crops(size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    return [torch.randn(2 + i % 3, WIDTH) for i in range(size)], torch.randn(size, WIDTH)


HABITS: dict[str, Any] = {
    "distributions": habit(Distributed, loss=None, batch=lambda size: (torch.randn(size, WIDTH),)),
    "objects": habit(HandsObjects),
    "crops": habit(Crops, batch=_crops),
    "encoder": habit(Encoder, batch=_padded),
    "reordered": habit(Reordered),
    "backbone": habit(OnABackbone, loss=lambda output, batch: (output - BACKBONE(batch[1])).square().mean()),
    "repeats": habit(Repeats),
    "twice": habit(Gathers),
    "twice, written into": habit(lambda: Gathers(_doubles)),
    "between": habit(Between),
    "mixes": habit(Mixes, loss=None),
    "compiled": habit(_compiled),
    "looks at itself": habit(LooksAtItself),
    "reads without gradient": habit(ReadsWithoutGradient),
    "lazy": habit(lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(WIDTH))),
    "orthogonal": habit(lambda: nn.Sequential(orthogonal(linear()), nn.ReLU(), linear())),
    "spectral norm": habit(lambda: nn.Sequential(spectral_norm(linear()), nn.ReLU(), spectral_norm(linear()))),
    "old weight norm": habit(_old_norm),
    "noisy": habit(Noisy),
    "hooked": habit(Hooked),
    "scaling": habit(Scaling),
    "named": habit(Named),
    "merging": habit(lambda: nn.Sequential(Merging(), nn.ReLU(), Merging())),
    "averaging": habit(Averaging),
    "codes": habit(Codes),
    "remembering": habit(Remembering),
    "writes across": habit(WritesAcross),
    "mapped": habit(Mapped),
    "force, func": habit(lambda: Force(by_func=True)),
    "force": habit(lambda: Force(by_func=False)),
    "scripted": habit(_partly_scripted),
    "sparse": habit(Words, batch=_words),
    "synced norm": habit(lambda: nn.Sequential(linear(), nn.SyncBatchNorm(WIDTH), nn.ReLU(), linear())),
    "double": habit(
        lambda: nn.Sequential(linear(), nn.ReLU(), linear()).double(),
        batch=lambda size: (torch.randn(size, WIDTH).double(), torch.randn(size, WIDTH).double()),
    ),
    "half": habit(
        lambda: nn.Sequential(linear(), nn.ReLU(), linear()).bfloat16(),
        batch=lambda size: (torch.randn(size, WIDTH).bfloat16(), torch.randn(size, WIDTH).bfloat16()),
    ),
    "bags": habit(Bags, batch=_bags),
    "one tensor": habit(
        lambda: nn.Sequential(linear(), nn.ReLU(), linear()),
        batch=lambda size: torch.randn(size, WIDTH),
        loss=lambda output, batch: (output - batch).square().mean(),
    ),
}

FIRST = {
    "crops": 0,
    "backbone": 1,
}
"""Model -> which of its plans is tested by default; the others with the slow ones."""

ONE_LAYER = ("averaging", "codes", "remembering", "mapped", "force, func", "force", "scripted", "objects")
"""Models that no pipeline cuts."""
WHOLE = ("force", "scripted")
"""Models that are not sharded."""


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # what torch.compile imports
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        pytest.param(name, pins, marks=[] if FIRST.get(name) == number else [pytest.mark.slow])
        for name in HABITS
        for number, pins in enumerate([{"data_replicate": 2}, {"pipeline": 2}, {"data_shard": 2}])
        if not (name in ONE_LAYER and number == 1) and not (name in WHOLE and number == 2)
    ],
)
def test_what_eager_trains_gives_the_numbers_of_one_process(name: str, pins: dict[str, int]) -> None:
    report = run(HABITS[name], **pins)

    assert report.ok, report.lines


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_zero_bubble_stages_send_what_their_layers_have_saved(schedule: Any) -> None:
    report = run(habit(Ladder), ranks=3, pipeline=3, schedule=schedule)

    assert report.ok, report.lines


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "why"), [("force", "calls torch.autograd.grad"), ("scripted", "by torch.jit")])
def test_what_fully_shard_cannot_take_is_replicated(name: str, why: str) -> None:
    assert why in str(sharding_rule(trace(HABITS[name]), "fp32"))


def test_a_generator_of_its_own_is_no_decision_by_values() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = linear(), torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x + torch.randn(x.shape, generator=self.generator))
            return out

    assert not trace(habit(Draws)).decides_by_values


def test_what_runs_between_layers_has_a_name_for_each_of_its_runs() -> None:
    names = [layer.name for layer in trace(HABITS["between"]).layers]

    assert len(set(names)) == len(names)


def test_what_a_model_repeats_together_is_one_layer_and_told() -> None:
    profile = trace(HABITS["repeats"])

    assert [layer.modules for layer in profile.layers] == [
        ("first",),
        ("layers.0", "layers.1"),
        ("layers.2", "layers.3"),
    ]
    assert any("repeated together in backward (torch.utils.checkpoint)" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Writes("into .data"), "writes into the parameter layer.weight"),
        (lambda: Writes(".data"), "writes into the parameter layer.weight"),
        (lambda: Writes("tie"), "puts another tensor in the place of the parameter layer.weight"),
        (_in_one_memory, "2.weight and 0.weight .* are two parameters in one memory"),
    ],
)
def test_weights_that_no_optimizer_would_step_as_eager_does_are_refused(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace(habit(build))


def test_parameters_may_be_parts_of_one_storage() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(linear(), nn.Tanh(), linear())
        whole = torch.randn(2 * WIDTH, WIDTH)
        for i in range(2):
            model[2 * i].weight.data = whole[i * WIDTH : (i + 1) * WIDTH]  # type: ignore[union-attr]
        return model

    assert trace(habit(build)).num_parameters == 2 * (WIDTH + 1) * WIDTH


@pytest.mark.slow
def test_replicas_average_what_only_a_later_forward_reads() -> None:
    report = run(habit(LateBranch), data_replicate=2, micro_batch=1)

    assert report.ok, report.lines


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (HandsObjects, "what layers.0 returns is no tensor"),
        (ByItself, "ByItself computes with its parameters by itself"),
        (linear, "Linear is one module without parts"),
    ],
)
def test_what_cannot_be_cut_says_why(build: Any, why: str) -> None:
    profile = trace(habit(build))

    assert len(profile.layers) == 1
    assert any(note.startswith(why) and note.endswith("so all of it is one layer") for note in profile.notes)


def test_a_list_with_an_entry_for_each_sample_is_not_cut() -> None:
    assert "element 0 of a batch is a list with an entry for each sample" in trace(HABITS["crops"]).batch_problem


def test_what_eager_cannot_train_either_is_said_to_be_so() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(self.first(x))
            h[:, :4] = 0
            out: torch.Tensor = self.second(h)
            return out

    with pytest.raises(ValueError, match=r"does not train on one device either: a tensor of \[2, 32\]"):
        trace(habit(Spoils))


def test_names_that_look_like_markup_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    class Quirky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("[/bold]", linear())
            self.add_module("[red]x", linear())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for child in self.children():
                x = child(x)
            return x

    plan = planned(habit(Quirky), pipeline=2)
    terminal.print_placement(terminal.make_console(), plan)
    rich.print(plan)

    shown = capsys.readouterr().out
    assert shown.count("[/bold]") == shown.count("[red]x") == 2


def _counting(plan: Plan) -> None:
    trainer = parallelize(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), plan, torch.optim.AdamW, squared)
    with FlopCounterMode(display=False):
        trainer.step(pairs(GLOBAL_BATCH))


def test_counting_operators_of_a_backward_in_two_parts_is_refused_in_words() -> None:
    plan = planned(habit(lambda: nn.Sequential(linear(), nn.Tanh(), linear())), pipeline=2, schedule="zb-h1")

    with pytest.raises(RankError, match="a hook is set on all modules, as FlopCounterMode does, and zb-h1"):
        run_ranks(_counting, 2, plan)


def test_noise_that_two_layers_read_is_drawn_once_and_sent() -> None:
    class Denoising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.randn_like(x)
            out: torch.Tensor = self.second(self.first(x + noise)) - noise
            return out

    crossing = [tensor.producer.name for tensor in trace(habit(Denoising)).tensors]

    assert crossing == ["randn_like", "first"]


def test_values_of_another_width_than_keys_are_run_on_real_tensors_too() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.values, self.out = linear(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x > 1e9).any()):
                x = -x
            keys, values = self.keys(x)[:, None, None], self.values(x)[:, None, None]
            out: torch.Tensor = self.out(functional.scaled_dot_product_attention(keys, keys, values)[:, 0, 0])
            return out

    assert trace(habit(Wide)).decides_by_values


@pytest.mark.slow
def test_a_model_that_rescales_weights_to_evaluate_is_cut_into_no_stages() -> None:
    class Rescaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scaled = nn.ModuleList(linear() for _ in range(4)), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training == self.scaled:
                with torch.no_grad():
                    self.layers[2].weight.mul_(2.0 if self.scaled else 0.5)
                self.scaled = not self.scaled
            for layer in self.layers:
                x = layer(x)
            return x

    profile = trace(habit(Rescaling))

    assert len(profile.layers) == 4
    assert "in evaluation the forward writes into the parameter layers.2.weight" in profile.pipeline_problem
    assert not legal_cuts(profile)


def test_parameters_without_elements_are_not_sharded() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.out = nn.Parameter(torch.zeros(0, WIDTH)), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(x) + self.none.sum()
            return out

    assert "data_shard: none has no elements to shard" in str(sharding_rule(trace(habit(Empty)), "fp32"))


def test_what_the_first_batch_leaves_for_all_others_is_told() -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.mean = linear(), linear(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mean is None:
                self.mean = x.mean(0)  # type: ignore[assignment]
            out: torch.Tensor = self.second(torch.tanh(self.first(x - self.mean)))
            return out

    assert any("mean is written" in note for note in trace(habit(Centres)).told)


def test_a_train_of_its_own_is_called_and_what_is_frozen_stays_so() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other, self.features = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()

        def train(self, mode: bool = True) -> "Keeps":
            super().train(mode)
            self.norm.eval()
            return self

    model = in_training(nn.Sequential(Keeps()))

    assert [m.training for m in model[0].children()] == [False, True, False]  # type: ignore[operator, union-attr]
    assert in_training(nn.Linear(1, 1).eval()).training


def test_what_torch_export_makes_is_refused_in_words() -> None:
    def exported() -> nn.Module:
        return torch.export.export(linear(), (torch.randn(2, WIDTH),)).module()

    with pytest.raises(ValueError, match=r"is in one mode for good .* the module that it was made of"):
        in_training(exported())


def test_what_is_merged_for_an_evaluation_is_trained_apart_after_it() -> None:
    model = nn.Sequential(Merging(), Merging().eval())
    was = [part.weight.clone() for part in model.children()]  # type: ignore[operator, union-attr]

    with in_evaluation(model):
        pass

    assert [part.merged for part in model.children()] == [False, True]
    assert [part.training for part in model.children()] == [True, False]
    assert all(torch.allclose(p.weight, w, atol=1e-6) for p, w in zip(model.children(), was, strict=True))  # type: ignore[arg-type]


class Segments(nn.Module):
    """Takes what is no padding in one row, and adds up each sample's part of it before its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.last = nn.Embedding(50, WIDTH), linear(), linear()

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        lengths = mask.sum(1)
        ends = functional.pad(lengths.cumsum(0), (1, 0))
        sums = functional.pad(self.middle(self.words(words[mask])).cumsum(0), (0, 0, 1, 0))
        out: torch.Tensor = self.last((sums[ends[1:]] - sums[ends[:-1]]) / lengths[:, None])
        return out


def test_no_stage_runs_functions_on_a_stand_in_of_another_size_than_the_batch_makes() -> None:
    def batch(size: int) -> Any:
        return torch.randint(50, (size, 8)), torch.arange(8) < torch.randint(3, 9, (size, 1)), torch.randn(size, WIDTH)

    profile = trace(habit(Segments, batch=batch))

    assert len(profile.layers) == 3
    assert "stand-ins of one size" in profile.pipeline_problem
    assert not legal_cuts(profile)


class Grouped(nn.Module):
    """Two experts in one grouped product, whose fake version is in bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        return x + torch._grouped_mm(x, self.experts, offs=ends)


def test_products_of_groups_are_rehearsed_in_the_dtype_of_their_weights() -> None:
    loaded = habit(
        lambda: nn.Sequential(nn.Embedding(8, WIDTH), Grouped(), Grouped(), linear()),
        batch=lambda size: (torch.randint(8, (size,)), torch.randn(size, WIDTH)),
    )
    rehearsal = Rehearsal(on_meta(loaded.build), planned(loaded, pipeline=2))

    for size in (4, 8):
        batch = MicroBatch((torch.zeros(size, dtype=torch.long),), {}, None, 1.0)
        _, tensors, _ = rehearsal.run(batch, torch.device("cpu"), nullcontext(), False, None)

        assert {like.dtype for like in tensors.values()} == {torch.float32}


class Skipping(nn.Module):
    """Leaves out layers by draws of torch's, after dropouts that have drawn for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Dropout(0.1)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.dropout(x, 0.1, self.training)
            if not self.training or torch.rand([]) >= 0.3:
                x = x + layer(x)
        return x


def test_layers_left_out_by_draws_of_torch_are_in_every_run_of_the_profile() -> None:
    profile = trace(habit(Skipping))

    assert profile.decides_by_values
    assert len(profile.layers) == 8


class Masked(nn.Module):
    """Puts a trained vector in the masked places, as wav2vec 2.0, and decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mask = linear(), nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.first(x if float(x.detach().sum()) < 1e9 else x * 2)
        x[places] = self.mask
        masked = x
        for layer in self.layers:
            x = x + layer(x)
        return x + masked


def test_a_parameter_that_is_put_between_layers_is_read_by_those_who_read_what_it_is_put_into() -> None:
    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 6, WIDTH), torch.rand(size, 6) < 0.3, torch.randn(size, 6, WIDTH)

    profile = trace(habit(Masked, batch=batch))

    assert profile.decides_by_values
    assert ["mask" in layer.parameters for layer in profile.layers] == [False, True, True]


class Guided(nn.Module):
    """Forgets some of its labels as it trains, for guidance without a classifier; all blocks read what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.given = nn.Embedding(11, WIDTH), linear()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.given(x)
        if self.training:
            labels = torch.where(torch.rand(labels.shape, device=labels.device) < 0.1, 10, labels)
        guide = self.labels(labels) + 0.5
        for block in self.blocks:
            x = x + block(x + guide)
        return x


GUIDED = habit(Guided, batch=lambda size: (torch.randn(size, WIDTH), torch.randint(10, (size,)), *pairs(size)[1:]))


def test_what_runs_in_training_alone_miscounts_no_other_function() -> None:
    profile = trace(GUIDED)

    assert legal_cuts(profile)[-3:] == [len(profile.layers) - left for left in (3, 2, 1)]


@pytest.mark.slow
def test_stages_may_part_the_layers_behind_what_runs_in_training_alone() -> None:
    assert run(GUIDED, ranks=4, pipeline=4).ok


def test_what_counts_rows_of_all_samples_is_one_micro_batch() -> None:
    profile = trace(HABITS["bags"])

    assert [tensor.counts_rows for tensor in profile.batch] == [False, True, False]
    assert micro_batch_rule(profile, 2, 1, pinned=False) is None
    assert "element 1 of a batch counts rows of all samples" in str(micro_batch_rule(profile, 2, 2, pinned=False))


def test_lazy_modules_of_a_training_script_are_refused_in_words() -> None:
    plan = planned(HABITS["one tensor"], ranks=1)

    with pytest.raises(ValueError, match="run one forward in the function that builds the model"):
        parallelize(lambda: nn.Sequential(nn.LazyLinear(4)), plan, torch.optim.AdamW)


class Decides(nn.Module):
    """Goes one way or the other, by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.first(x) * float(x.abs().max().item())
        out: torch.Tensor = self.second(h)
        return out


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (Pins(data_shard=4), "data_shard: .* decides by values"),
        (Pins(pipeline=2), "pipeline: .* decides by values"),
        (Pins(tensor=2), "tensor: no layer can be cut"),
    ],
)
def test_a_refusal_names_the_rule_of_the_pin(pins: Pins, words: str) -> None:
    profile, cluster = trace(habit(Decides)), cluster_of(load_device("cpu"), 4)

    found = blamed(profile, cluster, TrainingSpec(global_batch=GLOBAL_BATCH, precision="fp32"), pins)

    assert found is not None
    assert re.search(words, found.rule)


class ReadsBeside(nn.Module):
    """A pair of linear layers, of which one's weight is read beside it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + 0.1 * layer[2].bias  # type: ignore[index]
        return x


def test_a_refusal_of_shards_says_that_the_pin_needs_them() -> None:
    profile, cluster = trace(habit(ReadsBeside)), cluster_of(load_device("cpu"), 4)
    training = TrainingSpec(global_batch=GLOBAL_BATCH, precision="fp32")

    by_tensor, by_shards = (blamed(profile, cluster, training, pins) for pins in (Pins(tensor=2), Pins(data_shard=4)))

    assert by_tensor is not None
    assert by_shards is not None
    assert by_tensor.rule == f"{by_shards.rule}; tensor=2 is run with fully_shard, too"


def test_what_does_not_run_in_bf16_is_not_laid_to_the_batch() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = torch.view_as_complex(self.first(x).unflatten(-1, (-1, 2))) * 1j
            return torch.view_as_real(turned).flatten(-2)

    (note,) = [note for note in trace(habit(Turning)).notes if "bfloat16" in note]

    assert note.startswith("profiled in float32, because it does not run in bfloat16")
    assert "batch function" not in note


def test_layouts_that_are_looked_at_twice_count_once() -> None:
    certificate = planned(HABITS["bags"], ranks=4, pipeline=2).certificate

    assert certificate is not None
    shapes = certificate.shapes
    assert shapes["total"] == shapes["rejected"] + shapes["pruned"] + shapes["solved"]


class Equilibrium(nn.Module):
    """Goes to a fixed point without gradients, and lets a hook go to that of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.given = nn.Linear(WIDTH, WIDTH, bias=False), linear()
        self.step.weight.data.mul_(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                found = torch.tanh(self.step(found) + self.given(x))
        start = found.clone().requires_grad_()
        again = torch.tanh(self.step(start) + self.given(x))

        def solved(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient
            for _ in range(3):
                total = torch.autograd.grad(again, start, total, retain_graph=True)[0] + gradient
            return total

        out = torch.tanh(self.step(found) + self.given(x))
        if out.requires_grad:
            out.register_hook(solved)
        return out


def test_a_layer_whose_hooks_ask_for_gradients_is_run_again_for_each() -> None:
    report = run(habit(lambda: nn.Sequential(linear(), Equilibrium(), linear())), data_replicate=2, recompute="full")

    assert report.ok, report.lines


def test_a_layer_whose_hooks_ask_for_gradients_is_not_run_again_selectively() -> None:
    model = habit(lambda: nn.Sequential(linear(), Equilibrium(), linear()))

    report = run(model, data_replicate=2, recompute="selective")

    assert "asks for gradients of its own" in str(report.failure)
    assert "recompute=full" in str(report.failure)
