"""Ops that rearrange dims: views, permutations, expansion, splitting, stacking."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.rules.index_expr import IndexExpr, Op
from autopar.rules.letters import (
    FROZEN_ONE,
    GENERIC_BATCH,
    align,
    from_generic,
    match_factors,
    name_dims,
    sizes_of,
)
from autopar.rules.registry import register

_ONLY = (frozenset((0,)),)


@register(
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten",
    "aten.squeeze", "aten.unsqueeze", "aten.view_copy",
)  # fmt: skip
def _reshape(op: Op) -> IndexExpr:
    """The same elements in row-major order: letters are the common factors of both shapes."""
    source, target, sizes, blocked = match_factors(op.inputs[0].shape, op.outputs[0].shape)
    return IndexExpr(
        inputs=(source,), outputs=(target,), sizes=sizes, blocked=blocked, linear=_ONLY
    )


@register("aten.view.dtype")
def _reinterpret(op: Op) -> None:
    """Bytes read as another dtype are left whole."""


def _permuted(op: Op, order: Sequence[int]) -> IndexExpr:
    dims = name_dims(op.inputs[0].shape)
    return IndexExpr(
        inputs=(dims,),
        outputs=(tuple(dims[i] for i in order),),
        sizes=sizes_of((dims, op.inputs[0].shape)),
        linear=_ONLY,
    )


@register("aten.permute")
def _permute(op: Op) -> IndexExpr:
    rank = len(op.inputs[0].shape)
    return _permuted(op, [dim % rank for dim in op.integers(1, "dims")])


@register("aten.transpose", "aten.swapaxes", "aten.swapdims")
def _transpose(op: Op) -> IndexExpr:
    order = list(range(len(op.inputs[0].shape)))
    if order:
        first, second = op.dim(1, "dim0"), op.dim(2, "dim1")
        order[first], order[second] = order[second], order[first]
    return _permuted(op, order)


@register("aten.t", "aten.mT", "aten.matrix_H", "aten.numpy_T")
def _last_two(op: Op) -> IndexExpr:
    order = list(range(len(op.inputs[0].shape)))
    if op.node.op == "aten.numpy_T":
        order.reverse()
    elif len(order) > 1:
        order[-2:] = order[:-3:-1]
    return _permuted(op, order)


@register("aten.movedim.int")
def _movedim(op: Op) -> IndexExpr:
    order = list(range(len(op.inputs[0].shape)))
    order.insert(op.dim(2, "destination"), order.pop(op.dim(1, "source")))
    return _permuted(op, order)


@register("aten.expand", "aten.broadcast_to")
def _expand(op: Op) -> IndexExpr:
    """New extents are letters of the output alone: each rank makes its share."""
    shape = op.outputs[0].shape
    dims = name_dims(shape)
    sizes = sizes_of((dims, shape))
    return IndexExpr(
        inputs=(align(op.inputs[0].shape, dims, sizes),),
        outputs=(dims,),
        sizes=sizes,
        linear=_ONLY,
    )


def _tiled(op: Op, *, copies_major: bool) -> IndexExpr:
    """Each output dim is copies times input dim, in either order."""
    shape, target = op.inputs[0].shape, op.outputs[0].shape
    dims = name_dims(shape)
    sizes = sizes_of((dims, shape))
    padded = ((),) * (len(target) - len(shape)) + dims
    sources = (FROZEN_ONE,) * (len(target) - len(shape)) + shape
    out = []
    for i, (dim, size, extent) in enumerate(zip(padded, sources, target, strict=True)):
        copies = from_generic(extent.at(GENERIC_BATCH) // size.at(GENERIC_BATCH))
        letter = () if copies == FROZEN_ONE else (f"c{i}",)
        sizes.update(dict.fromkeys(letter, copies))
        out.append((*letter, *dim) if copies_major else (*dim, *letter))
    return IndexExpr(inputs=(dims,), outputs=(tuple(out),), sizes=sizes, linear=_ONLY)


@register("aten.repeat", "aten.tile")
def _repeat(op: Op) -> IndexExpr:
    return _tiled(op, copies_major=True)


@register("aten.repeat_interleave.self_int")
def _repeat_interleave(op: Op) -> IndexExpr | None:
    named = op.arg(2, "dim") is not None or len(op.inputs[0].shape) == 1
    return _tiled(op, copies_major=False) if named else None


def _removed(op: Op, position: int) -> IndexExpr:
    """Outputs are slices of the input across one dim, which is gone."""
    dim = op.dim(position, "dim")
    dims = name_dims(op.inputs[0].shape, skip=(dim,))
    out = dims[:dim] + dims[dim + 1 :]
    return IndexExpr(
        inputs=(dims,),
        outputs=(out,) * len(op.outputs),
        sizes=sizes_of((dims, op.inputs[0].shape)),
        linear=_ONLY,
    )


register("aten.select.int", "aten.unbind.int")(lambda op: _removed(op, 1))


@register("aten.stack")
def _stack(op: Op) -> IndexExpr:
    shape = op.inputs[0].shape
    dims = name_dims(shape)
    at = op.dim(1, "dim", rank=len(shape) + 1)
    return IndexExpr(
        inputs=(dims,) * len(op.inputs),
        outputs=((*dims[:at], (), *dims[at:]),),
        sizes=sizes_of((dims, shape)),
        linear=(frozenset(range(len(op.inputs))),),
    )


@register("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unsafe_chunk")
def _split(op: Op) -> IndexExpr:
    """The dim that is parted is split piece by piece, so that each output is split evenly."""
    shape, dim = op.inputs[0].shape, op.dim(2, "dim")
    dims = name_dims(shape)
    pieces = tuple(spec.shape[dim].const for spec in op.outputs)
    fixed = not any(spec.shape[dim].is_batch for spec in op.outputs)
    parted = {letter: pieces for letter in dims[dim] if fixed}
    return IndexExpr(
        inputs=(dims,),
        outputs=(dims,) * len(op.outputs),
        sizes=sizes_of((dims, shape)),
        blocked=frozenset(() if fixed or len(op.outputs) == 1 else dims[dim]),
        parted=parted if len(op.outputs) > 1 else {},
        linear=_ONLY,
    )


def _pair_dim(op: Op, skip_input: bool) -> IndexExpr:
    """The last dim of one tensor holds (real, imaginary)."""
    shape = op.inputs[0].shape
    dims = name_dims(shape, skip=(len(shape) - 1,) if skip_input else ())
    out = dims[:-1] if skip_input else (*dims, ())
    return IndexExpr(inputs=(dims,), outputs=(out,), sizes=sizes_of((dims, shape)), linear=_ONLY)


register("aten.view_as_complex")(lambda op: _pair_dim(op, True))
register("aten.view_as_real")(lambda op: _pair_dim(op, False))
