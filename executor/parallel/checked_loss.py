"""Checks that the user's loss returns what a training step needs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...profiler.model.failures import a_type
from ...profiler.running.forward_state import undone

_log = logging.getLogger("meshwright")

_TWICE = 1e-3
"""Relative difference up to which the loss of all samples given twice counts as twice the loss, which makes it a
sum."""


@contextmanager
def uncounted(loss: Callable[[Any, Any], Any] | None) -> Iterator[None]:
    """While it lasts, calls of a loss change nothing: counts or averages that it keeps, in itself or in its file, are
    put back."""
    with undone(loss._loss if isinstance(loss, CheckedLoss) else loss):
        yield


class CheckedLoss:
    """A loss function whose results are looked at: anything but one number with a gradient is refused.

    micro_batch: samples that it is given at a time. told_of: parts of a global batch that losses are averaged over, if
    a sum over samples is to be told; it is looked for once, with all samples twice, without gradients. tells: whether
    this rank does (all look, for a loss may hold a collective).
    """

    def __init__(
        self, loss: Callable[[Any, Any], Any], micro_batch: int = 0, told_of: int = 0, tells: bool = True
    ) -> None:
        self._loss, self._micro_batch, self._told_of, self._tells = loss, micro_batch, told_of, tells

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss. Raises ValueError unless it is one number with a gradient."""
        loss = checked(self._loss(output, batch))
        if self._told_of > 1 and torch.is_grad_enabled():
            self._tell_sum(output, batch, loss.detach())
        return loss

    def _tell_sum(self, output: Any, batch: Any, once: torch.Tensor) -> None:
        parts, self._told_of = self._told_of, 0

        def twice(leaf: Any) -> Any:
            samples = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self._micro_batch
            return torch.cat([leaf.detach()] * 2) if samples else leaf

        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), uncounted(self):
                both = float(self._loss(tree_map(twice, output), tree_map(twice, batch)))
        except Exception:  # it takes batches of one size only: nothing is seen then
            return
        if self._tells and abs(both - 2 * float(once)) < _TWICE * abs(float(once)):
            _log.warning(
                "the loss of twice the samples is twice the loss: it is a sum over samples, which is averaged over the "
                "%d micro-batches of a step, so that it is 1/%d of what one device would have. Return the mean",
                parts,
                parts,
            )


def checked(loss: Any) -> torch.Tensor:
    """The loss. Raises ValueError unless it is one number, with a gradient if gradients are on."""
    if not isinstance(loss, torch.Tensor):
        first = f", the first {a_type(loss[0])}" if isinstance(loss, tuple | list) and loss else ""
        raise ValueError(
            f"loss=... returned {a_type(loss)}{first}: return the mean loss of the micro-batch as a tensor of "
            "one number (log others in evaluate(metrics=...), or in a list of your own)"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss=... returned a tensor of shape {tuple(loss.shape)}: return one number, the mean over the "
            "micro-batch (reduction='mean')"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "loss=... returned a number that depends on no trained parameter: it was detached or computed without "
            "gradients, or all parameters are frozen (requires_grad is False)"
        )
    return loss.reshape(())
