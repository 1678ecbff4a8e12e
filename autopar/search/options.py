"""Ways to run a block class on a grid: a few that trade time for memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.costs.calibration import curve_of
from autopar.costs.memory import state_bytes
from autopar.costs.optimizer_state import step_temporaries
from autopar.ir.blocks import Block
from autopar.ir.graph import DTYPE_BYTES, Ref, Source
from autopar.ir.placement import Layout
from autopar.ir.precision import grad_dtype, stored_dtype
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.plan.plan import NodeChoice, Recompute
from autopar.search.block_cost import BlockCost
from autopar.search.grid import Grid
from autopar.search.pipelines import Pipeline
from autopar.search.pricer import Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.recompute import Again
from autopar.search.setting import Setting
from autopar.search.sharding import Sharding, Upkeep, pareto_shardings, sync_shares_s
from autopar.search.state import (
    UNSPLIT,
    StateCost,
    States,
    ZeroChoice,
    batch_axes,
    parameter_states,
    state_cost,
    zero_choices,
)
from solvers.partition import BlockOption

OVERLAPS: dict[str, bool] = {"cuda": True, "cpu": False}
"""Whether communication runs beside compute, by `DeviceSpec.kind`; other kinds are as `cuda`."""


_FEW_BLOCKS = 8
"""Up to so many, what lies between the corners of a hull may not be mixed from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBytes:
    """What summing gradients and stepping the optimizer hold: for every block, and once a stage."""

    every_bytes: int = 0
    once_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassOption:
    """One way to run the blocks of a class: a sharding, what of it is run again, and how the
    state of its parameters lies.

    Weights that lie in shards (ZeRO level 3) are gathered one block ahead, so that gathering hides
    behind the compute of the block before, taken to be as long as this one's own; only what is
    longer, and a share of 1 - `hidden`, adds to the time. It does not hide behind other
    collectives, nor on devices whose communication takes the cores that compute (`OVERLAPS`), nor
    for the first block of a stage's forward or backward, which has none before it: `cold` is the
    share of such blocks among those that have weights, charged to all of these alike, since cuts
    are not known yet. `home` counts the homes of a grid's stages: the option is for those on it.
    """

    choices: tuple[NodeChoice, ...]
    states: States
    again: Again
    cost: BlockCost
    state: StateCost
    bound_s: float
    overlaps: bool = True
    hidden: float = 1.0
    cold: float = 0.0
    update: UpdateBytes = UpdateBytes()
    home: int = 0

    @property
    def zero(self) -> int:
        """The highest ZeRO level of a parameter of the block."""
        return max((state.level for _, state in self.states), default=0)

    @property
    def forward_s(self) -> float:
        """Forward seconds, with the part of gathering weights that does not hide."""
        return self.cost.forward_s + self._exposed_s(
            self.state.gather_s, self.cost.forward_compute_s
        )

    @property
    def backward_s(self) -> float:
        """Backward seconds, with what is run again, adding up gradients, and gathering and
        reducing that do not hide."""
        compute_s = self.cost.backward_compute_s + self.again.compute_s
        beside_s = self.state.gather_again_s(self.again.weights) + self.state.reduce_s
        own_s = self.cost.backward_s + self.again.time_s + self.state.sum_s
        return own_s + self._exposed_s(beside_s, compute_s)

    def _exposed_s(self, gather_s: float, compute_s: float) -> float:
        hides = self.hidden * (1.0 - self.cold) if self.overlaps else 0.0
        return gather_s - hides * min(gather_s, compute_s)

    @property
    def sync_s(self) -> float:
        """Seconds to sum gradients, with the part beside the last backward that does not hide."""
        compute_s = self.cost.backward_compute_s + self.again.compute_s
        left_s = max(0.0, compute_s - self.state.gather_again_s(self.again.weights))
        early_s = self.state.early_s
        return self.state.sync_s - early_s + self._exposed_s(early_s, left_s)

    @property
    def saved_bytes(self) -> int:
        """Bytes held per micro-batch in flight."""
        return self.again.kept_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes held while the block runs, beside what it saves."""
        peaks = self.again.peaks
        running = max(peaks.forward_bytes, peaks.backward_bytes) - self.saved_bytes
        return running + self.state.transient_bytes

    def as_option(self, pipe: Pipeline | None = None) -> BlockOption:
        """The option as the partition problem sees it, by default with whole backwards.

        Between the parts of a split backward something else is held than before; the larger counts
        for both. Without a flush a stage updates its weights after every micro-batch, and keeps a
        copy of them for each that is in flight.
        """
        work_s, update_s = self.forward_s + self.backward_s, self.update_s
        saved = self.saved_bytes
        static, transient = self._held(pipe)
        if pipe is not None and pipe.splits_backward:
            work_s, saved = work_s + self.cost.apart_s, max(saved, self.cost.deferred_bytes)
        if pipe is not None and not pipe.flushes:
            saved, work_s, update_s = saved + self.weight_bytes, work_s + update_s, 0.0
        return BlockOption(
            time_s=work_s,
            static_bytes=float(static),
            saved_bytes=float(saved),
            sync_s=update_s,
            transient_bytes=float(transient),
            device=self.home,
        )

    def _held(self, pipe: Pipeline | None) -> tuple[int, int]:
        """Bytes held all the time, beside what is saved, and while the block runs, as much as a
        stage may need of them.

        Where all forwards of a stage come before its first backward, the gradients of a block come
        as what its last micro-batch saved goes: it holds the larger of both. At the end of a step,
        with its gradients, a block holds `update.every_bytes` in place of what it saved.
        """
        held, saved, peaks = self.state.held, self.saved_bytes, self.again.peaks
        state = held.terms.total_bytes - held.gradients
        with_gradients, transient = held.gradients, self.transient_bytes
        if pipe is not None and pipe.splits_backward:
            transient += max(0, peaks.split_bytes - peaks.backward_bytes)
        elif pipe is not None and pipe.runs_backwards_last:
            with_gradients = max(0, held.gradients - saved)
            running = [
                peaks.forward_bytes - saved,
                peaks.first_backward_bytes - max(saved, held.gradients),
            ]
            if pipe.micro_batches > 1:  # gradients of the first are there when the second runs
                running.append(peaks.backward_bytes - max(saved, 2 * saved - held.gradients))
            transient = max(running) + self.state.transient_bytes
        at_end = held.gradients + self.update.every_bytes
        room = max(0, with_gradients + saved - at_end)
        static = state + max(with_gradients, at_end - saved)
        return static, max(transient, self.update.once_bytes - room)

    @property
    def update_s(self) -> float:
        """Seconds to sum gradients and step the optimizer."""
        return self.sync_s + self.state.optimizer_s

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are computed with."""
        return self.state.held.weights


