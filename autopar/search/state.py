"""What the parameters of a block cost under a ZeRO level: state held, gradients summed, weights
gathered.

| level | split over the axes        | once a step                | once a micro-batch           |
|-------|----------------------------|----------------------------|------------------------------|
| 0     | nothing                    | all-reduce                 |                              |
| 1, 2  | optimizer state; gradients | reduce-scatter, all-gather |                              |
| 3     | weights too                | reduce-scatter             | all-gather forward, backward |

On axes that hold copies of a shard (hybrid sharding) the reduced shard is all-reduced. Gradients of
several micro-batches add up in a whole buffer, since they are reduced once a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.costs.memory import StateBytes, total_bytes, zero_bytes
from autopar.costs.optimizer_state import optimizer_step_bytes
from autopar.ir.blocks import Block
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, Ref, Source, SourceKind
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import R_STAR, Layout
from autopar.ir.precision import grad_dtype
from autopar.plan.zero import shard_layout
from autopar.search.bucket_times import SUMS, StateCollective, bucket_share_s, update_s
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer
from autopar.search.prices import Prices
from autopar.search.setting import Setting

FREE_LEVELS = (0, 1, 2, 3)
"""ZeRO levels that are searched where none is pinned."""

PREFETCHED = 2
"""Blocks whose gathered weights exist at once: one that runs, and the next one's on their way."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ZeroChoice:
    """A ZeRO level and the batch axes that it splits over; level 0 splits nothing."""

    level: int = 0
    over: tuple[str, ...] = ()


UNSPLIT = ZeroChoice()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """The layout in which ops read a parameter, its ZeRO level and its layout between steps (empty:
    the same)."""

    layout: Layout
    level: int = 0
    stored: Layout = ()


States = tuple[tuple[str, ParameterState], ...]
"""By the names of the parameters of the first block of a class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCost:
    """What a block's parameters cost besides the block's own run.

    `held` per rank at all times; `gathered_bytes` the whole weights of one block at level 3,
    `unreduced_bytes` its whole gradients before they are reduced, from level 2 on; where they are
    added up whole, what one takes that is sent, less what its sum took. `gathers` are the weights
    gathered in a micro-batch, with the seconds of one and whether the backward reads it;
    `again_shares` the part that it gathers anew, of those it reads and of those it runs again too.
    `sum_s` per micro-batch to add up gradients, and `reduce_s` to reduce them where that is not
    left to the last. `sync_s` and `optimizer_s` per step, `early_s` the part of `sync_s` that runs
    beside the last backward.
    """

    held: StateBytes
    gathered_bytes: int
    unreduced_bytes: int
    gathers: tuple[tuple[Ref, float, bool], ...]
    sync_s: float
    optimizer_s: float
    again_shares: tuple[float, float] = (1.0, 1.0)
    early_s: float = 0.0
    sum_s: float = 0.0
    reduce_s: float = 0.0

    @property
    def gather_s(self) -> float:
        """Seconds to gather the weights for a forward of a micro-batch."""
        return sum(once_s for _, once_s, _ in self.gathers)

    def gather_again_s(self, read: Collection[Ref]) -> float:
        """Seconds to gather those that the backward reads, or what it runs again (`read`)."""
        return sum(
            self.again_shares[ref in read] * once_s
            for ref, once_s, kept in self.gathers
            if kept or ref in read
        )

    @property
    def transient_bytes(self) -> int:
        """What exists while the block, or its neighbour, runs."""
        return PREFETCHED * self.gathered_bytes + self.unreduced_bytes


def zero_choices(prices: Prices, pinned: int | None) -> tuple[ZeroChoice, ...]:
    """The ZeRO choices of a block on a grid, lowest level first: over all batch axes, and over the
    innermost alone where there are several (hybrid sharding)."""
    axes = batch_axes(prices)
    if not axes:
        return (UNSPLIT,)
    overs = [axes, *([axes[-1:]] if len(axes) > 1 else [])]
    levels = FREE_LEVELS if pinned is None else (pinned,)
    return tuple(
        dict.fromkeys(
            ZeroChoice(level=level, over=over if level else ())
            for level in levels
            for over in overs
        )
    )


def shared_choices(choices: Sequence[ZeroChoice]) -> tuple[ZeroChoice, ...]:
    """The choices for parameters that several blocks read, which are at most level 1."""
    levels = sorted({min(choice.level, 1) for choice in choices}, reverse=True)
    widest = max((choice.over for choice in choices), key=len)
    return tuple(ZeroChoice(level=level, over=widest if level else ()) for level in levels)


def batch_axes(prices: Prices) -> tuple[str, ...]:
    """Axes of several ranks that split the samples."""
    named = zip(prices.names, prices.sizes, strict=True)
    return tuple(name for name, size in named if name in BATCH_AXES and size > 1)


def parameter_states(
    setting: Setting,
    block: Block,
    layouts: Iterable[tuple[str, Layout]],
    prices: Prices,
    zero: ZeroChoice,
    shared: ZeroChoice,
) -> States:
    """How the parameters of a class's first block lie; those of several blocks as `shared` says."""
    by_name = dict(layouts)
    several = setting.shared_positions[block.class_index]
    states = []
    for position, ref in enumerate(block.parameters):
        source = setting.sources[ref.name]
        choice = shared if position in several else zero
        states.append((source.fqn, parameter_state(source, by_name[source.fqn], prices, choice)))
    return tuple(states)


