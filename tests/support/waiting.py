"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable

from support.ranks import PATIENCE_S


def until(happened: Callable[[], bool]) -> None:
    """Returns once it has happened; raises TimeoutError when it has not after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"it had not happened after {PATIENCE_S:g} s")
        time.sleep(0.02)
