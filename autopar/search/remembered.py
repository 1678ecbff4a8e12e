"""Plans and solved blocks as a store keeps them: looked up first, found if need be, and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.errors import PlanMismatch
from autopar.plan.plan import Plan
from autopar.plan.serialize import from_json, to_json
from autopar.rules import is_extended
from autopar.search.digest import Undigestible, digest_of
from autopar.search.setting import Setting
from autopar.search.store import Store
from solvers.choice_family import ChoiceFamily, Rate
from solvers.choice_problem import Array, ChoiceProblem, ChoiceSolution
from solvers.solution import Status


def remembered_plan(setting: Setting, make: Callable[[], Plan]) -> Plan:
    """The plan of a setting as its file has it, kept unless a limit on time had a say in it.

    It depends on the setting and the code alone, but for rules from outside, which have no digest.
    """
    store = setting.store
    if store is None or is_extended():
        return make()
    try:
        digest = digest_of(("plan", setting))
    except Undigestible:  # options of an optimizer may be anything
        return make()
    found = _decoded(store.read(digest))
    if found is not None:
        return found
    started = time.monotonic()
    text = to_json(make())
    if time.monotonic() - started < setting.time_limit_s:
        store.write(digest, text)
    store.trim()
    return from_json(text)


def _decoded(text: Any) -> Plan | None:
    if not isinstance(text, str):
        return None
    try:
        return from_json(text)
    except PlanMismatch:
        return None


def choice_family(
    problem: ChoiceProblem, rates: Sequence[Rate], fixed: Collection[int], store: Store | None
) -> Family:
    """The problems of a family, of which the store is asked for those solved before."""
    if store is None:
        return ChoiceFamily(problem, rates, fixed)
    return _Remembered(problem=problem, rates=rates, fixed=fixed, store=store)


@dataclass
class _Remembered:
    """A family that is only reduced once one of its problems has to be solved."""

    problem: ChoiceProblem
    rates: Sequence[Rate]
    fixed: Collection[int]
    store: Store

    @cached_property
    def _digest(self) -> str:
        return digest_of(("choice family", self.problem, tuple(self.rates), tuple(self.fixed)))

    @cached_property
    def _family(self) -> ChoiceFamily:
        return ChoiceFamily(self.problem, self.rates, self.fixed)

    def solve(
        self,
        prices: Sequence[float],
        more: Mapping[int, Array],
        *,
        backend: str = "highs",
        time_limit_s: float = 60.0,
    ) -> ChoiceSolution:
        """The cheapest choice; of what is proven to be it the store is told."""
        digest = digest_of((self._digest, tuple(map(float, prices)), dict(more), backend))
        found = _solution(self.store.read(digest), len(self.problem.node_costs))
        if found is None:
            found = self._family.solve(prices, more, backend=backend, time_limit_s=time_limit_s)
            if found.status is Status.OPTIMAL:
                self.store.write(digest, _entry(found))
        return found


Family = ChoiceFamily | _Remembered
"""Choice problems that differ in some costs."""

_KEPT: dict[str, Callable[[Any], object]] = {
    "objective": float,
    "bound": float,
    "gap": float,
    "engine": str,
    "choices": lambda choices: tuple(map(int, choices)),
    "num_variables": int,
    "integral_relaxation": bool,
}
"""What is kept of a solution, as plain types."""


def _entry(solution: ChoiceSolution) -> dict[str, object]:
    return {name: plain(getattr(solution, name)) for name, plain in _KEPT.items()}


def _solution(entry: Any, nodes: int) -> ChoiceSolution | None:
    """The solution that an entry is; None without one of so many nodes."""
    if not isinstance(entry, dict) or entry.keys() != _KEPT.keys():
        return None
    kept: dict[str, Any] = {name: plain(entry[name]) for name, plain in _KEPT.items()}
    if len(kept["choices"]) != nodes:
        return None
    return ChoiceSolution(status=Status.OPTIMAL, conflict=(), **kept)
