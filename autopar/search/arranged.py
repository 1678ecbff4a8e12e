"""The fastest plan over the ways to use a cluster: its groups in every order, with devices left out
where they only slow things down, and with a mesh of its own for the stages of each group."""

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
from autopar.search.found import Found
from autopar.search.grids import grids, meshes, space_text
from autopar.search.infeasible import NothingFits
from autopar.search.make import fastest_plan, found_plan, with_pin_prices
from autopar.search.planner import Planner, Progress
from autopar.search.setting import Setting
from autopar.search.stage_meshes import MESH_OF_A_GROUP, MOST_LAYOUTS, own_layouts
from solvers.solution import relative_gap

_BETTER = 1e-6
"""Share of a step by which another arrangement has to be faster than the cluster as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """A way to use a cluster, and the setting that its plans are searched for in."""

    arrangement: Arrangement
    setting: Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """A way with its plan, and the objective that the search ranks the plan by."""

    way: _Way
    plan: Plan
    objective_s: float


def fastest_arranged(setting: Setting, progress: Progress = lambda what, done: None) -> Plan:
    """The fastest plan of a setting, whose pins are settled, over the ways to use its cluster.

    A way is searched where its bound is below the best plan so far. Raises InfeasiblePlan or
    InputError with the reason, that of the cluster as it is.
    """
    whole, *others = _ways(setting)
    if not others:
        return fastest_plan(setting, progress)
    deadline = time.monotonic() + setting.time_limit_s
    missed: NothingFits | InputError | None = None
    best: _Tried | None = None
    try:
        planner = Planner(setting=setting, progress=progress)
        best = _tried(whole, planner, planner.search())
    except (NothingFits, InputError) as miss:  # no grid has the pinned degrees, or none fits
        missed = miss
        if len(setting.cluster.groups) == 1:
            raise
    all_s = None if best is None else best.plan.prediction.step_s
    left_s, searched = inf, 0
    for bound_s, _, way, planner in _by_bound(others, progress):
        limit_s = inf if best is None else best.objective_s
        if bound_s >= limit_s * (1 - _BETTER):
            continue
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 and best is not None:
            left_s = min(left_s, bound_s)
            continue
        searched += 1
        found = _tried_below(way, planner, limit_s, remaining_s)
        if isinstance(found, float):
            left_s = min(left_s, found)
        elif best is None or found.plan.prediction.step_s < best.plan.prediction.step_s * (
            1 - _BETTER
        ):
            best = found
    if best is None:
        assert missed is not None
        raise missed
    plan = with_pin_prices(replace(best.way.setting, pins=setting.pins), best.plan, progress)
    if best.way.arrangement is not whole.arrangement:
        plan = _rearranged(plan, best.way.arrangement, setting.cluster, all_s)
    if len(setting.cluster.groups) == 1 and best.way is whole:
        return plan
    certificate = replace(plan.certificate, space=_space_text(setting))
    certificate = _with_bound(certificate, left_s, best)
    note = _note(setting, 1 + len(others), 1 + searched)
    return replace(plan, certificate=certificate, notes=(*plan.notes, note))


def _ways(setting: Setting) -> list[_Way]:
    """All that are searched, the cluster as it is first; where it has to be used as it is, only the
    meshes of its stages are another's."""
    offered = arrangements(setting.cluster)
    found = []
    for place, arrangement in enumerate(offered[:1] if setting.all_devices else offered):
        own = setting.on(arrangement.cluster) if place else setting
        found.append(_Way(arrangement=arrangement, setting=own))
        if _gives_groups_meshes(own):
            found.append(_Way(arrangement=arrangement, setting=_with_own_meshes(own)))
    return found


def _gives_groups_meshes(setting: Setting) -> bool:
    """Whether the stages on each group of devices are offered a mesh of their own, unasked: where
    there are several groups, and not too many ways to lay stages out on them."""
    if len(setting.cluster.groups) == 1 or setting.pins.meshes or setting.pins.stages:
        return False
    return 1 <= len(own_layouts(_with_own_meshes(setting), meshes)) <= MOST_LAYOUTS


def _with_own_meshes(setting: Setting) -> Setting:
    return setting.on(setting.cluster, replace(setting.pins, meshes="own"))


def _space_text(setting: Setting) -> str:
    """The declared space in words."""
    text = space_text(setting)
    return text + MESH_OF_A_GROUP * _gives_groups_meshes(setting)


def _note(setting: Setting, offered: int, searched: int) -> str:
    """How the devices may be used, and how many of the ways were searched."""
    own = ", each with one mesh for all stages or another on each" * _gives_groups_meshes(setting)
    how = (
        "as they are"
        if setting.all_devices
        else ("groups in any order, groups left out, one cut to a multiple of a power of two")
    )
    return (
        f"devices: {plural(offered, 'way')} to use {setting.cluster.spec} ({how}{own}); "
        f"{searched} searched, the others ruled out by their bound"
    )


def _by_bound(ways: Sequence[_Way], progress: Progress) -> list[tuple[float, int, _Way, Planner]]:
    """The ways that the pins leave a grid, the least bound first."""
    found = []
    for place, way in enumerate(ways):
        planner = Planner(setting=way.setting, progress=progress)
        try:
            offered = grids(planner.setting)
        except InputError:
            continue
        bound_s = min(map(planner.bounds.computed, offered))
        found.append((bound_s, place, way, planner))
    return sorted(found, key=lambda item: item[:2])


def _tried_below(way: _Way, planner: Planner, limit_s: float, time_s: float) -> _Tried | float:
    """The best plan of a way below a limit, or what none of them is below."""
    try:
        found = planner.search_below(limit_s, max(time_s, 1.0))
    except NothingFits:
        return inf
    return found if isinstance(found, float) else _tried(way, planner, found)


def _tried(way: _Way, planner: Planner, found: Found) -> _Tried:
    return _Tried(
        way=way,
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
