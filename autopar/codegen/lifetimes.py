"""Letting go of intermediate tensors in generated source.

Python keeps a local alive until its function returns. What autograd does not save would then stay
in memory for the whole block; `del` at the end of each part of the model frees it, as the memory
model takes for granted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

SECTION = "# -- "
"""Begins the comment line above the ops of one module."""

NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


def with_releases(lines: Sequence[str], results: Collection[str]) -> list[str]:
    """The statements with a `del` before each section for the locals that nothing reads any more.

    `results` are returned and stay. Statements are `targets = expression  # comment`.
    """
    last_read: dict[str, int] = {}
    for number, line in enumerate(lines):
        last_read.update(dict.fromkeys(NAME.findall(code(line)), number))
    alive: list[str] = []
    printed: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith(SECTION):
            dead = [name for name in alive if last_read[name] < number]
            if dead:
                printed.append(f"del {', '.join(dead)}")
            alive = [name for name in alive if last_read[name] >= number]
        alive += [name for name in targets(line) if name not in results]
        printed.append(line)
    return printed


def code(line: str) -> str:
    """A statement without its comment."""
    return "" if line.startswith("#") else line.split("  # ", maxsplit=1)[0]


def targets(line: str) -> list[str]:
    """The names a statement assigns."""
    left, assigned, _ = code(line).partition(" = ")
    return NAME.findall(left) if assigned else []
