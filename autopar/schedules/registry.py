"""The schedules a plan may name. Adding one is a builder in its own file and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autopar.errors import InputError
from autopar.schedules.action import Schedule
from autopar.schedules.breadth_first import looped_bfs
from autopar.schedules.gpipe import gpipe
from autopar.schedules.interleaved import interleaved_1f1b
from autopar.schedules.one_f_one_b import one_f_one_b
from autopar.schedules.pipedream import pipedream, pipedream_limits
from autopar.schedules.placement import looped, vee
from autopar.schedules.v_shape import dualpipev, zbv
from autopar.schedules.zero_bubble import interleaved_zb, zb_h1

Builder = Callable[[int, int, int], Schedule]
"""`(num_ranks, chunks, num_micro_batches) -> Schedule`, without communication."""

Chunks = Literal["one", "two", "many"]
_ALLOWED: dict[Chunks, tuple[Callable[[int], bool], str]] = {
    "one": (lambda chunks: chunks == 1, "one stage"),
    "two": (lambda chunks: chunks == 2, "two stages"),
    "many": (lambda chunks: chunks >= 1, "one or more stages"),
}


def _anything(num_ranks: int, chunks: int, num_micro_batches: int) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow:
    """What there is to know of a schedule.

    `chunks` is how many stages it takes per rank; `placement(num_ranks, chunks)` the rank of every
    stage. With `splits_backward` a backward comes in an input and a weight part. Without `flushes`
    the pipeline never drains between steps, and weights are stale.
    """

    build: Builder
    chunks: Chunks = "one"
    placement: Callable[[int, int], tuple[int, ...]] = looped
    splits_backward: bool = False
    flushes: bool = True
    limits: Callable[[int, int, int], str | None] = _anything

    def why_not(self, num_ranks: int, chunks: int, num_micro_batches: int) -> str | None:
        """What speaks against these sizes; None where the schedule can be built."""
        sizes = {"ranks": num_ranks, "chunks": chunks, "micro-batches": num_micro_batches}
        for what, size in sizes.items():
            if size < 1:
                return f"{size} {what}; expected at least one"
        allowed, expected = _ALLOWED[self.chunks]
        if not allowed(chunks):
            return f"{chunks} stages per rank; it takes {expected} per rank"
        return self.limits(num_ranks, chunks, num_micro_batches)


SCHEDULES: dict[str, ScheduleRow] = {
    "gpipe": ScheduleRow(build=gpipe),
    "1f1b": ScheduleRow(build=one_f_one_b),
    "interleaved-1f1b": ScheduleRow(build=interleaved_1f1b, chunks="many"),
    "looped-bfs": ScheduleRow(build=looped_bfs, chunks="many"),
    "zb-h1": ScheduleRow(build=zb_h1, splits_backward=True),
    "interleaved-zb": ScheduleRow(build=interleaved_zb, chunks="many", splits_backward=True),
    "zbv": ScheduleRow(build=zbv, chunks="two", placement=vee, splits_backward=True),
    "dualpipev": ScheduleRow(build=dualpipev, chunks="two", placement=vee, splits_backward=True),
    "pipedream": ScheduleRow(build=pipedream, flushes=False, limits=pipedream_limits),
}


def build_schedule(name: str, num_ranks: int, num_micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule called `name` over `num_ranks * chunks` stages.

    Raises InputError on an unknown name, or on sizes that the schedule cannot take.
    """
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    row = SCHEDULES[name]
    reason = row.why_not(num_ranks, chunks, num_micro_batches)
    if reason is not None:
        raise InputError(f"schedule {name!r} over {reason}")
    return row.build(num_ranks, chunks, num_micro_batches)
