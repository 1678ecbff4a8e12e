"""From the options of every class to stages: the partition problem of one grid, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from autopar.costs.collectives import axis_collective_time_s
from autopar.costs.memory import reserve_bytes
from autopar.errors import InputError
from autopar.ir.blocks import Block, BlockChain
from autopar.ir.cluster import Cluster
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import Ref
from autopar.ir.mesh import TENSOR
from autopar.ir.placement import Shard
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.schedules.held import peak_bytes
from autopar.schedules.in_flight import held_at_peak
from autopar.search.grid import Grid
from autopar.search.handovers import handover_s
from autopar.search.moments import boundary_bytes, memory_among
from autopar.search.options import ClassOption
from autopar.search.pins import within
from autopar.search.pipelines import (
    HIDES_MESSAGES,
    Weights,
    held_together,
    in_flight,
    messages_under_way,
)
from autopar.search.pricer import Pricer
from solvers.partition import BlockOption, PartitionProblem, PartitionSolution, solve_partition
from solvers.partition_even import is_long
from solvers.solution import Status, fits, relative_gap

_PROVEN = 1e-6
"""Relative gap up to which an answer counts as optimal, as the solver has it."""


_FITTINGS = 4
"""How often a partition that lacks room by a closer look is solved again."""

_MARGIN_BYTES = 4 * DEFAULT_CAP_BYTES
"""Room that makes a closer look needless: more than the buckets of a step take. What blocks send of
gradients while others run comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """A grid with its cuts and the option of every block."""

    grid: Grid
    options: Mapping[int, tuple[ClassOption, ...]]
    problem: PartitionProblem
    solution: PartitionSolution


Places = tuple[int, int]
"""Two ranks of the pipeline, in either order."""


def boundary_s(
    pricer: Pricer, grid: Grid, refs: Sequence[Ref], hop: Places | None = None
) -> tuple[float, float]:
    """Seconds to send `refs` to the next stage, and their gradients back.

    Between neighbours, or over the `hop` that is given. In a cluster of one group all hops as long
    are taken to be the slowest of them.
    """
    if grid.pipeline == 1 or (hop is not None and hop[0] == hop[1]):
        return 0.0, 0.0
    if grid.own and hop is not None:
        return handover_s(pricer, grid, refs, hop)
    axis, cluster, first = grid.pipeline_axis(), pricer.setting.cluster, 0
    if hop is not None:
        apart, several = abs(hop[1] - hop[0]), len(cluster.groups) > 1
        if apart > 1 or several:
            axis = replace(axis, size=2, stride=apart * axis.stride)
        first = _slowest_pair(cluster, grid, hop) if several else 0
    back = [ref for ref in refs if ref in pricer.setting.differentiable]

    def seconds(values: Sequence[Ref]) -> float:
        if not values:
            return 0.0
        nbytes, measured = boundary_bytes(pricer, grid, values), pricer.setting.profile
        parts = _message_parts(pricer, grid, values)
        send_s = axis_collective_time_s(
            CollectiveOp.SEND_RECV, nbytes / parts, axis, cluster, first, measured
        )
        if parts > 1:
            send_s += pricer.joined_s(grid, CollectiveOp.ALL_GATHER, nbytes, (TENSOR,))
        return send_s

    return seconds(refs), seconds(back)


def _slowest_pair(cluster: Cluster, grid: Grid, hop: Places) -> int:
    """The first rank of the two that reach each other by the slowest link of a hop."""
    size, levels = grid.stage_devices, cluster.levels
    low, high = (min(hop) * size, max(hop) * size)
    links = [cluster.link((low + i, high + i)) for i in range(size)]
    return low + max(range(size), key=lambda i: levels.index(links[i]))


def _message_parts(pricer: Pricer, grid: Grid, refs: Sequence[Ref]) -> int:
    """In how many parts tensor ranks that hold the same value send it."""
    if not pricer.setting.execution.scatters or grid.tensor == 1:
        return 1
    shared, at = pricer.setting.shared(grid.mesh), grid.names.index(TENSOR)
    whole = all(not isinstance(shared[ref][at], Shard) for ref in refs)
    return grid.tensor if whole else 1


def stage_ranks(grid: Grid, stage: int) -> range:
    """Devices of a stage: pipeline ranks take consecutive runs of devices."""
    return grid.ranks(grid.pipe.placement[stage])


