"""Which of a user's requirements cannot hold together, and which change of one would do.

A deletion filter: of all requirements each is given up in turn, and for good where no plan is found
that fits the others (Chinneck and Dravnieks 1991, ORSA Journal on Computing 3(2)). Every part of
what is left has a plan. Whether there is one is asked of memory alone (`search.least`), which takes
no planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from autopar.costs.clusters import alone, resized
from autopar.errors import InputError
from autopar.ir.cluster import Cluster
from autopar.plan.text import amount
from autopar.schedules.registry import SCHEDULES
from autopar.search.infeasible import explain_infeasible
from autopar.search.least import Least, least_devices, least_excess_bytes
from autopar.search.pins import parse_pins
from autopar.search.planner import Planner, Progress
from autopar.search.setting import Setting
from autopar.search.stages import solve_stages

_TIMES_DEVICES = (8, 4, 2, 1)
"""How many times the devices are offered in place of those that there are."""
_SIZES = 10
"""Numbers of nodes that are tried to say how many would do."""
_PLENTY_BYTES = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """Something that the user asked for: its name, and what a setting may be without it."""

    name: str
    without: Callable[[Setting], Sequence[Setting]]
    is_pin: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Requirements that cannot hold together, none of which can be spared, and for each what the
    fullest device still lacks where it alone is given up (0: that does); None where there is no
    grid then."""

    requirements: tuple[Requirement, ...]
    without: tuple[float | None, ...]
    least: Least


def find_conflict(setting: Setting, progress: Progress) -> Conflict | None:
    """The conflict of a setting that no plan fits; None where one does, or there is no grid."""
    least = _asked(setting, progress)
    if least is None or least.fits:
        return None
    everything = tuple(requirements(setting))
    kept = list(everything)
    for one in everything:
        rest = [other for other in kept if other is not one]
        given_up = [other for other in everything if other not in rest]
        if not _any_fits(_offered(setting, given_up), progress):
            kept = rest
    lacks = tuple(_least_lacking(one.without(setting), progress) for one in kept)
    return Conflict(requirements=tuple(kept), without=lacks, least=least)


def _offered(setting: Setting, given_up: Sequence[Requirement]) -> list[Setting]:
    """What the setting may be without some requirements."""
    offered = [setting]
    for one in given_up:
        offered = [each for left in offered for each in one.without(left)]
    return offered


def _any_fits(offered: Iterable[Setting], progress: Progress) -> bool:
    return any(_fits(each, progress) for each in offered)


def _least_lacking(offered: Iterable[Setting], progress: Progress) -> float | None:
    """What is lacking at the least, 0 where a plan fits; None where there is no grid."""
    least: float | None = None
    for each in offered:
        found = _asked(each, progress)
        if found is None:
            continue
        if found.fits:
            return 0.0
        least = found.excess_bytes if least is None else min(least, found.excess_bytes)
    return least


def closest_miss(setting: Setting, least: Least, progress: Progress) -> str | None:
    """What the grid that lacks the least on its fullest device lacks, and for what."""
    if least.grid is None:
        return None
    planner = Planner(setting=setting, progress=progress)
    missed = [
        solve_stages(planner.pricer, least.grid, options, problem)
        for options, problem in planner.problems(least.grid)
    ]
    return explain_infeasible(planner.pricer, missed, least.total)


def requirements(setting: Setting) -> Iterator[Requirement]:
    """What can be given up, in the order in which it is tried: same pins, same order."""
    if setting.batch.coupled or setting.batch.at_once or setting.pins.micro_batches:
        yield Requirement(name=f"global batch {setting.global_batch}", without=_smaller_batches)
    for key, value in setting.pins.items():
        yield Requirement(
            name=f"{key}={value}", without=partial(_unpinned, (key, value)), is_pin=True
        )
    count = setting.cluster.num_devices
    yield Requirement(name=f"{count} device{'s' * (count > 1)}", without=_with_more_devices)
    memory = min(setting.memory_bytes(rank) for rank in range(count))
    yield Requirement(name=f"{amount(memory)} a device", without=_with_plenty)


