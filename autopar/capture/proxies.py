"""What sharing traced calls needs of torch's tracer that has no public name.

`torch.export` (torch 2.13) has no way to put a call of one's own into the graph it is making, with
outputs that count as traced; `torch.compiler.nested_compile_region` is traced through without a
trace in non-strict mode. So the node is made by the tracer that is at work, as torch's own
higher-order ops do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (
    _AttrProxy,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.capture.state import Unprovable

torch.library.define("autopar::repeated", "(Tensor[] inputs, int template) -> Tensor[]")
REPEATED: torch._ops.OpOverload = torch.ops.autopar.repeated.default
"""A call that is equal to one that was traced: what it reads, and the number of its template."""


unwatched = torch._C.DisableTorchFunction
"""Within, what is asked of tensors does not pass the modes that torch.export watches calls with."""


def current_tracer() -> Any | None:
    """The tracer at work, which records tensor ops; None outside of a trace."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer


def real_module(module: nn.Module) -> nn.Module:
    """The user's module behind the stand-in that torch makes where one has several names."""
    if not isinstance(module, _AttrProxy):
        return module
    stand_in: Any = module
    base: nn.Module = stand_in.get_base()
    return base


def path_of(tracer: Any) -> str:
    """The dotted path of the module whose call is being traced."""
    stack = tracer.module_stack
    return str(next(reversed(stack.values()))[0]) if stack else ""


def node_of(tracer: Any, tensor: Tensor) -> fx.Node:
    """The node that made a traced tensor. Raises Unprovable for one that was not traced."""
    slot = tracer.tensor_tracker.get(tensor)
    if slot is None:
        raise Unprovable("a tensor that was not traced")
    node: fx.Node = slot.proxy.node
    return node


def last_node(tracer: Any) -> fx.Node:
    """The node made last; the nodes made later follow it."""
    node: fx.Node = next(iter(reversed(tracer.graph.nodes)))
    return node


def nodes_after(node: fx.Node) -> list[fx.Node]:
    """The nodes made after one, in order."""
    found = []
    while (node := node.next).op != "root":
        found.append(node)
    return found


def depends_on_data(value: object) -> bool:
    """Whether a traced value has a size that is only known when it is computed."""
    return bool(free_unbacked_symbols(value))


@contextlib.contextmanager
def lean_nodes() -> Iterator[None]:
    """Within, traced nodes come without what capture does not read and what takes the longest to
    find out where parameters are many: memory formats (`tensor_meta`, which torch itself calls a
    best effort) of values, and stack traces of placeholders, which torch drops again. Nor is a
    graph written as Python after every pass over it, but once it is run, if it ever is."""
    original = fx.proxy.TracerBase.create_node

    def create_node(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        with _without_stack_traces(tracer) if kind == "placeholder" else contextlib.nullcontext():
            return original(tracer, kind, *args, **kwargs)

    with (
        mock.patch.object(fx.proxy.TracerBase, "create_node", create_node),
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", lambda *_, **__: None),
        mock.patch.object(fx.GraphModule, "recompile", _recompiled_when_run),
    ):
        yield


_recompile = fx.GraphModule.recompile


def _recompiled_when_run(module: fx.GraphModule) -> None:
    def forward(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return self.forward(*args, **kwargs)

    # every graph module has a class of its own
    type(module).forward = forward  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_stack_traces(tracer: Any) -> Iterator[None]:
    recorded, tracer.record_stack_traces = tracer.record_stack_traces, False
    try:
        yield
    finally:
        tracer.record_stack_traces = recorded


def record_call(
    tracer: Any, inputs: Sequence[Tensor], template: int, like: Sequence[Tensor]
) -> list[Tensor]:
    """Add a call of `REPEATED`; its outputs are new traced tensors such as those of `like`."""
    with unwatched(), disable_proxy_modes_tracing():
        made = [_such_as(tensor) for tensor in like]
    proxies = [tracer.tensor_tracker[tensor].proxy for tensor in inputs]
    with unwatched(), _without_stack_traces(tracer):
        call = tracer.create_proxy("call_function", REPEATED, (proxies, template), {})
        return track_tensor_tree(made, call, constant=None, tracer=tracer)


def _such_as(tensor: Tensor) -> Tensor:
    sizes, strides = tensor.shape, tensor.stride()
    made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    # not a leaf of autograd, so that it may be written in place
    return made.requires_grad_().clone() if tensor.requires_grad else made
