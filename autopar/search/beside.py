"""What of a block goes beside its products, and what its host takes to start it."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.traffic import op_traffic
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import OpNode
from autopar.ir.mesh import TENSOR
from autopar.plan.flow import BlockFlow
from autopar.plan.plan import NodeChoice
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer


def is_beside(axis: str, op: CollectiveOp | None) -> bool:
    """Whether a move may go beside the product that reads or makes what it moves."""
    return axis == TENSOR and op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)


def host_floor_s(
    pricer: Pricer,
    nodes: Sequence[OpNode],
    choices: Sequence[NodeChoice],
    flow: BlockFlow,
    grid: Grid,
) -> tuple[float, float]:
    """What starting everything that a block runs takes the host, in each pass."""
    prices, kernels, collectives = pricer.prices(grid), [0, 0], [0.0, 0.0]
    for node, choice in zip(nodes, choices, strict=True):
        traffic = op_traffic(pricer.local(node, choice, prices), pricer.device.kind)
        kernels[0] += traffic.forward_kernels
        kernels[1] += traffic.backward_kernels
        strategies = pricer.spaces.option(node, choice, grid.mesh).strategies
        for size, strategy in zip(prices.sizes, strategies, strict=True):
            for inner in strategy.collectives:
                if size > 1 and (inner.phase == "forward" or node.requires_grad):
                    collectives[inner.phase == "backward"] += inner.count(size)
    for move in flow.moves():
        if prices.sizes[move.axis] > 1:
            for index, op in enumerate((move.transition.forward, move.transition.backward)):
                collectives[index] += op is not None
    forward, backward = (
        pricer.setting.execution.host_floor_s(k, c)
        for k, c in zip(kernels, collectives, strict=True)
    )
    return forward, backward
