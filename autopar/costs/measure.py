"""Measured rates of the device at hand. The one torch part here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.ir.cluster import DeviceSpec

MATMUL_DIMS = (128, 256, 384)
COPY_BYTES = 2**25
CALIBRATED_DTYPES = ("float32", "float64", "bfloat16")


def measure_device(
    *, name: str = "cpu", workers: int = 1, memory_bytes: int | None = None
) -> DeviceSpec:
    """The local CPU as one of `workers` equal devices that share it.

    Measured on one thread, which other processes disturb least, and scaled to the cores a worker
    gets: several threads, or a fraction of a core. Memory is shared evenly unless given. Takes
    about a second.
    """
    cores = (os.cpu_count() or 1) / workers
    share = max(1, int(cores)) if cores >= 1 else cores
    with threads(1):
        rates = tuple((dtype, share * _matmul_flops(dtype)) for dtype in CALIBRATED_DTYPES)
        bandwidth = min(share, 1.0) * _copy_bandwidth()
        overhead_s = _op_overhead_s() / min(share, 1.0)
    return DeviceSpec(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes or _physical_memory() // workers,
        memory_bandwidth_bytes_s=bandwidth,
        peak_flops=rates,
        matmul_efficiency=1.0,
        kernel_launch_s=overhead_s,
        source=f"measured on one thread of this machine, times {share:g} for each of {workers}",
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within, torch computes on so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best_s(run: Callable[[], Any], budget_s: float, least: int = 4) -> float:
    """Fastest of as many runs as fit `budget_s`: on a shared machine the others measure it."""
    best, started, count = float("inf"), time.perf_counter(), 0
    while count < least or time.perf_counter() - started < budget_s:
        before = time.perf_counter()
        run()
        best, count = min(best, time.perf_counter() - before), count + 1
    return best


def _matmul_flops(dtype: str) -> float:
    """Best rate over the sizes."""

    def rate(dim: int) -> float:
        left = torch.randn(dim, dim, dtype=getattr(torch, dtype))
        return 2 * dim**3 / _best_s(lambda: left @ left, budget_s=0.08)

    return max(rate(dim) for dim in MATMUL_DIMS)


def _copy_bandwidth() -> float:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best_s(lambda: target.copy_(source), budget_s=0.15)


def _op_overhead_s() -> float:
    """Time of an op with next to nothing to do, recorded by autograd."""
    tiny = torch.ones(8, requires_grad=True)

    def hundred() -> None:
        for _ in range(100):
            torch.add(tiny, tiny)

    return _best_s(hundred, budget_s=0.05) / 100


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