def _boundary_times(pricer: Pricer, grid: Grid, hop: Places | None = None) -> tuple[float, ...]:
    """What a message and its gradient take of each neighbour of every possible cut: half, and where
    ranks share cores all, since both are at it (`schedules.sharing`)."""
    kinds, distinct = pricer.setting.boundary_kinds
    part = 1.0 if pricer.setting.cluster.slowdown > 1 else 0.5
    each = [part * sum(boundary_s(pricer, grid, refs, hop)) for refs in distinct]
    return tuple(each[kind] for kind in kinds)


def _hop_times(pricer: Pricer, grid: Grid) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What cuts cost over the hop between the first two ranks, and how much more the hop between
    every two stages makes of that, for the dearest cut."""
    place, stages = grid.pipe.placement, grid.pipe.num_stages
    alike = len(pricer.setting.cluster.groups) == 1 and not grid.own
    if alike or grid.pipeline == 1:
        return _boundary_times(pricer, grid), ()
    times = {
        hop: _boundary_times(pricer, grid, hop) for hop in dict.fromkeys([(0, 1), *pairwise(place)])
    }
    once_s = times[0, 1]
    dearest = max(range(len(once_s)), key=once_s.__getitem__, default=0)
    if not once_s or not once_s[dearest]:
        return once_s, ()
    hops = tuple(times[hop][dearest] / once_s[dearest] for hop in pairwise(place))
    return once_s, hops if stages > 1 else ()


def message_bytes(pricer: Pricer, grid: Grid) -> tuple[int, ...]:
    """By pipeline rank, buffers for the messages that it may have under way, at the widest
    boundary; between meshes that differ one more, to put a value together from its parts."""
    if grid.pipeline == 1:
        return (0,)
    _, distinct = pricer.setting.boundary_kinds

    def widest(own: Grid) -> int:
        return max((boundary_bytes(pricer, own, refs) for refs in distinct), default=0)

    spots = [widest(spot.grid) for spot in pricer.places.spots(grid)]
    places = zip(pricer.places.kinds(grid), messages_under_way(grid.pipe), strict=True)
    return tuple((count + bool(grid.own)) * spots[kind] for kind, count in places)


def tightest(pricer: Pricer, ranks: range) -> int:
    """The first of the ranks that have the least memory."""
    setting = pricer.setting
    firsts = [rank for rank, _ in setting.cluster.counts(ranks)]
    return min(firsts, key=setting.memory_bytes)


def _reserve_bytes(pricer: Pricer, grid: Grid, ranks: range) -> int:
    device = pricer.setting.cluster.device(tightest(pricer, ranks))
    return reserve_bytes(device, grid.communicators)


def partition_problem(
    pricer: Pricer,
    grid: Grid,
    options: Mapping[int, tuple[ClassOption, ...]],
    weights: Weights,
) -> PartitionProblem:
    """The chain of blocks as a partition problem for one grid."""
    pipe = grid.pipe
    classes = tuple(
        tuple(option.as_option(pipe) for option in options[c.index])
        for c in pricer.setting.chain.classes
    )
    return chain_problem(pricer, grid, classes, weights)


def chain_problem(
    pricer: Pricer,
    grid: Grid,
    classes: tuple[tuple[BlockOption, ...], ...],
    weights: Weights,
    *,
    messages: bool = True,
) -> PartitionProblem:
    """The same with the options of every class as they are given, and room for `messages` or none.

    What a rank holds once, whatever its stages, is counted with the first of them.
    """
    setting, pipe = pricer.setting, grid.pipe
    chain = setting.chain
    ranks = [stage_ranks(grid, stage) for stage in range(pipe.num_stages)]
    first = [pipe.placement.index(place) == k for k, place in enumerate(pipe.placement)]
    once_s, hops = _hop_times(pricer, grid)
    kinds = pricer.places.kinds(grid)
    held = message_bytes(pricer, grid) if messages else (0,) * grid.pipeline
    return PartitionProblem(
        blocks=tuple(block.class_index for block in chain.blocks),
        classes=classes,
        num_stages=pipe.num_stages,
        in_flight=held_together(pipe),
        capacity_bytes=tuple(float(setting.least_memory_bytes(own)) for own in ranks),
        num_micro_batches=grid.micro_batches,
        stage_fixed_bytes=tuple(
            float(_reserve_bytes(pricer, grid.at(place), own) + held[place]) * once
            for own, once, place in zip(ranks, first, pipe.placement, strict=True)
        ),
        boundary_s=once_s,
        hop_scale=hops,
        stage_device=tuple(kinds[place] for place in pipe.placement),
        fixed_cuts=fixed_cuts(pricer, pipe.num_stages),
        sum_weight=weights.sum,
        max_weight=weights.longest,
        stage_share=weights.stage,
        boundary_in_max=setting.cluster.slowdown > 1 or pipe.schedule not in HIDES_MESSAGES,
        stage_rank=pipe.placement,
    )


def fixed_cuts(pricer: Pricer, stages: int) -> tuple[int, ...] | None:
    """Block indices at which pinned modules start a stage; None without such pins."""
    pinned = pricer.setting.pins.boundaries
    if not pinned:
        return None
    starts = pricer.setting.block_paths
    cuts = [next(i for i, start in enumerate(starts) if within(start, path)) for path in pinned]
    if len(set(cuts)) != stages - 1 or 0 in cuts:
        raise InputError(
            f"{len(pinned)} boundaries are pinned ({', '.join(pinned)}), which make "
            f"{len(set(cuts)) + 1} stages; expected {stages - 1} boundaries for a pipeline of "
            f"{stages}, none of them at the first block"
        )
    return tuple(sorted(cuts))


def solve_stages(
    pricer: Pricer,
    grid: Grid,
    options: Mapping[int, tuple[ClassOption, ...]],
    problem: PartitionProblem,
    *,
    limit_s: float = inf,
    time_limit_s: float | None = None,
    bound_s: float = -inf,
) -> Staged:
    """Cut the chain into the stages of a grid, one option per block. A grid that provably takes
    `limit_s` or more may be left without; that it takes `bound_s` at the least is known.
    `time_limit_s` is a solver's, by default that of the setting."""
    time_limit_s = pricer.setting.time_limit_s if time_limit_s is None else time_limit_s

    def solved(problem: PartitionProblem) -> PartitionSolution:
        return solve_partition(
            problem,
            method="dp",
            backend=pricer.setting.backend,
            time_limit_s=time_limit_s,
            cutoff=limit_s,
            known=bound_s,
        )

    first = solved(problem)
    staged = Staged(grid=grid, options=options, problem=problem, solution=first)

    def again(problem: PartitionProblem) -> Staged:
        return replace(staged, problem=problem, solution=_bounded(solved(problem), first.bound))

    fitted = _heavier_until(pricer, _fuller_until(staged, again), again, _FITTINGS)[0]
    if is_long(problem):  # solved quickly, if not to the end: other ways to make room may be better
        other, fits = _heavier_until(pricer, staged, again, _FITTINGS)
        if fits and other.solution.objective < fitted.solution.objective:
            return other
    return fitted


