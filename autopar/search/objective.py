"""What a plan may have the least of: the time of a step, the memory of a device, or the cost.

Each is a search for the least time, over the plans that need no more memory than they have to, or
over the parts of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf

from autopar.costs.clusters import parts
from autopar.errors import InfeasiblePlan, InputError
from autopar.ir.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.plan.price import price_text, sample_price, step_price
from autopar.plan.text import amount, percent
from autopar.search.arranged import fastest_arranged
from autopar.search.conflict import closest_miss, conflict_lines, find_conflict
from autopar.search.grids import grids
from autopar.search.infeasible import NothingFits
from autopar.search.least import Least, least_peak_bytes
from autopar.search.make import fastest_plan
from autopar.search.pins import settle_pins
from autopar.search.planner import Planner, Progress
from autopar.search.setting import Setting

_MILLION = 1e6


def make_plan(setting: Setting, progress: Progress = lambda what, done: None) -> Plan:
    """The best plan of a setting by its objective.

    Raises InfeasiblePlan or InputError with the reason.
    """
    pins = settle_pins(setting.pins, setting.graph.sources, setting.block_paths)
    setting = replace(setting, pins=pins)
    try:
        plan = _MAKERS[setting.objective](setting, progress)
    except NothingFits as miss:
        conflict = find_conflict(setting, progress)
        if conflict is None:
            raise InfeasiblePlan(str(miss)) from None
        closest = closest_miss(setting, conflict.least, progress) or str(miss)
        lines = conflict_lines(setting, conflict, progress)
        raise InfeasiblePlan("\n".join([closest, *lines])) from None
    return replace(plan, objective=setting.objective)


def check_objective(name: str, cluster: Cluster) -> None:
    """Raise InputError for an unknown objective, and for a cost without prices."""
    if name not in _MAKERS:
        raise InputError(f"unknown objective {name!r}; choose one of {', '.join(_MAKERS)}")
    unpriced = [g.device.name for g in cluster.groups if g.device.price_per_hour is None]
    if name == "cost" and unpriced:
        raise InputError(
            f"objective cost: no price is known of {', '.join(unpriced)}; give what a device costs "
            f"an hour: --price {unpriced[0]}=2.5, or price_per_hour in a cluster file"
        )


def _leanest(setting: Setting, progress: Progress) -> Plan:
    """The fastest of the plans whose fullest rank needs the least memory."""
    least = least_peak_bytes(Planner(setting=setting, progress=progress))
    limit = setting.memory_limit_bytes or inf
    limit = min(limit, ceil(least.excess_bytes)) if least.grid else limit
    capped = replace(setting, memory_limit_bytes=None if limit == inf else int(limit))
    plan = fastest_plan(capped, progress)
    stages = tuple(
        replace(stage, memory_limit_bytes=min(map(setting.memory_bytes, stage.ranks)))
        for stage in plan.stages
    )
    return replace(plan, stages=stages, notes=(*plan.notes, _least_note(least)))


def _least_note(least: Least) -> str:
    how = "proven over all grids with a stage a rank"
    if least.ended:
        how = f"the least of {least.solved} grids; none needs less than {amount(least.bound_bytes)}"
    return (
        f"objective memory: a plan needs {amount(least.excess_bytes)} on its fullest rank at the "
        f"least ({how}); of those that need no more this is the fastest"
    )


def _cheapest(setting: Setting, progress: Progress) -> Plan:
    """The plan of the part of the cluster on which a sample costs the least."""
    bounds = []
    for place, part in enumerate(parts(setting.cluster)):
        own = replace(setting, cluster=part)
        bounds.append((_least_price(own, progress), place, own))
    best: Plan | None = None
    left, seen = inf, []
    missed: InfeasiblePlan | None = None
    for bound, _, own in sorted(bounds, key=lambda item: item[:2]):
        if best is not None and bound >= _price(best):
            left = min(left, bound)
            continue
        try:
            plan = fastest_plan(own, progress)
        except InfeasiblePlan as error:
            missed = error
            continue
        seen.append(plan)
        left = min(left, _price(plan) * (1 - plan.certificate.gap))
        if best is None or _price(plan) < _price(best):
            best = plan
    if best is None:
        raise missed or InfeasiblePlan(f"no part of {setting.cluster.spec} has a grid")
    return replace(best, notes=(*best.notes, _cost_note(setting, best, seen, left)))


def _least_price(setting: Setting, progress: Progress) -> float:
    """What a sample costs at the least on a cluster, by the bounds of its grids; inf without."""
    planner = Planner(setting=setting, progress=progress)
    try:
        offered = grids(setting)
    except InputError:  # pins that this part of the cluster has no grid for
        return inf
    step_s = min(planner.bounds.computed(grid) for grid in offered)
    return _known(step_price(setting.cluster, step_s, setting.global_batch))


def _price(plan: Plan) -> float:
    return _known(sample_price(plan))


def _known(price: float | None) -> float:
    return inf if price is None else price


def _cost_note(setting: Setting, best: Plan, seen: list[Plan], left: float) -> str:
    shown = ", ".join(
        f"{plan.cluster.spec} {price_text(_price(plan) * _MILLION)}"
        for plan in sorted(seen, key=lambda plan: plan.num_devices)
    )
    price = _price(best)
    gap = max(0.0, 1 - left / price) if price else 0.0
    return (
        f"objective cost: {best.cluster.spec} of {setting.cluster.spec}, at "
        f"{price_text(price * _MILLION)} a million samples; proven within {percent(gap)} of the "
        f"cheapest part of the cluster; planned for: {shown}"
    )


_MAKERS: dict[str, Callable[[Setting, Progress], Plan]] = {
    "time": fastest_arranged,
    "memory": _leanest,
    "cost": _cheapest,
}

OBJECTIVES = tuple(_MAKERS)
