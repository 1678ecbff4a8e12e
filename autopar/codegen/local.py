"""Printing one node or one move as a line of local PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod

from autopar.codegen.expert_text import EXPERT_PRINTERS
from autopar.codegen.sizes import shape_text, size_text
from autopar.codegen.targets import Call, print_call
from autopar.ir.graph import Arg, OpNode, Ref, Size, TensorSpec
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import Layout, Shard
from autopar.plan.flow import Move
from autopar.plan.plan import NodeChoice
from autopar.plan.split import Product
from autopar.rules.expert_axis import EXCHANGES


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The mesh axes as the source sees them."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalNode:
    """A node with its choice, the kernel on each axis, its number among random ops, and how its
    weight's gradient is computed apart, if it is."""

    node: OpNode
    choice: NodeChoice
    kernels: tuple[str, ...]
    random_index: int | None
    specs: Mapping[Ref, TensorSpec]
    mesh: Mesh
    split: Product | None = None

    def kernel_axis(self, kernel: str) -> str:
        """The axis a kernel runs over."""
        return self.mesh.axes[self.kernels.index(kernel)]


CAUSAL_ROWS = "causal_rows"
RING_ATTENTION = "ring_attention"

_VALUE_OPS = frozenset(("add", "sub", "rsub", "mul", "div", "pow", "remainder", "floor_divide"))
_VALUE_OPS |= frozenset(("clamp", "eq", "ne", "lt", "le", "gt", "ge", "masked_fill", "fill"))
_VALUE_OPS |= frozenset(("where", "full"))
"""Ops that calculate with a number they are given: the batch size is then that of the whole batch.
All others take numbers as extents, which are local."""


def argument_text(arg: Arg, names: Callable[[Ref], str], *, batch: str = "batch") -> str:
    """An argument as source text; `names` gives the variable of a value, `batch` the batch size."""
    match arg:
        case Ref():
            return names(arg)
        case Size():
            return size_text(arg).replace("batch", batch)
        case tuple():
            return f"[{', '.join(argument_text(item, names, batch=batch) for item in arg)}]"
        case str() if arg.startswith("device:"):
            return "ctx.device"
        case str() if arg.startswith(("dtype:", "layout:", "memory_format:")):
            return f"torch.{arg.partition(':')[2]}"
        case float():
            return repr(arg) if isfinite(arg) else f'float("{arg}")'
        case _:
            return repr(arg)


def global_count(spec: TensorSpec, dims: Sequence[int]) -> str:
    """Number of elements over `dims` in the whole batch."""
    const = prod(spec.shape[d].const for d in dims if not spec.shape[d].is_batch)
    grown = [spec.shape[d] for d in dims if spec.shape[d].is_batch]
    texts = [str(const)] if const != 1 or not grown else []
    return " * ".join(texts + [_global_size(size) for size in grown])


def _global_size(size: Size) -> str:
    text = size_text(size).replace("batch", "ctx.global_batch")
    return f"({text})" if size.const else text


def element_dims(spec: TensorSpec, layout: Layout, mesh: Mesh) -> str:
    """`(where, stride)` per dim: which global elements a local tensor holds, for random masks."""
    rank = len(spec.shape)
    dims = []
    for dim, size in enumerate(spec.shape):
        stride = global_count(spec, range(dim + 1, rank)) if dim + 1 < rank else "1"
        dims.append(f"({_where(size, dim, layout, mesh)}, {stride})")
    return f"({', '.join(dims)}{',' if rank == 1 else ''})"


def _where(size: Size, dim: int, layout: Layout, mesh: Mesh) -> str:
    if size.is_batch:
        factor = "" if size.per_sample == 1 else f"{size.per_sample} * "
        return f"{factor}ctx.sample_offset"
    cuts = _cuts(dim, layout, mesh)
    if len(cuts) == 1 and not cuts[0][1].pieces:
        return f"{cuts[0][0]}.start({size.const})"
    return _ranges(size.const, cuts) if cuts else "0"


def _cuts(dim: int, layout: Layout, mesh: Mesh) -> list[tuple[str, Shard]]:
    """The axes that split a dim, outermost first."""
    return [
        (axis, placement)
        for axis, parts, placement in zip(mesh.axes, mesh.sizes, layout, strict=True)
        if isinstance(placement, Shard) and placement.dim == dim and parts > 1
    ]


def _ranges(extent: int, cuts: Sequence[tuple[str, Shard]]) -> str:
    """The ranges of a dim that a rank holds."""
    (axis, first), *inner = cuts
    text = f"{axis}.ranges({extent}{f', {first.pieces}' if first.pieces else ''})"
    for axis, _ in inner:
        text = f"{axis}.cut({text})"
    return text


def _weights_spec(local: LocalNode) -> tuple[TensorSpec, Layout]:
    """Spec and layout of attention weights [..., query, key], which dropout masks index."""
    query, key = local.node.inputs()[0], local.node.inputs()[1]
    q_spec, k_spec = local.specs[query], local.specs[key]
    shape = (*q_spec.shape[:-1], k_spec.shape[-2])
    return TensorSpec(shape=shape, dtype=q_spec.dtype), local.choice.inputs[0]


