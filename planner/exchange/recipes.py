"""Settings that are not a command line, as words of one: torchtitan's configuration functions and its earlier TOML
files, recipes of NeMo and Megatron-Bridge. Python is read, but never run: what is not a literal stays open, and is
named."""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...profiler.document import parsed
from .from_flags import read_document, text_of

_RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.compile": "compile.enable",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Name of a torchtitan option in version 0.1 or earlier -> its present name."""

_MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


@dataclass(frozen=True)
class Recipe:
    """Settings as words of a command line. open_values: option -> what its value waits for. notes: on what was not
    read."""

    words: tuple[str, ...]
    open_values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def renamed(name: str) -> str:
    """Present name of a torchtitan option, without the leading --."""
    return _RENAMED.get(name, name)


def titan_toml(path: Path) -> Recipe:
    """Settings from a TOML file, which torchtitan had up to version 0.1. Raises ValueError if the file is not TOML."""
    try:
        found = parsed(tomllib.loads, text_of(path))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML ({error})") from None
    said = {
        f"{section}.{key}": value
        for section, keys in found.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
    return Recipe(tuple(_titan_words({renamed(name): value for name, value in said.items()})))


def titan_function(path: Path, name: str) -> Recipe:
    """Settings from a configuration function, which torchtitan has from version 0.2 on: what it passes to
    ...Config(...), and what it sets after that.

    Raises ValueError if the file has no such function.
    """
    functions = titan_functions(path)
    if name not in functions:
        raise ValueError(f"{path} has no function {name}; it has {', '.join(functions) or 'none'}")
    said: dict[str, Any] = {}
    waits: dict[str, tuple[str, ...]] = {}
    base = name
    chain = [name]
    while (called := _calls_another(functions[base], functions)) and called not in chain:
        chain.append(called)
        base = called
    for each in reversed(chain):
        for key, value in _settings(functions[each]):
            if isinstance(value, ast.expr):
                waits[f"--{key}"] = (_expression(value),)
                said.pop(key, None)
            else:
                said[key] = value
                waits.pop(f"--{key}", None)
    return Recipe(tuple(_titan_words(said)), waits)


def titan_functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Name -> function, of the functions in a file. Raises ValueError if the file is not Python."""
    tree = _parsed(path)
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file, in which names of its constants (NAME = literal, set once) are replaced by
    their values."""
    try:
        tree = ast.parse(text_of(path))
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python (line {error.lineno}: {error.msg})") from None
    named: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            once = name not in named and not isinstance(_literal(node.value), ast.expr)
            named[name] = node.value if once else ast.Name(name)
    known = {name: value for name, value in named.items() if not isinstance(value, ast.Name)}
    return _Constants(known).visit(tree)  # type: ignore[no-any-return]


class _Constants(ast.NodeTransformer):
    """Replaces the names of constants by their values."""

    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The constant, if the name of one is read; else the name itself."""
        if isinstance(node.ctx, ast.Load) and node.id in self._known:
            return ast.copy_location(self._known[node.id], node)
        return node


def _calls_another(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> str | None:
    """Name of the function in the same file from whose result this one starts; None if it does not."""
    for node in ast.walk(function):
        called = node.value.func if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in functions:
            return called.id
    return None


def _settings(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """("section.key", value) in order. A value that is not a literal is given as its expression."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and any(k.arg in ("training", "parallelism") for k in node.keywords):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    yield from _section(keyword.arg, keyword.value)
    for statement in function.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            names = _dotted(statement.targets[0])
            if len(names) == 2:
                yield from _section(names[1], statement.value)
            elif len(names) == 3:
                yield f"{names[1]}.{names[2]}", _literal(statement.value)


def _section(name: str, value: ast.expr) -> Iterator[tuple[str, Any]]:
    if name == "activation_checkpoint":
        words = _dotted(value.func if isinstance(value, ast.Call) else value)
        mode = next((_MODES[word] for word in words if word in _MODES), None)
        none = isinstance(value, ast.Constant) and value.value is None
        yield "activation_checkpoint.mode", "none" if none else value if mode is None else mode
    elif name in ("training", "parallelism", "compile") and isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg is not None:
                yield f"{name}.{keyword.arg}", _literal(keyword.value)


def _dotted(node: ast.expr) -> list[str]:
    """The names in a.b.c; [] for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _literal(node: ast.expr) -> Any:
    """Value of a literal, or of a product of whole numbers; for others the expression itself."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _literal(node.left), _literal(node.right)
        return left * right if isinstance(left, int) and isinstance(right, int) else node
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def _expression(value: ast.expr) -> str:
    return f"the expression {ast.unparse(value)}"


def _titan_words(said: Mapping[str, Any]) -> Iterator[str]:
    """Words of torchtitan's command line for these settings."""
    mode = str(said.get("activation_checkpoint.mode", "")).lower()
    for name, value in said.items():
        section, _, last = name.rpartition(".")
        if name == "activation_checkpoint.mode":
            continue
        if name == "activation_checkpoint.selective_ac_option" and (mode != "selective" or value == "op"):
            continue
        if isinstance(value, bool):
            if value or section in ("parallelism", "compile"):
                yield f"--{name}" if value else f"--{section}.no-{last}"
        elif isinstance(value, list):
            parts = [",".join(map(str, part)) if isinstance(part, list) else str(part) for part in value]
            yield from ([f"--{name}", *parts] if parts else [])
        elif value is not None and value != "":
            yield from (f"--{name}", str(value))
    if mode:
        yield f"activation_checkpoint:{mode}"


_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_distributed_optimizer_instances",
        "micro_batch_size",
        "global_batch_size",
        "num_layers",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "sequence_parallel",
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "cp_comm_type",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "fp8_format",
        "rampup_batch_size",
        "mtp_num_layers",
        "grad_reduce_in_bf16",
        "cpu_offloading_num_layers",
    )
} | {
    "seq_length": "--seq-length",
    "encoder_seq_length": "--seq-length",
    "sequence_length": "--seq-length",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "fp8": "--fp8-format",
}
"""Name of a setting in NeMo or Megatron-Bridge -> Megatron-LM's option."""

