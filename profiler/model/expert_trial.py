"""Banks of experts on real numbers: whether parts of one, each with some of the experts, make what the whole makes.

Operators tell that a bank is linear in its weights (expert_banks.py). They do not tell what else it does with the
numbers of experts, with the rows beside each other, or with the places of a token's experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from ..running.forward_state import changed, places_of, put_back, taken, undone
from ..semantics.draws import SameDraws, dice_apart
from ..threads import one_thread
from .building import in_training
from .coupling import as_float, small_enough, upcast
from .expert_banks import routing_of
from .loaded import LoadedModel, split_inputs
from .model_profile import Experts, ModelProfile

_SAMPLES = 2
_SHORT = 16

_ROUNDING = 1e-3
"""Relative difference that rounding in fp32 may make in what a bank returns and in its gradients."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def with_problems(loaded: LoadedModel, profile: ModelProfile) -> ModelProfile:
    """The profile, with a note on each bank of experts that ranks cannot run parts of. Models that are too large for
    real numbers are not tried."""
    banks = {
        f"{layer.root}.{bank.module}".strip("."): (layer.layer_class, bank)
        for layer in profile.layers
        for bank in profile.classes[layer.layer_class].experts
        if bank.called and not bank.problem and bank.count > 1
    }
    small = small_enough(loaded, profile) if banks else None
    if small is None:
        return profile
    problems: dict[tuple[int, str], str] = {}
    for name, found in _problems(small, {name: bank for name, (_, bank) in banks.items()}).items():
        place, bank = banks[name]
        problems.setdefault((place, bank.module), found)
    if not problems:
        return profile

    def told(bank: Experts, place: int) -> Experts:
        return bank.model_copy(update={"problem": problems.get((place, bank.module), bank.problem)})

    classes = (
        c.model_copy(update={"experts": tuple(told(bank, place) for bank in c.experts)})
        for place, c in enumerate(profile.classes)
    )
    return profile.model_copy(update={"classes": tuple(classes)})


def _problems(loaded: LoadedModel, banks: dict[str, Experts]) -> dict[str, str]:
    """Name of a bank of experts -> why ranks cannot run parts of it, for those banks where that shows in one
    forward."""
    with torch.random.fork_rng(devices=[]), dice_apart(), one_thread():
        torch.manual_seed(0)
        try:
            module = in_training(upcast(loaded.build()))
            calls = _calls(module, loaded, set(banks))
        except Exception:  # it runs at one length only, or not on a CPU: nothing is seen
            return {}
        found = {name: problem_of(module.get_submodule(name), banks[name], call) for name, call in calls.items()}
    return {name: problem for name, problem in found.items() if problem}


