"""Run a function on N gloo ranks forked from the test process; a rank's error is shown with its traceback."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from meshwright.executor.measuring.local_ranks import RankError, run_local_ranks
from meshwright.executor.parallel import delayed_weights

__all__ = ["PATIENCE_S", "RankError", "run_ranks"]

PATIENCE_S = 600.0
"""How long ranks may take: only a hang takes as long, however busy the machine is."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = PATIENCE_S) -> list[Any]:
    """[rank] -> what function(*args) returned there, with torch.distributed running, as run_local_ranks does it. Tensor
    ranks of small models put weights' gradients off as those of large ones do."""
    try:
        with patch.object(delayed_weights, "LEAST_BYTES", 0):
            return run_local_ranks(function, num_ranks, *args, timeout_s=timeout)
    except RankError as error:
        raise RankError(f"{error}\n{error.detail}") from None
