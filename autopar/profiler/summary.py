"""What profiles hold, as a table for people and as JSON data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autopar.costs.local_op import op_name
from autopar.costs.profiles import Machine, Profile, Timing
from autopar.plan.text import columns, duration, page, percent, plural, section

_SHOWN = 12


def profiles_summary(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Counts and reasons by machine; JSON data."""
    return {"profiles": [_summary(profile) for profile in profiles]}


def _summary(profile: Profile) -> dict[str, Any]:
    machine = profile.machine
    return {
        "device": machine.device,
        "row": machine.row,
        "driver": machine.driver,
        "torch": machine.torch,
        "ops_measured": sum(record.forward is not None for record in profile.ops.values()),
        "ops_without_time": sum(record.forward is None for record in profile.ops.values()),
        "collectives_measured": sum(record.time is not None for record in profile.links.values()),
        "reasons": {
            record.key: record.reason for _, record in sorted(profile.ops.items()) if record.reason
        },
    }


def profiles_table(profiles: Sequence[Profile]) -> str:
    """Per machine: ops by name, collectives by group, and why some have no time."""
    return page([_table(profile) for profile in profiles]) if profiles else "no measurements"


def machine_text(machine: Machine) -> str:
    """The machine in a line."""
    cores = plural(machine.cores, "core") if machine.cores else ""
    parts = (machine.device, cores, machine.driver, f"torch {machine.torch}")
    return ", ".join(part for part in parts if part)


def _table(profile: Profile) -> str:
    reasons = Counter(_kind(r.reason) for r in profile.ops.values() if r.reason)
    lines = [f"{plural(count, 'op')}: {reason}" for reason, count in sorted(reasons.items())]
    return page(
        [
            machine_text(profile.machine),
            section("Ops", _ops(profile)),
            section("Collectives", _links(profile)),
            section("Without a time", "\n".join(lines)),
        ]
    )


def _kind(reason: str) -> str:
    """The reason without what is one op's own: `not tried: over the limit of 1 GiB`."""
    first, _, rest = reason.partition(": ")
    _, over, limit = rest.partition("over ")
    return f"{first}: over {limit}" if over else first


def _ops(profile: Profile) -> str:
    by_name: dict[str, list[tuple[Timing, float]]] = {}
    for record in profile.ops.values():
        if record.forward is not None:
            name = op_name(record.key.partition("(")[0])
            by_name.setdefault(name, []).append((record.forward, sum(record.times_s)))
    ranked = sorted(by_name.items(), key=lambda item: (-sum(s for _, s in item[1]), item[0]))
    rows = []
    for name, found in ranked[:_SHOWN]:
        times = [seconds for _, seconds in found]
        spreads = sorted(t.spread_s / t.median_s for t, _ in found if t.median_s > 0)
        middle = percent(spreads[len(spreads) // 2]) if spreads else ""
        rows.append((name, str(len(found)), duration(min(times)), duration(max(times)), middle))
    text = columns(("op", "shapes", "fastest", "slowest", "usual spread"), rows)
    left = len(ranked) - _SHOWN
    return f"{text}\nand {plural(left, 'other op')}" if left > 0 else text


def _links(profile: Profile) -> str:
    groups: dict[tuple[str, int, str, int], list[tuple[int, float]]] = {}
    for key, record in sorted(profile.links.items()):
        if record.time is not None:
            group = (str(key.op), key.ranks, key.level, key.packed)
            groups.setdefault(group, []).append((key.nbytes, record.time.median_s))
    rows = [
        (
            op,
            str(ranks),
            level if packed == 1 else f"{level}, {packed} together",
            str(len(found)),
            duration(found[0][1]),
            f"{found[-1][0] / max(found[-1][1], 1e-12) / 1e9:.3g} GB/s",
        )
        for (op, ranks, level, packed), found in sorted(groups.items())
    ]
    header = ("collective", "ranks", "level", "sizes", "smallest takes", "largest moves")
    return columns(header, rows) if rows else ""
