"""What a block may run again in its backward instead of keeping it: time against memory, exactly.

What a step run again makes is not kept. What it reads is kept, or made by another step that is run
again. For a price of a byte, the best set of steps is a minimum cut: a storage is paid for where
its maker is left alone and the backward, or a step that is run again, reads it. Views cost nothing
and share their base's fate. Selective recompute of the attention core (Korthikanti et al. 2022,
section 5) and whole blocks are outcomes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
        self._storages, self._held = storages, storages.held(held)
        self._needed = storages.kept(saved, held)
        self._groups = _groups(storages.steps)
        self._maker = {
            storage: index for index, group in enumerate(self._groups) for storage in group.makes
        }
        self._time_s = [sum(seconds[s.name].total for s in g.steps) for g in self._groups]
        self._compute_s = [sum(seconds[s.name].compute for s in g.steps) for g in self._groups]
        self._extras = [0.0] * len(self._groups)
        of_step = {step.name: i for i, g in enumerate(self._groups) for step in g.steps}
        for extra in saved.extras:
            if extra.node in of_step:
                self._extras[of_step[extra.node]] += storages.extra_bytes(extra)
        self._all_bytes = self._kept_bytes(frozenset())

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
        nothing, lines = self._way(frozenset()), [(0.0, 0.0)]

        def solve(price: float) -> Again:
            way = self.solve(price)
            lines.append((price, way.time_s + price * way.kept_bytes))
            return way

        if nothing.kept_bytes:
            between(solve, nothing, solve(self._dear()), depth=_DEPTH, worth=_WORTH)
        return lines

    def _with_peaks(self, way: Again) -> Again:
        if self._walk is None:
            return way
        return replace(way, peaks=self._walk.peaks(way.kept, set(way.steps)))

    def solve(self, byte_price_s: float) -> Again:
        """The steps to run again for the least time plus `byte_price_s` for every byte kept."""
        count = len(self._groups)
        taken, left = list(self._time_s), [byte_price_s * extra for extra in self._extras]
        pairs: list[tuple[int, int, float]] = []
        for storage, readers in self._readers.items():
            price = byte_price_s * self._storages.nbytes(storage)
            maker = self._maker.get(storage)
            if storage in self._needed:
                if maker is not None:
                    left[maker] += price
                continue
            taken.append(0.0 if maker is not None else price)
            left.append(0.0)
            node = len(taken) - 1
            pairs += [(reader, node, inf) for reader in readers]
            pairs += [] if maker is None else [(node, maker, price)]
        chosen = solve_selection(
            SelectionProblem(taken=tuple(taken), left=tuple(left), pairs=tuple(pairs))
        )
        assert chosen is not None  # nothing is forbidden or obliged
        return self._way(frozenset(i for i in chosen if i < count))

    def whole(self) -> Again:
        """Everything that the backward reads is made again from what the block is given."""
        stack = [self._maker[s] for s in self._needed if s in self._maker]
        stack += [index for index, extra in enumerate(self._extras) if extra]
        chosen: set[int] = set()
        while stack:
            index = stack.pop()
            if index not in chosen:
                chosen.add(index)
                stack += [self._maker[s] for s in self._groups[index].reads if s in self._maker]
        return self._way(frozenset(chosen))

    def _dear(self) -> float:
        """A price at which the smallest saving is worth all the time there is: a saving is a sum
        and difference of sizes, so that their common divisor is none larger."""
        sizes = map(self._storages.nbytes, {*self._maker, *self._readers})
        smallest = gcd(*sizes, *map(round, self._extras)) or 1
        return 2 * max(sum(self._time_s), 1e-12) / smallest

    @cached_property
    def _readers(self) -> dict[Storage, list[int]]:
        """Groups that read each storage from outside; those the backward needs have an entry."""
        readers: dict[Storage, list[int]] = {s: [] for s in sorted(self._needed, key=str)}
        for index, group in enumerate(self._groups):
            for storage in group.reads - self._held:
                readers.setdefault(storage, []).append(index)
        return readers

    def _kept(self, chosen: frozenset[int]) -> set[Storage]:
        read = {s for index in chosen for s in self._groups[index].reads} - self._held
        return {s for s in self._needed | read if self._maker.get(s) not in chosen}

    def _kept_bytes(self, chosen: frozenset[int]) -> int:
        extras = sum(extra for i, extra in enumerate(self._extras) if i not in chosen)
        return sum(map(self._storages.nbytes, self._kept(chosen))) + round(extras)

    def _way(self, chosen: frozenset[int]) -> Again:
        kept = self._kept(chosen)
        made = {s for s in self._needed if self._maker.get(s) in chosen}
        extras = [extra for index, extra in enumerate(self._extras) if index not in chosen]
        whole = chosen and not any(extras) and not any(s in self._maker for s in kept)
        selective = Recompute.SELECTIVE if chosen else Recompute.NONE
        again = round(sum(self._extras) - sum(extras))
        names = {step.name for index in chosen for step in self._groups[index].steps}
        return Again(
            kind=Recompute.FULL if whole else selective,
            steps=tuple(step.name for step in self._storages.steps if step.name in names),
            time_s=sum(self._time_s[index] for index in sorted(chosen)),
            compute_s=sum(self._compute_s[index] for index in sorted(chosen)),
            weights=frozenset(s[0] for i in chosen for s in self._groups[i].reads & self._held),
            kept=frozenset(kept),
            kept_bytes=self._kept_bytes(chosen),
            made_bytes=sum(map(self._storages.nbytes, made)) + again,
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
