"""An optimizer whose state and step are in the host's memory (Ren et al., ZeRO-Offload, USENIX ATC 2021).

The device keeps parameters and gradients. Before a step this rank's shards of both are copied to the host, where the
optimizer has parameters of its own; the new parameters are copied back. Parameters are taken along each time, for
whoever writes to the model between steps writes on the device.
"""

from collections.abc import Mapping

import torch
from torch import nn

from .optimizers import keep_attributes


class HostParameters:
    """What the optimizer is given instead of parameters on the device.

    parameters: name -> this rank's shard on the host, of a GPU in pinned pages.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._on_device = dict(parameters)
        self.parameters = {name: nn.Parameter(_on_host(p), p.requires_grad) for name, p in parameters.items()}
        self._gradients: dict[str, torch.Tensor] = {}
        for name, p in self.parameters.items():
            keep_attributes(p, vars(self._on_device[name]))

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the parameters as they are, and their gradients."""
        for name, p in self._on_device.items():
            own = self.parameters[name]
            own.grad = None
            if p.grad is None:
                continue
            if name not in self._gradients:
                self._gradients[name] = _on_host(p.grad)
            own.copy_(p, non_blocking=True)
            own.grad = self._gradients[name].copy_(p.grad, non_blocking=True)
        if any(p.is_cuda for p in self._on_device.values()):
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def scatter(self) -> None:
        """Take over what the optimizer has made of the parameters."""
        for name, p in self._on_device.items():
            if p.grad is not None:
                p.copy_(self.parameters[name], non_blocking=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, sharded as the tensor is."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False).copy_(tensor.detach())
