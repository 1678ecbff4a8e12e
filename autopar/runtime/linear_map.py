"""A linear map over all ranks together as one step of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Map = Callable[[Tensor], Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, transpose: Map) -> Tensor:
        ctx.transpose = transpose
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


def linear_map(x: Tensor, run: Map, transpose: Map) -> Tensor:
    """`run(x)`, whose gradient is `transpose` of the result's."""
    result: Tensor = _LinearMap.apply(x, run, transpose)
    return result
