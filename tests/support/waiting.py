"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable

from support.ranks import PATIENCE_S


def until(happened: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Returns once it has happened; raises TimeoutError when it has not after timeout_s."""
    end = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"it had not happened after {timeout_s:g} s")
        time.sleep(0.02)
