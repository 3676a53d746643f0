"""The few torch calls that are private or differ between versions, so that each has one place to be mended."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather_single(output, input, group=...); torch before 2.13 calls it all_gather_into_tensor."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""reduce_scatter_single(output, input, group=...); torch before 2.13 calls it reduce_scatter_tensor."""


def data_parallel(
    module: nn.Module, group: dist.ProcessGroup | None, unread: Iterable[str] = ()
) -> DistributedDataParallel:
    """Replicas with averaged gradients, all of which hold equal values already; buffers stay each rank's own.

    unread: parameters that get no gradient, so must not be waited for. (The public find_unused_parameters walks the
    graph in every step, and warns where it finds nothing.) torch 2.13 renamed broadcast_buffers to
    forward_sync_buffers.
    """
    wrap: Any = DistributedDataParallel
    wrap._set_params_and_buffers_to_ignore_for_model(module, list(unread))
    renamed = "forward_sync_buffers" in inspect.signature(wrap.__init__).parameters
    replicas: DistributedDataParallel = wrap(
        module,
        process_group=group,
        gradient_as_bucket_view=True,
        init_sync=False,
        **{"forward_sync_buffers" if renamed else "broadcast_buffers": False},
    )
    return replicas


@contextmanager
def replaced_truncated_normal(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, trunc_normal_ is what `replace` makes of it, whoever calls it.

    Since torch 2.13 it draws again until it likes the numbers, which fake tensors do not have.
    """
    original = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = replace(original)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def accelerator() -> torch.device:
    """Type of the devices that ranks compute on: cuda where there is one, else cpu."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class LeanPipelineStage(PipelineStage):
    """torch's pipeline stage, with receive buffers only for micro-batches in flight, and a call before each backward.

    The stock stage allocates buffers for every micro-batch of a step before the first (seen in 2.13: 64 micro-batches
    of 128 MiB are 8 GiB). Here a buffer is a meta tensor except from its receive to the end of its backward.

    before_backward: called with whether it is the step's last.
    """

    def __init__(self, *args: Any, before_backward: Callable[[bool], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before_backward = before_backward

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_meta(super()._prepare_forward_infra, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_meta(super()._prepare_backward_infra, *args, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Receives of a micro-batch's activations."""
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Receives of a micro-batch's gradients."""
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of a micro-batch. Raises what the model raised; torch wraps it in a list of argument shapes."""
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            raise error.__cause__ or error from None

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of a micro-batch, after which its buffers are given back."""
        self._before_backward(last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for infos in (self.args_recv_info[bwd_chunk_id], self.grad_recv_info.get(bwd_chunk_id, ())):
            _move_buffers(infos, torch.device("meta"))

    def _on_meta(self, prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        device, self.device = self.device, torch.device("meta")
        try:
            return prepare(*args, **kwargs)
        finally:
            self.device = device


def _move_buffers(infos: Iterable[Any], device: torch.device) -> None:
    """Empty buffers on a device in place of those of a micro-batch's receives (root arguments have none)."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = torch.empty_like(info.buffer, device=device, requires_grad=False)
