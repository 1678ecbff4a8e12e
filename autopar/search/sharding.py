"""A block's sharding ILP: `BlockSpace` and `Prices` to a `ChoiceProblem`, and back.

Choice nodes are the ops, the parameters, and one "forms" node for every value that several readers
need: its options are the sets of layouts the value is brought to, so that a value moved once and
read three times is paid for once, as it is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.plan.plan import NodeChoice
from autopar.search.block import BlockSpace
from autopar.search.prices import Prices
from autopar.search.remembered import Family, choice_family
from autopar.search.shared_sharding import SharedSharding
from autopar.search.store import Store
from autopar.search.wiring import Wiring, wired
from solvers.choice_open import OpenProblems
from solvers.choice_problem import ChoiceProblem
from solvers.solution import Status

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
    """The nodes and edges of the choice problem of one block, priced."""

    def __init__(self, wiring: Wiring, prices: Prices) -> None:
        self.wiring, self.space, self.prices = wiring, wiring.space, prices
        self._bytes: dict[Ref, NDArray[np.float64]] = {}

    def problem(self) -> ChoiceProblem:
        """Ops at their compute time and inner collectives, parameters for free, values moved."""
        space, wiring = self.space, self.wiring
        costs = [np.zeros(size) for size in wiring.sizes]
        for index, (node, options) in enumerate(zip(space.nodes, space.options, strict=True)):
            costs[index] += self.prices.option_s(node, options).sum(axis=1)
        for index, known in wiring.costs.items():
            costs[index] += known
        moved = [link.take(self.prices, costs) for link in wiring.links]
        edges = (*(edge for edge in moved if edge), *wiring.edges)
        return ChoiceProblem(node_costs=tuple(costs), edges=edges)

    def held_bytes(self, ref: Ref) -> tuple[int, NDArray[np.float64]]:
        """The node that decides how a value lies, and the bytes of the value for its options."""
        index, layouts = self.wiring.lies[ref]
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


class ShardingProblem:
    """The priced ILP of one block, to be solved for several upkeeps and prices of a byte.

    `wiring` is that of the space, None where some op or parameter has no option; `shared` answers
    what needs no upkeep. `kept` are the values, besides parameters, that an upkeep may count the
    bytes of.
    """

    def __init__(
        self,
        wiring: Wiring | None,
        prices: Prices,
        *,
        space: BlockSpace,
        shared: SharedSharding | None = None,
        kept: Collection[Ref] = (),
        backend: str = "highs",
        time_limit_s: float = 120.0,
        store: Store | None = None,
    ) -> None:
        self.space, self._prices, self._shared = space, prices, shared
        self._backend, self._time_limit_s = backend, time_limit_s
        self._store = store
        self._builder = None if wiring is None else _Builder(wiring, prices)
        self._kept = [] if wiring is None else [ref for ref in kept if ref in wiring.lies]

    @cached_property
    def _family(self) -> Family:
        builder = self._builder
        assert builder is not None
        return choice_family(
            builder.problem(),
            rates=[builder.held_bytes(ref) for ref in self._kept],
            fixed=[builder.wiring.lies[Ref(s.name)][0] for s, _ in self.space.parameters],
            store=self._store,
        )

    @cached_property
    def least_s(self) -> float:
        """What no sharding beats: every op at its fastest, values moved for free; inf if there is
        none."""
        return inf if self._shared is None else self._shared.least_s(self._prices)

    @cached_property
    def most_weight(self) -> float:
        """The share of a block's time that its weight gradients take at the most."""
        return 1.0 if self._shared is None else self._shared.most_weight(self._prices)

    @cached_property
    def _alone(self) -> tuple[float, float, tuple[int, ...]] | None:
        """The fastest choice, with parameters for free."""
        if self._shared is None:
            return None
        return self._shared.solve(self._prices, self._backend, self._time_limit_s)

    @cached_property
    def _priced(self) -> OpenProblems:
        """The problems with a price of their own for layouts of parameters."""
        assert self._shared is not None
        return self._shared.at(self._prices)

    def fastest(self) -> Sharding | None:
        """The fastest sharding with gradients summed for free."""
        if self._alone is None:
            return None
        objective, bound, choices = self._alone
        status = Status.OPTIMAL if bound >= objective else Status.FEASIBLE
        return self._decode(
            choices, objective=objective, bound=bound, kept_bytes=0.0, status=status
        )

    def priced(
        self, more: Mapping[Ref, NDArray[np.float64]]
    ) -> tuple[float, dict[Ref, int]] | None:
        """What no sharding takes less than with `more` seconds for every layout of its parameters,
        and about the layouts that take so little: those of `open_parameters` chosen together with
        how the block runs, others by themselves."""
        if self._shared is None:
            return None
        together = {r: at for r, at in self._shared.open_parameters.items() if r in more}
        costs = {at: more[ref] for ref, at in together.items()}
        if costs:
            found = self._priced.least(
                costs, backend=self._backend, time_limit_s=self._time_limit_s
            )
        else:
            found = None if self._alone is None else (self._alone[1], {})
        if found is None:
            return None
        bound, choices = found
        layouts = {
            ref: choices[together[ref]] if ref in together else int(each.argmin())
            for ref, each in more.items()
        }
        alone = sum(float(each.min()) for ref, each in more.items() if ref not in together)
        return bound + alone, layouts

    def solve(self, upkeep: Upkeep = NO_UPKEEP, byte_price_s: float = 0.0) -> Sharding | None:
        """The sharding with the least time plus `byte_price_s` for every weighted byte it keeps.

        None if the rules and pins leave none.
        """
        builder, weights = self._builder, [upkeep.kept.get(ref, 0.0) for ref in self._kept]
        if builder is None:
            return None
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
            if weight and ref in builder.wiring.lies:
                index, held = builder.held_bytes(ref)
                kept_bytes += weight * float(held[solution.choices[index]])
        return self._decode(
            solution.choices,
            objective=solution.objective - byte_price_s * kept_bytes,
            bound=solution.bound - byte_price_s * kept_bytes,
            kept_bytes=kept_bytes,
            status=solution.status,
            integral_relaxation=solution.integral_relaxation,
            num_variables=solution.num_variables,
        )

    def _decode(
        self,
        choices: Sequence[int],
        *,
        objective: float,
        bound: float,
        kept_bytes: float,
        status: Status,
        integral_relaxation: bool = True,
        num_variables: int = 0,
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
            objective=objective,
            bound=bound,
            kept_bytes=kept_bytes,
            status=status,
            integral_relaxation=integral_relaxation,
            num_variables=num_variables,
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
    wiring = wired(space)
    return ShardingProblem(wiring, prices, space=space, backend=backend).solve(upkeep)
