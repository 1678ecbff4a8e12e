"""Tiny models on up to four devices: every grid of the declared space against every partition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, planning_setting
from autopar.errors import InfeasiblePlan
from autopar.search.grids import grids
from autopar.search.planner import Planner
from autopar.search.stages import solve_stages
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.mlp import MLP
from solvers.backends import get_backend
from solvers.brute_force import best_partition
from solvers.partition import solve_partition
from solvers.partition_relaxation import relaxed_bound
from solvers.solution import Status


def mlp():
    return MLP(3, 64), {name: torch.empty(8, 64) for name in ("x", "y")}


def gpt(tied):
    tokens = torch.zeros(8, 8, dtype=torch.long)
    config = GPTConfig(layers=1, hidden=16, heads=2, vocab=32, seq_len=8, tied=tied)
    return GPT(config), {"input_ids": tokens, "labels": tokens}


MODELS = {"mlp": mlp, "gpt": lambda: gpt(False), "tied gpt": lambda: gpt(True)}


@pytest.fixture(scope="module")
def settings():
    """Settings by model and devices, with a share of the memory that the best free plan needs."""
    with torch.device("meta"):
        captured = {name: capture(*build()) for name, build in MODELS.items()}

    def build(name, devices, share=None):
        options = PlanOptions(price_pins=False)
        setting = planning_setting(captured[name], f"local:{devices}", options)
        if share is None:
            return setting
        most = max(Planner(setting=setting).search().best.solution.stage_bytes)
        return replace(setting, memory_limit_bytes=int(share * most))

    return build


def same(value, expected):
    return value == expected or value == pytest.approx(expected, rel=1e-9)


def assert_grid_is_right(planner, grid, options, problem):
    """The solver's answer is that of trying all; returns it as the search takes it."""
    best, solution = best_partition(problem), solve_partition(problem, method="dp")
    assert same(solution.objective, best), grid
    assert solution.status is (Status.INFEASIBLE if math.isinf(best) else Status.OPTIMAL), grid
    assert relaxed_bound(problem, get_backend("highs")) <= best * (1 + 1e-9), grid
    if not math.isinf(best):
        assert same(problem.objective(problem.use(solution.cuts, solution.options)), best)
    staged = solve_stages(planner.pricer, grid, options, problem)
    if staged.problem == problem:  # no rank lacked room by a closer look
        assert same(staged.solution.objective, best), grid
    assert staged.solution.objective >= best * (1 - 1e-9), grid
    return staged.solution.objective


CASES = [
    *[("mlp", devices, share) for devices in (1, 2, 3, 4) for share in (None, 0.6, 0.4)],
    *[("gpt", devices, share) for devices in (1, 2, 3) for share in (None, 0.5)],
    ("gpt", 4, 0.6),
    ("tied gpt", 2, 0.6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices", "share"), CASES)
def test_every_grid_is_solved_as_by_trying_all_and_the_search_misses_none(
    settings, name, devices, share
):
    setting = settings(name, devices, share)
    planner, least, problems = Planner(setting=setting), math.inf, 0
    assert 2 <= len(setting.chain.blocks) <= 4
    for grid in grids(setting):
        for options, problem in planner.problems(grid):
            problems += 1
            least = min(least, assert_grid_is_right(planner, grid, options, problem))
    assert problems >= len(grids(setting))
    try:
        found = Planner(setting=setting).search()
    except InfeasiblePlan:
        assert math.isinf(least)
        return
    assert same(found.best.solution.objective, least)
    assert found.bound_s <= least * (1 + 1e-9)
    assert (found.status is Status.OPTIMAL) == same(found.bound_s, least)
