"""Ops on each element by itself, and ops that walk along some dims and do the rest elementwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.rules.index_expr import LOCAL, IndexExpr, Kernel, Op
from autopar.rules.letters import align, name_dims, sizes_of
from autopar.rules.registry import register

Groups = tuple[frozenset[int], ...]

_NONLINEAR = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max",
    "clamp_min", "clip", "copysign", "cos", "cosh", "deg2rad", "div.Tensor_mode",
    "div.Scalar_mode", "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fill",
    "float_power", "floor", "floor_divide", "fmod", "frac", "ge", "gelu", "gt", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "isneginf",
    "isposinf", "le", "leaky_relu", "lerp", "lgamma", "log", "log10", "log1p", "log2",
    "log_sigmoid", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor",
    "logit", "lt", "maximum", "minimum", "mish", "nan_to_num", "ne", "ones_like", "pow",
    "rad2deg", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "selu", "sgn",
    "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "softshrink", "sqrt",
    "square", "tan", "tanh", "threshold", "trunc", "xlogy", "zeros_like", "full_like",
    "empty_like", "__and__", "__or__", "__xor__", "bitwise_left_shift", "bitwise_right_shift",
    "max.other", "min.other",
)  # fmt: skip


def elementwise(op: Op, linear: Groups = (), kernel: Kernel = LOCAL) -> IndexExpr:
    """A letter per output dim; inputs broadcast."""
    shape = op.outputs[0].shape
    dims = name_dims(shape)
    sizes = sizes_of((dims, shape))
    return IndexExpr(
        inputs=tuple(align(spec.shape, dims, sizes) for spec in op.inputs),
        outputs=(dims,) * len(op.outputs),
        sizes=sizes,
        linear=linear,
        kernel=kernel,
    )


def walk(op: Op, walked: Iterable[int], linear: Groups = (), *, filled: bool = False) -> IndexExpr:
    """All tensors have the rank of input 0; dims in `walked` are read whole, others elementwise.

    Walked dims may differ in extent between the tensors.
    """
    shape = op.inputs[0].shape
    dims = name_dims(shape, skip=walked)
    sizes = sizes_of((dims, shape))
    return IndexExpr(
        inputs=tuple(align(spec.shape, dims, sizes) for spec in op.inputs),
        outputs=tuple(align(spec.shape, dims, sizes) for spec in op.outputs),
        sizes=sizes,
        linear=linear,
        filled=filled,
    )


def register_elementwise(*targets: str) -> None:
    """Declare ops that act on each element by itself, broadcasting their inputs.

    One line for an op of your own: `register_elementwise("mylib::square")`.
    """
    register(*targets)(elementwise)


register_elementwise(*(f"aten.{name}" for name in _NONLINEAR))


def _all_terms(op: Op) -> Groups:
    """A sum is linear in its terms together, unless one is a plain number."""
    return (frozenset((0, 1)),) if len(op.inputs) == 2 else ()


def _each_factor(op: Op) -> Groups:
    """A product is linear in each factor with the other fixed."""
    return tuple(frozenset((i,)) for i in range(len(op.inputs)))


def _first(op: Op) -> Groups:
    return (frozenset((0,)),)


def _cast(op: Op) -> Groups:
    """A cast keeps sums unless it rounds to whole numbers or truth values."""
    source, target = op.inputs[0], op.outputs[0]
    return _first(op) if target.is_floating or source.dtype == target.dtype else ()


def _masked(op: Op) -> Groups:
    value = op.arg(2, "value")
    return _first(op) if isinstance(value, int | float) and value == 0 else ()


def _both_branches(op: Op) -> Groups:
    return (frozenset((1, 2)),) if len(op.inputs) == 3 else ()


def _linear_rule(groups: Callable[[Op], Groups]) -> Callable[[Op], IndexExpr]:
    return lambda op: elementwise(op, linear=groups(op))


register("aten.add", "aten.sub", "aten.rsub")(_linear_rule(_all_terms))
register("aten.mul", "aten.multiply")(_linear_rule(_each_factor))
register("aten.div", "aten.true_divide", "aten.divide")(_linear_rule(_first))
register(
    "aten.neg", "aten.clone", "aten.contiguous", "aten.detach", "aten.alias", "aten.positive",
    "aten.lift_fresh_copy", "aten.conj", "aten.real",
)(_linear_rule(_first))  # fmt: skip
register("aten.to", "aten._to_copy", "aten.type_as")(_linear_rule(_cast))
register("aten.masked_fill")(_linear_rule(_masked))
register("aten.where.self")(_linear_rule(_both_branches))
register("aten.where.ScalarOther", "aten.where.ScalarSelf")(elementwise)


@register("aten.addcmul")
def _addcmul(op: Op) -> IndexExpr:
    return elementwise(op, linear=(frozenset((0, 1)), frozenset((0, 2))))


@register("aten.addcdiv")
def _addcdiv(op: Op) -> IndexExpr:
    return elementwise(op, linear=(frozenset((0, 1)),))


def _along(position: int) -> Callable[[Op], IndexExpr]:
    """Rule of an op that walks along its one `dim` argument."""
    return lambda op: walk(op, (op.dim(position, "dim", -1),))


register("aten.softmax", "aten.log_softmax", "aten._softmax", "aten._log_softmax")(_along(1))
register("aten.cumprod", "aten.logcumsumexp", "aten.argsort.default", "aten.glu")(_along(1))
register("aten.cummax", "aten.cummin")(_along(1))
register("aten.topk")(_along(2))
register("aten.sort.default")(_along(1))
register("aten.sort.stable", "aten.argsort.stable")(lambda op: walk(op, (op.dim(2, "dim", -1),)))


@register("aten.cumsum")
def _cumsum(op: Op) -> IndexExpr:
    return walk(op, (op.dim(1, "dim"),), linear=_first(op))


@register("aten.diff")
def _diff(op: Op) -> IndexExpr:
    return walk(op, (op.dim(2, "dim", -1),), linear=(frozenset(range(len(op.inputs))),))


@register("aten.flip")
def _flip(op: Op) -> IndexExpr:
    rank = len(op.inputs[0].shape)
    return walk(op, {dim % rank for dim in op.integers(1, "dims")}, linear=_first(op))


@register("aten.roll")
def _roll(op: Op) -> IndexExpr:
    rank = len(op.inputs[0].shape)
    dims = {dim % rank for dim in op.integers(2, "dims")}
    return walk(op, dims or range(rank), linear=_first(op))


@register("aten.tril", "aten.triu")
def _triangle(op: Op) -> IndexExpr:
    rank = len(op.inputs[0].shape)
    return walk(op, (rank - 2, rank - 1), linear=_first(op))


@register("aten.pad", "aten.constant_pad_nd")
def _pad(op: Op) -> IndexExpr:
    """Padded dims are read whole: only some ranks would hold an end."""
    rank = len(op.inputs[0].shape)
    pads = op.integers(1, "pad")
    padded = [rank - 1 - i // 2 for i, amount in enumerate(pads) if amount]
    position = 2 if op.node.op == "aten.constant_pad_nd" else 3
    mode = op.arg(2, "mode", "constant") if position == 3 else "constant"
    zero = mode != "constant" or op.arg(position, "value") in (None, 0, 0.0)
    return walk(op, padded, linear=_first(op) if zero else (), filled=True)


@register("aten.cat", "aten.concat")
def _cat(op: Op) -> IndexExpr:
    return walk(op, (op.dim(1, "dim"),), linear=(frozenset(range(len(op.inputs))),))


@register("aten.slice", "aten.narrow")
def _slice(op: Op) -> IndexExpr:
    """A slice of the whole dim, which export leaves behind, cuts nothing."""
    dim = op.dim(1, "dim")
    is_whole = op.inputs[0].shape[dim] == op.outputs[0].shape[dim]
    return walk(op, () if is_whole else (dim,), linear=_first(op))


@register("aten.slice_scatter")
def _slice_scatter(op: Op) -> IndexExpr:
    dim = op.dim(2, "dim")
    is_whole = op.inputs[0].shape[dim] == op.inputs[1].shape[dim]
    return walk(op, () if is_whole else (dim,), linear=(frozenset((0, 1)),))


@register("aten.select_scatter")
def _select_scatter(op: Op) -> IndexExpr:
    shape, dim = op.inputs[0].shape, op.dim(2, "dim")
    dims = name_dims(shape, skip=(dim,))
    return IndexExpr(
        inputs=(dims, dims[:dim] + dims[dim + 1 :]),
        outputs=(dims,),
        sizes=sizes_of((dims, shape)),
        linear=(frozenset((0, 1)),),
    )


@register("aten.one_hot")
def _one_hot(op: Op) -> IndexExpr:
    dims = name_dims(op.inputs[0].shape)
    return IndexExpr(
        inputs=(dims,), outputs=((*dims, ()),), sizes=sizes_of((dims, op.inputs[0].shape))
    )


__all__ = ["elementwise", "register_elementwise", "walk"]
