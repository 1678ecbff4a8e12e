"""What a class takes where its bytes have a price: the least time for every size of what it holds.

The fastest sharding of a block is not the one that holds least: experts that all ranks hold need no
exchange. And what is not kept for the backward is run again. No option of a class is beyond the
corners found here; whatever weighs time, bytes held and bytes kept is least at one of them. Two
trades are found apart, and added: layouts against what they hold, by the exact least of both for
some prices of a byte (`SharedSharding`), and steps run again against what they make, each at its
least of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap
from math import inf

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Ref
from autopar.search.floors import Floors, hidden_share
from autopar.search.grid import Grid
from autopar.search.least_kept import least_seconds
from autopar.search.problems import ShardingProblems
from autopar.search.recompute import RecomputeProblem
from autopar.search.sharding import ShardingProblem
from autopar.search.state import accumulation_width
from solvers.hull import Line, corners
from solvers.partition import BlockOption

Array = NDArray[np.float64]

_DEAR = 1e4
_DEPTH = 2
_WORTH = 0.02


def keeps_one_less(grid: Grid) -> bool:
    """Whether what one of several micro-batches saved is not counted where gradients are."""
    pipe = grid.pipe
    return pipe.runs_backwards_last and pipe.micro_batches > 1 and not pipe.splits_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Corners of the seconds of a micro-batch and the bytes held, the seconds that a step takes
    once at the least, and the least that is held but gradients."""

    once_s: float
    state_bytes: float
    corners: tuple[tuple[float, float], ...]


