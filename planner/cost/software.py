"""Training stacks, each described by a few constants relative to what a device file says of the device."""

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ...profiler.document import Frozen, parsed, rule_of
from ...profiler.machine.cluster import Device, Link
from ..plan.training import LOW_PRECISIONS
from .kernels import family_of

_FILE = Path(__file__).with_name("software.toml")

_MEMORY_KINDS = ("norm", "elementwise", "copy", "loss", "embedding", "other")
"""Kinds of operators that fusion makes faster: all except matmul and attention."""

INDEXING = ("index", "index_add", "index_select", "index_put", "scatter", "gather")
"""Operators that sort tokens by expert and bring them back. Fusion does not lessen what they move."""


STAGE_S = 0.5e-3
"""Seconds that the host takes for each pass of a micro-batch through a stage of torch.distributed.pipelining: schedule,
sends and receives, and autograd. Measured: benchmarks/execution/results/host_time.md."""


class StackMemory(Frozen):
    """Memory of a training stack, where it differs from that of FSDP2 with eager kernels: bytes per element, and
    shares."""

    buffers: bool = Field(
        default=False,
        description="weights and gradients lie whole in buffers all step long, beside a sharded optimizer with fp32 "
        "weights, as Megatron's distributed optimizer has them; where weights are not gathered layer by layer",
    )
    gradient_copies: float = Field(
        default=0.0, ge=0, le=100, description="bytes of a parameter's gradient beside the buffer's"
    )
    pure: bool = Field(default=False, description="weights, gradients and moments are in the compute dtype alone")
    optimizer_copies: float = Field(
        default=0.0,
        ge=0,
        le=100,
        description="bytes beside an optimizer's state for each element that it has: its own copies",
    )
    frees_sent: bool = Field(
        default=False,
        description="a pipeline stage frees what it has sent to the next one, and keeps no output until its backward",
    )
    fixed_segments: bool = Field(
        default=False,
        description="the allocator's segments do not grow: the blocks of the largest transient are split between steps",
    )
    gathers_again: bool = Field(
        default=False, description="sequence parallelism keeps slices of what matmuls read, and gathers them once more"
    )
    moments: float = Field(default=1.0, gt=0, le=10, description="size of an optimizer's moments relative to fp32")
    fuses: bool = Field(
        default=False,
        description="norms, gates and rotary positions are fused kernels: they keep what enters them, which the "
        "profile lists, and not what they make on the way",
    )
    unread_gradients: bool = Field(
        default=False,
        description="matmuls that add to the gradient in place return one to autograd that nobody reads, in the "
        "compute dtype: linear layers of one shape share theirs, which stays; the head has its own in its backward",
    )
    low_precision: float = Field(
        default=1.0, gt=0, le=10, description="share of the saved activations that fp8 and fp4 matmuls leave"
    )
    selective: float = Field(
        default=1.0, gt=0, le=10, description="share of what selective recompute keeps that is kept"
    )
    logit_bytes: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="bytes for each logit of this rank while the loss is computed; None: as traced",
    )
    fragmentation: float | None = Field(
        default=None, ge=0, le=10, description="reserved over allocated - 1; None: device's"
    )
    context: float | None = Field(
        default=None, ge=0, le=1e16, description="bytes outside of the allocator; None: the device's"
    )
    communicator: float | None = Field(
        default=None, ge=0, le=1e16, description="those of a process group; None: the device's"
    )

    def kept(self, recompute: str, precision: str) -> float:
        """Share that this stack keeps of what its kernels would keep under a recompute."""
        if recompute == "full":
            return 1.0
        share = self.low_precision if precision in LOW_PRECISIONS else 1.0
        return share * (self.selective if recompute == "selective" else 1.0)


