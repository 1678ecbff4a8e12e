"""The exported graph as one list of steps, with `no_grad` and `autocast` regions inlined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.locations import location_in_stack
from autopar.errors import CaptureError


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One call of the graph; `grad` is False inside a `no_grad` region."""

    node: fx.Node
    grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatGraph:
    """Placeholders, steps in order, and the output arguments of the outermost graph.

    `bound` maps an inner placeholder to the value passed for it, and a region to its results.
    """

    placeholders: list[fx.Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    bound: dict[fx.Node, Any] = field(default_factory=dict)

    def resolve(self, node: fx.Node) -> Any:
        """The value a node stands for: itself unless it is bound to another."""
        while isinstance(node, fx.Node) and node in self.bound:
            node = self.bound[node]
        return node

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes a step reads, through the regions' boundaries."""
        found: list[fx.Node] = []
        for item in node.all_input_nodes:
            value = self.resolve(item)
            found += [v for v in (value if isinstance(value, (tuple, list)) else [value]) if v]
        return found


def flatten(module: fx.GraphModule) -> tuple[FlatGraph, tuple[Any, ...]]:
    """Flatten a graph; also returns its output arguments. CaptureError names an op that cannot be.

    Inside a region with autocast switched on the dtypes of ops are implicit, so it is refused.
    """
    flat = FlatGraph()
    outputs = _walk(module, flat, grad=True, outermost=True)
    return flat, outputs


def _walk(
    module: fx.GraphModule, flat: FlatGraph, *, grad: bool, outermost: bool = False
) -> tuple[Any, ...]:
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if outermost:
                flat.placeholders.append(node)
        elif node.op == "output":
            return tuple(node.args[0])
        elif node.op == "call_function":
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                _inline(module, node, flat, grad=grad)
            elif not _picks_region_result(node, flat):
                flat.steps.append(Step(node=node, grad=grad))
    return ()


def _picks_region_result(node: fx.Node, flat: FlatGraph) -> bool:
    """Bind `getitem(region, i)` to the region's result `i`."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and isinstance(flat.bound.get(source), tuple):
        flat.bound[node] = flat.bound[source][node.args[1]]
        return True
    return False


def _inline(module: fx.GraphModule, node: fx.Node, flat: FlatGraph, *, grad: bool) -> None:
    name = str(node.target)
    args = list(node.args)
    if name == "wrap_with_set_grad_enabled":
        grad, body, operands = bool(args[0]), args[1], args[2:]
    elif name == "wrap_with_autocast":
        body, operands = args[4], args[5:]
    else:
        raise CaptureError(
            f"{_where(node)}{name} cannot be planned; write it without a higher-order op, "
            "or make it a torch.library.custom_op"
        )
    assert isinstance(body, fx.Node)
    inner = getattr(module, str(body.target))
    if name == "wrap_with_autocast":
        _refuse_enabled_autocast(node, inner)
    holders = (n for n in inner.graph.nodes if n.op == "placeholder")
    flat.bound.update(zip(holders, operands, strict=True))
    flat.bound[node] = _walk(inner, flat, grad=grad)


def _refuse_enabled_autocast(node: fx.Node, body: fx.GraphModule) -> None:
    kind, dtype, enabled = node.args[:3]
    if enabled:
        located = (_where(inner) for inner in body.graph.nodes)
        where = next(filter(None, located), "")
        raise CaptureError(
            f"{where}torch.autocast({kind!r}, {dtype}) inside the model is not captured; "
            "cast explicitly with .to(dtype), or leave precision to the plan"
        )


def _where(node: fx.Node) -> str:
    location = location_in_stack(node.meta.get("stack_trace"))
    return f"{location}: " if location else ""
