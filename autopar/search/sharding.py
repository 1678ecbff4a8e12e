"""A block's sharding ILP: `BlockSpace` and `Prices` to a `ChoiceProblem`, and back.

Choice nodes are the ops, the parameters, and one "forms" node for every value that several readers
need: its options are the sets of layouts the value is brought to, so that a value moved once and
read three times is paid for once, as it is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.plan.plan import NodeChoice
from autopar.search.block import BlockSpace
from autopar.search.node_costs import Times
from autopar.search.prices import Prices
from autopar.search.remembered import Family, choice_family
from autopar.search.store import Store
from solvers.choice_problem import ChoiceProblem, ChoiceSolution, Edge
from solvers.solution import Status

Forms = tuple[Layout, ...]
_Item = TypeVar("_Item", bound=Hashable)
_MAX_LAYOUTS_FOR_TRIPLES = 6
_DEAR = 1e4
_LEAST_S = 1e-9
_WORTH = 0.02
_TIE = 1e-9
_SAME_BYTES = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """A solved block: the choice of every node, the layout of every parameter, and the proof.

    `objective` and `bound` are seconds; `kept_bytes` the weighted bytes it keeps.
    """

    choices: tuple[NodeChoice, ...]
    parameters: tuple[tuple[str, Layout], ...]
    objective: float
    bound: float
    kept_bytes: float
    status: Status
    integral_relaxation: bool
    num_variables: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Upkeep:
    """What layouts cost beside a block's passes: `sync_s` per micro-batch for every layout of a
    parameter, to sum its gradient once a step; `kept` bytes held per byte of a value."""

    sync_s: Mapping[Ref, Sequence[float]] = field(default_factory=dict)
    kept: Mapping[Ref, float] = field(default_factory=dict)


NO_UPKEEP = Upkeep()


def sync_shares_s(space: BlockSpace, prices: Prices, shares: int) -> dict[Ref, list[float]]:
    """Seconds to sum the gradient of each parameter, for each of its layouts, where `shares`
    micro-batches share them."""
    return {
        Ref(source.name): [prices.sync_s(Ref(source.name), x) / shares for x in layouts]
        for source, layouts in space.parameters
        if source.trainable
    }


class _Builder:
    """Collects the nodes and edges of the choice problem of one block."""

    def __init__(self, space: BlockSpace, prices: Prices, products: Collection[str] = ()) -> None:
        self.space, self.prices, self.products = space, prices, products
        self.most_weight = 0.0
        self.node_costs: list[NDArray[np.float64]] = []
        self.op_costs: list[NDArray[np.float64]] = []
        self.edges: list[Edge] = []
        self._bytes: dict[Ref, NDArray[np.float64]] = {}
        self.option_layouts: dict[Ref, tuple[int, list[Layout]]] = {}

    def add(self, costs: Sequence[float] | NDArray[np.float64]) -> int:
        """Add a choice node with the given option costs; its index."""
        self.node_costs.append(np.array(costs, dtype=float))
        return len(self.node_costs) - 1

    def add_ops(self) -> None:
        """One choice node per op, at its compute time and inner collectives."""
        for node, options in zip(self.space.nodes, self.space.options, strict=True):
            costs = self.prices.option_s(node, options).sum(axis=1)
            if node.name in self.products:
                self._weigh(self.prices.costs.compute(node, options, self.prices))
            index = self.add(costs)
            self.op_costs.append(self.node_costs[index].copy())
            for output in range(len(node.outputs)):
                ref = Ref(node.name, output)
                self.option_layouts[ref] = (index, [o.outputs[output] for o in options])

    def _weigh(self, times: Times) -> None:
        """Take the share of the backward in a product's time for the most, if it is."""
        total, backward = times.sum(axis=1), times[:, 1]
        shares = backward[backward > 0] / total[backward > 0]
        self.most_weight = max(self.most_weight, float(shares.max(initial=0.0)))

    def add_parameters(self) -> None:
        """One choice node per parameter."""
        for source, layouts in self.space.parameters:
            index = self.add([0.0] * len(layouts))
            self.option_layouts[Ref(source.name)] = (index, list(layouts))

    def held_bytes(self, ref: Ref) -> tuple[int, NDArray[np.float64]]:
        """The node that decides how a value lies, and the bytes of the value for its options."""
        index, layouts = self.option_layouts[ref]
        if ref not in self._bytes:
            held = [self.prices.local_bytes(ref, x) for x in layouts]
            self._bytes[ref] = np.array(held, dtype=float)
        return index, self._bytes[ref]

    def parameter_costs(
        self, upkeep: Upkeep, byte_price_s: float
    ) -> dict[int, NDArray[np.float64]]:
        """Seconds of every layout of every parameter, with those for its bytes.

        Ties go to the layouts that come first, see `block.parameter_layouts`.
        """
        costs = {}
        for source, layouts in self.space.parameters:
            ref = Ref(source.name)
            index, held = self.held_bytes(ref)
            costs[index] = byte_price_s * upkeep.kept.get(ref, 0.0) * held
            if ref in upkeep.sync_s:
                sync_s = np.asarray(upkeep.sync_s[ref], dtype=float)
                costs[index] += sync_s + _TIE * sync_s.max() * np.arange(len(layouts))
        return costs

    def add_values(self) -> None:
        """Connect every value to its readers, through a forms node where there are several."""
        for ref in (*self.space.given, *self.option_layouts):
            readers = self.space.consumers.get(ref, ())
            required = self.space.required.get(ref)
            if len(readers) + (required is not None) > 1:
                self._connect_forms(ref, readers, required)
            elif readers:
                self._connect(ref, *readers[0])
            elif required is not None:
                self._charge(ref, [[required]])

    def _reader_layouts(self, index: int, position: int) -> list[Layout]:
        return [option.inputs[position] for option in self.space.options[index]]

    def _connect(self, ref: Ref, index: int, position: int) -> None:
        wanted = self._reader_layouts(index, position)
        if ref in self.space.given:
            have = self.space.given[ref]
            self.node_costs[index] += self._matrix(ref, [have], [(w,) for w in wanted])[0]
            return
        producer, layouts = self.option_layouts[ref]
        self.edges.append(
            Edge(src=producer, dst=index, cost=self._matrix(ref, layouts, [(w,) for w in wanted]))
        )

    def _matrix(
        self, ref: Ref, have: Sequence[Layout], forms: Sequence[Forms]
    ) -> NDArray[np.float64]:
        """Seconds from every layout to every set of layouts; each pair is priced once."""
        rows, columns = _positions(have), _positions(x for form in forms for x in form)
        moves = self.prices.reshard_s(ref, tuple(rows), tuple(columns))
        sets = _positions(forms)
        summed = [moves[:, [columns[x] for x in form]].sum(axis=1) for form in sets]
        table = np.stack(summed, axis=1)
        return table[np.ix_([rows[x] for x in have], [sets[form] for form in forms])]

    def _charge(self, ref: Ref, forms: Sequence[Sequence[Layout]]) -> None:
        producer, layouts = self.option_layouts[ref]
        self.node_costs[producer] += self._matrix(ref, layouts, [tuple(forms[0])])[:, 0]

    def _connect_forms(
        self, ref: Ref, readers: Sequence[tuple[int, int]], required: Layout | None
    ) -> None:
        wanted = [self._reader_layouts(*reader) for reader in readers]
        if required is not None:
            wanted.append([required])
        forms = form_sets(wanted)
        index = self.add([0.0] * len(forms))
        if ref in self.space.given:
            self.node_costs[index] += self._matrix(ref, [self.space.given[ref]], forms)[0]
        else:
            producer, layouts = self.option_layouts[ref]
            cost = self._matrix(ref, layouts, forms)
            self.edges.append(Edge(src=producer, dst=index, cost=cost))
        places, met = _met(forms, wanted)
        for (reader, _), layouts in zip(readers, wanted, strict=False):
            rows = met[[places[x] for x in layouts]]
            self.edges.append(Edge(src=index, dst=reader, cost=rows.T))
        if required is not None:
            self.node_costs[index] += [0.0 if required in form else inf for form in forms]


