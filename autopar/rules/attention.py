"""Scaled dot-product attention: split over batch, heads, or queries."""

from __future__ import annotations

from autopar.ir.graph import TensorSpec
from autopar.ir.size import Size
from autopar.rules.index_expr import LOCAL, Dims, IndexExpr, Kernel, Op
from autopar.rules.letters import FROZEN_ONE, align, name_dims, sizes_of
from autopar.rules.registry import register

ATTENTION_DROPOUT = Kernel(name="attention_dropout")
"""Attention whose dropout mask is cut from the one a single device would draw."""


@register("aten.scaled_dot_product_attention")
def _attention(op: Op) -> IndexExpr:
    """`... h q d, ... h k d, ... h k e, (... h q k) -> ... h q e`.

    Keys are read whole by the softmax. Queries may be split unless the op builds a causal mask
    itself, for that mask starts at query 0. With grouped queries, query heads are `(h r)` where
    key-value heads are `h`, so splitting `h` keeps each query with its keys.
    """
    query, key = op.inputs[0].shape, op.inputs[1].shape
    lead_shape = op.outputs[0].shape[:-2]
    lead = name_dims(lead_shape, prefix="b")
    sizes = sizes_of((lead, lead_shape)) | {"q": query[-2]}
    heads = lead[-1] if lead else ()
    kv_lead = lead
    if op.arg(7, "enable_gqa", False) and key[-3] != query[-3]:
        sizes |= {"h": key[-3], "r": Size(query[-3].const // key[-3].const)}
        heads = ("h", "r")
        lead, kv_lead = (*lead[:-1], heads), (*lead[:-1], ("h",))
    causal = bool(op.arg(5, "is_causal", False))
    row: tuple[str, ...] = () if causal or query[-2] == FROZEN_ONE else ("q",)
    inputs: list[Dims] = [
        (*_lead(op.inputs[0], lead, lead_shape), row, ()),
        *((*_lead(spec, kv_lead, None, sizes), (), ()) for spec in op.inputs[1:3]),
    ]
    if (mask := op.tensor(3, "attn_mask")) is not None:
        mask_row = row if len(mask.shape) > 1 and mask.shape[-2] == query[-2] else ()
        tail: Dims = (mask_row, ())[-len(mask.shape) :]
        inputs.append((*_lead(mask, lead, lead_shape), *tail))
    return IndexExpr(
        inputs=tuple(inputs),
        outputs=((*lead, row, ()),),
        sizes=sizes,
        even=frozenset(heads),
        kernel=ATTENTION_DROPOUT if op.arg(4, "dropout_p", 0.0) else LOCAL,
    )
