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
    for seed in range(800):
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


def test_pack_of_many_equal_blocks_equals_a_walk_over_their_counts():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        count, options = int(rng.integers(20, 60)), int(rng.integers(2, 5))
        cost, used = (rng.integers(0, 40, options) for _ in range(2))
        alone_cost, alone_used = (rng.integers(0, 200, 3) for _ in range(2))
        free = int(rng.integers(count * used.min(), count * used.max() + 100))
        least = np.full(free + 1, np.inf)
        for c, u in zip(alone_cost, alone_used, strict=True):
            if u <= free:
                least[u] = min(least[u], c)
        for _ in range(count):
            after = np.full(free + 1, np.inf)
            for c, u in zip(cost, used, strict=True):
                if u <= free:
                    after[u:] = np.minimum(after[u:], least[: free + 1 - u] + c)
            least = after
        many = Group(count=count, cost=cost.astype(float), used=used.astype(float))
        alone = Group(count=1, cost=alone_cost.astype(float), used=alone_used.astype(float))
        packing = pack([many, alone], float(free))
        if np.isinf(least.min()):
            assert packing is None
            continue
        assert packing.cost == packing.bound == pytest.approx(least.min(), rel=1e-12)
        assert (
            sum(used[o] for o in packing.options[:count]) + alone_used[packing.options[-1]] <= free
        )
