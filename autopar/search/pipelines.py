"""What a pipeline schedule means for the search: its place in memory, its terms in the objective.

Everything is read off the schedule itself, so that a new one needs no formula here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.schedules.action import ActionKind, Schedule
from autopar.schedules.arrivals import Arrivals, arrivals, most_under_way
from autopar.schedules.in_flight import held_at_peak, peak_in_flight
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.sharing import share_cores
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import StageTimes

_K = ActionKind

FREE = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 4),
    ("zb-h1", 1),
    ("zbv", 2),
    ("dualpipev", 2),
)
"""Schedules, with stages per rank, that are searched unless pinned; on ties the first wins."""

HIDES_MESSAGES = frozenset({"gpipe", "interleaved-1f1b", "looped-bfs"})
"""Schedules whose ranks always have other work while a message is under way."""

BACKWARDS_LAST = frozenset({"gpipe", "looped-bfs"})
"""Schedules that run all forwards before the first backward."""

_PROBE = 6
_NEGLIGIBLE = 1e-3
_RANKS = 8
_SHORT = 0.25
_LISTS = 16
"""Action lists that are kept: those of the sizes that were looked at last."""

_STEPS = 32
"""Shares of forward and weight gradients are rounded to this many steps to simulate them once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One schedule at its sizes: `ranks` of `chunks` stages each."""

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.chunks

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return SCHEDULES[self.schedule].placement(self.ranks, self.chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are computed apart."""
        return SCHEDULES[self.schedule].splits_backward

    @property
    def flushes(self) -> bool:
        """Whether all micro-batches of a step see the same weights."""
        return SCHEDULES[self.schedule].flushes

    @property
    def runs_backwards_last(self) -> bool:
        """Whether every rank runs all its forwards before its first backward."""
        return self.micro_batches == 1 or self.schedule in BACKWARDS_LAST

    def build(self) -> Schedule:
        """The action lists."""
        return _built(self)

    def lowered(self) -> Schedule:
        """The action lists with their messages."""
        return _lowered(self)

    def arrivals(self) -> tuple[Arrivals, ...]:
        """By rank, what is known of messages; nothing without a flush."""
        return _arrivals(self)

    def short(self, per_rank: int = _PROBE) -> Pipeline:
        """The same with so few micro-batches that a step has no more than a start, a middle and an
        end: what is held at most, and what idles, is the same."""
        few = per_rank * self.ranks + self.micro_batches % self.ranks
        if self.micro_batches <= few:
            return self
        return Pipeline(
            schedule=self.schedule, ranks=self.ranks, chunks=self.chunks, micro_batches=few
        )


@functools.lru_cache(maxsize=_LISTS)
def _built(pipeline: Pipeline) -> Schedule:
    return build_schedule(
        pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.chunks
    )


@functools.lru_cache(maxsize=_LISTS)
def _lowered(pipeline: Pipeline) -> Schedule:
    return insert_communication(pipeline.build())


@functools.lru_cache(maxsize=_LISTS)
def _arrivals(pipeline: Pipeline) -> tuple[Arrivals, ...]:
    return arrivals(pipeline.lowered()) if pipeline.flushes else ({},) * pipeline.ranks


def messages_under_way(pipeline: Pipeline) -> tuple[int, ...]:
    """By rank, the most messages that it has buffers for: without a flush one each way."""
    return _read_off(_under_way, pipeline) if pipeline.flushes else (2,) * pipeline.ranks


@functools.lru_cache(maxsize=4096)
def _under_way(pipeline: Pipeline) -> tuple[int, ...]:
    return most_under_way(pipeline.lowered(), pipeline.arrivals())


@functools.lru_cache(maxsize=4096)
def _peaks(pipeline: Pipeline) -> tuple[int, ...]:
    return peak_in_flight(pipeline.build())


@functools.lru_cache(maxsize=4096)
def _held_alike(pipeline: Pipeline) -> tuple[int, ...]:
    return held_at_peak(pipeline.build(), (1,) * pipeline.num_stages)


