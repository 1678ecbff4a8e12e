"""Where a value from another stage enters the graph of its stage.

A leaf would hold the value until its gradient is there. An entry keeps the gradient alone: the
value goes after its last reader, unless a backward reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Entry:
    """The entry of one value for one micro-batch."""

    def __init__(self, value: Tensor) -> None:
        self._shape, self._dtype, self._device = value.shape, value.dtype, value.device
        self._gradient: Tensor | None = None

    def enter(self, value: Tensor) -> Tensor:
        """The value in a graph whose backward tells the gradient."""
        return _Enter.apply(torch.empty(0, requires_grad=True), value, self)  # type: ignore[no-any-return]

    def add(self, gradient: Tensor) -> None:
        """Take the gradient, or a part of it where several backwards give one."""
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    def take(self) -> Tensor:
        """The gradient, zeros where no backward gave one; it is let go of here."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:
            gradient = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        return gradient


class _Enter(torch.autograd.Function):
    """The value itself; `anchor` is what asks for a gradient in its place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.entry.add(gradient)
        return None, None, None


__all__ = ["Entry"]
