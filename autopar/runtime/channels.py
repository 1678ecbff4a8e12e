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
from autopar.plan.handover import Box, extent
from autopar.runtime.axes import BACKWARD, FORWARD, World
from autopar.runtime.handover import Awaited, Part, cut, is_one_range, put
from autopar.schedules.action import Action, ActionKind

AXES = ("pipeline",)
"""The axes that a send is noted with."""


Arrived = Callable[[Action], Sequence[Action]]

_RECEIVES = {FORWARD: ActionKind.RECV_FORWARD, BACKWARD: ActionKind.RECV_BACKWARD}


_Coming = tuple[Tensor, list[tuple[dist.Work | None, Box, Tensor | None]]]
"""A value, and the messages that make it: those that do not arrive in its memory have their own."""


class Channels:
    """The messages of one run of an action list on this rank.

    `arrived(receive)` are the sends that have arrived once a receive is done.
    """

    def __init__(self, world: World, arrived: Arrived) -> None:
        self._world, self._arrived = world, arrived
        self._sent: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        self._arriving: dict[tuple[int, str, int], list[_Coming]] = {}

    def send(
        self,
        action: Action,
        direction: str,
        tensors: Sequence[Tensor],
        parts: Sequence[Sequence[Part]],
    ) -> None:
        """Send values of a stage to the next one, or gradients to the one before: of each its
        `parts`."""
        group = self._group(action.stage, direction, sending=True)
        self._reap()
        sent = self._sent.setdefault(action, [])
        for tensor, own in zip(tensors, parts, strict=True):
            cuts: dict[Box, Tensor] = {}
            for part in own:
                if part.box not in cuts:  # ranks that hold the same are sent the same memory
                    cuts[part.box] = cut(tensor.detach(), part.box).contiguous()
                piece = cuts[part.box]
                self._world.recorder.note(
                    CollectiveOp.SEND_RECV, piece.nbytes, AXES, backward=direction == BACKWARD
                )
                work = dist.isend(_wire(piece), part.rank, group=group)
                assert work is not None
                sent.append((work, piece))

    def post(
        self, stage: int, direction: str, micro_batch: int, awaited: Sequence[Awaited]
    ) -> None:
        """Start receiving what `stage` is sent: values, or gradients, part by part."""
        group = self._group(stage, direction, sending=False)
        arriving = self._arriving.setdefault((stage, direction, micro_batch), [])
        for value in awaited:
            whole = torch.empty(value.shape, dtype=value.dtype, device=self._world.device)
            coming = []
            for part in value.parts:
                place = cut(whole, part.box) if is_one_range(part.box) else None
                direct = place is not None and place.is_contiguous()
                shape = tuple(map(extent, part.box))
                buffer = place if place is not None and direct else whole.new_empty(shape)
                work = dist.irecv(_wire(buffer), part.rank, group=group)
                coming.append((work, part.box, None if direct else buffer))
            arriving.append((whole, coming))

    def take(self, stage: int, direction: str, micro_batch: int) -> list[Tensor]:
        """What was received; waits for it."""
        arrived = []
        for whole, coming in self._arriving.pop((stage, direction, micro_batch)):
            for work, box, buffer in coming:
                if work is not None:
                    work.wait()
                if buffer is not None:
                    put(whole, box, buffer)
            arrived.append(whole)
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

    def _group(self, stage: int, direction: str, *, sending: bool) -> dist.ProcessGroup:
        downstream = (direction == FORWARD) == sending
        return self._world.channels[stage if downstream else stage - 1, direction]


def _wire(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
