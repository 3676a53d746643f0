"""What a batch of a model is made of: where its samples lie, and what counts rows of all of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from .loaded import Batch, LoadedModel
from .model_profile import BatchTensor

_SIZES = (3, 8, 24)
"""Numbers of samples in the batches whose integers are compared: integers that count rows grow with all of them."""

_MOST_ELEMENTS = 50_000_000
"""Most numbers in a batch that is made only to look at its integers: 0.2 GB."""


def named_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Tensors of a batch by keyword, or by their position as a number; inside of others by both ("views.0")."""
    if isinstance(batch, torch.Tensor):
        return {"0": batch}
    found: dict[str, torch.Tensor] = {}
    items: Any = (
        batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    )
    for name, value in items:
        if isinstance(value, torch.Tensor):
            found[str(name)] = value
        else:
            found |= {f"{name}.{inner}": tensor for inner, tensor in named_tensors(value).items()}
    return found


def with_counting(loaded: LoadedModel, tensors: Sequence[BatchTensor]) -> tuple[BatchTensor, ...]:
    """The tensors of a batch, those marked whose numbers count rows of all samples: edges between the nodes of many
    graphs, offsets of bags. A part of a batch has other rows, so they cannot be cut."""
    counting = [t.name for t in tensors if t.dtype in ("int64", "int32") and "batch" in t.dims]
    elements = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
    if not counting or elements * _SIZES[-1] > _MOST_ELEMENTS:
        return tuple(tensors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batches = [named_tensors(loaded.batch(size)) for size in _SIZES]
    if any(batch.keys() != {tensor.name for tensor in tensors} for batch in batches):
        return tuple(tensors)
    rows = {(t.name, dim) for t in tensors for dim, kind in enumerate(t.dims) if kind == "batch"}
    marked = _counting(batches, counting, rows)
    return tuple(t.model_copy(update={"counts_rows": t.counts_rows or t.name in marked}) for t in tensors)


def counts_rows(loaded: LoadedModel, one: Batch, two: Batch) -> bool:
    """Whether some integers of a batch count rows of all its samples, by batches of one and of two samples: then the
    batch of two is not that of one given twice."""
    few, more = named_tensors(one), named_tensors(two)
    shapes = [
        (name, zip(x.shape, more[name].shape, strict=True)) for name, x in few.items() if x.dim() == more[name].dim()
    ]
    rows = {(name, dim) for name, dims in shapes for dim, (a, b) in enumerate(dims) if a != b}
    integers = {name for name, _ in rows if few[name].dtype in (torch.int64, torch.int32)}
    may = _counting([more], integers, rows)
    elements = sum(tensor.numel() for tensor in few.values())
    if not may or elements * _SIZES[-1] > _MOST_ELEMENTS:
        return False
    return bool(_counting([named_tensors(loaded.batch(size)) for size in _SIZES], may, rows))


def _counting(
    batches: Sequence[Mapping[str, torch.Tensor]], names: Collection[str], rows: Collection[tuple[str, int]]
) -> set[str]:
    """Those of these tensors whose numbers may count the rows of one and the same tensor and dim in every batch."""
    return {
        name
        for name in names
        if any(all(_counts(batch[name], batch[of].shape[dim]) for batch in batches) for of, dim in rows)
    }


def _counts(numbers: torch.Tensor, rows: int) -> bool:
    """Whether the numbers may count so many rows: none lies beyond the last row, and one at least in the second
    half."""
    largest = int(numbers.max()) + 1 if numbers.numel() else 0
    return rows / 2 <= largest <= rows


def list_of_samples(loaded: LoadedModel) -> str:
    """Why a batch cannot be cut where it holds a list with an entry for each sample (sentences, crops); '' if none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        place = _growing_list(loaded.batch(1), loaded.batch(2), "")
    return f"element {place} of a batch is a list with an entry for each sample, which is not cut" if place else ""


def _growing_list(one: Any, two: Any, place: str) -> str:
    if type(one) is not type(two) or not isinstance(one, list | tuple | dict):
        return ""
    if len(one) != len(two):
        return place if isinstance(one, list) else ""
    pairs = ((name, one[name], two.get(name)) for name in one) if isinstance(one, dict) else None
    inside = pairs or ((i, a, b) for i, (a, b) in enumerate(zip(one, two, strict=True)))
    return next((found for n, a, b in inside if (found := _growing_list(a, b, f"{place}.{n}".lstrip(".")))), "")


def batch_problem(tensors: Sequence[BatchTensor]) -> str:
    """Why a batch cannot be cut into micro-batches; '' if it can."""
    for tensor in tensors:
        if tensor.counts_rows:
            return f"element {tensor.name} of a batch counts rows of all samples (edges, offsets), a part has others"
        if tensor.dims.count("batch") > 1:
            return f"element {tensor.name} of a batch grows with its samples in {tensor.dims.count('batch')} dims"
    if not any("batch" in tensor.dims for tensor in tensors):
        return "batch(size) gives the same shapes for every size, so its samples cannot be told apart"
    return ""
