"""What no option of a class is below: its least time, bytes and sums, for every ZeRO choice.

Options are many and take sharding problems to find; their floors take none, and tell which grids
have to gather weights, or cannot hold what they have to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.costs.calibration import curve_of
from autopar.costs.compute import memory_s
from autopar.ir.blocks import Block
from autopar.ir.graph import Ref, Source
from autopar.ir.mesh import batch_count
from autopar.ir.placement import Layout
from autopar.rules.index_expr import LOCAL
from autopar.search.block import BlockSpace
from autopar.search.footprints import Footprints
from autopar.search.grid import Grid
from autopar.search.least_kept import LeastStorages, PricedStorages
from autopar.search.least_peak import LeastPeak
from autopar.search.options import OVERLAPS, cold_share
from autopar.search.pricer import Pricer
from autopar.search.prices import Prices
from autopar.search.state import (
    PREFETCHED,
    ParameterState,
    ZeroChoice,
    accumulated_numel,
    accumulates,
    accumulation_width,
    again_shares,
    gather_seconds,
    optimizer_seconds,
    parameter_bytes,
    parameter_state,
    shared_choices,
    sync_kinds,
    sync_seconds,
    zero_choices,
)
from solvers.partition import BlockOption

Array = NDArray[np.float64]


class Floor(NamedTuple):
    """The least that the parameters of a class take under one ZeRO choice, whatever their layouts.

    `held_bytes` all the time, `state_bytes` of them no gradients, and `running_bytes` besides while
    the block runs; a step `once_s`, and `early_s` that may hide behind compute; a micro-batch
    `gather_s`, which may hide, and what adding `summed` elements of gradients takes.
    """

    held_bytes: float = 0.0
    state_bytes: float = 0.0
    running_bytes: float = 0.0
    once_s: float = 0.0
    early_s: float = 0.0
    gather_s: float = 0.0
    summed: float = 0.0


class _Parameters(NamedTuple):
    """The least of all parameters of a block, and the elements of gradients that are added up by
    the dtype of the parameters."""

    least: Floor
    summed: Mapping[str, float]


class _Kind(NamedTuple):
    """A parameter as its floors depend on it, with its layouts; whether several blocks read it, and
    whether the backward does."""

    ref: Ref
    source: Source
    offered: tuple[Layout, ...]
    shared: bool
    kept: bool


class _Kept(NamedTuple):
    """Bytes that a class saves on a grid at the least, that it holds for weight gradients computed
    later, and that are there at the peak of its backward."""

    saved_bytes: int
    deferred_bytes: int
    peak_bytes: int


@dataclass
class Floors:
    """The floors of the classes of one setting, each found once for all schedules of a grid."""

    pricer: Pricer
    _kept: dict[object, _Kept] = field(default_factory=dict)
    _choices: dict[object, tuple[_Parameters, ...]] = field(default_factory=dict)
    _parameters: dict[object, dict[int, Array]] = field(default_factory=dict)
    _kinds: dict[object, _Kind] = field(default_factory=dict)
    _of_block: dict[object, list[tuple[Ref, _Kind]]] = field(default_factory=dict)
    _storages: dict[int, LeastStorages] = field(default_factory=dict)
    _moments: dict[int, tuple[_Deferred, LeastPeak]] = field(default_factory=dict)

    def options(
        self, grid: Grid, class_index: int, least_s: float, device: int = 0
    ) -> tuple[BlockOption, ...]:
        """Options of which one is no worse in any respect than any real one, where no pass of both
        directions takes less than `least_s`; `device` counts the homes of the grid's stages."""
        saved, deferred, peak = self._kept_on(grid, class_index)
        hidden = hidden_share(self.pricer, grid.pipe.num_stages)
        splits = grid.pipe.splits_backward
        replaced = grid.pipe.runs_backwards_last and not splits
        if splits:
            saved = max(saved, deferred)
        options = []
        parameters = self._of_parameters(grid, class_index)
        widths = {
            dtype: accumulation_width(self.pricer.setting, dtype, grid.micro_batches)
            for dtype in parameters[0].summed
        }
        for each, summed in parameters:
            once_s = least_s + each.gather_s - hidden * min(each.gather_s, least_s)
            moved = sum(widths[dtype] * numel for dtype, numel in summed.items())
            state, held = each.held_bytes, each.held_bytes + saved
            if replaced:  # gradients come as what is saved goes, once
                state, held = each.state_bytes, max(each.held_bytes, float(saved))
            options.append(
                BlockOption(
                    time_s=once_s + memory_s(moved, self.pricer.device, kernels=0),
                    static_bytes=held - saved,
                    saved_bytes=float(saved),
                    # what is not kept is made again
                    transient_bytes=max(0.0, state + peak - held) + each.running_bytes,
                    sync_s=each.once_s + (1.0 - hidden) * each.early_s,
                    device=device,
                )
            )
        return tuple(dict.fromkeys(options))

    def kept_bytes(self, grid: Grid, class_index: int) -> tuple[int, int]:
        """Bytes that are saved at the least, and those held for weight gradients computed later."""
        saved, deferred, _ = self._kept_on(grid, class_index)
        return saved, deferred

    def peak_bytes(self, grid: Grid, class_index: int) -> int:
        """What the backward of a block holds at its peak, beside parameters."""
        return self._kept_on(grid, class_index).peak_bytes

    def _kept_on(self, grid: Grid, class_index: int) -> _Kept:
        """The same on all meshes with whose sizes nothing of the block changes its own."""
        pricer = self.pricer
        block = pricer.setting.chain.representative(class_index)
        space = pricer.spaces.of(block, grid)
        samples = 0 if self.storages(space).sized(pricer.prices(grid)) else batch_count(grid.names)
        key = (id(space), grid.micro_batch, grid.sizes[samples:])
        if key not in self._kept:
            prices = pricer.prices(grid)
            storages = self.storages(space).at(prices)
            if id(space) not in self._moments:
                self._moments[id(space)] = self._moments_of(block, space)
            deferred, peak = self._moments[id(space)]
            self._kept[key] = _Kept(
                _saved_bytes(pricer, block, storages),
                deferred.nbytes(prices),
                peak.nbytes(prices, storages),
            )
        return self._kept[key]

    def storages(self, space: BlockSpace) -> LeastStorages:
        """The storages of a block in any sharding."""
        if id(space) not in self._storages:
            self._storages[id(space)] = LeastStorages(space, self.pricer.setting.storage)
        return self._storages[id(space)]

    def _moments_of(self, block: Block, space: BlockSpace) -> tuple[_Deferred, LeastPeak]:
        pricer, setting = self.pricer, self.pricer.setting
        return _Deferred(pricer, block, space), LeastPeak(
            space, pricer.backwards.saved(block), setting.storage, setting.source_refs
        )

    def _of_parameters(self, grid: Grid, class_index: int) -> tuple[_Parameters, ...]:
        """By ZeRO choice; micro-batches of any size and number above one have the same."""
        key = (class_index, grid.mesh, grid.pipeline, grid.micro_batches > 1)
        if key not in self._choices:
            block = self.pricer.setting.chain.representative(class_index)
            space = self.pricer.spaces.of(block, grid)
            self._choices[key] = self._least(grid, block, space)
        return self._choices[key]

    def _least(self, grid: Grid, block: Block, space: BlockSpace) -> tuple[_Parameters, ...]:
        by_dtype: dict[str, Array] = {}
        for ref, floors in self.of_layouts(grid, block, space).items():
            dtype = self.pricer.setting.sources[ref.name].spec.dtype
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + floors.min(axis=1)
        whole = sum(
            by_dtype.values(), np.zeros((len(self._zero_choices(grid)), len(Floor._fields)))
        )
        least = [Floor(*row) for row in whole.tolist()]
        summed = {
            dtype: [Floor(*x).summed for x in own.tolist()] for dtype, own in by_dtype.items()
        }
        return tuple(
            _Parameters(each, {dtype: own[index] for dtype, own in summed.items()})
            for index, each in enumerate(least)
        )

    def of_layouts(self, grid: Grid, block: Block, space: BlockSpace) -> dict[Ref, Array]:
        """The same for each parameter of a block and each of its layouts: [ZeRO choice, layout,
        field of `Floor`]; those of several blocks under any choice that they may have."""
        on = (grid.mesh, grid.pipeline, grid.micro_batches > 1)
        known = self._parameters.setdefault(on, {})
        found = {}
        for ref, kind in self._kinds_of(block, space):
            if id(kind) not in known:
                known[id(kind)] = self._of_kind(grid, kind)
            found[ref] = known[id(kind)]
        return found

    def _kinds_of(self, block: Block, space: BlockSpace) -> list[tuple[Ref, _Kind]]:
        """The parameters of a block, each with the first like it of all blocks."""
        key = (block.class_index, id(space))
        if key not in self._of_block:
            pricer = self.pricer
            several = pricer.setting.shared_positions[block.class_index]
            layouts = {source.name: offered for source, offered in space.parameters}
            kept = pricer.backwards.parameters(block)
            found = self._of_block[key] = []
            for position, ref in enumerate(block.parameters):
                source, offered = pricer.setting.sources[ref.name], layouts[ref.name]
                own = _Kind(ref, source, offered, position in several, ref in kept)
                alike = (source.spec, source.trainable, source.kind, *own[2:])
                found.append((ref, self._kinds.setdefault(alike, own)))
        return self._of_block[key]

    def _of_kind(self, grid: Grid, kind: _Kind) -> Array:
        pricer, prices = self.pricer, self.pricer.prices(grid)
        known: dict[ParameterState, Floor] = {}

        def floor(layout: Layout, choice: ZeroChoice) -> Floor:
            state = parameter_state(kind.source, layout, prices, choice)
            if state not in known:
                known[state] = _parameter_floor(pricer, grid, kind.ref, state, kind.kept)
            return known[state]

        choices = offered = self._zero_choices(grid)
        if kind.shared:
            offered = shared_choices(choices)
        floors = np.array([[floor(x, each) for x in kind.offered] for each in offered], dtype=float)
        return floors.min(axis=0)[None].repeat(len(choices), axis=0) if kind.shared else floors

    def _zero_choices(self, grid: Grid) -> tuple[ZeroChoice, ...]:
        return zero_choices(self.pricer.prices(grid), self.pricer.setting.pins.zero)


