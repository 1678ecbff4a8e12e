"""Scaled dot-product attention: split over batch, heads, or queries."""

from __future__ import annotations

from autopar.ir.size import Shape, Size
from autopar.rules.index_expr import LOCAL, Dims, IndexExpr, Kernel, Op
from autopar.rules.letters import FROZEN_ONE, name_dims, sizes_of
from autopar.rules.registry import register

ATTENTION_DROPOUT = Kernel(name="attention_dropout")
"""Attention whose dropout mask is cut from the one a single device would draw."""


CAUSAL_ROWS = Kernel(name="causal_rows")
"""Causal attention of some of the queries to the keys up to each."""


@register("aten.scaled_dot_product_attention")
def _attention(op: Op) -> IndexExpr:
    """`... h q d, ... h k d, ... h k e, (... h q k) -> ... h q e`.

    Keys are read whole by the softmax. Where the op builds a causal mask itself and queries are
    split, the kernel is told which of them a rank holds. With grouped queries, query heads are
    `(h r)` where key-value heads are `h`, so splitting `h` keeps each query with its keys.
    """
    query, key = op.inputs[0].shape, op.inputs[1].shape
    lead_shape = op.outputs[0].shape[:-2]
    lead = name_dims(lead_shape, prefix="b")
    sizes = sizes_of((lead, lead_shape)) | {"q": query[-2]}
    heads = lead[-1] if lead else ()
    kv_lead, kv_shape = lead, lead_shape
    if op.arg(7, "enable_gqa", False) and key[-3] != query[-3]:
        sizes |= {"h": key[-3], "r": Size(query[-3].const // key[-3].const)}
        heads = ("h", "r")
        kv_lead, kv_shape = (*lead[:-1], ("h",)), (*lead_shape[:-1], key[-3])
        lead = (*lead[:-1], heads)
    causal = bool(op.arg(5, "is_causal", False))
    row: tuple[str, ...] = () if query[-2] == FROZEN_ONE else ("q",)
    inputs: dict[tuple[int, str], Dims] = {
        (0, "query"): (*_lead(query, lead, lead_shape), row, ()),
        (1, "key"): (*_lead(key, kv_lead, kv_shape), (), ()),
        (2, "value"): (*_lead(op.inputs[2].shape, kv_lead, kv_shape), (), ()),
    }
    if (mask := op.tensor(3, "attn_mask")) is not None:
        tail: Dims = (row if mask.shape[-2:-1] == query[-2:-1] else (), ())
        inputs[3, "attn_mask"] = (*_lead(mask.shape, lead, lead_shape), *tail[-len(mask.shape) :])
    return IndexExpr(
        inputs=op.arrange(inputs),
        outputs=((*lead, row, ()),),
        sizes=sizes,
        even=frozenset(heads),
        filled=True,
        kernel=ATTENTION_DROPOUT if op.arg(4, "dropout_p", 0.0) else LOCAL,
        kernels={"q": CAUSAL_ROWS} if causal else {},
    )


def _lead(shape: Shape, lead: Dims, extents: Shape) -> Dims:
    """Dims before the last two, which broadcast to `lead` of these extents."""
    given = shape[:-2]
    pairs = zip(
        given, lead[len(lead) - len(given) :], extents[len(lead) - len(given) :], strict=True
    )
    return tuple(dim if size == extent else () for size, dim, extent in pairs)
