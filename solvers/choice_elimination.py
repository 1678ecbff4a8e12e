"""Minimising nodes out of a choice problem exactly (bucket elimination).

Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113,
1999. A node with at most two neighbours leaves a cost on one of them or on the edge between them,
so the problem stays one of pairs. A component that no capacity touches may also be solved whole,
through tables over more than two nodes, where these stay small. Ties go to the lowest option.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.choice_core import Core, Eliminated, Factor, Infeasible, drop_forbidden
from solvers.choice_minimise import minimise, minimise_factors

_PAIRWISE_DEGREE = 2
_MAX_WORK = 1e8
_MAX_TABLE = 4e6


def eliminate_pairwise(core: Core, limited: set[int]) -> set[int]:
    """Minimise out nodes of degree <= 2 outside `limited`; returns the nodes whose costs changed.

    An edge that joins two formerly unconnected nodes stays small: at most as many pairs as the
    node's own edges had, or else the ILP could grow by what was meant to shrink it.
    """
    changed: set[int] = set()
    heap = [(len(core.edges[node]), node) for node in core.costs if node not in limited]
    heapq.heapify(heap)
    while heap:
        degree, node = heapq.heappop(heap)
        if node not in core.costs or degree != len(core.edges[node]):
            continue
        if degree > _PAIRWISE_DEGREE or not _worthwhile(core, node, limited):
            continue
        around = sorted(core.edges[node])
        _eliminate_node(core, node)
        touched = set(around) | drop_forbidden(core, around)
        changed |= touched
        for other in touched & set(core.costs) - limited:
            heapq.heappush(heap, (len(core.edges[other]), other))
    return changed


def _worthwhile(core: Core, node: int, limited: set[int]) -> bool:
    sizes = {other: matrix.shape[1] for other, matrix in core.edges[node].items()}
    own = len(core.options[node])
    if float(np.prod(list(sizes.values()), dtype=float)) * own > _MAX_WORK:
        return False
    if len(sizes) < _PAIRWISE_DEGREE or not set(sizes) <= limited:
        return True
    low, high = sizes
    return high in core.edges[low] or sizes[low] * sizes[high] <= own * sum(sizes.values())


def _eliminate_node(core: Core, node: int) -> None:
    neighbours = tuple(sorted(core.edges[node]))
    matrices = [core.edges[node][other] for other in neighbours]
    least, best = minimise(core.costs[node], matrices)
    pairs = ((node, other) for other in neighbours)
    factors: list[Factor] = [((node,), core.costs[node]), *zip(pairs, matrices, strict=True)]
    core.eliminated.append(
        Eliminated(
            node=node,
            options=core.options[node],
            neighbours=neighbours,
            neighbour_options=tuple(core.options[other] for other in neighbours),
            best=best,
            factors=tuple(factors),
        )
    )
    _remove(core, node)
    if not neighbours:
        core.constant += float(least)
    elif len(neighbours) == 1:
        core.costs[neighbours[0]] = core.costs[neighbours[0]] + least
    else:
        low, high = neighbours
        known = core.edges[low].get(high)
        core.set_edge(low, high, least if known is None else known + least)


def _remove(core: Core, node: int) -> None:
    for other in core.edges.pop(node):
        del core.edges[other][node]
    del core.costs[node], core.options[node]


def eliminate_components(core: Core, limited: set[int]) -> None:
    """Solve each component that no capacity touches, where its tables stay small."""
    for component in _components(core):
        if component.isdisjoint(limited):
            order = elimination_order(core, component)
            if len(order) == len(component):
                _eliminate_component(core, order)


def _components(core: Core) -> list[set[int]]:
    components, seen = [], set[int]()
    for root in sorted(core.costs):
        if root in seen:
            continue
        component, stack = {root}, [root]
        while stack:
            for other in core.edges[stack.pop()]:
                if other not in component:
                    component.add(other)
                    stack.append(other)
        seen |= component
        components.append(component)
    return components


def elimination_order(core: Core, nodes: Collection[int], last: Collection[int] = ()) -> list[int]:
    """Greedy: the smallest table next, those of the nodes in `last` after all others. It ends where
    all tables would be too large."""
    size = {node: len(core.options[node]) for node in nodes}
    return greedy_order(size, {node: set(core.edges[node]) for node in nodes}, last)


def greedy_order(
    size: Mapping[int, int], links: dict[int, set[int]], last: Collection[int] = ()
) -> list[int]:
    """The same of nodes of a `size`, and of those that each has a cost with, its `links`, which are
    used up."""
    table = {node: math.prod(size[m] for m in around) for node, around in links.items()}
    heap = [(node in last, entries, node) for node, entries in table.items()]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, entries, node = heapq.heappop(heap)
        if node not in links or entries != table[node]:
            continue
        if entries * size[node] > _MAX_WORK or entries > _MAX_TABLE:
            return order
        around = links.pop(node)
        for other in around:
            links[other] |= around - {other}
            links[other].discard(node)
            table[other] = math.prod(size[m] for m in links[other])
            heapq.heappush(heap, (other in last, table[other], other))
        order.append(node)
    return order


def _eliminate_component(core: Core, order: list[int]) -> None:
    steps, _, constant = eliminate_factors(factors_of(core, order), order, core.options)
    core.eliminated += steps
    core.constant += constant
    for node in order:
        _remove(core, node)


def factors_of(core: Core, nodes: Sequence[int]) -> list[Factor]:
    """The costs of nodes and of the edges between them."""
    factors: list[Factor] = [((node,), core.costs[node]) for node in nodes]
    for node in nodes:
        factors += [((node, m), cost) for m, cost in core.edges[node].items() if node < m]
    return factors


def eliminate_factors(
    factors: Sequence[Factor], order: Sequence[int], options: Mapping[int, NDArray[np.intp]]
) -> tuple[list[Eliminated], list[Factor], float]:
    """Minimise out the nodes in `order`, of which `options` has the original indices.

    The steps, the factors that are left and what is settled. Raises Infeasible.
    """
    left, steps, constant = list(factors), [], 0.0
    for node in order:
        mine = [factor for factor in left if node in factor[0]]
        left = [factor for factor in left if node not in factor[0]]
        around = tuple(sorted(set(itertools.chain(*(nodes for nodes, _ in mine))) - {node}))
        least, best = minimise_factors(node, around, mine)
        steps.append(
            Eliminated(
                node=node,
                options=options[node],
                neighbours=around,
                neighbour_options=tuple(options[other] for other in around),
                best=best,
                factors=tuple(mine),
            )
        )
        if around:
            left.append((around, least))
        elif np.isfinite(least):
            constant += float(least)
        else:
            raise Infeasible(f"the pairs around node {node}")
    return steps, left, constant
