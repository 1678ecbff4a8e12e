"""Tensors between neighbouring stages.

Sends are asynchronous: they never wait for the receiver, and keep the buffer alive until the
message is known to have arrived, from the backend or from what comes back (see
`schedules.arrivals`). Shapes are known on both sides, so nothing but data travels. Forward values
and gradients have groups of their own, so that neither can hold up the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.collective import CollectiveOp
from autopar.runtime.axes import BACKWARD, FORWARD, World
from autopar.schedules.action import Action, ActionKind

AXES = ("pipeline",)
"""The axes that a send is noted with."""


Arrived = Callable[[Action], Sequence[Action]]

_RECEIVES = {FORWARD: ActionKind.RECV_FORWARD, BACKWARD: ActionKind.RECV_BACKWARD}


class Channels:
    """The messages of one run of an action list on this rank.

    `arrived(receive)` are the sends that have arrived once a receive is done.
    """

    def __init__(self, world: World, arrived: Arrived) -> None:
        self._world, self._arrived = world, arrived
        self._sent: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        self._arriving: dict[tuple[int, str, int], list[tuple[dist.Work | None, Tensor]]] = {}

    def send(self, action: Action, direction: str, tensors: Sequence[Tensor]) -> None:
        """Send values of a stage to the next one, or gradients to the one before."""
        other, group = self._other_end(action.stage, direction, sending=True)
        self._reap()
        sent = self._sent.setdefault(action, [])
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                self._world.recorder.note(
                    CollectiveOp.SEND_RECV, whole.nbytes, AXES, backward=direction == BACKWARD
                )
                work = dist.isend(_wire(whole), other, group=group)
                assert work is not None
                sent.append((work, whole))

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
        kind = _RECEIVES[direction]
        for send in self._arrived(Action(kind, stage, micro_batch)):
            self._finish(send)
        return arrived

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for send in tuple(self._sent):
            self._finish(send)

    def _finish(self, send: Action) -> None:
        for work, _ in self._sent.pop(send, ()):
            work.wait()

    def _reap(self) -> None:
        for send, sent in tuple(self._sent.items()):
            if not all(work.is_completed() for work, _ in sent):
                return
            self._finish(send)

    def _other_end(
        self, stage: int, direction: str, *, sending: bool
    ) -> tuple[int, dist.ProcessGroup]:
        downstream = (direction == FORWARD) == sending
        other = stage + 1 if downstream else stage - 1
        return self._world.peer(stage, other), self._world.channels[min(stage, other), direction]


def _wire(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
