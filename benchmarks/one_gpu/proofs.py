"""What one GPU can prove of the executor by itself, in a list; without one what can be tried on the CPU.

    python -m benchmarks.one_gpu.proofs              # needs a GPU; minutes
    python -m benchmarks.one_gpu.proofs --cpu        # the parts that need none; the others are named

Kernels and memory of a rank beside predictions, pipelines of one rank included, are in `python -m benchmarks.one_gpu`.
"""

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.faults import runs
from meshwright.executor import Trainer, parallelize
from meshwright.executor.parallel.attention_kernels import attention_backward, attention_forward
from meshwright.planner.plan.document import Plan

RESULTS = Path(__file__).with_name("results")
JOB = runs.JOBS["gpt"]
STEPS = 4
NEEDS_GPU = "needs a GPU"

_LONG = 131_072
_BY_SHARE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative difference that a type explains."""


class FailedError(AssertionError):
    """A proof did not hold."""


def _trainer(device: str, plan: Plan | None = None, compile: bool | str = False, check_every: int = 1) -> Trainer:
    return parallelize(
        JOB.model,
        plan or JOB.plan("one"),
        runs.optimizer,
        loss=runs.loss,
        seed=runs.SEED,
        device=device,
        compile=compile,
        check_every=check_every,
    )


def _losses(device: str, compile: bool | str = False) -> list[float]:
    trainer = _trainer(device, compile=compile)
    return [trainer.step(share).loss for share in trainer.loader(runs.samples(STEPS * runs.GLOBAL_BATCH))]


def _expect(found: float, most: float, what: str) -> str:
    if not found <= most:
        raise FailedError(f"{what} {found:.1e}, allowed {most:g}")
    return f"{what} {found:.1e}"


def numbers(device: str) -> str:
    """Losses of some steps are those of the CPU."""
    if device == "cpu":
        return NEEDS_GPU
    torch.backends.cuda.matmul.allow_tf32 = False
    gap = max(abs(a / b - 1) for a, b in zip(_losses(device), _losses("cpu"), strict=True))
    return _expect(gap, runs.LOSS, "relative difference of a loss from the CPU's")


def compiled(device: str) -> str:
    """Compiled layers give the losses of eager ones."""
    backend: bool | str = True if device == "cuda" else "aot_eager"
    gap = max(abs(a / b - 1) for a, b in zip(_losses(device, backend), _losses(device), strict=True))
    return _expect(gap, runs.LOSS, f"relative difference of a loss ({backend if device == 'cpu' else 'inductor'})")


def launch_queue(device: str) -> str:
    """Torch's own watch over synchronising calls sees none in a step."""
    if device == "cpu":
        return NEEDS_GPU
    trainer = _trainer(device, check_every=100)
    shares = [
        tuple(tensor.to(device) for tensor in share)
        for share in trainer.loader(runs.samples(STEPS * runs.GLOBAL_BATCH))
    ]
    for share in shares[:2]:
        trainer.step(share)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for share in shares[2:]:
            trainer.step(share)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"none in {len(shares) - 2} steps"


def steady_memory(device: str) -> str:
    """Later steps take no memory from the driver."""
    if device == "cpu":
        return NEEDS_GPU
    trainer = _trainer(device)
    counts = []
    for share in trainer.loader(runs.samples(3 * STEPS * runs.GLOBAL_BATCH)):
        trainer.step(share)
        counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    if counts[-1] != counts[STEPS]:
        raise FailedError(f"{counts[-1] - counts[STEPS]} allocations behind step {STEPS}")
    return f"no cudaMalloc behind step {STEPS}"


def pinned_batches(device: str) -> str:
    """The loader's batches are in pinned memory, from which copies run beside kernels."""
    if device == "cpu":
        return NEEDS_GPU
    trainer = _trainer(device)
    share = next(iter(trainer.loader(runs.samples(runs.GLOBAL_BATCH))))
    if not all(tensor.is_pinned() for tensor in share):
        raise FailedError("a batch is not pinned")
    return "all pinned"


