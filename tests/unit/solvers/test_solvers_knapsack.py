from __future__ import annotations

import itertools

import numpy as np
import pytest

from solvers import partition_knapsack
from solvers.partition_frontier import pareto
from solvers.partition_knapsack import Group, best_multiplier, pack


def random_groups(rng: np.random.Generator) -> list[Group]:
    whole = rng.random() < 0.5
    groups = []
    for _ in range(int(rng.integers(1, 4))):
        size = int(rng.integers(1, 4))
        cost, used = (rng.integers(0, 7, size) if whole else 7 * rng.random(size) for _ in range(2))
        count = int(rng.integers(1, 3))
        groups.append(Group(count=count, cost=cost.astype(float), used=used.astype(float)))
    return groups


def exhaustive(groups: list[Group], free: float) -> float:
    blocks = [g for g in groups for _ in range(g.count)]
    costs = [
        sum(g.cost[o] for g, o in zip(blocks, options, strict=True))
        for options in itertools.product(*(range(len(g.cost)) for g in blocks))
        if sum(g.used[o] for g, o in zip(blocks, options, strict=True)) <= free
    ]
    return min(costs, default=np.inf)


def test_pack_equals_brute_force():
    for seed in range(400):
        rng = np.random.default_rng(seed)
        groups = random_groups(rng)
        free = float(rng.integers(0, 25))
        best, packing = exhaustive(groups, free), pack(groups, free)
        if np.isinf(best):
            assert packing is None
            continue
        assert packing.cost == pytest.approx(best, rel=1e-9, abs=1e-12)
        assert packing.bound == packing.cost
        assert best_multiplier(groups, free)[1] <= best + 1e-9
        assert pack(groups, free, cutoff=best * (1 - 1e-9) - 1e-9) is None
        beaten = pack(groups, free, cutoff=best * (1 + 1e-6) + 1e-6)
        assert beaten.cost == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_pack_that_gives_up_still_bounds(monkeypatch):
    monkeypatch.setattr(partition_knapsack, "_MAX_POINTS", 1)
    gave_up = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        groups, free = random_groups(rng), float(rng.integers(0, 25))
        best, packing = exhaustive(groups, free), pack(groups, free)
        if packing is not None:
            assert packing.bound <= best + 1e-9
            assert packing.cost >= best - 1e-9
            gave_up += packing.bound < packing.cost
    assert gave_up > 5


def test_pareto_keeps_exactly_the_unbeaten():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        points = rng.integers(0, 8, (3, int(rng.integers(1, 700)))).astype(float)
        kept = points[:, pareto(*points)]
        unique = np.unique(points.T, axis=0)
        beaten = (unique[None] <= unique[:, None]).all(axis=2).sum(axis=1) > 1
        assert sorted(map(tuple, kept.T)) == sorted(map(tuple, unique[~beaten]))
