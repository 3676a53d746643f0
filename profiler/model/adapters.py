"""Low-rank adapters by option: `--lora r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj`, put in by PEFT itself.

A source that ends in @lora:r=16,... is the model before it as peft.get_peft_model makes it: adapters beside linear
layers (Hu et al. 2021, arXiv:2106.09685), and all else frozen. So a plan names such a model as it names any other, and
a training script that calls get_peft_model with the same settings has the same parameters.
"""

import difflib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from .failures import called
from .frozen import pack
from .loaded import LoadedModel
from .model_profile import KeptAs
from .source import LORA

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"

_BASES: tuple[KeptAs, ...] = ("bf16", "nf4")

_EXAMPLE = "--lora r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"


@dataclass(frozen=True)
class Adapters:
    """The adapters that were asked for; PEFT's defaults hold for the rest. targets: ends of the names of linear layers,
    or all-linear; if empty, those that PEFT adapts in this type of model, or all linear layers if it knows none. base:
    how the frozen parameters are kept (frozen.py)."""

    r: int
    alpha: int | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    base: KeptAs = ""

    def __str__(self) -> str:
        words = [f"r={self.r}"]
        words += [] if self.alpha is None else [f"alpha={self.alpha}"]
        words += [f"dropout={self.dropout:g}"] if self.dropout else []
        words += [f"targets={'+'.join(self.targets)}"] if self.targets else []
        words += [f"base={self.base}"] if self.base else []
        return ",".join(words)


def read_adapters(said: str | Mapping[str, object]) -> Adapters:
    """Adapters as a flag, or a dict of the same, says them. Raises ValueError that names what is wrong."""
    pairs = _pairs(said) if isinstance(said, str) else [(key, _text(value)) for key, value in said.items()]
    known = [each.name for each in fields(Adapters)]
    found: dict[str, str] = {}
    for key, value in pairs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ValueError(f"--lora {key}={value}: {hint}It takes {', '.join(known)}, as in {_EXAMPLE}")
        if key in found:
            raise ValueError(f"--lora says {key} twice: {found[key]} and {value}; give it once, as in {_EXAMPLE}")
        found[key] = value
    if "r" not in found:
        raise ValueError(f"--lora says no r, the rank of the adapters: write, for example, {_EXAMPLE}")
    return Adapters(
        r=_whole("r", found["r"]),
        alpha=_whole("alpha", found["alpha"]) if "alpha" in found else None,
        dropout=_share("dropout", found.get("dropout", "0")),
        targets=_names(found["targets"]) if "targets" in found else (),
        base=_base(found["base"]) if "base" in found else "",
    )


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for word in text.split(","):
        key, sign, value = word.strip().partition("=")
        if not sign or not key or not value:
            raise ValueError(f"--lora {text}: {word.strip()!r} is no key=value; write, for example, {_EXAMPLE}")
        yield key.strip(), value.strip()


def _text(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple | set) else str(value)


