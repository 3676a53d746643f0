"""Profile a model on fake tensors: its chain of layers, and what one layer of each class does and keeps.

No GPU and no memory are needed: the model is built on the meta device and run on fake tensors, in bfloat16, so that
tensors of the compute dtype can be told from those of a dtype of their own (fp32 losses, integer indices).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._pytree import tree_leaves

from ..document import in_a_sentence
from ..garbage import without_garbage_collection
from ..machine.units import first_of
from ..running.fake import (
    DecidesByDrawsError,
    DecidesByValuesError,
    FakeModel,
    NoLossError,
    TokenByTokenError,
    fake_model,
    real_model,
)
from ..running.forward_state import undone
from ..running.held_tensors import held_beside
from ..running.kept_results import fakes_forgotten, forget_fakes
from ..running.parameter_reads import parameters_read
from ..running.token_loops import FEWEST_OPERATORS, OPERATORS_OF_LOOPS, few_tokens, merged
from ..tensor_cuts.context_trial import backward_problem, context_problem
from ..tensor_cuts.tensor_cuts import Found, common_degree, find_cuts
from .batches import batch_problem, list_of_samples
from .building import WAS_SPARSE
from .chain import Layer, LayerChain
from .class_costs import Costed, layer_class_of
from .coupling import Coupling, samples_of
from .crossing_tensors import batch_tensors, crossing_tensors
from .expert_trial import with_problems
from .failures import ForwardError
from .lengths import at_seq_len
from .loaded import Choices, LoadedModel
from .mixed_precision import mixed_precision_problem
from .model_profile import LayerClass, LayerProfile, ModelProfile, TensorCut, fingerprint_of
from .observe import longest_throw, observe
from .other_runs import shapes_at, unlike_crossings
from .run_sizes import RunSizes

_SHORTEST = 16
"""Below this many tokens a quarter of the sequence is too short to run."""

_LONGEST_REAL = 256
"""Tokens per sample of a run on real tensors; longer ones follow from it and two shorter runs."""

_MOST_REAL_ELEMENTS = 500_000_000
"""Most parameters of a model that is run on real tensors: 2 GB in fp32, and as much again for gradients."""

_BY_VALUES = "it decides by values, which change with the precision"

Progress = Callable[[str, int, int], None]
"""Called with (layer, layers done, layers in all) before a layer of each class is run alone."""


def trace(
    loaded: LoadedModel,
    *,
    seq_len: int | None = None,
    lengths: bool = False,
    cuts: bool = True,
    progress: Progress = lambda layer, done, total: None,
) -> ModelProfile:
    """Profile of the model at `seq_len` tokens per sample (default: its own length).

    lengths: run it at two shorter lengths as well, so that at_seq_len gives the profile at any length.
    cuts: look for what tensor parallelism may cut, and run layers cut, too, which takes most of the time.
    Raises ValueError in words where the model cannot be built, does not take its batch, or decides by values.
    """
    if seq_len is not None:
        loaded = loaded.with_seq_len(seq_len)
    with without_garbage_collection(), _in_words(loaded), fakes_forgotten():
        try:
            return _without_numbers(loaded, lengths, progress, cuts)
        except DecidesByValuesError as error:
            decision, draws = str(error), isinstance(error, DecidesByDrawsError)
        try:
            if draws:
                return _by_values(loaded, decision, lengths, progress, cuts, draws)
            profile = _without_numbers(loaded, lengths, progress, cuts, knows_layout=True)
        except DecidesByValuesError as error:
            return _by_values(loaded, decision, lengths, progress, cuts, isinstance(error, DecidesByDrawsError))
        note = f"goes the way of its batch function's integers, by which {decision} decides: others may lead elsewhere"
        return profile.model_copy(update={"notes": (note, *profile.notes)})


@contextmanager
def _in_words(loaded: LoadedModel) -> Iterator[None]:
    """While it lasts, a profile that breaks a rule of its document raises ValueError with a sentence on the model."""
    try:
        yield
    except ValidationError as error:
        what = in_a_sentence(error).removeprefix("the document: ")
        raise ValueError(f"{loaded.source} cannot be priced: {what}") from error


def _without_numbers(
    loaded: LoadedModel, lengths: bool, progress: Progress, cuts: bool, *, knows_layout: bool = False
) -> ModelProfile:
    try:
        return _on_fake_tensors(loaded, lengths, progress, may_loop=False, cuts=cuts, knows_layout=knows_layout)
    except TokenByTokenError as error:
        return _of_few_tokens(loaded, lengths, progress, knows_layout, error.module)


def _on_fake_tensors(
    loaded: LoadedModel,
    lengths: bool,
    progress: Progress,
    *,
    may_loop: bool = True,
    knows_layout: bool = False,
    cuts: bool = True,
    notes: tuple[str, ...] = (),
    other_lengths: tuple[int, ...] = (),
) -> ModelProfile:
    """The profile of a model on fake tensors. other_lengths: at which it is run, too, if not at a half and a quarter of
    its own. may_loop: if False, TokenByTokenError is raised when a module runs as many operators as there are tokens,
    or very many."""
    most = None
    if loaded.seq_len is not None and not may_loop:
        most = min(max(FEWEST_OPERATORS, loaded.seq_len), OPERATORS_OF_LOOPS)
    try:
        return _profile(
            fake_model(loaded, torch.bfloat16, knows_layout), notes, lengths, progress, most, cuts, other_lengths
        )
    except NoLossError as error:  # other precisions or numbers of samples do not help
        raise ValueError(str(error)) from None
    except ValueError as error:
        why = error.why if isinstance(error, ForwardError) else str(error)
        note = f"profiled in float32, because it does not run in bfloat16: {why}"
        try:  # in float32 it may run as it is
            fake = fake_model(loaded, torch.float32, knows_layout)
            return _profile(fake, (*notes, note), lengths, progress, most, cuts, other_lengths)
        except ValueError:
            _check_groups(loaded, why)
            raise error from None


_SIZES = (1, 2, 3, 4, 6, 8)
"""Numbers of samples that are tried if a model does not run."""


def _check_groups(loaded: LoadedModel, why: str) -> None:
    """Raises ValueError if a model runs with some numbers of samples and not with others; does nothing if it runs with
    all or with none of those that are tried. why: what the run that failed said."""
    fake = fake_model(loaded, torch.float32)
    runs = []
    for size in _SIZES:
        with suppress(Exception):  # of the batch function's own, too
            batch = fake.batch(size, loaded.seq_len)
            with fake.running():
                fake.loss(batch)
            runs.append(size)
    if not runs or runs == [*_SIZES]:
        return
    if runs == [*_SIZES[1:]]:
        raise ValueError(
            f"{loaded.source} runs with several samples and not with one alone ({why}), which a rank may be given: let "
            "it take one, too (a dim of size 1 that is dropped is to be named, as in squeeze(-1), and no more of a "
            "batch's samples are to be picked than there are)"
        )
    raise ValueError(
        f"{loaded.source} runs with {', '.join(map(str, runs))} samples and not with other numbers up to {_SIZES[-1]} "
        f"({why}): if samples come in groups (pairs, answers to one prompt), let a sample be a group, batch(size) give "
        "tensors of [size, samples of a group, ...] and the model flatten them, so that no micro-batch parts one"
    )


def _of_few_tokens(
    loaded: LoadedModel, lengths: bool, progress: Progress, knows_layout: bool, module: str
) -> ModelProfile:
    """Profile of a model that may go through its tokens one by one, or in pieces: if so, from runs of few, as much
    shorter. module: where it may do so, '' if anywhere."""
    seq_len, short = loaded.seq_len, few_tokens(loaded, knows_layout, module)
    if seq_len is None or short is None or short.tokens >= seq_len:
        return _on_fake_tensors(loaded, lengths, progress, knows_layout=knows_layout)
    notes = (short.note,)
    try:
        of_few = loaded.with_seq_len(short.tokens)
        runs = _on_fake_tensors(
            of_few, True, progress, knows_layout=knows_layout, notes=notes, other_lengths=short.shorter
        )
        few = merged(runs)
        profile = at_seq_len(few, seq_len)
        others = tuple(at_seq_len(few, seq_len // part) for part in (2, 4)) if lengths else ()
    except ValueError:  # it does not take so few, or runs other layers then
        return _on_fake_tensors(loaded, lengths, progress, knows_layout=knows_layout, notes=notes)
    return profile.model_copy(update={"other_lengths": others})


def _by_values(
    loaded: LoadedModel, decision: str, lengths: bool, progress: Progress, cuts: bool, draws: bool
) -> ModelProfile:
    """Profile of a model that decides by numbers that only its weights can give. If these decide no more than how many
    rows each expert gets (or the model is too large for real numbers), choices are taken to be even; else it is run on
    real numbers. draws: it decides by Python's or numpy's random numbers."""
    elements = sum(parameter.numel() for parameter in fake_model(loaded, torch.float32).module.parameters())
    even, first = (replace(loaded, choices=choices) for choices in _CHOICES)
    note = (
        f"experts are taken to be chosen evenly, as many tokens for each: by what a router chooses {decision} decides"
    )
    is_large = elements > _MOST_REAL_ELEMENTS
    try:
        alike = not draws and _are_alike(even, first)
        if alike or is_large:
            profile = _without_numbers(even, lengths, progress, cuts, knows_layout=True)
            update: dict[str, Any] = {"notes": (note, *profile.notes)}
            if not alike:
                update["decides_by_values"] = decision
            return profile.model_copy(update=update)
    except DecidesByValuesError as error:
        if is_large:
            raise ValueError(
                f"{loaded.source} decides by the values of its tensors what to compute, at {decision}, so it must be "
                f"run with real numbers; {elements:,} parameters are too many for that (at most "
                f"{_MOST_REAL_ELEMENTS:,}). Let the decision depend on shapes or on the configuration, or profile a "
                "smaller version: model.py:small"
            ) from error
    except ValueError:  # what it does not do on fake tensors it may do on real ones
        if is_large:
            raise
    return _on_real_tensors(loaded, decision, lengths, progress, draws)


_CHOICES: tuple[Choices, Choices] = ("even", "first")


def _are_alike(one: LoadedModel, other: LoadedModel) -> bool:
    """Whether two ways of choosing experts make no difference to a forward but in how many rows each expert gets: it
    reads the same parameters, and the tensors for later layers have the same sizes."""
    if parameters_read(one) != parameters_read(other):
        return False
    seen = []
    for loaded in (one, other):
        fake = fake_model(loaded, torch.bfloat16, knows_layout=True)
        chain = observe(fake, 2, loaded.seq_len)
        seen.append([(crossing.producer, crossing.spec.shape) for crossing in chain.crossings])
    return seen[0] == seen[1]


def _on_real_tensors(
    loaded: LoadedModel, decision: str, lengths: bool, progress: Progress, draws: bool
) -> ModelProfile:
    """Profile of the layers that run with real numbers; one sample, repeated, is the batch, so every batch takes the
    same way. draws: the model decides by Python's or numpy's random numbers; then of several ways that these give the
    longest is taken."""
    seq_len = loaded.seq_len
    if seq_len is not None and seq_len > _LONGEST_REAL:
        loaded, lengths = loaded.with_seq_len(_LONGEST_REAL), True
    note = (
        f"run on real tensors, because {decision} decides by values: what the other branch costs is not in the profile"
    )
    fake = real_model(loaded)
    if draws:
        fake = replace(fake, dice=longest_throw(fake, loaded.seq_len))
    profile = _profile(fake, (note,), lengths, progress)
    profile = profile.model_copy(update={"decides_by_values": decision})
    return profile if seq_len in (None, profile.seq_len) else at_seq_len(profile, seq_len)


def _profile(fake: FakeModel, *given: Any) -> ModelProfile:
    """The profile that `_profiled` makes; whatever the code of the model and of its loss counts and draws meanwhile is
    put back."""
    with undone(fake.module, fake.loaded.loss):
        return _profiled(fake, *given)


def _profiled(
    fake: FakeModel,
    notes: tuple[str, ...],
    lengths: bool,
    progress: Progress,
    most_operators: int | None = None,
    cuts: bool = True,
    other_lengths: tuple[int, ...] = (),
) -> ModelProfile:
    loaded = fake.loaded
    _check_trainable(fake)
    chain = observe(fake, 2, loaded.seq_len, most_operators)
    sizes = RunSizes(fake, chain, loaded.seq_len, chain.shapes)
    _check_sizes(loaded, chain, sizes)
    _check_positions(loaded, sizes)
    firsts = sorted(set(chain.representatives()))
    found = _found_cuts(fake, chain, sizes, firsts) if cuts else dict.fromkeys(firsts, Found())
    problem = mixed_precision_problem(fake, chain) if fake.mode is not None else _BY_VALUES
    profile, costed = _profile_at(fake, chain, sizes, found, problem, notes, progress)
    forget_fakes()  # what follows runs on real tensors
    profile = with_problems(loaded, profile)
    samples = samples_of(loaded, profile, sizes)
    coupling = samples.coupling
    problem_of_cuts, unlike = unlike_crossings(fake, chain, 2)
    profile = profile.model_copy(
        update={
            "context_problem": context_problem(fake, profile, chain.repeats_reentrantly)
            or backward_problem((each.whole[0] for each in costed.values()), profile.seq_len)
            or _of_bank(samples.bank),
            "coupling": coupling.words if coupling is not None and coupling.much else "",
            "gradient_problem": samples.gradients,
            "pipeline_problem": problem_of_cuts,
            "tensors": tuple(t.model_copy(update={"varies": t.producer in unlike}) for t in profile.tensors),
            "told": (*_slight(coupling), *profile.told),
        }
    )
    if not lengths or loaded.seq_len is None or (loaded.seq_len < _SHORTEST and not other_lengths):
        return profile
    others = []
    for seq_len in other_lengths or (loaded.seq_len // 2, loaded.seq_len // 4):
        try:
            shorter = RunSizes(fake, chain, seq_len, shapes_at(fake, chain, 2, seq_len), sizes)
            others.append(_profile_at(fake, chain, shorter, found, problem, (), progress, costed)[0])
        except ValueError as error:
            told = f"holds one sequence length only, because at {seq_len} tokens: {error}"
            return profile.model_copy(update={"notes": (*profile.notes, told)})
    return profile.model_copy(update={"other_lengths": tuple(others)})


def _slight(coupling: Coupling | None) -> tuple[str, ...]:
    if coupling is None or coupling.much:
        return ()
    return (f"samples of a micro-batch see each other a little: {coupling.words}; plan verify says what it does",)


def _profile_at(
    fake: FakeModel,
    chain: LayerChain,
    sizes: RunSizes,
    found: dict[int, Found],
    mixed_precision: str,
    notes: tuple[str, ...],
    progress: Progress,
    like: dict[int, Costed] | None = None,
) -> tuple[ModelProfile, dict[int, Costed]]:
    """The profile at one length, and [first layer of a class] -> what it was found to cost. like: the same at another
    length, if there is one."""
    loaded = fake.loaded
    firsts = sorted(found)
    class_of = {first: i for i, first in enumerate(firsts)}
    costed = dict[int, Costed]()
    for done, first in enumerate(firsts):
        progress(chain.layers[first].name, done, len(firsts))
        costed[first] = layer_class_of(fake, chain, sizes, first, found[first], like[first] if like else None)
    classes = _uniquely_named([each.layer_class for each in costed.values()])
    layers = tuple(
        LayerProfile(
            name=layer.name,
            layer_class=class_of[first],
            root=layer.root,
            modules=layer.units,
            parameters=layer.parameters,
        )
        for layer, first in zip(chain.layers, chain.representatives(), strict=True)
    )
    _check_complete(fake, layers)
    batch = batch_tensors(fake, sizes)
    profile = ModelProfile(
        name=loaded.name,
        source=loaded.source,
        fingerprint="",
        seq_len=sizes.seq_len,
        torch_version=torch.__version__,
        classes=classes,
        layers=layers,
        tensors=crossing_tensors(fake, chain, sizes, {first: each.whole[0] for first, each in costed.items()}),
        ties=_ties(fake, layers),
        buffers=fake.buffers,
        batch=batch,
        batch_problem=list_of_samples(loaded) or batch_problem(batch),
        sharding_problem=chain.sharding_problem,
        hooks_gradients=chain.hooks_gradients,
        repeats_reentrantly=chain.repeats_reentrantly,
        repeats_selectively=chain.repeats_selectively,
        untrained=_untrained(fake),
        returns_loss=loaded.loss is None,
        attention_modules=_attention_modules(chain, found),
        mixed_precision_problem=mixed_precision,
        smallest_micro_batch=2 if sizes.one.refused else 1,
        global_batch=loaded.global_batch,
        longest_seq_len=sizes.longest,
        assumes=loaded.assumes,
        told=(*chain.told, *_batch_norms(fake)),
        notes=(
            *notes,
            *loaded.notes,
            *_dense(fake),
            *chain.notes,
            *(note for i in firsts for note in found[i].notes),
            *(
                f"{chain.layers[i].name}: on no slices of the sequence, {costed[i].unsliced}"
                for i in firsts
                if costed[i].unsliced
            ),
            *(_uncut(classes, [found[i].notes for i in firsts]) if fake.mode is not None else (_NO_CUTS,)),
        ),
    )
    return profile.model_copy(update={"fingerprint": fingerprint_of(profile)}), costed


def _found_cuts(fake: FakeModel, chain: LayerChain, sizes: RunSizes, firsts: Sequence[int]) -> dict[int, Found]:
    """Cuts of each class's first layer; together they must allow a common degree and agree on tied parameters."""
    if fake.mode is None:
        return dict.fromkeys(firsts, Found())
    found = {}
    for index in firsts:
        seen = find_cuts(fake, chain, index, (sizes.one, sizes.two), sizes.seq_len)
        layer = chain.layers[index]
        if any(fake.kept_as.get(name) == "nf4" for name in layer.parameters):
            told = f"{layer.name}: not cut by tensor parallelism, because its frozen weights are kept in 4 bits"
            seen = replace(seen, cuts=(), notes=(told,))
        found[index] = seen if not seen.cuts or common_degree(seen.cuts) else _with_common_degree(chain, index, seen)
    return _agreeing_on_ties(fake, chain, found)