def conflict_lines(setting: Setting, conflict: Conflict, progress: Progress) -> list[str]:
    """The conflict in the user's words, then what would make a plan fit: one change each."""
    names = [one.name for one in conflict.requirements]
    lines = [f"  cannot hold together: {', '.join(names)}"] if names else []
    for one, lacks in zip(conflict.requirements, conflict.without, strict=True):
        if not one.is_pin:
            continue
        if lacks is None:
            lines.append(f"  without {one.name}: no grid is left")
        elif lacks:
            lines.append(f"  without {one.name}: still {ceil(lacks)} bytes too much on a device")
    helps = [f"without {o.name}" for o, lacks in _pins(conflict) if lacks == 0]
    if conflict.least.grid is not None:
        helps.append(f"{amount(ceil(conflict.least.excess_bytes))} more on every device")
    if more := _devices_needed(setting, progress):
        helps.append(f"{more.num_devices} devices ({more.spec})")
    if helps:
        lines.append(f"  one of these would make it fit: {'; '.join(helps)}")
    return lines


def _pins(conflict: Conflict) -> Iterator[tuple[Requirement, float | None]]:
    for one, lacks in zip(conflict.requirements, conflict.without, strict=True):
        if one.is_pin:
            yield one, lacks


def _devices_needed(setting: Setting, progress: Progress) -> Cluster | None:
    """The fewest nodes like the cluster's on which a plan fits, where that is not many."""
    if len(setting.cluster.groups) > 1:
        return None
    group, least = setting.cluster.groups[0], least_devices(setting)
    if least is None:
        return None
    first = max(group.nodes + 1, ceil(least / group.devices_per_node))
    for nodes in range(first, first + _SIZES):
        cluster = resized(setting.cluster, nodes=nodes)
        if _fits(replace(setting, cluster=cluster), progress):
            return cluster
    return None


def _fits(setting: Setting, progress: Progress) -> bool:
    found = _asked(setting, progress)
    return found is not None and found.fits


def _asked(setting: Setting, progress: Progress) -> Least | None:
    """What the fullest device lacks; None where the pins leave no grid."""
    try:
        return least_excess_bytes(Planner(setting=setting, progress=progress))
    except InputError:
        return None


def _unpinned(pin: tuple[str, str], setting: Setting) -> list[Setting]:
    pairs = [each for each in setting.pins.items() if each != pin]
    return [replace(setting, pins=parse_pins(pairs, SCHEDULES))]


def _smaller_batches(setting: Setting) -> list[Setting]:
    batch, least = setting.global_batch, setting.pins.micro_batches or 1
    sizes = sorted({max(least, batch // 2**k) for k in range(batch.bit_length())})
    return [replace(setting, global_batch=size) for size in sizes if size <= batch]


def _with_plenty(setting: Setting) -> list[Setting]:
    groups = tuple(
        replace(group, device=replace(group.device, memory_bytes=_PLENTY_BYTES))
        for group in setting.cluster.groups
    )
    cluster = replace(setting.cluster, groups=groups)
    return [replace(setting, cluster=cluster, memory_limit_bytes=None)]


def _with_more_devices(setting: Setting) -> list[Setting]:
    return [replace(setting, cluster=_grown(setting.cluster, times)) for times in _TIMES_DEVICES]


def _grown(cluster: Cluster, times: int) -> Cluster:
    if len(cluster.groups) == 1:
        return resized(cluster, nodes=cluster.groups[0].nodes * times)
    groups = []
    for group in cluster.groups:
        own = resized(alone(group, cluster), nodes=group.nodes * times)
        groups.append(replace(own.groups[0], links=own.links if group.links else ()))
    last = cluster.links[-1]
    links = (*cluster.links[:-1], replace(last, span=last.span * times))
    return replace(cluster, groups=tuple(groups), links=links)
