"""Least sums of tables: what large ones leave out changes no entry."""

import math

import numpy as np
import pytest

from solvers import choice_minimise
from solvers.choice_core import distinct
from solvers.choice_minimise import minimise_factors


def tables(seed: int):
    """Factors of node 0 and some neighbours, of which most pairs may be impossible and some options
    are alike."""
    rng = np.random.default_rng(seed)
    sizes = {node: int(rng.integers(1, 6)) for node in range(int(rng.integers(2, 6)))}
    around = tuple(range(1, len(sizes)))
    factors = [((0,), rng.integers(0, 4, sizes[0]).astype(float))]
    for _ in range(int(rng.integers(1, 5))):
        others = rng.permutation(around)[: int(rng.integers(1, 3))].tolist()
        nodes = tuple(rng.permutation([0, *others]).tolist())
        table = rng.integers(0, 4, [sizes[node] for node in nodes]).astype(float)
        table[rng.random(table.shape) < rng.choice([0.0, 0.5, 0.9])] = np.inf
        factors.append((nodes, table))
    read = {node for nodes, _ in factors for node in nodes}
    return tuple(node for node in around if node in read), factors


def whole(around, factors):
    """The sums over (neighbours, node 0), all at once."""
    order = (*around, 0)
    total = 0.0
    for nodes, table in factors:
        axes = sorted(range(len(nodes)), key=lambda axis: order.index(nodes[axis]))
        kept = tuple(slice(None) if node in nodes else None for node in order)
        total = total + table.transpose(axes)[kept]
    return total


@pytest.mark.parametrize("scattered", [0, 1, math.inf])
def test_what_is_left_out_changes_nothing(monkeypatch, scattered):
    monkeypatch.setattr(choice_minimise, "_WORTH_LESS", 0)
    monkeypatch.setattr(choice_minimise, "_WORTH_MERGING", 0)
    monkeypatch.setattr(choice_minimise, "_SCATTERED", scattered)
    ran = []
    real = choice_minimise._minimise_scattered
    monkeypatch.setattr(
        choice_minimise, "_minimise_scattered", lambda *args: ran.append(1) or real(*args)
    )
    for seed in range(400):
        around, factors = tables(seed)
        least, best = minimise_factors(0, around, factors)
        total = whole(around, factors)
        assert np.array_equal(least, total.min(axis=-1))
        possible = np.isfinite(least)
        assert np.array_equal(best[possible], total.argmin(axis=-1)[possible])
    assert bool(ran) == (scattered < math.inf)


def test_sets_of_what_two_readers_want():
    """Of a million sums one in some hundred is possible."""
    wants = [(i, j) for i in range(40) for j in range(i, 40)]
    has = np.array([[0.0 if x in pair else np.inf for x in range(40)] for pair in wants])
    cost = np.arange(len(wants), dtype=float)
    least, best = minimise_factors(0, (1, 2), [((0,), cost), ((0, 1), has), ((0, 2), has)])
    for i in range(40):
        for j in range(40):
            lowest = min(k for k, pair in enumerate(wants) if {i, j} <= set(pair))
            assert best[i, j] == lowest
            assert least[i, j] == cost[lowest]


def test_rows_are_told_apart_in_their_order():
    rows = np.array([[1.0, 2.0], [3.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 0.0]])
    first, kind = distinct(rows)
    assert first == [0, 1, 3]
    assert kind.tolist() == [0, 1, 0, 2, 1]
    first, kind = distinct(rows.T)
    assert (first, kind.tolist()) == ([0, 1], [0, 1])
