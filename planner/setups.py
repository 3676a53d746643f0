"""Set-ups as people write them ("fsdp", "hsdp:4", "tp=4 pp=2 zero=1 mb=2"), read into degrees and choices."""

import difflib
import re
from dataclasses import dataclass
from typing import Literal, get_args

from .plan import Recompute, Schedule

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
    "ep": "expert",
    "expert": "expert",
}
_SPELLING = (
    "ddp, fsdp, hsdp, hsdp:4, tp=4 (tensor), pp=2 (pipeline), dp=2 (data), zero=0|1|2|3, mb=2 (micro-batch), "
    "recompute=none|attention|selective|full, schedule=gpipe|1f1b|interleaved|zb-h1|zb-h2|zb-v, v=2 (stages of each "
    "rank), sp=on|off (sequence parallel); or megatron, torchtitan, deepspeed-zero1|2|3, or a plan.json"
)
_RECOMPUTES: dict[str, Recompute] = {name: name for name in get_args(Recompute)}
_SCHEDULES: dict[str, Schedule] = {name: name for name in get_args(Schedule) if name != "none"}
_SEPARATORS = re.compile(r"[\s,+]+")


@dataclass(frozen=True)
class Setup:
    """A manual layout over a fixed number of GPUs. None: not said, so the fastest choice that fits is taken.

    reshard and gradient_sync are the ZeRO mode: ZeRO-3 / FSDP gives gathered parameters back after forward and reduces
    gradients after every micro-batch; ZeRO-2 keeps the parameters; ZeRO-1 also reduces once, after the last one.
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

    @property
    def num_devices(self) -> int:
        """Ranks of the job."""
        return self.data_replicate * self.data_shard * self.tensor * self.pipeline


def parse_setup(text: str, num_devices: int, devices_per_host: int, flag: str = "--setup") -> Setup:
    """The set-up that `text` names, over all of `num_devices`.

    GPUs that tensor and pipeline degrees leave over go to data parallelism: replicas (DDP) by default, shards with
    "fsdp" or zero=1..3, shards of a given size ("hsdp:4") or of a host ("hsdp") that are replicated.
    Raises ValueError that says which word is wrong, or which degrees do not multiply to num_devices.
    """
    where = f"{flag} {text!r}"
    words = _read_words(text, where)
    tensor, pipeline = _degree(words, "tensor", where), _degree(words, "pipeline", where)
    data, rest = divmod(num_devices, tensor * pipeline)
    if rest or not data:
        raise ValueError(
            f"{where}: tensor x pipeline = {tensor} x {pipeline} does not divide {num_devices} GPUs; "
            f"choose degrees whose product divides {num_devices}"
        )
    for name in ("context", "expert"):
        if _degree(words, name, where) > 1:
            raise ValueError(
                f"{where}: {name}={words[name]} is priced in plan files, but not searched for yet; leave it out"
            )
    zero = _zero_mode(words, where)
    replicate, shard = _split_data(words, where, data, zero, devices_per_host)
    recompute = _choice(words, "recompute", tuple(_RECOMPUTES), where)
    schedule = _choice(words, "schedule", tuple(_SCHEDULES), where)
    virtual = _whole_number(words["virtual_stages"], "v", where) if "virtual_stages" in words else None
    sequence = _choice(words, "sequence", ("on", "off"), where)
    if virtual is not None and pipeline == 1:
        raise ValueError(f"{where}: v={virtual} needs a pipeline; add pp=2 or leave it out")
    if schedule is not None and pipeline == 1:
        raise ValueError(f"{where}: schedule={schedule} needs a pipeline; add pp=2 or leave it out")
    if sequence == "on" and tensor == 1:
        raise ValueError(f"{where}: sequence parallelism goes beside tensor parallelism; add tp=2 or leave it out")
    micro_batch = _whole_number(words["micro_batch"], "mb", where) if "micro_batch" in words else None
    return Setup(
        label=" ".join(text.split()),
        data_replicate=replicate,
        data_shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro_batch,
        recompute=None if recompute is None else _RECOMPUTES[recompute],
        schedule=None if schedule is None else _SCHEDULES[schedule],
        virtual_stages=virtual,
        sequence=None if sequence is None else sequence == "on",
        reshard=shard > 1 and zero == 3,
        gradient_sync="every" if shard > 1 and zero >= 2 else "last",
    )


_DEGREES = ("tensor", "pipeline", "data_replicate", "data_shard", "context", "expert", "micro_batch", "virtual_stages")


def parse_pins(texts: tuple[str, ...] | list[str], flag: str = "--pin") -> dict[str, int | str | bool]:
    """Choices that the planner must keep, from words such as "tensor=4" or "recompute=full": field of Pins -> value.

    "sequence" takes on and off for what goes beside tensor parallelism, or the number of ranks that the tokens of a
    sample are split between, by whatever means. Raises ValueError that says which word is wrong.
    """
    pins: dict[str, int | str | bool] = {}
    for text in texts:
        where = f"{flag} {text!r}"
        for name, value in _read_words(text, where).items():
            if name in _DEGREES:
                pins[name] = _whole_number(value, name, where)
            elif name == "recompute":
                pins[name] = _choice({name: value}, name, tuple(_RECOMPUTES), where) or "none"
            elif name == "schedule":
                pins[name] = _choice({name: value}, name, ("none", *_SCHEDULES), where) or "none"
            elif name == "sequence" and value.isdecimal():
                pins["sequence_ways"] = _whole_number(value, name, where)
            elif name == "sequence":
                pins[name] = _choice({name: value}, name, ("on", "off"), where) == "on"
            else:
                raise ValueError(
                    f"{where}: {name} cannot be pinned; {', '.join(_DEGREES)}, recompute, schedule and sequence can, "
                    "for example --pin tensor=4"
                )
    return pins


def parse_limits(text: str) -> dict[str, int]:
    """Largest values that the planner may choose, from words such as "tensor=8": field of Pins -> value.

    Raises ValueError that says which word is wrong.
    """
    where = f"--max {text!r}"
    limits = {}
    for name, value in _read_words(text, where).items():
        if name not in _DEGREES:
            raise ValueError(f"{where}: {name} has no largest value; {', '.join(_DEGREES)} have, as in --max tensor=8")
        limits[name] = _whole_number(value, name, where)
    return limits


def _read_words(text: str, where: str) -> dict[str, str]:
    """Canonical name -> value; "ddp", "fsdp" and "hsdp" without a value become "kind"."""
    words: dict[str, str] = {}
    for word in _SEPARATORS.split(text.strip()):
        name, mark, value = word.lower().partition("=" if "=" in word else ":")
        name = name.replace("-", "_")
        if name in ("ddp", "fsdp", "hsdp") and (not mark or name == "hsdp"):
            key, value = "kind", name + (f":{value}" if mark else "")
        elif name in _KEYS and value:
            key = _KEYS[name]
        else:
            raise ValueError(f"{where}: cannot read {word!r}; write {_SPELLING}")
        if words.get(key, value) != value:
            raise ValueError(f"{where}: says {key} twice, {words[key]} and {value}; keep one")
        words[key] = value
    return words


def _whole_number(value: str, name: str, where: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{where}: {name}={value}: give a whole number of at least 1")
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


def _zero_mode(words: dict[str, str], where: str) -> int:
    """ZeRO stage 0..3: as said, else 3 where the data ranks are sharded and 0 where they are not."""
    value = _choice(words, "zero", ("0", "1", "2", "3"), where)
    kind = words.get("kind", "")
    sharded = kind.startswith(("fsdp", "hsdp")) or "data_shard" in words
    if value is None:
        return 3 if sharded else 0
    if (value == "0" and sharded) or (value != "0" and kind == "ddp"):
        raise ValueError(f"{where}: zero={value} contradicts {kind or 'data_shard'}; keep one")
    return int(value)


def _split_data(words: dict[str, str], where: str, data: int, zero: int, devices_per_host: int) -> tuple[int, int]:
    """(replicas, shards) of the `data` ranks that see different samples."""
    if "data" in words and _whole_number(words["data"], "dp", where) != data:
        raise ValueError(
            f"{where}: dp={words['data']}, but {data} data ranks are left; write dp={data} or leave out dp"
        )
    kind = words.get("kind", "")
    shard = replicate = None
    if kind.startswith("hsdp:"):
        shard = _whole_number(kind.removeprefix("hsdp:"), "hsdp", where)
    elif kind == "hsdp":
        ranks_per_host = max(1, devices_per_host // (_degree(words, "tensor", where)))
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
        raise ValueError(
            f"{where}: {replicate} replicas x {shard} shards are not the {data} data ranks that are left; "
            f"choose degrees that multiply to {data}"
        )
    return replicate, shard
