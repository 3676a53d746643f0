"""Pins: what the user, or a manual set-up, has decided already."""

from dataclasses import dataclass, replace
from typing import Literal

from .document import ContextKind, Recompute
from .frameworks import Framework
from .schedules import Schedule
from .shape import NO_EXTRAS, Offered, Shape


@dataclass(frozen=True)
class Pins:
    """What the user, or a manual set-up, has decided already. Fields that are None are left to the search."""

    data_replicate: int | None = None
    data_shard: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    sequence: bool | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    gradient_sync: Literal["every", "last"] | None = None
    recompute: Recompute | None = None
    reshard: bool | None = None
    parts: bool = False
    """Layers may recompute any of their parts, too."""
    offload_activations: bool = False
    """What layers keep for backward may wait in the host's memory."""
    offload_optimizer: bool = False
    """The optimizer's state and step are in the host's memory."""
    everything: bool = False
    """Layers may take all options that there are, those of `parts` and `offload_activations` included."""
    context: int | None = None
    context_kind: ContextKind | None = None
    expert: int | None = None
    most: tuple[tuple[str, int], ...] = ()
    """(name of a number, largest value) of numbers that are bounded, but not fixed."""
    without: tuple[Schedule, ...] = ()
    """Schedules that are forbidden."""
    framework: Framework | None = None
    """Only plans that this framework can run are searched."""
    sequence_ways: int | None = None
    """Number of ranks over which the tokens of a sample are split, by sequence parallelism, context parallelism or
    both."""

    @property
    def alternatives(self) -> "tuple[Pins, ...]":
        """Several pins whose plans together contain all plans that the framework can run, those that hold least first,
        so that some plan is found soon. A framework recomputes all blocks alike (or equally many in each stage; these
        spaces contain more than that), and gives all gathered parameters back or none. Without a framework only these
        pins themselves."""
        if self.framework is None:
            return (self,)
        kinds: tuple[Recompute | None, ...] = self.framework.recomputes if self.recompute is None else (self.recompute,)
        if self.framework.partly is not None and self.recompute is None:  # all that mixes none and that
            kinds = (*(kind for kind in kinds if kind not in self.framework.mixed), None)
        gives = self.framework.reshards if self.reshard is None else (self.reshard,)
        return tuple(replace(self, recompute=kind, reshard=give) for give in gives[::-1] for kind in kinds[::-1])

    @property
    def offered(self) -> Offered:
        """Options of layers that the search tries in addition to the usual ones."""
        asked: dict[Literal["parts", "offload"], bool] = {"parts": self.parts, "offload": self.offload_activations}
        return frozenset(name for name, is_asked in asked.items() if is_asked or self.everything) or NO_EXTRAS

    def as_in(self, shape: Shape) -> "Pins":
        """These pins together with how the shape splits the model, its sequences and its experts, and with its
        schedule. How data ranks share their state, the micro-batch, and recompute are not fixed by it."""
        return replace(
            self,
            tensor=shape.tensor,
            sequence=shape.sequence if shape.tensor > 1 else None,
            context=shape.context,
            context_kind=shape.context_kind if shape.context > 1 else None,
            expert=shape.expert,
            pipeline=shape.pipeline,
            schedule=shape.schedule,
            virtual_stages=shape.virtual_stages if shape.pipeline > 1 else None,
        )

    def allows(self, name: str, value: object) -> bool:
        """Whether a value of a field agrees with the pins."""
        pinned = getattr(self, name)
        if pinned is not None and pinned != value:
            return False
        if name == "schedule" and value in self.without:
            return False
        return all(limited != name or (isinstance(value, int) and value <= limit) for limited, limit in self.most)

    def splits_sequences(self, tensor: int, sequence: bool, context: int) -> bool:
        """Whether these degrees, with sequence parallelism on or off, agree with the pins on sequences."""
        ways = (tensor if sequence else 1) * context
        return (tensor == 1 or self.allows("sequence", sequence)) and self.sequence_ways in (None, ways)

    def allows_shape(self, shape: Shape) -> bool:
        """Whether all of a shape agrees with what is pinned."""
        names = ("data_replicate", "data_shard", "tensor", "pipeline", "context", "expert", "micro_batch")
        return (
            all(self.allows(name, getattr(shape, name)) for name in (*names, "schedule"))
            and (shape.pipeline == 1 or self.allows("virtual_stages", shape.virtual_stages))
            and (shape.context == 1 or self.allows("context_kind", shape.context_kind))
            and self.splits_sequences(shape.tensor, shape.sequence, shape.context)
            and shape.offload_optimizer == self.offload_optimizer
        )
