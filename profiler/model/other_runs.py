"""Forward runs after the first: the shapes at other sizes, and whether what crosses is the same in every run."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..running.fake import DecidesByValuesError, FakeModel
from ..running.forward_state import version_of
from ..running.positions import Positions
from ..running.run_shapes import Shapes, TensorSpec
from ..semantics.producers import Producers
from .building import in_evaluation
from .chain import Crossing, LayerChain
from .chain_watch import Cursor, recording_outputs, stubbed
from .loaded import Batch
from .model_profile import Producer

_BATCHES = 3
"""Further batches that are run if integers of the first one decide what is computed."""


def shapes_at(fake: FakeModel, chain: LayerChain, size: int, seq_len: int | None) -> Shapes:
    """Shapes of all tensors at another batch size or length; of each class of layers only the first is run."""
    positions = Positions(fake.module)
    shapes = run_first_of_each_class(fake, chain, fake.batch(size, seq_len), positions)
    shapes.furthest = positions.furthest
    return shapes


def run_first_of_each_class(
    fake: FakeModel, chain: LayerChain, batch: Batch, watch: AbstractContextManager[Any] | None = None
) -> Shapes:
    """Shapes of what one forward of `batch` produces. Of each class of layers only the first runs; others return what
    it did. watch: a context that the forward runs in."""
    shapes = Shapes()
    cursor = Cursor()
    stand_ins = {}
    for i, first in enumerate(chain.representatives()):
        if i != first:
            pairs = zip(chain.layers[i].calls, chain.layers[first].calls, strict=True)
            stand_ins.update({call: like for call, like in pairs if call != like})

    def produced(producer: Producer, tensor: torch.Tensor) -> None:
        cursor.end()
        shapes.tensors[producer] = TensorSpec.of(tensor)

    producers = Producers(fake.module, chain.units.names, on_produced=produced, on_start=cursor.start)

    def stub(name: str, call: int) -> Any:
        like = stand_ins.get((name, call))
        return None if like is None else shapes.outputs[like].empty()

    with (
        fake.running() as refusals,
        watch or nullcontext(),
        recording_outputs(fake.module, chain.units.names, cursor, shapes),
        stubbed(fake.module, {name for name, _ in stand_ins}, producers, stub),
        producers,
    ):
        fake.loss(batch)
    shapes.refused = bool(refusals)
    return shapes


def unlike_crossings(fake: FakeModel, chain: LayerChain, size: int) -> tuple[str, frozenset[Producer]]:
    """(why some crossing tensors are not the same in every run, in words; '' if all are; their producers). Two things
    are looked at: sizes in other batches, if integers are known by which the model decides; and whether a tensor is
    there, and of the same shape, in evaluation. After a tensor whose size differs none may cross, for stages would run
    functions of it on a stand-in of the wrong size. None may cross at all if evaluation writes into parameters, for a
    stage has only its own."""
    if fake.mode is None or len(chain.layers) == 1:
        return "", frozenset()
    told, unlike = "", set[Producer]()
    for draw in range(1, _BATCHES + 1) if fake.knows_layout else ():
        for crossing, seen in _unlike(fake, chain, fake.other_batch(size, draw)):
            unlike |= {later.producer for later in chain.crossings if later.made_by >= crossing.made_by}
            told = told or (
                f"what {crossing.producer.name} returns is {list(crossing.spec.shape)} in one batch of {size} and "
                f"{list(seen.shape) if seen else 'missing'} in another, by their numbers, and stages exchange tensors "
                "of one size, and have stand-ins of one size for what others have made (pad all batches alike)"
            )
    before = {name: version_of(parameter) for name, parameter in fake.module.named_parameters()}
    with in_evaluation(fake.module):
        missed = _unlike(fake, chain, fake.batch(size, fake.loaded.seq_len))
    written = next((n for n, p in fake.module.named_parameters() if version_of(p) != before[n]), "")
    if written:
        unlike |= {crossing.producer for crossing in chain.crossings}
        told = told or (
            f"in evaluation the forward writes into the parameter {written}, and stages have only those of their own "
            "layers (scale what the layer returns instead)"
        )
    for crossing, _ in missed:
        unlike.add(crossing.producer)
        told = told or (
            f"what {crossing.producer.name} returns between layers is not there, or another tensor, in evaluation, and "
            "stages exchange the same as in training (let what goes by self.training be in a layer, or at the end)"
        )
    return told, frozenset(unlike)


def _unlike(fake: FakeModel, chain: LayerChain, batch: Batch) -> list[tuple[Crossing, TensorSpec | None]]:
    """Crossing tensors whose shape differs in a run of this batch, each with its spec there. The spec is None where a
    function ran more or less often between two layers than before: then its calls can no longer be matched by
    number."""
    try:
        shapes = run_first_of_each_class(fake, chain, batch).tensors
    except (ValueError, DecidesByValuesError):  # it takes another way, of which nothing is known
        return []
    names = {crossing.producer.name for crossing in chain.crossings if crossing.producer.kind == "glue"}
    miscounted = set[Producer]().union(*(_miscounted(name, chain.shapes.tensors, shapes) for name in names))
    found = [(c, None if c.producer in miscounted else shapes.get(c.producer)) for c in chain.crossings]
    return [(crossing, seen) for crossing, seen in found if seen is None or seen.shape != crossing.spec.shape]


def _miscounted(name: str, before: Iterable[Producer], after: Iterable[Producer]) -> list[Producer]:
    """Results of calls of the function `name` between layers, from the first place on where both runs do not call it
    equally often between the same two layers."""
    own, others = ([p for p in each if p.kind == "module" or p.name == name] for each in (before, after))
    same = next((i for i, (a, b) in enumerate(zip(own, others, strict=False)) if a != b), min(len(own), len(others)))
    return [producer for producer in own[same:] if producer.kind == "glue"]
