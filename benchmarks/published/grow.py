"""Profile of a deep model from that of a shallow one: equal blocks are traced once, and repeated in the document."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

from meshwright.profiler.model.model_profile import Costs, CrossingTensor, LayerProfile, ModelProfile, OpProfile
from meshwright.profiler.model.trace import trace

from .models import Sizes, loaded

TRACED_BLOCKS = 4
"""Equal blocks that are traced: the first, the last, and two between, of which the first is repeated."""

_BLOCK = re.compile(r"^blocks\.(\d+)(?=\.|$)")


def profile_of(name: str, sizes: Sizes, cuts: bool = True) -> ModelProfile:
    """Profile of the model, as tracing all of its blocks and `without_padding` give it, but for its fingerprint (tests
    compare the two). cuts: as of `trace`."""
    if sizes.pattern:
        return trace(loaded(name, sizes), cuts=cuts)
    return without_padding(_grown_profile(name, sizes, cuts), sizes)


def without_padding(profile: ModelProfile, sizes: Sizes) -> ModelProfile:
    """The profile with values of heads as wide as they are; torch's attention, which is traced, wants them as wide as
    keys, which of latent attention are wider."""
    if not sizes.latent:
        return profile
    share = (1.0 + sizes.head_width / (sizes.head_width + sizes.latent.rotary_width)) / 2.0

    def narrower(op: OpProfile) -> OpProfile:
        if op.kind != "attention" or op.shape is None:
            return op
        rows, inner, columns = op.shape
        flops, inner = (tuple(share * value for value in amount) for amount in (op.flops, inner))
        return op.model_copy(update={"flops": flops, "shape": (rows, inner, columns)})

    def fewer(costs: Costs | None) -> Costs | None:
        return costs and costs.model_copy(update={"operators": tuple(narrower(op) for op in costs.operators)})

    classes = tuple(
        layer_class.model_copy(
            update={
                **{mode: fewer(getattr(layer_class, mode)) for mode in ("whole", "tensor", "sequence")},
                **{
                    several: tuple(fewer(costs) for costs in getattr(layer_class, several))
                    for several in ("tensor_alone", "sequence_without")
                },
            }
        )
        for layer_class in profile.classes
    )
    return profile.model_copy(update={"classes": classes})


def _grown_profile(name: str, sizes: Sizes, cuts: bool) -> ModelProfile:
    dense = sizes.mixture.dense_layers if sizes.mixture else 0
    fewer = min(sizes.num_layers, dense + TRACED_BLOCKS)
    shallow = _shallow(replace(sizes, num_layers=fewer), cuts).model_copy(update={"name": name})
    return _grown(shallow, dense + 1, sizes.num_layers - fewer)


@cache
def _shallow(sizes: Sizes, cuts: bool) -> ModelProfile:
    """Profile that models of the same sizes, but for their depth, are grown from."""
    return trace(loaded("model", sizes), cuts=cuts)


def _grown(profile: ModelProfile, block: int, extra: int) -> ModelProfile:
    """The profile with `extra` copies of a block after it."""
    if extra == 0:
        return profile
    at = next(i for i, layer in enumerate(profile.layers) if layer.root == f"blocks.{block}")

    def moved(value: Any, by: int, behind: int) -> Any:
        """A record with blocks numbered and layers counted `by` higher where they lie after layer `behind`."""
        if isinstance(value, str):
            found = _BLOCK.match(value)
            if found is None or int(found.group(1)) <= block + behind - at:
                return value
            return f"blocks.{int(found.group(1)) + by}{value[found.end() :]}"
        if isinstance(value, dict):
            return {
                key: [item + by * (item > behind) for item in held]
                if key in _LAYERS and isinstance(held, list | tuple)
                else held + by * (held > behind)
                if key in _LAYERS and isinstance(held, int)
                else moved(held, by, behind)
                for key, held in value.items()
            }
        if isinstance(value, list | tuple):
            return [moved(item, by, behind) for item in value]
        return value

    layers = [layer.model_dump() for layer in profile.layers]
    tensors = [tensor.model_dump() for tensor in profile.tensors]
    carried = [tensor for tensor in tensors if tensor["made_by"] == at]
    all_layers = [
        *layers[: at + 1],
        *(moved(layers[at], copy, at - 1) for copy in range(1, extra + 1)),
        *(moved(layer, extra, at) for layer in layers[at + 1 :]),
    ]
    all_tensors = [
        *(moved(tensor, extra, at) for tensor in tensors if tensor["made_by"] < at),
        *(moved(tensor, copy, at - 1) for copy in range(extra + 1) for tensor in carried),
        *(moved(tensor, extra, at) for tensor in tensors if tensor["made_by"] > at),
    ]
    names = profile.attention_modules
    inside = [name for name in names if name.startswith(f"blocks.{block}.")]
    before = [name for name in names if name not in inside and moved(name, 1, at) == name]
    after = [name for name in names if name not in inside and name not in before]
    return profile.model_copy(
        update={
            "layers": tuple(LayerProfile.model_validate(layer) for layer in all_layers),
            "tensors": tuple(CrossingTensor.model_validate(tensor) for tensor in all_tensors),
            "attention_modules": (
                *before,
                *(moved(name, copy, at - 1) for copy in range(extra + 1) for name in inside),
                *(moved(name, extra, at) for name in after),
            ),
            "fingerprint": f"{profile.fingerprint}+{extra}",
        }
    )


_LAYERS = ("made_by", "last_used_by", "used_by", "given_to", "saved_by", "saved_in_fp32_by")
"""Fields of a crossing tensor that count layers."""
