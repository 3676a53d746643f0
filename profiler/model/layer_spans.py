"""Which events of a forward make each layer: cut where the fewest bytes cross, joined where stages could not be apart.

A stage runs its own layers and all of the code between layers, and is sent what other layers made. What a layer hands
on to a later one in another way (an attribute, a tensor that it does not return) it would miss.
"""

from collections import defaultdict
from itertools import pairwise

import networkx as nx

from ..running.shared_state import ITERATOR
from .chain_watch import CallEvent, ChainWatch
from .layer_graph import bytes_over, maker_of, tensors_of
from .layer_units import Units


class LayerSpans:
    """The layers of a run in order, each as its (first, last) event; and notes on why events that could be in separate
    layers are in one."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.each = spans
        self.notes: list[str] = []

    def layer_of(self, event: int) -> int:
        """The layer that an event is in."""
        return next(i for i, (first, last) in enumerate(self.each) if first <= event <= last)

    def join(self, first: int, last: int, why: str) -> None:
        """Join the layer of one event with that of a later one and with all between. If that changes anything, `why`
        becomes a note."""
        start, end = self.layer_of(first), self.layer_of(last)
        if start < end:
            self.each = [*self.each[:start], (self.each[start][0], self.each[end][1]), *self.each[end + 1 :]]
            self.notes.append(why)

    def join_all(self, why: str) -> None:
        """Make all layers one."""
        self.join(self.each[0][0], self.each[-1][1], f"{why}, so all of it is one layer")


def spans_of(units: Units, watch: ChainWatch, run: nx.DiGraph) -> LayerSpans:
    """The layers of a run that can be apart."""
    found = LayerSpans(_apart(units, watch.events, bytes_over(run)))
    _join_repeats(units, watch.events, found)
    _join_leaks(watch, run, found)
    _join_written_parts(watch, found)
    _join_changed_objects(watch, found)
    _join_read_aside(watch, found)
    _join_changed_by_several(watch, found)
    for first, last in watch.inputs.repeats:
        names = dict.fromkeys(event.key[1] for event in watch.events[first : last + 1] if event.key[0] == "module")
        repeated = f"the forward has {' and '.join(names) or 'functions'} repeated together in backward"
        found.join(first, last, f"{repeated} (torch.utils.checkpoint), so all between is one layer")
    if who := watch.inputs.transforms:
        found.join_all(f"{who} differentiates or maps the model (autograd.grad, torch.func)")
    if watch.inputs.hooks_between:
        found.join_all("the forward hooks itself onto gradients between layers (register_hook)")
    for place in watch.inputs.read_again:
        if not any(place.startswith(f"{name}.") for name in units.names):
            found.join_all(f"the forward reads between layers what the one before has left in {place}")
    return found


def _apart(units: Units, events: list[CallEvent], crossing: list[float]) -> list[tuple[int, int]]:
    """(first, last) event of each layer, before any have to be joined. crossing: [event] -> bytes over a cut before."""
    groups: list[tuple[str, int, int]] = []
    for i, event in enumerate(events):
        kind, name, _ = event.key
        if kind != "module":
            continue
        slot = name if name in units.elements else ""
        if groups and groups[-1][0] == slot:
            groups[-1] = (slot, groups[-1][1], i)
        else:
            groups.append((slot, i, i))
    if not groups:
        return [(0, len(events) - 1)]
    lasts = [
        _cheapest_cut(crossing, before[2], after[1], early=before[0] != "" and after[0] == "")
        for before, after in pairwise(groups)
    ] + [len(events) - 1]
    firsts = [0] + [last + 1 for last in lasts[:-1]]
    return list(zip(firsts, lasts, strict=True))


def _cheapest_cut(crossing: list[float], before: int, after: int, early: bool) -> int:
    """Last event of the earlier layer, between the two layer modules at `before` and `after`: fewest bytes cross."""
    least = min(crossing[before + 1 : after + 1])
    cuts = [event for event in range(before, after) if crossing[event + 1] == least]
    return cuts[0] if early else cuts[-1]


def _join_repeats(units: Units, events: list[CallEvent], found: LayerSpans) -> None:
    """Join all layers from the first to the last run of an element that runs several times, for it cannot be in two
    places of the chain."""
    runs: dict[str, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        kind, name, _ = event.key
        if kind == "module" and name in units.elements:
            runs[name].append(i)
    for name, places in runs.items():
        why = f"{name} runs {len(places)} times, so all from its first to its last run is one layer"
        found.join(places[0], places[-1], why)


def _join_leaks(watch: ChainWatch, run: nx.DiGraph, found: LayerSpans) -> None:
    """Join layers between which a tensor goes that no module returns: one keeps it aside and a later one reads it, so
    it cannot be sent. This holds also if a function between them returns the same tensor (`.to` the device that it is
    on)."""
    returned: dict[int, int] = {}
    for key, produced in watch.made.items():
        storage, first = watch.storages.number(watch.tensors[key]), min(event for _, event in produced)
        returned[storage] = min(first, returned.get(storage, first))
    for tensor in tensors_of(run):
        made, storage = maker_of(run, tensor), run.nodes[tensor]["storage"]
        if returned.get(storage, len(watch.events)) > made:
            last = max(run.successors(tensor))
            keeper, reader = watch.events[made].key[1], watch.events[last].key[1]
            why = f"{keeper} keeps a tensor aside that {reader} reads, so all between them is one layer"
            found.join(made, last, why)


def _join_written_parts(watch: ChainWatch, found: LayerSpans) -> None:
    """Join layers where the forward writes into part of a tensor in a way that stages cannot follow, up to the last
    layer that reads the tensor. x[...].add_(y) between layers would be repeated by every later stage on what it has
    received. What a layer writes into a tensor that was made before it, and does not return, may come after a stage has
    sent it."""
    for event, storage in watch.written_parts:
        if storage in watch.from_parameters:
            last = max(watch.storage_reads[storage], default=event)
            why = (
                f"the forward writes between layers into a part of a tensor that {watch.events[last].key[1]} reads "
                "(x[...].add_(y), where x[...] += y could be cut), so all between them is one layer"
            )
            found.join(event, last, why)
    returned = {
        (event, watch.storages.number(watch.tensors[key]))
        for key, made in watch.made.items()
        for producer, event in made
        if producer.kind == "module"
    }
    for event, storage in watch.written_inside:
        if storage in watch.from_parameters and (event, storage) not in returned:
            last = max(watch.storage_reads[storage], default=event)
            why = (
                f"{watch.events[event].key[1]} writes into a tensor that it does not return and "
                f"{watch.events[last].key[1]} reads, so all between them is one layer"
            )
            found.join(event, last, why)


def _join_changed_objects(watch: ChainWatch, found: LayerSpans) -> None:
    """Join all layers from the first one on that changes an object other than the activations: stages without that
    layer would never see the change."""
    changers, last = watch.inputs.changers, len(watch.events) - 1
    for i, event in enumerate(watch.events):
        kind, name, _ = event.key
        if kind == "module" and name in changers:
            why = (
                f"{name} changes {changers[name]} that it is given, which stages without it would not see, so all from "
                "it on is one layer"
            )
            found.join(i, last, why)
            return


def _join_read_aside(watch: ChainWatch, found: LayerSpans) -> None:
    """Join layers with those that read what they put aside: a stage without a layer has what it returns, but nothing
    else."""
    for i, event in enumerate(watch.events):
        kind, name, _ = event.key
        if kind == "module" and name in watch.inputs.read_aside:
            why = f"{name} keeps aside what it returns, and it is read there, so all from it on is one layer"
            found.join(i, len(watch.events) - 1, why)
            return


def _join_changed_by_several(watch: ChainWatch, found: LayerSpans) -> None:
    """Join layers that change the same thing (count in it, draw random numbers from it), for each stage would have one
    of its own."""
    for what, names in watch.inputs.changed_by_several.items():
        runs = [i for i, event in enumerate(watch.events) if event.key[0] == "module" and event.key[1] in names]
        if runs:
            first, last = (watch.events[place].key[1] for place in (runs[0], runs[-1]))
            if what == ITERATOR:
                found.join_all(f"{first} and {last} take from {what}, and so does what stages run to see each other")
            why = f"{first} and {last} change {what}, which stages would each have for themselves"
            found.join(runs[0], runs[-1], f"{why}, so all between them is one layer")
