"""Finds, by the names of parameters, experts that a model keeps in a list, each as a module of its own."""

import re
from collections.abc import Iterable

from ...profiler.model.model_profile import LayerClass

_NUMBERED = re.compile(r"(.*expert[^.]*)\.(\d+)\.(.+)", re.IGNORECASE)


def listed_experts(classes: Iterable[LayerClass]) -> tuple[str, int] | None:
    """(name of the first list of equal experts, relative to its layer; number of experts in it); None if there is no
    such list."""
    for layer_class in classes:
        lists: dict[str, dict[str, set[tuple[str, tuple[int, ...]]]]] = {}
        for parameter in layer_class.parameters:
            if found := _NUMBERED.fullmatch(parameter.name):
                name, number, own = found.groups()
                lists.setdefault(name, {}).setdefault(number, set()).add((own, parameter.shape))
        for name, experts in lists.items():
            first, *others = experts.values()
            if others and all(other == first for other in others):
                return name, len(experts)
    return None