def save_beside_steps(device: str) -> str:
    """What save(wait=False) writes are the numbers of its step, though training goes on meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(device)
        shares = list(trainer.loader(runs.samples(STEPS * runs.GLOBAL_BATCH)))
        trainer.step(shares[0])
        expected = trainer.full_state_dict()
        started = time.perf_counter()
        trainer.save(folder, wait=False)
        seconds = time.perf_counter() - started
        for share in shares[1:]:
            trainer.step(share)
        trainer.close()
        other = _trainer(device)
        other.resume(folder)
        found = other.full_state_dict()
        other.close()
    if any(not torch.equal(found[name], tensor) for name, tensor in expected.items()):
        raise FailedError("weights of a later step were written")
    return f"the weights of its step; the loop stood still for {1e3 * seconds:.1f} ms"


def attention(device: str) -> str:
    """Attention in parts against plain products in fp64, short."""
    worst = ""
    for dtype in (torch.float32, torch.bfloat16):
        for form in ("causal", "all", "mask"):
            gap = _attention_gap(device, dtype, form)
            worst = _expect(gap, _BY_SHARE[dtype], f"relative difference of an output or gradient ({dtype}, {form})")
    return worst


def _attention_gap(device: str, dtype: torch.dtype, form: str) -> float:
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, 4, 256, 64, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(2, 1, 256, 256) > 0.3 if form == "mask" else None
    leaves = [x.to(dtype).double().requires_grad_() for x in (query, key, value)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) / 8
    hidden = torch.ones(256, 256, dtype=torch.bool).triu(1) if form == "causal" else None
    hidden = ~mask if mask is not None else hidden
    expected = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1) @ leaves[2]
    expected.backward(grad.to(dtype).double())
    given = [x.detach().to(device, dtype) for x in (query, key, value, grad)]
    own_mask = None if mask is None else mask.to(device)
    output, lse = attention_forward(*given[:3], own_mask, form == "causal", 1 / 8)
    found = [output, *attention_backward(given[3], *given[:3], output, lse, own_mask, form == "causal", 1 / 8)]
    wanted = [expected.detach(), *(leaf.grad for leaf in leaves)]
    return max(float((a.cpu().double() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))  # type: ignore[union-attr, operator]


def offload(device: str) -> str:
    """With activations of its blocks and the optimizer in the host's memory a job gives the same losses; on a GPU at a
    lower peak."""
    plan = JOB.plan("one")
    stages = [
        stage.model_copy(
            update={
                "layers": tuple(
                    layer.model_copy(update={"offload": layer.modules == (layer.root,)}) for layer in stage.layers
                )
            }
        )
        for stage in plan.stages
    ]
    away = plan.model_copy(update={"offload_optimizer": True, "stages": tuple(stages)})
    losses, peaks = [], []
    for each in (plan, away):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer = _trainer(device, each)
        losses.append([trainer.step(s).loss for s in trainer.loader(runs.samples(STEPS * runs.GLOBAL_BATCH))])
        peaks.append(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
        del trainer
    gap = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    told = _expect(gap, runs.LOSS, "relative difference of a loss")
    if device == "cpu":
        return told
    return f"{told}; {_expect(peaks[1] / peaks[0], 1.0, 'share of the peak of memory')}"


def fp8(device: str) -> str:
    """Linear layers in fp8 give losses near those of bf16."""
    if device == "cpu":
        return NEEDS_GPU
    losses = []
    for precision in ("bf16", "fp8"):
        plan = JOB.plan("one")
        plan = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": precision})})
        trainer = _trainer(device, plan)
        losses.append([trainer.step(s).loss for s in trainer.loader(runs.samples(STEPS * runs.GLOBAL_BATCH))])
    return _expect(max(abs(a / b - 1) for a, b in zip(*losses, strict=True)), 0.05, "relative difference of a loss")


def long_attention(device: str) -> str:
    """Attention over 131,072 tokens in bf16 and, with a mask of keys, without a fused kernel: peak of memory."""
    if device == "cpu":
        return NEEDS_GPU
    told = []
    for words, mask in (("causal", None), ("mask", torch.ones(1, 1, 1, _LONG, dtype=torch.bool, device=device))):
        given = [torch.randn(1, 1, _LONG, 64, dtype=torch.bfloat16, device=device) for _ in range(4)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output, lse = attention_forward(*given[:3], mask, mask is None, 1 / 8)
        attention_backward(given[3], *given[:3], output, lse, mask, mask is None, 1 / 8)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        told.append(_expect(peak, 4.0, f"{words}: GiB at most"))
    return "; ".join(told)


PROOFS: dict[str, Callable[[str], str]] = {
    "losses equal to the CPU's": numbers,
    "compiled layers": compiled,
    "no synchronising call in a step": launch_queue,
    "no allocation in the steady state": steady_memory,
    "pinned batches": pinned_batches,
    "save beside the next steps": save_beside_steps,
    "attention kernels": attention,
    "attention over 131,072 tokens": long_attention,
    "offload of activations and of the optimizer": offload,
    "fp8 linear layers": fp8,
}


def main() -> int:
    """Run the list; 1 if a proof does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --cpu tries what needs none")
    lines, failed = [], False
    for name, prove in PROOFS.items():
        try:
            found = prove(device)
        except (FailedError, RuntimeError) as error:
            failed, found = True, f"FAILED: {str(error).splitlines()[0]}"
        lines.append(f"| {name} | {found} |")
        print(f"{name}: {found}", flush=True)
    where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    words = "python -m benchmarks.one_gpu.proofs" + " --cpu" * (device == "cpu")
    head = f"`{words}`, {date}, {where}, torch {torch.__version__}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join([head, "", "| proof | found |", "|---|---|", *lines]) + "\n"
    (arguments.output / f"proofs-{device}.md").write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
