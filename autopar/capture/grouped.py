"""Grouped matrix products as an op that can be traced.

`torch.nn.functional.grouped_mm` runs in float32 on CPU and CUDA, but torch traces it in bfloat16
only. While a model is traced its calls become `autopar::grouped_mm`, which takes any dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@torch.library.custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(slots: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows `offsets[i - 1]` to `offsets[i]` of `slots` (rows, k) times `weight[i]` (experts, k, n).

    Rows behind the last offset are zero.
    """
    result = slots.new_zeros((slots.shape[0], weight.shape[2]))
    for index, start, end in _groups(offsets):
        result[start:end] = slots[start:end] @ weight[index]
    return result


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    ends = offsets.tolist()
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield index, start, end


@grouped_mm.register_fake
def _traced(slots: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return slots.new_empty((slots.shape[0], weight.shape[2]))


@torch.library.custom_op("autopar::grouped_mm_backward", mutates_args=())
def _gradients(
    grad: Tensor, slots: Tensor, weight: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    to_slots, to_weight = torch.zeros_like(slots), torch.zeros_like(weight)
    for index, start, end in _groups(offsets):
        to_slots[start:end] = grad[start:end] @ weight[index].t()
        to_weight[index] = slots[start:end].t() @ grad[start:end]
    return to_slots, to_weight


@_gradients.register_fake
def _traced_gradients(
    grad: Tensor, slots: Tensor, weight: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(slots), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    slots, weight, offsets = ctx.saved_tensors
    return (*_gradients(grad, slots, weight, offsets), None)


grouped_mm.register_autograd(_backward, setup_context=_setup)


@contextlib.contextmanager
def traceable_grouped_mm() -> Iterator[None]:
    """Within, torch's grouped product of rows with experts' matrices is `autopar::grouped_mm`."""
    original = torch._grouped_mm

    def replaced(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        offsets = args[0] if args else kwargs.get("offs")
        others = [*args[1:], *(value for name, value in kwargs.items() if name != "offs")]
        plain = offsets is not None and all(value is None for value in others)
        if plain and mat_a.dim() == 2 and mat_b.dim() == 3:
            return grouped_mm(mat_a, mat_b, offsets)
        return original(mat_a, mat_b, *args, **kwargs)

    with mock.patch.object(torch, "_grouped_mm", replaced):
        yield


__all__ = ["grouped_mm", "traceable_grouped_mm"]
