"""A quick way to run the stages of a rank so that none is much longer than the others.

Blocks start at the option that takes least and step to others that hold less, along the lower hull
of each class, the steps that spare most for their time first and within a limit on the time of
every stage, until the rank has room for all. Several limits are tried, from the least there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LIMITS = 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offered:
    """Options of `count` blocks of a stage: seconds, which may have a sync in them, and bytes."""

    stage: int
    count: int
    time: Array
    used: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Steps:
    """Steps from one option to another, each of one block: whose, from and to which, how often in
    a row, and what each takes more and holds less."""

    offer: list[int]
    hop: list[tuple[int, int]]
    stage: NDArray[np.intp]
    more_s: Array
    fewer: Array


def balanced(
    offers: Sequence[Offered], stages: int, free: float, value: Callable[[Array], Array]
) -> list[tuple[int, int]] | None:
    """(offer, option) of all blocks in about the least `value` of the times [..., stage] that fits
    into `free`; None where nothing does."""
    hulls = [_hull(offer) for offer in offers]
    start_s, held = np.zeros(stages), 0.0
    for offer, hull in zip(offers, hulls, strict=True):
        start_s[offer.stage] += offer.count * offer.time[hull[0]]
        held += offer.count * float(offer.used[hull[0]])
    steps = _steps(offers, hulls)
    reached_s = _reached(steps, start_s)  # how long the stage of a step is after it
    limits = np.unique(np.concatenate([start_s, reached_s]))
    limits = limits[limits >= start_s.max()]
    short = held - free
    order = np.argsort(reached_s, kind="stable")
    spared = np.concatenate([[0.0], np.cumsum(steps.fewer[order])])
    spared = spared[np.searchsorted(reached_s[order], limits, side="right")]
    enough = np.flatnonzero(spared >= short)
    if not len(enough):
        return None
    tried = limits[enough]
    tried = tried[np.unique(np.linspace(0, len(tried) - 1, _LIMITS).astype(int))]
    best, least = None, np.inf
    for limit in tried:
        some = np.flatnonzero(reached_s <= limit)
        taken = some[: int(np.searchsorted(np.cumsum(steps.fewer[some]), short)) + 1]
        if short <= 0:
            taken = some[:0]
        times = start_s + np.bincount(
            steps.stage[taken], weights=steps.more_s[taken], minlength=stages
        )
        own = float(value(times))
        if own < least:
            best, least = taken, own
    return None if best is None else _chosen(offers, hulls, steps, best)


def _hull(offer: Offered) -> list[int]:
    """Options on the lower hull of bytes over seconds, from the fastest to the least."""
    order = np.lexsort((offer.used, offer.time))
    hull: list[int] = []
    for option in order.tolist():
        if hull and offer.used[option] >= offer.used[hull[-1]]:
            continue
        while len(hull) > 1 and _ratio(offer, hull[-2], hull[-1]) <= _ratio(
            offer, hull[-1], option
        ):
            hull.pop()
        if hull and offer.time[option] <= offer.time[hull[-1]]:
            hull.pop()
        hull.append(option)
    return hull


def _ratio(offer: Offered, first: int, second: int) -> float:
    more_s = float(offer.time[second] - offer.time[first])
    fewer = float(offer.used[first] - offer.used[second])
    return fewer / more_s if more_s > 0 else np.inf


def _steps(offers: Sequence[Offered], hulls: Sequence[Sequence[int]]) -> _Steps:
    """All steps of all blocks, those first that spare most for their time."""
    rows = []
    for index, (offer, hull) in enumerate(zip(offers, hulls, strict=True)):
        for first, second in itertools.pairwise(hull):
            rows.append((-_ratio(offer, first, second), index, first, second))
    rows.sort()
    often = np.array([offers[index].count for _, index, _, _ in rows], dtype=np.intp)
    which = np.repeat(np.arange(len(rows)), often)
    more = np.array([offers[i].time[b] - offers[i].time[a] for _, i, a, b in rows])
    fewer = np.array([offers[i].used[a] - offers[i].used[b] for _, i, a, b in rows])
    stage = np.array([offers[i].stage for _, i, _, _ in rows], dtype=np.intp)
    return _Steps(
        offer=[rows[r][1] for r in which.tolist()],
        hop=[rows[r][2:] for r in which.tolist()],
        stage=stage[which],
        more_s=more[which] if rows else np.zeros(0),
        fewer=fewer[which] if rows else np.zeros(0),
    )


def _reached(steps: _Steps, start_s: Array) -> Array:
    reached = np.zeros(len(steps.more_s))
    for stage, first_s in enumerate(start_s):
        own = steps.stage == stage
        reached[own] = first_s + np.cumsum(steps.more_s[own])
    return reached


def _chosen(
    offers: Sequence[Offered],
    hulls: Sequence[Sequence[int]],
    steps: _Steps,
    taken: NDArray[np.intp],
) -> list[tuple[int, int]]:
    at = [{hull[0]: offer.count} for offer, hull in zip(offers, hulls, strict=True)]
    for step in taken.tolist():
        own, (first, second) = at[steps.offer[step]], steps.hop[step]
        own[first] -= 1
        own[second] = own.get(second, 0) + 1
    return [
        (index, option)
        for index, own in enumerate(at)
        for option, count in sorted(own.items())
        for _ in range(count)
    ]