class Software(Frozen):
    """A training stack. Shares and factors are relative to the device file's numbers; seconds are the host's."""

    name: str
    description: str
    matmul: float = Field(default=1.0, gt=0, le=10, description="speed of matmuls")
    low_precision: float = Field(default=1.0, gt=0, le=10, description="speed of fp8 and fp4 matmuls, casts aside")
    casts: float = Field(
        default=1.0, ge=0.3, le=1.5, description="share of the bytes moved to cast what fp8 and fp4 matmuls read"
    )
    delayed_scaling: bool = Field(default=False, description="casts to fp8 use the scales of steps before")
    attention: float = Field(default=1.0, gt=0, le=10, description="speed of fused attention: its kernel's generation")
    attention_kernel: Literal["torch", "flash-1", "flash-2", "cudnn"] = Field(
        default="torch", description="generation of its fused attention's kernels; torch: what torch chooses there"
    )
    fusion: float = Field(
        default=1.0, gt=0, le=10, description="share of the memory traffic of other kernels that is left"
    )
    overlap: float | None = Field(
        default=None, ge=0, le=1, description="share of compute behind which gradients and gathers hide; None: device's"
    )
    tensor_overlap: float = Field(default=0.0, ge=0, le=1, description="share of tensor-parallel communication hidden")
    network: float = Field(default=1.0, gt=0, le=10, description="share of the bandwidth between hosts that it reaches")
    loss: float = Field(
        default=1.0, gt=0, le=10, description="share of the traffic of the loss over logits that is left"
    )
    gradient_bytes: int = Field(
        default=4, ge=1, le=8, description="bytes of one element of gradients when they are reduced"
    )
    layer_s: float = Field(default=0.0, ge=0, le=60, description="seconds that the host adds to each pass of a layer")
    stage_s: float = Field(
        default=STAGE_S,
        ge=0,
        le=60,
        description="seconds that the host takes for each pass of a micro-batch through a pipeline stage; hidden where "
        "the stage computes as long",
    )
    step_s: float = Field(default=0.0, ge=0, le=3600, description="seconds that the host adds to each step")
    graphed: float = Field(default=0.0, ge=0, le=1, description="share of launches that are replayed from CUDA graphs")
    dispatch: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="time that the host takes to issue an operator, over that of our executor in eager mode; 0: not "
        "known, and taken for hidden",
    )
    routing_s: float = Field(
        default=2e-3,
        ge=0,
        le=60,
        description="seconds that the host adds to each pass of a bank of experts for which it waits: how many tokens "
        "go to which rank. 1.1-5.2 ms in published runs of mixtures with plain all-to-all",
    )
    expert_s: float = Field(
        default=0.0,
        ge=0,
        le=60,
        description="seconds that the host adds for each expert held, per pass: stacks that loop",
    )
    expert_overlap: float = Field(
        default=0.0, ge=0, le=1, description="share of the exchange of tokens with experts that is hidden"
    )
    dispatches_once_per_host: bool = Field(
        default=False, description="a token crosses the network once for each host with experts of its, not for each"
    )
    gathers_low_precision: bool = Field(
        default=False,
        description="what fp8 matmuls read is cast before it is gathered: weights by data ranks, activations and their "
        "gradients by tensor ranks",
    )
    drops_tokens: bool = Field(
        default=False, description="experts take a fixed number of tokens, padded or cut: the host waits for no counts"
    )
    memory: StackMemory = StackMemory()
    accumulates_in_matmul: bool = Field(default=False, description="new gradients are added by the matmul itself")
    source: str = Field(description="where the numbers come from")

    @property
    def host_layer_s(self) -> float:
        """Seconds that the host adds to each pass of a layer; launches replayed from CUDA graphs add none."""
        return self.layer_s * (1 - self.graphed)

    @property
    def host_stage_s(self) -> float:
        """Seconds that the host takes for each pass of a micro-batch through a stage; launches replayed from CUDA
        graphs take none."""
        return self.stage_s * (1 - self.graphed)

    def host_routing_s(self, num_experts: float, expert: int) -> float:
        """Seconds that the host adds to each pass of a bank of experts. num_experts: those that the rank holds; expert:
        degree of expert parallelism. The host only issues kernels, and waits for nothing, if no rank has to be told how
        many tokens will come: without expert parallelism, with DeepEP or HybridEP, or if all experts take equally many
        tokens."""
        waits = expert > 1 and not self.dispatches_once_per_host and not self.drops_tokens
        return (self.routing_s * (1 if waits else ISSUING) + self.expert_s * num_experts) * (1 - self.graphed)

    def on(self, device: Device, num_devices: int = 1) -> Device:
        """The device as this stack uses it, in a job on so many devices."""
        device = _waiting_for_stragglers(device, num_devices)
        changes: dict[str, object] = {}
        if self.matmul != 1.0:
            changes["matmul_efficiency"] = device.matmul_efficiency * self.matmul
            changes["low_precision_efficiency"] = device.low_precision_efficiency * self.matmul * self.low_precision
            changes["matmul_samples"] = {
                dtype: tuple((*sides, share * self.matmul) for *sides, share in samples)
                for dtype, samples in device.matmul_samples.items()
            }
        elif self.low_precision != 1.0:
            changes["low_precision_efficiency"] = device.low_precision_efficiency * self.low_precision
        family = family_of(device)
        if family is not None:
            generation = family.generation(self.attention_kernel)
            changes["attention_speed"] = device.attention_speed * self.attention * generation
            products = self.matmul * self.low_precision
            changes["low_precision_speed"] = device.low_precision_speed * products
            changes["product_speed"] = device.product_speed * self.matmul
        casts = self.casts * (DELAYED_CASTS if self.delayed_scaling else 1.0)
        if casts != 1.0:
            changes["casts"] = device.casts * casts
        if self.attention != 1.0:
            changes["attention_efficiency"] = device.attention_efficiency * self.attention
            if device.attention_backward_efficiency is not None:
                changes["attention_backward_efficiency"] = device.attention_backward_efficiency * self.attention
        if self.fusion != 1.0 or self.loss != 1.0:
            shares = dict.fromkeys(_MEMORY_KINDS, device.bandwidth_efficiency) | device.kernel_efficiency
            shares = {kernel: share / self.fusion for kernel, share in shares.items()}
            indexing = {name: device.kernel_efficiency.get(name, device.bandwidth_efficiency) for name in INDEXING}
            shares = shares | (indexing if device.kernels else {})
            changes["kernel_efficiency"] = shares | {"loss": shares["loss"] / self.loss}
        if self.overlap is not None:
            changes["overlap"] = self.overlap
        for field in ("fragmentation", "context", "communicator"):
            if getattr(self.memory, field) is not None:
                changes[field] = getattr(self.memory, field)
        issuing = self.dispatch * (1 - self.graphed)
        if issuing != 1.0:
            changes["dispatch"] = device.dispatch * issuing
        if self.graphed:
            replayed = min(device.launch, GRAPH_LAUNCH_S)
            changes["launch"] = self.graphed * replayed + (1 - self.graphed) * device.launch
        return device.model_copy(update=changes) if changes else device

    def through(self, network: Link) -> Link:
        """The network between hosts as this stack uses it."""
        return network.model_copy(update={"bandwidth": network.bandwidth * self.network})


