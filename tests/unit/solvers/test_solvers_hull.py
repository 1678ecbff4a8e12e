"""Corners of what lies above lines, against a search over points."""

import math

import numpy as np
import pytest

from solvers.hull import corners


def test_corners_are_where_lines_meet():
    lines = [(0.0, 1.0), (1.0, 4.0), (3.0, 8.0)]
    assert corners(lines, 0.0) == [(8.0, 0.0), (2.0, 2.0), (1.0, 3.0)]
    assert corners(lines, 1.0) == [(5.0, 1.0), (2.0, 2.0), (1.0, 3.0)]
    assert corners(lines, 5.0) == [(1.0, 5.0)]
    assert corners([(0.0, 2.0)], 0.0) == [(2.0, 0.0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_point_costs_less_than_a_corner_at_any_price(seed):
    random = np.random.default_rng(seed)
    points = random.uniform(0.1, 1.0, (30, 2))
    lines = [(p, float((points @ [1.0, p]).min())) for p in (0.0, *random.uniform(0, 9, 4))]
    found = corners(lines, float(points[:, 1].min()))
    assert [size for _, size in found] == sorted(size for _, size in found)
    for price in random.uniform(0, 20, 50):
        least = min(cost + price * size for cost, size in found)
        assert least <= float((points @ [1.0, price]).min()) * (1 + 1e-9)
    for price, least in lines:
        assert math.isclose(min(c + price * s for c, s in found), least, rel_tol=1e-9) or price > 0
