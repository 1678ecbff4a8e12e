"""Starting processes: a pool of local ones, or joining those that torchrun started."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from autopar.errors import InputError, RuntimeFailure
from autopar.runtime.worker import FunctionName, Report, serve

DEFAULT_TIMEOUT_S = 60.0
GRACE_S = 2.0
"""How long, after a first failure, reports of other ranks are awaited before all are ended."""


class WorkerPool:
    """`size` local CPU processes joined by gloo, which run functions one after the other.

    Processes start at the first call and stay, so later calls do not pay for importing torch. When
    a call fails on a rank, all processes are ended and the next call starts fresh ones. A rank that
    waits for another that will not come gives up after `timeout_s`.
    """

    def __init__(self, size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Operating system ids of the running processes, by rank."""
        return tuple(process.pid or 0 for process in self._processes)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(*args)` on every rank; the results by rank.

        `fn` is a module-level function; arguments and results are pickled. Raises RuntimeFailure
        with the traceback of the rank that failed first, within `GRACE_S` and a few seconds of it.
        """
        if not self._processes:
            self._start()
        name, reports = FunctionName.of(fn), {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((name, args))
            except OSError:
                reports[rank] = self._died(rank)
        self._collect(reports)
        failure = _first_failure(list(reports.values()))
        if failure is not None or len(reports) < self.size:
            self._kill()
        if failure is not None:
            raise RuntimeFailure(f"rank {failure.rank} of {self.size} failed: {failure.error}")
        return [reports[rank].value for rank in range(self.size)]

    def close(self) -> None:
        """End the processes; they may be started again by a later `run`."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited; many ranks share the cores
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                args = (rank, self.size, self._store.port, self.timeout_s, theirs)
                process = context.Process(target=serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before

    def _collect(self, reports: dict[int, Report]) -> None:
        """Gather reports until all have come, or the grace after a first failure has passed."""
        deadline: float | None = None
        while len(reports) < self.size:
            if deadline is None and any(report.error for report in reports.values()):
                deadline = time.monotonic() + GRACE_S
            pending = {self._pipes[r]: r for r in range(self.size) if r not in reports}
            left = None if deadline is None else deadline - time.monotonic()
            ready = wait(list(pending), left) if left is None or left > 0 else []
            if not ready:
                return
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    reports[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    reports[rank] = self._died(rank)

    def _died(self, rank: int) -> Report:
        process = self._processes[rank]
        process.join(1.0)
        error = f"the process ended without a report (exit code {process.exitcode})"
        # It died before any other rank could notice.
        return Report(rank=rank, at_s=float("-inf"), error=error)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None


def _first_failure(reports: Sequence[Report]) -> Report | None:
    return min((r for r in reports if r.error), key=lambda r: r.at_s, default=None)


def launch(
    fn: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run `fn(*args)` once on `nproc` local gloo processes; the results by rank.

    Raises RuntimeFailure with the traceback of the rank that failed first; the others are ended.
    """
    with WorkerPool(nproc, timeout_s=timeout_s) as pool:
        return pool.run(fn, *args)


def started_by_torchrun() -> bool:
    """Whether the environment describes this process as one rank of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def init_from_env(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> torch.device:
    """Join the process group that torchrun described in the environment; this process's device.

    NCCL with one GPU per process where there are GPUs, else gloo. A rank that waits for another
    that will not come gives up after `timeout_s`. Raises InputError outside torchrun.
    """
    missing = [key for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if key not in os.environ]
    if missing:
        raise InputError(
            f"{', '.join(missing)} not set: start with `torchrun --nproc-per-node=N ...`, or use "
            f"a local cluster (local:N)"
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return device
