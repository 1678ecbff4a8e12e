"""The only place that calls collectives of `torch.distributed`.

Each function runs one collective over an `AxisGroup` and notes it in the group's recorder, with the
bytes of the whole tensor as `ir.collective.Collective` counts them. Over one rank nothing happens.
A tensor without elements (the same on all ranks of the group, by construction) is not sent either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ir.collective import CollectiveOp
from autopar.runtime.axes import AxisGroup

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def _wire(x: Tensor) -> Tensor:
    """A real view of the same memory: gloo does not know complex numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


def _flat(x: Tensor) -> Tensor:
    return _wire(x).view(-1)


def all_reduce_(
    x: Tensor, axis: AxisGroup, *, reduction: str = "sum", backward: bool = False
) -> Tensor:
    """Sum (or take the maximum of) a contiguous tensor over the axis, in place."""
    if axis.group is not None and x.numel():
        axis.recorder.note(CollectiveOp.ALL_REDUCE, x.nbytes, axis.axes, backward=backward)
        dist.all_reduce(_wire(x), op=_REDUCTIONS[reduction], group=axis.group)
    return x


def all_reduce(
    x: Tensor, axis: AxisGroup, *, reduction: str = "sum", backward: bool = False
) -> Tensor:
    """The sum (or maximum) of `x` over the axis, as a new tensor."""
    if axis.group is None:
        return x
    fresh = x.detach().clone(memory_format=torch.contiguous_format)
    return all_reduce_(fresh, axis, reduction=reduction, backward=backward)


def all_gather(
    x: Tensor, axis: AxisGroup, dim: int, sizes: Sequence[int], *, backward: bool = False
) -> Tensor:
    """The shards of all ranks, stacked in a new first dim.

    `sizes` are the extents of `dim` on the ranks; shorter shards are padded at the end, since gloo
    and NCCL gather equal parts only.
    """
    return start_all_gather(x, axis, dim, sizes, backward=backward)()


def start_all_gather(
    x: Tensor, axis: AxisGroup, dim: int, sizes: Sequence[int], *, backward: bool = False
) -> Callable[[], Tensor]:
    """Begin `all_gather`; the function that is returned waits for its result."""
    own, work = _padded(x.detach(), dim, max(sizes)), None
    if axis.group is None:
        return lambda: own.unsqueeze(0)
    flat = own.new_empty(axis.size * own.numel())
    if own.numel():
        nbytes = own.nbytes // max(sizes) * sum(sizes)
        axis.recorder.note(CollectiveOp.ALL_GATHER, nbytes, axis.axes, backward=backward)
        work = dist.all_gather_single(_flat(flat), _flat(own), group=axis.group, async_op=True)

    def finish(sent: Tensor = own) -> Tensor:  # what is sent must live until it is
        if work is not None:
            work.wait()
        return flat.view(axis.size, *sent.shape)

    return finish


def reduce_scatter(
    parts: Sequence[Tensor], axis: AxisGroup, dim: int, *, backward: bool = False
) -> Tensor:
    """The sum over the ranks of their `parts[rank]`, which may differ in their extent of `dim`."""
    return start_reduce_scatter(parts, axis, dim, backward=backward)()


def start_reduce_scatter(
    parts: Sequence[Tensor], axis: AxisGroup, dim: int, *, backward: bool = False
) -> Callable[[], Tensor]:
    """Begin `reduce_scatter`; the function that is returned waits for its result."""
    if axis.group is None:
        own = parts[0]
        return lambda: own
    sizes = [part.shape[dim] for part in parts]
    stacked = torch.stack([_padded(part.detach(), dim, max(sizes)) for part in parts])
    return _start_reduce(stacked, sizes, axis, dim, backward=backward)


def start_reduce_rows(rows: Tensor, counts: Sequence[int], axis: AxisGroup) -> Callable[[], Tensor]:
    """`start_reduce_scatter` of flat parts that lie as rows of one buffer, padded to one length."""
    if axis.group is None:
        return lambda: rows[0]
    return _start_reduce(rows, counts, axis, 0)


def _start_reduce(
    stacked: Tensor, sizes: Sequence[int], axis: AxisGroup, dim: int, *, backward: bool = False
) -> Callable[[], Tensor]:
    own, work = torch.empty_like(stacked[0]), None
    if own.numel():
        nbytes = own.nbytes // max(sizes) * sum(sizes)
        axis.recorder.note(CollectiveOp.REDUCE_SCATTER, nbytes, axis.axes, backward=backward)
        work = dist.reduce_scatter_single(
            _flat(own), _flat(stacked), group=axis.group, async_op=True
        )
    result = own.narrow(dim, 0, sizes[axis.rank])

    def finish(sent: Tensor = stacked) -> Tensor:  # what is sent must live until it is
        if work is not None:
            work.wait()
        return result

    return finish


def all_to_all(
    parts: Sequence[Tensor],
    axis: AxisGroup,
    shapes: Sequence[Sequence[int]],
    *,
    nbytes: int,
    backward: bool = False,
    always: bool = False,
) -> list[Tensor]:
    """Send `parts[r]` to rank `r`; what each rank sent here, in the given shapes.

    `nbytes` is one rank's buffer as the plan counts it. Where there may be nothing on some ranks
    only, `always` makes all take part; a rank without a byte of its own notes nothing.
    """
    if axis.group is None:
        return list(parts)
    sent = torch.cat([part.detach().reshape(-1) for part in parts])
    counts = [prod(shape) for shape in shapes]
    received = sent.new_empty(sum(counts))
    if nbytes:
        axis.recorder.note(CollectiveOp.ALL_TO_ALL, nbytes, axis.axes, backward=backward)
    if nbytes or always:
        scale = 2 if sent.is_complex() else 1
        dist.all_to_all_single(
            _flat(received),
            _flat(sent),
            [count * scale for count in counts],
            [part.numel() * scale for part in parts],
            group=axis.group,
        )
    flat = received.split(counts)
    return [part.view(tuple(shape)) for part, shape in zip(flat, shapes, strict=True)]


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """`x`, contiguous, with zeros appended to `dim` up to `size`."""
    if x.shape[dim] == size:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


Arriving = Callable[[], list[Tensor]]
"""Waits for messages under way and gives what arrived."""


def pass_on(tensors: Sequence[Tensor], axis: AxisGroup, *, backward: bool = False) -> Arriving:
    """Send tensors to the next rank of the axis, and take those of the rank before, of the same
    shapes, all at once; the first rank follows the last."""
    if axis.group is None:
        return lambda: list(tensors)
    sent = [x.detach().contiguous() for x in tensors]
    taken = [torch.empty_like(x) for x in sent]
    ahead, behind = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
    ops = []
    for out, into in zip(sent, taken, strict=True):
        axis.recorder.note(CollectiveOp.SEND_RECV, out.nbytes, axis.axes, backward=backward)
        ops.append(dist.P2POp(dist.isend, _wire(out), ahead, group=axis.group))
        ops.append(dist.P2POp(dist.irecv, _wire(into), behind, group=axis.group))
    works = dist.batch_isend_irecv(ops)

    def arrive() -> list[Tensor]:
        for work in works:
            work.wait()
        del sent[:]
        return taken

    return arrive