def _with_common_degree(chain: LayerChain, index: int, found: Found) -> Found:
    cuts: list[TensorCut] = []
    notes = list(found.notes)
    for cut in found.cuts:
        if common_degree([*cuts, cut]):
            cuts.append(cut)
        else:
            names = ", ".join((*cut.columns, *cut.rows))
            notes.append(f"{chain.layers[index].name}: {names} not cut, no small degree divides it and the others")
    return replace(found, cuts=tuple(cuts), notes=tuple(notes))


def _agreeing_on_ties(fake: FakeModel, chain: LayerChain, found: dict[int, Found]) -> dict[int, Found]:
    """The cuts, without those of a parameter that several layers read and that is not cut alike in all of them; a note
    tells of each cut that is left out."""
    named = dict(fake.module.named_parameters(remove_duplicate=False))
    ways: dict[int, set[int | None]] = defaultdict(set)
    for layer, first in zip(chain.layers, chain.representatives(), strict=True):
        representative = chain.layers[first]
        for name, like in zip(layer.parameters, representative.parameters, strict=True):
            ways[id(named[name])].add(_cut_dim(found[first].cuts, representative, like))
    agreed = {}
    for index, seen in found.items():
        layer = chain.layers[index]
        kept = []
        notes = list(seen.notes)
        for cut in seen.cuts:
            prefix = layer.root + "." if layer.root else ""
            if all(len(ways[id(named[prefix + name])]) == 1 for name in cut.sharded):
                kept.append(cut)
            else:
                name = f"{prefix}{cut.columns[0]}".rstrip(".")
                notes.append(f"{name}: not cut, because its weight is shared with a module that is not")
        agreed[index] = replace(seen, cuts=tuple(kept), notes=tuple(notes))
    return agreed


