"""How threads of a process that plans share its time.

Solvers multiply many small matrices. With more threads than one for that these take several times
the processor time, from the processes that work beside, and no less by the clock.

Beside the thread that works in a process of a team there is one that passes questions and answers
on. It needs the interpreter for moments only; how long it waits for it each time is how long a
worker at the other end has nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")
"""A default for the environment, read when numpy is loaded first."""

_PROMPT_S = 2e-4
"""Seconds after which a thread that works lets another have the interpreter: 5 ms by default, in
which a worker answers several questions."""


@contextmanager
def taking_turns() -> Iterator[None]:
    """A process in which a thread that works is not to keep one waiting that passes on."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_PROMPT_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
