"""One pass of a micro-batch through the blocks of a stage: what compute waits for, and what runs
beside it.

Collectives inside a block hold up its compute. Weights that lie in shards are gathered one block
ahead, and gradients may be summed while the backward goes on, both on one communication stream in
the order in which the program starts them:

- forward: a block starts the gathering of the next one's weights, then runs; the first waits for
  its own;
- backward: where a block needs its weights it starts those of the nearest block before it that has
  any, and waits for its own;
- last backward of a step: at its end a block starts to sum its gradients, which waits for the sum
  started before.

What is on the stream advances while blocks compute, not while they run collectives of their own,
which take the same links; of the time beside compute a share of `1 - hidden` slows the compute.
Where nothing runs beside compute (devices whose communication takes the cores that compute) the
stream advances only while a block waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWork:
    """Seconds of one pass of a block: its ops, the collectives among them, the gathering of its
    weights before, and the sums of its gradients after."""

    compute_s: float
    collectives_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePass:
    """Seconds of one pass: `total_s` from its begin to its end, `waits_s` of it without compute,
    `beside_s` of communication beside compute, `left_s` that is still to run at its end."""

    total_s: float
    waits_s: float
    beside_s: float = 0.0
    left_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Whether communication runs beside compute, and the share of that which costs no time."""

    beside: bool = True
    hidden: float = 1.0


def forward_pass(blocks: Sequence[BlockWork], overlap: Overlap) -> StagePass:
    """A forward through blocks in the order they run."""
    clock = _Clock(overlap)
    if blocks:
        clock.start(0, blocks[0].gather_s)
    for index, block in enumerate(blocks):
        clock.wait_for(index)
        if index + 1 < len(blocks):
            clock.start(index + 1, blocks[index + 1].gather_s)
        clock.run(block)
    return clock.result()


def backward_pass(blocks: Sequence[BlockWork], overlap: Overlap) -> StagePass:
    """A backward through blocks given in the order of the forward."""
    clock = _Clock(overlap)
    gathered = [index for index, block in enumerate(blocks) if block.gather_s]
    if gathered:
        clock.start(gathered[-1], blocks[gathered[-1]].gather_s)
    summed: _Sum | None = None
    for index in reversed(range(len(blocks))):
        block = blocks[index]
        if gathered and gathered[-1] == index:
            gathered.pop()
            if gathered:
                clock.start(gathered[-1], blocks[gathered[-1]].gather_s)
            clock.wait_for(index)
        clock.run(block)
        if block.reduce_s:
            if summed is not None:
                clock.wait_for(summed)
            summed = _Sum(index)
            clock.start(summed, block.reduce_s)
    return clock.result()


@dataclass(frozen=True, slots=True)
class _Sum:
    """The key of a block's sum of gradients."""

    block: int


class _Clock:
    """The compute of a pass, and the communication stream beside it: what was started and has not
    run yet, first come first served."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap
        self._queue: deque[tuple[Hashable, float]] = deque()
        self._total_s = self._waits_s = self._beside_s = 0.0

    def start(self, key: Hashable, seconds: float) -> None:
        if seconds:
            self._queue.append((key, seconds))

    def wait_for(self, key: Hashable) -> None:
        """Let what was started run up to `key`, if it has not."""
        if any(key == other for other, _ in self._queue):
            while True:
                done, seconds = self._queue.popleft()
                self._wait(seconds)
                if done == key:
                    return

    def run(self, block: BlockWork) -> None:
        """A block's compute with its collectives."""
        self._total_s += block.compute_s
        self._wait(block.collectives_s)
        if self._overlap.beside:
            advanced_s = self._advance(block.compute_s)
            self._beside_s += advanced_s
            self._wait((1.0 - self._overlap.hidden) * advanced_s)

    def result(self) -> StagePass:
        return StagePass(
            total_s=self._total_s,
            waits_s=self._waits_s,
            beside_s=self._beside_s,
            left_s=sum(seconds for _, seconds in self._queue),
        )

    def _wait(self, seconds: float) -> None:
        self._total_s += seconds
        self._waits_s += seconds

    def _advance(self, seconds: float) -> float:
        """Let what was started run for so long; what of that it ran."""
        left_s = seconds
        while self._queue and left_s > 0:
            key, due_s = self._queue.popleft()
            if due_s > left_s:
                self._queue.appendleft((key, due_s - left_s))
            left_s -= min(due_s, left_s)
        return seconds - left_s
