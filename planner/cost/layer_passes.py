"""Seconds of one layer's passes: of its kernels, of the host that issues them, and of what a step does once; without
other ranks."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np

from ..plan.document import Recompute
from ..plan.legality import divisors
from ..plan.schedules import ZERO_BUBBLE
from ..plan.shape import Shape
from .compute_cost import AsRun, Seconds, accumulate_s, amounts_of, layer_seconds_of_each, optimizer_s
from .data_cost import added_elements, added_share
from .elementwise import Values
from .expert_cost import expert_products, on_one_rank
from .host_cost import AUTOCAST_TRAFFIC, Issued, hooks, left_in_queue
from .job_model import JobModel
from .kept import memo_by
from .kinds import Kind
from .layer_parts import repeats_collective
from .memory_cost import uses_fully_shard
from .priced_layer import Traffic

Part = Literal["forward", "backward"]

TensorTraffic = tuple[tuple[Part, bool, Traffic], ...]
"""For each exchange with tensor ranks: (forward or backward, whether recompute repeats it, collective)."""

MOST_TOGETHER = 100
"""Most sizes of micro-batches for which the operators of a layer are priced at once, which costs hardly more than one
size."""


class LayerPasses(JobModel):
    """Seconds of layers without what they exchange with other ranks."""

    @cached_property
    def _seconds(self) -> dict[tuple[object, ...], dict[float, Seconds]]:
        """Cache of `compute_of_each`: what layers that run alike have in common -> samples -> their seconds."""
        return {}

    def compute(self, kind: Kind, shape: Shape) -> Seconds:
        """Compute seconds of a layer for one micro-batch."""
        samples = shape.samples
        return self.compute_of_each(kind, shape, [samples])[samples]

    def compute_of_each(self, kind: Kind, shape: Shape, samples: Sequence[float]) -> Mapping[float, Seconds]:
        """Samples of a micro-batch -> compute seconds of a layer, for at least those `samples`; the shape's own samples
        do not matter."""
        mode, costs, tensor, chosen = self._mode(kind, shape)
        spread = shape.expert if self.layer_class(kind).experts else 1
        known = self._seconds.setdefault((kind.layer_class, mode, tensor, spread, chosen), {})
        missing = [each for each in samples if each not in known]
        if missing:
            missing = list(dict.fromkeys(missing if known else (*missing, *self._job_samples)))
            as_run: AsRun = amounts_of
            if self.layer_class(kind).experts:
                as_run = partial(
                    on_one_rank,
                    products=expert_products(self.layer_class(kind), costs),
                    device=self.device,
                    expert=shape.expert,
                    imbalance=self.imbalance(kind, shape),
                )
            device, training = self.device, self.training
            found = layer_seconds_of_each(
                costs, device, training.precision, training.compute_bytes, missing, tensor, as_run
            )
            known.update(zip(missing, found, strict=True))
        return known

    @cached_property
    def _job_samples(self) -> tuple[float, ...]:
        """All values that `samples` has in shapes of this job; empty if they are too many to be priced together."""
        sizes, contexts = divisors(self.training.global_batch), divisors(self.job.num_devices)
        found = {size / context for size in sizes for context in contexts}
        return tuple(found) if len(found) <= MOST_TOGETHER else ()

    def tensor_traffic(self, kind: Kind, shape: Shape, recompute: Recompute = "full") -> TensorTraffic:
        """Exchanges of one layer with tensor ranks for one micro-batch: (forward or backward, whether recompute repeats
        it, collective)."""
        mode, costs, tensor = self.mode(kind, shape)
        batch, sizes = shape.samples, {"all_gather": self.gathered_bytes}
        traffic: list[tuple[Part, bool, Traffic]] = [
            (
                c.part,
                c.part == "forward" and repeats_collective(c.repeated, c.within, recompute),
                Traffic(
                    "tensor",
                    c.kind,
                    c.tensor.at(batch, sizes.get(c.kind, self.training.compute_bytes), tensor),
                    1.0,
                    per_step=False,
                ),
            )
            for c in costs.collectives
            if mode != "whole"
        ]
        if shape.sequence and mode != "sequence":
            edges: tuple[tuple[Part, int], ...] = (("forward", kind.leaves), ("backward", kind.enters))
            neighbour = self.hidden_bytes(shape)
            traffic += [(part, False, Traffic("tensor", "all_gather", neighbour, 1.0, False)) for part, n in edges if n]
        return tuple(traffic)

    def hidden_bytes(self, shape: Shape) -> float:
        """Bytes of the hidden state, which is sliced where sequence parallelism begins and gathered where it ends."""
        sizes = [
            c.whole.inputs.at(shape.samples, self.training.compute_bytes)
            for c in self.profile.classes
            if c.sequence is not None
        ]
        return max(sizes, default=0.0)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of one element of what is gathered: weights by data ranks, inputs of products by tensor ranks."""
        low = self.training.precision == "fp8" and self.software.gathers_low_precision
        return 1 if low else self.training.compute_bytes

    def host_s(self, kind: Kind, shape: Shape) -> float:
        """Seconds that the host adds to each pass through a layer, including what its experts need."""
        banks, expert = self.layer_class(kind).experts, shape.expert
        routing_s = sum(self.software.host_routing_s(bank.count / expert, expert) for bank in banks)
        return self.software.host_layer_s + routing_s

    def passes_s(self, kind: Kind, shape: Shape) -> tuple[float, float, float]:
        """(seconds of a layer's forward, of its backward, how much of both the device waits for the host), without
        other ranks. In eager mode autocast keeps much in fp32, and issuing a pass, with all that is around its
        operators, may take longer than the device computes."""
        if self.device.dispatch:
            return self._eager_passes_s(kind, shape)
        found = self.compute(kind, shape)
        return found.forward, found.backward, 0.0

    @memo_by(lambda self, kind, shape: (kind, *self.issued_as(shape)))
    def _eager_passes_s(self, kind: Kind, shape: Shape) -> tuple[float, float, float]:
        passes, (shown, _) = self._issued(kind, shape), self._left_in_queue(shape)
        ahead_s, back_s = (shown * each.wait_s for each in passes)
        return passes[0].device_s + ahead_s, passes[1].device_s + back_s, ahead_s + back_s

    def again_s(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Seconds that a recompute of a layer takes: those of its kernels, and those by which issuing them takes longer
        than the kernels, less what the host is ahead in the layer's other passes."""
        more = self.compute(kind, shape).again(recompute)
        if more.wait_s == 0.0:
            return more.device_s
        ahead_s = self._left_in_queue(shape)[1] * sum(each.ahead_s for each in self._issued(kind, shape))
        return more.device_s + max(0.0, more.wait_s - ahead_s)

    def least_again_s(self, kind: Kind, shape: Shape, recompute: Recompute) -> float:
        """Lower bound on `again_s`, however data is split: the host is as far ahead as it can be, without hooks and
        with all the traffic that autocast may add."""
        found = self.compute(kind, shape)
        more, wider = found.again(recompute), AUTOCAST_TRAFFIC * self.training.is_mixed
        ahead = Issued(found.device_forward + wider * found.widened_forward, found.host_forward)
        back = Issued(found.device_backward + wider * found.widened_backward, found.host_backward)
        return more.device_s + max(0.0, more.wait_s - ahead.ahead_s - back.ahead_s)

    @memo_by(lambda self, shape: self.issued_as(shape))
    def _left_in_queue(self, shape: Shape) -> tuple[float, float]:
        """(share of the seconds for which single layers wait for the host that is left on a device that runs all
        layers, the same share of the seconds by which the host is ahead in single layers). Both are 1 in a pipeline:
        what a stage hides depends on its layers, and is not followed."""
        if shape.pipeline > 1:
            return 1.0, 1.0
        issued = [self._issued(kind, shape) for kind in self.kinds_of_layers]
        device_s, host_s = np.array([[(p.device_s, p.host_s) for p in passes] for passes in issued]).transpose(2, 1, 0)
        layers = self.layers_of_kinds
        return float(left_in_queue(host_s, device_s, layers)), float(left_in_queue(device_s, host_s, layers))

    def issued_as(self, shape: Shape) -> tuple[object, ...]:
        """The fields of a shape that decide how long the host takes to issue its layers."""
        return (
            *(shape.tensor, shape.sequence, shape.cuts, shape.expert, shape.samples, shape.num_microbatches),
            *(shape.sharded_over > 1, shape.context > 1, shape.pipeline == 1, shape.schedule in ZERO_BUBBLE),
            uses_fully_shard(shape, self.training),
        )

    @memo_by(
        lambda self, kind, shape: (
            *(kind, *self._as_run(kind, shape), shape.sequence, shape.expert),
            *(shape.samples, shape.num_microbatches, shape.sharded_over > 1, shape.context > 1),
            *(uses_fully_shard(shape, self.training), kind.is_in_root(shape), shape.schedule in ZERO_BUBBLE),
        )
    )
    def _issued(self, kind: Kind, shape: Shape) -> tuple[Issued, Issued]:
        """(forward, backward) of a layer: seconds of the device and of the host, hooks included."""
        found, layer_class, parts = self.compute(kind, shape), self.layer_class(kind), self.tensor_traffic(kind, shape)
        wrapped, each_s = uses_fully_shard(shape, self.training), self.device.dispatch
        autocast = self.training.is_mixed and not self.software.memory.pure and not wrapped
        more = hooks(
            wrapped and not kind.is_in_root(shape),
            shape.sharded_over > 1,
            (found.host_forward / each_s, found.host_backward / each_s) if autocast else (0.0, 0.0),
            (sum(part == "forward" for part, *_ in parts), sum(part == "backward" for part, *_ in parts)),
            shape.context > 1 and any(op.kind == "attention" for op in layer_class.whole.operators),
            len(layer_class.parameters),
            len(self.kinds),
            shape.num_microbatches,
            shape.schedule in ZERO_BUBBLE,
        )
        wider = AUTOCAST_TRAFFIC * autocast
        return (
            Issued(found.device_forward + wider * found.widened_forward, found.host_forward + more.forward * each_s),
            Issued(
                found.device_backward + wider * found.widened_backward, found.host_backward + more.backward * each_s
            ),
        )

    def accumulated_s(self, trainable: float, shape: Shape) -> float:
        """Seconds per micro-batch to add new gradients to those of earlier micro-batches: in fp32, two reads and a
        write, of shards if gradients are reduced first."""
        if not self.adds_gradients(shape.num_microbatches):
            return 0.0
        elements = added_elements(trainable, float(shape.sharded_over), shape.gradient_sync == "every")
        return self.added_s(elements) * added_share(shape.num_microbatches)

    def adds_gradients(self, num_microbatches: int) -> bool:
        """Whether separate kernels add gradients to those of earlier micro-batches."""
        return num_microbatches > 1 and not self.software.accumulates_in_matmul

    def added_s(self, elements: float) -> float:
        """Seconds of adding that many gradients to those that are there."""
        return accumulate_s(elements, self.device)

    def optimizer_s(self, elements: Values, on_host: bool) -> Values:
        """Seconds of the optimizer step over `elements` parameters, on one device or in the host's memory."""
        return optimizer_s(elements, self.training.optimizer, self.device, on_host)
