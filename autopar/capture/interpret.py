"""Running an `OpGraph` op by op, to check that it says what the model does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.arguments import op_overload
from autopar.capture.grouped import grouped_mm
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


def route(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices sorted by expert, and how many there are of each, twice."""
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=experts)
    return flat.argsort(stable=True), counts, counts


def to_experts(rows: Tensor, order: Tensor, counts: Tensor, held: Tensor) -> Tensor:
    """Rows in sorted order, each as often as its token chose."""
    return rows[order // (order.numel() // max(1, rows.shape[0]))]


def from_experts(slots: Tensor, order: Tensor, counts: Tensor, held: Tensor) -> Tensor:
    """Rows in the order of the choices."""
    return torch.zeros_like(slots).index_copy(0, order, slots)


def expert_mm(slots: Tensor, weight: Tensor, held: Tensor) -> Tensor:
    """Every expert's rows times its matrix."""
    return grouped_mm(slots, weight, held.cumsum(0))


def expert_rows(table: Tensor, held: Tensor, order: Tensor) -> Tensor:
    """The row of its expert for every slot."""
    return table.repeat_interleave(held, 0)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    counter: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalised with the batch's statistics; the running ones stay as they are."""
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


OWN_OPS: dict[str, Callable[..., Any]] = {
    "autopar.batch_norm.default": batch_norm,
    "autopar.route.default": route,
    "autopar.to_experts.default": to_experts,
    "autopar.from_experts.default": from_experts,
    "autopar.expert_mm.default": expert_mm,
    "autopar.expert_rows.default": expert_rows,
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
