"""Progress on stderr: a bar on a terminal, else lines.

A phase has a line when it begins; where fractions are shares of the time it takes, also one every
`EVERY_S` seconds with what is left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Report = Callable[[str, float | None], None]
"""`(phase, fraction)`: what is being done, and how much of it is done where that is known."""

EVERY_S = 10.0


@contextmanager
def progress(
    stream: TextIO | None = None,
    *,
    timed: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Report]:
    """Show what the reports say on `stream` (stderr), until the block ends.

    `timed` tells that fractions are shares of the time, so that the time left can be told.
    """
    stream = sys.stderr if stream is None else stream
    shown = _bar(stream, timed) if stream.isatty() else _lines(stream, clock if timed else None)
    with shown as report:
        yield report


@contextmanager
def _lines(stream: TextIO, clock: Callable[[], float] | None) -> Iterator[Report]:
    last: str | None = None
    begun_s = shown_s = 0.0

    def report(phase: str, fraction: float | None) -> None:
        nonlocal last, begun_s, shown_s
        now_s = clock() if clock else begun_s
        if phase != last:
            print(f"autopar: {phase}", file=stream, flush=True)
            last, begun_s, shown_s = phase, now_s, now_s
        elif fraction and now_s - shown_s >= EVERY_S:
            left_s = (now_s - begun_s) * (1 - fraction) / fraction
            print(
                f"autopar: {phase}, {fraction:.0%}, {_time(left_s)} left", file=stream, flush=True
            )
            shown_s = now_s

    yield report


def _time(seconds: float) -> str:
    """A rough time: `40 s`, `12 min`, `3 h`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def _bar(stream: TextIO, timed: bool) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        *([TimeRemainingColumn()] if timed else []),
        console=Console(file=stream),
        transient=True,
        # what is printed meanwhile must reach stdout as it is
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("starting", total=None)
    last = ""

    def report(phase: str, fraction: float | None) -> None:
        nonlocal last
        if phase != last:
            bar.reset(task, description=phase, total=None)
            last = phase
        if fraction is not None:
            bar.update(task, total=1.0, completed=fraction)

    with bar:
        yield report
