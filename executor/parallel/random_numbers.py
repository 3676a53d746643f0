"""One policy for random numbers: what a model draws depends on the sample, not on the plan.

Dropout. A mask is drawn sample by sample from (seed, step, layer, how-manieth dropout in it, sample of the global
batch), so that it is the same under every plan: ranks with other samples draw other masks, tensor ranks the same where
they have the same activations, and their own part of it where they have a part, be it of the features, the heads or
the sequence.

Everything else that a model or a loss draws from torch's generators, Python's or numpy's (noise, masked tokens, mixup)
begins anew with every micro-batch, from (seed, step, first sample), and in stages with every layer: alike on ranks with
the same samples and layers, independent on others. So it is on context ranks, where one draw may be for all tokens of a
sample (a layer that is left out, the order of words); of noise like tokens each takes the part for its own. What an
optimizer draws in its step begins from (seed, step) and from which shards a rank holds: copies of a parameter stay
alike. What the training script draws outside of `step` is left alone.

Recompute draws again what forward drew, because torch puts its generator back: each dropout draws one number from it,
by which it is known again. Whole layers may run again, too (of a model that calls checkpoint itself): they are known by
what the generator began from before them. Layers that are compiled draw as the compiler likes, from generators that
begin so.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from ...planner.plan.document import Plan
from ...profiler.running.fake_modes import fake_mode
from ...profiler.running.forward_state import changed, draws_of, undone
from ...profiler.running.kept_results import fakes_forgotten
from ...profiler.running.known_numbers import knowing_numbers, known
from ...profiler.semantics.distributions import unvalidated
from ...profiler.semantics.draws import dice_apart, seed_dice
from ...profiler.semantics.token_marks import Held, mark_of, own_shape, set_mark, taken, whole_shape
from ..torch_compat import in_backward
from .dropout_calls import CallsInstead, DropoutName, dropout_names, drops, holds_dropouts
from .mesh import RankMesh
from .rehearsal import copied
from .shared_gradients import hand_on_difference, out_of_sight
from .stage_module import StageModule

_log = logging.getLogger("meshwright")

_Place = tuple[str, int, bool]
"""(layer module, call in this micro-batch, whether after it): where in a forward something is drawn."""

KEEPS_ALL = "keeps_all"
"""Attribute of functions in place of torch's dropouts that keep everything, whoever calls them."""

_FEATURES = {"dropout1d": 1, "dropout2d": 2, "dropout3d": 3}
"""Functions that drop whole features, and how many dims such a feature has."""


