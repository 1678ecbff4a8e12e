"""Which values share one storage, and which views have to be copied.

Strides are followed through the graph exactly as torch computes them, at one concrete batch size:
a `reshape` is free unless its input was transposed in the meantime, a `contiguous` is free on what
is contiguous already. Sizes of 1 aside, the answer does not depend on the batch or on sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.costs.attention import FUSED, attention_kernel, is_attention
from autopar.costs.local_op import Order, StoredDim, op_name
from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.size import Size, shape_at

Strides = tuple[int, ...]
_Shape = tuple[int, ...]

TRACE_BATCH = 3
"""Batch size strides are computed at: above 1, since dims of size 1 have no real stride."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a value lies: the value that owns its storage, and its strides in it."""

    base: Ref
    strides: Strides


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageMap:
    """Storage of every value of a graph. `copying` names may-view nodes that copy."""

    stored: Mapping[Ref, Stored]
    copying: frozenset[str]

    def orders(self, node: OpNode, specs: Mapping[Ref, TensorSpec]) -> tuple[Order, ...]:
        """How the inputs of a node lie in memory; empty where all lie row by row."""
        found = tuple(
            memory_order(shape_at(specs[ref].shape, TRACE_BATCH), self.stored[ref].strides)
            for ref in node.inputs()
        )
        return found if any(found) else ()

    def base(self, ref: Ref) -> Ref:
        """The value that owns the storage of `ref`; itself where nothing is known."""
        return self.stored[ref].base if ref in self.stored else ref


