"""The working state of the choice presolve: what is left, and how to get back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solvers.choice_problem import Array, ChoiceProblem

Factor = tuple[tuple[int, ...], Array]
"""Nodes, and a table of costs with a dim for each, in that order."""


class Infeasible(Exception):
    """No option of some node is left, or the least usage exceeds a capacity."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Eliminated:
    """A node minimised out: `best` gives its local option for its neighbours' local options.

    `factors` are the cost tables it was part of, each with the nodes of its dims.
    """

    node: int
    options: NDArray[np.intp]
    neighbours: tuple[int, ...]
    neighbour_options: tuple[NDArray[np.intp], ...]
    best: NDArray[np.intp]
    factors: tuple[Factor, ...]


@dataclass(kw_only=True, slots=True, eq=False)
class CoreCapacity:
    """A capacity in what is left: usage per node above the least of its options."""

    name: str
    limit: float
    scale: float
    usage: dict[int, Array]


@dataclass(kw_only=True, slots=True, eq=False)
class Core:
    """What is left of a problem, changed in place by the reductions.

    `costs`, `options` (original indices) and `edges` (both directions, the same numbers) are per
    node left; `constant` is the cost settled so far.
    """

    costs: dict[int, Array]
    options: dict[int, NDArray[np.intp]]
    edges: dict[int, dict[int, Array]]
    capacities: list[CoreCapacity]
    constant: float = 0.0
    eliminated: list[Eliminated] = field(default_factory=list)

    def keep(self, node: int, kept: NDArray[np.intp]) -> None:
        """Restrict `node` to the local option indices `kept`; raises Infeasible if none."""
        if len(kept) == len(self.options[node]):
            return
        if len(kept) == 0:
            raise Infeasible(f"node {node}")
        self.costs[node] = self.costs[node][kept]
        self.options[node] = self.options[node][kept]
        for other in self.edges[node]:
            self.set_edge(node, other, self.edges[node][other][kept])
        for capacity in self.capacities:
            if node in capacity.usage:
                capacity.usage[node] = capacity.usage[node][kept]

    def set_edge(self, node: int, other: int, cost: Array) -> None:
        """Store `cost` [node, other] in both directions."""
        self.edges[node][other] = cost
        self.edges[other][node] = cost.T

    def size(self) -> int:
        """Variables of the ILP: options, and pairs of options on edges."""
        pairs = sum(m.size for around in self.edges.values() for m in around.values())
        return sum(map(len, self.options.values())) + pairs // 2

    def limited(self) -> set[int]:
        """Nodes that some capacity touches."""
        return {node for capacity in self.capacities for node in capacity.usage}

    def choices(self, local: dict[int, int], count: int) -> tuple[int, ...]:
        """Original options for all `count` nodes from the local ones of the nodes left."""
        chosen = {node: int(self.options[node][index]) for node, index in local.items()}
        return decoded(self.eliminated, chosen, count)


def decoded(
    eliminated: Sequence[Eliminated], chosen: Mapping[int, int], count: int
) -> tuple[int, ...]:
    """Original options of all `count` nodes in order; the rest as in `decoded_by_node`."""
    known = decoded_by_node(eliminated, chosen)
    return tuple(known[node] for node in range(count))


def decoded_by_node(eliminated: Sequence[Eliminated], chosen: Mapping[int, int]) -> dict[int, int]:
    """Original options by node, from those `chosen` for the nodes left after the steps that
    `eliminated` the others."""
    known = dict(chosen)
    for step in reversed(eliminated):
        at = tuple(
            int(options.searchsorted(known[node]))
            for node, options in zip(step.neighbours, step.neighbour_options, strict=True)
        )
        known[step.node] = int(step.options[step.best[at]])
    return known


def build_core(problem: ChoiceProblem) -> Core:
    """The problem with parallel edges merged, in an order that does not depend on the input's."""
    count = len(problem.node_costs)
    costs = {n: np.asarray(c, dtype=float).copy() for n, c in enumerate(problem.node_costs)}
    core = Core(
        costs=costs,
        options={n: np.arange(len(c)) for n, c in costs.items()},
        edges={n: {} for n in range(count)},
        capacities=[],
    )
    oriented = []
    for edge in problem.edges:
        cost = np.asarray(edge.cost, dtype=float)
        if edge.src == edge.dst:
            core.costs[edge.src] += np.diag(cost)
            continue
        low, high = min(edge.src, edge.dst), max(edge.src, edge.dst)
        oriented.append((low, high, cost if edge.src == low else cost.T))
    for low, high, cost in sorted(oriented, key=lambda e: (e[0], e[1], e[2].tobytes())):
        known = core.edges[low].get(high)
        core.set_edge(low, high, cost if known is None else known + cost)
    for capacity in problem.capacities:
        usage: dict[int, Array] = {}
        for node, values in capacity.members:
            usage[node] = usage.get(node, 0.0) + np.asarray(values, dtype=float)
        core.capacities.append(
            CoreCapacity(
                name=capacity.name,
                limit=float(capacity.limit),
                scale=abs(float(capacity.limit)),
                usage=dict(sorted(usage.items())),
            )
        )
    core.capacities.sort(key=lambda c: (c.name, c.limit, [u.tobytes() for u in c.usage.values()]))
    return core


def drop_forbidden(core: Core, nodes: Iterable[int] | None = None) -> set[int]:
    """Arc consistency: drop options that are forbidden or lack a partner; returns nodes changed."""
    pending = deque(sorted(core.costs if nodes is None else nodes))
    changed = set()
    while pending:
        node = pending.popleft()
        if node not in core.costs:
            continue
        alive = np.isfinite(core.costs[node])
        for cost in core.edges[node].values():
            alive &= np.minimum.reduce(cost, axis=1) < np.inf
        if not alive.all():
            core.keep(node, np.flatnonzero(alive))
            pending.extend(core.edges[node])
            changed.add(node)
    return changed


def distinct(rows: NDArray[Any]) -> tuple[list[int], NDArray[np.intp]]:
    """The index of the first of each distinct row, and which of these every row is."""
    width = rows.dtype.itemsize * rows[:1].size
    whole = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.dtype((np.void, width)))
    each: list[bytes] = whole.ravel().tolist()  # type: ignore[assignment]
    foremost = dict(zip(reversed(each), range(len(each) - 1, -1, -1), strict=True))
    places = {row: place for place, row in enumerate(dict.fromkeys(each))}
    kind = np.array([places[row] for row in each], dtype=np.intp)
    return [foremost[row] for row in places], kind
