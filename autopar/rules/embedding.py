"""Gather-like ops: reading and writing rows that an index tensor names."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Arg, Ref
from autopar.ir.size import Shape, Size
from autopar.rules.index_expr import Dims, IndexExpr, Kernel, Op
from autopar.rules.letters import FROZEN_ONE, name_dims, sizes_of
from autopar.rules.registry import register

VOCAB_EMBEDDING = Kernel(name="vocab_embedding")
"""Each rank looks up the ids in its range of rows and gives zeros for the others."""


@register("aten.embedding")
def _embedding(op: Op) -> IndexExpr:
    """`w[v, e], ids[...] -> [..., e]`; split by rows, each id is found on one rank."""
    weight, ids = op.inputs[0].shape, op.inputs[1].shape
    # counts over all ids then scale the gradient, so all ids and rows must be in one place
    scaled = bool(op.arg(3, "scale_grad_by_freq", False))
    dims = name_dims(ids, skip=range(len(ids)) if scaled else ())
    return IndexExpr(
        inputs=((("v",), ("e",)), dims),
        outputs=((*dims, ("e",)),),
        sizes=sizes_of((dims, ids)) | {"v": weight[0], "e": weight[1]},
        blocked=frozenset("v" if scaled else ()),
        kernels={"v": VOCAB_EMBEDDING},
    )


@register("aten.gather", "aten.take_along_dim")
def _gather(op: Op) -> IndexExpr | None:
    """`x` is read along `dim`, and elsewhere at the index's own position."""
    source, index = op.inputs[0].shape, op.inputs[1].shape
    broadcasts = op.node.op == "aten.take_along_dim"
    dim = op.dim(2 if broadcasts else 1, "dim")
    if broadcasts and any(index[i] != size for i, size in enumerate(source) if i != dim):
        return None
    shared = _shared(source, (index,), dim)
    read = (*shared[:dim], *name_dims(index[dim : dim + 1], prefix="j"), *shared[dim + 1 :])
    return IndexExpr(
        inputs=(shared, read),
        outputs=(read,),
        sizes=sizes_of((shared, source), (read, index)),
        linear=(frozenset((0,)),),
    )


def _shared(shape: Shape, others: Sequence[Shape], dim: int) -> Dims:
    """Letters of the dims other than `dim` that have one extent in all tensors."""
    ragged = {i for i, size in enumerate(shape) if any(other[i] != size for other in others)}
    return name_dims(shape, skip={dim, *ragged})


@register("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def _scatter(op: Op) -> IndexExpr:
    """Written along `dim`, and elsewhere at the index's own position."""
    dim = op.dim(1, "dim")
    shape, others = op.inputs[0].shape, [spec.shape for spec in op.inputs[1:]]
    dims = _shared(shape, others, dim)
    has_source = len(op.inputs) == 3 and op.node.op != "aten.scatter_reduce"
    return IndexExpr(
        inputs=(dims,) * len(op.inputs),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)),
        linear=(frozenset((0, 2)),) if has_source else (),
    )


@register("aten.index_select")
def _index_select(op: Op) -> IndexExpr:
    dim, shape = op.dim(1, "dim"), op.inputs[0].shape
    dims = name_dims(shape, skip=(dim,))
    return IndexExpr(
        inputs=(dims, (("j",),)),
        outputs=((*dims[:dim], ("j",), *dims[dim + 1 :]),),
        sizes=sizes_of((dims, shape)) | {"j": op.inputs[1].shape[0]},
        linear=(frozenset((0,)),),
    )


@register("aten.index_add")
def _index_add(op: Op) -> IndexExpr:
    """Rows of the source are added to rows of `x`: split by source rows the result is partial."""
    dim, shape = op.dim(1, "dim"), op.inputs[0].shape
    dims = name_dims(shape, skip=(dim,))
    return IndexExpr(
        inputs=(dims, (("j",),), (*dims[:dim], ("j",), *dims[dim + 1 :])),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)) | {"j": op.inputs[1].shape[0]},
        additive=frozenset((0,)),
        linear=(frozenset((0, 2)),),
    )


@register("aten.index.Tensor")
def _index(op: Op) -> IndexExpr | None:
    """Indexed dims are read whole; the index's own dims and the other dims may be split."""
    layout = index_layout(op)
    if layout is None:
        return None
    source, indices, out, sizes = layout
    return IndexExpr(
        inputs=(source, *indices), outputs=(out,), sizes=sizes, linear=(frozenset((0,)),)
    )


@register("aten.index_put")
def _index_put(op: Op) -> IndexExpr | None:
    """Only the dims that are not indexed may be split."""
    layout = index_layout(op)
    if layout is None:
        return None
    source, indices, read, sizes = layout
    kept = {letter for dim in source for letter in dim}
    read = tuple(dim if set(dim) <= kept else () for dim in read)
    values = op.inputs[-1].shape
    tail = read[len(read) - len(values) :]
    aligned = tuple(
        dim if dim and sizes[dim[0]] == size else () for dim, size in zip(tail, values, strict=True)
    )
    whole = tuple(((),) * len(dims) for dims in indices)
    return IndexExpr(inputs=(source, *whole, aligned), outputs=(source,), sizes=sizes)


def index_layout(op: Op) -> tuple[Dims, tuple[Dims, ...], Dims, dict[str, Size]] | None:
    """Dims of source, of each index and of what is read, with sizes; None with a mask as index.

    Index tensors broadcast together; their dims stand where the indexed dims stood if these are
    adjacent, else in front.
    """
    shape = op.inputs[0].shape
    slots: tuple[Arg, ...] = op.arg(1, "indices")  # type: ignore[assignment]
    at = [i for i, slot in enumerate(slots) if isinstance(slot, Ref)]
    specs = op.inputs[1 : 1 + len(at)]
    if any(spec.dtype in ("bool", "uint8") for spec in specs):
        return None
    source = name_dims(shape, skip=at)
    rank = max(len(spec.shape) for spec in specs)
    joint = [FROZEN_ONE] * rank
    for spec in specs:
        for i, size in enumerate(reversed(spec.shape)):
            if size != FROZEN_ONE:
                joint[rank - 1 - i] = size
    index_dims = name_dims(tuple(joint), prefix="j")
    sizes = sizes_of((source, shape), (index_dims, tuple(joint)))
    indices = tuple(
        tuple(
            () if size == FROZEN_ONE else dim
            for size, dim in zip(spec.shape, index_dims[rank - len(spec.shape) :], strict=True)
        )
        for spec in specs
    )
    adjacent = at == list(range(at[0], at[-1] + 1))
    front = at[0] if adjacent else 0
    rest = [dim for i, dim in enumerate(source) if i not in at]
    return source, indices, (*rest[:front], *index_dims, *rest[front:]), sizes
