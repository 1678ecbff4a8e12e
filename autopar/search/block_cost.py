"""What one sharding of a block costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.calibration import curve_of
from autopar.costs.local_op import LocalOp
from autopar.costs.profiles import TimeSource
from autopar.costs.transient import RunBlock
from autopar.ir.blocks import Block
from autopar.ir.placement import Layout
from autopar.plan.flow import BlockFlow, block_edges, block_flow
from autopar.plan.plan import NodeChoice
from autopar.rules.index_expr import LOCAL
from autopar.search.beside import host_floor_s, is_beside
from autopar.search.copies import BlockStorages
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer
from autopar.search.recompute import Again, RecomputeProblem, StepSeconds
from autopar.search.running import Running
from autopar.search.setting import Setting
from autopar.search.split_costs import WeightPart


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """What one sharding of a block costs.

    Seconds are per micro-batch, those of `compute` without any collective. Bytes are per rank.
    `ways` are what it may keep and what it then runs again, the fastest first. `weight_s` is the
    part of `backward_s` that computes weight gradients, `deferred_bytes` what is held until then
    for each micro-batch, and `apart_s` what the backward then takes more, where a schedule splits
    it. `unmeasured` are ops that a profile has no time of. What the block's parameters cost besides
    is in `search.state`.
    """

    forward_s: float
    backward_s: float
    forward_compute_s: float
    backward_compute_s: float
    ways: tuple[Again, ...] = ()
    priced_ops: int
    measured_ops: int
    interpolated_ops: int = 0
    unmeasured: frozenset[LocalOp] = frozenset()
    weight_s: float = 0.0
    apart_s: float = 0.0
    deferred_bytes: int = 0


def block_cost(
    pricer: Pricer,
    block: Block,
    choices: Sequence[NodeChoice],
    layouts: Mapping[str, Layout],
    grid: Grid,
) -> BlockCost:
    """The cost of running a block as decided. `layouts` are those of its parameters."""
    flow = decided_flow(pricer.setting, block, choices, layouts, grid)
    cost, again = _passes(pricer, block, choices, flow, grid)
    storages, running = _activations(pricer, block, choices, flow, grid)
    held, saved = pricer.setting.source_refs, pricer.backwards.saved(block)
    return replace(cost, ways=RecomputeProblem(storages, saved, held, again, running).ways())


def block_passes(
    pricer: Pricer,
    block: Block,
    choices: Sequence[NodeChoice],
    layouts: Mapping[str, Layout],
    grid: Grid,
) -> BlockCost:
    """The same without `ways`, which take longer to find than the rest."""
    flow = decided_flow(pricer.setting, block, choices, layouts, grid)
    return _passes(pricer, block, choices, flow, grid)[0]


def decided_flow(
    setting: Setting,
    block: Block,
    choices: Sequence[NodeChoice],
    layouts: Mapping[str, Layout],
    grid: Grid,
) -> BlockFlow:
    """Where the values of a block as decided move. `layouts` are those of its parameters."""
    given, required = block_edges(setting.chain, block, setting.shared(grid.mesh))
    given |= {ref: layouts[setting.sources[ref.name].fqn] for ref in block.parameters}
    by_node = {choice.node: choice for choice in choices}
    return block_flow(setting.block_nodes(block), by_node, given, required, setting.differentiable)


def _passes(
    pricer: Pricer, block: Block, choices: Sequence[NodeChoice], flow: BlockFlow, grid: Grid
) -> tuple[BlockCost, dict[str, StepSeconds]]:
    """What both passes cost, and the forward seconds of every step."""
    prices, setting = pricer.prices(grid), pricer.setting
    nodes = setting.block_nodes(block)
    forward = backward = 0.0
    compute = (0.0, 0.0)
    sources: Counter[TimeSource] = Counter()
    unmeasured: set[LocalOp] = set()
    again: dict[str, StepSeconds] = {}
    products = pricer.backwards.products(block)
    apart = WeightPart(products=products, prices=prices, device=pricer.device)
    for node, choice in zip(nodes, choices, strict=True):
        op = pricer.local(node, choice, prices)
        option = pricer.spaces.option(node, choice, grid.mesh)
        time = pricer.op_time(op)
        op_forward, op_backward = time.forward_s, time.backward_s
        inner = prices.inner_s(node, option)
        compute = (compute[0] + op_forward, compute[1] + op_backward)
        if all(strategy.kernel == LOCAL.name for strategy in option.strategies):
            apart.add(node, choice, op, op_backward)
        again[node.name] = StepSeconds(op_forward + inner[0], op_forward)
        forward, backward = forward + again[node.name].total, backward + op_backward + inner[1]
        sources[time.source] += 1
        if setting.profile is not None and setting.profile.reason(op):
            unmeasured.add(op)
    beside = [0.0, 0.0]
    for move in flow.moves():
        moved = prices.move_s(move)
        again[move.name] = StepSeconds(moved[0], 0.0)
        forward, backward = forward + moved[0], backward + moved[1]
        for direction, made in enumerate((move.transition.forward, move.transition.backward)):
            beside[direction] += moved[direction] * is_beside(prices.names[move.axis], made)
    forward -= _hidden_s(pricer, beside[0], compute[0], grid)
    backward -= _hidden_s(pricer, beside[1], compute[1], grid)
    if setting.execution.host_s:
        floor = host_floor_s(pricer, nodes, choices, flow, grid)
        forward, backward = max(forward, floor[0]), max(backward, floor[1])
    cost = BlockCost(
        forward_s=forward,
        backward_s=backward,
        forward_compute_s=compute[0],
        backward_compute_s=compute[1],
        priced_ops=len(nodes) - sources[TimeSource.FREE],
        measured_ops=sources[TimeSource.MEASURED],
        interpolated_ops=sources[TimeSource.INTERPOLATED],
        unmeasured=frozenset(unmeasured),
        weight_s=apart.seconds,
        apart_s=apart.apart_s,
        deferred_bytes=apart.held_bytes,
    )
    return cost, again


def _hidden_s(pricer: Pricer, tensor_s: float, compute_s: float, grid: Grid) -> float:
    """What of the collectives of the tensor axis that go beside products costs no time."""
    hidden = curve_of(pricer.device).hidden
    return pricer.setting.execution.hidden_tensor_s(tensor_s, compute_s, grid.tensor, hidden)


def _activations(
    pricer: Pricer, block: Block, choices: Sequence[NodeChoice], flow: BlockFlow, grid: Grid
) -> tuple[BlockStorages, RunBlock]:
    """Where the block's values lie, and its steps as memory sees them."""
    setting, prices = pricer.setting, pricer.prices(grid)
    nodes, by_node = setting.block_nodes(block), {c.node: c for c in choices}
    storages = BlockStorages(nodes, by_node, flow, prices, setting.storage)
    running = Running(
        nodes=nodes,
        choices=by_node,
        flow=flow,
        storages=storages,
        prices=prices,
        saved=pricer.backwards.saved(block),
        held=setting.source_refs,
        split=frozenset(pricer.backwards.products(block)),
    )
    boundaries = setting.chain.boundaries
    after = boundaries[block.index] if block.index < len(boundaries) else ()
    loss = setting.graph.loss
    returned = {*after, *(() if loss is None else (loss,))}
    return storages, running.block(block.inputs, block.outputs, returned)