def parameter_state(
    source: Source, layout: Layout, prices: Prices, choice: ZeroChoice
) -> ParameterState:
    """How a parameter lies that ops read in a layout."""
    splits = source.kind is SourceKind.PARAMETER and (source.trainable or choice.level == 3)
    if not (choice.level and splits):
        return ParameterState(layout=layout)
    shape = tuple(size.const for size in source.spec.shape)
    over = [prices.names.index(name) for name in choice.over]
    stored = shard_layout(shape, layout, prices.sizes, over, trainable=source.trainable)
    return ParameterState(layout=layout, level=choice.level if stored else 0, stored=stored)


def held_bytes(
    pricer: Pricer, block: Block, states: States, grid: Grid, *, skip: Collection[str] = ()
) -> StateBytes:
    """State held for a block's parameters; those whose source is in `skip` are not counted."""
    first = pricer.setting.chain.representative(block.class_index)
    by_name, prices = dict(states), pricer.prices(grid)
    return total_bytes(
        parameter_bytes(pricer, ref, by_name[pricer.setting.sources[model.name].fqn], prices, grid)
        for ref, model in zip(block.parameters, first.parameters, strict=True)
        if ref.name not in skip
    )


def parameter_bytes(
    pricer: Pricer, ref: Ref, state: ParameterState, prices: Prices, grid: Grid
) -> StateBytes:
    """State held for one parameter."""
    setting, source = pricer.setting, pricer.setting.sources[ref.name]
    whole, shard = (
        setting.state_bytes(source, prices.local_numel(ref, layout))
        for layout in (state.layout, state.stored or state.layout)
    )
    several = accumulates(setting, grid, state.level)
    return zero_bytes(whole, shard, state.level, accumulates=several)


