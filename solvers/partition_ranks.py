"""Ranks that hold several stages: a rank with all of its stages is one arc.

Which blocks of a class a stage runs is free where they follow each other, so only their number
counts. Once it is known between which classes the stages are cut (a layout), the blocks left over
are dealt out to ranks, and a rank to its stages as it does best: with n[j] blocks of the j-th such
run of blocks,

    price(rank, n) = the least time, within the rank's memory, of the blocks that its stages have at
                     the least and n[j] more, each on any of its stages that reaches run j,

a knapsack like that of a stage, and a walk over (n[j] dealt out so far) finds the best partition by
the longest rank as one over cuts does by the longest stage. Where a rank's longest stage counts for
itself (`stage_share`), it matters too how the blocks are split among the stages, which is found to
within a bound (`partition_splits`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from solvers.partition_arcs import Arcs, ChainArcs, DealtArcs
from solvers.partition_counting import Counting
from solvers.partition_dp import ChainSearch
from solvers.partition_even import LONG, longest_stage
from solvers.partition_frontier import ClassTable
from solvers.partition_graph import ArcGraph, Partition, Ways, in_order
from solvers.partition_joint import JointPricer
from solvers.partition_pricing import Pricer, StageKind
from solvers.partition_problem import BlockOption, PartitionProblem
from solvers.partition_splits import SplitPricer
from solvers.partition_table import PriceTable
from solvers.partition_weighing import Place
from solvers.solution import CAPACITY_TOLERANCE

_MAX_LAYOUTS = 512
_MAX_ARCS = 20_000_000
"""Arcs of all layouts together, up to which they are searched one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Blocks of a class that follow each other, every cut between two of which costs the same."""

    kind: int
    length: int
    inner_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """What stages have for certain and may have besides.

    `sure[k]` are the classes of the blocks that stage k has at the least, `free[k]` the runs of
    which it may have more, of which there are `spare[j]` each; `cut_s[k]` is the cost of the cut
    after stage k.
    """

    sure: tuple[tuple[int, ...], ...]
    free: tuple[tuple[int, ...], ...]
    spare: tuple[int, ...]
    run_class: tuple[int, ...]
    cut_s: tuple[float, ...]

    @property
    def states(self) -> int:
        """Ways to have dealt out some of the spare blocks."""
        return math.prod(spare + 1 for spare in self.spare)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Offer:
    """The options that a block of a rank has: of each, which of the rank's stages runs it, and its
    number in the class."""

    block_class: int
    table: ClassTable
    origin: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """What a rank has free, what its cuts cost, how many sure blocks its stages have, and what is
    offered for each of these and then for the spare ones of every run that it reaches; where its
    longest stage counts for itself, also on each of its stages, with None where that does not reach
    the run."""

    free_bytes: float
    cuts_s: tuple[float, ...]
    sure: tuple[int, ...]
    offers: tuple[_Offer, ...]
    apart: tuple[tuple[_Offer | None, ...], ...]

    def offer(self, number: int) -> _Offer | None:
        """An offer by its number in prices."""
        if number < len(self.offers):
            return self.offers[number]
        run, place = divmod(number - len(self.offers), len(self.sure))
        return self.apart[run][place]

    def places(self) -> tuple[Place, ...]:
        """Its stages, by what is offered on each."""
        ends = list(itertools.accumulate(self.sure, initial=0))
        return tuple(
            Place(
                sure=tuple(o.table for o in self.offers[ends[place] : ends[place + 1]]),
                runs=tuple(
                    None if (own := offers[place]) is None else own.table for offers in self.apart
                ),
                cuts_s=cut_s,
            )
            for place, cut_s in enumerate(self.cuts_s)
        )


_Laid = tuple[_Rank, tuple[int, ...]]
"""A rank of a layout, and the runs of it that the rank reaches."""


def rank_graphs(problem: PartitionProblem, deadline: float) -> list[ArcGraph]:
    """Every way to lay the cuts out over the classes, with ranks as arcs; none where there are too
    many, or where stages must have more than one block. Times have `sum_weight` in them.

    Ranks of one stage each are cut as well by the chain: none where that is quicker, as some
    layout has more arcs, or no blocks to deal out.
    """
    if problem.min_blocks > 1 and problem.fixed_cuts is None:
        return []
    layouts = list(itertools.islice(_layouts(problem), _MAX_LAYOUTS + 1))
    arcs = sum(layout.states ** min(len(layout.spare), 2) for layout in layouts)
    if len(layouts) > _MAX_LAYOUTS or arcs > _MAX_ARCS:
        return []
    by_chain = arcs > len(problem.blocks) ** 2 or not all(layout.spare for layout in layouts)
    if by_chain and not problem.shares_ranks:
        return []
    ranks = _Ranks(problem, layouts, deadline)
    return [ranks.graph(layout, laid) for layout, laid in zip(layouts, ranks.laid, strict=True)]


def _layouts(problem: PartitionProblem) -> Iterator[_Layout]:
    if problem.fixed_cuts is not None:
        yield _Layout(
            sure=tuple(
                tuple(sorted(problem.blocks[b] for b in stage))
                for stage in problem.stages(problem.fixed_cuts)
            ),
            free=((),) * problem.num_stages,
            spare=(),
            run_class=(),
            cut_s=tuple(problem.boundary_s[cut - 1] for cut in problem.fixed_cuts),
        )
        return
    runs = _runs(problem)
    for inside, ends in _places(runs, problem.num_stages - 1):
        yield _laid_out(runs, inside, ends)


def _runs(problem: PartitionProblem) -> list[_Run]:
    runs: list[_Run] = []
    for block, kind in enumerate(problem.blocks):
        end_s = problem.boundary_s[block] if block < len(problem.boundary_s) else 0.0
        last = runs[-1] if runs else None
        if last and last.kind == kind and (last.length == 1 or last.end_s == last.inner_s):
            runs[-1] = _Run(kind=kind, length=last.length + 1, inner_s=last.end_s, end_s=end_s)
        else:
            runs.append(_Run(kind=kind, length=1, inner_s=0.0, end_s=end_s))
    return runs


def _places(runs: Sequence[_Run], cuts: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """How many cuts are inside every run, and at its end: 0 or 1."""
    most = [run.length for run in runs]
    most[-1] -= 1  # none after the last block
    after = [sum(most[j + 1 :]) for j in range(len(runs))]

    def place(j: int, left: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        if j == len(runs):
            yield (), ()
            return
        last = j == len(runs) - 1
        for end in (0,) if last else (0, 1):
            least = max(0, left - end - after[j])
            for inside in range(least, min(runs[j].length - 1, left - end) + 1):
                for more, ends in place(j + 1, left - end - inside):
                    yield (inside, *more), (end, *ends)

    yield from place(0, cuts)


def _laid_out(runs: Sequence[_Run], inside: tuple[int, ...], ends: tuple[int, ...]) -> _Layout:
    sure: list[list[int]] = [[]]
    free: list[list[int]] = [[]]
    spare: list[int] = []
    run_class, cut_s = [], []
    for run, cuts, end in zip(runs, inside, ends, strict=True):
        if cuts:
            for k in range(cuts + 1):
                sure[-1].append(run.kind)
                free[-1].append(len(spare))
                if k < cuts:
                    sure.append([])
                    free.append([])
                    cut_s.append(run.inner_s)
            spare.append(run.length - cuts - 1)
            run_class.append(run.kind)
        else:
            sure[-1] += [run.kind] * run.length
        if end:
            sure.append([])
            free.append([])
            cut_s.append(run.end_s)
    return _Layout(
        sure=tuple(tuple(sorted(stage)) for stage in sure),
        free=tuple(map(tuple, free)),
        spare=tuple(spare),
        run_class=tuple(run_class),
        cut_s=tuple(cut_s),
    )


class _Ranks:
    """The ranks of a problem by how its stages are laid out, with what prices each: one for all
    layouts that have such a rank, whatever the others are."""

    def __init__(
        self, problem: PartitionProblem, layouts: Sequence[_Layout], deadline: float
    ) -> None:
        self.problem, self.deadline = problem, deadline
        self.stages = problem.rank_stages()
        self.counts_stages = problem.stage_share > 0
        self._offers: dict[object, _Offer] = {}
        self.laid = [self._ranks(layout) for layout in layouts]
        self._dealt = max(sum(layout.spare) for layout in layouts)
        self._most: dict[_Rank, tuple[int, ...]] = {}
        for layout, laid in zip(layouts, self.laid, strict=True):
            for rank, reached in laid:
                own = tuple(layout.spare[run] for run in reached)
                self._most[rank] = tuple(map(max, own, self._most.get(rank, own)))
        self._pricers: dict[_Rank, Pricer] = {}

    def graph(self, layout: _Layout, laid: Sequence[_Laid]) -> ArcGraph:
        """The ranks as arcs between numbers of spare blocks that have been dealt out."""
        problem, last = self.problem, layout.states - 1
        kinds = {own: kind for kind, own in enumerate(dict.fromkeys(laid))}
        kind_of_rank = [kinds[own] for own in laid]
        dealt = _numbers(layout.spare)
        pricer = JointPricer(
            pricers=[self._pricer(rank) for rank, _ in kinds],
            rows=[_rows(dealt, reached, self._most[rank]) for rank, reached in kinds],
            kind_of_stage=kind_of_rank,
        )
        search = ChainSearch(
            kind_of_stage=kind_of_rank,
            weight=problem.bottleneck_weight,
            deadline=self.deadline,
            first=[0] * len(laid) + [last],
            last=[0] + [last] * len(laid),
        )
        table = PriceTable(
            pricer,
            search,
            places=_arcs(dealt, list(kinds)),
            boundary_in_max=problem.boundary_in_max,
        )

        def partition(positions: tuple[int, ...], ways: Ways) -> Partition:
            return self._partition([rank for rank, _ in laid], ways)

        long = len(layout.spare) == 1 and last >= LONG
        reached = list(itertools.accumulate((bool(runs) for _, runs in laid), initial=0))
        return ArcGraph(
            table=table,
            search=search,
            partition=partition,
            even=tuple(k * last // reached[-1] for k in reached) if long else (),
            longest=partial(longest_stage, problem),
        )

    def _pricer(self, rank: _Rank) -> Pricer:
        if rank not in self._pricers:
            self._pricers[rank] = self._made(rank)
        return self._pricers[rank]

    def _made(self, rank: _Rank) -> Pricer:
        problem, several = self.problem, len(self.stages)
        # with one rank all time is the longest rank's, unless its longest stage counts for more
        alone = several == 1 and not self.counts_stages
        make: Callable[..., Pricer] = Pricer
        if self.counts_stages:
            make = partial(
                SplitPricer,
                places={0: rank.places()},
                counting=Counting.of(problem),
                sync_share=1.0 / (1.0 + problem.bottleneck_weight),
                mean=self._dealt / several,
            )
        spare = _numbers(self._most[rank])
        return make(
            kinds=[StageKind(in_flight=0, free_bytes=rank.free_bytes, scale=1.0)],
            kind_of_stage=[0] * several,
            classes={0: [offer.table for offer in rank.offers]},
            compositions=np.pad(spare, ((0, 0), (sum(rank.sure), 0)), constant_values=1),
            weight=1.0 + (problem.bottleneck_weight if alone else 0.0),
            deadline=self.deadline,
        )

    def _ranks(self, layout: _Layout) -> list[_Laid]:
        problem = self.problem
        hops = [s * c for s, c in zip(problem.hop_scale, layout.cut_s, strict=True)]
        ranks = []
        for stages in self.stages:
            offers = [self._offer(kind, stages, [k]) for k in stages for kind in layout.sure[k]]
            runs = {
                run: [k for k in stages if run in layout.free[k]]
                for run in range(len(layout.spare))
            }
            reached = {run: own for run, own in runs.items() if own}
            apart = reached if self.counts_stages else {}
            capacity = problem.capacity_bytes[stages[0]]
            fixed = math.fsum(problem.stage_fixed_bytes[k] for k in stages)
            rank = _Rank(
                free_bytes=capacity + CAPACITY_TOLERANCE * abs(capacity) - fixed,
                cuts_s=tuple(math.fsum(hops[max(k - 1, 0) : k + 1]) for k in stages),
                sure=tuple(len(layout.sure[k]) for k in stages),
                offers=(
                    *offers,
                    *(
                        self._offer(layout.run_class[run], stages, own)
                        for run, own in reached.items()
                    ),
                ),
                apart=tuple(
                    tuple(
                        self._offer(layout.run_class[run], stages, [k]) if k in own else None
                        for k in stages
                    )
                    for run, own in apart.items()
                ),
            )
            ranks.append((rank, tuple(reached)))
        return ranks

    def _offer(self, kind: int, on_rank: Sequence[int], stages: Sequence[int]) -> _Offer:
        """What a class offers for a block on any of some stages of a rank."""
        problem = self.problem
        places = tuple(
            (on_rank.index(k), problem.time_scale[k], problem.in_flight[k], problem.stage_device[k])
            for k in stages
        )
        key = kind, places
        if key not in self._offers:
            options, origin = [], []
            for place, scale, in_flight, device in places:
                for index, option in enumerate(problem.classes[kind]):
                    if option.device != device:
                        continue
                    held = option.static_bytes + in_flight * option.saved_bytes
                    options.append(
                        BlockOption(
                            time_s=scale * option.time_s,
                            static_bytes=held,
                            saved_bytes=0.0,
                            sync_s=option.sync_s,
                            transient_bytes=option.transient_bytes,
                        )
                    )
                    origin.append((place, index))
            kept = _unbeaten(options)
            self._offers[key] = _Offer(
                block_class=kind,
                table=ClassTable(tuple(options[i] for i in kept)),
                origin=tuple(origin[i] for i in kept),
            )
        return self._offers[key]

    def _partition(self, ranks: Sequence[_Rank], ways: Ways) -> Partition:
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.num_stages)]
        for stages, rank, way in zip(self.stages, ranks, ways, strict=True):
            for number, option in way:
                offer = rank.offer(number)
                if offer is not None:
                    stage, own = offer.origin[option]
                    held[stages[stage]].append((offer.block_class, own))
        cuts = tuple(itertools.accumulate(len(stage) for stage in held[:-1]))
        return cuts, in_order(self.problem, cuts, held)


def _numbers(most: Sequence[int]) -> NDArray[np.intp]:
    """All rows of numbers up to the most of each, the last counting fastest."""
    rows = np.array(list(itertools.product(*(range(n + 1) for n in most))), dtype=np.intp)
    return rows.reshape(math.prod(n + 1 for n in most), len(most))


def _strides(most: Sequence[int]) -> NDArray[np.intp]:
    """What one more of each adds to the place of a row of `_numbers`."""
    return np.cumprod([1, *(n + 1 for n in most[:0:-1])], dtype=np.intp)[::-1][: len(most)]


def _rows(
    dealt: NDArray[np.intp], reached: tuple[int, ...], most: tuple[int, ...]
) -> NDArray[np.intp]:
    """The places among `_numbers` of the runs that a rank reaches; -1 where it has others."""
    own = dealt[:, list(reached)]
    there = own.sum(axis=1) == dealt.sum(axis=1)
    return np.where(there, own @ _strides(most), -1)


def _arcs(dealt: NDArray[np.intp], kinds: Sequence[_Laid]) -> list[Arcs]:
    """Per kind of rank, the arcs between the numbers of spare blocks that are dealt out."""
    states, runs = dealt.shape
    cuts_s = [math.fsum(rank.cuts_s) for rank, _ in kinds]
    if runs == 1:
        number = np.arange(states)
        return [
            DealtArcs(allowed=(number == 0) | bool(reached), once_s=cut_s)
            for (_, reached), cut_s in zip(kinds, cuts_s, strict=True)
        ]
    more = dealt[None, :] - dealt[:, None]
    allowed = np.asarray((more >= 0).all(axis=2))
    run = np.where(allowed, more @ _strides(dealt[-1].tolist()), 0)
    return [
        ChainArcs.of(run, allowed, np.broadcast_to(np.float64(cut_s), run.shape))
        for cut_s in cuts_s
    ]


def _unbeaten(options: Sequence[BlockOption]) -> list[int]:
    """The options that no other matches or beats in all; of equals the first."""
    if not options:
        return []
    numbers = np.array([option.numbers for option in options])
    no_more = (numbers[:, None] <= numbers[None, :]).all(axis=2)  # [rival, option]
    first = np.tri(len(options), k=-1, dtype=bool).T
    beaten = (no_more & (~no_more.T | first)).any(axis=0)
    return [int(i) for i in np.flatnonzero(~beaten)]