Again = Callable[[PartitionProblem], Staged]
"""Solves another problem of a grid, with less room than the first, whose bound holds for all."""


def _fuller_until(staged: Staged, again: Again) -> Staged:
    """With as many micro-batches in flight as ranks are found to hold."""
    grid, first = staged.grid, staged.problem
    for last in (False, False, True):
        fuller = _fuller(grid, staged.problem, staged.solution)
        if fuller is None:
            break
        # The first problem leaves moments of a rank out.
        staged = again(replace(first, in_flight=in_flight(grid.pipe)) if last else fuller)
    return staged


def _heavier_until(pricer: Pricer, staged: Staged, again: Again, most: int) -> tuple[Staged, bool]:
    """With as much set aside as the walk over the actions of ranks finds to be lacking; whether
    nothing lacks after `most` times."""
    for _ in range(most):
        heavier = _heavier(pricer, staged)
        if heavier is None:
            return staged, True
        staged = again(heavier)
    return staged, _heavier(pricer, staged) is None


def chosen_options(
    chain: BlockChain,
    options: Mapping[int, tuple[ClassOption, ...]],
    solution: PartitionSolution,
) -> list[ClassOption]:
    """The option of every block."""
    return [
        options[block.class_index][o]
        for block, o in zip(chain.blocks, solution.options, strict=True)
    ]


def stage_blocks(
    chain: BlockChain,
    chosen: Sequence[ClassOption],
    problem: PartitionProblem,
    solution: PartitionSolution,
) -> list[tuple[list[Block], list[ClassOption]]]:
    """The blocks of every stage, and of all that are `chosen` their options."""
    return [
        ([chain.blocks[b] for b in blocks], [chosen[b] for b in blocks])
        for blocks in problem.stages(solution.cuts)
    ]