def _cut_dim(cuts: Sequence[TensorCut], layer: Layer, name: str) -> int | None:
    relative = name.removeprefix(layer.root + ".") if layer.root else name
    return next((cut.sharded[relative] for cut in cuts if relative in cut.sharded), None)


def _uniquely_named(classes: Sequence[LayerClass]) -> tuple[LayerClass, ...]:
    """Classes of one module type are told apart by number: T5Block, T5Block.2, ..."""
    count: dict[str, int] = defaultdict(int)
    named = []
    for layer_class in classes:
        count[layer_class.name] += 1
        number = count[layer_class.name]
        name = layer_class.name if number == 1 else f"{layer_class.name}.{number}"
        named.append(layer_class.model_copy(update={"name": name}))
    return tuple(named)


def _of_bank(name: str) -> str:
    """A sentence on a bank of experts whose result for a token depends on the other tokens; '' if there is none."""
    return f"{name} makes something else of a token where it is given others with it" if name else ""


def _ties(fake: FakeModel, layers: Sequence[LayerProfile]) -> tuple[tuple[str, ...], ...]:
    """Groups of names of one parameter, in the order in which layers read them; names that no layer reads come last."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in fake.module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    order = {name: i for i, name in reversed(list(enumerate(n for layer in layers for n in layer.parameters)))}
    return tuple(
        tuple(sorted(group, key=lambda name: order.get(name, len(order)))) for group in names.values() if len(group) > 1
    )


def _attention_modules(chain: LayerChain, found: dict[int, Found]) -> tuple[str, ...]:
    """Full names of the modules that call fused attention, in every layer."""
    return tuple(
        ".".join(part for part in (layer.root, name) if part)
        for layer, first in zip(chain.layers, chain.representatives(), strict=True)
        for name in found[first].attention_modules
    )


def _plain_name(layer_class: LayerClass) -> str:
    """A class's name without the number that tells it from others of the same name."""
    return layer_class.name.partition(".")[0]