def hidden_share(pricer: Pricer, stages: int) -> float:
    """The share of what goes beside compute that costs no time, see `ClassOption`."""
    if not OVERLAPS.get(pricer.device.kind, True):
        return 0.0
    return curve_of(pricer.device).hidden * (1.0 - cold_share(pricer.setting, stages))


def _parameter_floor(
    pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState, kept: bool
) -> Floor:
    source = pricer.setting.sources[ref.name]
    gather_s = once_s = early_s = summed = running = 0.0
    prices = pricer.prices(grid)
    if state.level == 3:
        running += PREFETCHED * prices.local_bytes(ref, state.layout)
        passes = 1.0 + kept * min(again_shares(pricer.setting, grid))
        gather_s += passes * gather_seconds(pricer, grid, ref, state)
    if source.trainable:
        for each, seconds in sync_seconds(pricer, grid, ref, state):
            kinds = sync_kinds(pricer.setting, state.level, each[0])
            early_s += seconds * ("early" in kinds)
            once_s += seconds * ("sync" in kinds and "early" not in kinds)
            gather_s += seconds * ("reduce" in kinds)
        summed = float(accumulated_numel(pricer, grid, ref, state))
        once_s += optimizer_seconds(pricer, grid, ref, state)
        if state.level >= 2 and not accumulates(pricer.setting, grid, state.level):
            whole = ParameterState(layout=state.layout)
            running += parameter_bytes(pricer, ref, whole, prices, grid).gradients
    held = parameter_bytes(pricer, ref, state, prices, grid)
    return Floor(sum(held), sum(held) - held.gradients, running, once_s, early_s, gather_s, summed)


