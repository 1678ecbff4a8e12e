"""A traced call of a module that later calls may stand for: its nodes, and what goes in and out."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.proxies import depends_on_data, node_of
from autopar.capture.state import Keys, Unprovable

LEAST_OPS = 4
"""A call of fewer ops is traced again as fast as it is shared."""

_STATEFUL = frozenset(["aten.batch_norm", "aten.instance_norm"])
"""Ops that write to their arguments and do not say so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One leaf of what a call returns: input `index`, output `index`, or a value."""

    kind: str
    index: int = 0
    value: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """The trace of one call.

    `graph` holds its nodes, with a placeholder for each tensor it reads that it did not make;
    `inputs` are the places of these among the tensors of a call. `made` are the tensors it returns
    that are its own, `made_nodes` their nodes, and `results` with `structure` all it returns.
    `path` is the module's.
    """

    graph: fx.Graph
    inputs: tuple[int, ...]
    made: tuple[Tensor, ...]
    made_nodes: tuple[fx.Node, ...]
    results: tuple[Result, ...]
    structure: pytree.TreeSpec
    path: str


def build_template(
    tracer: Any,
    nodes: Sequence[fx.Node],
    tensors: Sequence[Tensor],
    owners: Mapping[fx.Node, int],
    output: Any,
    path: str,
) -> Template:
    """The template of a call that made `nodes` from `tensors` and returned `output`.

    `owners` maps the node of each of the tensors to its place. Raises Unprovable where another
    call could not be told from the same nodes.
    """
    given = _storages(tensors)
    for node in nodes:
        _check(node, given)
    nodes = [node for node in nodes if _storages([node.meta.get("val")])]
    if len(nodes) < LEAST_OPS:
        raise Unprovable("too few ops")
    own = set(nodes)
    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
    read = [node for node in outside if isinstance(node.meta.get("val"), Tensor)]
    if any(node not in owners for node in read):
        raise Unprovable("a tensor that is neither an argument nor the module's")
    leaves, structure = pytree.tree_flatten(output)
    results, made, made_nodes = _results(tracer, leaves, tensors, own, given)
    graph, copies = _copied(nodes, [*outside])
    return Template(
        graph=graph,
        inputs=tuple(owners[node] for node in read),
        made=tuple(made),
        made_nodes=tuple(copies[node] for node in made_nodes),
        results=tuple(results),
        structure=structure,
        path=path,
    )


def _check(node: fx.Node, given: set[int]) -> None:
    if node.op != "call_function":
        raise Unprovable("a constant tensor")
    if depends_on_data(node.meta.get("val")):
        raise Unprovable("a size that depends on data")
    op, value = node.target, node.meta.get("val")
    if not isinstance(op, torch._ops.OpOverload):
        if op is not operator.getitem and (value is None or _storages([value])):
            raise Unprovable(f"{op}, which changes a mode or is a graph of its own")
        return
    if str(op).rsplit(".", 1)[0] in _STATEFUL:
        raise Unprovable(f"{op} may write to buffers")
    arguments = op._schema.arguments
    written = [v for a, v in zip(arguments, node.args, strict=False) if a.is_write]
    written += [node.kwargs[a.name] for a in arguments if a.is_write and a.name in node.kwargs]
    if _storages(_values(written)) & given:
        raise Unprovable(f"{op} writes to what it was given")


def _values(argument: Any) -> list[Any]:
    return [
        leaf.meta.get("val") for leaf in pytree.tree_leaves(argument) if isinstance(leaf, fx.Node)
    ]


def _results(
    tracer: Any,
    leaves: Sequence[Any],
    tensors: Sequence[Tensor],
    own: set[fx.Node],
    given: set[int],
) -> tuple[list[Result], list[Tensor], list[fx.Node]]:
    results: list[Result] = []
    made: list[Tensor] = []
    nodes: list[fx.Node] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, torch.SymInt):
                raise Unprovable("a size is returned")
            Keys().key(leaf)
            results.append(Result(kind="value", value=leaf))
        elif (place := _place(leaf, tensors)) is not None:
            results.append(Result(kind="input", index=place))
        elif (place := _place(leaf, made)) is not None:
            results.append(Result(kind="made", index=place))
        else:
            node = node_of(tracer, leaf)
            if node not in own or _storages([leaf]) & (given | _storages(made)):
                raise Unprovable("a view of another value is returned")
            results.append(Result(kind="made", index=len(made)))
            made.append(leaf)
            nodes.append(node)
    if not made:
        raise Unprovable("no tensor is returned")
    return results, made, nodes


def _place(tensor: Tensor, among: Sequence[Tensor]) -> int | None:
    return next((i for i, other in enumerate(among) if other is tensor), None)


def _copied(
    nodes: Iterable[fx.Node], outside: Sequence[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The nodes in a graph of their own: placeholders for tensors from outside, then for sizes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for is_tensor in (True, False):
        for node in outside:
            if isinstance(node.meta.get("val"), Tensor) is is_tensor:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph, copies


def _storages(values: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, (tuple, list)):
            found |= _storages(value)
    return found


def tensor_key(tensor: Tensor) -> Hashable:
    """Everything about a traced tensor that a forward may ask for, but for its values."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj() or tensor.is_neg(),
        tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes),
    )