def _calls(module: nn.Module, loaded: LoadedModel, names: set[str]) -> dict[str, Call]:
    """Name of a bank -> the arguments of its first call in one forward."""
    short = loaded.seq_len is not None and loaded.seq_len > _SHORT
    given = tree_map(as_float, (loaded.with_seq_len(_SHORT) if short else loaded).batch(_SAMPLES))
    calls: dict[str, Call] = {}

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, tree_map(_detached, (args, kwargs)))

    hooks = [
        bank.register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name, bank in module.named_modules()
        if name in names
    ]
    try:
        args, kwargs = split_inputs(module, given, loaded.loss is not None)
        with undone(module), torch.no_grad(), SameDraws():
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def problem_of(module: nn.Module, bank: Experts, call: Call) -> str:
    """Why ranks cannot each run a part of the bank, in words; "" if nothing against it is seen. call: the arguments of
    the bank in a forward. It is called with random numbers of the same shapes, for tokens, weights and parameters
    alike."""
    args, kwargs = call
    routing = routing_of(args, kwargs) if bank.called == "routed" else None
    if routing is not None and not bool(((routing[1] >= 0) & (routing[1] < bank.count)).all()):
        return f"is given numbers of experts outside of 0 .. {bank.count - 1}, which no rank holds"
    drawn = tree_map(lambda leaf: torch.randn_like(leaf) if _is_float(leaf) else leaf, call)
    if routing is not None:
        everywhere = torch.rand(len(routing[1]), bank.count).argsort()[:, : routing[1].shape[1]].to(routing[1].dtype)
        drawn = tree_map(lambda leaf: everywhere if leaf is routing[1] else leaf, drawn)
    parameters = {n: torch.randn_like(p) * p.shape[1] ** -0.5 for n, p in module.named_parameters()}
    before = taken(places_of(module))
    try:
        whole = _with_gradients(partial(functional_call, module), parameters, drawn)
    except Exception:  # it does not run with these numbers: nothing is seen
        return ""
    left = changed(before)
    put_back(before)
    if left:
        return "leaves something behind in its module at each call, which would be that of a rank's own experts"
    fewest = next(n for n in range(2, bank.count + 1) if bank.count % n == 0)
    for num_parts in dict.fromkeys((fewest, bank.count)):
        try:
            parts = _with_gradients(partial(_in_parts, module, bank, num_parts), parameters, drawn)
        except Exception as error:
            said = str(error).partition("\n")[0]
            return f"does not run with a part of its experts ({type(error).__name__}: {said})"
        finally:
            put_back(changed(before))
        if not all(a.shape == b.shape and _is_near(a, b) for a, b in zip(whole, parts, strict=True)):
            return (
                "makes other numbers in parts: it uses the numbers of experts, or the places of rows, for more than to "
                "choose each row's parameters, or mixes rows or parameters of several experts"
            )
    return ""


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _with_gradients(
    run: Callable[..., torch.Tensor], parameters: dict[str, torch.Tensor], call: Call
) -> list[torch.Tensor]:
    """What a bank returns, and the gradients of the sum of its squares with respect to all that it is given."""
    own = {id(x): x.clone().requires_grad_() for x in tree_leaves((parameters, call)) if _is_float(x)}
    given, (args, kwargs) = tree_map(lambda leaf: own.get(id(leaf), leaf), (parameters, call))
    with torch.enable_grad(), SameDraws():
        output = run(given, args, kwargs)
        found = torch.autograd.grad(output.square().sum(), list(own.values()), materialize_grads=True)
    return [output.detach(), *found]


def _in_parts(
    module: nn.Module,
    bank: Experts,
    num_parts: int,
    parameters: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """What the bank returns if `num_parts` ranks hold equal parts of the experts, and a second rank sends them as many
    tokens as this one."""
    share = bank.count // num_parts

    def run(part: int, instead: dict[int, torch.Tensor]) -> torch.Tensor:
        own = {name: whole.narrow(0, part * share, share) for name, whole in parameters.items()}
        own_args, own_kwargs = tree_map(lambda leaf: instead.get(id(leaf), leaf), (args, kwargs))
        counts = {name: getattr(module, name) for name in bank.attributes}
        try:
            for name, count in counts.items():
                setattr(module, name, count // num_parts)
            made: torch.Tensor = functional_call(module, own, own_args, own_kwargs)
        finally:
            for name, count in counts.items():
                setattr(module, name, count)
        return made

    routing = routing_of(args, kwargs)
    if bank.called == "routed" and routing is not None:
        return _routed_in_parts(run, num_parts, share, *routing)
    (tokens,) = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    own = (tokens.narrow(0, part * share, share) for part in range(num_parts))
    made = (run(p, {id(tokens): torch.cat([each.detach().flip(1), each], 1)}) for p, each in enumerate(own))
    return torch.cat([each[:, tokens.shape[1] :] for each in made])


def _routed_in_parts(
    run: Callable[[int, dict[int, torch.Tensor]], torch.Tensor],
    num_parts: int,
    share: int,
    tokens: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The result of a bank whose tokens are run part by part, each with the tokens that chose its experts. run(part,
    instead): runs a part with other tensors in the place of those with these ids. share: the number of experts in each
    part."""
    experts, slots = indices.flatten(), indices.shape[1]
    order = (experts // share).argsort(stable=True)
    made = []
    for part in range(num_parts):
        rows = order[experts[order] // share == part]
        if not len(rows):
            continue
        others = rows.flip(0)
        instead = {
            id(tokens): torch.cat([tokens[others // slots].detach(), tokens[rows // slots]]),
            id(indices): (experts[torch.cat([others, rows])] - part * share).unsqueeze(1),
            id(weights): weights.new_ones((2 * len(rows), 1)),
        }
        made.append(run(part, instead)[len(rows) :])
    back = torch.cat(made)[order.argsort()].view(*indices.shape, -1)
    return (back * weights.unsqueeze(-1)).sum(1)


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) <= _ROUNDING * max(float(a.abs().max()), 1e-12)
