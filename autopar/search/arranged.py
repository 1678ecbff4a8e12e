"""The fastest plan over the ways to use a cluster: its groups in every order, and with devices left
out where they only slow things down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.costs.arrangements import Arrangement, arrangements
from autopar.errors import InputError
from autopar.ir.cluster import Cluster
from autopar.plan.plan import Certificate, LeftOut, Plan
from autopar.plan.text import plural
from autopar.search.grids import grids
from autopar.search.infeasible import NothingFits
from autopar.search.make import fastest_plan, found_plan, with_pin_prices
from autopar.search.planner import Found, Planner, Progress
from autopar.search.setting import Setting
from solvers.solution import relative_gap

_BETTER = 1e-6
"""Share of a step by which another arrangement has to be faster than the cluster as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """An arrangement with its plan, and the objective that the search ranks the plan by."""

    arrangement: Arrangement
    setting: Setting
    plan: Plan
    objective_s: float


def fastest_arranged(setting: Setting, progress: Progress = lambda what, done: None) -> Plan:
    """The fastest plan of a setting, whose pins are settled, over the arrangements of its cluster.

    An arrangement is searched where its bound is below the best plan so far. Raises InfeasiblePlan
    or InputError with the reason, that of the cluster as it is.
    """
    whole, *others = arrangements(setting.cluster)
    if not others or setting.all_devices:
        return fastest_plan(setting, progress)
    deadline = time.monotonic() + setting.time_limit_s
    missed: NothingFits | None = None
    best: _Tried | None = None
    try:
        planner = Planner(setting=setting, progress=progress)
        best = _tried(whole, planner, planner.search())
    except NothingFits as miss:
        missed = miss
        if len(setting.cluster.groups) == 1:
            raise
    all_s = None if best is None else best.plan.prediction.step_s
    left_s, searched = inf, 0
    for bound_s, _, arrangement, planner in _by_bound(setting, others, progress):
        limit_s = inf if best is None else best.objective_s
        if bound_s >= limit_s * (1 - _BETTER):
            continue
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 and best is not None:
            left_s = min(left_s, bound_s)
            continue
        searched += 1
        found = _tried_below(arrangement, planner, limit_s, remaining_s)
        if isinstance(found, float):
            left_s = min(left_s, found)
        elif best is None or found.plan.prediction.step_s < best.plan.prediction.step_s * (
            1 - _BETTER
        ):
            best = found
    if best is None:
        assert missed is not None
        raise missed
    plan = with_pin_prices(best.setting, best.plan, progress)
    if best.arrangement is not whole:
        plan = _rearranged(plan, best.arrangement, setting.cluster, all_s)
    if len(setting.cluster.groups) == 1 and best.arrangement is whole:
        return plan
    note = (
        f"devices: {plural(1 + len(others), 'way')} to use {setting.cluster.spec} (groups in any "
        f"order, groups left out, one cut to a multiple of a power of two); {1 + searched} "
        "searched, the others ruled out by their bound"
    )
    certificate = _with_bound(plan.certificate, left_s, best)
    return replace(plan, certificate=certificate, notes=(*plan.notes, note))


def _by_bound(
    setting: Setting, others: Sequence[Arrangement], progress: Progress
) -> list[tuple[float, int, Arrangement, Planner]]:
    """The arrangements that the pins leave a grid, the least bound first."""
    found = []
    for place, arrangement in enumerate(others):
        planner = Planner(setting=setting.on(arrangement.cluster), progress=progress)
        try:
            offered = grids(planner.setting)
        except InputError:
            continue
        bound_s = min(map(planner.bounds.computed, offered))
        found.append((bound_s, place, arrangement, planner))
    return sorted(found, key=lambda item: item[:2])


def _tried_below(
    arrangement: Arrangement, planner: Planner, limit_s: float, time_s: float
) -> _Tried | float:
    """The best plan of an arrangement below a limit, or what none of them is below."""
    try:
        found = planner.search_below(limit_s, max(time_s, 1.0))
    except NothingFits:
        return inf
    return found if isinstance(found, float) else _tried(arrangement, planner, found)


def _tried(arrangement: Arrangement, planner: Planner, found: Found) -> _Tried:
    return _Tried(
        arrangement=arrangement,
        setting=planner.setting,
        plan=found_plan(planner, found),
        objective_s=found.best.solution.objective,
    )


def _rearranged(plan: Plan, arrangement: Arrangement, asked: Cluster, all_s: float | None) -> Plan:
    """The plan with the numbers that its ranks have in the cluster asked for."""
    used, left = set(arrangement.devices), dict[str, list[int]]()
    for device in range(asked.num_devices):
        if device not in used:
            left.setdefault(asked.device(device).name, []).append(device)
    return replace(
        plan,
        devices=arrangement.devices,
        left_out=tuple(
            LeftOut(device=name, devices=tuple(devices), step_s=all_s)
            for name, devices in left.items()
        ),
    )


def _with_bound(certificate: Certificate, left_s: float, best: _Tried) -> Certificate:
    """The certificate with a bound that holds for the arrangements that were searched too."""
    scale = certificate.objective_s / best.objective_s if best.objective_s else 1.0
    bound_s = min(certificate.bound_s, scale * left_s)
    if bound_s == certificate.bound_s:
        return certificate
    status = certificate.status
    return replace(
        certificate,
        bound_s=bound_s,
        gap=relative_gap(certificate.objective_s, bound_s),
        status="feasible, within the gap" if status == "optimal" else status,
    )
