"""Products with weights whose backward can be computed in two parts.

Where a schedule splits the backward, its input part (`I`) gives the gradient that the stage before
waits for, its weight part (`W`) the gradients of weights and biases, later. A product here leaves
the latter to `ctx.deferred`; everything else of a stage is computed in the input part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.context import DeferredGradient, StepContext


@dataclass(frozen=True, kw_only=True, slots=True)
class _Product:
    """A function of (input, weight, bias or None) and its two gradients, each of (gradient, the
    other factor).

    That of the weight must not need the weight, which may be gathered for as long as it is read.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


_LINEAR = _Product(
    forward=F.linear,
    input_gradient=lambda grad, weight: grad @ weight,
    weight_gradient=lambda grad, x: _rows(grad).t() @ _rows(x),
)


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)


_MATMUL = _Product(
    forward=_matmul,
    input_gradient=lambda grad, weight: grad @ weight.t(),
    weight_gradient=lambda grad, x: _rows(x).t() @ _rows(grad),
)
_BMM = _Product(
    forward=lambda x, weight, bias: torch.bmm(x, weight),
    input_gradient=lambda grad, weight: grad @ weight.transpose(1, 2),
    weight_gradient=lambda grad, x: x.transpose(1, 2) @ grad,
)


class _Split(torch.autograd.Function):
    """A product whose weight gradient is computed when the schedule says so."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: _Product,
        deferred: list[DeferredGradient],
    ) -> Tensor:
        # Saved as autograd does it, so that a block that is run again does not keep its input.
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.deferred = product, deferred
        ctx.weight_edge = get_gradient_edge(weight) if weight.requires_grad else None
        ctx.bias_edge = None
        if bias is not None and bias.requires_grad:
            ctx.bias_edge = get_gradient_edge(bias)
        return product.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        saved, weight = ctx.saved_tensors
        x = saved.detach()  # its graph would hold the received values that it begins with
        product, edges = ctx.product, (ctx.weight_edge, ctx.bias_edge)

        def gradients() -> list[tuple[GradientEdge, Tensor]]:
            found = []
            if edges[0] is not None:
                found.append((edges[0], product.weight_gradient(grad, x)))
            if edges[1] is not None:
                found.append((edges[1], _rows(grad).sum(0)))
            return found

        ctx.deferred.append(gradients)
        needed = ctx.needs_input_grad[0]
        return product.input_gradient(grad, weight) if needed else None, None, None, None, None


class _SplitEmbedding(torch.autograd.Function):
    """An embedding whose gradient, all of it the weight's, is computed in the weight part."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int,
        deferred: list[DeferredGradient],
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.deferred, ctx.padding_idx, ctx.rows = deferred, padding_idx, weight.shape[0]
        ctx.weight_edge = get_gradient_edge(weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (ids,), edge, rows, padding = ctx.saved_tensors, ctx.weight_edge, ctx.rows, ctx.padding_idx

        def gradients() -> list[tuple[GradientEdge, Tensor]]:
            dense = torch.ops.aten.embedding_dense_backward.default
            return [(edge, dense(grad, ids, rows, padding, False))]

        ctx.deferred.append(gradients)
        return None, None, None, None


_APART = ("AccumulateGrad", "_GatherBackward")
"""Nodes that keep nothing for their backward, and so take one gradient after the other."""


def compute_deferred(deferred: list[DeferredGradient]) -> None:
    """Compute gradients that were left, and add them to the weights they belong to.

    What is done is dropped: its list is empty in the end. Gradients of values made from weights
    (a transposed or gathered one) go through what made them in one backward.
    """
    left: list[tuple[GradientEdge, Tensor]] = []
    deferred.reverse()
    while deferred:
        left += _added(deferred.pop()())
    if left:
        edges, grads = zip(*left, strict=True)
        torch.autograd.backward(edges, grads)


def _added(gradients: list[tuple[GradientEdge, Tensor]]) -> list[tuple[GradientEdge, Tensor]]:
    """Add the gradients of one product that take no more than that, and return the others. None
    outlives the call: the next product would be computed beside it."""
    left = []
    for edge, grad in gradients:
        if edge.node.name().endswith(_APART):
            torch.autograd.backward([edge], [grad])
        else:
            left.append((edge, grad))
    return left


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product, ctx: StepContext
) -> Tensor | None:
    """The product with its backward in two parts; None where it is not to be split."""
    if ctx.deferred is None or not torch.is_grad_enabled():
        return None
    if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    return _Split.apply(x, weight, bias, product, ctx.deferred)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, ctx: StepContext) -> Tensor:
    """`F.linear`."""
    split = _product(x, weight, bias, _LINEAR, ctx)
    return F.linear(x, weight, bias) if split is None else split


def matmul(x: Tensor, weight: Tensor, ctx: StepContext) -> Tensor:
    """`torch.matmul` with a weight `[in, out]`."""
    split = _product(x, weight, None, _MATMUL, ctx) if weight.dim() == 2 and x.dim() > 1 else None
    return torch.matmul(x, weight) if split is None else split


def addmm(bias: Tensor, x: Tensor, weight: Tensor, ctx: StepContext) -> Tensor:
    """`torch.addmm` with a weight `[in, out]` and a bias `[out]`."""
    split = _product(x, weight, bias, _MATMUL, ctx) if bias.dim() == 1 else None
    return torch.addmm(bias, x, weight) if split is None else split


def bmm(x: Tensor, weight: Tensor, ctx: StepContext) -> Tensor:
    """`torch.bmm` with weights `[batch, in, out]`."""
    split = _product(x, weight, None, _BMM, ctx)
    return torch.bmm(x, weight) if split is None else split


def embedding(ids: Tensor, weight: Tensor, ctx: StepContext, *, padding_idx: int = -1) -> Tensor:
    """`F.embedding`."""
    if ctx.deferred is None or not torch.is_grad_enabled() or not weight.requires_grad:
        return F.embedding(ids, weight, None if padding_idx == -1 else padding_idx)
    return _SplitEmbedding.apply(ids, weight, padding_idx, ctx.deferred)
