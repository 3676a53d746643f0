"""Averages gradients of replicas of pipeline stages while the last backward of a step goes on, as DDP does without one.

A pipeline's schedule drives backward itself, past DDP's hooks. So gradients are gathered here in flat buffers, which
all replicas sum in the same order: a buffer as soon as the last micro-batch's backward has brought every gradient in
it, and those before it are on their way. What is left is summed after the schedule.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from .flat_gradients import all_reduce, in_buffers, local_gradients


class StageReplicas:
    """Averages gradients of this rank's stages over the ranks that hold the same stages.

    named: the rank's parameters. stages: the parameters of each of its stages, in order. A parameter of two stages
    (tied weights) is averaged at the end, and so is one that did not have exactly one gradient in the last backward of
    the first step. That step finds this out, and in which order gradients come; it averages everything at its end.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        stages: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup | None,
        num_replicas: int,
    ) -> None:
        self._group, self._num_replicas = group, num_replicas
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._all = list(named.values())
        times = Counter(id(parameter) for parameter in chain(*stages))
        self._stages = [[p for p in stage if p.requires_grad and times[id(p)] == 1] for stage in stages]
        self._buffers: list[list[nn.Parameter]] | None = None
        self._ends_step = False
        self._hooks: list[RemovableHandle] = []
        self._arrived: Counter[int] = Counter()
        self._sent: list[tuple[torch.Tensor, dist.Work]] = []
        self._next = 0

    def begin(self, ends_step: bool = False) -> None:
        """Note that the schedule begins. ends_step: whether it is the last time before the optimizer's step."""
        self._ends_step = ends_step
        self._remove_hooks()
        self._arrived.clear()
        self._sent, self._next = [], 0

    def before_last(self, stage: int) -> None:
        """Note that the next backward is the last one of a stage, or the weight part of it."""
        if self._ends_step:
            trained = [parameter for parameter in self._stages[stage] if parameter.requires_grad]
            self._hooks += [each.register_post_accumulate_grad_hook(self._has_arrived) for each in trained]

    def arrived(self, stage: int, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the last gradients of these parameters have come, where autograd's hooks do not tell it."""
        if self._ends_step:
            own = set(map(id, self._stages[stage]))
            for parameter in parameters:
                if id(parameter) in own:
                    self._has_arrived(parameter)

    def _has_arrived(self, parameter: nn.Parameter) -> None:
        """Note that the last gradient of a parameter has come."""
        self._arrived[id(parameter)] += 1
        if self._buffers is None:
            return
        if self._arrived[id(parameter)] > 1:
            raise RuntimeError(
                f"{self._names[id(parameter)]} was given two gradients in one backward, though only one in the first "
                "step: replicas of pipeline stages need the same backward in every step; plan with --pin pipeline=1"
            )
        self._send_ready()

    def finish(self) -> None:
        """Average what is left, and wait for all that was sent."""
        self._remove_hooks()
        if self._buffers is None:
            all_reduce(self._all, self._group, self._num_replicas)
            self._learn()
            return
        for buffer in self._buffers[self._next :]:
            self._send(buffer)
        for flat, work in self._sent:
            work.wait()
            flat /= self._num_replicas
        sent = set(map(id, chain(*self._buffers)))
        all_reduce([p for p in self._all if id(p) not in sent], self._group, self._num_replicas)
        self.begin()

    def _send_ready(self) -> None:
        assert self._buffers is not None
        while self._next < len(self._buffers) and all(self._arrived[id(p)] for p in self._buffers[self._next]):
            self._send(self._buffers[self._next])
            self._next += 1

    @torch.no_grad()
    def _send(self, buffer: Sequence[nn.Parameter]) -> None:
        """Begin to average a buffer. Its gradients become views of the flat buffer, so nothing has to be copied
        back."""
        given = [p for p in buffer if p.grad is not None]
        if not given:
            return
        gradients = local_gradients(given)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter, part in zip(given, flat.split([g.numel() for g in gradients]), strict=True):
            parameter.grad = part.view_as(parameter)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._sent.append((flat, work))

    def _learn(self) -> None:
        """Arrange parameters in buffers: those that had one gradient in the last backward on every replica, in the
        order in which the gradients came on the first replica. Does nothing if there was no backward."""
        if not self._arrived:
            return
        own = list(chain(*self._stages))
        order = {found: place for place, found in enumerate(self._arrived)}
        places = [order.get(id(p), len(own)) if self._arrived[id(p)] == 1 else len(own) for p in own]
        of_first = torch.tensor(places, device=own[0].device)
        dist.broadcast(of_first, group=self._group, group_src=0)
        everywhere = torch.tensor([place < len(own) for place in places], dtype=torch.int32, device=own[0].device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=self._group)
        kept = [i for i, is_kept in enumerate(everywhere.tolist()) if is_kept]
        times = of_first.tolist()
        self._buffers = in_buffers([own[i] for i in sorted(kept, key=times.__getitem__)])

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