_NO_CUTS = "not cut by tensor parallelism, because it decides by values, of which each rank would have others"


def _uncut(classes: Sequence[LayerClass], notes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """A note on classes of layers whose matrices tensor parallelism cannot cut; () if there are none. notes: for each
    class; a class with notes of its own is left out here."""
    whole = [c for c, said in zip(classes, notes, strict=True) if not (c.cuts or said)]
    uncut = [c for c in whole if any(len(p.shape) > 1 for p in c.parameters)]
    cut = {_plain_name(c) for c in classes if c.cuts}
    names = dict.fromkeys(f"some {name}" if name in cut else name for name in map(_plain_name, uncut))
    if not names:
        return ()
    return (f"no weights to cut by tensor parallelism (no linear layers in column-row pairs) in: {', '.join(names)}",)


def _batch_norms(fake: FakeModel) -> tuple[str, ...]:
    """A note on batch norms, if there are any: their statistics are those of one rank's micro-batch, so numbers change
    with the layout."""
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    norms = {name: m for name, m in fake.module.named_modules() if isinstance(m, kinds)}
    names = [name for name, norm in norms.items() if norm.training or not norm.track_running_stats]
    if not names:
        return ()
    return (
        f"{first_of(names)} takes its statistics from the micro-batch of one rank, so the numbers change with data "
        "parallelism and micro-batch, as in any framework; group norm would not",
    )


def _dense(fake: FakeModel) -> tuple[str, ...]:
    names = [name for name, module in fake.module.named_modules() if WAS_SPARSE in module.__dict__]
    if not names:
        return ()
    return (f"{first_of(names, 'embeddings')} trains with dense gradients, not sparse ones",)


def _untrained(fake: FakeModel) -> str:
    """A note on trainable parameters that the model holds but has not registered; '' if there are none. Torch does not
    train them, and neither does a plan."""
    held = held_beside(fake.module)
    places = [place for place, tensor in held if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
    if not places:
        return ""
    return (
        f"{first_of(places)} is not registered, so the model does not have it as a parameter, and it stays as it is "
        "made: nn.ModuleList, nn.ModuleDict and nn.ParameterList register what they hold"
    )


def _check_sizes(loaded: LoadedModel, chain: LayerChain, sizes: RunSizes) -> None:
    """Raises ValueError if what the batch function or the model makes does not grow with the number of samples. Tensors
    that are made between layers and depend on no parameter are not looked at: every stage makes them itself."""
    one, two = ([x.shape for x in tree_leaves(loaded.batch(n)) if isinstance(x, torch.Tensor)] for n in (1, 2))
    if one == two:
        raise ValueError(
            f"batch(1) and batch(2) of {loaded.source} both give tensors of {[list(shape) for shape in one]}: it "
            "ignores its size, so what one sample costs cannot be known; make tensors of `size` samples, for example "
            "torch.randn(size, 512)"
        )
    crossing = {crossing.producer for crossing in chain.crossings}
    calls = [Counter((p.kind, p.name) for p in shapes.tensors) for shapes in (sizes.one, sizes.two)]
    for producer, other in sizes.two.tensors.items():
        tensor = sizes.one.tensors.get(producer)
        if tensor is None and producer in crossing:
            often, twice = (of_run[producer.kind, producer.name] for of_run in calls)
            if often:
                raise ValueError(
                    f"{producer.name} of {loaded.source} makes {often} tensor(s) of one sample, and {twice} of two: it "
                    "is called for each by itself, and layers after it read them; give it all of a batch in one call"
                )
            raise ValueError(
                f"{producer.name} of {loaded.source} makes {list(other.shape)} of two samples, which layers after it "
                "read, and is not called for one: let the forward call the same functions for any number of samples"
            )
        is_same = calls[0][producer.kind, producer.name] == calls[1][producer.kind, producer.name]
        seen = producer.kind == "module" or producer in crossing or (other.requires_grad and is_same)
        if seen and tensor is not None and len(other.shape) != len(tensor.shape):
            raise ValueError(
                f"{producer.name} of {loaded.source} makes {list(tensor.shape)} of one sample, but {list(other.shape)} "
                "of two, so a dim of size 1 is dropped, which that of one sample is, too: name the dim to drop, as in "
                "squeeze(-1), and reshape by what keeps dims of size 1 (einx drops them)"
            )


def _check_positions(loaded: LoadedModel, sizes: RunSizes) -> None:
    for name, (rows, highest) in sizes.one.furthest.items():
        if highest < rows:
            continue
        most = "" if sizes.longest is None else f": give --seq-len {sizes.longest} or less, or make the table longer"
        at = "its own batch" if sizes.seq_len is None else f"{sizes.seq_len} tokens per sample"
        raise ValueError(f"at {at} {loaded.source} reads row {highest} of {name}, which has {rows} rows{most}")


def _check_trainable(fake: FakeModel) -> None:
    if not any(p.requires_grad for p in fake.module.parameters()):
        raise ValueError(
            f"{fake.loaded.source} has no parameter with requires_grad=True, so there is nothing to train; "
            "return the module with trainable parameters"
        )


def _check_complete(fake: FakeModel, layers: Sequence[LayerProfile]) -> None:
    named = dict(fake.module.named_parameters(remove_duplicate=False))
    listed = {id(named[name]) for layer in layers for name in layer.parameters}
    missing = [name for name, parameter in named.items() if id(parameter) not in listed]
    assert not missing, f"parameters in no layer: {missing}"