def in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """The most micro-batches each stage holds at once."""
    return _read_off(_peaks, pipeline)


def held_together(pipeline: Pipeline) -> tuple[int, ...]:
    """Micro-batches each stage holds when its rank holds the most of them.

    Stages of one rank are not at their peaks at the same time.
    """
    return _read_off(_held_alike, pipeline)


def _read_off(count: Callable[[Pipeline], tuple[int, ...]], pipeline: Pipeline) -> tuple[int, ...]:
    """Counts of a short schedule where they do not grow with the micro-batches, or grow with each
    alike."""
    short, longer = pipeline.short(2), pipeline.short(4)
    held = count(short)
    if short == pipeline or max(held) < short.micro_batches:
        return held
    if longer == pipeline or pipeline.schedule not in BACKWARDS_LAST:
        return count(pipeline)
    steps = (longer.micro_batches - short.micro_batches) // pipeline.ranks
    more = (pipeline.micro_batches - short.micro_batches) // pipeline.ranks
    return tuple(a + (b - a) // steps * more for a, b in zip(held, count(longer), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The objective of a pipeline: `sum` times the sum of the stages' times plus `longest` times
    the longest of the ranks, each as long as its stages together, or by its share `stage` as if all
    of them were as long as its longest."""

    sum: float
    longest: float
    stage: float = 0.0

    @staticmethod
    def of(step: float, pipeline: Pipeline, slowdown: float = 1.0) -> Weights:
        """Those by which equal stages of one second take `step` seconds.

        A rank has all micro-batches' work of its stages to do, whichever of them is the longer.
        Where ranks share cores, all work counts wherever it is.
        """
        share = 1.0 / pipeline.chunks
        if slowdown > 1:
            share = max(share / slowdown, pipeline.micro_batches / pipeline.ranks)
        share = min(share, step / pipeline.num_stages)
        if not pipeline.flushes:  # it never drains: only the slowest stage counts
            share = _NEGLIGIBLE / pipeline.num_stages
        longest = max(0.0, step - share * pipeline.num_stages)
        several = pipeline.chunks > 1 and slowdown <= 1
        return Weights(
            sum=share,
            longest=longest / pipeline.chunks,
            stage=stage_share(pipeline.schedule, pipeline.ranks) if several else 0.0,
        )


@functools.lru_cache(maxsize=256)
def stage_share(schedule: str, ranks: int) -> float:
    """How far ranks of several stages wait for each other's longest ones: 0 where a micro-batch
    more takes the time of a rank's stages together, 1 where each takes as long as the longest.

    Read off runs with stages of which some take a quarter of others, on all ranks at once or on one
    after the other. What it takes to be spared from waiting is the same for all ranks together, so
    that it follows for any number of ranks from two.
    """
    if ranks > _RANKS:
        half, whole = stage_share(schedule, _RANKS // 2), stage_share(schedule, _RANKS)
        return whole + (whole - half) * (1 - _RANKS / ranks)
    found = 0.0
    for slow in ([1] * ranks, [1 - rank % 2 for rank in range(ranks)]):
        times = [
            1.0 if chunk == slow[rank] else _SHORT
            for chunk in range(2)
            for rank in SCHEDULES[schedule].placement(ranks, 2)[chunk * ranks :][:ranks]
        ]
        together, longest = 1.0 + _SHORT, 2.0
        share = (_period(schedule, ranks, times) - together) / (longest - together)
        found = max(found, round(share, 6))
    return found


def _period(schedule: str, ranks: int, times: list[float]) -> float:
    """What a micro-batch more takes, with stages of two chunks."""
    several = [_PROBE * ranks, 2 * _PROBE * ranks]
    stages = StageTimes(
        forward_s=tuple(t / 3 for t in times),
        backward_s=tuple(2 * t / 3 for t in times),
        backward_input_s=tuple(t / 3 for t in times),
        backward_weight_s=tuple(t / 3 for t in times),
    )
    short, long = (
        simulate(insert_communication(build_schedule(schedule, ranks, count, 2)), stages).step_s
        for count in several
    )
    return (long - short) / (several[1] - several[0])


def least_step(
    pipeline: Pipeline, slowdown: float = 1.0, forward: float = 0.0, weight: float = 1.0
) -> float:
    """What no such schedule beats with equal stages of one second and free messages.

    With full backwards the last rank waits for a first micro-batch, and others wait after it. Where
    a backward is split, a forward takes at least the share `forward` of a second and weight
    gradients at most `weight`: the last rank waits for forwards, and a micro-batch goes through all
    stages and back. Where ranks share cores (`schedules.sharing`), a stage takes 1 / `slowdown` of
    a second alone, and the cores have all work to do.
    """
    work = pipeline.micro_batches * pipeline.chunks
    if slowdown > 1:
        return max(float(work), least_step(pipeline, 1.0, forward, weight) / slowdown)
    if not pipeline.flushes:
        return float(work)
    if pipeline.splits_backward:
        first, last = _rounded(forward), _rounded(weight)
        through = pipeline.num_stages * (1.0 - last) + last
        return max(work + (pipeline.ranks - 1) * first, through)
    if pipeline.chunks == 1:
        return float(work + pipeline.ranks - 1)
    through = pipeline.num_stages
    return float(max(work + min(pipeline.ranks - 1, through), through))


def _rounded(share: float) -> float:
    return round(share * _STEPS) / _STEPS


def has_closed_form(pipeline: Pipeline, slowdown: float = 1.0) -> bool:
    """Whether `least_step` is what the schedule takes."""
    if slowdown > 1 and pipeline.ranks > 1 and pipeline.flushes:
        return False
    if pipeline.schedule in ("1f1b", "gpipe", "pipedream") or pipeline.ranks == 1:
        return True
    whole = pipeline.micro_batches % pipeline.ranks == 0
    return pipeline.schedule == "interleaved-1f1b" and whole


class Shares(NamedTuple):
    """Parts of the time that stages take for a micro-batch: forwards, weight gradients, and the
    collectives that forwards and backwards wait for."""

    forward: float
    weight: float
    forward_waits: float = 0.0
    backward_waits: float = 0.0


def equal_step(pipeline: Pipeline, shares: Shares, slowdown: float = 1.0) -> float:
    """What the schedule takes with equal stages of one second and free messages, by simulation.

    A step longer than a short one takes a rank's work more for each micro-batch more.
    """
    if slowdown == 1.0:  # collectives are as long as they are
        shares = Shares(shares.forward, shares.weight)
    steps = tuple(round(share * _STEPS) for share in shares)
    short = pipeline.short()
    more = pipeline.micro_batches - short.micro_batches
    return _simulated(short, steps, slowdown) + more * pipeline.chunks


@functools.lru_cache(maxsize=4096)
def _simulated(pipeline: Pipeline, steps: tuple[int, ...], slowdown: float) -> float:
    stages = pipeline.num_stages
    first, last, before, behind = (count / _STEPS for count in steps)
    times = StageTimes(
        forward_s=(first,) * stages,
        backward_s=(1.0 - first,) * stages,
        backward_input_s=(1.0 - first - last,) * stages,
        backward_weight_s=(last,) * stages,
    )
    timeline = simulate(pipeline.lowered(), times)
    if slowdown > 1 and pipeline.flushes:
        nothing, waits = (0.0,) * pipeline.ranks, dict[tuple[ActionKind, int], float]()
        for stage in range(stages):
            waits[_K.FORWARD, stage] = before
            waits[_K.BACKWARD, stage] = waits[_K.BACKWARD_INPUT, stage] = behind
        timeline = share_cores(timeline, slowdown, nothing, nothing, waits).timeline
    return timeline.step_s
