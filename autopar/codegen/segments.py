"""Parts of a block that run again in the backward, as nested functions in its source.

A part is a run of statements. Its function takes the locals it reads and returns those that are
read after it:

    def make_gelu(w, linear):
        gelu = F.gelu(linear)
        return gelu
    gelu = again(make_gelu, linear)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from autopar.codegen.lifetimes import NAME, SECTION, code, targets, with_releases

SEGMENT_IMPORT = "from autopar.runtime.recompute import Recomputation\n"
_NOTE = "# not kept for the backward: made again from the arguments"
_PART = f"{SECTION}again"
"""Where a part begins and ends: locals are let go of there, as at the ends of modules."""
_TEXT = re.compile(r'"[^"]*"')
_OPEN = "with Recomputation() as again:"


@dataclass
class Segments:
    """Notes which of the statements printed run again; `spans` are their line numbers."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    _start: int | None = None

    def enter(self, line: int, *, again: bool) -> bool:
        """Say whether the statements from `line` on run again; whether that is a change."""
        if again is (self._start is not None):
            return False
        if self._start is None:
            self._start = line
        else:
            self.spans.append((self._start, line))
            self._start = None
        return True

    def body(
        self,
        lines: Sequence[str],
        arguments: Collection[str],
        results: Collection[str],
        fresh: Callable[[str], str],
    ) -> list[str]:
        """The statements with every part as a function and a call, and with what nothing reads any
        more let go of. `arguments` are given, `results` returned; `fresh` gives unused names."""
        if not self.spans:
            return with_releases(lines, results)
        outer: list[str] = []
        functions: dict[str, list[str]] = {}
        position = 0
        for start, end in self.spans:
            outer += lines[position:start]
            known = {"w", *arguments, *(name for line in outer for name in targets(line))}
            later = {name for line in lines[end:] for name in _read(line)} | set(results)
            function, call = _segment(lines[start:end], known, later, fresh)
            functions[call] = function
            outer += [_PART, call, _PART]
            position = end
        outer += lines[position:]
        printed: list[str] = []
        for line in with_releases(outer, results):
            printed += [*functions.get(line, ()), *([] if line == _PART else [line])]
        return [_OPEN, *(f"    {line}" for line in printed)]


def within(lines: Sequence[str], last: str) -> list[str]:
    """The statements and a last one, inside the `with` that they begin with, if any."""
    return [*lines, f"    {last}" if lines and lines[0] == _OPEN else last]


def _segment(
    lines: Sequence[str],
    known: Collection[str],
    later: Collection[str],
    fresh: Callable[[str], str],
) -> tuple[list[str], str]:
    """Definition and call of one part; `known` are locals before it, `later` what is read after."""
    made = dict.fromkeys(name for line in lines for name in targets(line))
    returned = [name for name in made if name in later] or list(made)[-1:]
    read = dict.fromkeys(name for line in lines for name in _read(line))
    taken = ", ".join(name for name in read if name in known)
    name = fresh(f"make_{returned[-1]}")
    values = ", ".join(returned)
    function = [
        _NOTE,
        f"def {name}({taken}):",
        *(f"    {line}" for line in with_releases(lines, returned)),
        f"    return {values}",
    ]
    return function, f"{values} = again({name}, {taken})"


def _read(line: str) -> list[str]:
    """The names a statement reads."""
    left, assigned, right = code(line).partition(" = ")
    return NAME.findall(_TEXT.sub("", right if assigned else left))
