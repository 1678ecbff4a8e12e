"""Moving a value from one placement to another on one axis: a function per row of `TRANSITIONS`.

Each runs exactly the collectives that its row lists, forward and backward, and gives the gradient
in the placement that `ir.placement` pairs with the value's. Over an axis of one rank all are the
identity. `dim` is the tensor dim cut, `size` its extent before this axis cuts it, `pieces` those of
the placement `S(dim:pieces)`. Where two axes cut the same dim only the inner one, which cut last,
may be undone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime import primitives, shards
from autopar.runtime.axes import AxisGroup
from autopar.runtime.gather import gather_weight, prefetch
from autopar.runtime.linear_map import Map, linear_map
from autopar.runtime.shards import Pieces

__all__ = [
    "exchange",
    "gather",
    "gather_sum_gradient",
    "gather_weight",
    "keep_on_first",
    "prefetch",
    "sum_and_scatter",
    "sum_gradient",
    "sum_partial",
    "sum_partial_and_gradient",
    "take_shard",
    "take_shard_of_partial",
]


def _apply(x: Tensor, axis: AxisGroup, run: Map, transpose: Map) -> Tensor:
    return x if axis.size == 1 else linear_map(x, run, transpose)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce(axis: AxisGroup, *, backward: bool) -> Map:
    return lambda x: primitives.all_reduce(x, axis, backward=backward)


def _take(axis: AxisGroup, dim: int, pieces: Pieces) -> Map:
    # A copy: a view would keep the whole tensor alive until the backward.
    return lambda x: shards.take(x, dim, pieces, axis.size, axis.rank).clone()


def _place(axis: AxisGroup, dim: int, size: int, pieces: Pieces) -> Map:
    return lambda x: shards.place(x, dim, size, pieces, axis.size, axis.rank)


def _all_gather(axis: AxisGroup, dim: int, size: int, pieces: Pieces, *, backward: bool) -> Map:
    sizes = shards.sizes(size, pieces, axis.size)

    def run(x: Tensor) -> Tensor:
        stacked = primitives.all_gather(x, axis, dim, sizes, backward=backward)
        return shards.join_stacked(stacked, dim, size, pieces)

    return run


def _reduce_scatter(axis: AxisGroup, dim: int, pieces: Pieces, *, backward: bool) -> Map:
    return lambda x: primitives.reduce_scatter(
        shards.split(x, dim, pieces, axis.size), axis, dim, backward=backward
    )


def sum_gradient(x: Tensor, axis: AxisGroup) -> Tensor:
    """R to R*: nothing forward; the gradient, partial on each rank, is summed backward."""
    return _apply(x, axis, _same, _all_reduce(axis, backward=True))


def take_shard(x: Tensor, axis: AxisGroup, dim: int, pieces: Pieces = ()) -> Tensor:
    """R to S: this rank's shard; the shards' gradients are gathered backward."""
    dim %= x.dim()
    back = _all_gather(axis, dim, x.shape[dim], pieces, backward=True)
    return _apply(x, axis, _take(axis, dim, pieces), back)


def keep_on_first(x: Tensor, axis: AxisGroup) -> Tensor:
    """R to P: the value on the first rank, zero on the others; the gradient is the same on all."""
    return _apply(x, axis, _same if axis.rank == 0 else torch.zeros_like, _same)


def take_shard_of_partial(x: Tensor, axis: AxisGroup, dim: int, pieces: Pieces = ()) -> Tensor:
    """R* to S: this rank's shard; its gradient is the rank's summand, zero outside the shard."""
    dim %= x.dim()
    return _apply(x, axis, _take(axis, dim, pieces), _place(axis, dim, x.shape[dim], pieces))


def gather(x: Tensor, axis: AxisGroup, dim: int, size: int, pieces: Pieces = ()) -> Tensor:
    """S to R: all shards together; each rank takes its part of the gradient, the same on all."""
    dim %= x.dim()
    run = _all_gather(axis, dim, size, pieces, backward=False)
    return _apply(x, axis, run, _take(axis, dim, pieces))


def gather_sum_gradient(
    x: Tensor, axis: AxisGroup, dim: int, size: int, pieces: Pieces = ()
) -> Tensor:
    """S to R*: all shards together; gradients, partial on each rank, are summed and scattered."""
    dim %= x.dim()
    run = _all_gather(axis, dim, size, pieces, backward=False)
    return _apply(x, axis, run, _reduce_scatter(axis, dim, pieces, backward=True))


def exchange(
    x: Tensor,
    axis: AxisGroup,
    src_dim: int,
    dst_dim: int,
    src_size: int,
    src_pieces: Pieces = (),
    dst_pieces: Pieces = (),
) -> Tensor:
    """S to S: from shards of `src_dim` (whole: `src_size`) to shards of `dst_dim`.

    One dim may be cut anew, in other pieces.
    """
    src_dim, dst_dim = src_dim % x.dim(), dst_dim % x.dim()
    # One rank's buffer as the plan counts it, in both directions: the largest one before the move.
    share = shards.sizes(src_size, src_pieces, axis.size)
    nbytes = x.element_size() * share[0]
    for dim, extent in enumerate(x.shape):
        nbytes *= 1 if dim == src_dim else extent
    src, dst = (src_dim, src_size, src_pieces), (dst_dim, x.shape[dst_dim], dst_pieces)
    if src_dim == dst_dim:
        src, dst = (src_dim, src_size, src_pieces), (src_dim, src_size, dst_pieces)
        move = _recut
    else:
        move = _swap
    return _apply(
        x,
        axis,
        lambda value: move(value, axis, src, dst, nbytes=nbytes, backward=False),
        lambda grad: move(grad, axis, dst, src, nbytes=nbytes, backward=True),
    )


_Cut = tuple[int, int, Pieces]
"""A dim, its whole extent, and the pieces it is cut in."""


def _swap(
    x: Tensor, axis: AxisGroup, src: _Cut, dst: _Cut, *, nbytes: int, backward: bool
) -> Tensor:
    """All-to-all between two dims."""
    (src_dim, src_size, src_pieces), (dst_dim, _, dst_pieces) = src, dst
    parts = shards.split(x, dst_dim, dst_pieces, axis.size)
    shape, shapes = list(parts[axis.rank].shape), []
    for extent in shards.sizes(src_size, src_pieces, axis.size):
        shape[src_dim] = extent
        shapes.append(tuple(shape))
    received = primitives.all_to_all(parts, axis, shapes, nbytes=nbytes, backward=backward)
    return shards.join(received, src_dim, src_size, src_pieces)


def _recut(
    x: Tensor, axis: AxisGroup, src: _Cut, dst: _Cut, *, nbytes: int, backward: bool
) -> Tensor:
    """All-to-all within one dim, between two ways of cutting it in pieces."""
    (dim, size, src_pieces), (_, _, dst_pieces) = src, dst
    held = [shards.positions(size, src_pieces, axis.size, rank) for rank in range(axis.size)]
    wanted = [shards.positions(size, dst_pieces, axis.size, rank) for rank in range(axis.size)]
    place = torch.full((size,), -1)
    place[wanted[axis.rank]] = torch.arange(len(wanted[axis.rank]))
    parts = [
        x.index_select(dim, torch.isin(held[axis.rank], want).nonzero()[:, 0].to(x.device))
        for want in wanted
    ]
    targets = [place[held_there][place[held_there] >= 0] for held_there in held]
    shape, shapes = list(x.shape), []
    for target in targets:
        shape[dim] = len(target)
        shapes.append(tuple(shape))
    received = primitives.all_to_all(parts, axis, shapes, nbytes=nbytes, backward=backward)
    shape[dim] = len(wanted[axis.rank])
    result = x.new_empty(shape)
    for target, part in zip(targets, received, strict=True):
        result.index_copy_(dim, target.to(x.device), part)
    return result


def samples_to_shards(
    x: Tensor, axis: AxisGroup, samples_dim: int, dim: int, shares: Sequence[int]
) -> Tensor:
    """S to S on an axis that splits samples: from this rank's samples of all of `dim` to its shard
    of `dim` for the samples of all ranks, whose extents of `samples_dim` are `shares`."""
    size = x.shape[dim]
    return _apply(
        x,
        axis,
        lambda value: _spread(value, axis, samples_dim, dim, shares, backward=False),
        lambda grad: _collect(grad, axis, samples_dim, dim, size, shares, backward=True),
    )


def shards_to_samples(
    x: Tensor, axis: AxisGroup, samples_dim: int, dim: int, size: int, shares: Sequence[int]
) -> Tensor:
    """The way back from `samples_to_shards`; `size` is the whole extent of `dim`."""
    return _apply(
        x,
        axis,
        lambda value: _collect(value, axis, samples_dim, dim, size, shares, backward=False),
        lambda grad: _spread(grad, axis, samples_dim, dim, shares, backward=True),
    )


def _spread(
    x: Tensor, axis: AxisGroup, samples_dim: int, dim: int, shares: Sequence[int], *, backward: bool
) -> Tensor:
    parts = shards.split(x, dim, (), axis.size)
    shape, shapes = list(parts[axis.rank].shape), []
    for share in shares:
        shape[samples_dim] = share
        shapes.append(tuple(shape))
    received = primitives.all_to_all(
        parts, axis, shapes, nbytes=x.nbytes, backward=backward, always=True
    )
    return torch.cat(received, samples_dim)


def _collect(
    x: Tensor,
    axis: AxisGroup,
    samples_dim: int,
    dim: int,
    size: int,
    shares: Sequence[int],
    *,
    backward: bool,
) -> Tensor:
    shape, shapes = list(x.shape), []
    shape[samples_dim], nbytes = shares[axis.rank], x.element_size()
    for extent in shards.sizes(size, (), axis.size):
        shape[dim] = extent
        shapes.append(tuple(shape))
    shape[dim] = size
    for extent in shape:
        nbytes *= extent
    received = primitives.all_to_all(
        x.split(list(shares), samples_dim),
        axis,
        shapes,
        nbytes=nbytes,
        backward=backward,
        always=True,
    )
    return torch.cat(received, dim)


def sum_partial(x: Tensor, axis: AxisGroup) -> Tensor:
    """P to R: the sum of the summands; its gradient is every summand's."""
    return _apply(x, axis, _all_reduce(axis, backward=False), _same)


def sum_partial_and_gradient(x: Tensor, axis: AxisGroup) -> Tensor:
    """P to R*: the sum of the summands; its gradients, partial on each rank, are summed too."""
    run, back = _all_reduce(axis, backward=False), _all_reduce(axis, backward=True)
    return _apply(x, axis, run, back)


def sum_and_scatter(x: Tensor, axis: AxisGroup, dim: int, pieces: Pieces = ()) -> Tensor:
    """P to S: this rank's shard of the sum; the shards' gradients are gathered backward."""
    dim %= x.dim()
    back = _all_gather(axis, dim, x.shape[dim], pieces, backward=True)
    return _apply(x, axis, _reduce_scatter(axis, dim, pieces, backward=False), back)
