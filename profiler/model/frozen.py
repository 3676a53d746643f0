"""Frozen parameters that are not kept as all others are: in 16 bits, or in 4 as QLoRA keeps those of its base.

What is trained is in fp32 between steps; what is frozen may stay in the 16 bits that it was loaded in. NF4 (Dettmers et
al. 2023, arXiv:2305.14314) is 4 bits with a scale in fp32 for each block of 64, as bitsandbytes has them unless it is
asked to pack the scales, too. Such a weight is made whole in the compute dtype right before each product that reads it,
in forward and backward, and let go of after it.
"""

from typing import TYPE_CHECKING

from .model_profile import Bytes, Costs, KeptAs, LayerClass, ModelProfile, OpPart, OpProfile, ParameterProfile

if TYPE_CHECKING:
    from torch import nn

_MARK = "_weight_kept_as"

_OWN: dict[str, KeptAs] = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}

DEQUANTIZE = "dequantize_nf4"
"""The operator that makes a weight whole again."""


def pack(module: "nn.Module", layers: "list[nn.Module]") -> None:
    """Mark the weights of these layers of a module as kept in 4 bits, those of them that are frozen."""
    for each in module.modules():
        if any(each is layer for layer in layers) and not each.weight.requires_grad:
            setattr(each, _MARK, "nf4")


def kept_as(module: "nn.Module") -> dict[str, KeptAs]:
    """Full name of a frozen parameter -> how it is kept, for those that are not in fp32."""
    found: dict[str, KeptAs] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for own, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            marked: KeptAs = getattr(owner, _MARK, "") if own == "weight" else ""
            how = marked or _OWN.get(str(parameter.dtype), "")
            if how and not parameter.requires_grad:
                found[f"{prefix}.{own}".lstrip(".")] = how
    return found


def in_bf16(profile: ModelProfile) -> ModelProfile:
    """The profile, with every frozen parameter kept in bf16 that had no way of its own to be kept."""
    classes = [
        each.model_copy(
            update={
                "parameters": tuple(
                    one if one.trainable or one.kept_as else one.model_copy(update={"kept_as": "bf16"})
                    for one in each.parameters
                )
            }
        )
        for each in profile.classes
    ]
    return profile.model_copy(update={"classes": tuple(classes)})


def unpacked(layer_class: LayerClass) -> LayerClass:
    """The class of layers, with the cost of making weights in 4 bits whole: a kernel for each in forward and backward,
    and room for the largest of them at every peak."""
    weights = [parameter for parameter in layer_class.parameters if parameter.kept_as == "nf4"]
    if not weights:
        return layer_class
    largest = float(max(weight.num_elements for weight in weights))
    parts = [part.name for part in layer_class.parts]
    passes: tuple[OpPart, ...] = ("forward", "backward_input")
    made = [_made_whole(weight, part, parts) for part in passes for weight in weights]
    whole = layer_class.whole
    return layer_class.model_copy(update={"whole": _with_room(whole, largest, (*whole.operators, *made))})


def _made_whole(weight: ParameterProfile, part: OpPart, parts: list[str]) -> OpProfile:
    """The kernel that makes a weight whole right before a product. It counts as a matmul: recompute that keeps the
    results of products does not repeat it either."""
    module, size = weight.name.rpartition(".")[0], float(weight.num_elements)
    within = next((name for name in parts if f"{module}.".startswith(f"{name}.")), "")
    return OpProfile(
        name=DEQUANTIZE,
        module=module,
        kind="matmul",
        part=part,
        moved=Bytes(elements=(size, 0.0, 0.0, 0.0), other_bytes=(weight.bytes_kept * size, 0.0, 0.0, 0.0)),
        within=within if part == "forward" else "",
    )


def _with_room(costs: Costs, elements: float, operators: tuple[OpProfile, ...]) -> Costs:
    """The costs, with `elements` more of the compute dtype at every peak."""

    def more(size: Bytes) -> Bytes:
        fixed, *rest = size.elements
        return size.model_copy(update={"elements": (fixed + elements, *rest)})

    return costs.model_copy(
        update={
            "operators": operators,
            "forward_transient": more(costs.forward_transient),
            "backward_transient": more(costs.backward_transient),
            "part_peaks": tuple(map(more, costs.part_peaks)),
        }
    )
