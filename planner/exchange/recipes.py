"""Settings that are no command line, as the words of one: torchtitan's configuration functions and its old TOML files,
recipes of NeMo and Megatron-Bridge. Python is read, never run: what is not a literal stays open, and is named."""

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
"""torchtitan's options under the names of its earlier versions (0.1 and before it) -> those of today."""

_MODES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


@dataclass(frozen=True)
class Recipe:
    """Words of a command line; open_values: option -> what its value waits for; notes: what is not read."""

    words: tuple[str, ...]
    open_values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def renamed(name: str) -> str:
    """Today's name of an option of torchtitan, without the leading --."""
    return _RENAMED.get(name, name)


def titan_toml(path: Path) -> Recipe:
    """A TOML file of torchtitan, as it had them up to version 0.1. Raises ValueError if it is none."""
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
    """A configuration function of torchtitan, as of version 0.2: what it passes to ...Config(...), and sets after that.

    Raises ValueError where the file has no such function.
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
    """Functions of a file by name. Raises ValueError if it is no Python."""
    tree = _parsed(path)
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _parsed(path: Path) -> ast.Module:
    """A file of Python, with its own constants (NAME = literal) in place of their names."""
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
    """Puts constants in place of their names."""

    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The constant where a name of one is read."""
        if isinstance(node.ctx, ast.Load) and node.id in self._known:
            return ast.copy_location(self._known[node.id], node)
        return node


def _calls_another(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> str | None:
    """The function of the same file whose result this one begins with."""
    for node in ast.walk(function):
        called = node.value.func if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in functions:
            return called.id
    return None


def _settings(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """(section.key, value) in order; values that are no literals as expressions."""
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
    """a.b.c as its names; [] for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or the expression itself; products of whole numbers count as literals."""
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
    """Words of torchtitan's command line for its settings."""
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
"""Settings of NeMo and Megatron-Bridge -> Megatron-LM's options."""

_TELLING = ("parallel", "recompute", "checkpoint_granularity", "offload", "shard", "micro_batch", "global_batch")
"""Parts of names that speak of a layout: settings with one of these that are not read are listed."""


def nemo_recipe(path: Path) -> Recipe:
    """A recipe of NeMo or Megatron-Bridge: Python, or a YAML or JSON configuration. Raises ValueError if it is none."""
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
    """Megatron-LM's switches for a precision of NeMo: bf16, bf16-mixed, bf16_mixed, 16, 16-mixed, 32."""
    word = ast.unparse(value) if isinstance(value, ast.expr) else str(value)
    low = word.lower()
    return ("--bf16",) if "bf16" in low or "bfloat16" in low else ("--fp16",) if "16" in low else ()


def _python_settings(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of every keyword, and of every assignment to an attribute, in the order of the file."""
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
    """A literal, the text of a call or a name that says a precision, or the expression."""
    found = _literal(node)
    if isinstance(found, ast.Call):
        names = _dotted(found.func)
        return names[-1] if names and ("mixed" in names[-1] or "precision" in names[-1].lower()) else found
    return found


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(last key, value) of everything in a document; ${...} stays open."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        elif isinstance(value, str) and "${" in value:
            yield str(key), ast.Name(id=value)
        else:
            yield str(key), value