def memory_order(shape: _Shape, strides: Strides) -> Order:
    """How a tensor lies in memory, without the numbers: what holds for its shards too.

    Dims of size 1 lie anywhere, and count as outermost.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    broadcast = [dim for dim in dims if strides[dim] == 0]
    inner_first = sorted((d for d in dims if strides[d]), key=lambda d: (strides[d], -d))
    cut, step = set[int](), 1
    for before, dim in zip([None, *inner_first], inner_first, strict=False):
        if before is not None and strides[dim] > step:
            cut.add(before)
        step = strides[dim] * shape[dim]
    order = [*(d for d, size in enumerate(shape) if size <= 1), *broadcast, *reversed(inner_first)]
    if not broadcast and not cut and list(reversed(inner_first)) == dims:
        return ()
    return tuple(StoredDim(dim=d, broadcast=d in broadcast, cut=d in cut) for d in order)


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """What a view rule is given: input and output shapes, input strides, the node."""

    node: OpNode
    shape: _Shape
    strides: Strides
    output: _Shape
    same_dtype: bool

    def dim(self, position: int, name: str, default: int = 0) -> int:
        """A dim argument, counted from the front of the input."""
        value = as_int(self.node.arg(position, name, default))
        return value % max(1, len(self.shape))


def as_int(arg: object) -> int:
    """An integer argument; a size that depends on the batch at `TRACE_BATCH`."""
    if isinstance(arg, Size):
        return arg.at(TRACE_BATCH)
    return arg if isinstance(arg, int) else 0


def contiguous_strides(shape: _Shape) -> Strides:
    """Row-major strides, as `torch.empty` gives."""
    return tuple(prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def is_contiguous(shape: _Shape, strides: Strides) -> bool:
    """Whether a tensor is row-major; strides of dims of size 1 do not matter."""
    expected = contiguous_strides(shape)
    return 0 in shape or all(
        size == 1 or stride == want
        for size, stride, want in zip(shape, strides, expected, strict=True)
    )


def view_strides(shape: _Shape, strides: Strides, output: _Shape) -> Strides | None:
    """Strides of `view(output)`, or None where the elements do not lie so (torch's computeStride).

    Both shapes have the same number of elements. Dims are merged into runs that step evenly through
    memory; every run must be a product of consecutive output dims.
    """
    if 0 in shape or not shape:
        return contiguous_strides(output)
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    result = [1] * len(output)
    dim = len(output) - 1
    for length, stride in reversed(runs):
        filled = 1
        while dim >= 0 and (filled < length or output[dim] == 1):
            result[dim] = stride * filled
            filled *= output[dim]
            dim -= 1
        if filled != length:
            return None
    return tuple(result)


def _reshape(view: _View) -> Strides | None:
    return view_strides(view.shape, view.strides, view.output)


def _same(view: _View) -> Strides:
    return view.strides


def _transpose(view: _View) -> Strides:
    return _swapped(view.strides, view.dim(1, "dim0"), view.dim(2, "dim1", 1))


def _last_two(view: _View) -> Strides:
    rank = len(view.strides)
    return view.strides if rank < 2 else _swapped(view.strides, rank - 2, rank - 1)


def _swapped(strides: Strides, first: int, second: int) -> Strides:
    result = list(strides)
    result[first], result[second] = result[second], result[first]
    return tuple(result)


def _permute(view: _View) -> Strides:
    dims = view.node.arg(1, "dims")
    order = dims if isinstance(dims, tuple) else ()
    return tuple(view.strides[as_int(dim) % len(view.strides)] for dim in order)


def _reversed(view: _View) -> Strides:
    return tuple(reversed(view.strides))


def _movedim(view: _View) -> Strides:
    source, target = view.node.arg(1, "source"), view.node.arg(2, "destination")
    if isinstance(source, tuple) or isinstance(target, tuple):
        return contiguous_strides(view.output)
    order = list(view.strides)
    order.insert(view.dim(2, "destination"), order.pop(view.dim(1, "source")))
    return tuple(order)


def _expand(view: _View) -> Strides:
    added = len(view.output) - len(view.shape)
    old = zip(view.shape, view.strides, view.output[added:], strict=True)
    return (0,) * added + tuple(0 if size == 1 != new else stride for size, stride, new in old)


def _slice(view: _View) -> Strides:
    dim, step = view.dim(1, "dim"), as_int(view.node.arg(4, "step", 1)) or 1
    return tuple(s * step if d == dim else s for d, s in enumerate(view.strides))


def _drop_dim(view: _View) -> Strides:
    dim = view.dim(1, "dim")
    return view.strides[:dim] + view.strides[dim + 1 :]


def _unknown(view: _View) -> Strides:
    return contiguous_strides(view.output)


def _contiguous(view: _View) -> Strides | None:
    return view.strides if is_contiguous(view.shape, view.strides) else None


def _cast(view: _View) -> Strides | None:
    return view.strides if view.same_dtype else None


def _dropout(view: _View) -> Strides | None:
    """Without training or at rate 0 dropout returns its input."""
    active = view.node.arg(2, "train", True) and view.node.arg(1, "p", 0.5) != 0
    return None if active else view.strides


_ViewRule = Callable[[_View], Strides | None]

VIEW_OPS: dict[str, _ViewRule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "view_as", "reshape_as"), _reshape),
    **dict.fromkeys(("flatten", "unflatten", "squeeze", "unsqueeze", "atleast_2d"), _reshape),
    **dict.fromkeys(("alias", "detach", "lift_fresh", "positive", "getitem"), _same),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("mT", "adjoint", "matrix_H"), _last_two),
    **dict.fromkeys(("t", "numpy_T"), _reversed),
    **dict.fromkeys(("movedim", "moveaxis"), _movedim),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "broadcast_tensors"), _expand),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "narrow"), _same),
    **dict.fromkeys(("unsafe_split", "unsafe_chunk"), _same),
    **dict.fromkeys(("select", "unbind"), _drop_dim),
    **dict.fromkeys(("diagonal", "unfold", "as_strided", "real", "imag"), _unknown),
    **dict.fromkeys(("view_as_real", "view_as_complex"), _unknown),
    "permute": _permute,
    "slice": _slice,
}
"""Ops that return a view of their first input, with the rule for its strides. `reshape` and
`flatten` copy where the rule gives None."""

MAY_VIEW_OPS: dict[str, _ViewRule] = {
    "contiguous": _contiguous,
    **dict.fromkeys(("to", "type_as"), _cast),
    **dict.fromkeys(("dropout", "feature_dropout"), _dropout),
}
"""Ops that return their input where there is nothing to do."""

_VIEWS_OF_EACH = frozenset({"broadcast_tensors"})
"""Ops whose output `i` is a view of input `i`."""

_FRESH = """
linear mm bmm matmul addmm baddbmm einsum mv dot convolution conv1d conv2d conv3d
_grouped_mm grouped_mm grouped_mm_fallback expert_mm to_experts from_experts expert_rows
cross_entropy_sum embedding index index_select gather
softmax _softmax log_softmax layer_norm group_norm rms_norm batch_norm cumsum sort topk
cat stack contiguous reshape flatten roll flip repeat tile pad constant_pad_nd
"""
_FRESH_OPS = frozenset(_FRESH.split())
"""Ops whose result is row-major however their inputs lie; all others keep the order of dims."""


def trace_storage(
    nodes: Sequence[OpNode], specs: Mapping[Ref, TensorSpec], *, device_kind: str = "cuda"
) -> StorageMap:
    """Storage and strides of all values that `nodes`, in execution order, read and make.

    Values made before `nodes` are taken as row-major owners of their storage, so the whole graph is
    the right thing to trace.
    """
    stored: dict[Ref, Stored] = {}
    copying: set[str] = set()
    for node in nodes:
        for ref in node.inputs():
            if ref not in stored:
                stored[ref] = Stored(
                    ref, contiguous_strides(shape_at(specs[ref].shape, TRACE_BATCH))
                )
        for index in range(len(node.outputs)):
            result = _stored_output(node, index, specs, stored, device_kind)
            stored[Ref(node.name, index)] = result
            if is_view(node.target) and result.base == Ref(node.name, index):
                copying.add(node.name)
    return StorageMap(stored=stored, copying=frozenset(copying))


def is_view(target: str) -> bool:
    """Whether an op returns a view where it can."""
    return op_name(target) in VIEW_OPS or op_name(target) in MAY_VIEW_OPS


def _stored_output(
    node: OpNode,
    index: int,
    specs: Mapping[Ref, TensorSpec],
    stored: Mapping[Ref, Stored],
    device_kind: str,
) -> Stored:
    """Storage of one output: of the input it views, of the input it overwrites, or its own."""
    own, inputs = Ref(node.name, index), node.inputs()
    output = shape_at(node.outputs[index].shape, TRACE_BATCH)
    if not inputs:
        return Stored(own, contiguous_strides(output))
    node_op = op_name(node.target)
    viewed = inputs[index if node_op in _VIEWS_OF_EACH else 0]
    first, spec = stored[viewed], specs[viewed]
    if rule := VIEW_OPS.get(node_op) or MAY_VIEW_OPS.get(node_op):
        view = _View(
            node=node,
            shape=shape_at(spec.shape, TRACE_BATCH),
            strides=first.strides,
            output=output,
            same_dtype=spec.dtype == node.outputs[index].dtype,
        )
        if (strides := rule(view)) is not None:
            return Stored(first.base, strides)
    if node.op.endswith("_") and not node.op.endswith("__"):
        return first
    if is_attention(node_op):
        shapes = [shape_at(specs[ref].shape, TRACE_BATCH) for ref in inputs[:3]]
        fused = attention_kernel(node, shapes, spec.dtype, device_kind) == FUSED
        like_query = elementwise_strides(output, [first.strides])
        return Stored(own, like_query if fused else contiguous_strides(output))
    if node_op in _FRESH_OPS:
        return Stored(own, contiguous_strides(output))
    peers = [
        stored[ref].strides for ref in inputs if shape_at(specs[ref].shape, TRACE_BATCH) == output
    ]
    return Stored(own, elementwise_strides(output, peers))


def elementwise_strides(shape: _Shape, peers: Iterable[Strides]) -> Strides:
    """Strides of a pointwise result: dense, dims in the order they have in the operands.

    `peers` are the strides of the operands of the full shape; the first that tells two dims apart
    decides, and broadcast dims (stride 0) do not (torch's TensorIterator does the same).
    """
    operands = list(peers)

    def inside(dim: int, other: int) -> bool:
        for strides in operands:
            if strides[dim] and strides[other] and strides[dim] != strides[other]:
                return strides[dim] < strides[other]
        return dim > other

    order: list[int] = []
    for dim in reversed(range(len(shape))):
        place = next((i for i, other in enumerate(order) if inside(dim, other)), len(order))
        order.insert(place, dim)
    result, step = [0] * len(shape), 1
    for dim in order:
        result[dim] = step
        step *= max(1, shape[dim])
    return tuple(result)
