"""How long the longest rank of a partition takes at the least, as ranks hold whole blocks of what
is spread over all of them.

A rank of V stages that take T_p counts for (1 - share) sum_p T_p + share * V * max_p T_p, which is
no less than sum_p w_p T_p for any weights w_p >= 1 - share that sum to V. So with a price r of a
byte, n blocks of a class that take t and hold u of the room of the rank make it count for

    n * a - r * room   at the least, with   a = min over stages p and options of w_p t + r u,

and what other blocks that are surely there take besides. The weights are those that make a the
greatest: under them all stages are as dear as each other, or else all blocks would go where less is
held. Of these times, for all ranks and all numbers of blocks, the n-th shortest is the least that n
blocks of the class take.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

Array = NDArray[np.float64]

_ROUNDING = 1e-10
_PRICES = 16
_HALVINGS = 40
_TIMES = 3
"""By how much a rank may have more blocks than the mean to be looked at; with more it takes no
less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """What tells a stage of a rank from others; `cuts_s` are a part of its time, and it surely runs
    a block of each of the classes `others`."""

    in_flight: int
    scale: float
    device: int
    cuts_s: float
    others: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """The stages of a rank, and the bytes that it has for blocks."""

    stages: tuple[_Stage, ...]
    free: float


def least_longest(problem: PartitionProblem) -> float:
    """What the longest rank counts for at the least; infinite where all blocks of a class have no
    room. Classes of few blocks, or of some that take no time, tell nothing, nor do fixed cuts."""
    if problem.fixed_cuts is not None:
        return 0.0
    longest = 0.0
    scale = min(problem.time_scale)
    for kind, count in sorted(Counter(problem.blocks).items()):
        fastest_s = scale * min(o.time_s for o in problem.classes[kind])
        if count >= len(problem.rank_stages()) and fastest_s > 0:
            longest = max(longest, _of_class(problem, kind, count, _ranks(problem, kind)))
    return longest * (1 - _ROUNDING)


def _ranks(problem: PartitionProblem, kind: int) -> Counter[_Rank]:
    """How many ranks there are of every sort."""
    cut_s = min(problem.boundary_s, default=0.0) if problem.boundary_in_max else 0.0
    hops = (0.0, *problem.hop_scale, 0.0)
    last = problem.num_stages - 1
    first_others = [block for block in problem.blocks[:1] if block != kind]
    last_others = [block for block in problem.blocks[1:][-1:] if block != kind]

    def stage(k: int) -> _Stage:
        others = (*(first_others if k == 0 else ()), *(last_others if k == last else ()))
        return _Stage(
            in_flight=problem.in_flight[k],
            scale=problem.time_scale[k],
            device=problem.stage_device[k],
            cuts_s=cut_s * (hops[k] + hops[k + 1]),
            others=tuple(others),
        )

    return Counter(
        _Rank(
            stages=tuple(map(stage, held)),
            free=problem.capacity_bytes[held[0]] * (1 + CAPACITY_TOLERANCE)
            - math.fsum(problem.stage_fixed_bytes[k] for k in held),
        )
        for held in problem.rank_stages()
    )


def _of_class(problem: PartitionProblem, kind: int, count: int, ranks: Counter[_Rank]) -> float:
    most = min(count, _TIMES * -(-count // ranks.total()))
    taken, several = [], []
    for rank, alike in ranks.items():
        taken.append(_taken(problem, kind, rank, np.arange(1, most + 1)))
        several.append(np.full(most, alike))
    times, number = np.concatenate(taken), np.concatenate(several)
    order = np.argsort(times, kind="stable")
    at = int(np.searchsorted(np.cumsum(number[order]), count))
    beyond = min(float(own[-1]) for own in taken) if most < count else math.inf
    return min(float(times[order[at]]) if at < len(order) else math.inf, beyond)


def _taken(problem: PartitionProblem, kind: int, rank: _Rank, numbers: NDArray[np.intp]) -> Array:
    """What a rank counts for at the least with so many blocks of a class."""
    share, width = problem.stage_share, len(rank.stages)
    own = [_offered(problem, kind, stage) for stage in rank.stages]
    prices = np.array(_prices(own))
    times_s, held = _stacked(own)
    priced_s = prices[:, None] * held[:, None, :]
    dear = _dear(times_s, priced_s, share)
    weights = _weights(times_s, priced_s, dear, share)
    fixed_s = np.zeros(len(prices))
    transient = min(o.transient_bytes for o in problem.classes[kind])
    for stage, weight in zip(rank.stages, weights, strict=True):
        fixed_s += weight * stage.cuts_s
        for other in stage.others:
            time_s, used = _offered(problem, other, stage)
            fixed_s += (weight[:, None] * time_s + prices[:, None] * used).min(axis=1)
    room = rank.free - transient
    taken = (numbers[:, None] * dear + fixed_s - prices * room).max(axis=1)
    # of so many blocks some stage has its share, whole
    fastest_s = min(float(time_s.min()) for time_s, _ in own)
    largest = -(-numbers // width)
    evenly = ((1 - share) * numbers + share * width * largest) * fastest_s
    least = min(float(used.min()) for _, used in own)
    fits = numbers * least <= room * (1 + _ROUNDING) + _ROUNDING
    return np.where(fits, np.maximum(taken, evenly), np.inf)


def _offered(problem: PartitionProblem, kind: int, stage: _Stage) -> tuple[Array, Array]:
    """Seconds and bytes of a class's options on a stage."""
    options = [o for o in problem.classes[kind] if o.device == stage.device]
    times = stage.scale * np.array([o.time_s for o in options])
    return times, np.array([o.held_bytes(stage.in_flight) for o in options])


def _prices(own: list[tuple[Array, Array]]) -> list[float]:
    """Seconds per byte at which a block would change its option, a few of them, and none."""
    rates = {0.0}
    for time_s, used in own:
        i, j = np.nonzero((used[:, None] > used) & (time_s[:, None] < time_s))
        rates.update(((time_s[j] - time_s[i]) / (used[i] - used[j])).tolist())
    ordered = sorted(rates)
    return ordered[:: -(-len(ordered) // _PRICES)]


def _stacked(own: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The same of all stages [stage, option], with options that take for ever where some have
    fewer."""
    time_s = np.full((len(own), max(len(each) for each, _ in own)), np.inf)
    used = np.zeros(time_s.shape)
    for stage, (times, held) in enumerate(own):
        time_s[stage, : len(times)], used[stage, : len(times)] = times, held
    return time_s, used


def _weights(time_s: Array, priced_s: Array, dear: Array, share: float) -> Array:
    """By stage and price, the least weight under which a block is as dear as given."""
    needed = (dear[:, None] - priced_s) / time_s[:, None, :]
    return np.maximum(needed.max(axis=2), 1 - share)


def _dear(time_s: Array, priced_s: Array, share: float) -> Array:
    """By price, the most that a block may cost on every stage for weights that sum to as many as
    there are stages; `priced_s` [stage, price, option] is for what options hold."""
    stages = len(time_s)
    cheapest = (time_s[:, None, :] + priced_s).min(axis=2)
    if stages == 1 or not share:  # all weights are one
        return np.asarray(cheapest.min(axis=0))
    low = (1 - share) * cheapest.min(axis=0)
    high = stages * cheapest.max(axis=0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = _weights(time_s, priced_s, middle, share).sum(axis=0) <= stages
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return low
