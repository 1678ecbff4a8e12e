"""Ops of a generated program that are more than a local call of torch.

Random ops draw their masks from `counter_random`; losses return sums, so that the parts of several
ranks and micro-batches add up to the loss of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from autopar.runtime.axes import Ranges
from autopar.runtime.batch_norm import batch_norm
from autopar.runtime.counter_random import Dims, RandomKey, keep_mask
from autopar.runtime.expert_exchange import (
    from_experts_exchange,
    route_exchange,
    to_experts_exchange,
)
from autopar.runtime.experts import (
    expert_mm,
    expert_rows,
    from_experts,
    grouped_mm,
    route,
    to_experts,
)
from autopar.runtime.ring import ring_attention
from autopar.runtime.vocab import vocab_cross_entropy, vocab_embedding
from autopar.runtime.weight_gradients import addmm, bmm, embedding, linear, matmul


class _Dropout(torch.autograd.Function):
    """Multiplies by a mask and a scale; only the bool mask is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x.masked_fill(~keep, 0).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return grad.masked_fill(~keep, 0).mul_(ctx.scale), None, None


def dropout(x: Tensor, p: float, ctx: RandomKey, *, op: int, dims: Dims) -> Tensor:
    """Zero each element with probability `p`, scale the others by `1 / (1 - p)`.

    `op` numbers the random op in the program. `dims` has one `(where, stride)` per dim of `x`: the
    start of the local part in the whole dim (or `(start, length)` ranges of it), and the element
    stride of the dim in the whole, contiguous tensor. Does nothing unless `ctx.training`.
    """
    if not ctx.training or p == 0.0:
        return x
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return _Dropout.apply(x, keep_mask(ctx, op, p, dims, x), scale)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    rows: Ranges | None = None,
    ctx: RandomKey | None = None,
    op: int = 0,
    dims: Dims = (),
) -> Tensor:
    """`F.scaled_dot_product_attention`, with dropout drawn by position.

    `rows` are the `(start, length)` ranges of queries that `q` holds, for a causal mask; by default
    from the first query on. `op` and `dims` are those of `dropout` on the attention weights
    `[..., heads, queries, keys]`. Without dropout this is torch's own, which never makes the
    weights.
    """
    if ctx is None or not ctx.training or dropout_p == 0.0:
        if is_causal and rows is not None:
            return _causal_rows(q, k, v, rows, scale, enable_gqa)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        k = k.repeat_interleave(q.size(-3) // k.size(-3), -3)
        v = v.repeat_interleave(q.size(-3) // v.size(-3), -3)
    scores = (q * (q.size(-1) ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        at = rows or ((0, scores.size(-2)),)
        queries = torch.cat([torch.arange(first, first + size) for first, size in at])
        causal = queries.to(q.device)[:, None] >= torch.arange(scores.size(-1), device=q.device)
        scores = scores.masked_fill(~causal, float("-inf"))
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        scores = (
            scores.masked_fill(~attn_mask, float("-inf"))
            if hides
            else scores + attn_mask.to(scores.dtype)
        )
    # A query that may see no key attends to nothing, as in torch.
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    return dropout(weights, dropout_p, ctx, op=op, dims=dims) @ v


def _causal_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Ranges, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention of ranges of queries, each to no more keys than its last query sees."""
    parts, taken = [], 0
    for start, length in rows:
        part, end = q.narrow(-2, taken, length), start + length
        taken += length
        if length:
            keys, values = k.narrow(-2, 0, end), v.narrow(-2, 0, end)
            mask = causal_lower_right(length, end) if start else None
            parts.append(
                F.scaled_dot_product_attention(
                    part, keys, values, mask, 0.0, start == 0, scale=scale, enable_gqa=enable_gqa
                )
            )
    return torch.cat(parts, -2)


def cross_entropy_sum(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Cross entropy summed over the targets that are not `ignore_index`."""
    return F.cross_entropy(
        logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def count_valid(
    target: Tensor, ignore_index: int = -100, dtype: torch.dtype = torch.float32
) -> Tensor:
    """How many targets are not `ignore_index`, as a scalar of `dtype`."""
    return (target != ignore_index).sum().to(dtype)


def partial_mean(
    x: Tensor, dims: tuple[int, ...], keepdim: bool, global_count: int | Tensor
) -> Tensor:
    """This rank's summand of a mean over `dims` of which all ranks hold `global_count` elements."""
    # A sum of float16 numbers may be too large for float16 where their mean is not.
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.sum(dims, keepdim=keepdim, dtype=wide) / global_count).to(x.dtype)


__all__ = [
    "addmm",
    "attention",
    "batch_norm",
    "bmm",
    "count_valid",
    "cross_entropy_sum",
    "dropout",
    "embedding",
    "expert_mm",
    "expert_rows",
    "from_experts",
    "from_experts_exchange",
    "grouped_mm",
    "linear",
    "matmul",
    "partial_mean",
    "ring_attention",
    "route",
    "route_exchange",
    "to_experts",
    "to_experts_exchange",
    "vocab_cross_entropy",
    "vocab_embedding",
]
