"""Running an `OpGraph` op by op, to check that it says what the model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.arguments import op_overload
from autopar.ir.graph import Arg, OpGraph, OpNode, Ref
from autopar.ir.size import Size


def cross_entropy_sum(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Cross entropy summed over the labels that are not `ignore_index`."""
    return F.cross_entropy(
        logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def count_valid(target: Tensor, ignore_index: int) -> Tensor:
    """The number of labels that are not `ignore_index`, float32."""
    return (target != ignore_index).sum().to(torch.float32)


OWN_OPS: dict[str, Callable[..., Tensor]] = {
    "autopar.cross_entropy_sum.default": cross_entropy_sum,
    "autopar.count_valid.default": count_valid,
}
"""What the ops that capture introduces mean."""


def run_graph(
    graph: OpGraph, values: Mapping[str, Tensor], samples: int
) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Loss and outputs, given the tensor of every source by its name, for `samples` samples.

    New tensors are made on the device of the first value.
    """
    env: dict[Ref, Tensor] = {Ref(name): tensor for name, tensor in values.items()}
    device = next(iter(values.values())).device
    for node in graph.nodes:
        result = _run_node(node, env, samples, device)
        results = result if isinstance(result, (tuple, list)) else (result,)
        env.update({Ref(node.name, i): tensor for i, tensor in enumerate(results)})
    loss = None if graph.loss is None else env[graph.loss]
    return loss, tuple(env[ref] for ref in graph.outputs)


def _run_node(node: OpNode, env: Mapping[Ref, Tensor], samples: int, device: torch.device) -> Any:
    args = [_value(value, env, samples) for value in node.args]
    kwargs = {name: _value(value, env, samples) for name, value in node.kwargs}
    function: Any = OWN_OPS.get(node.target)
    if function is None:
        function = op_overload(node.target)
        creates = any(a.name == "device" for a in function._schema.arguments)
        if creates and not node.inputs():
            kwargs["device"] = device
    with torch.set_grad_enabled(node.requires_grad):
        return function(*args, **kwargs)


def _value(value: Arg, env: Mapping[Ref, Tensor], samples: int) -> Any:
    match value:
        case Ref():
            return env[value]
        case Size():
            return value.at(samples)
        case tuple():
            return [_value(item, env, samples) for item in value]
        case str() if value.startswith(("dtype:", "memory_format:")):
            return getattr(torch, value.split(":", 1)[1])
    return value
