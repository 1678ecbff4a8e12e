"""Random small problems with everything in them, for tests against `brute_force`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from solvers.choice_problem import Array, Capacity, ChoiceProblem, Edge
from solvers.layers_problem import LayersProblem
from solvers.partition_problem import BlockOption, PartitionProblem


def random_choice_problem(seed: int, max_nodes: int = 6) -> ChoiceProblem:
    """Up to `max_nodes` nodes of 1-4 options: parallel and self edges, forbidden options and
    pairs, up to three capacities, ties (small integers) or scales from 1e-3 to 1e2. Many are
    infeasible.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, max_nodes + 1))
    sizes = [int(size) for size in rng.integers(1, 5, count)]
    values = _values(rng)
    costs = [values((size,)) for size in sizes]
    for cost in costs:
        cost[rng.random(len(cost)) < 0.08] = np.inf
    edges = []
    for _ in range(int(rng.integers(0, 2 * count + 1))):
        src, dst = (int(node) for node in rng.integers(0, count, 2))
        cost = values((sizes[src], sizes[dst]))
        cost[rng.random(cost.shape) < rng.choice([0.0, 0.1, 0.4])] = np.inf
        edges.append(Edge(src=src, dst=dst, cost=cost))
    capacities = [_capacity(rng, f"c{i}", sizes, values) for i in range(int(rng.integers(0, 4)))]
    return ChoiceProblem(node_costs=tuple(costs), edges=tuple(edges), capacities=tuple(capacities))


def _values(rng: np.random.Generator) -> Callable[[tuple[int, ...]], Array]:
    if rng.random() < 0.5:
        return lambda shape: rng.integers(0, 6, shape).astype(float)
    return lambda shape: rng.random(shape) * 10.0 ** rng.integers(-3, 3)


def _capacity(
    rng: np.random.Generator,
    name: str,
    sizes: list[int],
    values: Callable[[tuple[int, ...]], Array],
) -> Capacity:
    members = rng.choice(len(sizes), int(rng.integers(1, len(sizes) + 1)), replace=False)
    usages = [values((sizes[node],)) for node in members]
    least, most = sum(u.min() for u in usages), sum(u.max() for u in usages)
    return Capacity(
        name=name,
        limit=float(least + (most - least) * rng.uniform(-0.05, 0.8)),
        members=tuple((int(node), usage) for node, usage in zip(members, usages, strict=True)),
    )


def random_partition_problem(seed: int) -> PartitionProblem:
    """Up to 6 blocks of up to 3 classes on up to 4 stages, with and without sync, transients,
    uneven capacities, slow stages, boundary costs, fixed cuts. Some are infeasible.
    """
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 7))
    stages = int(rng.integers(1, min(length, 4) + 1))
    whole, sync, transient = rng.random(3) < 0.5

    def value(most: int) -> float:
        return float(rng.integers(0, most + 1)) if whole else float(rng.random() * most)

    classes = tuple(
        tuple(
            BlockOption(
                time_s=value(6),
                static_bytes=value(6),
                saved_bytes=value(3),
                sync_s=value(9) if sync else 0.0,
                transient_bytes=value(6) if transient else 0.0,
            )
            for _ in range(int(rng.integers(1, 4)))
        )
        for _ in range(int(rng.integers(1, 4)))
    )
    in_flight = range(stages, 0, -1) if rng.random() < 0.6 else rng.integers(1, 5, stages)
    even = rng.random() < 0.7
    capacities = [rng.integers(5, 45)] * stages if even else rng.integers(4, 60, stages)
    scale = rng.choice([1.0, 1.5, 2.0], stages) if rng.random() < 0.3 else ()
    fixed = rng.integers(0, 4, stages) if rng.random() < 0.3 else ()
    boundary = [value(3) for _ in range(length - 1)] if rng.random() < 0.4 else ()
    cuts = None
    if rng.random() < 0.2:
        cuts = tuple(sorted(int(c) + 1 for c in rng.permutation(length - 1)[: stages - 1]))
    return PartitionProblem(
        blocks=tuple(int(kind) for kind in rng.integers(0, len(classes), length)),
        classes=classes,
        num_stages=stages,
        in_flight=tuple(int(count) for count in in_flight),
        capacity_bytes=tuple(float(capacity) for capacity in capacities),
        num_micro_batches=int(rng.choice([1, 2, 4, 16])),
        time_scale=tuple(float(factor) for factor in scale),
        stage_fixed_bytes=tuple(float(size) for size in fixed),
        boundary_s=tuple(boundary),
        fixed_cuts=cuts,
        min_blocks=2 if cuts is None and rng.random() < 0.15 else 1,
    )


