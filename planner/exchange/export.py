"""A Plan as settings of other training frameworks: Megatron-LM, torchtitan, Accelerate (FSDP2) and DeepSpeed.

What a target's settings cannot express is never left out silently. The export is refused if the target would need more
memory than the plan, or would train other layers on other ranks. It is left out, with one of `Export.notes` on it, if
the target only takes a different time, or if it has to be done in code. Versions: targets.py.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...profiler.machine.units import format_seconds
from ...profiler.model.source import LORA
from ..plan.document import Plan, parts_in_words, parts_of
from ..plan.frameworks import FRAMEWORKS
from .accelerate import accelerate_settings
from .deepspeed import deepspeed_settings
from .export_notes import OtherTargetError, Settings
from .megatron import megatron_words
from .targets import NAMES, TARGETS, VERSIONS, Target
from .torchtitan import torchtitan_words

EXPORTED = "from a Meshwright plan"
"""Words that stand in the first line of every exported file."""


@dataclass(frozen=True)
class Export:
    """Settings for a target. `words`: its command-line arguments; `document`: the content of its file; one of the two
    is empty. `notes`: one sentence for each feature of the plan that the settings do not express."""

    target: Target
    words: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text: str = ""
    """Content of the file: the settings, after a header with versions, plan and notes."""

    def __str__(self) -> str:
        return self.text


def export(plan: Plan, target: str) -> Export:
    """The plan as settings of a target from TARGETS. Raises ValueError, with a way out, for what the target cannot
    do."""
    if target not in TARGETS:
        raise ValueError(f"cannot export to {target!r}: choose {', '.join(TARGETS)}")
    chosen: Target = next(name for name in TARGETS if name == target)
    try:
        return _exported(plan, chosen)
    except OtherTargetError as refused:
        takers = [other for other in refused.others if _takes(plan, other)]
        ways = [f"export to {' or '.join(takers)}", refused.instead] if takers else [refused.instead]
        raise ValueError(f"{refused.found}; {', or '.join(ways)}") from None


def _takes(plan: Plan, target: Target) -> bool:
    """Whether a target's settings can express a plan."""
    try:
        _exported(plan, target)
    except ValueError:
        return False
    return True


def _exported(plan: Plan, chosen: Target) -> Export:
    _refuse_everywhere(plan, chosen)
    notes = _adapters_notes(plan)
    if chosen == "megatron":
        words = megatron_words(plan, notes)
        text = _command_line(plan, chosen, words, notes, 'pretrain_gpt.py "${MEGATRON_ARGS[@]}"')
    elif chosen == "torchtitan":
        words = torchtitan_words(plan, notes)
        text = _command_line(
            plan, chosen, words, notes, '-m torchtitan.train --module NAME --config NAME "${TORCHTITAN_ARGS[@]}"'
        )
    elif chosen == "accelerate":
        document = accelerate_settings(plan, notes)
        return Export(chosen, (), document, tuple(notes), _comment(_header(plan, chosen, notes)) + _yaml(document))
    else:
        document = deepspeed_settings(plan, notes)
        text = json.dumps({"_comment": _header(plan, chosen, notes), **document}, indent=2) + "\n"
        return Export(chosen, (), document, tuple(notes), text)
    return Export(chosen, tuple(words), {}, tuple(notes), text)


def _refuse_everywhere(plan: Plan, target: Target) -> None:
    name = NAMES[target]
    of_parts = [layer.recompute for layer in plan.layers if parts_of(layer.recompute)]
    if of_parts and target != "megatron":
        raise ValueError(
            f"{len(of_parts)} layers recompute parts of themselves ({parts_in_words(of_parts[0])}), which no option of "
            f"{name} says: plan with --pin recompute=full"
        )
    offloaded = sum(layer.offload for layer in plan.layers)
    if offloaded:
        raise ValueError(
            f"{offloaded} layers keep their activations on the host, which no flag of {name} says layer by layer: "
            "plan without offload, for example --pin recompute=full"
        )
    if plan.model.packed and not FRAMEWORKS[target].packs:
        found = f"{name} keeps no frozen weights in 4 bits"
        raise OtherTargetError(found, ("accelerate", "deepspeed"), "plan with --lora ...,base=bf16")
    if plan.model.without_dims and plan.degrees.sharded_over > 1 and target in ("torchtitan", "accelerate"):
        raise ValueError(
            f"{plan.model.without_dims} has no dims, and {name} gives it to fully_shard as it is, which takes none: "
            f"make it a tensor of one element, or plan --for {target}"
        )
    if plan.offload_optimizer and not FRAMEWORKS[target].offloads_optimizer:
        found = f"the optimizer runs on the host; {name} moves parameters and gradients there, too"
        raise OtherTargetError(found, ("megatron", "deepspeed"), "plan without offload")


def _adapters_notes(plan: Plan) -> list[str]:
    """Notes on what the model must be: it has adapters, or a base in 4 bits. Such a base is stored in elements of the
    compute dtype, which can be sharded (bitsandbytes' documentation, FSDP-QLoRA)."""
    adapters, notes = plan.model.source.partition(LORA)[2], []
    if adapters:
        notes = [f"the adapters ({adapters}), which the model must have: with all of it trained it needs more memory"]
    if plan.model.packed:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(plan.training.precision, "float32")
        notes.append(
            "the base in 4 bits, which the script loads with quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
            f"bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.{dtype}, bnb_4bit_quant_storage=torch.{dtype})"
        )
    return notes


def _header(plan: Plan, target: Target, notes: list[str]) -> list[str]:
    """Lines that say what the file is, for which plan, and every note."""
    device, found = plan.cluster.device.name, plan.prediction
    step = "" if found is None else f"; predicted {format_seconds(found.step_time_s)} a step, {plan.training.software}"
    return [
        f"{plan.model.name} on {plan.degrees.num_devices} x {device}, {EXPORTED}: {plan.label}, "
        f"micro-batch {plan.micro_batch} x {plan.num_microbatches}{step}",
        f"Options as of {VERSIONS[target]}. They say the layout; model, data and learning rate are yours.",
        *(f"Not said here: {note}" for note in notes),
    ]


def _comment(lines: list[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _command_line(plan: Plan, target: Target, words: list[str], notes: list[str], program: str) -> str:
    """Text of a shell file that sets an array of arguments."""
    machines, each = plan.cluster.num_machines, plan.cluster.devices_per_machine
    lines: list[str] = []
    for word in words:
        if word.startswith(("--", "activation_checkpoint:")):
            lines.append(f"    {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    launch = f"# torchrun --nnodes {machines} --nproc-per-node {each} {program}\n"
    return _comment(_header(plan, target, notes)) + launch + f"{target.upper()}_ARGS=(\n" + "\n".join(lines) + "\n)\n"


def _yaml(document: Settings) -> str:
    """Text of a YAML file, from a mapping of scalars and of mappings of scalars."""
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {_scalar(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    """A value as JSON, which is YAML, too; the quotes protect words like "no", which YAML would not read as text."""
    return json.dumps(value)
