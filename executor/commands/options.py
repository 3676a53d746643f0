"""What the flags of several commands are called, take and mean."""

import sys
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...planner.cost.bands import USUAL_RISK
from ...planner.plan.frameworks import TARGETS, framework_of
from ...planner.plan.training import REFERENCE, Objective

if TYPE_CHECKING:
    from ...planner.plan.pins import Pins


def new_app() -> typer.Typer:
    """An empty command; what it raises is shown by cli.main."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


class Precision(StrEnum):
    """What our executor computes in."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"


class Optimizer(StrEnum):
    """Optimizers whose state is priced."""

    ADAMW = "adamw"
    SGD = "sgd"


class SpaceOf(StrEnum):
    """What is searched: plans that the executor runs, or all that are priced."""

    RUN = "run"
    FULL = "full"


def whole_number(text: str | int) -> int:
    """The number that a flag's text, or its default, says."""
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text} is no whole number of at least 1")
    return int(text)


def number_option(*flags: str, help: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(*flags, metavar="N", parser=whole_number, help=help)


@dataclass(frozen=True)
class NumberFlag:
    """A flag that takes a number, and which are allowed; example: what a user may write."""

    flag: str
    least: float
    example: str
    most: float = sys.float_info.max

    def read(self, text: str) -> float:
        """The number that a flag's text says."""
        value = number_of(text)
        if value is None or not self.least <= value <= self.most:
            raise typer.BadParameter(self.rule(text))
        return value

    def given(self, value: float | str) -> float:
        """The number that Python code gives. Raises ValueError that names the flag."""
        try:
            return self.read(str(value))
        except typer.BadParameter as error:
            raise ValueError(f"{self.flag} {error.message}") from None

    def rule(self, found: object) -> str:
        """What is wrong with a value, and what to write."""
        return f"{found} is no number of at least {self.least:g}; write, for example, {self.example}"


class ShareFlag(NumberFlag):
    """A flag that takes a share."""

    def rule(self, found: object) -> str:
        """What is wrong with a value, and what to write."""
        return (
            f"{found} is no share from {self.least:g} to {self.most:g}; write, for example, {self.example}, which is "
            f"{float(self.example):.0%}"
        )


def number_of(text: str) -> float | None:
    """The number that a text says; None if it says none."""
    try:
        return float(text)
    except ValueError:
        return None


MARGIN = ShareFlag("--memory-margin", 0.0, "0.1", most=0.9)
RISK = ShareFlag("--memory-risk", 0.001, "0.05", most=0.999)
PRICE = NumberFlag("--price-per-hour", 0.0, "2.50")
TIME_LIMIT = NumberFlag("--time-limit", 0.1, "60")


def _model_flag(takes: str = "model or profile.json", adds: str = "") -> Any:
    """--model of a command whose plan names its model."""
    words = f"{takes}, if it is not where the plan says{adds}"
    return typer.Option("--model", metavar="MODEL", help=words)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="model.py, file.py:function, a Hugging Face config.json, its folder or cached id, or a profile.json",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="CHOICES",
        help="fine-tune with PEFT's adapters, all else frozen: r=16[,alpha=32][,dropout=0.05]"
        "[,targets=q_proj+v_proj | targets=all-linear][,base=bf16 | base=nf4]",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan.json")]
ModelOfPlan = Annotated[str | None, _model_flag()]
ModelToRun = Annotated[str | None, _model_flag("the model")]
ModelForTables = Annotated[str | None, _model_flag(adds="; adds itemised memory and the step's parts")]
PlanOutput = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="where the plan goes")]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", "-g", metavar="N", help="number of GPUs (default: those that are here)"),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="a preset (`plan devices`) or a device TOML"),
]
PerNode = Annotated[int | None, number_option("--gpus-per-node", help="GPUs of one host")]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="TOML with hosts, links and devices"),
]
InstanceFlag = Annotated[
    str | None,
    typer.Option("--instance", metavar="TYPE", help="a cloud's instance type (`plan devices --cloud`)"),
]
Nodes = Annotated[int | None, number_option("--nodes", help="instances (default: 1)")]
Price = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour",
        metavar="USD",
        parser=PRICE.read,
        help="of one GPU (default: the device file's, if it has one)",
    ),
]
GlobalBatch = Annotated[
    int | None, number_option("--global-batch", "-b", help="samples per optimizer step, over all GPUs")
]
SeqLen = Annotated[int | None, number_option("--seq-len", "-s", help="tokens per sample (default: the model's)")]
PrecisionFlag = Annotated[Precision | None, typer.Option("--precision", help="default: bf16; fp32 on cpu")]
OptimizerFlag = Annotated[Optimizer, typer.Option("--optimizer")]
SoftwareFlag = Annotated[
    str | None,
    typer.Option(
        "--software",
        metavar="NAME",
        help=f"training stack to predict: fsdp2-compile, megatron-core, ... (default: {REFERENCE}, or that of --for)",
    ),
]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="FRAMEWORK",
        help=f"only what it runs, priced with its software, to `plan export` to it: {', '.join(TARGETS)}",
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(
        "--memory-margin",
        metavar="SHARE",
        parser=MARGIN.read,
        help="share of GPU memory left free (default: by --memory-risk)",
    ),
]
Risk = Annotated[
    float | None,
    typer.Option(
        "--memory-risk",
        metavar="SHARE",
        parser=RISK.read,
        help=f"how likely a plan may run out of memory, judged by published runs (default: {USUAL_RISK:g}; where there "
        "are none of the kind, as much memory is left free as if there were, and 5% on CPUs)",
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin", metavar="CHOICE", help="keep a choice, as in --pin tensor=4 --pin sequence=8 --pin context_kind=ring"
    ),
]
Most = Annotated[
    list[str] | None,
    typer.Option("--max", metavar="CHOICE", help="no more than, as in --max tensor=8"),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option("--forbid", metavar="NAME", help="leave out tensor, context, interleaved, ..."),
]
SpaceFlag = Annotated[
    SpaceOf,
    typer.Option("--space", help="full: also recompute of any parts of layers, and activations in host memory"),
]
RecomputeFlag = Annotated[
    str | None,
    typer.Option(
        "--recompute",
        metavar="KIND",
        help="of every layer: none, attention, selective, full, or parts:mlp+self_attn; parts: any of any layer, too",
    ),
]
ObjectiveFlag = Annotated[
    Objective, typer.Option("--objective", help="cost and min-gpus may leave GPUs unused; the global batch stays")
]
MicroBatch = Annotated[int | None, number_option("--micro-batch", help="samples of one data rank per forward")]
TimeLimit = Annotated[
    float,
    typer.Option("--time-limit", metavar="SECONDS", parser=TIME_LIMIT.read, help="seconds the search may take"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="profile anew, even if nothing has changed; keep nothing")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="everything: all tables, and what was weighed")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no tables, no progress bar")]
