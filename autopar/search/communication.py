"""Sharding a whole graph over a free mesh by communication alone, as Alpa's solver poses it.

Every axis may split anything, compute costs nothing, and heavy ops (matrix products, attention,
convolutions) must be split on every axis, since replicating them would be free. The known optima of
that setting are what the sharding ILP is held to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.costs.collectives import CollectiveModel
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import OpGraph, OpNode, Ref, SourceKind
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import Layout, Placement, R, Shard
from autopar.ir.strategy import AxisStrategy
from autopar.plan.flow import BlockFlow, block_flow
from autopar.rules import axis_strategies, piece_hints
from autopar.search.block import HEAVY_OPS, BlockSpace, block_space, is_split
from autopar.search.prices import Prices
from autopar.search.sharding import Sharding, solve_sharding

CONVOLUTIONS = frozenset(("aten.conv1d", "aten.conv2d", "aten.conv3d"))


def solve_communication(
    graph: OpGraph,
    *,
    names: Sequence[str],
    sizes: Sequence[int],
    batch: int,
    collectives: CollectiveModel,
    required: Mapping[Ref, Layout] | None = None,
    pinned: Mapping[str, Mapping[int, Placement]] | None = None,
    data_axes: Collection[int] = (),
    forbidden: Collection[CollectiveOp] = (),
) -> tuple[BlockSpace, Sharding | None]:
    """The sharding with the least communication per step, one micro-batch of `batch` samples.

    Inputs are whole on every rank and may be cut for free. `required` fixes layouts of values,
    `pinned` placements of parameters by name and axis. Axes in `data_axes` split the batch and
    nothing else. `forbidden` collectives may not be used.
    """
    specs, differentiable = graph.specs(), graph.differentiable()
    hints = piece_hints(graph)
    parameters = [s for s in graph.sources if s.kind is SourceKind.PARAMETER]
    whole = (R,) * len(sizes)

    mesh = tuple(MeshAxis(name=name, size=n) for name, n in zip(names, sizes, strict=True))

    def strategies(node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        size = axis.size
        if size == 1:
            return axis_strategies(node, specs, size=2, batch=batch)[:1]
        found = axis_strategies(node, specs, size=size, batch=batch, hints=hints)
        heavy = node.op in HEAVY_OPS or node.op in CONVOLUTIONS
        found = tuple(s for s in found if not heavy or is_split(s))
        if mesh.index(axis) in data_axes:
            found = tuple(s for s in found if _splits_batch(node, s, specs)) or found[:1]
        return found

    space = block_space(
        graph.nodes,
        mesh,
        strategies,
        parameters=parameters,
        given={Ref(s.name): whole for s in graph.sources if s not in parameters},
        required=required or {},
        loss=graph.loss,
        specs=specs,
        differentiable=differentiable,
        pinned=pinned,
    )

    def seconds(op: CollectiveOp, nbytes: float, axis: str) -> float:
        return float("inf") if op in forbidden else collectives.time_s(op, nbytes, axis)

    prices = Prices(
        names=tuple(names),
        sizes=tuple(sizes),
        batch=batch,
        specs=specs,
        differentiable=differentiable,
        compute=lambda node, option, prices: (0.0, 0.0),
        collective=seconds,
        updated=graph.updated(),
    )
    return space, solve_sharding(space, prices)


def _splits_batch(node: OpNode, strategy: AxisStrategy, specs: Mapping[Ref, object]) -> bool:
    """Whether a strategy splits every dim that grows with the batch and no other."""
    values = zip((*node.inputs(),), strategy.inputs, strict=True)
    outputs = zip(
        (Ref(node.name, i) for i in range(len(node.outputs))), strategy.outputs, strict=True
    )
    for ref, placement in (*values, *outputs):
        grown = [d for d, size in enumerate(specs[ref].shape) if size.is_batch]  # type: ignore[attr-defined]
        split = isinstance(placement, Shard)
        if bool(grown) != split or (split and placement.dim not in grown):  # type: ignore[union-attr]
            return False
    return True


def sharding_flow(space: BlockSpace, sharding: Sharding) -> BlockFlow:
    """The moves of a solved sharding, to count its collectives by."""
    by_name = dict(sharding.parameters)
    given = dict(space.given)
    given |= {Ref(source.name): by_name[source.fqn] for source, _ in space.parameters}
    choices = {choice.node: choice for choice in sharding.choices}
    return block_flow(space.nodes, choices, given, space.required, space.differentiable)