@dataclass
class Frontiers:
    """The frontiers of the classes of one setting, each found once for all schedules of a grid."""

    problems: ShardingProblems
    floors: Floors
    _states: dict[object, _State | None] = field(default_factory=dict)
    _lines: dict[ShardingProblem, list[Line]] = field(default_factory=dict)
    _kept: dict[object, list[Line]] = field(default_factory=dict)
    _again: dict[int, RecomputeProblem] = field(default_factory=dict)

    def options(self, grid: Grid, class_index: int, device: int = 0) -> tuple[BlockOption, ...]:
        """Options of which some mix is no worse than any real one in any respect.

        Gradients may take the place of what one micro-batch saved: of several, where all backwards
        come last, it is left out (`keeps_one_less`), of one alone the gradients are. Counted among
        the bytes held is a block's part of the weights that it gathers to run, if all blocks share
        a rank.
        """
        key = (grid.base, class_index)
        if key not in self._states:
            self._states[key] = self._state(grid.base, class_index)
        problem, state = self.problems.of(grid, class_index), self._states[key]
        if problem not in self._lines:
            self._lines[problem] = self._keeps(grid.base, class_index)
        if state is None:
            return ()
        given, deferred = self.floors.kept_bytes(grid, class_index)
        least = float(max(given, deferred) if grid.pipe.splits_backward else given)
        less = keeps_one_less(grid)
        peak = self.floors.peak_bytes(grid, class_index)
        found = [
            (time_s + again_s, held, kept, state.state_bytes + peak - held if less else peak - kept)
            for time_s, held in state.corners
            for again_s, kept in corners(self._lines[problem], least)
        ]
        runs = min(running for *_, running in found) >= 0  # a mix of them would not do otherwise
        return tuple(
            BlockOption(
                time_s=time_s,
                static_bytes=held,
                saved_bytes=kept,
                sync_s=state.once_s,
                transient_bytes=running if runs else 0.0,
                device=device,
            )
            for time_s, held, kept, running in found
        )

    def _state(self, grid: Grid, class_index: int) -> _State | None:
        """Layouts against bytes held. A line holds for any mix of ZeRO choices of parameters."""
        trade = _Trade(self.problems, self.floors, grid, class_index)
        fast = trade.solve(0.0)
        if fast is None:
            return None
        lines = [fast.line]
        if trade.least_held < (1 - _WORTH) * fast.held:
            lean = trade.solve(_DEAR * max(fast.line[1], 1e-9) / fast.held)
            if lean is not None:
                lines += [lean.line, *_between(trade, fast, lean, _DEPTH)]
        return _State(
            once_s=trade.least_once_s,
            state_bytes=trade.least_state,
            corners=tuple(corners(lines, trade.least_held)),
        )

    def _keeps(self, grid: Grid, class_index: int) -> list[Line]:
        """Steps run again against what is kept: prices of a byte, and the least of both."""
        pricer = self.problems.pricer
        block = pricer.setting.chain.representative(class_index)
        space, prices = pricer.spaces.of(block, grid), pricer.prices(grid)
        storages, seconds = self.floors.storages(space).at(prices), least_seconds(space, prices)
        key = (id(space), storages.sizes, tuple(seconds.values()))
        if key not in self._kept:
            if id(space) not in self._again:
                saved, held = pricer.backwards.saved(block), pricer.setting.source_refs
                self._again[id(space)] = RecomputeProblem(storages, saved, held, seconds)
            self._kept[key] = self._again[id(space)].at(storages, seconds).lines()
        return self._kept[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    line: Line
    held: float

    @property
    def cost(self) -> float:
        """Seconds, without those for the bytes."""
        return self.line[1] - self.line[0] * self.held


class _Trade:
    """The least time of a block plus so much for what its parameters hold."""

    def __init__(
        self, problems: ShardingProblems, floors: Floors, grid: Grid, class_index: int
    ) -> None:
        pricer = problems.pricer
        block = pricer.setting.chain.representative(class_index)
        space = pricer.spaces.of(block, grid)
        self._problem = problems.of(grid, class_index)
        hidden = hidden_share(pricer, grid.pipeline)
        tables = floors.of_layouts(grid, block, space)
        seconds, bytes_held = list[Array](), list[Array]()
        self.least_held = self.least_state = self._least_more_s = self.least_once_s = 0.0
        blocks = len(pricer.setting.chain.blocks)
        for ref in block.parameters:
            held, kept, running, step_s, early_s, gather_s, summed = np.moveaxis(tables[ref], -1, 0)
            held = (held if grid.micro_batches > 1 else kept) + running / blocks
            dtype = pricer.setting.sources[ref.name].spec.dtype
            width = accumulation_width(pricer.setting, dtype, grid.micro_batches)
            time_s = (1.0 - hidden) * gather_s + pricer.memory_s(width) * summed
            seconds.append(time_s)
            bytes_held.append(held)
            self.least_held += float(held.min())
            self.least_state += float(kept.min())
            self._least_more_s += float(time_s.min())
            self.least_once_s += float((step_s + (1.0 - hidden) * early_s).min())
        ends = accumulate((time_s.shape[1] for time_s in seconds), initial=0)
        self._layouts = dict(zip(block.parameters, starmap(slice, pairwise(ends)), strict=True))
        nothing = [np.zeros((1, 0))]
        self._time_s = np.concatenate(seconds or nothing, axis=1)  # [ZeRO choice, layout of any]
        self._held = np.concatenate(bytes_held or nothing, axis=1)
        fastest = problems.fastest(grid, class_index)
        self.least_s = inf if fastest is None else max(fastest.bound, 0.0) + self._least_more_s

    def solve(self, price: float) -> _Point | None:
        """For a price of a byte; None where nothing is possible."""
        if self.least_s == inf:
            return None
        priced = self._time_s + price * self._held
        best, each = priced.argmin(axis=0), np.arange(priced.shape[1])
        found = self._problem.priced(self._by_parameter(priced[best, each]))
        if found is None:
            return None
        bound, layouts = found
        held = self._by_parameter(self._held[best, each])
        return _Point(
            line=(price, bound), held=sum(float(held[ref][at]) for ref, at in layouts.items())
        )

    def _by_parameter(self, values: Array) -> dict[Ref, Array]:
        return {ref: values[layouts] for ref, layouts in self._layouts.items()}


def _between(trade: _Trade, fast: _Point, lean: _Point, depth: int) -> Sequence[Line]:
    """Lines at prices for which two neighbours are as good as each other, and so on."""
    saved = fast.held - lean.held
    if not depth or saved <= _WORTH * fast.held or lean.cost <= fast.cost:
        return []
    middle = trade.solve((lean.cost - fast.cost) / saved)
    if middle is None:
        return []
    below = _between(trade, fast, middle, depth - 1)
    return [*below, middle.line, *_between(trade, middle, lean, depth - 1)]