QuietBar = Annotated[bool, typer.Option("--quiet", "-q", help="no progress bar")]
"""Of commands whose tables are the answer."""


@dataclass(frozen=True)
class MachineOptions:
    """Which devices there are, and what one costs."""

    gpus: Gpus = None
    device: Device = None
    gpus_per_node: PerNode = None
    cluster: ClusterFile = None
    instance: InstanceFlag = None
    nodes: Nodes = None
    price_per_hour: Price = None


@dataclass(frozen=True)
class StackOptions:
    """How a job computes."""

    precision: PrecisionFlag = None
    optimizer: OptimizerFlag = Optimizer.ADAMW
    software: SoftwareFlag = None
    memory_margin: Margin = None
    memory_risk: Risk = None


@dataclass(frozen=True)
class JobOptions:
    """What is to be trained with, and on what."""

    machine: MachineOptions = field(default_factory=MachineOptions)
    global_batch: GlobalBatch = None
    seq_len: SeqLen = None
    stack: StackOptions = field(default_factory=StackOptions)


@dataclass(frozen=True)
class PlanOptions:
    """What the user decides of the plan."""

    made_for: For = None
    pin: Pin = None
    most: Most = None
    forbid: Forbid = None
    recompute: RecomputeFlag = None
    micro_batch: MicroBatch = None
    space: SpaceFlag = SpaceOf.RUN

    def pins(self) -> "Pins":
        """The choices as the search reads them. Raises ValueError that says which word is wrong."""
        from ...planner.plan.pin_texts import read_pins

        everything = self.space is SpaceOf.FULL
        most, forbid = self.most or (), self.forbid or ()
        pins = read_pins(self.pin or (), most, forbid, self.recompute, self.micro_batch, everything)
        return pins if self.made_for is None else replace(pins, framework=framework_of(self.made_for))

    def stack(self, stack: StackOptions) -> StackOptions:
        """How a job computes: with the software of the framework that plans are made for, if none is named."""
        if self.made_for is None or stack.software is not None:
            return stack
        return replace(stack, software=framework_of(self.made_for).software)