def _saved_bytes(pricer: Pricer, block: Block, storages: PricedStorages) -> int:
    """What is kept of the values that a block is given: no way to run it again makes them."""
    given = [value.ref for value in pricer.backwards.saved(block).values if value.kind != "made"]
    return sum(map(storages.value_bytes, given))


class _Deferred:
    """What weight gradients that are computed later need: inputs, and gradients of outputs."""

    def __init__(self, pricer: Pricer, block: Block, space: BlockSpace) -> None:
        products, inputs = pricer.backwards.products(block), dict[Ref, set[Layout]]()
        made: list[tuple[Ref, set[Layout]]] = []
        for node, options in zip(space.nodes, space.options, strict=True):
            local = all(s.kernel == LOCAL.name for option in options for s in option.strategies)
            if node.name not in products or not (local and options):
                continue
            made.append((Ref(node.name), {option.outputs[0] for option in options}))
            for index in products[node.name].held:
                read = inputs.setdefault(node.inputs()[index], set())
                read |= {option.inputs[index] for option in options}
        self._held = Footprints([(space.specs[ref], x) for ref, x in (*made, *inputs.items())])

    def nbytes(self, prices: Prices) -> int:
        """Its least bytes on a mesh."""
        return int(self._held.nbytes(prices).sum())
