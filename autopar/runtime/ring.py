"""Ring attention: keys and values travel round the ranks that hold the queries (Liu et al. 2023,
arXiv:2310.01889).

Each rank attends from its queries to one rank's keys at a time, and merges the results by their
log-sum-exp, so that no rank ever holds all keys. In the backward the gradients of keys and values
travel with them, and arrive at home after a full turn. The next message is under way while a part
is worked on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.ir.placement import Shard, local_slices
from autopar.runtime import primitives
from autopar.runtime.axes import AxisGroup, Ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ring:
    """Which positions every rank holds, and how queries see keys."""

    axis: AxisGroup
    ranges: tuple[Ranges, ...]
    is_causal: bool
    scale: float

    def parts(self, other: int) -> Iterator[tuple[slice, slice, bool]]:
        """Local queries, the keys of rank `other` that they see, and whether only up to their own
        position. Ranges of two ranks are the same or apart."""
        query_at = 0
        for query, rows in self.ranges[self.axis.rank]:
            key_at = 0
            for key, columns in self.ranges[other]:
                if rows and columns and not (self.is_causal and key > query):
                    diagonal = self.is_causal and key == query
                    yield (
                        slice(query_at, query_at + rows),
                        slice(key_at, key_at + columns),
                        diagonal,
                    )
                key_at += columns
            query_at += rows


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisGroup,
    size: int,
    pieces: tuple[int, ...] = (),
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention over a sequence of `size` that `axis` splits in `pieces`, queries and keys alike.

    Shapes `[..., heads, local sequence, head dim]`; with `enable_gqa` query heads are a multiple of
    the key and value heads.
    """
    repeat = q.size(-3) // k.size(-3) if enable_gqa else 1
    ring = _Ring(
        axis=axis,
        ranges=tuple(
            local_slices(size, Shard(0, pieces), axis.size, rank) for rank in range(axis.size)
        ),
        is_causal=is_causal,
        scale=q.size(-1) ** -0.5 if scale is None else scale,
    )
    # Heads that share keys stand side by side: [..., kv heads, repeat, sequence, dim].
    grouped = q.unflatten(-3, (k.size(-3), repeat))
    return _RingAttention.apply(grouped, k.unsqueeze(-3), v.unsqueeze(-3), ring).flatten(-4, -3)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros((*q.shape[:-1], v.size(-1)), dtype=wide)
        weight = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
        for other, (keys, values) in _turn(ring, (k, v), backward=False):
            for rows, columns, diagonal in ring.parts(other):
                scores = _scores(ring, q[..., rows, :], keys[..., columns, :], diagonal)
                found = scores.logsumexp(-1)
                merged = torch.logaddexp(weight[..., rows], found)
                part = (scores - merged.unsqueeze(-1)).exp() @ values[..., columns, :].to(wide)
                kept = (weight[..., rows] - merged).exp().unsqueeze(-1)
                total[..., rows, :] = total[..., rows, :] * kept + part
                weight[..., rows] = merged
        out = total.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, weight = ctx.saved_tensors
        ring, wide = ctx.ring, weight.dtype
        grad, queries = grad.to(wide), q.to(wide)
        delta = (grad * out.to(wide)).sum(-1, keepdim=True)
        grad_q = torch.zeros_like(queries)
        grads = (torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide))
        for other, (keys, values) in _turn(ring, (k, v), backward=True):
            for rows, columns, diagonal in ring.parts(other):
                scores = _scores(ring, q[..., rows, :], keys[..., columns, :], diagonal)
                shares = (scores - weight[..., rows].unsqueeze(-1)).exp()
                above = grad[..., rows, :]
                slope = above @ values[..., columns, :].to(wide).transpose(-1, -2)
                slope = shares * (slope - delta[..., rows, :]) * ring.scale
                grad_q[..., rows, :] += slope @ keys[..., columns, :].to(wide)
                own_k = (slope.transpose(-1, -2) @ queries[..., rows, :]).sum(-3, keepdim=True)
                own_v = (shares.transpose(-1, -2) @ above).sum(-3, keepdim=True)
                grads[0][..., columns, :] += own_k
                grads[1][..., columns, :] += own_v
            first, second = primitives.pass_on(grads, ring.axis, backward=True)()
            grads = first, second
        return grad_q.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), None


def _scores(ring: _Ring, q: Tensor, k: Tensor, diagonal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * ring.scale) @ k.to(wide).transpose(-1, -2)
    if diagonal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


_Pair = tuple[Tensor, Tensor]


def _turn(ring: _Ring, pair: _Pair, *, backward: bool) -> Iterator[tuple[int, _Pair]]:
    """Every rank's pair in turn, this rank's own first; the next one arrives meanwhile."""
    size, rank = ring.axis.size, ring.axis.rank
    for step in range(size):
        last = step + 1 == size
        arriving = None if last else primitives.pass_on(pair, ring.axis, backward=backward)
        yield (rank - step) % size, pair
        if arriving is not None:
            first, second = arriving()
            pair = first, second