_TELLING = ("parallel", "recompute", "checkpoint_granularity", "offload", "shard", "micro_batch", "global_batch")
"""Parts of names that suggest a layout. Settings with such a name that are not read are listed in a note."""


def nemo_recipe(path: Path) -> Recipe:
    """Settings from a recipe of NeMo or Megatron-Bridge: Python, or a YAML or JSON configuration. Raises ValueError if
    the file is none."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    found = list(_python_settings(path)) if path.suffix == ".py" else list(_leaves(read_document(path)))
    words: dict[str, list[str]] = {}
    waits: dict[str, tuple[str, ...]] = {}
    missed: list[str] = []
    for name, value in found:
        option = "--seq-length" if name == "max_sequence_length" else _OPTIONS.get(name)
        if option is None and name in ("precision", "mixed_precision", "plugins_precision"):
            words |= {word: [] for word in _precision(value)}
        elif option is None:
            if any(part in name for part in _TELLING) and value not in (None, False, [], {}, 1):
                missed.append(name)
        elif isinstance(value, ast.expr):
            waits[option] = (_expression(value),)
        elif value in (None, False, [], ""):
            waits.pop(option, None)
            words.pop(option, None)
        else:
            each = value if isinstance(value, list) else [value]
            texts = list(dict.fromkeys(map(str, each)))
            words[option] = [] if value is True else texts
            waits.pop(option, None)
    notes = [f"not read, though it may speak of the layout: {name}" for name in dict.fromkeys(missed)]
    if "--use-distributed-optimizer" not in words:
        notes.append("use_distributed_optimizer is not said: off, as in Megatron-LM")
    if not words and not waits:
        raise ValueError(f"{path} holds no setting of a layout, such as tensor_model_parallel_size")
    return Recipe(tuple(w for option, values in words.items() for w in (option, *values)), waits, tuple(notes))


def _precision(value: object) -> tuple[str, ...]:
    """Megatron-LM's switches for a precision as NeMo spells it: bf16, bf16-mixed, bf16_mixed, 16, 16-mixed, 32."""
    word = ast.unparse(value) if isinstance(value, ast.expr) else str(value)
    low = word.lower()
    return ("--bf16",) if "bf16" in low or "bfloat16" in low else ("--fp16",) if "16" in low else ()


def _python_settings(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of every keyword, entry of a dict, and assignment to an attribute, in the order of the file."""
    found: list[tuple[int, str, Any]] = []
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.keyword) and node.arg is not None:
            found.append((node.value.lineno, node.arg, _plain(node.value)))
        elif isinstance(node, ast.Assign):
            found += [(node.lineno, t.attr, _plain(node.value)) for t in node.targets if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found += [(v.lineno, str(k.value), _plain(v)) for k, v in pairs if isinstance(k, ast.Constant)]
    yield from ((name, value) for _, name, value in sorted(found, key=lambda item: item[0]))


def _plain(node: ast.expr) -> Any:
    """Value of a literal; name of a function that is called, if it suggests a precision; for others the expression
    itself."""
    found = _literal(node)
    if isinstance(found, ast.Call):
        names = _dotted(found.func)
        return names[-1] if names and ("mixed" in names[-1] or "precision" in names[-1].lower()) else found
    return found


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(last key, value) of every entry of a document that is not a mapping; ${...} stays open."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, str) and "${" in value:
            yield str(key), ast.Name(id=value)
        else:
            yield str(key), value
