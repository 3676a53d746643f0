"""A model that can be built anywhere, with its micro-batches and loss."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Union

from .failures import a_type, called

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = Union[tuple[Any, ...], dict[str, Any], "torch.Tensor"]
Build = Callable[[], "nn.Module"]
MakeBatch = Callable[..., Any]
Loss = Callable[[Any, Any], "torch.Tensor"]
Choices = Literal["", "even", "first"]


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be built anywhere, and micro-batches for it.

    build: constructs the module on torch's current default device.
    batch: micro-batch of that many samples at `seq_len`, real CPU tensors.
    loss: mean loss of (output, batch); None if the module returns its own.
    small: the same for the model file's small version; None if it has none.
    """

    build: Build
    batch: Callable[[int], Batch]
    loss: Loss | None
    name: str
    source: str
    seq_len: int | None = None
    weight: Callable[[Any], "torch.Tensor"] | None = None
    small: Callable[[], "LoadedModel"] | None = None
    global_batch: int | None = None
    make_batch: MakeBatch | None = None
    notes: tuple[str, ...] = ()
    """Notes for the user: in what the model differs from what its source says."""
    assumes: tuple[str, ...] = ()
    """Notes for the user: what is assumed of a batch because nobody said it."""
    fewest_tokens: int = 1
    """The least number of tokens in a sample, even if seq_len is smaller."""
    layout: frozenset[str] = frozenset()
    """Names of the tensors of a batch whose numbers say how it is laid out: sizes of pictures, which of them are
    there."""
    if_not_run: str = "Check that the batch function returns what forward takes: (inputs..., targets)"
    """The end of the error message if forward does not run: what the user can do."""
    choices: Choices = ""
    """How a choice by scores without numbers (the experts of a token) is taken to go: see knowing_numbers."""

    def with_seq_len(self, seq_len: int) -> "LoadedModel":
        """This model with micro-batches of another sequence length. Raises ValueError if it has no sequence."""
        if self.make_batch is None or not takes_seq_len(self.make_batch):
            raise ValueError(
                f"{seq_len} tokens per sample were asked for, but batch(size) of {self.source} takes no seq_len: write "
                "it as `def batch(size, seq_len=1024)`, leave --seq-len out, or give the model that the plan is of"
            )
        if seq_len < 1:
            raise ValueError(f"--seq-len is {seq_len}; it must be at least 1, for example --seq-len 1024")
        return replace(self, seq_len=seq_len, batch=_bound_batch(self.make_batch, seq_len, self.source))


