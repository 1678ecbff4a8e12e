"""How the choices of a block hang together, whatever they cost: found once for a space.

Every op and parameter is a node with its options. A value is brought from how it lies to how it is
asked for; where several ask, a node of forms says to which layouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Ref
from autopar.ir.placement import Layout
from autopar.search.block import BlockSpace
from autopar.search.prices import Prices
from solvers.choice_problem import Edge

Forms = tuple[Layout, ...]
Array = NDArray[np.float64]
_Item = TypeVar("_Item", bound=Hashable)
_MAX_LAYOUTS_FOR_TRIPLES = 6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Link:
    """The moves of a value from how it lies, by an option of node `source` or as given (None), to
    what an option of node `target` asks for, or what has to leave the block (None).

    `rows` and `columns` are the distinct layouts there are; `row_at` has those of the options of
    the source, `sets` the columns of every distinct set that is asked for (one past the last: no
    more), `set_at` those of the options of the target.
    """

    ref: Ref
    source: int | None
    target: int | None
    rows: tuple[Layout, ...]
    columns: tuple[Layout, ...]
    row_at: NDArray[np.intp]
    sets: NDArray[np.intp]
    set_at: NDArray[np.intp]

    def costs(self, prices: Prices) -> Array:
        """Seconds of the moves for every pair of options."""
        moves = prices.reshard_s(self.ref, self.rows, self.columns)
        none = np.zeros((len(self.rows), 1))
        summed = np.concatenate([moves, none], axis=1)[:, self.sets].sum(axis=2)
        table: Array = summed[np.ix_(self.row_at, self.set_at)]
        return table

    def take(
        self, prices: Prices, costs: MutableSequence[Array] | MutableMapping[int, Array]
    ) -> Edge | None:
        """The moves as an edge; where only one node has a say they are added to its costs."""
        table = self.costs(prices)
        if self.source is not None and self.target is not None:
            return Edge(src=self.source, dst=self.target, cost=table)
        if self.target is not None:
            costs[self.target] = costs[self.target] + table[0]
        elif self.source is not None:
            costs[self.source] = costs[self.source] + table[:, 0]
        return None


def _link(
    ref: Ref,
    source: int | None,
    have: Sequence[Layout],
    target: int | None,
    forms: Sequence[Forms],
) -> Link:
    rows, columns = positions(have), positions(x for form in forms for x in form)
    sets = positions(forms)
    width = max(map(len, sets))
    table = np.full((len(sets), width), len(columns), dtype=np.intp)
    for row, form in zip(table, sets, strict=True):
        row[: len(form)] = [columns[x] for x in form]
    return Link(
        ref=ref,
        source=source,
        target=target,
        rows=tuple(rows),
        columns=tuple(columns),
        row_at=np.array([rows[x] for x in have], dtype=np.intp),
        sets=table,
        set_at=np.array([sets[form] for form in forms], dtype=np.intp),
    )


@dataclass
class Wiring:
    """The nodes of a space, by how many options they have, and what is between them.

    `lies` tells which node decides how a value lies, and how for each of its options. `edges` and
    `costs` are those that no price counts for: what goes together or does not.
    """

    space: BlockSpace
    sizes: list[int] = field(default_factory=list)
    lies: dict[Ref, tuple[int, list[Layout]]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    costs: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        space = self.space
        for node, options in zip(space.nodes, space.options, strict=True):
            self.sizes.append(len(options))
            for output in range(len(node.outputs)):
                layouts = [option.outputs[output] for option in options]
                self.lies[Ref(node.name, output)] = len(self.sizes) - 1, layouts
        for source, offered in space.parameters:
            self.sizes.append(len(offered))
            self.lies[Ref(source.name)] = len(self.sizes) - 1, list(offered)
        for ref in (*space.given, *self.lies):
            self._connect(ref)

    def _connect(self, ref: Ref) -> None:
        """Connect a value to its readers, through a forms node where there are several."""
        space = self.space
        source, have = (None, [space.given[ref]]) if ref in space.given else self.lies[ref]
        readers, required = space.consumers.get(ref, ()), space.required.get(ref)
        wanted = [[o.inputs[at] for o in space.options[index]] for index, at in readers]
        if len(readers) + (required is not None) > 1:
            self._connect_forms(ref, source, have, wanted)
        elif readers:
            target, forms = readers[0][0], [(layout,) for layout in wanted[0]]
            self.links.append(_link(ref, source, have, target, forms))
        elif required is not None and source is not None:
            self.links.append(_link(ref, source, have, None, [(required,)]))

    def _connect_forms(
        self, ref: Ref, source: int | None, have: Sequence[Layout], wanted: list[list[Layout]]
    ) -> None:
        required = self.space.required.get(ref)
        asked = wanted if required is None else [*wanted, [required]]
        forms = form_sets(asked)
        target = len(self.sizes)
        self.sizes.append(len(forms))
        self.links.append(_link(ref, source, have, target, forms))
        places, met = _met(forms, asked)
        for (reader, _), layouts in zip(self.space.consumers.get(ref, ()), wanted, strict=True):
            rows = met[[places[x] for x in layouts]]
            self.edges.append(Edge(src=target, dst=reader, cost=rows.T))
        if required is not None:
            self.costs[target] = met[places[required]]


def wired(space: BlockSpace) -> Wiring | None:
    """The wiring of a space, None where some op or parameter has no option."""
    possible = all(space.options) and all(layouts for _, layouts in space.parameters)
    return Wiring(space) if possible else None


def positions(items: Iterable[_Item]) -> dict[_Item, int]:
    """Position of each distinct item, in the order of first use."""
    found: dict[_Item, int] = {}
    for item in items:
        found.setdefault(item, len(found))
    return found


def _met(
    forms: Sequence[Forms], wanted: Iterable[Sequence[Layout]]
) -> tuple[dict[Layout, int], NDArray[np.float64]]:
    """The layouts that are wanted, and for each (row) 0 where a form has it, else inf."""
    places = positions(x for layouts in wanted for x in layouts)
    met = np.full((len(places), len(forms)), inf)
    for column, form in enumerate(forms):
        met[[places[x] for x in form], column] = 0.0
    return places, met


def form_sets(wanted: Sequence[Sequence[Layout]]) -> list[Forms]:
    """Sets of layouts a value may be brought to so that every reader finds one of its own.

    Sets of one and two, and of three where few layouts are asked for.
    """
    layouts = sorted({layout for reader in wanted for layout in reader}, key=str)
    most = 3 if len(layouts) <= _MAX_LAYOUTS_FOR_TRIPLES else 2
    asked = [set(reader) for reader in wanted]
    return [
        form
        for size in range(1, min(most, len(wanted)) + 1)
        for form in combinations(layouts, size)
        if all(reader & set(form) for reader in asked)
    ]