def _positions(items: Iterable[_Item]) -> dict[_Item, int]:
    """Position of each distinct item, in the order of first use."""
    found: dict[_Item, int] = {}
    for item in items:
        found.setdefault(item, len(found))
    return found


def _met(
    forms: Sequence[Forms], wanted: Iterable[Sequence[Layout]]
) -> tuple[dict[Layout, int], NDArray[np.float64]]:
    """The layouts that are wanted, and for each (row) 0 where a form has it, else inf."""
    places = _positions(x for layouts in wanted for x in layouts)
    met = np.full((len(places), len(forms)), inf)
    for column, form in enumerate(forms):
        met[[places[x] for x in form], column] = 0.0
    return places, met


def form_sets(wanted: Sequence[Sequence[Layout]]) -> list[Forms]:
    """Sets of layouts a value may be brought to so that every reader finds one of its own.

    Sets of one and two, and of three where few layouts are asked for.
    """
    layouts = sorted({layout for reader in wanted for layout in reader}, key=str)
    most = 3 if len(layouts) <= _MAX_LAYOUTS_FOR_TRIPLES else 2
    asked = [set(reader) for reader in wanted]
    return [
        form
        for size in range(1, min(most, len(wanted)) + 1)
        for form in combinations(layouts, size)
        if all(reader & set(form) for reader in asked)
    ]


