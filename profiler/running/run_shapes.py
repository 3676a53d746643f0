"""Shapes of what a run produced, from which similar tensors can be made."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..model.model_profile import Producer


@dataclass(frozen=True)
class TensorSpec:
    """What is needed to make a tensor like another one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] = ()
    """Strides of a tensor without gaps or overlaps; () for others, which are made anew with the usual ones."""
    numbers: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The numbers of a real tensor (see real_model); None for fake ones."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """Spec of a tensor."""
        numbers = None
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                numbers = tensor.detach().clone()
        strides = tensor.stride() if _is_dense(tensor) else ()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, strides, numbers)

    def blank(self) -> torch.Tensor:
        """A new tensor of this layout and dtype (and of these numbers, where there are any) without a gradient."""
        if self.numbers is not None:
            return self.numbers.clone()
        if not self.strides:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)

    def one_more(self, less: "TensorSpec") -> "TensorSpec":
        """The spec at one more sample. less: the spec at one sample fewer. Every dim grows by the same number each
        time, and the order of dims in memory stays."""
        shape = tuple(2 * size - before for size, before in zip(self.shape, less.shape, strict=True))
        strides = [0] * len(self.strides)
        expected = 1
        for stride, size, dim in sorted(zip(self.strides, self.shape, range(len(shape)), strict=False)):
            strides[dim] = stride if size == shape[dim] == 1 else expected
            expected *= shape[dim]
        return TensorSpec(shape, self.dtype, self.requires_grad, tuple(strides))

    def empty(self) -> torch.Tensor:
        """A new tensor of this spec, like one that a module made: no leaf, so it may be changed in place."""
        return self.blank().requires_grad_(self.requires_grad).clone()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill one piece of memory, each place once, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class OutputSpec:
    """What a layer module returned: its structure, with specs in place of tensors."""

    leaves: tuple[Any, ...]
    tree: TreeSpec

    @classmethod
    def of(cls, output: Any) -> "OutputSpec":
        """Spec of an output."""
        leaves, tree = tree_flatten(output)
        return cls(tuple(TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in leaves), tree)

    def is_like(self, other: "OutputSpec") -> bool:
        """Whether both have tensors in the same places, with the same numbers of dims."""
        return self.tree == other.tree and _dims(self.leaves) == _dims(other.leaves)

    def one_more(self, less: "OutputSpec") -> "OutputSpec":
        """The spec at one more sample. less: the spec at one sample fewer."""
        pairs = zip(self.leaves, less.leaves, strict=True)
        leaves = (x.one_more(before) if isinstance(x, TensorSpec) else x for x, before in pairs)
        return OutputSpec(tuple(leaves), self.tree)

    def empty(self) -> Any:
        """A new output of this spec."""
        return tree_unflatten([x.empty() if isinstance(x, TensorSpec) else x for x in self.leaves], self.tree)


def _dims(leaves: Iterable[Any]) -> list[int | None]:
    return [len(x.shape) if isinstance(x, TensorSpec) else None for x in leaves]


@dataclass
class Shapes:
    """What one run at one batch size and length produced."""

    outputs: dict[tuple[str, int], OutputSpec] = field(default_factory=dict)
    tensors: dict[Producer, TensorSpec] = field(default_factory=dict)
    refused: bool = False
    """Whether a module refuses a batch of this size (see as_on_gpu)."""
    furthest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Table read by position -> (its rows, the highest row that is read); see positions."""
    _stand_ins: dict[tuple[str, int], Any] = field(default_factory=dict)

    def is_like(self, other: "Shapes") -> bool:
        """Whether both runs made the same tensors, with the same numbers of dims."""
        if self.outputs.keys() != other.outputs.keys() or self.tensors.keys() != other.tensors.keys():
            return False
        alike = all(len(spec.shape) == len(other.tensors[key].shape) for key, spec in self.tensors.items())
        return alike and all(output.is_like(other.outputs[key]) for key, output in self.outputs.items())

    def one_more(self, less: "Shapes") -> "Shapes":
        """What a run with one more sample would produce, from this run and one with one sample fewer; for fake
        tensors."""
        return Shapes(
            outputs={key: output.one_more(less.outputs[key]) for key, output in self.outputs.items()},
            tensors={key: spec.one_more(less.tensors[key]) for key, spec in self.tensors.items()},
        )

    def stand_in(self, name: str, call: int) -> Any:
        """Stands in for the output of a layer module that does not run. It is made once, to save time."""
        if (name, call) not in self._stand_ins:
            self._stand_ins[name, call] = self.outputs[name, call].empty()
        return self._stand_ins[name, call]
