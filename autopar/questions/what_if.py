"""What a change would be worth: a plan made again with another cluster, batch, precision or pin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite
from typing import Any

from autopar.compiler import PlanOptions, Progress, load_source, plan_source
from autopar.costs.clusters import named, parse_cluster, resized, with_links
from autopar.errors import InputError
from autopar.ir.cluster import Cluster, LinkLevel
from autopar.plan.diff import diff_plans
from autopar.plan.plan import Plan
from autopar.plan.table import plan_summary, sequence_length
from autopar.plan.text import amount, duration, page

_GIB = 2**30

Change = tuple[str, str]
"""What is changed, and to what: `("nodes", "16")`, `("network", "x2")`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a plan was asked for with."""

    cluster: Cluster
    options: PlanOptions
    seq_len: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A plan and the one with the changes."""

    changes: tuple[Change, ...]
    before: Plan
    after: Plan

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        a, b = self.before.prediction, self.after.prediction
        return {
            "changes": dict(self.changes),
            "step_s": {"before": a.step_s, "after": b.step_s},
            "peak_bytes": {"before": a.peak_bytes, "after": b.peak_bytes},
            "samples_per_s": {"before": a.samples_per_s, "after": b.samples_per_s},
            "before": plan_summary(self.before),
            "after": plan_summary(self.after),
        }

    @property
    def text(self) -> str:
        """What the changes are worth, and the plans beside each other."""
        a, b = self.before.prediction, self.after.prediction
        changed = ", ".join(f"{key}={value}" for key, value in self.changes)
        figures = ", ".join(
            f"{name} {text(old)} -> {text(new)} ({(new - old) / old:+.1%})"
            for name, text, old, new in (
                ("step", duration, a.step_s, b.step_s),
                ("peak memory", amount, a.peak_bytes, b.peak_bytes),
            )
        )
        return page([f"{changed}: {figures}", diff_plans(self.before, self.after)])


def what_if(
    plan: Plan,
    changes: Sequence[Change],
    progress: Progress,
    *,
    model: str | None = None,
    search: Callable[[PlanOptions], PlanOptions] = lambda options: options,
) -> WhatIf:
    """A plan made again for what it was made for, but for the changes (see `CHANGES`).

    `model` is needed for one of the user's own; by default it is the zoo model that the plan names.
    `search` may set how long, by how many processes and from what cache the plan is searched for.
    Raises InputError for a change that is unknown or malformed, InfeasiblePlan where nothing fits.
    """
    asked = _request(plan)
    for key, value in changes:
        asked = _changed(asked, key, value)
    spec = model or plan.model.name
    source = load_source(spec, seq_len=None if ":" in spec else asked.seq_len)
    after = plan_source(source, asked.cluster, search(asked.options), progress).plan
    return WhatIf(changes=tuple(changes), before=plan, after=after)


def _request(plan: Plan) -> Request:
    """What a plan was made for, as far as it says."""
    limits = [stage.memory_limit_bytes for stage in plan.stages]
    has = [plan.cluster.device(stage.ranks[0]).memory_bytes for stage in plan.stages]
    limited = any(limit < own for limit, own in zip(limits, has, strict=True))
    training = plan.training
    options = PlanOptions(
        global_batch=training.global_batch,
        precision=training.precision,
        optimizer=training.optimizer,
        pins=tuple((pin.key, pin.value) for pin in plan.pins),
        price_pins=any(pin.cost_s is not None for pin in plan.pins),
        objective=plan.objective,
        memory_limit_bytes=min(limits) if limited else None,
    )
    return Request(cluster=plan.cluster, options=options, seq_len=sequence_length(plan))


def _changed(asked: Request, key: str, value: str) -> Request:
    links = _link_names(asked.cluster)
    if key in links:
        return replace(asked, cluster=_with_links(asked.cluster, (key,), key, value))
    if key.startswith("pin."):
        return _with_option(asked, pins=_with_pin(asked.options, key.removeprefix("pin."), value))
    if key not in CHANGES:
        known = [*CHANGES, *links, "pin.KEY"]
        near = get_close_matches(key, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"expected one of {', '.join(known)}"
        raise InputError(f"change {key}={value}: nothing of a plan has that name; {hint}")
    return CHANGES[key](asked, value)


def _with_option(asked: Request, **fields: Any) -> Request:
    return replace(asked, options=replace(asked.options, **fields))


def _with_pin(options: PlanOptions, key: str, value: str) -> tuple[tuple[str, str], ...]:
    """The pins with another value for a key; `free` takes it away."""
    others = tuple(pin for pin in options.pins if pin[0] != key)
    return others if value == "free" else (*others, (key, value))


def _with_links(cluster: Cluster, names: Sequence[str], key: str, value: str) -> Cluster:
    factor = _figure(key, value.removeprefix("x"), "a bandwidth in GB/s, or x2 for twice as fast")

    def faster(bandwidth_bytes_s: float) -> float:
        return bandwidth_bytes_s * factor if value.startswith("x") else factor * 1e9

    def changed(link: LinkLevel) -> LinkLevel:
        if link.name not in names:
            return link
        return replace(link, bandwidth_bytes_s=faster(link.bandwidth_bytes_s))

    return named(with_links(cluster, changed))


def _link_names(cluster: Cluster) -> list[str]:
    """The levels of links by name, those inside groups first."""
    return list(dict.fromkeys(link.name for link in cluster.levels))


def _memory(asked: Request, value: str) -> Request:
    memory = int(_figure("memory", value, "GiB of memory of a device") * _GIB)
    groups = tuple(
        replace(group, device=replace(group.device, memory_bytes=memory))
        for group in asked.cluster.groups
    )
    cluster = replace(asked.cluster, groups=groups)
    return replace(_with_option(asked, memory_limit_bytes=None), cluster=cluster)


def _all_links(asked: Request, value: str) -> Request:
    if not value.startswith("x"):
        raise InputError(f"change links={value}: expected x2 for twice as fast, or one by its name")
    names = _link_names(asked.cluster)
    return replace(asked, cluster=_with_links(asked.cluster, names, "links", value))


def _figure(key: str, value: str, expected: str) -> float:
    try:
        figure = float(value)
    except ValueError:
        figure = 0.0
    if not isfinite(figure) or figure <= 0:
        raise InputError(f"change {key}={value}: expected {expected}")
    return figure


def _count(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise InputError(f"change {key}={value}: expected a whole number of at least 1")
    return int(value)


CHANGES: dict[str, Callable[[Request, str], Request]] = {
    "memory": _memory,
    "links": _all_links,
    "nodes": lambda asked, value: replace(
        asked, cluster=resized(asked.cluster, nodes=_count("nodes", value))
    ),
    "cluster": lambda asked, value: replace(asked, cluster=parse_cluster(value)),
    "global-batch": lambda asked, value: _with_option(
        asked, global_batch=_count("global-batch", value)
    ),
    "seq-len": lambda asked, value: replace(asked, seq_len=_count("seq-len", value)),
    "precision": lambda asked, value: _with_option(asked, precision=value),
    "optimizer": lambda asked, value: _with_option(asked, optimizer=value),
    "objective": lambda asked, value: _with_option(asked, objective=value),
}
"""What may be changed besides a link by its name and `pin.KEY`, and how."""