def _update_bytes(pricer: Pricer, grid: Grid, states: States, block: Block) -> UpdateBytes:
    """Of one block in a stage that has its even share of all gradients."""
    setting, prices, by_name = pricer.setting, pricer.prices(grid), dict(states)
    training = setting.training
    sizes, widened = [], 0
    for ref in block.parameters:
        source = setting.sources[ref.name]
        if source.trainable:
            state = by_name[source.fqn]
            numel = prod(prices.local_shape(ref, state.stored or state.layout))
            dtype = stored_dtype(training.precision, source.spec.dtype, trainable=True)
            summed = grad_dtype(training.precision, source.spec.dtype)
            sizes.append(numel * DTYPE_BYTES[dtype])
            widened += numel * (DTYPE_BYTES[dtype] - DTYPE_BYTES[summed])
    bucket = 0
    if batch_axes(prices):
        share = setting.whole_state.gradients // (grid.pipeline * grid.tensor)
        # At level 2 the whole gradients wait for their bucket, and are then copied into it.
        level = max((state.level for _, state in states), default=0)
        copies = 2 if level == 2 and grid.micro_batches == 1 else int(level < 3)
        bucket = copies * min(DEFAULT_CAP_BYTES, share)
    every, once = step_temporaries(
        training.optimizer, training.optimizer_kwargs, sizes, device_kind=pricer.device.kind
    )
    return UpdateBytes(every_bytes=max(0, widened) + every, once_bytes=max(bucket, once))


def cold_share(setting: Setting, stages: int) -> float:
    """The share of first blocks of so many stages among the blocks that have weights."""
    return min(1.0, stages / max(setting.weighted_blocks, 1))


def class_options(
    problems: ShardingProblems,
    grid: Grid,
    class_index: int,
    fixed: Mapping[str, Layout],
    shared: ZeroChoice = UNSPLIT,
) -> tuple[ClassOption, ...]:
    """The options of a class that are best for some price of memory; in a chain of few blocks, all
    that no other beats.

    Empty if the pins leave no sharding. `fixed` has layouts of parameters shared with other
    classes, `shared` the ZeRO choice of those that several blocks read.
    """
    pricer, setting = problems.pricer, problems.pricer.setting
    block = setting.chain.representative(class_index)
    cold = cold_share(setting, grid.pipe.num_stages)
    prices = pricer.prices(grid)
    found: list[ClassOption] = []
    for sharding in _shardings(problems, grid, class_index, fixed):
        cost = problems.cost(grid, class_index, sharding, fixed)
        for zero in zero_choices(prices, setting.pins.zero):
            states = parameter_states(setting, block, sharding.parameters, prices, zero, shared)
            state = state_cost(pricer, block, states, grid)
            update = _update_bytes(pricer, grid, states, block)
            found += [
                ClassOption(
                    choices=sharding.choices,
                    states=states,
                    again=again,
                    cost=cost,
                    state=state,
                    bound_s=sharding.bound,
                    overlaps=OVERLAPS.get(pricer.device.kind, True),
                    hidden=curve_of(pricer.device).hidden,
                    cold=cold,
                    update=update,
                )
                for again in pinned_ways(cost.ways, setting.pins.recompute)
            ]
    best = undominated(found)
    return best if len(setting.chain.blocks) <= _FEW_BLOCKS else supported(best, grid)


