"""The exhaustive answers, for tests: every choice and every partition of a small problem."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from solvers.choice_problem import ChoiceProblem
from solvers.layers_problem import LayersProblem
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE

_MAX_CASES = 2_000_000


def best_choice(problem: ChoiceProblem) -> float:
    """The least objective of a choice problem; inf if infeasible."""
    sizes = [len(cost) for cost in problem.node_costs]
    if math.prod(sizes) > _MAX_CASES:
        raise ValueError(f"{math.prod(sizes)} choices are too many to try; limit {_MAX_CASES}")
    grid = np.indices(sizes).reshape(len(sizes), -1)
    total = np.zeros(grid.shape[1])
    for node, cost in enumerate(problem.node_costs):
        total += np.asarray(cost)[grid[node]]
    for edge in problem.edges:
        total += np.asarray(edge.cost)[grid[edge.src], grid[edge.dst]]
    for capacity in problem.capacities:
        usage = np.zeros(grid.shape[1])
        for node, values in capacity.members:
            usage += np.asarray(values)[grid[node]]
        total[usage > capacity.limit + CAPACITY_TOLERANCE * abs(capacity.limit)] = np.inf
    return float(total.min())


def best_partition(problem: PartitionProblem) -> float:
    """The least objective of a partition problem; inf if infeasible."""
    length, stages = len(problem.blocks), problem.num_stages
    sizes = [len(problem.classes[kind]) for kind in problem.blocks]
    if math.prod(sizes) * math.comb(max(length - 1, 0), stages - 1) > _MAX_CASES:
        raise ValueError(f"too many partitions to try; limit {_MAX_CASES}")
    grid = np.indices(sizes).reshape(length, -1)
    value = {
        name: np.stack(
            [
                np.array([getattr(o, name) for o in problem.classes[kind]])[grid[block]]
                for block, kind in enumerate(problem.blocks)
            ]
        )
        for name in (
            "time_s",
            "static_bytes",
            "saved_bytes",
            "sync_s",
            "transient_bytes",
            "device",
        )
    }
    cut_sets = (
        [problem.fixed_cuts]
        if problem.fixed_cuts is not None
        else itertools.combinations(range(1, length), stages - 1)
    )
    return min((_best_options(problem, cuts, value) for cuts in cut_sets), default=math.inf)


def _best_options(
    problem: PartitionProblem, cuts: tuple[int, ...], value: dict[str, np.ndarray]
) -> float:
    """The least objective with these cuts, over every choice of options at once."""
    stages = problem.stages(cuts)
    if min(len(stage) for stage in stages) < problem.min_blocks:
        return math.inf
    times, edges, syncs, kept, transient = [], [], [], [], []
    alike = np.ones(value["time_s"].shape[1], dtype=bool)
    for k, stage in enumerate(stages):
        held = slice(stage.start, stage.stop)
        boundary = sum(
            problem.hop_scale[hop] * problem.boundary_s[c - 1]
            for hop, c in enumerate(cuts)
            if c in (stage.start, stage.stop)
        )
        alike &= (value["device"][held] == problem.stage_device[k]).all(axis=0)
        work = problem.time_scale[k] * value["time_s"][held].sum(axis=0)
        times.append(work + boundary)
        edges.append(boundary)
        syncs.append(value["sync_s"][held].sum(axis=0))
        used = problem.stage_fixed_bytes[k] + value["static_bytes"][held].sum(axis=0)
        kept.append(used + problem.in_flight[k] * value["saved_bytes"][held].sum(axis=0))
        transient.append(value["transient_bytes"][held].max(axis=0))
    fits, rank_tops, rank_syncs = alike, [], []
    for on_rank in problem.rank_stages():
        used = np.sum([kept[k] for k in on_rank], axis=0)
        used = used + np.max([transient[k] for k in on_rank], axis=0)
        capacity = problem.capacity_bytes[on_rank[0]]
        fits &= used <= capacity + CAPACITY_TOLERANCE * abs(capacity)
        whole = _counted(problem, [times[k] for k in on_rank])
        if not problem.boundary_in_max:
            work = _counted(problem, [times[k] - edges[k] for k in on_rank])
            whole = np.maximum(work, _counted(problem, [np.array(edges[k]) for k in on_rank]))
        rank_tops.append(whole)
        rank_syncs.append(np.sum([syncs[k] for k in on_rank], axis=0))
    total = problem.sum_weight * np.sum(times, axis=0) + np.max(rank_syncs, axis=0)
    total = total + problem.bottleneck_weight * np.max(rank_tops, axis=0)
    return float(np.where(fits, total, np.inf).min())


def _counted(problem: PartitionProblem, stages: list[np.ndarray]) -> np.ndarray:
    """The sum of a rank's stages, in part each as long as the longest."""
    longest = len(stages) * np.max(stages, axis=0)
    return np.asarray(np.sum(stages, axis=0) * (1 - problem.stage_share)) + (
        problem.stage_share * longest
    )


def best_layers(problem: LayersProblem) -> float:
    """The least objective of a problem of equal layers; inf if infeasible."""
    counts = _multisets(problem.num_layers, problem.num_stages, len(problem.time_s))
    used = (counts * np.array(problem.option_bytes)).sum(axis=2)
    free = np.array(problem.free_bytes)
    fits = (used <= free + CAPACITY_TOLERANCE * np.abs(free)) & (counts.sum(axis=2) > 0)
    times = counts @ np.array(problem.time_s) + np.array(problem.end_s)
    tail = counts @ np.array(problem.synced_s) - times.cumsum(axis=1)
    total = times.sum(axis=1) + (problem.num_micro_batches - 1) * times.max(axis=1)
    total += np.maximum(tail.max(axis=1), 0.0)
    return float(np.where(fits.all(axis=1), total, np.inf).min())


@functools.cache
def _multisets(layers: int, stages: int, options: int) -> NDArray[np.float64]:
    """Every way to give so many equal layers a stage and an option: [way, stage, option]."""
    places = stages * options
    if math.comb(layers + places - 1, layers) > _MAX_CASES:
        raise ValueError(f"too many ways to deal out layers; limit {_MAX_CASES}")
    chosen = np.array(list(itertools.combinations_with_replacement(range(places), layers)))
    return (chosen[:, :, None] == np.arange(places)).sum(axis=1).reshape(-1, stages, options) * 1.0
