"""What each option costs at least: min-marginals of an eliminated problem.

The nodes of one elimination step form a clique of a junction tree. Going back through the steps,
the least total over each clique follows from the clique that its remaining nodes were eliminated
in, as in two-pass belief propagation (Koller and Friedman, Probabilistic Graphical Models, 10.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.choice_core import Eliminated
from solvers.choice_problem import Array

_MAX_ENTRIES = 3e7


def min_marginals(
    steps: Sequence[Eliminated], total: float
) -> dict[int, tuple[NDArray[np.intp], Array]] | None:
    """Per node, its options and the least total cost with each of them.

    `steps` eliminated every node, with least total cost `total`. None where the tables would take
    too much memory.
    """
    entries = sum(len(s.options) * math.prod(map(len, s.neighbour_options)) for s in steps)
    if entries > _MAX_ENTRIES:
        return None
    order = {step.node: position for position, step in enumerate(steps)}
    beliefs: dict[int, Array] = {}
    marginals = {}
    for step in reversed(steps):
        own = _own_costs(step)
        rest = _least_over(step, steps, order, beliefs, total)
        least = own.min(axis=0)
        with np.errstate(invalid="ignore"):
            rest = np.where(np.isfinite(least), rest - least, np.inf)
        belief = own + rest
        beliefs[step.node] = belief
        marginals[step.node] = (
            step.options,
            belief.reshape(len(step.options), -1).min(axis=1),
        )
    return marginals


def _own_costs(step: Eliminated) -> Array:
    """The costs settled in a step, by the node's option and its neighbours'."""
    dims = (step.node, *step.neighbours)
    sizes = (len(step.options), *(len(options) for options in step.neighbour_options))
    total = np.zeros(sizes)
    for nodes, table in step.factors:
        by_dim = sorted(range(len(nodes)), key=lambda axis: dims.index(nodes[axis]))
        shape = [size if node in nodes else 1 for node, size in zip(dims, sizes, strict=True)]
        total += table.transpose(by_dim).reshape(shape)
    return total


def _least_over(
    step: Eliminated,
    steps: Sequence[Eliminated],
    order: dict[int, int],
    beliefs: dict[int, Array],
    total: float,
) -> Array:
    """The least total with each combination of the neighbours' options, as of this step."""
    if not step.neighbours:
        return np.asarray(total)
    parent = steps[min(order[node] for node in step.neighbours)]
    nodes = (parent.node, *parent.neighbours)
    options = (parent.options, *parent.neighbour_options)
    absent = tuple(axis for axis, node in enumerate(nodes) if node not in step.neighbours)
    table = beliefs[parent.node].min(axis=absent)
    present = [node for node in nodes if node in step.neighbours]
    table = table.transpose([present.index(node) for node in step.neighbours])
    least = np.full([len(o) for o in step.neighbour_options], np.inf)
    places = [
        np.searchsorted(before, options[nodes.index(node)])
        for node, before in zip(step.neighbours, step.neighbour_options, strict=True)
    ]
    least[np.ix_(*places)] = table  # options dropped in between stay at inf
    return least
