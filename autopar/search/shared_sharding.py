"""Shardings of a block on meshes that are alike but for the sizes of the axes that split samples.

What an op takes on one rank depends on these sizes only where experts are split over them, or where
it communicates over them. All the rest is the same for all such meshes, and minimised out once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Ref
from autopar.ir.mesh import batch_count
from autopar.ir.size import Shape
from autopar.search.node_costs import is_sized
from autopar.search.prices import Prices
from autopar.search.wiring import Link, Wiring
from solvers.choice_open import OpenProblems
from solvers.choice_problem import ChoiceProblem, Edge

Array = NDArray[np.float64]


class SharedSharding:
    """The problems of one space, with gradients summed for free. `prices` are those of any of the
    meshes; `products` as in `ShardingProblem`, `open_links` are the `varying_links`."""

    def __init__(
        self,
        wiring: Wiring,
        prices: Prices,
        products: Collection[str],
        open_links: Sequence[Link],
    ) -> None:
        self._wiring, self._products = wiring, products
        self._prices = prices
        space = wiring.space
        self._ops = list(enumerate(zip(space.nodes, space.options, strict=True)))
        self._open_ops = {
            index
            for index, (node, options) in self._ops
            if prices.costs.varies(node, options, prices)
        }
        self._open_links = open_links
        self._least_s = sum(float(self._op_s(i, prices).min()) for i in self._closed_ops)
        self._weight = max((self._op_weight(i, prices) for i in self._closed_ops), default=0.0)

    @property
    def _closed_ops(self) -> list[int]:
        return [index for index, _ in self._ops if index not in self._open_ops]

    @property
    def varies(self) -> bool:
        """Whether the sizes of the axes that split samples count at all."""
        return bool(self._open_ops or self._open_links)

    def _op_s(self, index: int, prices: Prices) -> Array:
        node, options = self._ops[index][1]
        seconds: Array = prices.option_s(node, options).sum(axis=1)
        return seconds

    def _op_weight(self, index: int, prices: Prices) -> float:
        """The largest share of a product's time that its backward takes; 0 of other ops."""
        node, options = self._ops[index][1]
        if node.name not in self._products:
            return 0.0
        times = prices.costs.compute(node, options, prices)
        total, backward = times.sum(axis=1), times[:, 1]
        return float((backward[backward > 0] / total[backward > 0]).max(initial=0.0))

    def least_s(self, prices: Prices) -> float:
        """Every op at its fastest, values moved for free."""
        return self._least_s + sum(
            float(self._op_s(index, prices).min()) for index in sorted(self._open_ops)
        )

    def most_weight(self, prices: Prices) -> float:
        """The share of a block's time that its weight gradients take at the most."""
        own = [self._op_weight(index, prices) for index in sorted(self._open_ops)]
        return max([self._weight, *own])

    @cached_property
    def _problems(self) -> OpenProblems:
        wiring, prices = self._wiring, self._prices
        costs = [np.zeros(size) for size in wiring.sizes]
        for index in self._closed_ops:
            costs[index] += self._op_s(index, prices)
        for index, known in wiring.costs.items():
            costs[index] += known
        edges = list(wiring.edges)
        varying = set(map(id, self._open_links))
        open_nodes = set(self._open_ops)
        for link in wiring.links:
            if id(link) in varying:
                open_nodes |= {end for end in (link.source, link.target) if end is not None}
            else:
                edge = link.take(prices, costs)
                edges += [edge] if edge else []
        problem = ChoiceProblem(node_costs=tuple(costs), edges=tuple(edges))
        return OpenProblems(problem, open_nodes)

    @property
    def open_parameters(self) -> dict[Ref, int]:
        """The parameters whose layouts may be given a price of their own, with their nodes."""
        if not self.varies:
            return {}
        open_nodes = self._problems.open_nodes
        refs = [Ref(source.name) for source, _ in self._wiring.space.parameters]
        lies = self._wiring.lies
        return {ref: lies[ref][0] for ref in refs if lies[ref][0] in open_nodes}

    def solve(
        self, prices: Prices, backend: str, time_limit_s: float
    ) -> tuple[float, float, tuple[int, ...]] | None:
        """The fastest choice on a mesh: seconds, a bound, and the option of every node."""
        return self._problems.solve(*self._own(prices), backend=backend, time_limit_s=time_limit_s)

    def at(self, prices: Prices) -> OpenProblems:
        """The problems on a mesh with more costs of the nodes of `open_parameters`."""
        return self._problems.narrowed(*self._own(prices), self.open_parameters.values())

    def _own(self, prices: Prices) -> tuple[dict[int, Array], list[Edge]]:
        """The costs and edges that a mesh has for itself."""
        costs = {index: self._op_s(index, prices) for index in sorted(self._open_ops)}
        for link in self._open_links:
            for end in (link.source, link.target):
                if end is not None and end not in costs:
                    costs[end] = np.zeros(self._wiring.sizes[end])
        edges = [link.take(prices, costs) for link in self._open_links]
        return costs, [edge for edge in edges if edge]


def varying_links(wiring: Wiring, prices: Prices) -> tuple[Link, ...]:
    """The moves whose seconds depend on the sizes of the axes that split samples, for which the
    prices on any mesh with these axes do: where one communicates, and moves on such an axis or what
    it moves has its size from them."""
    samples = batch_count(prices.names)
    known: dict[Shape, dict[int, bool]] = {}

    def varies(shape: Shape, index: int) -> bool:
        move = prices.paths.moves[index]
        if move is None or (move.transition.forward is None and move.transition.backward is None):
            return False
        sized = (is_sized(shape, lies[:samples]) for lies in (move.before, move.after))
        return move.axis < samples or any(sized)

    def of_link(link: Link) -> bool:
        shape = prices.specs[link.ref].shape
        of_shape = known.setdefault(shape, {})
        for index in prices.moves(link.ref, link.rows, link.columns):
            if index not in of_shape:
                of_shape[index] = varies(shape, index)
            if of_shape[index]:
                return True
        return False

    return tuple(link for link in wiring.links if of_link(link))