def supported(options: Sequence[ClassOption], grid: Grid) -> tuple[ClassOption, ...]:
    """The options that are best for some price of a byte, whatever number is in flight.

    These are the corners of the lower hull of a step's time over the bytes held, taken for 1, 2, 4
    and so on micro-batches in flight; a stage mixes them, block by block. What a block holds while
    it runs counts for the stage once, not for every block: hulls are taken without it and with it.
    """
    views = [option.as_option() for option in options]
    most = min(grid.pipe.num_stages, grid.micro_batches)
    held = sorted({*(2**k for k in range(most.bit_length())), most})
    chosen: set[int] = set()
    for count, running in product(held, (0, 1)):
        points = [
            (
                view.static_bytes + count * view.saved_bytes + running * view.transient_bytes,
                grid.micro_batches * view.time_s + view.sync_s,
                index,
            )
            for index, view in enumerate(views)
        ]
        chosen.update(index for _, _, index in _lower_hull(points))
    return tuple(options[index] for index in sorted(chosen))


_Point = tuple[float, float, int]


def _lower_hull(points: Iterable[_Point]) -> list[_Point]:
    """Corners of the convex lower-left boundary, from the fewest bytes to the least time."""
    hull: list[_Point] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(first: _Point, middle: _Point, last: _Point) -> bool:
    """Whether `middle` lies on or above the line between its neighbours."""
    run, rise = last[0] - first[0], last[1] - first[1]
    return (middle[1] - first[1]) * run >= rise * (middle[0] - first[0])


def pinned_ways(ways: Sequence[Again], pin: str | None) -> Sequence[Again]:
    """The ways that a pin leaves, of all from keeping everything to keeping the least.

    `none` keeps everything, `all` makes everything again. `selective` runs chosen ops of a block
    again and never the whole; a block that has no such choice keeps everything.
    """
    if pin is None:
        return ways
    if pin == "selective":
        return [way for way in ways if way.kind is Recompute.SELECTIVE] or ways[:1]
    return ways[:1] if pin == "none" else ways[-1:]


def _shardings(
    problems: ShardingProblems, grid: Grid, class_index: int, fixed: Mapping[str, Layout]
) -> list[Sharding]:
    key = (grid.base, class_index, tuple(sorted(fixed.items())))
    if key not in problems.shardings:
        problems.shardings[key] = _pareto(problems, grid, class_index, fixed)
    return problems.shardings[key]


def _pareto(
    problems: ShardingProblems, grid: Grid, class_index: int, fixed: Mapping[str, Layout]
) -> list[Sharding]:
    problem = problems.of(grid, class_index, fixed)
    prices = problems.pricer.prices(grid)
    upkeep = Upkeep(
        sync_s=sync_shares_s(problem.space, prices, grid.micro_batches),
        kept=_kept(problems.pricer, grid, class_index),
    )
    return pareto_shardings(problem, upkeep)


def _kept(pricer: Pricer, grid: Grid, class_index: int) -> dict[Ref, float]:
    """Bytes held per byte of each value: state of parameters, activations of all in flight."""
    setting = pricer.setting
    block = setting.chain.representative(class_index)
    in_flight = min(grid.pipeline, grid.micro_batches)
    kept = dict.fromkeys(pricer.backwards.made(block), float(in_flight))
    for ref in block.parameters:
        kept[ref] = _state_factor(setting, setting.sources[ref.name])
    return kept


def _state_factor(setting: Setting, source: Source) -> float:
    """Bytes held for a parameter per byte of its value: gradient and optimizer state too."""
    state = state_bytes(1024, source.trainable, source.spec.dtype, setting.training)
    return state.terms.total_bytes / (1024 * DTYPE_BYTES[source.spec.dtype])


def undominated(options: Iterable[ClassOption]) -> tuple[ClassOption, ...]:
    """The options that no other is as good as in every respect; of equals the first."""
    kept: list[tuple[ClassOption, BlockOption]] = []
    for option in options:
        new = option.as_option()
        if not any(_beats(other, new) for _, other in kept):
            kept = [(known, other) for known, other in kept if not _beats(new, other)]
            kept.append((option, new))
    return tuple(option for option, _ in kept)


def _beats(a: BlockOption, b: BlockOption) -> bool:
    return (
        a.time_s <= b.time_s
        and a.sync_s <= b.sync_s
        and a.static_bytes <= b.static_bytes
        and a.saved_bytes <= b.saved_bytes
        and a.transient_bytes <= b.transient_bytes
    )