DELAYED_CASTS = 2 / 3
"""Share of the bytes of a cast that is left if its scale is known before: the input is read once instead of twice."""

ISSUING = 0.1
"""Share of routing_s that is left if the host does not wait. Assumption: 40 small kernels of 5 us."""

GRAPH_LAUNCH_S = 2e-6
"""Seconds of the smallest kernel of a CUDA graph. Assumption: about 2 us of work; NVIDIA's "Getting Started with CUDA
Graphs" has 0.5 us between kernels of a graph."""

STRAGGLING = 0.00286
"""Share by which compute and memory traffic get slower for each doubling of the devices beyond one host, as all wait
for the slowest. Fit to published runs, see benchmarks/published/fitted/fit.md."""


def _waiting_for_stragglers(device: Device, num_devices: int) -> Device:
    doublings = math.log2(num_devices / device.devices_per_host) if num_devices > device.devices_per_host else 0.0
    if doublings == 0.0:
        return device
    speed = 1.0 / (1.0 + STRAGGLING * doublings)
    return device.model_copy(update={name: getattr(device, name) * speed for name in _SLOWED})


_SLOWED = ("sustained", "bandwidth_efficiency")
"""Fields of a device that waiting for the slowest device makes smaller."""


@cache
def all_software() -> dict[str, Software]:
    """Name -> stack, of all stacks that we ship."""
    tables = tomllib.loads(_FILE.read_text())
    return {name: Software(name=name, **table) for name, table in tables.items()}


MEMORY_VARIANTS: dict[str, dict[str, float]] = {
    "deepspeed": {"optimizer_copies": 4.0, "context": 4.7 * 2**30, "frees_sent": False},
    "deepspeed-2021": {"optimizer_copies": 4.0, "gradient_copies": 4.0, "frees_sent": False},
    "deepspeed-bf16": {"gradient_copies": 2.0},
    "flat-optimizer": {
        "optimizer_copies": 8.0,
        "context": 4.8 * 2**30,
        "frees_sent": False,
        "unread_gradients": False,
    },
    "half-moments": {"moments": 0.5},
    "torchtitan": {"selective": 0.7, "logit_bytes": 14.0, "gathers_again": True},
    "compiled-selective": {"selective": 0.56},
    "compiled-loss": {"logit_bytes": 4.0},
    "saves-all": {"fuses": False},
    "loss-in-place": {"logit_bytes": 2.0},
    "fixed-segments": {"fixed_segments": True, "fragmentation": 0.0},
    "pure-16-bit": {"pure": True},
}
"""What variants change of a stack's memory. Which copies a program holds is inferred from what its published runs hold
beyond the textbook's sum, and from how its authors describe it; it was not read in its source. DeepSpeed's ZeRO-1:
gradients of its shard copied to fp32, and buckets, which are counted with the context; that of 2021 copied all
gradients of a rank; its bf16 optimizer keeps gradients in bf16 and adds them up in fp32. A flat optimizer, as
InternEvo's, copies gradients to fp32 and makes one more copy in the step. Half moments are Adam's in bf16, as recipes
of DeepSeek's architecture have them. torchtitan's selective checkpointing keeps every other matmul's result and no
gathered input (compiled, less of them than eager), and its loss is computed on logits that stay cut: in bf16 and fp32,
with the gradients of both, or, compiled (since 2025), in bf16 alone, which is what torch's partitioner saves of them,
and their gradient. Thunder's fusions save what they make on the way: litgpt's runs hold 2 GB less with it than eager
ones, and 7 GB less compiled. The gradients of logits may be written over them, in 16 bits (Transformer Engine's cross
entropy until July 2026, pull requests 1456 and 3193; Megatron's `cross_entropy_fusion_impl="te"`). torchtitan's script
did not ask for `expandable_segments:True` at first (run_llama_train.sh), nor would a share of everything stand for what
fixed segments add. DeepSpeed's and InternEvo's pipelines keep outputs until their backward, as torch's do. Pure 16-bit
is Lightning's "bf16-true": weights, gradients and moments in the compute dtype. Context, selective and what is not
whole: fits, benchmarks/published/fitted/memory.md."""

