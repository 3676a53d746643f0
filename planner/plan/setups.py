"""Set-ups as people write them ("fsdp", "hsdp:4", "tp=4 pp=2 zero=1 mb=2"), read into degrees and other choices."""

import difflib
import re
from dataclasses import dataclass
from typing import Literal, get_args

from ...profiler.machine.units import gpus_in_words
from .document import EXECUTABLE_RECOMPUTES, PARTS, ContextKind, Plan, Recompute, known_recompute
from .legality import divisors
from .schedules import Schedule

_KEYS = {
    "tp": "tensor",
    "tensor": "tensor",
    "pp": "pipeline",
    "pipeline": "pipeline",
    "dp": "data",
    "data": "data",
    "ddp": "data_replicate",
    "replicate": "data_replicate",
    "data_replicate": "data_replicate",
    "fsdp": "data_shard",
    "shard": "data_shard",
    "data_shard": "data_shard",
    "mb": "micro_batch",
    "micro_batch": "micro_batch",
    "v": "virtual_stages",
    "vpp": "virtual_stages",
    "virtual_stages": "virtual_stages",
    "zero": "zero",
    "recompute": "recompute",
    "schedule": "schedule",
    "sp": "sequence",
    "sequence": "sequence",
    "cp": "context",
    "context": "context",
    "cp_kind": "context_kind",
    "context_kind": "context_kind",
    "ep": "expert",
    "expert": "expert",
    "offload": "offload",
}
_SPELLING = (
    "ddp, fsdp, hsdp, hsdp:4, tp=4 (tensor), pp=2 (pipeline), dp=2 (data), zero=0|1|2|3, mb=2 (micro-batch), "
    "recompute=none|attention|selective|full|parts:mlp+self_attn (submodules of each layer), "
    "schedule=gpipe|1f1b|interleaved|zb-h1|zb-h2|zb-v, v=2 (stages of each rank), sp=on|off (sequence parallel), "
    "cp=2 (context), cp_kind=ring|all_to_all|all_gather, ep=8 (expert), "
    "offload=optimizer|activations|both (in host memory); or megatron, torchtitan, "
    "deepspeed-zero1|2|3, or a plan.json"
)
_PINS = (
    "data_replicate=2, data_shard=4, tensor=4, context=2, context_kind=ring|all_to_all|all_gather, expert=8, "
    "pipeline=2, virtual_stages=2, micro_batch=2, zero=0|1|2|3, sequence=on|off|8, "
    "recompute=none|attention|selective|full|parts:mlp+self_attn (these submodules of each layer)|"
    "parts (any of them, as layer by layer is best), schedule=none|gpipe|1f1b|interleaved|zb-h1|zb-h2|zb-v, "
    "offload=optimizer|activations|both (in host memory)"
)
_SCHEDULES: dict[str, Schedule] = {name: name for name in get_args(Schedule) if name != "none"}
_CONTEXT_KINDS: dict[str, ContextKind] = {
    **{name: name for name in get_args(ContextKind)},
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "ulysses": "all_to_all",
}
_WORD = re.compile(r"recompute[=:]parts:[^\s,+=]+(?:\+[^\s,+=]+(?![^\s,+]*=))*|[^\s,+]+", re.IGNORECASE)
"""Matches one word; spaces, commas and plus signs separate words. The names of parts are joined by plus signs, too."""


class IllegalSetupError(ValueError):
    """A set-up whose words are right, but which no layout on these GPUs satisfies. rule: why not, and a way out."""

    def __init__(self, where: str, rule: str) -> None:
        super().__init__(f"{where}: {rule}")
        self.rule = rule


@dataclass(frozen=True)
class Setup:
    """A manual layout over a fixed number of GPUs. Fields that are None were not said; the fastest choice that fits is
    taken for them.

    reshard and gradient_sync are the ZeRO mode: ZeRO-3 / FSDP gives gathered parameters back after forward and reduces
    gradients after every micro-batch; ZeRO-2 keeps the parameters; ZeRO-1 also reduces only once, after the last one.
    replicas_assumed: nothing was said of the data ranks, so they are taken to be replicas.
    """

    label: str
    data_replicate: int = 1
    data_shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int | None = None
    recompute: Recompute | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    sequence: bool | None = None
    reshard: bool = False
    gradient_sync: Literal["every", "last"] = "last"
    context: int = 1
    context_kind: ContextKind | None = None
    expert: int = 1
    offload_activations: bool = False
    offload_optimizer: bool = False
    replicas_assumed: bool = False

    @property
    def num_devices(self) -> int:
        """Ranks of the job."""
        return self.data_replicate * self.data_shard * self.tensor * self.context * self.pipeline


