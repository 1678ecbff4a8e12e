"""What the stages of a plan take, as the program runs them: passes block by block, sums of
gradients and updates parameter by parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from autopar.costs.collectives import axis_collective_time_s
from autopar.ir.blocks import Block
from autopar.ir.cluster import Axis
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, Ref
from autopar.ir.precision import grad_dtype
from autopar.plan.buckets import GradientEntry, buckets
from autopar.plan.plan import Terms
from autopar.schedules.stage_pass import (
    BlockWork,
    Overlap,
    StagePass,
    backward_pass,
    forward_pass,
)
from autopar.search.grid import Grid
from autopar.search.handovers import exchange_s
from autopar.search.options import ClassOption
from autopar.search.pricer import Pricer
from autopar.search.state import ParameterState, optimizer_seconds, sync_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCost:
    """Seconds per step that a parameter takes: to sum its gradient during the last backward, and
    after it; to step the optimizer; to gather what it made. `nbytes` are those that are summed
    early, over `axes`; `level` is its ZeRO level."""

    name: str
    level: int
    early_s: float
    late_s: float
    optimizer_s: float
    gather_s: float
    nbytes: int
    axes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """The terms of a stage that `StagePlan` lists as `time_s` and `communication_s`."""

    time_s: Terms
    communication_s: Terms


def stage_seconds(
    pricer: Pricer,
    grid: Grid,
    blocks: Sequence[Block],
    options: Sequence[ClassOption],
    sends_s: tuple[float, float],
    tied_s: float = 0.0,
    elsewhere: Collection[str] = (),
) -> StageSeconds:
    """What a stage takes.

    `sends_s` are to the next stage and the one before, `tied_s` is what sums between stages take.
    Parameters whose source is `elsewhere` are updated with another stage of the rank.
    """
    overlap = Overlap(beside=options[0].overlaps, hidden=options[0].hidden)
    costs, splits = (
        list(_updates(pricer, grid, blocks, options, elsewhere)),
        grid.pipe.splits_backward,
    )
    early_s = [0.0] * len(blocks)
    if grid.pipe.flushes and not splits:
        early_s = _early_s(len(blocks), costs)
    forward = forward_pass([_forward(option) for option in options], overlap)
    backward = backward_pass([_backward(option, splits=splits) for option in options], overlap)
    last = backward_pass(
        [
            _backward(option, due_s, splits=splits)
            for option, due_s in zip(options, early_s, strict=True)
        ],
        overlap,
    )
    sync_s = sum(cost.early_s + cost.late_s for _, cost in costs) - sum(early_s) + last.left_s
    parts = (o.cost.weight_s + o.cost.apart_s + o.state.sum_s for o in options)
    return StageSeconds(
        time_s=(
            ("forward", forward.total_s),
            ("backward", backward.total_s),
            *((("backward_weight", sum(parts)),) if splits else ()),
            ("send_forward", sends_s[0]),
            ("send_backward", sends_s[1]),
            ("gradient_sync", sync_s),
            *((("tied_sync", tied_s),) if tied_s else ()),
            ("optimizer", sum(cost.optimizer_s for _, cost in costs)),
            ("weight_gather", sum(cost.gather_s for _, cost in costs)),
        ),
        communication_s=_communication(forward, backward, last),
    )


def tied_seconds(
    pricer: Pricer, grid: Grid, stages: Sequence[tuple[Sequence[Block], Sequence[ClassOption]]]
) -> list[float]:
    """Per stage the seconds that sums of gradients between the ranks of several stages take; where
    a rank has several of these, with its first."""
    setting, place = pricer.setting, grid.pipe.placement
    found: dict[str, dict[int, tuple[int, ParameterState]]] = {}
    for index, (blocks, options) in enumerate(stages):
        for block, option in zip(blocks, options, strict=True):
            first, by_name = setting.chain.representative(block.class_index), dict(option.states)
            for ref, model in zip(block.parameters, first.parameters, strict=True):
                if setting.sources[ref.name].trainable:
                    state = by_name[setting.sources[model.name].fqn]
                    found.setdefault(ref.name, {}).setdefault(place[index], (index, state))
    seconds = [0.0] * len(stages)
    for name, holders in found.items():
        if len(holders) == 1:
            continue
        if grid.own:
            states = {rank: state for rank, (_, state) in holders.items()}
            for rank, once_s in exchange_s(pricer, grid, Ref(name), states).items():
                seconds[holders[rank][0]] += once_s
            continue
        ranks = sorted(holders)
        apart = (ranks[-1] - ranks[0]) // (len(ranks) - 1)
        axis = Axis(name="tied", size=len(ranks), stride=apart * grid.stage_devices)
        state, dtype = holders[ranks[0]][1], setting.sources[name].spec.dtype
        wider = DTYPE_BYTES[grad_dtype(setting.training.precision, dtype)] / DTYPE_BYTES[dtype]
        layout = state.stored or state.layout
        nbytes = wider * pricer.prices(grid).local_bytes(Ref(name), layout)
        first_rank = ranks[0] * grid.stage_devices if len(setting.cluster.groups) > 1 else 0
        once_s = axis_collective_time_s(
            CollectiveOp.ALL_REDUCE, nbytes, axis, setting.cluster, first_rank, setting.profile
        )
        for index, _ in holders.values():
            seconds[index] += once_s
    return seconds


def _communication(forward: StagePass, backward: StagePass, last: StagePass) -> Terms:
    """What compute waits for and what runs beside it."""
    return (
        ("forward_waits", forward.waits_s),
        ("backward_waits", backward.waits_s),
        ("forward_beside", forward.beside_s),
        ("backward_beside", backward.beside_s),
        ("last_backward", max(0.0, last.total_s - backward.total_s)),
        ("sum_beside", max(0.0, last.beside_s - backward.beside_s)),
        ("sum_left", last.left_s),
    )


def _forward(option: ClassOption) -> BlockWork:
    cost = option.cost
    return BlockWork(
        compute_s=cost.forward_compute_s,
        collectives_s=max(0.0, cost.forward_s - cost.forward_compute_s),
        gather_s=option.state.gather_s,
    )


def _backward(option: ClassOption, reduce_s: float = 0.0, *, splits: bool) -> BlockWork:
    cost, again = option.cost, option.again
    more_s = option.state.sum_s + (cost.apart_s if splits else 0.0)
    compute_s = cost.backward_compute_s + again.compute_s + more_s
    own_s = cost.backward_s + again.time_s + more_s
    return BlockWork(
        compute_s=compute_s,
        collectives_s=max(0.0, own_s - compute_s),
        gather_s=option.state.gather_again_s(again.weights),
        reduce_s=reduce_s,
    )


def _updates(
    pricer: Pricer,
    grid: Grid,
    blocks: Sequence[Block],
    options: Sequence[ClassOption],
    elsewhere: Collection[str],
) -> Iterator[tuple[int, UpdateCost]]:
    """The trainable parameters of a stage, each once, with the first block that reads it."""
    known: dict[int, list[UpdateCost | None]] = {}
    seen = set(elsewhere)
    for index, (block, option) in enumerate(zip(blocks, options, strict=True)):
        if id(option) not in known:
            known[id(option)] = _option_updates(pricer, grid, block, option)
        for ref, cost in zip(block.parameters, known[id(option)], strict=True):
            if cost is not None and ref.name not in seen:
                seen.add(ref.name)
                yield index, cost


def _option_updates(
    pricer: Pricer, grid: Grid, block: Block, option: ClassOption
) -> list[UpdateCost | None]:
    """Of every parameter of the blocks that an option runs; None for those that are not trained.

    Whole gradients, and what is left of a sum over the copies of a shard, wait for the end of the
    step at every level, unless `Execution.early_sync` has level 0: then none does.
    """
    setting, by_name = pricer.setting, dict(option.states)
    early = setting.execution.early_sync
    found: list[UpdateCost | None] = []
    for ref in setting.chain.representative(block.class_index).parameters:
        source = setting.sources[ref.name]
        if not source.trainable:
            found.append(None)
            continue
        state = by_name[source.fqn]
        seconds = {"early": 0.0, "late": 0.0, "gather": 0.0}
        nbytes, axes = 0, tuple[str, ...]()
        for (op, moved, over), own_s in sync_seconds(pricer, grid, ref, state):
            what = "gather" if op is CollectiveOp.ALL_GATHER else "late"
            scatters = op is CollectiveOp.REDUCE_SCATTER
            if what == "late" and state.level in early and (scatters or 0 in early):
                what, nbytes, axes = "early", nbytes + int(moved), over
            seconds[what] += own_s
        found.append(
            UpdateCost(
                name=ref.name,
                level=state.level,
                early_s=seconds["early"],
                late_s=seconds["late"],
                optimizer_s=optimizer_seconds(pricer, grid, ref, state),
                gather_s=seconds["gather"],
                nbytes=nbytes,
                axes=axes,
            )
        )
    return found


def _early_s(num_blocks: int, costs: Sequence[tuple[int, UpdateCost]]) -> list[float]:
    """Per block the seconds of the sums that begin at the end of its backward: those of weights
    that it gathers, and of the buckets of which it has the first."""
    early_s = [0.0] * num_blocks
    bucketed = {}
    for position, (index, cost) in enumerate(costs):
        if cost.level == 3:
            early_s[index] += cost.early_s
        elif cost.early_s:
            bucketed[str(position)] = index, cost
    entries = [
        GradientEntry(name=name, nbytes=cost.nbytes, dtype="", axes=cost.axes)
        for name, (_, cost) in bucketed.items()
    ]
    for bucket in buckets(entries):
        first = min(bucketed[name][0] for name in bucket.names)
        early_s[first] += sum(bucketed[name][1].early_s for name in bucket.names)
    return early_s
