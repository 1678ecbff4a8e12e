"""A minimal torch.export -> OpGraph converter, and the count of what autograd really saves."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import SimpleNamespace

import pytest
import torch

from autopar.costs.local_op import LocalOp, local_op
from autopar.costs.strides import trace_storage
from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec
from autopar.ir.size import Size, shape_at


def spec_of(value: torch.Tensor) -> TensorSpec:
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(shape=tuple(Size(int(s)) for s in value.shape), dtype=dtype)


def to_graph(module: torch.nn.Module, *inputs: torch.Tensor) -> OpGraph:
    """Export with fixed shapes; inputs of a floating type count as inputs without gradient."""
    program = torch.export.export(module, inputs, strict=False)
    parameters = dict(program.graph_signature.inputs_to_parameters)
    buffers = dict(program.graph_signature.inputs_to_buffers)
    trainable = {name for name, value in program.named_parameters() if value.requires_grad}
    sources: list[Source] = []
    nodes: list[OpNode] = []
    refs: dict[torch.fx.Node, Ref] = {}
    grads: set[Ref] = set()

    def convert(arg: object) -> object:
        if isinstance(arg, torch.fx.Node):
            return refs[arg]
        if isinstance(arg, list | tuple):
            return tuple(convert(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return "dtype:" + str(arg).removeprefix("torch.")
        if isinstance(arg, torch.device | torch.layout | torch.memory_format):
            return f"device:{arg}"
        return arg

    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            fqn = parameters.get(node.name) or buffers.get(node.name) or node.name
            kind = (
                SourceKind.PARAMETER
                if node.name in parameters
                else SourceKind.BUFFER
                if node.name in buffers
                else SourceKind.INPUT
            )
            refs[node] = Ref(node.name)
            if fqn in trainable:
                grads.add(Ref(node.name))
            sources.append(
                Source(
                    name=node.name,
                    kind=kind,
                    fqn=fqn,
                    spec=spec_of(value),
                    trainable=fqn in trainable,
                )
            )
        elif node.op == "call_function":
            target = str(node.target)
            if "getitem" in target:
                refs[node] = Ref(refs[node.args[0]].name, node.args[1])
                continue
            values = value if isinstance(value, list | tuple) else [value]
            if not all(isinstance(item, torch.Tensor) for item in values):
                continue
            args = tuple(convert(arg) for arg in node.args)
            kwargs = tuple((name, convert(arg)) for name, arg in node.kwargs.items())
            refs[node] = Ref(node.name)
            outputs = tuple(spec_of(item) for item in values)
            op = OpNode(name=node.name, target=target, args=args, kwargs=kwargs, outputs=outputs)
            needs = any(ref in grads for ref in op.inputs())
            floating = any(spec.is_floating for spec in outputs)
            op = OpNode(
                name=node.name,
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                requires_grad=needs and floating,
            )
            if op.requires_grad:
                grads |= {Ref(node.name, i) for i, s in enumerate(outputs) if s.is_floating}
            nodes.append(op)
    return OpGraph(sources=tuple(sources), nodes=tuple(nodes), loss=None)


def counted_bytes(module: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of the storages autograd saves in a forward pass of the exported module."""
    program = torch.export.export(module, inputs, strict=False).module()
    owned = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*program.parameters(), *program.buffers())
    }
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = program(*inputs)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del result
    return sum(size for pointer, size in storages.items() if pointer not in owned)


def numel_of(graph: OpGraph) -> Callable[[Ref], int]:
    specs = graph.specs()
    return lambda ref: prod(size.at(1) for size in specs[ref].shape)


def local_ops(graph: OpGraph, device_kind: str = "cpu") -> list[LocalOp]:
    """Every node at its captured shapes."""
    specs, differentiable = graph.specs(), graph.differentiable()
    storage = trace_storage(graph.nodes, specs, device_kind=device_kind)
    return [
        local_op(
            node,
            input_shapes=tuple(shape_at(specs[ref].shape, 1) for ref in node.inputs()),
            input_dtypes=tuple(specs[ref].dtype for ref in node.inputs()),
            output_shapes=tuple(shape_at(spec.shape, 1) for spec in node.outputs),
            batch=1,
            grad_inputs=tuple(ref in differentiable for ref in node.inputs()),
            copying=storage.copying,
        )
        for node in graph.nodes
    ]


@pytest.fixture
def graphs() -> SimpleNamespace:
    """The functions above, and `owned`: a graph's parameters and buffers."""
    return SimpleNamespace(
        local_ops=local_ops,
        to_graph=to_graph,
        counted_bytes=counted_bytes,
        numel_of=numel_of,
        owned=lambda graph: frozenset(
            Ref(source.name)
            for source in graph.sources
            if source.kind in (SourceKind.PARAMETER, SourceKind.BUFFER)
        ),
    )
