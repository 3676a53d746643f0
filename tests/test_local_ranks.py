"""Ranks forked from this process, on the CPU."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from meshwright.executor.measuring.local_ranks import apart, run_local_ranks

_THREADS = 8


def _forwards_at_once() -> list[float]:
    sys.setswitchinterval(1e-6)
    together = threading.Barrier(_THREADS)

    def forward() -> float:
        weight = torch.ones(4, requires_grad=True)
        together.wait()
        return float((weight * weight).sum())

    with ThreadPoolExecutor(_THREADS) as pool:
        return [done.result() for done in [pool.submit(forward) for _ in range(_THREADS)]]


@pytest.mark.slow
def test_threads_of_a_rank_may_begin_with_autograd_at_once() -> None:
    torch.ones((), requires_grad=True).backward()  # this process, which ranks are forked from, has an engine

    for _ in range(200):  # without an engine of the rank's own 1 in 25 died of SIGSEGV
        assert run_local_ranks(_forwards_at_once, 1, timeout_s=60) == [[4.0] * _THREADS]


def _refuse() -> None:
    raise ValueError("what was found, and a way out")


def test_where_there_are_gpus_backwards_run_apart_from_what_forks_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert apart(os.getpid) == os.getpid()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match=r"^what was found, and a way out$"):
        apart(_refuse)