def random_mixed_problem(seed: int) -> PartitionProblem:
    """As `random_partition_problem`, on devices of up to three kinds, each with options of its own,
    and with cuts that cost more or less between some stages than between others."""
    rng = np.random.default_rng(seed)
    problem = random_partition_problem(int(rng.integers(1 << 30)))
    kinds = int(rng.integers(2, 4))
    slower = rng.choice([0.5, 1.0, 1.5, 3.0], kinds)
    classes = tuple(
        tuple(
            dataclasses.replace(
                option,
                time_s=option.time_s * slower[kind],
                saved_bytes=option.saved_bytes * float(rng.choice([1.0, 2.0])),
                device=kind,
            )
            for kind in range(kinds)
            for option in options[: 1 + int(rng.integers(0, 2))]
        )
        for options in problem.classes
    )
    return dataclasses.replace(
        problem,
        classes=classes,
        stage_device=tuple(int(kind) for kind in rng.integers(0, kinds, problem.num_stages)),
        hop_scale=tuple(float(s) for s in rng.choice([0.5, 1.0, 4.0], problem.num_stages - 1)),
    )


def random_mixed_shared_problem(seed: int) -> PartitionProblem:
    """As `random_shared_problem`, each rank on one of two kinds of devices, with options of its own
    for each; messages between some stages cost nothing."""
    rng = np.random.default_rng(seed)
    problem = random_shared_problem(int(rng.integers(1 << 30)))
    kind_of = {rank: int(rng.integers(0, 2)) for rank in sorted(set(problem.stage_rank))}
    classes = tuple(
        tuple(
            dataclasses.replace(option, time_s=option.time_s * (1 + kind), device=kind)
            for kind in (0, 1)
            for option in options[:2]
        )
        for options in problem.classes
    )
    return dataclasses.replace(
        problem,
        classes=classes,
        stage_device=tuple(kind_of[rank] for rank in problem.stage_rank),
        hop_scale=tuple(float(s) for s in rng.choice([0.0, 1.0, 3.0], problem.num_stages - 1)),
    )


def random_shared_problem(seed: int) -> PartitionProblem:
    """As `random_partition_problem`, with two stages a rank, placed in a loop or a V, and terms
    weighed as by pipelines that interleave, hide messages, or split the backward."""
    rng = np.random.default_rng(seed)
    while True:
        problem = random_partition_problem(int(rng.integers(1 << 30)))
        if problem.num_stages % 2 == 0:
            break
    ranks = problem.num_stages // 2
    there = tuple(range(ranks))
    back = there if rng.random() < 0.5 else there[::-1]
    capacities = [2 * c for c in problem.capacity_bytes[:ranks]]
    return dataclasses.replace(
        problem,
        stage_rank=there + back,
        capacity_bytes=tuple(capacities[r] for r in there + back),
        sum_weight=float(rng.choice([0.25, 0.5, 1.0])),
        max_weight=float(rng.choice([0.0, 1.5, 7.0])),
        boundary_in_max=bool(rng.random() < 0.5),
    )


def random_layers_problem(seed: int) -> LayersProblem:
    """Up to 6 layers of up to 4 options on up to 3 stages, ties (small integers) or any numbers;
    syncs that are short, long, or free, stages that end late, bytes from too few to plenty."""
    rng = np.random.default_rng(seed)
    stages, options = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    layers = int(rng.integers(1, 7 if stages * options <= 8 else 5))
    whole = rng.random() < 0.5

    def values(most: float, *shape: int) -> Array:
        if whole:
            return rng.integers(0, int(most) + 1, shape).astype(float)
        return rng.random(shape) * most

    times = values(6, options)
    sync = values(float(rng.choice([1, 4, 30])), options) * (rng.random() < 0.7)
    used = values(9, 1, options) * rng.choice([1.0, 1.5], (stages, options))
    if rng.random() < 0.5:
        used = values(9, stages, options)
    per_stage = layers / stages
    least, most = per_stage * used.min(axis=1), per_stage * used.max(axis=1)
    free = least + (most - least) * rng.uniform(-0.1, 1.2, stages) + values(3, stages)
    return LayersProblem(
        num_layers=layers,
        num_micro_batches=int(rng.choice([1, 2, 3, 8, 64])),
        time_s=tuple(times.tolist()),
        synced_s=tuple((times + sync).tolist()),
        end_s=tuple((values(4, stages) * (rng.random(stages) < 0.6)).tolist()),
        option_bytes=tuple(map(tuple, used.tolist())),
        free_bytes=tuple((np.floor(free) if whole else free).tolist()),
    )
