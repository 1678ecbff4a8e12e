"""Batch norm with the statistics of the whole batch, of which each rank holds some samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime import primitives
from autopar.runtime.axes import AxisGroup
from autopar.runtime.context import StepContext


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    counter: Tensor | None,
    momentum: float,
    eps: float,
    ctx: StepContext,
    count: int,
    axes: Sequence[AxisGroup],
) -> Tensor:
    """Normalise `x` over all dims but 1, like `torch.nn.functional.batch_norm`.

    In training the statistics are those of the `count` values per channel that all ranks of `axes`
    hold together: one all-reduce forward and one backward on each axis. Running statistics (with
    the unbiased variance) and `counter` are updated in place, alike on all of these ranks, and not
    again when a forward is recomputed. In evaluation the running ones are used, where there are
    any. Raises ValueError where the whole batch has one value per channel.
    """
    if not ctx.training and running_mean is not None:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    if count == 1:
        raise ValueError("batch norm in training needs more than 1 value per channel, got 1")
    y, mean, var = _BatchNorm.apply(x, weight, bias, eps, count, axes)
    if ctx.training and not ctx.recomputing:
        with torch.no_grad():
            if running_mean is not None and running_var is not None:
                unbiased = var * (count / (count - 1))
                for running, now in ((running_mean, mean), (running_var, unbiased)):
                    running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
            if counter is not None:
                counter.add_(1)
    return y


class _BatchNorm(torch.autograd.Function):
    """Returns the result, the mean and the biased variance, both in float64."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
        axes: Sequence[AxisGroup],
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var = _moments(wide)
        own = x.numel() // max(1, x.shape[1])
        if axes:
            sums = torch.stack([own * mean, own * (var + mean * mean)])
            for axis in axes:
                sums = primitives.all_reduce(sums, axis)
            mean = sums[0] / count
            var = (sums[1] / count - mean * mean).clamp_(min=0)
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.count, ctx.axes = count, axes
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var)
        factor = scale if weight is None else scale * weight
        y = (wide - _spread(mean, wide)).mul_(_spread(factor, wide))
        if bias is not None:
            y.add_(_spread(bias, wide))
        return y.to(x.dtype), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = grad.to(torch.promote_types(x.dtype, torch.float32))
        normed = (x.to(wide.dtype) - _spread(mean, wide)).mul_(_spread(scale, wide))
        own = torch.stack([wide.sum(dims), (wide * normed).sum(dims)])
        grad_bias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        grad_weight = None if weight is None else own[1].to(weight.dtype)
        sums = own
        for axis in ctx.axes:
            sums = primitives.all_reduce(sums, axis, backward=True)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None, None, None
        sums = sums / ctx.count
        factor = scale if weight is None else scale * weight
        result = (wide - _spread(sums[0], wide)).sub_(normed.mul_(_spread(sums[1], wide)))
        result = result.mul_(_spread(factor, wide)).to(x.dtype)
        return result, grad_weight, grad_bias, None, None, None


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, in float64; zeros without values."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    if x.numel() == 0:
        zeros = x.new_zeros(x.shape[1], dtype=torch.float64)
        return zeros, zeros.clone()
    var, mean = torch.var_mean(x, dims, correction=0)
    return mean.double(), var.double()


def _spread(value: Tensor, like: Tensor) -> Tensor:
    """One number per channel, in the dtype of `like` and ready to broadcast with it."""
    return value.to(like.dtype).view(1, -1, *(1,) * (like.dim() - 2))