def parse_setup(text: str, num_devices: int, devices_per_host: int, flag: str = "--setup") -> Setup:
    """The set-up that `text` names, over all of `num_devices`.

    GPUs that tensor, context and pipeline degrees leave over go to data parallelism: replicas (DDP) by default, shards
    with "fsdp" or zero=1..3, shards of a given size ("hsdp:4") or of a host ("hsdp") that are replicated. Context ranks
    share the sharding of data_shard. Experts are spread over ranks that are there already and shard their state: with
    ep=8 and nothing else said of data ranks, these are shards that keep what they gather (zero=1).
    Raises ValueError that says which word is wrong, and IllegalSetupError where all can be read but no layout agrees.
    """
    where = f"{flag} {text!r}"
    words = _read_words(text, where)
    tensor, pipeline = _degree(words, "tensor", where), _degree(words, "pipeline", where)
    context, expert = _degree(words, "context", where), _degree(words, "expert", where)
    split = tensor * pipeline * context
    data, rest = divmod(num_devices, split)
    if rest or not data:
        degrees = {"tensor": tensor, "pipeline": pipeline, "context": context}
        said = {name: degree for name, degree in degrees.items() if degree > 1}
        product = f"{' x '.join(said)} = {' x '.join(map(str, said.values()))}"
        near = nearest_divisors(num_devices, split)
        raise IllegalSetupError(where, f"{product} does not divide {gpus_in_words(num_devices)}, as {near} would")
    zero = _zero_mode(words, where)
    replicate, shard = _split_data(words, where, data, zero, devices_per_host)
    recompute = _recompute(words, where)
    schedule = _choice(words, "schedule", tuple(_SCHEDULES), where)
    virtual = _whole_number(words["virtual_stages"], "v", where) if "virtual_stages" in words else None
    sequence = _choice(words, "sequence", ("on", "off"), where)
    if virtual is not None and pipeline == 1:
        raise IllegalSetupError(where, f"v={virtual} needs a pipeline; add pp=2 or leave it out")
    if schedule is not None and pipeline == 1:
        raise IllegalSetupError(where, f"schedule={schedule} needs a pipeline; add pp=2 or leave it out")
    if sequence == "on" and tensor == 1:
        raise IllegalSetupError(where, "sequence parallelism goes beside tensor parallelism; add tp=2 or leave it out")
    kind = _context_kind(words, where)
    if kind is not None and context == 1:
        raise IllegalSetupError(where, f"cp_kind={words['context_kind']} needs context ranks; add cp=2 or leave it out")
    over = shard * context * (1 if sequence == "off" else tensor)
    if over % expert:
        raise IllegalSetupError(
            where,
            f"expert={expert} does not divide the {over} ranks that hold tokens of their own "
            f"(data_shard={shard} x context={context}, x tensor={tensor} under sequence parallelism); choose a "
            "divisor, or shard over more data ranks",
        )
    micro_batch = _whole_number(words["micro_batch"], "mb", where) if "micro_batch" in words else None
    return Setup(
        label=" ".join(text.split()),
        data_replicate=replicate,
        data_shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro_batch,
        recompute=recompute,
        schedule=None if schedule is None else _SCHEDULES[schedule],
        virtual_stages=virtual,
        sequence=None if sequence is None else sequence == "on",
        reshard=shard * context > 1 and zero == 3,
        gradient_sync="every" if shard * context > 1 and zero >= 2 else "last",
        context=context,
        context_kind=kind,
        expert=expert,
        **_offload(words, where),
        replicas_assumed=replicate > 1 and not words.keys() & {"kind", "zero", "data_replicate", "data_shard"},
    )


def nearest_divisors(number: int, product: int) -> str:
    """In words, the divisors of `number` next below and next above `product`, which is none."""
    would = divisors(number)
    near = [max(way for way in would if way < product), *[way for way in would if way > product][:1]]
    return " or ".join(map(str, near))


def _context_kind(words: dict[str, str], where: str) -> ContextKind | None:
    """How context ranks attend to each other, from any of its names; None if not said."""
    spelled = {name: value.replace("-", "_") for name, value in words.items() if name == "context_kind"}
    value = _choice(spelled, "context_kind", tuple(_CONTEXT_KINDS), where)
    return None if value is None else _CONTEXT_KINDS[value]