VARIANTS: dict[str, dict[str, object]] = {
    "overlapped-tensor": {"tensor_overlap": 0.6},
    "half-gradients": {"gradient_bytes": 2},
    "graphs": {"graphed": 1.0},
    "part-graphs": {"graphed": 0.5},
    "once-per-host": {"dispatches_once_per_host": True},
    "overlapped-experts": {"expert_overlap": 0.8},
    "looped-experts": {"expert_s": 30e-6},
    "token-drop": {"drops_tokens": True},
    "low-precision-gathers": {"gathers_low_precision": True},
    "delayed-scaling": {"delayed_scaling": True},
    "flash-2": {"attention_kernel": "flash-2"},
    "te-kernels": {"attention_kernel": "cudnn", "fusion": 0.42},
    **{name: {} for name in MEMORY_VARIANTS},
}
"""What may be added to a stack's name: tensor-parallel communication hidden behind matmuls cut in pieces (torch's
asynchronous tensor parallelism; 0.6 is an assumption, published runs show that not all hides); gradients reduced in the
16-bit dtype; CUDA graphs of whole steps, or of parts of layers (half of all launches, an assumption); DeepEP or
HybridEP; exchanges of tokens behind another micro-batch's work (DualPipe, Megatron's 1F1B with overlapped all-to-all:
0.8 is an assumption); experts in a Python loop (6 kernels of 5 us for each); experts of a fixed capacity; gathers in
fp8, as torchao's with one scale for a tensor are (and with a scale for each row not: torchtitan's docs/float8.md);
casts to fp8 by the scales of steps before, which read their input once and not twice; FlashAttention 2's kernels;
attention by cuDNN and fused norms, rotary and SwiGLU of Transformer Engine in a stack of torch's (as much fused as
torch.compile is found to do)."""


def load_software(name_or_path: str) -> Software:
    """A shipped stack by name, or the one in a TOML file with one table. Raises ValueError, with the known names, for
    others.

    Variants are added to either with "+": megatron-core+graphs+once-per-host.
    """
    if name_or_path in all_software():
        return all_software()[name_or_path]
    name_or_path, *added = [name_or_path] if Path(name_or_path).exists() else name_or_path.split("+")
    unknown = [name for name in added if name not in VARIANTS]
    if unknown:
        raise ValueError(f"there is no variant {unknown[0]!r} of software; there are {', '.join(VARIANTS)}")
    stack = _stack(name_or_path)
    changes = {field: value for name in added for field, value in VARIANTS[name].items()}
    memory = {field: value for name in added for field, value in MEMORY_VARIANTS.get(name, {}).items()}
    if memory:
        changes["memory"] = stack.memory.model_copy(update=memory)
    return stack.model_copy(update=changes) if changes else stack


def _stack(name_or_path: str) -> Software:
    if name_or_path in all_software():
        return all_software()[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".toml" or not path.exists():
        raise ValueError(
            f"there is no software {name_or_path!r}; there are {', '.join(all_software())}, or give the path of a TOML"
        )
    try:
        ((name, table),) = parsed(tomllib.loads, path.read_text()).items()
        return Software(name=name, **table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        rule = f"{where}: {rule_of(error, Software)} (found {first['input']!r})"
        raise ValueError(f"{path} holds no table of one software: {rule}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no table of one software: {str(error).splitlines()[0]}") from None
