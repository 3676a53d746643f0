"""The tensors that cross between layers, and those of a batch, as the profile describes them."""

from collections import defaultdict

import torch

from ..running.fake import FakeModel
from ..running.meters import Size
from .batches import named_tensors, with_counting
from .chain import Crossing, LayerChain
from .fitted_costs import fit_bytes
from .layer_run import Observation
from .model_profile import BatchTensor, CrossingTensor, Producer
from .run_sizes import RunSizes, dims_of, other_length


def crossing_tensors(
    fake: FakeModel, chain: LayerChain, sizes: RunSizes, seen: dict[int, Observation]
) -> tuple[CrossingTensor, ...]:
    """The tensors that cross between layers, in the order in which they are made. seen: first layer of a class -> what
    its run showed; other layers of the class are taken to save the tensors at the same places in their order."""
    saved_by: dict[Producer, list[int]] = defaultdict(list)
    saved_in_fp32_by: dict[Producer, list[int]] = defaultdict(list)
    given_to: dict[Producer, list[int]] = defaultdict(list)
    for i, first in enumerate(chain.representatives()):
        arriving = [crossing.producer for crossing in chain.arriving(i)]
        leaving = [crossing.producer for crossing in chain.leaving(i)]
        for producer, is_given in zip(arriving, seen[first].given_arriving, strict=True):
            if is_given:
                given_to[producer].append(i)
        saves = [*seen[first].saves_leaving, *seen[first].saves_arriving]
        for producer, is_saved, in_fp32 in zip([*leaving, *arriving], saves, seen[first].saves_in_fp32, strict=True):
            if is_saved:
                saved_by[producer].append(i)
            if in_fp32:
                saved_in_fp32_by[producer].append(i)
    first_with: dict[int, int] = {}
    tensors = []
    for i, crossing in enumerate(chain.crossings):
        same = first_with.setdefault(crossing.storage, i)
        tensor = _crossing_tensor(fake, sizes, crossing)
        given = given_to[crossing.producer]
        savers, in_fp32_by = saved_by[crossing.producer], saved_in_fp32_by[crossing.producer]
        found = {
            "given_to": None if given == sorted(crossing.used_by) else tuple(given),
            "saved_by": tuple(savers),
            "saved_in_fp32_by": None if in_fp32_by == savers else tuple(in_fp32_by),
            "same_as": None if same == i else same,
        }
        tensors.append(tensor.model_copy(update=found))
    return tuple(tensors)


def _crossing_tensor(fake: FakeModel, sizes: RunSizes, crossing: Crossing) -> CrossingTensor:
    spec = sizes.one.tensors[crossing.producer]
    runs = [sizes.one, sizes.two]
    amounts = []
    for shapes in runs:
        seen = shapes.tensors[crossing.producer]
        elements = torch.Size(seen.shape).numel()
        amounts.append(Size(elements) if seen.dtype == fake.dtype else Size(0.0, float(elements * seen.dtype.itemsize)))
    return CrossingTensor(
        producer=crossing.producer,
        made_by=crossing.made_by,
        last_used_by=crossing.last_used_by,
        used_by=tuple(sorted(crossing.used_by)),
        shape=spec.shape,
        dims=sizes.dims(crossing),
        dtype=_dtype_name(spec.dtype, fake.dtype),
        requires_grad=crossing.spec.requires_grad,
        size=fit_bytes(amounts, 1, 1),
    )


def batch_tensors(fake: FakeModel, sizes: RunSizes) -> tuple[BatchTensor, ...]:
    """The tensors of a batch of one sample, with what each of their dims grows with."""
    one = named_tensors(fake.batch(1, sizes.seq_len))
    two = named_tensors(fake.batch(2, sizes.seq_len))
    other = other_length(sizes.seq_len)
    longer = None if other is None or not sizes.takes_other_lengths else named_tensors(fake.batch(1, other))
    tensors = []
    for name, tensor in one.items():
        dims = dims_of(tensor.shape, two[name].shape, None if longer is None else longer[name].shape)
        pairs = zip(tensor.shape, two[name].shape, dims, strict=True)
        tensors.append(
            BatchTensor(
                name=name,
                shape=tuple(tensor.shape),
                dims=dims,
                dtype=_dtype_name(tensor.dtype, fake.dtype),
                counts_rows=any(b != 2 * a for a, b, dim in pairs if dim == "batch"),  # bounds: one more than samples
            )
        )
    return with_counting(fake.loaded, tensors)


def _dtype_name(dtype: torch.dtype, compute: torch.dtype) -> str:
    return "compute" if dtype == compute else str(dtype).removeprefix("torch.")