_DEGREES = ("tensor", "pipeline", "data_replicate", "data_shard", "context", "expert", "micro_batch", "virtual_stages")


def parse_pins(texts: tuple[str, ...] | list[str], flag: str = "--pin") -> dict[str, int | str | bool]:
    """Field of Pins -> value, from words such as "tensor=4" or "recompute=full".

    "sequence" takes "on" or "off" for sequence parallelism beside tensor parallelism, or the number of ranks over which
    the tokens of a sample are split by any means. Raises ValueError that names the word which is wrong.
    """
    pins: dict[str, int | str | bool] = {}
    for text in texts:
        where = f"{flag} {text!r}"
        for name, value in _read_words(text, where, _PINS).items():
            if name in _DEGREES:
                pins[name] = _whole_number(value, name, where)
            elif name == "recompute":
                if value == "parts":
                    pins["parts"] = True
                else:
                    pins[name] = _recompute({name: value}, where, ("parts",)) or "none"
            elif name == "offload":
                pins |= _offload({name: value}, where)
            elif name == "schedule":
                pins[name] = _choice({name: value}, name, ("none", *_SCHEDULES), where) or "none"
            elif name == "context_kind":
                pins[name] = _context_kind({name: value}, where) or "ring"
            elif name == "zero":
                pins |= _pinned_zero({name: value}, where)
            elif name == "sequence" and value.isdecimal():
                pins["sequence_ways"] = _whole_number(value, name, where)
            elif name == "sequence":
                pins[name] = _choice({name: value}, name, ("on", "off"), where) == "on"
            else:
                raise ValueError(
                    f"{where}: {name} cannot be pinned; {', '.join(_DEGREES)}, context_kind, recompute, schedule, "
                    "offload, zero and sequence can, for example --pin tensor=4"
                )
    return pins


def _offload(words: dict[str, str], where: str) -> dict[str, bool]:
    """Fields of Pins that offload=... sets: to move activations to the host's memory, of the layers for which that is
    best, or the optimizer."""
    value = _choice(words, "offload", ("optimizer", "activations", "both"), where)
    found = {"offload_activations": ("activations", "both"), "offload_optimizer": ("optimizer", "both")}
    return {name: True for name, said in found.items() if value in said}


def _pinned_zero(words: dict[str, str], where: str) -> dict[str, int | str | bool]:
    """Field of Pins -> value that zero=N sets, if nothing else is said of data ranks. zero=0 also excludes context
    ranks, because they would share state."""
    zero = _zero_mode(words, where)
    if zero == 0:
        return {"data_shard": 1, "context": 1}
    return {"data_replicate": 1, "gradient_sync": "every" if zero >= 2 else "last", "reshard": zero == 3}


def parse_limits(text: str) -> dict[str, int]:
    """Field of Pins -> largest value that the planner may choose, from words such as "tensor=8".

    Raises ValueError that names the word which is wrong.
    """
    where = f"--max {text!r}"
    limits = {}
    for name, value in _read_words(text, where, ", ".join(f"{name}=8" for name in _DEGREES)).items():
        if name not in _DEGREES:
            raise ValueError(f"{where}: {name} has no largest value; {', '.join(_DEGREES)} have, as in --max tensor=8")
        limits[name] = _whole_number(value, name, where)
    return limits


def _read_words(text: str, where: str, spelling: str = _SPELLING) -> dict[str, str]:
    """Canonical name -> value of each word; "ddp", "fsdp" and "hsdp" without a value become values of "kind". spelling:
    what may be written, for the error."""
    words: dict[str, str] = {}
    for word in _WORD.findall(text) or [""]:
        name, mark, value = word.partition("=" if "=" in word else ":")
        name, value = name.lower(), value if value.lower().startswith(PARTS) else value.lower()
        name = name.replace("-", "_")
        if name in ("ddp", "fsdp", "hsdp") and (not mark or name == "hsdp"):
            key, value = "kind", name + (f":{value}" if mark else "")
        elif name in _KEYS and value:
            key = _KEYS[name]
        else:
            near = difflib.get_close_matches(name, _KEYS, n=1) if value else []
            meant = f" (is it {near[0]}={value}?)" if near else ""
            raise ValueError(f"{where}: cannot read {word!r}{meant}; write {spelling}")
        if words.get(key, value) != value:
            raise ValueError(f"{where}: says {key} twice, {words[key]} and {value}; keep one")
        words[key] = value
    return words