class RandomNumbers:
    """The random numbers that a rank draws in its steps. model: whole and unchanged, on the meta device.

    drops: whether the model has dropout; if not, following its layers costs nothing (unless they are on pipeline
    stages). None: its first forward will tell.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: RankMesh, seed: int) -> None:
        self._plan, self._mesh, self.seed = plan, mesh, seed
        says = drops(model)
        self.drops: bool | None = {"yes": True, "perhaps": None}.get(says, False)
        self._dropouts = [] if says == "no" else dropout_names(model)
        self._held = says != "no" and holds_dropouts(model)
        self._shapes: dict[tuple[_Place, int], torch.Size] | None = None
        self._rehearsed: dict[tuple[Any, ...], dict[tuple[_Place, int], torch.Size]] = {}  # by shapes of inputs
        self._whole: nn.Module | None = None
        self._count = plan.num_microbatches
        self._unwatched: list[nn.Module] = []
        if self.drops is None or (self.drops and plan.degrees.tensor > 1):
            with torch.device("meta"):
                self._whole = copied(model, lambda tensor: torch.empty_like(tensor, device="meta"))
        self._generator = torch.Generator(mesh.device)
        self._step = 0, 0
        self._first = 0
        self._calls: Counter[str] = Counter()
        self._place: _Place = ("", 0, False)
        self._next = 0
        self._drawn: dict[int, tuple[_Place, int, int]] = {}
        self._entered: dict[tuple[int, str, bool], tuple[_Place, int]] = {}
        self._given: Counter[int] = Counter()

    def watch(self, module: nn.Module, stages: Iterable[StageModule]) -> None:
        """Follow from now on which layer of the user's `module` is running, and with stages which micro-batch. One
        process may run several copies of a model; each must be watched."""
        own = list(stages)
        for i, stage in enumerate(own):
            stage.register_forward_pre_hook(partial(self._stage_begins, i), prepend=True)
        self._unwatched += [stage.model for stage in own] or [module]
        if self.drops or own:  # the layers of one stage would draw what those of others do
            self._watch()

    def _watch(self) -> None:
        self._watch_layers(self._unwatched)
        self._unwatched = []

    def _watch_layers(self, roots: Iterable[nn.Module]) -> None:
        for root in roots:
            for name in self._plan.model.layer_modules:
                layer = root.get_submodule(name)
                layer.register_forward_pre_hook(partial(self._layer_begins, name), prepend=True)
                layer.register_forward_hook(partial(self._layer_ends, name))

    @contextmanager
    def step(self, number: int, part: int = 0, num_microbatches: int | None = None) -> Iterator[None]:
        """While it lasts (the forward and backward of a step, or of a part of it), draws follow the policy.
        num_microbatches: in this rank's share; None: as in the plan."""
        self._step = number, part
        self._count = self._plan.num_microbatches if num_microbatches is None else num_microbatches
        self._drawn.clear()
        self._entered.clear()
        self._given.clear()
        on_gpu = self._mesh.device.type == "cuda"
        dropping = (
            _replaced(self._dropouts, self._held, self._dropped, self._attended) if self._dropouts else nullcontext()
        )
        with torch.random.fork_rng([self._mesh.device] if on_gpu else []), dice_apart(), dropping:
            yield

    @contextmanager
    def update(self, number: int, shard: int, tied: str) -> Iterator[None]:
        """While it lasts (the optimizer's step), ranks of a stage that hold the same shards draw the same, for replicas
        would drift apart with noise of their own. shard: number of the shards that this rank holds. tied: a parameter
        that another stage holds, too; '' if there is none. Raises ValueError if there is one and the optimizer
        draws."""
        generators = [torch.default_generator]
        if self._mesh.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._mesh.device.index])
        seed = _number(self.seed, number, "update", self._mesh.coordinates["pipeline"], shard)
        with torch.random.fork_rng([self._mesh.device] if len(generators) > 1 else []), dice_apart():
            self._begin(seed)
            seed_dice(seed)
            before = [(place, place.take()) for place in map(draws_of, generators)] if tied else []
            yield
            if changed(before):
                raise ValueError(
                    f"the optimizer draws random numbers in its step, and {tied}, which several stages hold, would get "
                    "others on each of them: plan with --pin pipeline=1, or untie that weight"
                )

    def micro_batch(self, index: int) -> None:
        """The forward of a micro-batch of this rank's share begins."""
        self._first = (self._mesh.data_rank * self._count + index) * self._plan.micro_batch
        self._calls.clear()
        self._enter(("", 0, False))
        seed_dice(of_micro_batch(self.seed, self._step, self._first))

    def rehearse(self, args: Any, kwargs: Any) -> None:
        """See in a forward on fake tensors how large masks are before tensor parallelism cuts them. Does so once for
        inputs of the same shapes.

        args, kwargs: of a micro-batch.
        """
        if self.drops is None:
            self._decide(args, kwargs)
        if self._whole is None:
            return
        key = tuple(leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        if key not in self._rehearsed:
            self._rehearsed[key] = self._seen_in_either(self._whole, args, kwargs)
        self._shapes = self._rehearsed[key]

    def _decide(self, args: Any, kwargs: Any) -> None:
        """Find out whether the model drops, by a forward on fake tensors before the first real one."""
        self.drops, is_seen = True, False
        assert self._whole is not None
        try:
            self.drops = is_seen = bool(self._seen_in_either(self._whole, args, kwargs))
        except Exception as error:  # a forward that decides by values, say
            # layers are watched then, for a little time, and of tensor ranks a dropout is refused once it is met
            _log.debug("dropout was not looked for: %s", error)
        if self.drops:
            self._watch()
        if not is_seen or self._plan.degrees.tensor == 1:
            self._whole = None

    def _seen_in_either(self, whole: nn.Module, args: Any, kwargs: Any) -> dict[tuple[_Place, int], torch.Size]:
        with out_of_sight(), fakes_forgotten():
            try:
                return self._seen(whole, args, kwargs, torch.float32)
            except (RuntimeError, ValueError, TypeError):  # some operators have fake versions in bfloat16 only
                return self._seen(whole, args, kwargs, torch.bfloat16)

    def _seen(
        self, model: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype
    ) -> dict[tuple[_Place, int], torch.Size]:
        found: dict[tuple[_Place, int], torch.Size] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            is_real = leaf.is_floating_point()
            return torch.empty(leaf.shape, dtype=dtype if is_real else leaf.dtype, device=self._mesh.device)

        def see(x: torch.Tensor) -> None:
            found[self._place, self._next] = own_shape(x)
            self._next += 1

        def dropped(original: Callable[..., Any], x: torch.Tensor, p: float, training: bool, inplace: bool) -> Any:
            if training and p > 0:
                see(x)
            return original(x, 0.0, training, inplace)

        def attended(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = _attention(*args, **kwargs)
            query, key = given["query"], given["key"]
            if given["dropout_p"]:
                see(query.new_empty(*query.shape[:-1], key.shape[-2]))
            return original(**{**given, "dropout_p": 0.0})

        def given_as(leaf: Any) -> Any:  # by integers the model may decide
            is_known = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and not leaf.is_meta
            return known(mode, leaf) if is_known else fake(leaf)

        mode = fake_mode()
        with knowing_numbers(mode, "even"), torch.no_grad(), torch.random.fork_rng([]):
            whole = copied(model, fake).train()
            self._watch_layers([whole])
            self._calls.clear()
            self._enter(("", 0, False))
            args, kwargs = tree_map(given_as, (args, kwargs))
            with unvalidated(), undone(whole), self._replacing(dropped, attended):
                whole(*args, **kwargs)
        return found

    def _replacing(self, dropped: Callable[..., Any], attended: Callable[..., Any]) -> AbstractContextManager[None]:
        return _replaced(self._dropouts, self._held, dropped, attended)

    def _stage_begins(self, stage: int, module: nn.Module, args: Any) -> None:
        self.micro_batch(self._given[stage])
        self._given[stage] += 1

    def _layer_begins(self, name: str, module: nn.Module, args: Any) -> None:
        self._pass((name, self._calls[name], False))

    def _layer_ends(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._pass((name, self._calls[name], True))
        self._calls[name] += not in_backward()

    def _pass(self, place: _Place) -> None:
        """Enter a place. In backward, where a layer runs again, it is the place that this layer was in during
        forward."""
        come_from = torch.default_generator.initial_seed(), place[0], place[2]
        if not in_backward():
            self._entered[come_from] = place, self._first
            self._enter(place)
        elif come_from in self._entered:  # else torch was told not to put its generator back
            place, self._first = self._entered[come_from]
            self._enter(place)

    def _enter(self, place: _Place) -> None:
        self._place, self._next = place, 0
        self._begin(_number(self.seed, self._step, self._first, place))

    def _begin(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._mesh.device.type == "cuda":
            torch.cuda.default_generators[self._mesh.device.index].manual_seed(seed)

    def _dropped(
        self, original: Callable[..., Any], x: torch.Tensor, p: float, training: bool, inplace: bool
    ) -> torch.Tensor:
        if not training or not 0 < p <= 1 or torch.compiler.is_compiling() or _is_fake(x):
            return original(x, p, training, inplace)  # type: ignore[no-any-return]
        self._check_known(p)
        with torch._C.DisableTorchFunction():
            factor = self._mask(x, p, _FEATURES.get(original.__name__))
            kept = x.mul_(factor) if inplace else x * factor
            kept = (kept.mul_ if inplace else kept.mul)(1 / (1 - p) if p < 1 else 0.0)
        set_mark(kept, mark_of(x))
        # Whoever looks at torch's functions sees one dropout, which made this.
        return original(hand_on_difference(kept, x), 0.0, training, inplace)  # type: ignore[no-any-return]

    def _attended(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        given = _attention(*args, **kwargs)
        query, p = given["query"], given["dropout_p"]
        if not p or torch.compiler.is_compiling() or _is_fake(query) or mark_of(query) is not None:
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        self._check_known(p)
        if query.device.type != "cpu":
            return self._fused(original, args, kwargs)
        return _attention_in_parts(**given)

    def _check_known(self, p: float) -> None:
        if self.drops is False:
            raise ValueError(
                f"a dropout of {p:g} was met in a model that dropped nothing before, whose layers are not watched: "
                "let the function that builds the model begin with a rate above 0 (1e-6, say), and raise that"
            )

    def _fused(self, original: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
        """Attention in a fused kernel, which draws for all heads and samples at once: other numbers on every rank, and
        in recompute the same as in forward."""
        place, index, first = self._known_again()
        with torch.random.fork_rng([self._mesh.device]):
            tensor_rank = self._mesh.coordinates["tensor"]
            seed = _number(self.seed, self._step, place, index, first, tensor_rank)
            torch.cuda.default_generators[self._mesh.device.index].manual_seed(seed)
            return original(*args, **kwargs)  # type: ignore[no-any-return]

    def _known_again(self) -> tuple[_Place, int, int]:
        """(place, number of the dropout there, first sample) of a dropout that draws now. In recompute it is known by
        the number that it draws from the generator, and gets the same answer as in forward."""
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        if drawn not in self._drawn:
            self._drawn[drawn] = self._place, self._next, self._first
            self._next += 1
        return self._drawn[drawn]

    def _mask(self, x: torch.Tensor, p: float, feature_dims: int | None) -> torch.Tensor:
        """Mask of the elements that dropout keeps, of those that are on this rank; as booleans."""
        place, index, first = self._known_again()
        local = list(whole_shape(x))
        whole = list(local)
        if self._plan.degrees.tensor > 1:
            shapes = self._shapes or {}
            if (place, index) not in shapes or len(shapes[place, index]) != len(local):
                raise ValueError(
                    f"dropout {index} of {place[0] or 'the model'} was not met when the model ran as a whole, so that "
                    "tensor ranks cannot draw one mask: plan with tensor=1, or without dropout there"
                )
            whole = list(shapes[place, index])
        if feature_dims is not None and len(whole) > feature_dims:
            whole[-feature_dims:] = local[-feature_dims:] = [1] * feature_dims
        key = _number(self.seed, self._step, place, index)
        size = self._plan.micro_batch
        if not whole or whole[0] % size:  # samples cannot be told apart: of the micro-batch
            mask = self._drawn_mask(key, (first, "together"), whole, p)
            return self._own_part(mask, local, x)
        shape, own = [whole[0] // size, *whole[1:]], [local[0] // size, *local[1:]]
        parts = [self._own_part(self._drawn_mask(key, first + i, shape, p), own) for i in range(size)]
        return self._own_part(torch.cat(parts), local, x)

    def _drawn_mask(self, key: int, sample: Any, shape: list[int], p: float) -> torch.Tensor:
        self._generator.manual_seed(_number(key, sample))
        empty = torch.empty(shape, dtype=torch.bool, device=self._mesh.device)
        return empty.bernoulli_(1 - p, generator=self._generator)

    def _own_part(self, mask: torch.Tensor, own: list[int], x: torch.Tensor | None = None) -> torch.Tensor:
        """This tensor rank's part of a mask, along dims that are cut; if x is marked, only for its tokens."""
        degree, rank = self._plan.degrees.tensor, self._mesh.coordinates["tensor"]
        for dim, size in enumerate(own):
            if mask.shape[dim] != size:
                if mask.shape[dim] != size * degree:
                    raise ValueError(
                        f"dropout of a tensor of {tuple(own)}, which is {tuple(mask.shape)} in the whole model, is no "
                        f"equal part of tensor={degree}: plan with tensor=1, or without dropout there"
                    )
                mask = mask.narrow(dim, rank * size, size)
        mark = None if x is None else mark_of(x)
        return taken(mask, mark) if isinstance(mark, Held) else mask


@contextmanager
def _replaced(
    places: Sequence[DropoutName], held: bool, dropped: Callable[..., Any], attended: Callable[..., Any]
) -> Iterator[None]:
    """While it lasts, these functions run in place of torch's dropouts and attention; each is given the original first.
    Dropouts that keep everything (one_process.py) stay as they are. held: the model holds some of them in other ways
    than by name, so that all calls of torch's functions are looked at."""
    if getattr(functional.dropout, KEEPS_ALL, False):
        yield
        return

    def dropout(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)  # tensors between layers are known by the name of the function that made them
        def run(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            return dropped(original, input, p, training, inplace)

        return run

    def of_torch(input: torch.Tensor, p: float, train: bool) -> Any:
        return dropped(_plain_dropout, input, p, train, False)

    originals = {place.original for place in places}
    instead = {
        original: of_torch
        if original is _torchs_dropout
        else wraps(original)(partial(attended, original))
        if original.__name__ == "scaled_dot_product_attention"
        else dropout(original)
        for original in originals
    }
    before = [place.namespace[place.name] for place in places]  # others, in a rehearsal within a step
    try:
        for place in places:
            place.namespace[place.name] = instead[place.original]
        with CallsInstead(instead) if held else nullcontext():
            yield
    finally:
        for place, replaced in zip(places, before, strict=True):
            place.namespace[place.name] = replaced


_torchs_dropout = torch.dropout


def _plain_dropout(x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
    return _torchs_dropout(x, p, training)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    return locals()


def _attention_in_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """scaled_dot_product_attention as its documentation spells it out, so that its dropout is one by sample."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return functional.dropout(scores.softmax(-1), dropout_p) @ value


def of_micro_batch(seed: int, step: tuple[int, int], first: int) -> int:
    """The seed of Python's and numpy's random numbers for a micro-batch. step: (number of the step, part of it). first:
    number of the micro-batch's first sample in the global batch."""
    return _number(seed, step, first)


def _is_fake(x: torch.Tensor) -> bool:
    return isinstance(x, FakeTensor) or x.device.type == "meta"


def _number(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
