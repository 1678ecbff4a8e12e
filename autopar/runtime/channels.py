"""Tensors between neighbouring stages.

Sends are asynchronous: they never wait for the receiver, and keep the buffer alive until it is
sent. Shapes are known on both sides, so nothing but data travels. Forward values and gradients have
groups of their own, so that neither can hold up the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.collective import CollectiveOp
from autopar.runtime.axes import BACKWARD, FORWARD, World

AXES = ("pipeline",)
"""The axes that a send is noted with."""


class Channels:
    """The messages of one run of an action list on this rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._arriving: dict[tuple[int, str, int], list[tuple[dist.Work | None, Tensor]]] = {}

    def send(self, stage: int, direction: str, tensors: Sequence[Tensor]) -> None:
        """Send values of `stage` to the next stage, or gradients to the one before."""
        other, group = self._other_end(stage, direction, sending=True)
        self._reap()
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                self._world.recorder.note(
                    CollectiveOp.SEND_RECV, whole.nbytes, AXES, backward=direction == BACKWARD
                )
                work = dist.isend(_wire(whole), other, group=group)
                assert work is not None
                self._sent.append((work, whole))

    def post(
        self,
        stage: int,
        direction: str,
        micro_batch: int,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ) -> None:
        """Start receiving what `stage` is sent: values, or gradients, in the given shapes."""
        other, group = self._other_end(stage, direction, sending=False)
        arriving = self._arriving.setdefault((stage, direction, micro_batch), [])
        for shape, dtype in shapes:
            buffer = torch.empty(shape, dtype=dtype, device=self._world.device)
            # Nothing is sent of a tensor without elements.
            work = dist.irecv(_wire(buffer), other, group=group) if buffer.numel() else None
            arriving.append((work, buffer))

    def take(self, stage: int, direction: str, micro_batch: int) -> list[Tensor]:
        """What was received; waits for it."""
        arrived = []
        for work, buffer in self._arriving.pop((stage, direction, micro_batch)):
            if work is not None:
                work.wait()
            arrived.append(buffer)
        return arrived

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _reap(self) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()

    def _other_end(
        self, stage: int, direction: str, *, sending: bool
    ) -> tuple[int, dist.ProcessGroup]:
        downstream = (direction == FORWARD) == sending
        other = stage + 1 if downstream else stage - 1
        return self._world.peer(stage, other), self._world.channels[min(stage, other), direction]


def _wire(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