def walked_bytes(
    pricer: Pricer,
    grid: Grid,
    options: Mapping[int, tuple[ClassOption, ...]],
    problem: PartitionProblem,
    solution: PartitionSolution,
    ranks: Iterable[Sequence[int]],
) -> dict[int, float]:
    """The peaks of `ranks`, each the stages on it, by the walk over its actions, by its first
    stage."""
    chain = pricer.setting.chain
    chosen = chosen_options(chain, options, solution)
    blocks = stage_blocks(chain, chosen, problem, solution)
    short = grid.pipe.short()
    schedule, known, peaks = short.lowered(), short.arrivals(), dict[int, float]()
    for on_rank in ranks:
        place = grid.pipe.placement[on_rank[0]]
        stages = {k: memory_among(pricer, grid, blocks, k) for k in on_rank}
        peaks[on_rank[0]] = peak_bytes(schedule.ranks[place], stages, known[place])
        devices = stage_ranks(grid, on_rank[0])
        peaks[on_rank[0]] += _reserve_bytes(pricer, grid.at(place), devices)
    return peaks


def _heavier(pricer: Pricer, staged: Staged) -> PartitionProblem | None:
    """The problem with more set aside on the ranks that lack room by the walk over their actions,
    which knows what a sum over blocks does not: buckets across blocks, say. None where all fit."""
    grid, problem, solution = staged.grid, staged.problem, staged.solution
    if not solution.status.has_solution or not grid.pipe.flushes:
        return None
    chosen = chosen_options(pricer.setting.chain, staged.options, solution)
    margin_bytes = _MARGIN_BYTES + max(option.state.unreduced_bytes for option in chosen)
    tight = [
        on_rank
        for on_rank in problem.rank_stages()
        if problem.capacity_bytes[on_rank[0]] - sum(solution.stage_bytes[k] for k in on_rank)
        < margin_bytes
    ]
    if not tight:
        return None
    peaks = walked_bytes(pricer, grid, staged.options, problem, solution, tight)
    fixed = list(problem.stage_fixed_bytes)
    for on_rank in tight:
        peak = peaks[on_rank[0]]
        if not fits(peak, problem.capacity_bytes[on_rank[0]]):
            fixed[on_rank[0]] += peak - sum(solution.stage_bytes[k] for k in on_rank)
    changed = tuple(fixed) != problem.stage_fixed_bytes
    return replace(problem, stage_fixed_bytes=tuple(fixed)) if changed else None


def _bounded(solution: PartitionSolution, bound: float) -> PartitionSolution:
    """A solution of a fuller problem, with the bound that holds for all."""
    bound, status = min(bound, solution.objective), solution.status
    if status is Status.OPTIMAL and relative_gap(solution.objective, bound) > _PROVEN:
        status = Status.FEASIBLE
    if status is Status.INFEASIBLE:
        status = Status.TIME_LIMIT
    gap = relative_gap(solution.objective, bound)
    return replace(solution, bound=bound, gap=gap, status=status)


def at_least(staged: Staged, bound: float) -> Staged:
    """The same with a bound that is known besides."""
    solution = staged.solution
    if not solution.status.has_solution or bound <= solution.bound:
        return staged
    bound = min(bound, solution.objective)
    gap, status = relative_gap(solution.objective, bound), solution.status
    if status is Status.FEASIBLE and gap <= _PROVEN:
        status = Status.OPTIMAL
    return replace(staged, solution=replace(solution, bound=bound, gap=gap, status=status))


def _fuller(
    grid: Grid, problem: PartitionProblem, solution: PartitionSolution
) -> PartitionProblem | None:
    """The problem with more micro-batches in flight, where a rank holds more than was reckoned.

    A rank's stages are at their peaks at different times; which time is the worst depends on what
    each stage saves. None where what was reckoned is the worst.
    """
    if not problem.shares_ranks or not solution.status.has_solution:
        return None
    chosen = [
        problem.classes[kind][o] for kind, o in zip(problem.blocks, solution.options, strict=True)
    ]
    stages = problem.stages(solution.cuts)
    saved = [sum(chosen[b].saved_bytes for b in stage) for stage in stages]
    held = held_at_peak(grid.pipe.short().build(), saved)
    lacking = False
    for on_rank in problem.rank_stages():
        more = sum((held[k] - problem.in_flight[k]) * saved[k] for k in on_rank)
        used = sum(solution.stage_bytes[k] for k in on_rank)
        lacking |= more > 0 and not fits(used + more, problem.capacity_bytes[on_rank[0]])
    if not lacking:
        return None
    counts = tuple(map(max, problem.in_flight, held))
    return replace(problem, in_flight=counts)
