"""The eager single-device model with the random numbers of a parallel program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime import kernels
from autopar.runtime.counter_random import Dims, keep_mask


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
