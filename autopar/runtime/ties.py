"""Gradients of a parameter on several stages, summed where their meshes differ.

Every stage has the whole gradient of its own blocks, laid out over its ranks. Each rank is sent, of
every other stage, its part; it adds them up in the order of the stages, so that all copies of an
element stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch.distributed as dist
from torch import Tensor

from autopar.ir.collective import CollectiveOp
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import Layout
from autopar.plan.handover import Box, extent, local, messages, weight_boxes
from autopar.runtime.axes import AxisGroup, World
from autopar.runtime.handover import cut, put


def sum_between(
    grad: Tensor,
    layouts: Mapping[int, tuple[tuple[int, ...], Layout]],
    world: World,
    tie: AxisGroup,
) -> Tensor:
    """The sum over the stages of their gradients, of which `grad` is this rank's part of its own.

    `layouts` has the whole shape and the layout on every stage. All ranks of `tie` must call.
    """
    first: dict[tuple[int, ...], int] = {}
    for stage in layouts:
        first.setdefault(world.meshes[stage].ranks, stage)
    (own,) = (stage for ranks, stage in first.items() if world.rank in ranks)
    held = {stage: _boxes(*layouts[stage], world, stage) for stage in first.values()}
    others = [stage for stage in held if stage != own]
    sending = [send for other in others for send in _sends(grad, held, own, other, world, tie)]
    pieces = {other: _pieces(grad, held, own, other, world, tie) for other in others}
    receiving = [op for op, _ in chain.from_iterable(pieces.values())]
    # All at once: two ranks that first sent to each other might wait for each other.
    works = dist.batch_isend_irecv([*sending, *receiving]) if sending or receiving else []
    for work in works:
        work.wait()
    total: Tensor | None = None
    for stage in sorted(held):
        part = grad
        if stage != own:
            part = grad.new_empty(grad.shape)
            for op, box in pieces[stage]:
                put(part, box, op.tensor)
        total = part.clone() if total is None else total.add_(part)
    assert total is not None
    return total


def _boxes(shape: tuple[int, ...], layout: Layout, world: World, stage: int) -> tuple[Box, ...]:
    mesh = world.meshes[stage]
    axes = [MeshAxis(name=n, size=s) for n, s in zip(mesh.names, mesh.sizes, strict=True)]
    return weight_boxes(shape, layout, axes)


_Held = Mapping[int, tuple[Box, ...]]


def _sends(
    grad: Tensor, held: _Held, own: int, other: int, world: World, tie: AxisGroup
) -> Iterator[dist.P2POp]:
    """What the ranks of another stage want of this rank's part."""
    here = world.position(own)
    for message in messages(held[own], held[other]):
        if message.sender == here:
            piece = cut(grad, local(message.box, held[own][here])).contiguous()
            tie.recorder.note(CollectiveOp.SEND_RECV, piece.nbytes, tie.axes, backward=False)
            to = world.meshes[other].ranks[message.receiver]
            yield dist.P2POp(dist.isend, piece, to, group=tie.group)


def _pieces(
    like: Tensor, held: _Held, own: int, other: int, world: World, tie: AxisGroup
) -> list[tuple[dist.P2POp, Box]]:
    """This rank's part of another stage's gradient, with where each piece of it belongs."""
    here, found = world.position(own), []
    for message in messages(held[other], held[own]):
        if message.receiver == here:
            piece = like.new_empty(tuple(map(extent, message.box)))
            source = world.meshes[other].ranks[message.sender]
            op = dist.P2POp(dist.irecv, piece, source, group=tie.group)
            found.append((op, local(message.box, held[own][here])))
    return found
