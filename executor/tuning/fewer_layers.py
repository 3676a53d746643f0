"""A model without some of its blocks, for jobs that are to show how a larger one runs."""

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from ...profiler.model.failures import a_type
from ...profiler.model.loaded import LoadedModel


def without_blocks(loaded: LoadedModel, blocks: Collection[str]) -> LoadedModel:
    """The model with these modules taken out of the lists that they are in, those behind them moving up.

    blocks: full names, as in h.3. Building it raises ValueError where one of them is in no list.
    """
    if not blocks:
        return loaded

    def build() -> nn.Module:
        module = loaded.build()
        for name in {name.rpartition(".")[0] for name in blocks}:
            _shorten(module, name, {block for block in blocks if block.rpartition(".")[0] == name})
        return module

    return replace(loaded, build=build, small=None)


def _shorten(module: nn.Module, name: str, blocks: Collection[str]) -> None:
    """Take blocks out of the list of that name."""
    found = module.get_submodule(name) if name else module
    if not isinstance(found, nn.ModuleList | nn.Sequential):
        raise ValueError(f"{sorted(blocks)[0]} is in {a_type(found)}, of which nothing can be left out")
    left = [child for key, child in found.named_children() if f"{name}.{key}".removeprefix(".") not in blocks]
    found._modules.clear()
    for number, child in enumerate(left):
        found.add_module(str(number), child)