def state_cost(pricer: Pricer, block: Block, states: States, grid: Grid) -> StateCost:
    """The cost of the parameters of a class's first block."""
    setting, prices, by_name = pricer.setting, pricer.prices(grid), dict(states)
    gathered = unreduced = shard = 0
    gathers: list[tuple[Ref, float, bool]] = []
    seconds = dict.fromkeys(("sync", "early", "reduce"), 0.0)
    optimizer_s = summed = 0.0
    for ref in block.parameters:
        source = setting.sources[ref.name]
        state = by_name[source.fqn]
        if state.level == 3:
            gathered += prices.local_bytes(ref, state.layout)
            once_s = gather_seconds(pricer, grid, ref, state)
            gathers.append((ref, once_s, ref in pricer.backwards.parameters(block)))
        if source.trainable:
            for each, once_s in sync_seconds(pricer, grid, ref, state):
                for name in sync_kinds(setting, state.level, each[0]):
                    seconds[name] += once_s
            summed += accumulation_bytes(pricer, grid, ref, state)
            optimizer_s += optimizer_seconds(pricer, grid, ref, state)
            if state.level >= 2:
                whole = ParameterState(layout=state.layout)
                gradient = parameter_bytes(pricer, ref, whole, prices, grid).gradients
                if not accumulates(setting, grid, state.level):
                    unreduced += gradient
                elif state.level == 3:  # in place of those whose sums are no longer whole
                    stored = prices.local_numel(ref, state.stored or state.layout)
                    shard = max(shard, setting.state_bytes(source, stored).gradients)
    return StateCost(
        held=held_bytes(pricer, block, states, grid),
        gathered_bytes=gathered,
        unreduced_bytes=unreduced + shard,
        gathers=tuple(gathers),
        again_shares=again_shares(setting, grid),
        sync_s=seconds["sync"],
        early_s=seconds["early"],
        reduce_s=seconds["reduce"],
        sum_s=pricer.memory_s(summed),
        optimizer_s=optimizer_s,
    )


def again_shares(setting: Setting, grid: Grid) -> tuple[float, float]:
    """The part of the weights at ZeRO level 3 that a backward gathers anew, of those that it alone
    reads and of those that it also runs again."""
    parameters = setting.num_parameters / (grid.pipeline * grid.tensor)
    alone, again = (setting.execution.regathered_share(parameters, uses) for uses in (2, 3))
    return alone, again


def sync_kinds(setting: Setting, level: int, op: CollectiveOp) -> tuple[str, ...]:
    """Which times of `StateCost` a collective on a gradient or an updated weight counts for."""
    execution = setting.execution
    if op not in SUMS:
        return ("sync",)
    if level in execution.reduces_each:
        return ("reduce",)
    return ("sync", "early") if level in execution.early_sync else ("sync",)


def accumulates(setting: Setting, grid: Grid, level: int) -> bool:
    """Whether whole gradients of several micro-batches add up before they are reduced."""
    return grid.micro_batches > 1 and level not in setting.execution.reduces_each


def accumulation_bytes(pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState) -> float:
    """Bytes moved per micro-batch to add a parameter's gradient to the sum of those before."""
    dtype = pricer.setting.sources[ref.name].spec.dtype
    each = accumulation_width(pricer.setting, dtype, grid.micro_batches)
    return each * accumulated_numel(pricer, grid, ref, state)


def accumulation_width(setting: Setting, dtype: str, micro_batches: int) -> float:
    """The same per element of a gradient of a parameter of a dtype."""
    wide = DTYPE_BYTES[grad_dtype(setting.training.precision, dtype)]
    return setting.execution.accumulation_bytes(DTYPE_BYTES[dtype], wide, micro_batches)


def accumulated_numel(pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState) -> int:
    """Elements of the sum that a parameter's gradients add up in."""
    whole = state.level < 2 or accumulates(pricer.setting, grid, state.level)
    layout = state.layout if whole else state.stored or state.layout
    return pricer.prices(grid).local_numel(ref, layout)


def optimizer_bytes(pricer: Pricer, ref: Ref, state: ParameterState, prices: Prices) -> int:
    """Bytes that the optimizer moves to update this rank's share of a parameter."""
    training = pricer.setting.training
    precision = training.precision
    numel = prices.local_numel(ref, state.stored or state.layout)
    return pricer.setting.execution.step_bytes * numel + optimizer_step_bytes(
        training.optimizer,
        training.optimizer_kwargs,
        numel,
        precision.param_dtype,
        precision.grad_dtype,
        master=precision.master,
    )


def split_axes(state: ParameterState, prices: Prices) -> tuple[str, ...]:
    """The axes that split a parameter's state and not the parameter."""
    if not state.stored:
        return ()
    named = zip(prices.names, state.layout, state.stored, strict=True)
    return tuple(name for name, used, stored in named if used != stored)


