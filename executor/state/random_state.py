"""States of the random generators of a rank, as a checkpoint holds them."""

import random
from typing import Any, cast

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators that models and data use: torch's, Python's and numpy's."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to a state that random_state has returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
