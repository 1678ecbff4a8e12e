"""Progress on stderr: a bar on a terminal, else one line per phase."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Report = Callable[[str, float | None], None]
"""`(phase, fraction)`: what is being done, and how much of it is done where that is known."""


@contextmanager
def progress(stream: TextIO | None = None) -> Iterator[Report]:
    """Show what the reports say on `stream` (stderr), until the block ends."""
    stream = sys.stderr if stream is None else stream
    shown = _bar(stream) if stream.isatty() else _lines(stream)
    with shown as report:
        yield report


@contextmanager
def _lines(stream: TextIO) -> Iterator[Report]:
    last: str | None = None

    def report(phase: str, fraction: float | None) -> None:
        nonlocal last
        if phase != last:
            print(f"autopar: {phase}", file=stream, flush=True)
            last = phase

    yield report


@contextmanager
def _bar(stream: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
        # what is printed meanwhile must reach stdout as it is
        redirect_stdout=False,
        redirect_stderr=False,
    )
    tasks: dict[str, TaskID] = {}

    def report(phase: str, fraction: float | None) -> None:
        if phase not in tasks:
            _finish(bar, tasks)
            tasks[phase] = bar.add_task(phase, total=None)
        total = None if fraction is None else 1.0
        bar.update(tasks[phase], total=total, completed=fraction or 0.0)

    with bar:
        yield report


def _finish(bar: object, tasks: dict[str, object]) -> None:
    raise NotImplementedError
