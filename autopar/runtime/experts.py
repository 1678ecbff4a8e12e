"""Dropless experts: rows sorted by expert, multiplied group by group, and put back.

`order` lists this rank's choices sorted by expert, the earlier first; `counts` says how many chose
each expert and `held` how many slots of each this rank holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT_BYTES = 16
"""Strides that torch's grouped product takes."""

_FAST = {"cuda": (torch.bfloat16,), "cpu": (torch.bfloat16, torch.float32)}


def route(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`order`, `counts` and `held` of choices `[..., k]` among `experts`; they may be none."""
    flat = chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int64))
    return flat.argsort(stable=True), counts, counts


def to_experts(rows: Tensor, order: Tensor, times: int = 1) -> Tensor:
    """Rows in sorted order, each `times` times: once for every choice of its token."""
    return rows.index_select(0, order if times == 1 else order // times)


def from_experts(slots: Tensor, order: Tensor) -> Tensor:
    """Rows in the order of the choices; the inverse of `to_experts` with `times` 1."""
    return torch.empty_like(slots).index_copy(0, order, slots)


def expert_mm(slots: Tensor, weight: Tensor, held: Tensor) -> Tensor:
    """`[rows, m]` sorted by expert times `[experts, m, f]`: each row by its expert's matrix.

    An expert without rows gets a gradient of zeros. `held` may be one line per rank that the rows
    are from; lines are added up.
    """
    if held.dim() > 1:
        held = held.sum(0)
    return grouped_mm(slots, weight, held.cumsum(0))


def expert_rows(table: Tensor, held: Tensor) -> Tensor:
    """The row `[experts, ...]` of its expert for every slot."""
    if held.dim() > 1:
        held = held.sum(0)
    return table.repeat_interleave(held, 0)


class _Contiguous(torch.autograd.Function):
    """The identity; its gradient is contiguous, which torch's grouped product asks for on CPU."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.contiguous()


def grouped_mm(slots: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows `offsets[i - 1]` to `offsets[i]` of `slots` times `weight[i]`, for any dtype and sizes.

    torch's kernel where it runs, else one product per expert.
    """
    if _is_fast(slots, weight):
        product = F.grouped_mm(slots.contiguous(), weight, offs=offsets.to(torch.int32))
        return _Contiguous.apply(product)
    ends = offsets.tolist()
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    rest = slots.shape[0] - sum(lengths)
    groups = slots.split([*lengths, rest])
    parts = [rows @ matrix for rows, matrix in zip(groups, weight.unbind(0), strict=False)]
    return torch.cat([*parts, slots.new_zeros((rest, weight.shape[2]))])


def _is_fast(slots: Tensor, weight: Tensor) -> bool:
    known = slots.dtype in _FAST.get(slots.device.type, ()) and slots.dtype == weight.dtype
    item = slots.element_size()
    aligned = all(extent * item % _ALIGNMENT_BYTES == 0 for extent in weight.shape[1:])
    return known and aligned and slots.numel() > 0 and weight.numel() > 0


__all__ = ["expert_mm", "expert_rows", "from_experts", "grouped_mm", "route", "to_experts"]
