"""Names of values in generated source: short, unique, and the same from run to run."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable

from autopar.ir.graph import Ref
from autopar.ir.placement import R_STAR, Layout, R

_RESERVED = frozenset(
    {"w", "w_block", "w_next", "ctx", "F", "torch", "comm", "kernels", "batch", "random", "inputs"}
)


class ValueNames:
    """Gives every (value, layout) a variable name.

    A value that carries no gradient has one replicated form: `R*` is looked up as `R`.
    """

    def __init__(self, reserved: Iterable[str], differentiable: Collection[Ref]) -> None:
        self._taken = set(_RESERVED) | set(reserved)
        self._differentiable = differentiable
        self._names: dict[tuple[Ref, Layout], str] = {}

    def fresh(self, hint: str) -> str:
        """An unused identifier close to `hint`."""
        base = re.sub(r"\W", "_", hint).strip("_") or "value"
        base = f"v_{base}" if base[0].isdigit() or keyword.iskeyword(base) else base
        name, number = base, 2
        while name in self._taken:
            name, number = f"{base}_{number}", number + 1
        self._taken.add(name)
        return name

    def bind(self, ref: Ref, layout: Layout, name: str) -> None:
        """Note that a variable holds a value in a layout."""
        self._names[self._key(ref, layout)] = name

    def __getitem__(self, key: tuple[Ref, Layout]) -> str:
        return self._names[self._key(*key)]

    def _key(self, ref: Ref, layout: Layout) -> tuple[Ref, Layout]:
        if ref in self._differentiable:
            return ref, layout
        return ref, tuple(R if p == R_STAR else p for p in layout)
