"""A priced plan taken apart into what it is made of, so that other constants can price it again.

`terms` lists the ops and collectives of every stage of a solved grid; `step_s` puts them together
from the seconds of each. With the planner's own constants the two give the planner's own figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.costs.collectives import Route, axis_routes
from autopar.ir.cluster import Axis
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import Ref
from autopar.plan.flow import Move, move_bytes
from autopar.search.beside import is_beside
from autopar.search.block_cost import decided_flow
from autopar.search.bucket_times import StateCollective, bucket_parts
from autopar.search.grid import Grid
from autopar.search.options import ClassOption
from autopar.search.pricer import Pricer
from autopar.search.stages import Staged, boundary_bytes
from autopar.search.state import (
    accumulation_bytes,
    again_shares,
    gather_collectives,
    optimizer_bytes,
    sync_collectives,
    sync_kinds,
)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: what, of how many bytes, by which routes (the slowest counts)."""

    op: CollectiveOp
    nbytes: float
    routes: tuple[Route, ...]


Bag = tuple[tuple[object, float], ...]
"""(LocalOp with a pass, or Collective) and how often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTerms:
    """What a block runs: in a forward, in a backward, again in a backward, of the first two what
    goes beside the products; what gathers its weights for either, and reduces gradients every time;
    once a step to sum gradients, `early` beside the last backward. Bytes moved to add up gradients
    in a backward, and to step the optimizer. `cold` is that of `ClassOption`, 1 where nothing
    overlaps."""

    forward: Bag
    backward: Bag
    again: Bag
    beside: Bag
    beside_back: Bag
    gather: Bag
    gather_again: Bag
    reduce: Bag
    sync: Bag
    early: Bag
    sum_bytes: float
    optimizer_bytes: float
    cold: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTerms:
    """The blocks of every stage, by index into `blocks`, with counts; messages of every stage."""

    blocks: tuple[BlockTerms, ...]
    stages: tuple[tuple[tuple[int, int], ...], ...]
    send: tuple[Bag, ...]
    send_back: tuple[Bag, ...]
    grid: Grid


FORWARD, BACKWARD = 0, 1


def terms(pricer: Pricer, staged: Staged) -> PlanTerms:
    """The terms of a solved grid."""
    grid, chain = staged.grid, pricer.setting.chain
    stages = []
    chosen = [
        (b.class_index, i) for b, i in zip(chain.blocks, staged.solution.options, strict=True)
    ]
    keys = {key: n for n, key in enumerate(dict.fromkeys(chosen))}
    blocks = [_block(pricer, grid, kind, staged.options[kind][i]) for kind, i in keys]
    for own in staged.problem.stages(staged.solution.cuts):
        stages.append(tuple(sorted(Counter(keys[chosen[b]] for b in own).items())))
    return PlanTerms(
        blocks=tuple(blocks),
        stages=tuple(stages),
        **_messages(pricer, staged),
        grid=grid,
    )


def _routes(pricer: Pricer, grid: Grid, names: Sequence[str]) -> tuple[Route, ...]:
    axes = grid.axes()
    own = [axis for axis in axes if axis.name in names]
    if not own or prod(axis.size for axis in own) == 1:
        return ()
    joined = Axis(
        name="+".join(names), size=prod(a.size for a in own), stride=min(a.stride for a in own)
    )
    rest = [axis for axis in axes if axis.name not in names]
    return axis_routes(joined, [joined, *rest], pricer.setting.cluster, 0)


def _bag(items: Iterable[tuple[object, float]]) -> Bag:
    counted: dict[object, float] = {}
    for item, count in items:
        counted[item] = counted.get(item, 0.0) + count
    return tuple(counted.items())


def _block(pricer: Pricer, grid: Grid, kind: int, option: ClassOption) -> BlockTerms:
    setting, prices = pricer.setting, pricer.prices(grid)
    block = setting.chain.representative(kind)
    nodes = setting.block_nodes(block)
    layouts = {name: state.layout for name, state in option.states}
    flow = decided_flow(setting, block, option.choices, layouts, grid)
    passes: tuple[list[tuple[object, float]], ...] = ([], [])
    beside: tuple[list[tuple[object, float]], ...] = ([], [])
    again: list[tuple[object, float]] = []
    steps = set(option.again.steps)

    def add(direction: int, item: object, name: str, count: float = 1.0) -> None:
        passes[direction].append((item, count))
        if direction == FORWARD and name in steps:
            again.append((item, count))

    for node, choice in zip(nodes, option.choices, strict=True):
        local = pricer.local(node, choice, prices)
        add(FORWARD, (local, FORWARD), node.name)
        add(BACKWARD, (local, BACKWARD), node.name)
        whole = pricer.spaces.option(node, choice, grid.mesh)
        for axis, size, strategy in zip(prices.names, prices.sizes, whole.strategies, strict=True):
            for inner in strategy.collectives:
                if inner.phase == "backward" and not node.requires_grad:
                    continue
                ref = node.inputs()[inner.like_input]
                layout = whole.inputs[inner.like_input]
                nbytes = inner.nbytes(prices.local_shape(ref, layout))
                direction = BACKWARD if inner.phase == "backward" else FORWARD
                for op, part, on in prices.inner_collectives(inner.op, nbytes, axis, layout):
                    item = Collective(op, part, _routes(pricer, grid, (on,)))
                    add(direction, item, node.name, inner.count(size))
    for move in flow.moves():
        for direction, moved in enumerate(_moved(pricer, grid, move)):
            if moved is not None:
                add(direction, moved, move.name)
                if is_beside(prices.names[move.axis], moved.op):
                    beside[direction].append((moved, 1.0))
    return BlockTerms(
        forward=_bag(passes[0]),
        backward=_bag(passes[1]),
        again=_bag(again),
        beside=_bag(beside[0]),
        beside_back=_bag(beside[1]),
        **_state(pricer, grid, kind, option),
        cold=option.cold if option.overlaps else 1.0,
    )


def _moved(pricer: Pricer, grid: Grid, move: Move) -> list[Collective | None]:
    prices = pricer.prices(grid)
    routes = _routes(pricer, grid, (prices.names[move.axis],))
    found: list[Collective | None] = []
    for op in (move.transition.forward, move.transition.backward):
        if op is None or not routes:
            found.append(None)
            continue
        nbytes = move_bytes(prices.specs[move.value], move, op, prices.sizes, prices.batch)
        found.append(Collective(op, nbytes, routes))
    return found


def _state(pricer: Pricer, grid: Grid, kind: int, option: ClassOption) -> dict[str, Any]:
    """The terms of a block's parameters."""
    block, by_name = pricer.setting.chain.representative(kind), dict(option.states)
    bags: dict[str, list[tuple[object, float]]] = {
        name: [] for name in ("gather", "gather_again", "reduce", "sync", "early")
    }
    moved = summed = 0.0

    shares = again_shares(pricer.setting, grid)

    def add(
        name: str, collectives: Iterable[StateCollective], parts: float, share: float = 1.0
    ) -> None:
        for op, nbytes, names in collectives:
            if routes := _routes(pricer, grid, names):
                bags[name].append((Collective(op, parts * nbytes, routes), share / parts))

    for ref in block.parameters:
        source = pricer.setting.sources[ref.name]
        own = by_name[source.fqn]
        nbytes = pricer.prices(grid).local_bytes(ref, own.layout)
        gathers = gather_collectives(pricer, grid, ref, own)
        together = bucket_parts(pricer, grid, CollectiveOp.ALL_GATHER, own.level, nbytes)
        parts = together if pricer.setting.execution.flat else 1.0
        add("gather", gathers, parts)
        if ref in pricer.backwards.parameters(block) or ref in option.again.weights:
            add("gather_again", gathers, parts, shares[ref in option.again.weights])
        if source.trainable:
            for each in sync_collectives(pricer, grid, ref, own):
                parts = bucket_parts(pricer, grid, each[0], own.level, nbytes)
                add(sync_kinds(pricer.setting, own.level, each[0])[-1], (each,), parts)
            moved += optimizer_bytes(pricer, ref, own, pricer.prices(grid))
            summed += accumulation_bytes(pricer, grid, ref, own)
    return {
        **{name: _bag(items) for name, items in bags.items()},
        "sum_bytes": summed,
        "optimizer_bytes": moved,
    }


def _messages(pricer: Pricer, staged: Staged) -> dict[str, tuple[Bag, ...]]:
    grid, chain = staged.grid, pricer.setting.chain
    stages = staged.problem.stages(staged.solution.cuts)
    if grid.pipeline == 1:
        return {"send": ((),) * len(stages), "send_back": ((),) * len(stages)}
    routes = axis_routes(grid.pipeline_axis(), [grid.pipeline_axis()], pricer.setting.cluster, 0)
    differentiable = pricer.setting.differentiable

    def message(refs: Sequence[Ref]) -> Bag:
        nbytes = boundary_bytes(pricer, grid, refs)
        return ((Collective(CollectiveOp.SEND_RECV, nbytes, routes), 1.0),) if nbytes else ()

    send, back = [], []
    for own in stages:
        first, last = own[0], own[-1]
        send.append(message(chain.boundaries[last]) if last < len(chain.boundaries) else ())
        refs = chain.boundaries[first - 1] if first else ()
        back.append(message([ref for ref in refs if ref in differentiable]))
    return {"send": tuple(send), "send_back": tuple(back)}