def _whole(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--lora {key}={text}: give a whole number of at least 1, for example {key}=16")
    return int(text)


def _share(key: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise ValueError(f"--lora {key}={text}: give a share of at least 0 and less than 1, for example {key}=0.05")
    return share


def _base(text: str) -> KeptAs:
    for known in _BASES:
        if text == known:
            return known
    raise ValueError(
        f"--lora base={text}: give base=bf16 for a base in 16 bits, base=nf4 for one in 4 (QLoRA), or leave it out for "
        "one that is kept as all parameters are"
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split("+")))
    if not all(names):
        raise ValueError(f"--lora targets={text}: give names of linear layers with + between them, or {ALL_LINEAR}")
    if ALL_LINEAR in names and len(names) > 1:
        raise ValueError(f"--lora targets={text}: {ALL_LINEAR} is all there are; leave out the other names")
    return names


def with_lora(source: str, said: "str | Mapping[str, object] | None") -> str:
    """The source of a model with adapters, if any are said. Raises ValueError for what cannot be read."""
    if said is None:
        return source
    if LORA in source:
        raise ValueError(f"{source} says its adapters already: leave out --lora")
    return f"{source}{LORA}{read_adapters(said)}"


def adapted(loaded: LoadedModel, adapters: Adapters) -> LoadedModel:
    """The model, and its small version, with adapters. Raises ValueError if PEFT is not there."""
    import_peft()
    small = loaded.small
    return replace(
        loaded,
        build=functools.partial(_built, loaded.build, adapters, loaded.source),
        name=f"{loaded.name}-{'qlora' if adapters.base == 'nf4' else 'lora'}-r{adapters.r}",
        source=f"{loaded.source}{LORA}{adapters}",
        small=None if small is None else functools.partial(_small, small, adapters),
    )


def _small(small: Callable[[], LoadedModel], adapters: Adapters) -> LoadedModel:
    return adapted(small(), adapters)


def import_peft() -> Any:
    """The library that puts adapters in. Raises ValueError that says how to install it."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"--lora needs PEFT, which is not installed ({error}): pip install 'meshwright[lora]'"
        ) from None
    return peft


def _built(build: "Callable[[], nn.Module]", adapters: Adapters, source: str) -> "nn.Module":
    peft = import_peft()
    module = build()
    linears = _linears(module)
    inner = _inner(module, linears)
    if adapters.base == "bf16":
        _in_bf16(module)
    config = peft.LoraConfig(
        r=adapters.r,
        lora_dropout=adapters.dropout,
        target_modules=_targets(peft, module, linears, adapters, source),
        **({} if adapters.alpha is None else {"lora_alpha": adapters.alpha}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on renamed names, and on fused experts
        made: nn.Module = called(lambda: peft.get_peft_model(module, config), f"PEFT on {source}")
    for name, each in made.named_modules():
        if isinstance(each, peft.tuners.lora.layer.ParamWrapper):
            raise ValueError(
                f"--lora {adapters}: of {source} PEFT also adapts parameters that lie in no linear layer ("
                f"{name}.{each.parameter_name}), by writing into them in each forward, which shards do not allow: name "
                f"linear layers, as in targets={'+'.join(_ends(linears)[:4])}"
            )
    if adapters.base == "nf4":
        pack(made, inner)
    return made


def _in_bf16(module: "nn.Module") -> None:
    """Cast the parameters of a base to bf16, as from_pretrained(..., dtype=torch.bfloat16) has them; buffers stay as
    they are."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()


def _inner(module: "nn.Module", linears: list[str]) -> "list[nn.Module]":
    """Linear layers without the output layer, which is the one that the model names as such, or else the last."""
    found = [module.get_submodule(name) for name in linears]
    told = getattr(module, "get_output_embeddings", None)
    output = (found[-1] if found else None) if told is None else told()
    return [each for each in found if each is not output]


def _ends(names: list[str]) -> list[str]:
    """The last word of each name, without repetitions and numbers; the names themselves if all last words are
    numbers."""
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [end for end in ends if not end.isdecimal()] or names


def _targets(peft: Any, module: "nn.Module", linears: list[str], adapters: Adapters, source: str) -> list[str] | str:
    """Names of modules as PEFT takes them. Raises ValueError for a name that no linear layer has."""
    from transformers import PreTrainedModel

    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    chosen = known.get(getattr(getattr(module, "config", None), "model_type", None))
    if not adapters.targets and chosen:
        return chosen if isinstance(chosen, str) else list(chosen)  # PEFT itself finds none where experts are fused
    if not linears:
        raise ValueError(f"--lora: {source} has no linear layers, beside which adapters would lie")
    if adapters.targets in ((), (ALL_LINEAR,)):
        # PEFT does the same, but only for models of transformers, whose output layer it knows
        return ALL_LINEAR if isinstance(module, PreTrainedModel) else (linears[:-1] or linears)
    names = dict(module.named_modules())
    for target in adapters.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            there = _ends(linears)
            near = difflib.get_close_matches(target, there, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            shown = ", ".join(there[:20]) + (f", and {len(there) - 20} more" if len(there) > 20 else "")
            raise ValueError(
                f"--lora targets={target}: {source} has no such layer. {hint}Its linear layers are {shown}"
            )
    return list(adapters.targets)


def _linears(module: "nn.Module") -> list[str]:
    """Linear layers in order, Hugging Face's Conv1D among them."""
    from torch import nn

    return [
        name for name, each in module.named_modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"
    ]
