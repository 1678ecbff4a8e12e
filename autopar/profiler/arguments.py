"""Tensors and other arguments to run one local op with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.capture.interpret import OWN_OPS
from autopar.costs.families import SIZE_ARGUMENT
from autopar.costs.local_op import SLOT, LocalOp, Order, StoredDim
from autopar.ir.graph import Arg, Ref


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """An op with tensors on a device, ready to be called again and again."""

    op: LocalOp
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(op: LocalOp, device: torch.device) -> Arguments:
        """Random tensors of an op's shapes. Raises AttributeError for an op that torch has not."""
        inputs = tuple(_tensor(op, index, device) for index in range(len(op.input_shapes)))
        args = [_bind(arg, inputs, device) for arg in op.args]
        kwargs = {name: _bind(arg, inputs, device) for name, arg in op.kwargs}
        position = SIZE_ARGUMENT.get(op.name)
        if position is not None and position < len(args):
            args[position] = list(op.output_shapes[0])
        _adapt_groups(op, args, kwargs)
        function = _function(op.target)
        if not op.input_shapes:
            kwargs["device"] = device
        return Arguments(op=op, function=function, inputs=inputs, args=tuple(args), kwargs=kwargs)

    def call(self) -> Any:
        """Run the op."""
        with torch.set_grad_enabled(self.op.requires_grad):
            return self.function(*self.args, **self.kwargs)


def _tensor(op: LocalOp, index: int, device: torch.device) -> Tensor:
    shape, dtype = op.input_shapes[index], getattr(torch, op.input_dtypes[index])
    if dtype.is_floating_point or dtype.is_complex:
        tensor = _stored(shape, op.order(index), dtype, device)
        return tensor.requires_grad_(op.needs_grad(index))
    if made := _INTEGERS.get((op.name, index)):
        return made(op).to(device=device, dtype=dtype)
    limit = 2 if dtype == torch.bool else _LIMITS.get(op.name, lambda op: 2)(op)
    return torch.randint(0, max(1, limit), shape, device=device).to(dtype)


def _stored(shape: Sequence[int], order: Order, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values that lie in memory in an order; a cut dim is half of the one it is cut from."""
    order = order or tuple(StoredDim(dim=dim) for dim in range(len(shape)))
    held = [1 if d.broadcast else shape[d.dim] * (2 if d.cut else 1) for d in order]
    places = sorted(range(len(order)), key=lambda place: order[place].dim)
    tensor = torch.randn(held, dtype=dtype, device=device).permute(places)
    for stored in order:
        if stored.cut:
            tensor = tensor.narrow(stored.dim, 0, shape[stored.dim])
    return tensor.expand(list(shape))


def _rows(op: LocalOp) -> int:
    return op.input_shapes[0][0]


def _classes(op: LocalOp) -> int:
    shape = op.input_shapes[0]
    return shape[1] if len(shape) > 1 else shape[0]


def _smallest(op: LocalOp) -> int:
    return min(op.input_shapes[0], default=1)


_LIMITS: dict[str, Callable[[LocalOp], int]] = {
    "embedding": _rows,
    "cross_entropy_loss": _classes,
    "cross_entropy_sum": _classes,
    "route": lambda op: int(op.args[1]),  # type: ignore[arg-type]
    **dict.fromkeys(("index", "index_select", "gather", "scatter", "scatter_add"), _smallest),
}
"""Bound of the integers an op reads, where they are indices into something."""


def _shuffled(index: int) -> Callable[[LocalOp], Tensor]:
    return lambda op: torch.randperm(op.input_shapes[index][0])


def _evenly(index: int, rows: Callable[[LocalOp], int]) -> Callable[[LocalOp], Tensor]:
    """Rows dealt to experts as evenly as they go."""

    def made(op: LocalOp) -> Tensor:
        experts, whole = op.input_shapes[index][0], rows(op)
        return torch.tensor([len(range(i, whole, experts)) for i in range(experts)])

    return made


_INTEGERS: dict[tuple[str, int], Callable[[LocalOp], Tensor]] = {
    ("to_experts", 1): _shuffled(1),
    ("to_experts", 2): _evenly(2, lambda op: op.input_shapes[1][0]),
    ("to_experts", 3): _evenly(3, lambda op: op.input_shapes[1][0]),
    ("from_experts", 1): _shuffled(1),
    ("from_experts", 2): _evenly(2, _rows),
    ("from_experts", 3): _evenly(3, _rows),
    ("expert_mm", 2): _evenly(2, _rows),
    ("expert_rows", 1): _evenly(1, lambda op: op.output_shapes[0][0]),
    ("expert_rows", 2): _shuffled(2),
}
"""(op, input) to the integers it needs, where random ones would make no sense."""


def _adapt_groups(op: LocalOp, args: list[Any], kwargs: dict[str, Any]) -> None:
    """A convolution on a share of the channels has a share of the groups."""
    if op.name not in ("conv1d", "conv2d", "conv3d") or len(op.input_shapes) < 2:
        return
    groups = op.input_shapes[0][1] // max(1, op.input_shapes[1][1])
    if len(args) > 6:
        args[6] = groups
    elif "groups" in kwargs:
        kwargs["groups"] = groups


def _bind(arg: Arg, inputs: Sequence[Tensor], device: torch.device) -> Any:
    """A torch argument: slots become tensors, `dtype:float32` and the like torch's objects."""
    if isinstance(arg, Ref):
        if arg.name != SLOT:
            raise ValueError(f"{arg} is no slot of a local op")
        return inputs[arg.index]
    if isinstance(arg, tuple):
        return [_bind(item, inputs, device) for item in arg]
    if isinstance(arg, str) and ":" in arg:
        kind, _, value = arg.partition(":")
        return device if kind == "device" else getattr(torch, value)
    return arg


def _function(target: str) -> Callable[..., Any]:
    """The function of a target such as `aten.linear.default`."""
    if target in OWN_OPS:
        return OWN_OPS[target]
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
