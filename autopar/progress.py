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
    with _bar(stream) if stream.isatty() else _lines(stream) as report:
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
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
