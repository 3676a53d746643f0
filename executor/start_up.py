"""From a model and a plan to the trainer of this rank: what is checked, connected and built before the first step."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from ..planner.plan.document import Plan, load_plan
from ..planner.plan.not_run import not_run, refusal
from ..profiler.model.building import in_training
from .agreement import check_numbers
from .apply import apply_plan, build_on_meta, plain
from .faults import check_devices, check_own_device, tell_batch_norms, tell_own_dropout, tell_own_generators
from .parallel.checked_loss import CheckedLoss
from .parallel.compiled import backend_of
from .parallel.float8 import check_float8
from .parallel.mesh import check_world_size, connect
from .parallel.micro_batches import Loss
from .parallel.optimizers import MakeOptimizer, keep_attributes
from .parallel.random_numbers import RandomNumbers
from .state.initialise import empty_values
from .state.run_state import ModelState
from .state.weights import Loading, Weights, refuse_no_weights, refuse_whole_weights
from .torch_compat import accelerator
from .trainer import Trainer
from .watch import GRACE_S, HANG_S, LONGER, watched


@runtime_checkable
class OfPlan(Protocol):
    """What holds a plan document, as the answer of `meshwright.plan` does."""

    @property
    def document(self) -> Plan:
        """The plan."""


def parallelize(
    model_fn: Callable[[], nn.Module],
    plan: Plan | OfPlan | str | Path,
    optimizer: MakeOptimizer,
    loss: Loss | None = None,
    weight: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    weights: Weights | str | Path | None = None,
    telemetry: str | Path | None = None,
    timeout_s: float = HANG_S,
    compile: bool | str | None = None,
    whole_matrices: bool | None = None,
    check_every: int = 1,
) -> Trainer:
    """A trainer that runs this process as one rank of the plan.

    model_fn: builds the model; called on the meta device and on the CPU.
    plan: a plan, its file, or what meshwright.plan and meshwright.load give.
    optimizer: called with this rank's shards of the parameters, or, if its argument is called `named`, with pairs
        (name in the model, parameter); returns an optimizer, or a list of several. What is written on parameters
        (`p.no_decay = True`) is kept. In a pipeline every rank has the parameter groups that one process makes, empty
        where it has nothing of them; it is called once more for that, with all parameters on the meta device.
    loss: mean loss of (output, micro-batch); None if the model returns its own.
    weight: how much a micro-batch counts in the mean loss (its valid tokens, say); None: by samples.
    seed: of the initial values, which are those of `torch.manual_seed(seed); model_fn()` on one CPU under every plan,
        and of what is drawn in steps (dropout), which depends on the sample and not on the plan.
    max_grad_norm: clip the total gradient norm to this.
    device: default is this rank's GPU, or the CPU without one.
    weights: where the parameters are read from instead of their initial values: safetensors as Hugging Face stores
        them, or a checkpoint of any plan. Each rank reads only its shards.
    telemetry: file to which the first rank appends a line of JSON per step; `plan report PLAN --run FILE` reads it.
    timeout_s: a step that takes longer is taken for a hang, and ends the job with a message that names the rank;
        start-up, save and resume may take three times as long.
    compile: every layer by torch.compile, or by the compiler of this name; None: if the plan's software has it
        (`plan ... --software fsdp2-compile`).
    whole_matrices: whether the optimizer must see whole matrices (Muon, Adafactor, LAMB), which are then gathered
        for it one by one, and stepped by one rank each; None: it is tried whether a step is done element by element.
    check_every: how many steps may be under way on a GPU before it is looked whether their losses and gradients are
        numbers; only then, and where metrics are read, does a step wait for the device.

    Runs under torchrun, or without any launcher if the plan is for one device. Raises ValueError, before ranks wait for
    each other, if the job has not as many ranks as the plan, the model is not the one that was planned, or the
    executor does not run all of the plan.
    """
    if isinstance(plan, OfPlan):
        plan = plan.document
    plan = plan if isinstance(plan, Plan) else load_plan(Path(plan))
    if priced_only := not_run(plan):
        raise ValueError(refusal(plan, priced_only))
    check_numbers(max_grad_norm, check_every, timeout_s, seed)
    check_world_size(plan)
    backend = backend_of(compile, plan)
    settings = {
        "seed": seed,
        "max_grad_norm": max_grad_norm,
        "check_every": check_every,
        "whole_matrices": whole_matrices,
        "compile": backend,
        **{
            name: "something" if given is not None else None
            for name, given in (("loss", loss), ("weight", weight), ("weights", weights), ("telemetry", telemetry))
        },
    }
    was_running = dist.is_initialized()
    watch = watched(plan, timeout_s)
    with nullcontext() if watch is None else watch.task("in its start-up", "after its start-up"):
        model_fn = plain(model_fn)
        whole = build_on_meta(model_fn, plan)
        loading, values = None, None
        if weights is not None:
            weights = weights if isinstance(weights, Weights) else Weights(weights)
            loading = Loading(weights, whole, plan.model.ties)
            values = empty_values(model_fn, whole, loading.parameters, seed)
        where = torch.device(device) if device is not None else accelerator()
        check_devices(plan, where)
        if plan.training.precision == "fp8":
            check_float8(where)
        mesh = connect(plan, device, timeout_s * LONGER + GRACE_S, settings)
        if watch is not None:
            watch.see_exceptions()
        check_own_device(mesh)
        tell_batch_norms(in_training(whole), plan, mesh.rank)
        tell_own_dropout(whole, plan, mesh.rank)
        tell_own_generators(whole, plan, mesh.rank)
        drawn = RandomNumbers(whole, plan, mesh, seed)
        if loss is not None:
            parts = plan.num_microbatches * plan.degrees.data
            whole_outputs = plan.degrees.tensor * plan.degrees.context == 1
            loss = CheckedLoss(loss, plan.micro_batch, parts if whole_outputs else 0, mesh.data_rank == 0)
        model = apply_plan(whole, model_fn, plan, mesh, loss, seed, values, backend)
        if loading is not None:
            loading.fill(ModelState(model, plan, mesh).model_boxes())
        for name, parameter in model.parameters.items():
            keep_attributes(parameter, vars(model.of_model[name]))
        if plan.degrees.num_devices > 1:
            refuse_no_weights(model.module)
        if plan.degrees.pipeline > 1 or model.is_divided:
            refuse_whole_weights(model.module)
        return Trainer(
            model,
            plan,
            mesh,
            optimizer,
            loss,
            weight,
            max_grad_norm,
            owns_process_group=not was_running,
            random_numbers=drawn,
            whole_matrices=whole_matrices,
            watch=watch,
            check_every=check_every,
            telemetry=None if telemetry is None else Path(telemetry),
        )
