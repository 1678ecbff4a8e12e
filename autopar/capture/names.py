"""Names of nodes: the op, and its number among its like where it is not the first.

They are given once the graph is whole, so that they do not depend on what was traced and dropped
on the way.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.graph import Arg, OpNode, Ref

_NUMBER = re.compile(r"(_\d+)+$")


def named(
    nodes: Sequence[OpNode], outputs: Iterable[Ref], taken: Iterable[str]
) -> tuple[list[OpNode], list[Ref]]:
    """The nodes, numbered anew in their order, and the refs that the outputs have then.

    A name is none of `taken`, no keyword and no builtin, for it becomes a variable.
    """
    names = Names(taken)
    new: dict[str, str] = {}
    made = []

    def arg(value: Arg) -> Arg:
        if isinstance(value, Ref):
            return Ref(new[value.name], value.index) if value.name in new else value
        return tuple(map(arg, value)) if isinstance(value, tuple) else value

    for node in nodes:
        args, kwargs = tuple(map(arg, node.args)), tuple((k, arg(v)) for k, v in node.kwargs)
        name = new[node.name] = names.new(_base(node.name))
        made.append(replace(node, name=name, args=args, kwargs=kwargs))
    return made, [Ref(new.get(ref.name, ref.name), ref.index) for ref in outputs]


def _base(name: str) -> str:
    """The op that a traced name is of: `div__1` is the second `div_`."""
    return _NUMBER.sub("", name).rstrip("_") or "op"


class Names:
    """Gives out names, each once."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def new(self, wanted: str) -> str:
        """`wanted`, or the first free one of `wanted_1`, `wanted_2`, ..."""
        count = self._counts.get(wanted, 0)
        name = wanted if count == 0 else f"{wanted}_{count}"
        while name in self._taken or (count == 0 and _means_something(name)):
            count += 1
            name = f"{wanted}_{count}"
        self._counts[wanted] = count + 1
        self._taken.add(name)
        return name


def _means_something(name: str) -> bool:
    return keyword.iskeyword(name) or hasattr(builtins, name)


__all__ = ["Names", "named"]
