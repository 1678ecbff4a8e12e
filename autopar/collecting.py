"""How often the interpreter looks for cycles among the objects that it holds.

A plan takes millions of objects, hardly any of them in cycles, beside the hundred thousands that
torch has loaded: looking through them as often as the interpreter does by itself takes an eighth of
the time that it takes to plan a large model, and frees nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (50_000, 20, 20)
"""As `gc.set_threshold` has them."""


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """A process, or a part of what it does, that makes many objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