def split_inputs(module: "nn.Module", batch: Batch, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) for module's forward out of a micro-batch.

    A dict gives the keys that forward names (all of them, if it takes **kwargs and names none, or there is no separate
    loss), and goes in whole where forward names none and requires one argument: forward(batch). A tuple without a
    separate loss goes in whole. With one, the tuple is (inputs..., targets): the last element is for the loss only,
    unless forward requires it; what is more than forward accepts is for the loss, too. A tensor by itself is the only
    input, and all that the loss is given.
    """
    if not isinstance(batch, tuple | list | dict):
        return (batch,), {}
    base = getattr(module, "get_base_model", None)  # of PEFT's models, whose own forwards take anything
    parameters = list(inspect.signature((module if base is None else base()).forward).parameters.values())
    if isinstance(batch, dict):
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        any_key = any(p.kind is p.VAR_KEYWORD for p in parameters) and not (has_loss and names)
        without_default = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(without_default) == 1 and not names & batch.keys():
            return (batch,), {}
        return (), {key: value for key, value in batch.items() if any_key or key in names}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    most = len(batch) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    if has_loss:
        return batch[: max(required, min(len(batch) - 1, most))], {}
    if len(batch) > most:
        raise ValueError(
            f"batch gives {len(batch)} elements, but forward of {type(module).__name__} takes {most}: "
            "give the model file a loss(output, batch), or return only the inputs from batch"
        )
    return batch, {}


def _check_arguments(make_batch: MakeBatch, takes_length: bool, source: str) -> None:
    """Raises ValueError for a batch function that is not to be called with a number of samples."""
    signature = _signature(make_batch)
    try:
        signature.bind(2, **({"seq_len": 1} if takes_length else {}))
    except TypeError as error:
        raise ValueError(
            f"batch of {source} takes {signature}, and is called with a number of samples: write it as `def "
            "batch(size)`, or as `def batch(size, seq_len=1024)` if samples have a length"
        ) from error


def checked(
    build: "Callable[[], Any] | nn.Module",
    make_batch: MakeBatch,
    *,
    name: str,
    source: str,
    loss: Loss | None,
    weight: Callable[[Any], Any] | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    built_by: str = "",
) -> LoadedModel:
    """The model of a constructor and a batch function, with what they do wrong told in sentences; seq_len: that of the
    batch function if not given; built_by: the constructor in words. Raises ValueError where the batch function has no
    length."""
    from torch import nn

    takes = takes_seq_len(make_batch)
    _check_arguments(make_batch, takes, source)
    if isinstance(build, nn.Module):
        build = functools.partial(copy_of, build)
    if takes and seq_len is None:
        default = inspect.signature(make_batch).parameters["seq_len"].default
        if not isinstance(default, int):
            raise ValueError(
                f"batch(size, seq_len) of {source} has no default length: write `def batch(size, seq_len=1024)`, "
                "or set seq_len = 1024 in the file"
            )
        seq_len = default
    bound = _bound_batch(make_batch, seq_len if takes else None, source)
    return LoadedModel(
        build=_guarded_build(build, source, built_by or f"model() of {source}", bound, loss is not None),
        batch=bound,
        loss=loss,
        name=name,
        source=source,
        seq_len=seq_len if takes else None,
        weight=weight,
        global_batch=global_batch,
        make_batch=make_batch,
    )


def _guarded_build(
    build: Callable[[], Any], source: str, built_by: str, batch: Callable[[int], Batch], has_loss: bool
) -> Build:
    def forward(module: "nn.Module") -> None:
        args, kwargs = split_inputs(module, batch(2), has_loss)
        called(functools.partial(module, *args, **kwargs), f"the first forward of {source}, whose modules are lazy,")

    kept: list[nn.Module] = []
    """The module, if build returns one and the same each time: copies of it are handed out."""
    parts: list[nn.Module] = []
    """Modules that are inside of all that build returns (a backbone that the file made once): they are replaced by
    copies."""

    def guarded() -> "nn.Module":
        import torch
        from torch import nn

        from .building import initialised, is_lazy, with_dense_gradients, without_compiler

        module = copy_of(kept[0]) if kept else called(build, built_by)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"{built_by} returned {a_type(module)}; it must return a torch.nn.Module, "
                "for example `return MyModel()`"
            )
        _check_bare(module, built_by)
        is_older = torch.get_default_device().type == "meta" and not all(p.is_meta for p in module.parameters())
        if is_older and not kept and not parts:
            again = called(build, built_by)
            if again is module:
                kept.append(module)
                module = copy_of(module)
            else:
                parts.extend(set(module.modules()) & set(again.modules()))
        if parts:
            _copy_parts(module, set(parts))
        module = without_cache(with_dense_gradients(without_compiler(module)))
        return initialised(module, forward) if is_lazy(module) else module

    return guarded


def _check_bare(module: "nn.Module", built_by: str) -> None:
    """Raises ValueError for a scripted model, whose layers cannot be seen, and for one with a module that splits its
    batches itself."""
    import torch
    from torch import nn

    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{built_by} returned a scripted model, whose layers nobody sees: return it unscripted")
    for name, part in module.named_modules():
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{built_by} returned a model with {type(part).__name__} around {name or 'all of it'}, which splits "
                "batches over GPUs by itself: leave it out, and the plan says how they are split"
            )


def _copy_parts(module: "nn.Module", parts: "set[nn.Module]") -> None:
    """Replace submodules that are in `parts`, and so belong to other modules, too, by copies. A part that is there
    twice gets one copy."""
    copies: dict[nn.Module, nn.Module] = {}
    for parent in [each for each in module.modules() if each not in parts]:
        for name, child in parent._modules.items():
            if child is not None and child in parts:
                parent._modules[name] = copies.setdefault(child, copies.get(child) or copy_of(child))


def without_cache(module: "nn.Module") -> "nn.Module":
    """The module, with use_cache set to False in the configurations of its parts: Hugging Face's models keep keys and
    values for generation unless their configuration says so. Training never reads these, and recompute would find those
    of the forward there. Configurations are copied before they are changed, for other modules may hold them."""
    copies: dict[int, Any] = {}
    for part in module.modules():
        config = part.__dict__.get("config")
        if config is not None and getattr(config, "use_cache", False) is True:
            made = copies.setdefault(id(config), copy.copy(config))
            made.use_cache = False
            part.__dict__["config"] = made
    return module


def _bound_batch(make_batch: MakeBatch, seq_len: int | None, source: str) -> Callable[[int], Batch]:
    def bound(size: int) -> Batch:
        import torch

        call = (
            functools.partial(make_batch, size)
            if seq_len is None
            else functools.partial(make_batch, size, seq_len=seq_len)
        )
        made = called(call, f"batch({size}) of {source}")
        if unfit := unfit_in(made):
            raise ValueError(f"batch({size}) of {source} gives {unfit}")
        if isinstance(made, list):
            return tuple(made)
        if isinstance(made, tuple | dict | torch.Tensor):
            return made
        raise ValueError(
            f"batch({size}) of {source} returned {a_type(made)}; it must return a tuple or a dict of tensors, "
            "for example `return torch.randn(size, 512), torch.randint(10, (size,))`"
        )

    return bound


def unfit_in(batch: Any) -> str:
    """What to say of the first thing in a batch that cannot be cut into micro-batches (a numpy array, a sparse or
    nested tensor, an object with tensors), and the way out; '' if there is none."""
    import torch
    from torch.nn.utils.rnn import PackedSequence
    from torch.utils._pytree import keystr, tree_flatten_with_path

    for path, leaf in tree_flatten_with_path(batch, is_leaf=lambda node: isinstance(node, PackedSequence))[0]:
        at = keystr(path) or "its top"
        if type(leaf).__module__ == "numpy" and leaf.ndim:
            return (
                f"a numpy array of {list(leaf.shape)} at {at}, which is cut into no micro-batches and moved to no "
                "device; make it a tensor: torch.from_numpy(array)"
            )
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            kind, way_out = "sparse", "hand over its dense form (to_dense()), or its indices and values"
            if leaf.is_nested:
                kind, way_out = "nested", "pad its rows (to_padded_tensor) and hand over a mask beside them"
            return f"a {kind} tensor at {at}, which is cut into no micro-batches; {way_out}"
        if _holds_tensors(leaf):
            way_out = "a dict: dict(batch)" if isinstance(leaf, Mapping) else "a tuple or a dict of tensors"
            return (
                f"an object of {type(leaf).__name__} at {at}, whose tensors are cut into no micro-batches; make it "
                f"{way_out}"
            )
    return ""


def _holds_tensors(leaf: Any) -> bool:
    """Whether a leaf of a batch is an object with tensors among its entries or attributes."""
    import torch

    if isinstance(leaf, torch.Tensor | torch.nn.Module):
        return False
    slots = [getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ())]
    entries = leaf.values() if isinstance(leaf, Mapping) else leaf if isinstance(leaf, tuple | list) else ()
    return any(isinstance(held, torch.Tensor) for held in (*entries, *getattr(leaf, "__dict__", {}).values(), *slots))


def takes_seq_len(make_batch: MakeBatch) -> bool:
    """Whether a batch function is given the sequence length."""
    return "seq_len" in _signature(make_batch).parameters


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function; (*args) for those that Python knows none of, such as torch.randn."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda *args: None)


def copy_of(module: "nn.Module") -> "nn.Module":
    """A copy with its own parameters; without their numbers when the default device is meta."""
    import torch
    from torch import nn

    memo: dict[int, Any] = {}
    if torch.get_default_device().type == "meta":
        for p in module.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for b in module.buffers():
            memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(module, memo)
