"""Names of values in generated source: short, unique, and the same from run to run."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from autopar.ir.graph import Ref
from autopar.ir.placement import Layout

_RESERVED = frozenset({"w", "ctx", "F", "torch", "comm", "kernels", "batch", "random", "inputs"})


class ValueNames:
    """Gives every (value, layout) a variable name."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken = set(_RESERVED) | set(reserved)
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
        self._names[ref, layout] = name

    def __getitem__(self, key: tuple[Ref, Layout]) -> str:
        return self._names[key]

    def __contains__(self, key: tuple[Ref, Layout]) -> bool:
        return key in self._names
