"""Sums of products: linear layers, matrix products, einsum."""

from __future__ import annotations

from autopar.ir.size import Shape
from autopar.rules.index_expr import Dims, IndexExpr, Op
from autopar.rules.letters import FROZEN_ONE, align, name_dims, sizes_of
from autopar.rules.notation import parse_rule
from autopar.rules.registry import register

register("aten.mm")(parse_rule("i k, k j -> i j"))
register("aten.bmm")(parse_rule("b i k, b k j -> b i j"))
register("aten.mv")(parse_rule("i k, k -> i"))
register("aten.dot", "aten.vdot")(parse_rule("k, k ->"))
register("aten.outer", "aten.ger")(parse_rule("i, j -> i j"))
# Rows belong to experts by position, so neither rows nor experts are split.
register("aten._grouped_mm", "autopar.grouped_mm", "transformers.grouped_mm_fallback")(
    parse_rule("[rows] i, [experts] i o, [experts] -> [rows] o")
)


@register("aten.linear")
def _linear(op: Op) -> IndexExpr:
    """`x[..., i] w[o, i] + b[o] -> [..., o]`; the bias is added once to the sum over i."""
    shape, weight = op.inputs[0].shape, op.inputs[1].shape
    lead = name_dims(shape[:-1])
    dims = (*lead, ("i",))
    return IndexExpr(
        inputs=(dims, (("o",), ("i",)), (("o",),))[: len(op.inputs)],
        outputs=((*lead, ("o",)),),
        sizes=sizes_of((dims, shape)) | {"o": weight[0]},
        additive=frozenset((2,)),
    )


@register("aten.addmm", "aten.baddbmm")
def _addmm(op: Op) -> IndexExpr:
    """`b + x @ w` with `b` broadcast; batched or not."""
    x = op.inputs[1].shape
    lead = (("b",),) if len(x) == 3 else ()
    out: Dims = (*lead, ("i",), ("j",))
    sizes = sizes_of((out, op.outputs[0].shape)) | {"k": x[-1]}
    return IndexExpr(
        inputs=(
            align(op.inputs[0].shape, out, sizes),
            (*lead, ("i",), ("k",)),
            (*lead, ("k",), ("j",)),
        ),
        outputs=(out,),
        sizes=sizes,
        additive=frozenset((0,)),
    )


@register("aten.matmul")
def _matmul(op: Op) -> IndexExpr:
    """NumPy's rules: a vector has no lead, leads broadcast."""
    x, y = (spec.shape for spec in op.inputs)
    out = op.outputs[0].shape
    row: Dims = (("i",),) if len(x) > 1 else ()
    column: Dims = (("j",),) if len(y) > 1 else ()
    lead_shape = out[: len(out) - len(row) - len(column)]
    lead = name_dims(lead_shape)
    sizes = sizes_of((lead, lead_shape)) | {"k": x[-1]}
    if row:
        sizes["i"] = x[-2]
    if column:
        sizes["j"] = y[-1]
    return IndexExpr(
        inputs=(
            (*align(x[:-2], lead, sizes), *row, ("k",)),
            (*align(y[:-2], lead, sizes), ("k",), *column),
        ),
        outputs=((*lead, *row, *column),),
        sizes=sizes,
    )


@register("aten.einsum")
def _einsum(op: Op) -> IndexExpr:
    """The equation is the index expression; an ellipsis is letters counted from the right."""
    equation = str(op.arg(0, "equation")).replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "->" not in equation:
        letters = left.replace(",", "").replace("...", "")
        single = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(single)
    inputs = tuple(
        _einsum_dims(term, spec.shape) for term, spec in zip(terms, op.inputs, strict=True)
    )
    out = _einsum_dims(right, op.outputs[0].shape)
    sizes = sizes_of(
        *zip(inputs, (spec.shape for spec in op.inputs), strict=True), (out, op.outputs[0].shape)
    )
    return IndexExpr(inputs=inputs, outputs=(out,), sizes=sizes)


def _einsum_dims(term: str, shape: Shape) -> Dims:
    extra = len(shape) - len(term.replace("...", ""))
    head, dots, tail = term.partition("...")
    middle = [f"...{i}" for i in range(extra, 0, -1)] if dots else []
    return tuple(
        () if size == FROZEN_ONE else (letter,)
        for letter, size in zip([*head, *middle, *tail], shape, strict=True)
    )