def gather_collectives(
    pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState
) -> tuple[StateCollective, ...]:
    """What gathers a weight that lies in shards for one pass of one micro-batch."""
    prices = pricer.prices(grid)
    if state.level < 3:
        return ()
    nbytes = prices.local_bytes(ref, state.layout)
    return ((CollectiveOp.ALL_GATHER, nbytes, split_axes(state, prices)),)


def sync_collectives(
    pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState
) -> tuple[StateCollective, ...]:
    """What sums a gradient once a step, in the dtype that gradients have, and then at levels 1 and
    2 gathers the updated weight."""
    prices, split = pricer.prices(grid), split_axes(state, pricer.prices(grid))
    dtype = pricer.setting.sources[ref.name].spec.dtype
    summed = grad_dtype(pricer.setting.training.precision, dtype)
    wider = DTYPE_BYTES[summed] / DTYPE_BYTES[dtype]
    whole, stored = (
        prices.local_bytes(ref, layout) for layout in (state.layout, state.stored or state.layout)
    )
    found: list[StateCollective] = []
    if split:
        found.append((CollectiveOp.REDUCE_SCATTER, wider * whole, split))
    rest = [
        name
        for name, placement in zip(prices.names, state.layout, strict=True)
        if placement == R_STAR and name not in split
    ]
    batch = tuple(name for name in rest if name in BATCH_AXES)
    for axes in (batch, *((name,) for name in rest if name not in BATCH_AXES)):
        if axes:
            found.append((CollectiveOp.ALL_REDUCE, wider * stored, axes))
    if split and state.level < 3:
        found.append((CollectiveOp.ALL_GATHER, whole, split))
    return tuple(found)


def sync_seconds(
    pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState
) -> Iterator[tuple[StateCollective, float]]:
    """Each of the `sync_collectives` with its seconds: a weight that lies in shards is summed by
    itself, others in buckets."""
    local_bytes = pricer.prices(grid).local_bytes(ref, state.layout)
    for each in sync_collectives(pricer, grid, ref, state):
        yield each, bucket_share_s(pricer, grid, each, state.level, local_bytes)


def optimizer_seconds(pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState) -> float:
    """Seconds of the optimizer's step on this rank's share of a parameter."""
    prices = pricer.prices(grid)
    numel = prices.local_numel(ref, state.stored or state.layout)
    return update_s(pricer, numel, optimizer_bytes(pricer, ref, state, prices))


def gather_seconds(pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState) -> float:
    """Seconds to gather a weight that lies in shards, by itself or with others of a block."""
    flat, nbytes = pricer.setting.execution.flat, pricer.prices(grid).local_bytes(ref, state.layout)
    found = gather_collectives(pricer, grid, ref, state)
    return sum(
        bucket_share_s(pricer, grid, each, state.level, nbytes)
        if flat
        else pricer.joined_s(grid, *each)
        for each in found
    )


def least_state_bytes(pricer: Pricer, grid: Grid) -> float:
    """Bytes that no way to lay the parameters' state over the mesh holds less of, on all stages
    together.

    Every tensor rank and, as far as the ZeRO level goes, every batch rank has its even share; what
    is experts' is split over one of the batch axes before.
    """
    setting, prices = pricer.setting, pricer.prices(grid)
    most = max(zero_choices(prices, setting.pins.zero), key=lambda choice: choice.level)
    degree = prod(
        size for name, size in zip(prices.names, prices.sizes, strict=True) if name in most.over
    )
    experts = setting.expert_state
    others = StateBytes(
        *(all_ - own for all_, own in zip(setting.whole_state, experts, strict=True))
    )
    several = accumulates(setting, grid, most.level)
    held = 0.0
    for whole, split in ((others, 1), (experts, expert_split(setting, grid))):
        shard = StateBytes(*(part // max(degree, split) for part in whole))
        used = StateBytes(*(part // split for part in whole))
        held += sum(zero_bytes(used, shard, most.level, accumulates=several))
    return held / grid.tensor


def expert_split(setting: Setting, grid: Grid) -> int:
    """The most ranks that one of the axes that split samples can split experts over."""
    sizes = [axis.size for axis in grid.mesh if axis.splits_samples]
    return max([1, *(size for size in sizes if size <= setting.most_experts)])
