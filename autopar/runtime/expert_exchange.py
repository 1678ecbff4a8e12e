"""Dropless experts that are split over an axis: rows travel to their experts and back.

Each rank along the axis holds consecutive experts. `held` has one line per rank that slots are
from, one column per expert of this rank. How many rows travel follows from the routing alone, and
every rank takes part in every exchange, with no row if need be. The bytes noted are those of this
rank's own rows, which do not depend on the routing, and of the counts, which every rank sends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.placement import chunk_sizes
from autopar.runtime import primitives
from autopar.runtime.axes import AxisGroup
from autopar.runtime.experts import route
from autopar.runtime.linear_map import linear_map


def route_exchange(chosen: Tensor, experts: int, axis: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """`order` and `counts` of this rank's choices; `held` (ranks, own experts)."""
    order, counts, _ = route(chosen, experts)
    owned = chunk_sizes(experts, axis.size)
    received = primitives.all_to_all(
        counts.split(list(owned)),
        axis,
        [(owned[axis.rank],)] * axis.size,
        nbytes=counts.nbytes,
    )
    return order, counts, torch.stack(received)


def to_experts_exchange(
    rows: Tensor, order: Tensor, counts: Tensor, held: Tensor, axis: AxisGroup, times: int = 1
) -> Tensor:
    """Rows sorted by expert, sent to the ranks of their experts; the slots of this rank's experts.

    Each row is sent `times` times: once for every choice of its token.
    """
    own = rows.index_select(0, order if times == 1 else order // times)
    return linear_map(
        own,
        lambda rows: _send(rows, counts, held, axis, backward=False),
        lambda grad: _return(grad, counts, held, axis, backward=True),
    )


def from_experts_exchange(
    slots: Tensor, order: Tensor, counts: Tensor, held: Tensor, axis: AxisGroup
) -> Tensor:
    """Slots sent back to the ranks their rows came from, in the order of the choices."""
    own = linear_map(
        slots,
        lambda rows: _return(rows, counts, held, axis, backward=False),
        lambda grad: _send(grad, counts, held, axis, backward=True),
    )
    return torch.empty_like(own).index_copy(0, order, own)


def _by_rank(counts: Tensor, axis: AxisGroup) -> list[int]:
    """How many of this rank's rows go to each rank."""
    owned = counts.split(list(chunk_sizes(counts.shape[0], axis.size)))
    return torch.stack([part.sum() for part in owned]).tolist()


def _by_expert(held: Tensor) -> Tensor:
    """Places, in the rows as received rank by rank, of the slots expert by expert."""
    ranks, experts = held.shape
    expert = torch.arange(experts, device=held.device).repeat(ranks)
    return expert.repeat_interleave(held.flatten()).argsort(stable=True)


def _send(own: Tensor, counts: Tensor, held: Tensor, axis: AxisGroup, *, backward: bool) -> Tensor:
    shapes = [(count, *own.shape[1:]) for count in held.sum(1).tolist()]
    parts = own.split(_by_rank(counts, axis))
    received = primitives.all_to_all(
        parts, axis, shapes, nbytes=own.nbytes, backward=backward, always=True
    )
    return torch.cat(received).index_select(0, _by_expert(held))


def _return(
    slots: Tensor, counts: Tensor, held: Tensor, axis: AxisGroup, *, backward: bool
) -> Tensor:
    by_rank = torch.empty_like(slots).index_copy_(0, _by_expert(held), slots)
    parts = by_rank.split(held.sum(1).tolist())
    shapes = [(count, *slots.shape[1:]) for count in _by_rank(counts, axis)]
    own = sum(shape[0] for shape in shapes)
    nbytes = own * slots[:0].new_empty((1, *slots.shape[1:])).nbytes
    received = primitives.all_to_all(
        parts, axis, shapes, nbytes=nbytes, backward=backward, always=True
    )
    return torch.cat(received)


__all__ = ["from_experts_exchange", "route_exchange", "to_experts_exchange"]
