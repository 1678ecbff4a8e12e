"""Ranks of several stages whose longest counts beside their sum: how blocks are split among them.

A rank's blocks may be dealt out to its stages in many ways, of which those that leave one stage
much longer than the others are good for nothing. So the others are gone through one by one, each a
knapsack like that of a stage; all that are left out have a stage of so many blocks at the least,
and count for what that is worth (`partition_weighing`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from solvers.partition_balance import Offered, balanced
from solvers.partition_counting import Counting
from solvers.partition_dealing import most_of_one, near_even
from solvers.partition_frontier import ClassTable
from solvers.partition_outright import Choice, outright
from solvers.partition_pricing import Array, Price, Pricer, StageKind
from solvers.partition_weighing import Place, Weighing

_PRICED = 6
"""Splits that are priced, those first that may count the least; others are bounded."""
_FEW_BLOCKS = 8
"""Blocks of a rank up to which its splits are priced exactly."""
_MOVES = 8
"""Blocks that are moved at the most from the longest stage of the best split to the shortest."""
_THRESHOLDS = 2
"""Transient peaks that are tried to run more blocks, those first that may cost the least."""
_MANY = 256
"""Blocks of a run from which on splits are gone through of numbers near the mean of a rank alone;
other numbers are bounded."""
_NEAR = (0.6, 1.3)
_ROUNDING = 1e-9


class SplitPricer(Pricer):
    """Prices of ranks by the number of spare blocks of every run, with what they count for. Ranks
    have `mean` spare blocks in the mean.

    The options of prices are (offer, option): offers are the sure blocks, then the runs, anywhere
    on the rank, then the runs on each of its stages.
    """

    def __init__(
        self,
        *,
        kinds: Sequence[StageKind],
        kind_of_stage: Sequence[int],
        classes: Mapping[int, Sequence[ClassTable]],
        compositions: NDArray[np.intp],
        weight: float,
        deadline: float,
        places: Mapping[int, Sequence[Place]],
        counting: Counting,
        sync_share: float,
        mean: float,
    ) -> None:
        super().__init__(
            kinds=kinds,
            kind_of_stage=kind_of_stage,
            classes=classes,
            compositions=compositions,
            weight=weight,
            deadline=deadline,
        )
        self.places, self.counting, self.sync_share = places, counting, sync_share
        self.width = max(map(len, places.values()))
        self.num_runs = len(next(iter(places.values()))[0].runs)
        self.num_sure = compositions.shape[1] - self.num_runs
        self.reached = {kind: self._reached(own) for kind, own in places.items()}
        self.near = self._near(mean)
        self.splits, splits = self._all_splits()
        self.even = Pricer(
            kinds=kinds,
            kind_of_stage=kind_of_stage,
            classes={
                kind: [*classes[kind][: self.num_sure], *self._slots(own)]
                for kind, own in places.items()
            },
            compositions=splits,
            weight=weight,
            deadline=deadline,
        )
        self._bounds: dict[int, tuple[Array, Array]] = {}
        self._weighing = Weighing(
            even=self.even, places=places, counting=counting, sure=self.num_sure
        )

    def _reached(self, places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
        """Per run, the stages that reach it."""
        return tuple(
            tuple(p for p, place in enumerate(places) if place.runs[run] is not None)
            for run in range(self.num_runs)
        )

    def _slots(self, places: Sequence[Place]) -> Iterator[ClassTable]:
        """The tables of every run on every stage; without options where it is not reached."""
        for run, place in itertools.product(range(self.num_runs), range(self.width)):
            table = places[place].runs[run] if place < len(places) else None
            yield table or ClassTable(())

    def _near(self, mean: float) -> NDArray[np.bool_]:
        """The compositions of which splits are gone through."""
        number = self.compositions[:, self.num_sure :].sum(axis=1)
        near = (number >= _NEAR[0] * mean) & (number <= _NEAR[1] * mean + 1)
        return np.asarray(near | (mean * len(self.kind_of_stage) < _MANY))

    def _all_splits(self) -> tuple[list[NDArray[np.intp]], NDArray[np.intp]]:
        """Per composition the splits that are gone through, and all of these."""
        found: dict[tuple[int, ...], int] = {}
        own = []
        for counts, near in zip(
            self.compositions[:, self.num_sure :].tolist(), self.near.tolist(), strict=True
        ):
            if not near:
                own.append(np.zeros(0, dtype=np.intp))
                continue
            rows = set()
            for reached in sorted(set(self.reached.values())):
                each = [
                    near_even(n, places, self.width)
                    for n, places in zip(counts, reached, strict=True)
                ]
                rows |= {tuple(itertools.chain(*parts)) for parts in itertools.product(*each)}
            own.append(np.array([found.setdefault(row, len(found)) for row in sorted(rows)]))
        splits = np.array(list(found), dtype=np.intp).reshape(len(found), -1)
        sure = np.broadcast_to(self.compositions[:1, : self.num_sure], (len(splits), self.num_sure))
        return own, np.concatenate([sure, splits], axis=1)

    def bounds(self, kind: int) -> tuple[Array, Array]:
        """See `Pricer.bounds`: a way for every split, and one for all that are left out."""
        if kind not in self._bounds:
            time_s = self.even.lower_time(kind)
            counts_s = self._least_counts(kind, time_s)
            width = max(map(len, self.splits)) + 1
            shape = width, len(self.compositions)
            times, counts = np.full(shape, np.inf), np.full(shape, np.inf)
            for composition, rows in enumerate(self.splits):
                times[: len(rows), composition] = time_s[rows]
                counts[: len(rows), composition] = counts_s[rows]
            times[-1], counts[-1] = self._left_out(kind)
            counts = np.maximum(counts, self._weighing.of_any(kind, self.compositions))
            counts[np.isinf(times)] = np.inf
            self._bounds[kind] = times, counts
        return self._bounds[kind]

    def _least_counts(self, kind: int, time_s: Array) -> Array:
        """What every split counts for at the least."""
        places = self.places[self.kinds[kind].device]
        fastest = np.array(
            [[0.0 if t is None else float(t.time.min()) for t in place.runs] for place in places]
        ).reshape(len(places), self.num_runs)
        number = self.even.compositions[:, self.num_sure :]
        number = number.reshape(len(number), self.num_runs, self.width)[:, :, : len(places)]
        work_s = np.einsum("srp,pr->sp", number, fastest)
        work_s += [sum(float(t.time.min()) for t in place.sure) for place in places]
        cuts_s = np.array([place.cuts_s for place in places])
        if self.counting.cuts_in_max:
            work_s += cuts_s
        return self.counting.least(time_s, work_s.max(axis=1), cuts_s)

    def _left_out(self, kind: int) -> tuple[Array, Array]:
        """The least time and count of the splits that are not gone through; inf where none is."""
        device = self.kinds[kind].device
        some = [any(self._long(device, row)) for row in range(len(self.compositions))]
        time_s = np.where(some, self.lower_time(kind), np.inf)
        cuts_s = np.array([place.cuts_s for place in self.places[device]])
        return time_s, self.counting.least(time_s, np.zeros(len(time_s)), cuts_s)

    def _long(self, device: int, composition: int) -> Iterator[tuple[int, int]]:
        """(run, number) of blocks of one of the runs that some stage has at the least in a split
        that is not gone through."""
        for run, stages in enumerate(self.reached[device]):
            n = int(self.compositions[composition, self.num_sure + run])
            if not self.near[composition]:
                number = -(-n // max(len(stages), 1))
            elif len(stages) < 2:
                continue
            else:
                number = most_of_one(n, len(stages)) + 1
            if number <= n:
                yield run, number

    def price(self, kind: int, composition: int) -> tuple[Price, ...]:
        """Ways to run so many blocks, those first that count the least, and bounds on others."""
        key = (kind, composition)
        if key not in self._prices:
            self._prices[key] = tuple(self._split_prices(kind, composition))
        return self._prices[key]

    def _split_prices(self, kind: int, composition: int) -> list[Price]:
        times, counts = (values[:, composition] for values in self.bounds(kind))
        rows = self.splits[composition]
        counts = counts.copy()
        if len(rows):
            weighed = self._weighing.of_splits(kind, self.even.compositions[rows])
            counts[: len(rows)] = np.maximum(counts[: len(rows)], weighed)
        long = [
            self._weighing.of_long(kind, self.compositions[composition], *each)
            for each in self._long(self.kinds[kind].device, composition)
        ]
        counts[-1] = max(counts[-1], min(long, default=0.0))
        least_sync = float(self.least_sync(kind)[composition])
        ways: list[Price] = []
        bounds: list[Price] = []
        priced = 0
        for way in np.lexsort((times, counts)).tolist():
            bound = Price(
                time_s=float(times[way]),
                sync_s=least_sync,
                options=None,
                count_s=float(counts[way]),
            )
            if math.isinf(bound.time_s):
                break
            if any(_beats(own, bound) for own in ways):
                continue
            if way == len(times) - 1 or priced == _PRICED:
                bounds.append(bound)
                continue
            priced += 1
            own, left = self._exact(kind, int(rows[way]), bound)
            ways += own
            bounds += left
        if ways and self._is_large(self.compositions[composition]):
            ways += self._moved(kind, min(ways, key=lambda price: price.count_s))
        ways.sort(key=lambda price: (price.count_s, price.time_s, price.sync_s))
        return ways + [b for b in bounds if not any(_beats(own, b) for own in ways)]

    def _is_large(self, counts: NDArray[np.intp]) -> bool:
        """Whether so many blocks are not priced exactly."""
        return int(counts.sum()) > _FEW_BLOCKS

    def _moved(self, kind: int, way: Price) -> list[Price]:
        """Better ways by other splits: a block is moved from the longest stage of the best to the
        shortest for as long as that helps."""
        found: list[Price] = []
        for _ in range(_MOVES):
            split = self._with_one_moved(kind, way)
            if split is None:
                break
            ways = [self._counted(kind, price) for price in self._balanced(kind, split)]
            best = min(ways, key=lambda price: price.count_s, default=way)
            if best.count_s >= way.count_s:
                break
            found += ways
            way = best
        return found

    def _with_one_moved(self, kind: int, way: Price) -> NDArray[np.intp] | None:
        """The split of a way with a block of the longest stage on the shortest; None where they
        share no run."""
        device, more = self.kinds[kind].device, self.num_runs
        options = way.options() if way.options else []
        options = [(offer - more * (offer >= self.num_sure), option) for offer, option in options]
        work_s = self._work_s(device, options)
        longest, shortest = int(work_s.argmax()), int(work_s.argmin())
        split = np.bincount(
            [offer for offer, _ in options], minlength=self.even.compositions.shape[1]
        )
        for run, reached in enumerate(self.reached[device]):
            first = self.num_sure + run * self.width
            if longest in reached and shortest in reached and split[first + longest]:
                split[first + longest] -= 1
                split[first + shortest] += 1
                return split
        return None

    def _balanced(self, kind: int, split: NDArray[np.intp]) -> list[Price]:
        """Ways to run a split in about the least that it counts for."""
        stage = self.kinds[kind]
        tables, places = self.even.classes[stage.device], self.places[stage.device]
        present = [(c, int(n)) for c, n in enumerate(split) if n]
        thresholds = self.even.own_thresholds(split.tolist(), stage.device)
        cuts_s = np.array([place.cuts_s for place in places])
        ways = []
        ordered = self.even.ordered(stage, present, thresholds, 0.0)
        for _, threshold in ordered[:_THRESHOLDS]:
            offers, allowed = [], []
            for offer, count in present:
                table = tables[offer]
                some = np.flatnonzero(table.allowed(stage.device, threshold))
                allowed.append(some)
                offers.append(
                    Offered(
                        stage=self._weighing.place(stage.device, offer),
                        count=count,
                        time=table.time[some] + self.sync_share * table.sync[some],
                        used=table.used(stage.in_flight)[some],
                    )
                )
            free = stage.free_bytes - threshold
            found = balanced(
                offers, len(places), free, lambda work_s: self.counting(work_s, cuts_s)
            )
            if found is None:
                continue
            options = [(present[i][0], int(allowed[i][option])) for i, option in found]
            ways.append(
                Price(
                    time_s=math.fsum(float(tables[i].time[o]) for i, o in options),
                    sync_s=math.fsum(float(tables[i].sync[o]) for i, o in options),
                    options=functools.partial(list, options),
                )
            )
        return ways

    def _exact(self, kind: int, split: int, bound: Price) -> tuple[list[Price], list[Price]]:
        """The ways of a split, and bounds on those that may count for less than they do."""
        counts = self.even.compositions[split]
        if self._is_large(counts):
            return [self._counted(kind, price) for price in self._balanced(kind, counts)], [bound]
        found = self._outright(kind, counts)
        if found is not None:
            return found, []
        ways, bounds = [], []
        for price in self.even.price(kind, split):
            if price.options is not None:
                ways.append(self._counted(kind, price))
            bounds.append(dataclasses.replace(price, count_s=bound.count_s, options=None))
        return ways, bounds

    def _outright(self, kind: int, split: NDArray[np.intp]) -> list[Price] | None:
        """All ways to run a split that may be of use; None where there are too many to tell."""
        stage = self.kinds[kind]
        tables, places = self.even.classes[stage.device], self.places[stage.device]
        present = [(c, int(n)) for c, n in enumerate(split) if n]
        cuts_s = np.array([place.cuts_s for place in places])
        choices = [
            Choice(
                stage=self._weighing.place(stage.device, offer),
                count=count,
                time=tables[offer].time,
                sync=tables[offer].sync,
                used=tables[offer].used(stage.in_flight),
                transient=tables[offer].transient,
            )
            for offer, count in present
        ]
        found = outright(
            choices, len(places), stage.free_bytes, lambda work_s: self.counting(work_s, cuts_s)
        )
        if found is None:
            return None
        return [
            self._counted(
                kind,
                Price(
                    time_s=way.time_s,
                    sync_s=way.sync_s,
                    options=functools.partial(
                        list, [(present[i][0], option) for i, option in way.options]
                    ),
                ),
            )
            for way in found
        ]

    def _counted(self, kind: int, price: Price) -> Price:
        """A way of the even splits with what it counts for, by the numbers of offers here."""
        device = self.kinds[kind].device
        cuts_s = np.array([place.cuts_s for place in self.places[device]])
        work_s = self._work_s(device, price.options() if price.options else [])
        return dataclasses.replace(
            price,
            count_s=float(self.counting(work_s, cuts_s)),
            options=functools.partial(self._renumbered, price),
        )

    def _work_s(self, device: int, options: Sequence[tuple[int, int]]) -> Array:
        """What the blocks of every stage take."""
        work_s = np.zeros(len(self.places[device]))
        for offer, option in options:
            work_s[self._weighing.place(device, offer)] += self.even.classes[device][offer].time[
                option
            ]
        return work_s

    def _renumbered(self, price: Price) -> list[tuple[int, int]]:
        options = price.options() if price.options else []
        more = self.num_runs
        return [(offer + more * (offer >= self.num_sure), option) for offer, option in options]


def _beats(way: Price, bound: Price) -> bool:
    return (
        way.time_s <= bound.time_s * (1 + _ROUNDING)
        and way.count_s <= bound.count_s * (1 + _ROUNDING)
        and way.sync_s <= bound.sync_s * (1 + _ROUNDING)
    )
