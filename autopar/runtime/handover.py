"""The values between stages, cut for the ranks that they go to and put together from those they
come from: `plan.handover` on tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, product

import torch
from torch import Tensor

from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import R
from autopar.plan.handover import Box, Message, Ranges, boxes, local, messages
from autopar.runtime.axes import Mesh, World
from autopar.runtime.program import BoundarySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What of this rank's tensor goes to, or comes from, another rank."""

    rank: int
    box: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """A value that is to come: this rank's shape of it, and its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


@dataclass(kw_only=True, slots=True)
class Handovers:
    """The messages of this rank between neighbouring stages; every distinct one is worked out once.

    `samples` are those of the whole micro-batch.
    """

    world: World
    _known: dict[object, tuple[Part, ...]] = field(default_factory=dict)

    def outgoing(
        self, spec: BoundarySpec, stage: int, other: int, samples: int
    ) -> tuple[Part, ...]:
        """What a stage of this rank sends of a value, or of its gradient, to another stage."""
        return self._parts(spec, stage, other, samples, sends=True)

    def incoming(
        self, spec: BoundarySpec, stage: int, other: int, samples: int
    ) -> tuple[Part, ...]:
        """What a stage of this rank is sent of it."""
        return self._parts(spec, stage, other, samples, sends=False)

    def _parts(
        self, spec: BoundarySpec, stage: int, other: int, samples: int, *, sends: bool
    ) -> tuple[Part, ...]:
        key = (spec.shape, spec.layout, stage, other, samples, sends)
        if key not in self._known:
            mine, theirs = (self.world.meshes[index] for index in (stage, other))
            position = self.world.position(stage)
            held, far = _boxes(spec, samples, mine), _boxes(spec, samples, theirs)
            found = messages(held, far) if sends else messages(far, held)
            self._known[key] = tuple(
                Part(rank=theirs.ranks[there], box=local(message.box, held[position]))
                for message in found
                for here, there in (_ends(message, sends),)
                if here == position
            )
        return self._known[key]


def _ends(message: Message, sends: bool) -> tuple[int, int]:
    """This end of a message, and the other."""
    ends = message.sender, message.receiver
    return ends if sends else ends[::-1]


def _boxes(spec: BoundarySpec, samples: int, mesh: Mesh) -> tuple[Box, ...]:
    split = dict(spec.layout)
    axes = [MeshAxis(name=n, size=s) for n, s in zip(mesh.names, mesh.sizes, strict=True)]
    layout = tuple(split.get(name, R) for name in mesh.names)
    return boxes(spec.shape, samples, layout, axes)


def is_one_range(box: Box) -> bool:
    """Whether a box is one range of every dim, so that it can be seen without a copy."""
    return all(len(ranges) == 1 for ranges in box)


def cut(x: Tensor, box: Box) -> Tensor:
    """What of a tensor is in a box: a view where it is one range of every dim."""
    for dim, ranges in enumerate(box):
        if len(ranges) == 1:
            x = x.narrow(dim, *ranges[0])
        else:
            x = torch.cat([x.narrow(dim, start, length) for start, length in ranges], dim)
    return x


def put(whole: Tensor, box: Box, part: Tensor) -> None:
    """Write what `cut` gives into its place."""
    for ranges in product(*map(_moves, box)):
        there, here = whole, part
        for dim, (start, passed, length) in enumerate(ranges):
            there = there.narrow(dim, start, length)
            here = here.narrow(dim, passed, length)
        there.copy_(here)


def _moves(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Ranges with where each begins in what is cut out of a dim."""
    before = accumulate((length for _, length in ranges), initial=0)
    return [(start, passed, n) for (start, n), passed in zip(ranges, before, strict=False)]
