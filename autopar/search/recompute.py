"""What a block may run again in its backward instead of keeping it: time against memory, exactly.

What a step run again makes is not kept. What it reads is kept, or made by another step that is run
again. For a price of a byte, the best set of steps is a minimum cut: a storage is paid for where
its maker is left alone and the backward, or a step that is run again, reads it. Views cost nothing
and share their base's fate. Selective recompute of the attention core (Korthikanti et al. 2022,
section 5) and whole blocks are outcomes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from math import gcd, inf
from typing import TYPE_CHECKING, NamedTuple

from autopar.costs.saved import SavedSet
from autopar.costs.transient import BlockPeaks, BlockWalk, RunBlock
from autopar.ir.graph import Ref
from autopar.plan.plan import Recompute
from autopar.search.copies import BlockStorages, Step, Storage
from solvers.selection import SelectionProblem, solve_selection
from solvers.tradeoff import between

if TYPE_CHECKING:
    from autopar.search.least_kept import PricedStorages

_DEPTH = 2
"""Halvings between keeping everything and keeping the least: at most three ways between."""
_WORTH = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """One way to trade time for memory in a block.

    `steps` are run again, in order, which takes `time_s` per micro-batch, `compute_s` of it without
    collectives, and reads `weights` of those that are held anyway. `kept_bytes` are held per
    micro-batch in flight, `made_bytes` of what is kept otherwise are made again. `kept` are the
    storages among them, `peaks` what the block holds while it runs so.
    """

    kind: Recompute
    steps: tuple[str, ...] = ()
    time_s: float = 0.0
    compute_s: float = 0.0
    weights: frozenset[Ref] = frozenset()
    kept_bytes: int
    made_bytes: int = 0
    kept: frozenset[Storage] = field(default=frozenset(), repr=False, compare=False)
    peaks: BlockPeaks = field(default=BlockPeaks(), compare=False)

    @property
    def cost(self) -> float:
        """Seconds."""
        return self.time_s

    @property
    def size(self) -> float:
        """Bytes kept."""
        return float(self.kept_bytes)


class _Traded(NamedTuple):
    """Seconds of steps that are run again, and bytes kept."""

    cost: float
    size: float


class StepSeconds(NamedTuple):
    """Forward seconds of a step, and those without collectives."""

    total: float
    compute: float


class RecomputeProblem:
    """What the steps of one block cost to run again and what that saves.

    `held` are values whose storage is held anyway; `seconds` has the forward seconds of every step.
    `running` is the block as memory sees it, for the peaks of the ways.
    """

    def __init__(
        self,
        storages: BlockStorages | PricedStorages,
        saved: SavedSet,
        held: Collection[Ref],
        seconds: Mapping[str, StepSeconds],
        running: RunBlock | None = None,
    ) -> None:
        self._walk = None if running is None else BlockWalk(running)
        self._saved, self._groups = saved, _groups(storages.steps)
        self._order = tuple(step.name for step in storages.steps)
        own, needed = storages.held(held), storages.kept(saved, held)
        every = [*needed, *(s for g in self._groups for s in (*g.makes, *(g.reads - own)))]
        number = {storage: index for index, storage in enumerate(dict.fromkeys(every))}
        self._by_number = tuple(number)
        self._needed = frozenset(number[storage] for storage in needed)
        self._reads = [[number[s] for s in g.reads - own] for g in self._groups]
        self._weights = [frozenset(s[0] for s in g.reads & own) for g in self._groups]
        self._maker: list[int | None] = [None] * len(number)
        self._readers: list[list[int]] = [[] for _ in number]
        for index, group in enumerate(self._groups):
            for storage in group.makes:
                self._maker[number[storage]] = index
            for read in self._reads[index]:
                self._readers[read].append(index)
        self._price(storages, seconds)

    def at(self, storages: PricedStorages, seconds: Mapping[str, StepSeconds]) -> RecomputeProblem:
        """The problem of the same steps with other sizes and seconds."""
        found = copy(self)
        found._price(storages, seconds)
        return found

    def _price(
        self, storages: BlockStorages | PricedStorages, seconds: Mapping[str, StepSeconds]
    ) -> None:
        self._sizes = list(map(storages.nbytes, self._by_number))
        self._time_s = [sum(seconds[s.name].total for s in g.steps) for g in self._groups]
        self._compute_s = [sum(seconds[s.name].compute for s in g.steps) for g in self._groups]
        self._extras = [0.0] * len(self._groups)
        of_step = {step.name: i for i, g in enumerate(self._groups) for step in g.steps}
        for extra in self._saved.extras:
            if extra.node in of_step:
                self._extras[of_step[extra.node]] += storages.extra_bytes(extra)

    def ways(self) -> tuple[Again, ...]:
        """Nothing run again, a few ways between, and everything the backward reads: the last way
        keeps what the block is given alone. Each is best for some price of a byte."""
        nothing, whole = self._way(frozenset()), self.whole()
        if not whole.steps:
            return (self._with_peaks(nothing),)
        least = self.solve(self._dear())
        found = between(self.solve, nothing, least, depth=_DEPTH, worth=_WORTH)
        ways = [nothing, *found, least, whole]
        return tuple(map(self._with_peaks, dict.fromkeys(ways)))

    def lines(self) -> list[tuple[float, float]]:
        """A few prices of a byte, and the least time plus so much for every byte kept."""
        nothing, lines = self._traded(frozenset()), [(0.0, 0.0)]

        def solve(price: float) -> _Traded:
            found = self._traded(self._cheapest(price))
            lines.append((price, found.cost + price * found.size))
            return found

        if nothing.size:
            between(solve, nothing, solve(self._dear()), depth=_DEPTH, worth=_WORTH)
        return lines

    def _with_peaks(self, way: Again) -> Again:
        if self._walk is None:
            return way
        return replace(way, peaks=self._walk.peaks(way.kept, set(way.steps)))

    def solve(self, byte_price_s: float) -> Again:
        """The steps to run again for the least time plus `byte_price_s` for every byte kept."""
        return self._way(self._cheapest(byte_price_s))

    def _cheapest(self, byte_price_s: float) -> frozenset[int]:
        """The groups of these steps."""
        count = len(self._groups)
        taken, left = list(self._time_s), [byte_price_s * extra for extra in self._extras]
        pairs: list[tuple[int, int, float]] = []
        for number, (size, maker, readers) in enumerate(
            zip(self._sizes, self._maker, self._readers, strict=True)
        ):
            price = byte_price_s * size
            if number in self._needed:
                if maker is not None:
                    left[maker] += price
            elif len(readers) == 1:  # as much as its reader it is wanted
                if maker is None:
                    taken[readers[0]] += price
                else:
                    pairs.append((readers[0], maker, price))
            elif readers:
                node = len(taken)
                taken.append(0.0 if maker is not None else price)
                left.append(0.0)
                pairs += [(reader, node, inf) for reader in readers]
                pairs += [] if maker is None else [(node, maker, price)]
        chosen = solve_selection(
            SelectionProblem(taken=tuple(taken), left=tuple(left), pairs=tuple(pairs))
        )
        assert chosen is not None  # nothing is forbidden or obliged
        return frozenset(i for i in chosen if i < count)

    def whole(self) -> Again:
        """Everything that the backward reads is made again from what the block is given."""
        stack = list(map(self._maker.__getitem__, self._needed))
        stack += [index for index, extra in enumerate(self._extras) if extra]
        chosen: set[int] = set()
        while stack:
            index = stack.pop()
            if index is not None and index not in chosen:
                chosen.add(index)
                stack += map(self._maker.__getitem__, self._reads[index])
        return self._way(frozenset(chosen))

    def _dear(self) -> float:
        """A price at which the smallest saving is worth all the time there is: a saving is a sum
        and difference of sizes, so that their common divisor is none larger."""
        smallest = gcd(*self._sizes, *map(round, self._extras)) or 1
        return 2 * max(sum(self._time_s), 1e-12) / smallest

    def _kept(self, chosen: frozenset[int]) -> set[int]:
        """The storages that are kept, by number."""
        kept = self._needed.union(*(self._reads[index] for index in chosen))
        return {number for number in kept if self._maker[number] not in chosen}

    def _kept_bytes(self, chosen: frozenset[int]) -> int:
        extras = sum(extra for i, extra in enumerate(self._extras) if i not in chosen)
        return sum(map(self._sizes.__getitem__, self._kept(chosen))) + round(extras)

    def _traded(self, chosen: frozenset[int]) -> _Traded:
        return _Traded(sum(self._time_s[i] for i in sorted(chosen)), self._kept_bytes(chosen))

    def _way(self, chosen: frozenset[int]) -> Again:
        kept = self._kept(chosen)
        made = [number for number in self._needed if self._maker[number] in chosen]
        extras = [extra for index, extra in enumerate(self._extras) if index not in chosen]
        whole = chosen and not any(extras) and all(self._maker[number] is None for number in kept)
        selective = Recompute.SELECTIVE if chosen else Recompute.NONE
        again = round(sum(self._extras) - sum(extras))
        names = {step.name for index in chosen for step in self._groups[index].steps}
        return Again(
            kind=Recompute.FULL if whole else selective,
            steps=tuple(name for name in self._order if name in names),
            time_s=sum(self._time_s[index] for index in sorted(chosen)),
            compute_s=sum(self._compute_s[index] for index in sorted(chosen)),
            weights=frozenset[Ref]().union(*(self._weights[index] for index in chosen)),
            kept=frozenset(map(self._by_number.__getitem__, kept)),
            kept_bytes=self._kept_bytes(chosen),
            made_bytes=sum(map(self._sizes.__getitem__, made)) + again,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A step with the views of what it makes: run again together or not at all."""

    steps: tuple[Step, ...]
    makes: frozenset[Storage]
    reads: frozenset[Storage]


def _groups(steps: Iterable[Step]) -> list[_Group]:
    """Steps joined with the makers of the storages that their results lie in."""
    members: list[list[Step]] = []
    maker: dict[Storage, int] = {}
    for step in steps:
        fresh = [s for s in step.lies if s not in maker and s not in step.reads]
        viewed = [maker[s] for s in step.lies if s in maker]
        index = viewed[0] if viewed else len(members)
        if not viewed:
            members.append([])
        members[index].append(step)
        maker.update(dict.fromkeys(fresh, index))
        for other in set(viewed[1:]) - {index}:
            members[index] += members[other]
            members[other] = []
            maker = {s: index if i == other else i for s, i in maker.items()}
    made: list[set[Storage]] = [set() for _ in members]
    for storage, index in maker.items():
        made[index].add(storage)
    return [
        _Group(
            steps=tuple(own),
            makes=frozenset(makes),
            reads=frozenset(s for step in own for s in step.reads) - makes,
        )
        for own, makes in zip(members, made, strict=True)
        if own
    ]