def _random_dropout(local: LocalNode, call: Call) -> str:
    spec = local.specs[local.node.inputs()[0]]
    dims = element_dims(spec, local.choice.inputs[0], local.mesh)
    op = f"random + {local.random_index}"
    return f"kernels.dropout({call.args[0]}, {call.arg(1, 'p')}, ctx, op={op}, dims={dims})"


def _kernel_attention(local: LocalNode, call: Call) -> str:
    """Attention with a mask that depends on where the local queries stand."""
    spec, layout = _weights_spec(local)
    names = ("attn_mask", "dropout_p", "is_causal")
    options = {name: call.arg(3 + i, name, "False") for i, name in enumerate(names)}
    options["attn_mask"] = call.arg(3, "attn_mask")
    options |= {k: call.kwargs[k] for k in ("scale", "enable_gqa") if k in call.kwargs}
    shown = [f"{key}={value}" for key, value in options.items() if value != "None"]
    if CAUSAL_ROWS in local.kernels:
        rows = len(spec.shape) - 2
        cuts = _cuts(rows, layout, local.mesh)
        shown.append(f"rows={_ranges(spec.shape[rows].const, cuts)}")
    if local.random_index is not None:
        shown += ["ctx=ctx", f"op=random + {local.random_index}"]
        shown += [f"dims={element_dims(spec, layout, local.mesh)}"]
    return f"kernels.attention({', '.join([*call.args[:3], *shown])})"


def _ring_attention(local: LocalNode, call: Call) -> str:
    axis = local.kernel_axis(RING_ATTENTION)
    spec = local.specs[local.node.inputs()[1]]
    placement = local.choice.inputs[1][local.mesh.axes.index(axis)]
    shown = [axis, str(spec.shape[-2].const)]
    shown += [str(placement.pieces)] if isinstance(placement, Shard) and placement.pieces else []
    shown += [f"is_causal={call.arg(5, 'is_causal', 'False')}"]
    shown += [f"{key}={call.kwargs[key]}" for key in ("scale", "enable_gqa") if key in call.kwargs]
    return f"kernels.ring_attention({', '.join([*call.args[:3], *shown])})"


def _vocab_embedding(local: LocalNode, call: Call) -> str:
    axis = local.kernel_axis("vocab_embedding")
    rows = local.specs[local.node.inputs()[0]].shape[0].const
    padding = call.arg(2, "padding_idx", "-1")
    extra = "" if padding == "-1" else f", padding_idx={padding}"
    return f"kernels.vocab_embedding({call.args[1]}, {call.args[0]}, {axis}.start({rows}){extra})"


def _loss_options(call: Call) -> str:
    ignore, smoothing = call.arg(2, "ignore_index", "-100"), call.arg(3, "label_smoothing", "0.0")
    return f"ignore_index={ignore}" + (
        "" if smoothing == "0.0" else f", label_smoothing={smoothing}"
    )


def _vocab_cross_entropy(local: LocalNode, call: Call) -> str:
    axis = local.kernel_axis("vocab_cross_entropy")
    classes = local.specs[local.node.inputs()[0]].shape[-1].const
    return (
        f"kernels.vocab_cross_entropy({call.args[0]}, {call.args[1]}, {axis}.start({classes}), "
        f"{axis}, num_classes={classes}, {_loss_options(call)})"
    )


def _partial_mean(local: LocalNode, call: Call) -> str:
    spec = local.specs[local.node.inputs()[0]]
    dims = reduced_dims(local.node, len(spec.shape))
    keep = call.arg(2, "keepdim", "False") if local.node.target == "aten.mean.dim" else "False"
    count = global_count(spec, dims)
    return f"kernels.partial_mean({call.args[0]}, {dims}, {keep}, {count})"


def _batch_norm(local: LocalNode, call: Call) -> str:
    """The kernel sums over the axes that split the dims statistics are taken over."""
    spec = local.specs[local.node.inputs()[0]]
    count = global_count(spec, [dim for dim in range(len(spec.shape)) if dim != 1])
    axes = [
        axis
        for axis, size, kernel in zip(local.mesh.axes, local.mesh.sizes, local.kernels, strict=True)
        if kernel == "batch_norm" and size > 1
    ]
    listed = f"[{', '.join(axes)}]"
    return f"kernels.batch_norm({', '.join(call.args)}, ctx, {count}, {listed})"


def reduced_dims(node: OpNode, rank: int) -> tuple[int, ...]:
    """The dims a reduction runs over."""
    dims = node.arg(1, "dim") if node.target.endswith((".dim", ".dim_IntList")) else None
    if dims is None or dims == ():
        return tuple(range(rank))
    listed = dims if isinstance(dims, tuple) else (dims,)
    return tuple(int(d.const if isinstance(d, Size) else d) % rank for d in listed)  # type: ignore[union-attr, arg-type]