class ShardingProblem:
    """The priced ILP of one block, to be solved for several upkeeps and prices of a byte.

    `kept` are the values, besides parameters, that an upkeep may count the bytes of; `products` the
    ops whose weight gradients may be computed apart. A `store` has what was solved before.
    """

    def __init__(
        self,
        space: BlockSpace,
        prices: Prices,
        *,
        kept: Collection[Ref] = (),
        products: Collection[str] = (),
        backend: str = "highs",
        time_limit_s: float = 120.0,
        store: Store | None = None,
    ) -> None:
        self.space, self._backend, self._time_limit_s = space, backend, time_limit_s
        self._store = store
        self._possible = all(space.options) and all(layouts for _, layouts in space.parameters)
        if self._possible:
            self._builder = _Builder(space, prices, products)
            self._builder.add_ops()
            self._builder.add_parameters()
            self._kept = [ref for ref in kept if ref in self._builder.option_layouts]

    @cached_property
    def _family(self) -> Family:
        builder = self._builder
        builder.add_values()
        return choice_family(
            ChoiceProblem(node_costs=tuple(builder.node_costs), edges=tuple(builder.edges)),
            rates=[builder.held_bytes(ref) for ref in self._kept],
            fixed=[builder.option_layouts[Ref(s.name)][0] for s, _ in self.space.parameters],
            store=self._store,
        )

    @property
    def least_s(self) -> float:
        """What no sharding beats: every op at its fastest, values moved for free; inf if there is
        none."""
        if not self._possible:
            return inf
        ops = self._builder.op_costs
        return sum(float(costs.min()) for costs in ops)

    @property
    def most_weight(self) -> float:
        """The share of a block's time that its weight gradients take at the most."""
        return self._builder.most_weight if self._possible else 1.0

    def solve(self, upkeep: Upkeep = NO_UPKEEP, byte_price_s: float = 0.0) -> Sharding | None:
        """The sharding with the least time plus `byte_price_s` for every weighted byte it keeps.

        None if the rules and pins leave none.
        """
        if not self._possible:
            return None
        builder, weights = self._builder, [upkeep.kept.get(ref, 0.0) for ref in self._kept]
        solution = self._family.solve(
            [byte_price_s * weight for weight in weights],
            builder.parameter_costs(upkeep, byte_price_s),
            backend=self._backend,
            time_limit_s=self._time_limit_s,
        )
        if solution.choices is None:
            return None
        kept_bytes = 0.0
        for ref, weight in upkeep.kept.items():
            if weight and ref in builder.option_layouts:
                index, held = builder.held_bytes(ref)
                kept_bytes += weight * float(held[solution.choices[index]])
        return self._decode(solution, solution.choices, kept_bytes, byte_price_s * kept_bytes)

    def _decode(
        self,
        solution: ChoiceSolution,
        choices: Sequence[int],
        kept_bytes: float,
        for_bytes_s: float,
    ) -> Sharding:
        space = self.space
        chosen = [
            (node, options[choice])
            for node, options, choice in zip(space.nodes, space.options, choices, strict=False)
        ]
        first = len(space.nodes)
        return Sharding(
            choices=tuple(
                NodeChoice(node=node.name, inputs=o.inputs, outputs=o.outputs) for node, o in chosen
            ),
            parameters=tuple(
                (source.fqn, layouts[choices[first + i]])
                for i, (source, layouts) in enumerate(space.parameters)
            ),
            objective=solution.objective - for_bytes_s,
            bound=solution.bound - for_bytes_s,
            kept_bytes=kept_bytes,
            status=solution.status,
            integral_relaxation=solution.integral_relaxation,
            num_variables=solution.num_variables,
        )


def pareto_shardings(problem: ShardingProblem, upkeep: Upkeep, *, depth: int = 2) -> list[Sharding]:
    """Shardings from the fastest to the leanest: supported trade-offs of time for bytes.

    Each is optimal for some price of a byte, found by halving between neighbours (the dichotomic
    scheme of Aneja and Nair 1979), `depth` times.
    """
    solve = partial(problem.solve, upkeep)
    fastest = solve()
    if fastest is None or fastest.kept_bytes <= 0:
        return [fastest] if fastest else []
    leanest = solve(_DEAR * max(fastest.objective, _LEAST_S) / fastest.kept_bytes)
    if leanest is None or leanest.kept_bytes >= (1 - _WORTH) * fastest.kept_bytes:
        return [fastest]
    return [fastest, *_between(solve, fastest, leanest, depth), leanest]


def _between(
    solve: Callable[[float], Sharding | None], fast: Sharding, lean: Sharding, depth: int
) -> list[Sharding]:
    saved = fast.kept_bytes - lean.kept_bytes
    if not depth or saved <= _WORTH * fast.kept_bytes:
        return []
    middle = solve((lean.objective - fast.objective) / saved)
    if middle is None:
        return []
    step = min(fast.kept_bytes - middle.kept_bytes, middle.kept_bytes - lean.kept_bytes)
    if step <= _SAME_BYTES * fast.kept_bytes:
        return []
    below = _between(solve, fast, middle, depth - 1)
    return [*below, middle, *_between(solve, middle, lean, depth - 1)]


def solve_sharding(
    space: BlockSpace, prices: Prices, *, shares: int = 1, backend: str = "highs"
) -> Sharding | None:
    """The fastest sharding of a block where `shares` micro-batches share a sum of gradients, or
    None if the rules and pins leave none."""
    upkeep = Upkeep(sync_s=sync_shares_s(space, prices, shares))
    return ShardingProblem(space, prices, backend=backend).solve(upkeep)
