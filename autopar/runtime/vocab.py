"""Embedding and cross entropy where the vocabulary is split over an axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime import primitives
from autopar.runtime.axes import AxisGroup


def vocab_embedding(
    ids: Tensor, weight_shard: Tensor, start: int, padding_idx: int | None = None
) -> Tensor:
    """Rows of an embedding of which this rank holds those from `start` on: P(sum) on the axis.

    Ids that lie on other ranks give zero rows. The row `padding_idx` (of the whole table) gets no
    gradient.
    """
    rows = weight_shard.shape[0]
    if rows == 0:
        # Depends on the empty shard, so that its gradient is an empty tensor and not None.
        return weight_shard.sum() + weight_shard.new_zeros((*ids.shape, weight_shard.shape[1]))
    local = ids - start
    elsewhere = (local < 0) | (local >= rows)
    padding = None
    if padding_idx is not None and start <= padding_idx < start + rows:
        padding = padding_idx - start
    found = F.embedding(local.masked_fill(elsewhere, 0), weight_shard, padding)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


class _VocabCrossEntropy(torch.autograd.Function):
    """The loss of one rank's classes; see `vocab_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        axis: AxisGroup,
        ignore_index: int,
        label_smoothing: float,
        num_classes: int,
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = logits.to(wide)
        classes = scores.shape[-1]
        counts = target != ignore_index
        local = target - start
        here = counts & (local >= 0) & (local < classes)
        local = local.masked_fill(~here, 0)
        top = scores.amax(-1) if classes else scores.new_full(target.shape, float("-inf"))
        top = primitives.all_reduce(top, axis, reduction="max")
        scores = (scores - top.unsqueeze(-1)).exp_() if classes else scores
        total = primitives.all_reduce(scores.sum(-1), axis)
        probabilities = scores.div_(total.unsqueeze(-1))
        loss = torch.zeros((), dtype=wide, device=logits.device)
        if axis.rank == 0:
            loss += (top + total.log()).masked_fill(~counts, 0).sum()
        if classes:
            picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide)
            loss -= (1 - label_smoothing) * picked.masked_fill(~here, 0).sum()
            if label_smoothing:
                every = logits.sum(-1, dtype=wide).masked_fill(~counts, 0).sum()
                loss -= label_smoothing / num_classes * every
        ctx.save_for_backward(probabilities.to(logits.dtype), local, here, counts)
        ctx.smoothing = (label_smoothing, num_classes)
        return loss.to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, here, counts = ctx.saved_tensors
        smoothing, num_classes = ctx.smoothing
        result = probabilities.clone()
        if result.shape[-1]:
            share = here.to(result.dtype).mul_(-(1 - smoothing))
            result.scatter_add_(-1, local.unsqueeze(-1), share.unsqueeze(-1))
            if smoothing:
                result -= smoothing / num_classes
        result = result.masked_fill_(~counts.unsqueeze(-1), 0).mul_(grad)
        return result, None, None, None, None, None, None


def vocab_cross_entropy(
    logits_shard: Tensor,
    target: Tensor,
    start: int,
    axis: AxisGroup,
    *,
    num_classes: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Summed cross entropy over logits of which this rank holds the classes from `start` on.

    `logits_shard` is `[N, c]`, `[N, c, ...]` or `[c]` and `target` `[N]`, `[N, ...]` or a scalar of
    class indices, the same on every rank. Returns a scalar P(sum) on the axis. Runs two all-reduces
    shaped like the target forward (the maximum and the sum of exponentials, in float32, or float64
    for float64 logits), none backward. A rank may hold no class. `num_classes` of the whole tensor
    is needed for label smoothing.
    """
    if label_smoothing and num_classes <= 0:
        raise ValueError("vocab_cross_entropy with label_smoothing needs num_classes")
    last = logits_shard.movedim(1 if logits_shard.dim() > 1 else 0, -1)
    return _VocabCrossEntropy.apply(
        last, target, start, axis, ignore_index, label_smoothing, num_classes
    )