def _whole_number(value: str, name: str, where: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        two = re.fullmatch(r"(\d+)([a-z]+[=:]?\w*)", value)
        apart = f", and a space between two words: {name}={two[1]} {two[2]}" if two else ""
        raise ValueError(f"{where}: {name}={value}: give a whole number of at least 1{apart}")
    return int(value)


def _degree(words: dict[str, str], name: str, where: str) -> int:
    return _whole_number(words[name], name, where) if name in words else 1


def _choice(words: dict[str, str], name: str, choices: tuple[str, ...], where: str) -> str | None:
    value = words.get(name)
    if value is not None and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{where}: there is no {name} {value!r}; {hint}choose {' or '.join(choices)}")
    return value


def _recompute(words: dict[str, str], where: str, others: tuple[str, ...] = ()) -> Recompute | None:
    """The kind of recompute, or the parts, that the words ask for; None if they do not say. others: further allowed
    values."""
    value = words.get("recompute", "")
    if not value.lower().startswith(PARTS):
        return _choice(words, "recompute", (*EXECUTABLE_RECOMPUTES, *others, f"{PARTS}NAME+NAME"), where)
    try:
        return known_recompute(PARTS + value[len(PARTS) :])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _zero_mode(words: dict[str, str], where: str) -> int:
    """ZeRO stage, 0 to 3. If no word gives it: 3 if a word shards the data ranks, 1 if they are sharded only because
    experts are spread over them, and 0 otherwise."""
    value = _choice(words, "zero", ("0", "1", "2", "3"), where)
    kind = words.get("kind", "")
    sharded = kind.startswith(("fsdp", "hsdp")) or "data_shard" in words
    if value is None:
        replicas = kind == "ddp" or "data_replicate" in words
        return 3 if sharded else 1 if _degree(words, "expert", where) > 1 and not replicas else 0
    if (value == "0" and sharded) or (value != "0" and kind == "ddp"):
        raise ValueError(f"{where}: zero={value} contradicts {kind or 'data_shard'}; keep one")
    return int(value)


def _split_data(words: dict[str, str], where: str, data: int, zero: int, devices_per_host: int) -> tuple[int, int]:
    """(replicas, shards) of the `data` ranks that see different samples."""
    if "data" in words and _whole_number(words["data"], "dp", where) != data:
        raise IllegalSetupError(
            where, f"dp={words['data']}, but {data} data ranks are left; write dp={data} or leave out dp"
        )
    kind = words.get("kind", "")
    shard = replicate = None
    if kind.startswith("hsdp:"):
        shard = _whole_number(kind.removeprefix("hsdp:"), "hsdp", where)
    elif kind == "hsdp":
        inner = _degree(words, "tensor", where) * _degree(words, "context", where)
        ranks_per_host = max(1, devices_per_host // inner)
        shard = max(size for size in range(1, ranks_per_host + 1) if data % size == 0)
    if "data_shard" in words:
        shard = _degree(words, "data_shard", where)
    if "data_replicate" in words:
        replicate = _degree(words, "data_replicate", where)
    if shard is None and replicate is None:
        return (1, data) if zero else (data, 1)
    shard = shard if shard is not None else data // (replicate or 1) if zero else 1
    replicate = replicate if replicate is not None else data // shard
    if replicate * shard != data:
        raise IllegalSetupError(
            where,
            f"{replicate} replicas x {shard} shards are not the {data} data ranks that are left; "
            f"choose degrees that multiply to {data}",
        )
    return replicate, shard


def setup_words(plan: Plan) -> list[str]:
    """Words of --setup for a plan's layout; with its recompute only if all layers that can recompute do the same."""
    degrees = plan.degrees
    named = {"ddp": "data_replicate", "fsdp": "data_shard", "tp": "tensor", "cp": "context", "ep": "expert"}
    named |= {"pp": "pipeline", "v": "virtual_stages"}
    ways = {word: getattr(degrees, name) for word, name in named.items()}
    words = [f"{word}={degree}" for word, degree in ways.items() if degree > 1]
    if degrees.context > 1:
        words.append(f"cp_kind={plan.context_kind}")
    words += [f"zero={plan.zero_stage}"] if plan.zero_stage else []
    if degrees.tensor > 1:
        words.append("sp=on" if plan.sequence_parallel else "sp=off")
    words.append(f"mb={plan.micro_batch}")
    words += [f"schedule={plan.schedule}"] if degrees.pipeline > 1 else []
    modules = [layer for layer in plan.layers if layer.modules == (layer.root,)]
    kinds = {layer.recompute for layer in modules}
    return [*words, f"recompute={kinds.pop()}"] if len(kinds) == 1 else words
