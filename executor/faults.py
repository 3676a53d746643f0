"""A job that cannot go on ends on every rank, soon, with one message that names the rank and why."""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..planner.cost.memory_cost import state_bytes
from ..planner.cost.software import load_software
from ..planner.cost.stage_cost import outside_bytes
from ..planner.plan import Plan
from ..planner.strategy import shape_of
from ..profiler.units import GIB
from .measuring.local_ranks import is_echo
from .parallel.mesh import RankMesh

HANG_S = 600.0
"""A step that takes longer than this is taken for a hang, unless the user says another time."""

BEAT_S = 1.0
"""Seconds between signs of life of a rank, in jobs of up to 500."""

PATIENCE = 6
"""Signs of life that a rank may fail to give, beyond the first three, before it is taken for dead."""

GRACE_S = 5.0
"""How long a rank may take to end by itself once another one has failed."""

_FAILURE, _BEAT = "failure", "beat"


class NonFiniteError(FloatingPointError):
    """A loss or gradients are not numbers any more; the message says in which step, on which ranks, and where."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank. inside: it is in trainer.step; where: the line its main thread is at."""

    count: int
    step: int
    inside: bool
    since_s: float
    where: str
    waits: bool


class Watch:
    """Gives signs of life, looks for those of others when something is wrong, and ends this process if it must.

    Begins by putting itself before sys.excepthook, so that an exception that ends this rank is known to the others;
    `close` puts it back. hang_s: how long a step may take.
    """

    def __init__(self, rank: int, num_ranks: int, hang_s: float = HANG_S) -> None:
        self.rank, self.num_ranks, self.hang_s = rank, num_ranks, hang_s
        self.beat_s = BEAT_S * max(1.0, num_ranks / 500)
        self._step, self._inside, self._since = 0, False, time.monotonic()
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._telling, self._told = threading.Lock(), False
        self._count = 0
        run = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=30),
        )
        self._store = PrefixStore(f"meshwright/{'/'.join(run)}", store)
        self._holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._put()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._thread = threading.Thread(target=self._run, name="meshwright-watch", daemon=True)
        self._thread.start()

    def enter(self, step: int) -> None:
        """This rank begins a step."""
        self._step, self._inside, self._since = step, True, time.monotonic()

    def leave(self) -> None:
        """The step is done."""
        self._inside, self._since = False, time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self._ended.set()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook

    def _run(self) -> None:
        while not self._ended.wait(self.beat_s):
            try:
                self._put()
                failed = self._store.check([_FAILURE])
            except dist.DistError:  # the rank that holds the store is gone; the main thread will meet it, or hangs
                failed = False
            if failed:
                if not self._ended.wait(2 * GRACE_S if self._holds_store else GRACE_S):
                    os._exit(1)
                return
            if self._inside and time.monotonic() - self._since > self.hang_s:
                self._tell(self._diagnosis())
                if self._holds_store:
                    time.sleep(GRACE_S)
                os._exit(1)

    def _put(self) -> None:
        self._count += 1
        frame = sys._current_frames().get(self._main or 0)
        where, waits = _place(frame)
        beat = Beat(self._count, self._step, self._inside, time.monotonic() - self._since, where, waits)
        self._store.set(f"{_BEAT}{self.rank}", json.dumps(asdict(beat)))

    def _beats(self) -> list[Beat | None]:
        keys = [f"{_BEAT}{rank}" for rank in range(self.num_ranks)]
        known = [key for key in keys if self._store.check([key])]
        values = dict(zip(known, self._store.multi_get(known), strict=True))
        return [Beat(**json.loads(values[key])) if key in values else None for key in keys]

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = f"{kind.__name__}: {error}"
        if issubclass(kind, KeyboardInterrupt):
            self._previous_hook(kind, error, trace)
            return
        if not (is_echo(text) or issubclass(kind, dist.DistBackendError | dist.DistNetworkError)):
            where = f"in step {self._step}" if self._inside else f"after step {self._step}"
            message = f"rank {self.rank} of {self.num_ranks} failed {where}: {text}"
            self._claim(message)
            _for_the_launcher(error)
            traceback.print_exception(kind, error, trace)
            _print(message)
        else:
            self._tell(self._diagnosis(text))
        sys.stderr.flush()
        sys.stdout.flush()
        if self._holds_store:
            time.sleep(GRACE_S)  # the others want to know why
        os._exit(1)  # what is left of torch.distributed would wait for the others

    def _tell(self, message: str) -> None:
        """Print a message about another rank, unless one has been printed."""
        if self._claim(message):
            _print(message)

    def _claim(self, message: str) -> bool:
        """Whether this rank is the first to know why the job ends."""
        with self._telling:
            if self._told:  # the watch and the main thread may both find out
                return False
            self._told = True
            own = f"{self.rank} {message}"
            with suppress(dist.DistError):
                return bool(self._store.compare_set(_FAILURE, "", own).decode() == own)
            return True

    def _diagnosis(self, error: str = "") -> str:
        """Which rank is the reason, as far as signs of life tell."""
        try:
            before = self._beats()
            self._wait_for_failure(3 * self.beat_s)
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode().partition(" ")[2])
            after = self._beats()
            for _ in range(PATIENCE):  # on a machine that is overloaded signs of life come late
                if not self._silent(before, after):
                    break
                self._wait_for_failure(self.beat_s)
                after = self._beats()
        except dist.DistError:
            return f"rank 0 of {self.num_ranks}, which holds the store of the job, is gone: it was killed, or has ended"
        job = f"of {self.num_ranks}"
        silent = self._silent(before, after)
        if silent:
            last = after[silent[0]]
            step = "" if last is None else f" {'in' if last.inside else 'after'} step {last.step}"
            return (
                f"{_ranks(silent)} {job} gave no sign of life any more{step}: it was killed (most likely because memory"
                " was used up), it has ended, or its machine is gone" + (f"; here: {error}" if error else "")
            )
        beats = [beat for beat in after if beat is not None]
        behind = min((beat.step, beat.inside) for beat in beats)
        late = [rank for rank, beat in enumerate(beats) if (beat.step, beat.inside) == behind]
        outside = [rank for rank in late if not beats[rank].inside] if len(late) < len(beats) else []
        busy = [rank for rank in late if not beats[rank].waits]
        hanging = outside or (busy if len(busy) < len(beats) else [])
        if hanging:
            beat = beats[hanging[0]]
            return (
                f"{_ranks(hanging)} {job} hangs: for {beat.since_s:.0f} s {'in' if beat.inside else 'after'} step "
                f"{beat.step}, at {beat.where}; the others wait"
            )
        places = "; ".join(f"rank {rank} at {beat.where}" for rank, beat in enumerate(beats[:8]))
        return (
            f"all {self.num_ranks} ranks wait for each other for {max(b.since_s for b in beats):.0f} s in step "
            f"{behind[0]}, which a longer timeout_s would allow: {places}"
        )

    def _silent(self, before: Sequence[Beat | None], after: Sequence[Beat | None]) -> list[int]:
        """Other ranks without a sign of life between the two."""
        pairs = enumerate(zip(before, after, strict=True))
        return [rank for rank, (a, b) in pairs if (a is None or a == b) and rank != self.rank]

    def _wait_for_failure(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._store.check([_FAILURE]):
            self._put()  # another rank may be asking itself the same about this one
            time.sleep(self.beat_s / 5)


def _place(frame: FrameType | None) -> tuple[str, bool]:
    """(innermost line of the user's or a library's code, whether torch waits there for other ranks)."""
    if frame is None:
        return "an unknown place", False
    torch_home, home = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    waits = False
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        waits = waits or file.startswith(str(Path(torch_home) / "distributed"))
        if not file.startswith((torch_home, home)):
            break
        frame = frame.f_back
    place = frame or innermost
    # This package's own lines are where totals are waited for.
    waits = waits or innermost.f_code.co_filename.startswith(home) or "autograd" in innermost.f_code.co_filename
    return f"{place.f_code.co_filename}:{place.f_lineno} in {place.f_code.co_name}", waits


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _print(message: str) -> None:
    print(f"\nmeshwright: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _for_the_launcher(error: BaseException) -> None:
    """Let torchrun's own summary name the error, too."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        try:
            raise error  # what is recorded is the exception at hand
        except BaseException as current:
            get_error_handler().record_exception(current)


def check_finite(
    mesh: RankMesh, step: int, losses: list[torch.Tensor], gradients: dict[str, torch.Tensor], group: Any = None
) -> None:
    """Raise NonFiniteError on every rank: say which ranks and stages have losses and gradients that are no numbers.

    Every rank must call it. gradients: of this rank, by name.
    """
    bad_losses = [i for i, value in enumerate(losses) if not bool(torch.isfinite(value).all())]
    bad_gradients = [name for name, grad in gradients.items() if not bool(torch.isfinite(grad).all())]
    found: list[Any] = [(bad_losses, bad_gradients[:1], len(bad_gradients), mesh.rank)]
    if mesh.device_mesh is not None:
        found = [None] * mesh.plan.degrees.num_devices
        dist.all_gather_object(found, (bad_losses, bad_gradients[:1], len(bad_gradients), mesh.rank), group=group)
    parts = []
    for micro_batches, first, count, rank in sorted(found, key=lambda f: int(f[3])):
        if micro_batches:
            parts.append(f"the loss of micro-batch {micro_batches[0]} {_seat(mesh.plan, rank)} is not finite")
        if first:
            parts.append(f"{count} gradients {_seat(mesh.plan, rank)} are not finite, the first of {first[0]}")
    more = f" ({len(parts) - 4} more)" if len(parts) > 4 else ""
    what = "; ".join(parts[:4]) + more or "the gradient norm overflows"
    raise NonFiniteError(
        f"step {step}: {what}. Go on from the last checkpoint with a smaller learning rate, max_grad_norm, or without "
        "the samples of this step"
    )


def largest_elements(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[tensor] -> its largest magnitude, 0 if it is empty; not finite if an element is not."""
    held = [i for i, tensor in enumerate(tensors) if tensor.numel()]
    found = torch.zeros(len(tensors), device=tensors[0].device if tensors else None)
    if held:
        norms = torch._foreach_norm([tensors[i] for i in held], ord=math.inf)
        found[held] = torch.stack([norm.float() for norm in norms])
    return found


def raise_spoiled(mesh: RankMesh, step: int, names: list[str], largest: torch.Tensor) -> None:
    """Raise NonFiniteError on every rank: say which ranks and stages have parameters that are no numbers.

    Every rank must call it. names, largest: this rank's parameters, and their largest_elements behind that step.
    """
    bad = [name for name, value in zip(names, largest.tolist(), strict=True) if not math.isfinite(value)]
    found: list[Any] = [(bad[:1], len(bad), mesh.rank)]
    if mesh.device_mesh is not None:
        found = [None] * mesh.plan.degrees.num_devices
        dist.all_gather_object(found, (bad[:1], len(bad), mesh.rank))
    parts = [
        f"{count} parameters {_seat(mesh.plan, rank)}, the first of them {first[0]}"
        for first, count, rank in sorted(found, key=lambda f: int(f[2]))
        if first
    ]
    more = f" ({len(parts) - 4} more)" if len(parts) > 4 else ""
    raise NonFiniteError(
        f"step {step}: loss and gradients are finite, but the optimizer left {'; '.join(parts[:4])}{more} not finite. "
        "Go on from the last checkpoint with a smaller learning rate or a larger eps"
    )


def _seat(plan: Plan, rank: int) -> str:
    stages = plan.stages_of(plan.coordinates(rank)["pipeline"])
    stage = f", stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}" if len(plan.stages) > 1 else ""
    return f"on rank {rank}{stage}"


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds: by torch for model states, allocated and reserved at most, and what the device has."""

    parameters: float
    gradients: float
    optimizer: float
    allocated: float
    reserved: float
    others: float
    total: float


def held_memory(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> Held:
    """What this rank's device holds now, and at its peak."""

    def size(tensors: list[torch.Tensor]) -> float:
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return float(sum(t.numel() * t.element_size() for t in local))

    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return Held(
        parameters=size(parameters),
        gradients=size([p.grad for p in parameters if p.grad is not None]),
        optimizer=size(states),
        allocated=float(torch.cuda.max_memory_allocated(device)),
        reserved=float(reserved),
        others=float(total - free - reserved),
        total=float(total),
    )


def out_of_memory_message(plan: Plan, rank: int, num_elements: int, held: Held) -> str:
    """Which item of the predicted memory was exceeded most, and what to change.

    num_elements: of the parameters that this rank holds, before sharding over data.
    """
    shape, training = shape_of(plan), plan.training
    device = load_software(training.software).on(plan.cluster.device_of(rank), plan.degrees.num_devices)
    outside = outside_bytes(shape, device)
    state = state_bytes(shape, training)
    position = plan.coordinates(rank)["pipeline"]
    predicted_total = plan.prediction.stage_memory_bytes[position] if plan.prediction is not None else None
    predicted = {
        "parameters": num_elements * state.sharded_parameters,
        "gradients": num_elements * state.sharded_gradients,
        "optimizer": num_elements * state.optimizer,
    }
    found = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    if predicted_total is not None:
        inside = (predicted_total - outside) / (1 + device.fragmentation)
        predicted["activations and gathered copies"] = max(0.0, inside - sum(predicted.values()))
        found["activations and gathered copies"] = max(0.0, held.allocated - sum(found.values()))
        predicted["fragmentation"] = inside * device.fragmentation
        found["fragmentation"] = max(0.0, held.reserved - held.allocated)
    predicted["outside of torch"] = outside
    found["outside of torch"] = held.others
    item = max(predicted, key=lambda name: found[name] - predicted[name])
    account = ", ".join(f"{name} {found[name] / GIB:.2f} ({predicted[name] / GIB:.2f})" for name in predicted)
    advice = {
        "parameters": "shard them over more ranks: plan again with more GPUs, or --pin data_shard=...",
        "gradients": "shard them over more ranks: plan again with more GPUs, --pin data_shard=... or more stages",
        "optimizer": f"the plan is for {training.optimizer}: give that optimizer, one with less state, or plan again",
        "activations and gathered copies": "plan again with --pin recompute=full, a smaller --pin micro_batch=..., or "
        "a larger --memory-margin",
        "fragmentation": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan again with a larger "
        "--memory-margin",
        "outside of torch": "another process or library uses this GPU: end it, or plan again with a larger "
        "--memory-margin",
    }[item]
    beyond = (found[item] - predicted[item]) / GIB
    return (
        f"out of memory {_seat(plan, rank)} on a device of {held.total / GIB:.2f} GiB: {item} exceed what was "
        f"predicted by {beyond:.2f} GiB; found (predicted) in GiB: {account}. {advice[0].upper()}{advice[1:]}"
    )


def check_devices(plan: Plan, device: torch.device) -> None:
    """Raise ValueError, before anything is sent, if this host's GPUs cannot be those of the plan."""
    if device.type != "cuda":
        return
    here = torch.cuda.device_count()
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if wanted > here:
        raise ValueError(
            f"{wanted} ranks were started on this host, which has {here} GPU{'s' if here != 1 else ''}: start it with "
            f"--nproc-per-node {here}, or make a plan with --gpus-per-node {here}"
        )
    if plan.prediction is None:
        return
    needed = plan.prediction.stage_memory_bytes
    unequal = len(plan.cluster.kinds) > 1  # which of them this one is shows when hosts are matched
    _check_memory(plan, device, needed.index(min(needed) if unequal else max(needed)), unequal)


def check_own_device(mesh: RankMesh) -> None:
    """Raise ValueError if this rank's GPU holds less than its stage of a plan for unequal devices needs."""
    if mesh.device.type == "cuda" and mesh.plan.prediction is not None and len(mesh.plan.cluster.kinds) > 1:
        _check_memory(mesh.plan, mesh.device, mesh.coordinates["pipeline"], unequal=True)


def _check_memory(plan: Plan, device: torch.device, position: int, unequal: bool) -> None:
    assert plan.prediction is not None
    found = torch.cuda.get_device_properties(device).total_memory
    needed = plan.prediction.stage_memory_bytes[position]
    if needed > found:
        planned = plan.cluster.device_of(position * plan.stride("pipeline")) if unequal else plan.cluster.device
        where = f"stage {position}" if unequal else "its fullest stage"
        way = "start hosts in the order of the cluster file" if unequal else "make a plan for it with --device"
        raise ValueError(
            f"the plan is for a {planned.name} and needs {needed / GIB:.1f} GiB on {where}; the "
            f"{torch.cuda.get_device_name(device)} here has {found / GIB:.1f} GiB: {way}"
        )


def watched(mesh: RankMesh, hang_s: float) -> Watch | None:
    """The watch of this rank; None where a job is one process, or was not begun by a launcher."""
    if mesh.device_mesh is None or "MASTER_ADDR" not in os.environ:
        return None
    return Watch(dist.get_rank(), dist.get_world_size(), hang_s)
