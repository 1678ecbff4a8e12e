"""From the options of every class to stages: the partition problem of one grid, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.costs.collectives import axis_collective_time_s
from autopar.costs.memory import reserve_bytes
from autopar.errors import InputError
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import Ref
from autopar.schedules.in_flight import peak_in_flight
from autopar.schedules.registry import build_schedule
from autopar.search.options import ClassOption
from autopar.search.pins import within
from autopar.search.pricer import Grid, Pricer
from solvers.partition import PartitionProblem, PartitionSolution, solve_partition

_PROBE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """A grid with its cuts and the option of every block."""

    grid: Grid
    options: Mapping[int, tuple[ClassOption, ...]]
    problem: PartitionProblem
    solution: PartitionSolution


def in_flight(schedule: str, num_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches each stage holds at once.

    Read off a short schedule where the number does not grow with the micro-batches.
    """
    few = min(micro_batches, _PROBE * num_stages)
    held = peak_in_flight(build_schedule(schedule, num_stages, few))
    if few < micro_batches and max(held) == few:
        return peak_in_flight(build_schedule(schedule, num_stages, micro_batches))
    return held


def boundary_bytes(pricer: Pricer, grid: Grid, refs: Sequence[Ref]) -> int:
    """Bytes one rank sends for one micro-batch where the chain is cut so that `refs` cross."""
    prices, shared = pricer.prices(grid), pricer.setting.shared(grid.mesh)
    return sum(prices.local_bytes(ref, shared[ref]) for ref in refs)


def boundary_s(pricer: Pricer, grid: Grid, refs: Sequence[Ref]) -> tuple[float, float]:
    """Seconds to send `refs` to the next stage, and their gradients back."""
    if grid.pipeline == 1:
        return 0.0, 0.0
    axis, cluster = grid.pipeline_axis(), pricer.setting.cluster
    back = [ref for ref in refs if ref in pricer.setting.differentiable]

    def seconds(values: Sequence[Ref]) -> float:
        nbytes = boundary_bytes(pricer, grid, values)
        return (
            axis_collective_time_s(CollectiveOp.SEND_RECV, nbytes, axis, cluster) if values else 0.0
        )

    return seconds(refs), seconds(back)


def stage_ranks(grid: Grid, stage: int) -> range:
    """Devices of a stage: stages take consecutive runs of devices."""
    return range(stage * grid.stage_devices, (stage + 1) * grid.stage_devices)


def _boundary_times(pricer: Pricer, grid: Grid) -> tuple[float, ...]:
    """Half of what a message and its gradient take, for each neighbour of every possible cut."""
    priced: dict[object, float] = {}
    times = []
    for refs in pricer.setting.chain.boundaries:
        key = tuple(
            (pricer.setting.specs[ref], ref in pricer.setting.differentiable) for ref in refs
        )
        if key not in priced:
            priced[key] = sum(boundary_s(pricer, grid, refs)) / 2
        times.append(priced[key])
    return tuple(times)


def message_bytes(pricer: Pricer, grid: Grid) -> int:
    """Buffers for one message in and one out of the widest boundary."""
    if grid.pipeline == 1:
        return 0
    distinct = {
        tuple(pricer.setting.specs[ref] for ref in refs): refs
        for refs in pricer.setting.chain.boundaries
    }
    return 2 * max((boundary_bytes(pricer, grid, refs) for refs in distinct.values()), default=0)


def partition_problem(
    pricer: Pricer, grid: Grid, options: Mapping[int, tuple[ClassOption, ...]]
) -> PartitionProblem:
    """The chain of blocks as a partition problem for one grid."""
    setting = pricer.setting
    chain = setting.chain
    firsts = [stage_ranks(grid, stage) for stage in range(grid.pipeline)]
    messages = message_bytes(pricer, grid)
    return PartitionProblem(
        blocks=tuple(block.class_index for block in chain.blocks),
        classes=tuple(
            tuple(option.as_option() for option in options[c.index]) for c in chain.classes
        ),
        num_stages=grid.pipeline,
        in_flight=in_flight(grid.schedule, grid.pipeline, grid.micro_batches),
        capacity_bytes=tuple(
            float(min(setting.memory_bytes(rank) for rank in ranks)) for ranks in firsts
        ),
        num_micro_batches=grid.micro_batches,
        stage_fixed_bytes=tuple(
            float(reserve_bytes(setting.cluster.device(ranks[0])) + messages) for ranks in firsts
        ),
        boundary_s=_boundary_times(pricer, grid),
        fixed_cuts=fixed_cuts(pricer, grid.pipeline),
    )


def fixed_cuts(pricer: Pricer, pipeline: int) -> tuple[int, ...] | None:
    """Block indices at which pinned modules start a stage; None without such pins."""
    pinned = pricer.setting.pins.boundaries
    if not pinned:
        return None
    starts = pricer.setting.block_paths
    cuts = [next(i for i, start in enumerate(starts) if within(start, path)) for path in pinned]
    if len(set(cuts)) != pipeline - 1 or 0 in cuts:
        raise InputError(
            f"{len(pinned)} boundaries are pinned ({', '.join(pinned)}), which make "
            f"{len(set(cuts)) + 1} stages; expected {pipeline - 1} boundaries for a pipeline of "
            f"{pipeline}, none of them at the first block"
        )
    return tuple(sorted(cuts))


def solve_stages(
    pricer: Pricer,
    grid: Grid,
    options: Mapping[int, tuple[ClassOption, ...]],
    problem: PartitionProblem,
    *,
    certify: bool = False,
) -> Staged:
    """Cut the chain into the stages of a grid, one option per block; `certify` has an engine
    prove the answer."""
    setting = pricer.setting
    solution = solve_partition(
        problem,
        method="ilp" if certify else "dp",
        backend=setting.backend,
        time_limit_s=setting.time_limit_s,
    )
    return Staged(grid=grid, options=options, problem=problem, solution=solution)
