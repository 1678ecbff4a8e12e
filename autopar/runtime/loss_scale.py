"""Dynamic loss scaling for float16, whose small gradients would be zero without it.

The rules are those of `torch.amp.GradScaler`; the decision to skip a step is one of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LossScale:
    """The factor on the loss's gradient: halved after an overflow, doubled after many clean steps.

    `value` is the scale of the step in progress or the next one.
    """

    def __init__(
        self,
        init: float = 2.0**16,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ) -> None:
        self.value = init
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._clean = 0

    def update(self, *, overflowed: bool) -> None:
        """After each step: `overflowed` says that it had a gradient that is not finite."""
        if overflowed:
            self.value *= self._backoff
            self._clean = 0
            return
        self._clean += 1
        if self._clean == self._interval:
            self.value *= self._growth
            self._clean = 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and count of clean steps, as numbers."""
        return {"scale": self.value, "clean_steps": self._clean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.value, self._clean = float(state["scale"]), int(state["clean_steps"])


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale(), None


def scale_gradient(loss: Tensor, scale: Callable[[], float]) -> Tensor:
    """The loss as it is; the backward starts with its gradient times `scale()`."""
    return _ScaledGradient.apply(loss, scale)