def _print_node(local: LocalNode, call: Call) -> str:
    node = local.node
    if "vocab_embedding" in local.kernels:
        return _vocab_embedding(local, call)
    if "vocab_cross_entropy" in local.kernels:
        return _vocab_cross_entropy(local, call)
    if "partial_mean" in local.kernels:
        return _partial_mean(local, call)
    if node.op == "autopar.batch_norm":
        return _batch_norm(local, call)
    if node.op == "autopar.cross_entropy_sum":
        return f"kernels.cross_entropy_sum({call.args[0]}, {call.args[1]}, {_loss_options(call)})"
    if node.op == "autopar.count_valid":
        dtype = f"dtype=torch.{node.outputs[0].dtype}"
        ignore = call.arg(1, "ignore_index", "-100")
        return f"kernels.count_valid({call.args[0]}, {ignore}, {dtype})"
    if node.target in EXPERT_PRINTERS:
        kernels = zip(local.mesh.axes, local.kernels, strict=True)
        exchanged = [axis for axis, kernel in kernels if kernel in EXCHANGES]
        return EXPERT_PRINTERS[node.target](call, exchanged[0] if exchanged else "")
    if local.random_index is not None:
        printer = _kernel_attention if node.op.endswith("attention") else _random_dropout
        return printer(local, call)
    if RING_ATTENTION in local.kernels:
        return _ring_attention(local, call)
    if CAUSAL_ROWS in local.kernels:
        return _kernel_attention(local, call)
    return print_call(call) if local.split is None else _split_product(local.split, call)


def _split_product(product: Product, call: Call) -> str:
    """A product whose weight gradient the weight part of the backward computes."""
    if product.function == "embedding":
        padding = call.arg(2, "padding_idx", "-1")
        extra = "" if padding == "-1" else f", padding_idx={padding}"
        return f"kernels.embedding({call.args[1]}, {call.args[0]}, ctx{extra})"
    tensors = list(call.args[:2])
    if product.bias is not None:
        tensors.append(call.arg(2, "bias"))
    return f"kernels.{product.function}({', '.join(tensors)}, ctx)"


def node_text(local: LocalNode, names: Callable[[Ref, int], str]) -> str:
    """The node as an expression over local tensors.

    `names(ref, position)` gives the variable that holds input number `position`.
    """
    counter = iter(range(len(local.node.inputs())))

    def by_position(ref: Ref) -> str:
        return names(ref, next(counter))

    node, mesh = local.node, local.mesh
    batch = "ctx.global_batch" if node.op.split(".")[1] in _VALUE_OPS else "batch"
    args = tuple(argument_text(arg, by_position, batch=batch) for arg in node.args)
    kwargs = {key: argument_text(value, by_position, batch=batch) for key, value in node.kwargs}
    shapes = tuple(
        shape_text(spec, layout, mesh.axes, mesh.sizes)
        for spec, layout in zip(node.outputs, local.choice.outputs, strict=True)
    )
    given = tuple(local.specs[ref].shape for ref in node.inputs())
    call = Call(node=node, args=args, kwargs=kwargs, input_shapes=given, shapes=shapes)
    return _print_node(local, call)


def _exchange_of_samples(
    name: str, axis: str, before: Shard, after: Shard, spec: TensorSpec
) -> str:
    """Samples for shards of another dim, or back."""
    to_samples = spec.shape[after.dim].is_batch
    samples, other = (after, before) if to_samples else (before, after)
    per_sample = spec.shape[samples.dim].per_sample
    shares = f"ctx.sample_shares({axis}{'' if per_sample == 1 else f', {per_sample}'})"
    if to_samples:
        size = spec.shape[other.dim].const
        return (
            f"comm.shards_to_samples({name}, {axis}, {samples.dim}, {other.dim}, {size}, {shares})"
        )
    return f"comm.samples_to_shards({name}, {axis}, {samples.dim}, {other.dim}, {shares})"


def move_text(move: Move, name: str, spec: TensorSpec, mesh: Mesh) -> str:
    """A move as a call of the runtime's function of that name."""
    axis, before, after = mesh.axes[move.axis], move.before[move.axis], move.after[move.axis]
    arguments = [name, axis]
    if isinstance(before, Shard):
        others = tuple(p for i, p in enumerate(move.before) if i != move.axis)
        rest = tuple(a for a in mesh.axes if a != axis)
        sizes = tuple(s for a, s in zip(mesh.axes, mesh.sizes, strict=True) if a != axis)
        size = shape_text(spec, others, rest, sizes)[before.dim]
        if isinstance(after, Shard) and axis in BATCH_AXES:
            return _exchange_of_samples(name, axis, before, after, spec)
        if isinstance(after, Shard):
            arguments += [str(before.dim), str(after.dim), size]
            arguments += [f"src_pieces={before.pieces}"] if before.pieces else []
            arguments += [f"dst_pieces={after.pieces}"] if after.pieces else []
        else:
            arguments += [str(before.dim), size]
            arguments += [str(before.pieces)] if before.pieces else []
    elif isinstance(after, Shard):
        arguments.append(str(after.dim))
        arguments += [str(after.pieces)] if after.pieces else []
    return f"comm.{move.transition.function}({', '.join(arguments)})"
