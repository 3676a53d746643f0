"""Counts what a rank really sends and holds: bytes per group and kind of collective, and the peak of live storages."""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.executor.torch_compat import let_gloo_rest
from meshwright.planner.cost.comm_cost import CollectiveKind

KINDS: dict[str, CollectiveKind] = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "send": "p2p",
    "recv_": "p2p",
}
"""c10d operator -> what the planner calls it. Both ends of a transfer count."""


@dataclass
class Passed:
    """What one rank has passed to one kind of collective in one group; full tensors, not shards."""

    bytes: int = 0
    calls: int = 0


class Traffic(TorchDispatchMode):
    """Adds up collectives while it is on: (ranks of the group, kind) -> Passed. Backward on a CPU is seen, too.

    least_bytes: what is smaller is not counted (losses, norms).
    """

    def __init__(self, least_bytes: int = 0) -> None:
        super().__init__()
        self.passed: dict[tuple[tuple[int, ...], CollectiveKind], Passed] = defaultdict(Passed)
        self._least_bytes = least_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it; count it if it is a collective."""
        if func.namespace == "c10d":
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._overloadpacket.__name__
        if name not in KINDS:
            raise NotImplementedError(f"c10d::{name} is not counted yet")
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
        kind = KINDS[name]
        # Operators take outputs first, then inputs; the full tensor is the larger of the two.
        sizes = [sum(_bytes(t) for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args[:2]]
        if max(sizes) < self._least_bytes:
            return
        passed = self.passed[tuple(dist.get_process_group_ranks(group)), kind]
        passed.bytes += max(sizes)
        passed.calls += 1


def _is_group(value: torch.ScriptObject) -> bool:
    return value._type().qualified_name().endswith("ProcessGroup")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class PeakMeter(TorchDispatchMode):
    """Bytes of the storages that operators have made since it was switched on: those alive, and the most at once since
    `begin`.

    Follows every storage until it is freed or resized (as fully_shard does with gathered parameters). Memory inside of
    a kernel is not seen. What gloo's threads still hold of collectives that are done is let go before a peak counts,
    or peaks would differ by a buffer from run to run.

    fake: follow the tensors of this mode; None: real ones.
    """

    def __init__(self, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._began = False
        self._fake = fake
        self._sizes: dict[int, int] = {}
        self._resize: Any = None

    def __enter__(self) -> Self:
        self._resize = resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = followed  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run it, and follow what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf)
        return result

    def begin(self) -> None:
        """Peaks count from here on."""
        self._began = True
        self._let_go()
        self.peak = self.live

    def _follow(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta" or getattr(tensor, "fake_mode", None) is not self._fake:
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._sizes:
            self._sizes[place] = 0
            weakref.finalize(storage, self._freed, place)
        self._set(place, storage.nbytes())

    def _set(self, place: int, size: int) -> None:
        self.live += size - self._sizes[place]
        self._sizes[place] = size
        if self._began and self.live > self.peak:
            self._let_go()
            self.peak = max(self.peak, self.live)

    def _let_go(self) -> None:
        if self._fake is None and dist.is_initialized():
            let_gloo_rest()

    def _freed(self, place: int) -> None:
        self.live -= self._sizes.pop(place, 0)
