"""The eager single-device model with the random numbers of a parallel program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime import kernels
from autopar.runtime.counter_random import Dims, keep_mask
from autopar.runtime.loss_scale import LossScale


@dataclass(frozen=True, kw_only=True, slots=True)
class _Key:
    seed: int
    step: int
    training: bool = True


def whole_dims(shape: Iterable[int]) -> Dims:
    """The dims of a tensor that is whole: every offset 0, contiguous strides."""
    dims, stride = [], 1
    for extent in reversed(tuple(shape)):
        dims.append((0, stride))
        stride *= extent
    return tuple(reversed(dims))


class _Functions(TorchFunctionMode):
    """Replaces dropout and attention where the model calls them by name."""

    def __init__(self, key: _Key, numbers: Iterator[int]) -> None:
        super().__init__()
        self._key, self._numbers = key, numbers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        replaced = _REPLACED.get(func)
        return func(*args, **kwargs) if replaced is None else replaced(self, *args, **kwargs)

    def dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        dims = whole_dims(input.shape)
        out = kernels.dropout(input, p, self._key, op=next(self._numbers), dims=dims)
        return input.copy_(out) if inplace else out

    def raw_dropout(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self.dropout(input, p, train)

    def raw_dropout_(self, input: Tensor, p: float, train: bool) -> Tensor:
        return self.dropout(input, p, train, True)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        op, dims = 0, whole_dims((*query.shape[:-1], key.shape[-2]))
        if dropout_p > 0.0:
            op = next(self._numbers)
        return kernels.attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            ctx=self._key,
            op=op,
            dims=dims,
            **kwargs,
        )


_REPLACED: dict[Any, Callable[..., Any]] = {
    F.dropout: _Functions.dropout,
    torch.dropout: _Functions.raw_dropout,
    torch.dropout_: _Functions.raw_dropout_,
    torch.ops.aten.dropout.default: _Functions.raw_dropout,
    F.scaled_dot_product_attention: _Functions.attention,
    torch.ops.aten.scaled_dot_product_attention.default: _Functions.attention,
}


class _Inside(TorchDispatchMode):
    """Replaces the masks of dropout inside composite functions, such as multi-head attention."""

    def __init__(self, key: _Key, numbers: Iterator[int]) -> None:
        super().__init__()
        self._key, self._numbers = key, numbers

    def _keep(self, like: Tensor, p: float) -> Tensor:
        return keep_mask(self._key, next(self._numbers), p, whole_dims(like.shape), like)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            noise, keep_p = args[0], args[1] if len(args) > 1 else 0.5
            return noise.copy_(self._keep(noise, 1.0 - keep_p))
        if func is torch.ops.aten.native_dropout.default and args[2] is not False:
            x, p = args[:2]
            keep = self._keep(x, p)
            return x * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0), keep
        return func(*args, **(kwargs or {}))


_NARROW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Training a low-precision model on one device with float32 copies of its weights.

    The model computes in its own dtype; the optimizer updates the copies, from gradients in
    float32, and they are cast back into the model. `parameters` are what the optimizer updates:
    frozen ones and those in a wide dtype have no copy and are the model's own. With a `loss_scale`
    a step with a gradient that is not finite is skipped; `overflowed` says so of the last one.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.model = model
        self._own = [p for p in model.parameters() if p.requires_grad]
        self.parameters = [
            nn.Parameter(p.detach().float()) if p.dtype in _NARROW else p for p in self._own
        ]
        copies = {id(p): copy for p, copy in zip(self._own, self.parameters, strict=True)}
        self.names = {
            name: copies[id(p)]
            for name, p in model.named_parameters(remove_duplicate=False)
            if p.requires_grad
        }
        self.optimizer = make_optimizer(self.parameters)
        self._scale = loss_scale
        self.overflowed = False

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss, unscaled, into `.grad` of `parameters`; none after an overflow."""
        for parameter in (*self._own, *self.parameters):
            parameter.grad = None
        factor = 1.0 if self._scale is None else self._scale.value
        (loss if self._scale is None else loss * factor).backward()
        grads = [p.grad for p in self._own]
        for own in self._own:
            own.grad = None
        if self._scale is not None:
            self.overflowed = not all(bool(g.isfinite().all()) for g in grads if g is not None)
            self._scale.update(overflowed=self.overflowed)
            if self.overflowed:
                return
        for grad, master in zip(grads, self.parameters, strict=True):
            if grad is not None:
                master.grad = grad.to(master.dtype) / factor

    @torch.no_grad()
    def step(self) -> None:
        """Step the optimizer and cast the weights back into the model."""
        self.optimizer.step()
        for own, master in zip(self._own, self.parameters, strict=True):
            own.copy_(master)


@contextmanager
def reference_random(seed: int, step: int) -> Iterator[None]:
    """Run an unmodified model on one device with the dropout masks of every parallel run.

    Random ops (dropout and attention with dropout, while training and with a probability above 0)
    are numbered 0, 1, 2, ... as they run, which is the order of the captured graph. A forward that
    is run again in the backward would be numbered on, so the model must not recompute.
    """
    key, numbers = _Key(seed=seed, step=step), count()
    with _Inside(key, numbers), _Functions(key, numbers):
        yield
