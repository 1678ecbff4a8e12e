"""Exact reductions of a choice problem, before any ILP.

Each step keeps at least one optimal solution:

- an option without a compatible partner on some edge is dropped (arc consistency), and so is one
  that no capacity can hold beside the least usage of the others;
- a capacity that always holds, or that another one implies, is dropped;
- option i is dropped where some option j costs no more whatever the neighbours choose:
  c(j) - c(i) + sum over neighbours of max_k (M(j, k) - M(i, k)) <= 0, and uses no more (dead-end
  elimination; Goldstein, Biophysical Journal 66, 1994);
- a node that no capacity touches and that has at most two neighbours is minimised out, and so is
  a whole component whose tables stay small (`choice_elimination`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from solvers.choice_core import Core, CoreCapacity, Infeasible, distinct, drop_forbidden
from solvers.choice_elimination import eliminate_components, eliminate_pairwise
from solvers.choice_problem import Array
from solvers.solution import CAPACITY_TOLERANCE

_MAX_DOMINANCE_WORK = 2e8
_PAIRS_AT_ONCE = 4096
_MAX_CAPACITY_COMPARISONS = 64


def reduce_core(core: Core, *, soft: bool = False) -> None:
    """Apply every reduction until none applies; raises Infeasible.

    With `soft` capacities (exceeding them is what is minimised, costs are 0) nothing is dropped
    for not fitting; every other reduction stays exact, as less usage is never worse.
    """
    _reduce(core, lambda: _tighten_capacities(core, soft=soft))
    eliminate_components(core, core.limited())


def reduce_open(core: Core, fixed: Collection[int]) -> None:
    """Apply the reductions that hold whatever is added to the costs of nodes: any costs to those
    in `fixed`, to others a price from 0 for their usage of each capacity, which has no limit."""
    _reduce(core, set, frozenset(fixed))


def _reduce(
    core: Core, tighten: Callable[[], set[int]], fixed: frozenset[int] = frozenset()
) -> None:
    drop_forbidden(core)
    pending = set(core.costs)
    while pending:
        pending |= tighten()
        pending |= eliminate_pairwise(core, core.limited() | fixed)
        dropped = set()
        limited = core.limited()
        for node in sorted((pending & set(core.costs)) - fixed):
            if _drop_dominated(core, node, limited):
                dropped.add(node)
        around = {other for node in dropped for other in core.edges[node]}
        pending = dropped | around | drop_forbidden(core, around)


def _tighten_capacities(core: Core, *, soft: bool) -> set[int]:
    """Fold least usages into limits, drop what cannot be used or cannot bind."""
    changed: set[int] = set()
    again = True
    while again:
        again = False
        for capacity in core.capacities:
            _normalise(capacity)
            if not soft and (dropped := _drop_unaffordable(core, capacity)):
                changed |= dropped
                again = True
    core.capacities = [c for c in core.capacities if _may_bind(c)]
    if not soft:
        _drop_implied(core)
    return changed


def _drop_unaffordable(core: Core, capacity: CoreCapacity) -> set[int]:
    """Drop options that exceed the capacity beside the least usage of all others."""
    allowance = _allowance(capacity)
    if allowance < 0:
        raise Infeasible(capacity.name)
    changed: set[int] = set()
    for node in list(capacity.usage):
        affordable = np.flatnonzero(capacity.usage[node] <= allowance)
        if len(affordable) < len(core.options[node]):
            core.keep(node, affordable)
            changed |= {node} | drop_forbidden(core, core.edges[node])
    return changed


def _allowance(capacity: CoreCapacity) -> float:
    return capacity.limit + CAPACITY_TOLERANCE * capacity.scale


def _may_bind(capacity: CoreCapacity) -> bool:
    return sum(float(u.max()) for u in capacity.usage.values()) > _allowance(capacity)


def _normalise(capacity: CoreCapacity) -> None:
    for node, usage in list(capacity.usage.items()):
        least = float(usage.min())
        capacity.limit -= least
        if least == float(usage.max()):
            del capacity.usage[node]
        elif least != 0.0:
            capacity.usage[node] = usage - least


def _drop_implied(core: Core) -> None:
    """Drop each capacity that another implies: usage no larger, limit no smaller, per entry."""
    if len(core.capacities) < 2:
        return
    start, width = {}, 0
    for node in sorted(core.limited()):
        start[node] = width
        width += len(core.options[node])
    table = np.zeros((len(core.capacities), width))
    for row, capacity in zip(table, core.capacities, strict=True):
        for node, usage in capacity.usage.items():
            row[start[node] : start[node] + len(usage)] = usage
    limits = np.array([c.limit for c in core.capacities])
    alive = np.ones(len(limits), dtype=bool)
    by_weight = np.argsort(-(table.sum(axis=1) - limits), kind="stable")
    for strong in by_weight[:_MAX_CAPACITY_COMPARISONS]:
        if not alive[strong]:
            continue
        others = np.flatnonzero(alive)
        others = others[others != strong]
        implied = (table[others] <= table[strong]).all(axis=1) & (limits[others] >= limits[strong])
        alive[others[implied]] = False
    core.capacities = [c for c, kept in zip(core.capacities, alive, strict=True) if kept]


def _drop_dominated(core: Core, node: int, limited: set[int]) -> bool:
    """Dead-end elimination of the options of `node`; the lowest of equal options stays."""
    size = len(core.options[node])
    if size == 1:
        return False
    instead, of = np.nonzero(_replaceable(core, node, limited))
    if len(of) * sum(c.shape[1] for c in core.edges[node].values()) > _MAX_DOMINANCE_WORK:
        return False
    excess = core.costs[node][instead] - core.costs[node][of]
    for matrix in core.edges[node].values():
        excess += _worst_change(matrix, instead, of)
    dominates = np.zeros((size, size), dtype=bool)
    dominates[instead, of] = excess <= 0
    alive = np.ones(size, dtype=bool)
    for i in range(size - 1, -1, -1):
        if (dominates[:, i] & alive).any():
            alive[i] = False
    core.keep(node, np.flatnonzero(alive))
    return not alive.all()


def _replaceable(core: Core, node: int, limited: set[int]) -> NDArray[np.bool_]:
    """[j, i]: j goes with every partner of i and uses no more of any capacity."""
    possible = ~np.eye(len(core.options[node]), dtype=bool)
    partners = [np.isfinite(matrix) for matrix in core.edges[node].values()]
    some = [each for each in partners if not each.all()]
    if some:
        first, kind = distinct(np.concatenate(some, axis=1))
        rows = np.concatenate([each[first] for each in some], axis=1).astype(np.float32)
        together = (1 - rows) @ rows.T == 0
        possible &= together[kind].take(kind, axis=1)
    if node in limited:
        for capacity in core.capacities:
            if node in capacity.usage:
                usage = capacity.usage[node]
                possible &= usage[:, None] <= usage[None, :]
    return possible


def _worst_change(matrix: Array, instead: NDArray[np.intp], of: NDArray[np.intp]) -> Array:
    """max over k of M[j, k] - M[i, k] for pairs (j, i); a k that i cannot go with does not count.

    Options that look alike to a neighbour have the same row, so few rows and columns differ.
    """
    first, kind = distinct(matrix)
    rows = matrix[first]
    columns, _ = distinct(rows.T)
    rows = rows[:, columns]
    pairs, at = np.arange(len(first) ** 2), kind[instead] * len(first) + kind[of]
    if len(pairs) > len(at):
        pairs, at = np.unique(at, return_inverse=True)
    j, i = np.divmod(pairs, len(first))
    worst = np.empty(len(pairs))
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        some = slice(start, start + _PAIRS_AT_ONCE)
        mine = rows[i[some]]
        held = np.isfinite(mine)
        change = rows[j[some]] - np.where(held, mine, 0.0)
        worst[some] = np.where(held, change, -np.inf).max(axis=1)
    return worst[at]
