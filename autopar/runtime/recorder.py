"""Notes every communication that a program does, in the words a plan uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.ir.collective import Collective, CollectiveOp


class Recorder:
    """What one process communicated, in order. Notes nothing until `start` is called.

    The executor sets `phase` to `setup`, `forward`, `backward` or `sync`; reductions of gradients
    are `sync` whenever they run, and weights are gathered in `update`. A forward collective that
    runs during a backward action belongs to a recomputed forward and is noted as `recompute`.
    Sends are noted on the sending rank only.
    """

    def __init__(self) -> None:
        self.phase = "forward"
        self._events: list[Collective] | None = None

    def start(self) -> None:
        """Begin noting, forgetting what was noted before."""
        self._events = []

    def stop(self) -> tuple[Collective, ...]:
        """End noting; the collectives since `start`, in the order they were begun."""
        events, self._events = self._events, None
        return tuple(events or ())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Note what is done inside under another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def note(
        self, op: CollectiveOp, nbytes: int, axes: tuple[str, ...], *, backward: bool = False
    ) -> None:
        """Note one collective; `backward` tells that autograd's backward runs it."""
        if self._events is None:
            return
        recomputed = self.phase == "backward"
        phase = "backward" if backward else "recompute" if recomputed else self.phase
        self._events.append(Collective(op=op, nbytes=nbytes, axes=axes, phase=phase))
