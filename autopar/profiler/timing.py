"""Times of one op on the device at hand, forward and backward, on random tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch

from autopar.costs.local_op import LocalOp
from autopar.costs.profiles import OpRecord, Timing, rounded
from autopar.profiler.arguments import Arguments
from autopar.profiler.between import OtherOps
from autopar.runtime.allocator import keep_freed_memory

WARM_UP = 1
LEAST_RUNS, MOST_RUNS = 5, 100
ENOUGH_S = 0.05
"""An op is run `LEAST_RUNS` times, then until this much time or `MOST_RUNS` is spent on it."""

_FLUSHED_BYTES = 2**28
"""More than the cache of any GPU."""


class Clock(Protocol):
    """Times what runs on a device."""

    def seconds(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """What `run` returns, and the seconds it takes on the device."""
        ...


class HostClock:
    """The clock of this thread, for an op on one thread of a CPU.

    It stands still while other processes have the core, and is else the time that passes. Other ops
    run before each run, as in a step.
    """

    def __init__(self) -> None:
        keep_freed_memory()
        self._others = OtherOps()

    def seconds(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """The result, and seconds on the core."""
        self._others()
        started = time.thread_time()
        result = run()
        return result, time.thread_time() - started


class EventClock:
    """Events on the current CUDA stream.

    A buffer larger than the cache is cleared before each run: the op finds its inputs in memory, as
    between the others of a step, and by the time it starts the host has queued it, so that what
    the host takes to start a kernel does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)

    def seconds(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """The result, and seconds between the events."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._buffer.zero_()
        before.record()
        result = run()
        after.record()
        after.synchronize()
        return result, before.elapsed_time(after) * 1e-3


def clock_of(device: torch.device) -> Clock:
    """The clock for a device."""
    return EventClock(device) if device.type == "cuda" else HostClock()


def timing_of(seconds: Sequence[float], less_s: float = 0.0) -> Timing:
    """Median and median distance from it; `less_s` is no part of what was to be measured."""
    middle = median(seconds)
    return Timing(
        median_s=rounded(max(0.0, middle - less_s)),
        spread_s=rounded(median(abs(value - middle) for value in seconds)),
        count=len(seconds),
    )


@dataclass
class Stopwatch:
    """Measures ops one after the other on one device.

    What starting the autograd engine for one op takes is not the op's, and is subtracted from its
    backward.
    """

    device: torch.device
    clock: Clock = field(init=False)
    engine_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.clock = clock_of(self.device)
        leaf = torch.ones(1, device=self.device, requires_grad=True)
        self.engine_s = median(self._backward(leaf.view(1), [leaf]) for _ in range(20))

    def measure(self, op: LocalOp, limit_s: float) -> OpRecord:
        """The record of an op: with times, or with what it raised as the reason for none.

        After `limit_s` seconds it is not run again.
        """
        try:
            forward, backward = self._runs(op, limit_s)
        except Exception as error:  # whatever an op raises, it has no measured time
            text = str(error).strip().splitlines()
            return OpRecord.of(op, reason=f"{type(error).__name__}: {text[0] if text else ''}")
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return OpRecord.of(
            op, timing_of(forward), timing_of(backward, self.engine_s) if backward else None
        )

    def _runs(self, op: LocalOp, limit_s: float) -> tuple[list[float], list[float]]:
        """Seconds of every run of forward and of backward."""
        begun, arguments = time.perf_counter(), Arguments.of(op, self.device)
        forward: list[float] = []
        backward: list[float] = []
        started = time.perf_counter()
        for run in range(WARM_UP + MOST_RUNS):
            result, seconds = self.clock.seconds(arguments.call)
            forward.append(seconds)
            if op.requires_grad:
                backward.append(self._backward(result, arguments.inputs))
            del result
            if run == WARM_UP - 1:
                started = time.perf_counter()
            now = time.perf_counter()
            enough = run + 1 >= WARM_UP + LEAST_RUNS and now - started >= ENOUGH_S
            if enough or (run >= WARM_UP and now - begun >= limit_s):
                break
        return forward[WARM_UP:], backward[WARM_UP:]

    def _backward(self, result: Any, inputs: Sequence[torch.Tensor]) -> float:
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        outputs = [output for output in outputs if output.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = [torch.ones_like(output) for output in outputs]
        return self.clock.seconds(
            lambda: torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        )[1]
