"""No plan on a grid is below any of the grid's bounds, and floors are below every option."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, load_source, planning_setting, source_setting
from autopar.schedules.registry import SCHEDULES
from autopar.search.bounds import Bounds, Sharpness
from autopar.search.floors import Floors
from autopar.search.frontier import Frontiers, keeps_one_less
from autopar.search.grids import grids
from autopar.search.pipelines import FREE, Pipeline, Shares, equal_step, least_step
from autopar.search.planner import Planner
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.mlp import MLP
from solvers.partition import solve_partition

LEAN = 4_815_000_000
"""Bytes of a device that leave little beside what it needs for itself."""


def mlp(cluster, **options):
    with torch.device("meta"):
        captured = capture(MLP(4, 512), {k: torch.empty(16, 512) for k in ("x", "y")})
    return Planner(setting=planning_setting(captured, cluster, PlanOptions(**options)))


def gpt(cluster, tied=False, **options):
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=4, hidden=256, heads=4, vocab=512, seq_len=128, tied=tied))
        tokens = torch.zeros(4, 128, dtype=torch.long)
        captured = capture(model, {"input_ids": tokens, "labels": tokens})
    return Planner(setting=planning_setting(captured, cluster, PlanOptions(**options)))


def experts(cluster, **options):
    source = load_source("mixtral_tiny", seq_len=16)
    return Planner(setting=source_setting(source, cluster, PlanOptions(**options)))


SETTINGS = {
    "mlp": lambda: mlp("2x2:h100-sxm", global_batch=16),
    "mlp that lacks room": lambda: mlp(
        "2x2:h100-sxm", global_batch=16, memory_limit_bytes=4_815_000_000
    ),
    "gpt": lambda: gpt("2x2:h100-sxm", global_batch=8, precision="bf16"),
    "tied gpt": lambda: gpt("2x2:h100-sxm", tied=True, global_batch=8, precision="bf16"),
    "gpt on devices of two kinds": lambda: gpt(
        "1x2:h100-sxm+1x2:a100-80gb", global_batch=4, precision="bf16"
    ),
    "experts": lambda: experts(
        "1x4:h100-sxm", global_batch=8, precision="bf16", memory_limit_bytes=5_205_000_000
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_plan_is_below_a_bound_of_its_grid(name):
    planner = SETTINGS[name]()
    bounds, sharper = planner.bounds, 0
    for grid in grids(planner.setting)[::3]:
        best = min(
            (solve_partition(problem, method="dp").bound for _, problem in planner.problems(grid)),
            default=math.inf,
        )
        bound, sharpness = bounds.computed(grid), Sharpness.COMPUTE
        assert bound <= best * (1 + 1e-9)
        while sharpness < Sharpness.SCHEDULED and bound < math.inf:
            found, sharpness = bounds.sharper(grid, sharpness)
            assert found.plain_s <= found.step_s <= best * (1 + 1e-9), (grid, sharpness)
            sharper += found.step_s > found.plain_s * (1 + 1e-6)
    assert sharper > 3


@pytest.mark.parametrize("name", SETTINGS)
def test_every_option_is_above_a_floor_in_every_respect(name):
    planner = SETTINGS[name]()
    homes = [planner.pricer.places.homes(grid) for grid in grids(planner.setting)]
    whole = next(iter({home for of_grid in homes for home in of_grid}))
    floors, close = Floors(planner.pricer.at(whole)), 0
    for grid in grids(planner.setting)[::5]:
        if set(planner.pricer.places.homes(grid)) != {whole}:
            continue
        for options, problem in planner.problems(grid):
            for kind, of_class in options.items():
                least_s = planner.bounds._fastest(kind, grid, whole)
                offered = floors.options(grid, kind, least_s)
                peak = min(option.again.peaks.backward_bytes for option in of_class)
                assert floors.peak_bytes(grid, kind) <= peak
                close += floors.peak_bytes(grid, kind) > 0.9 * peak > 0
                for option in of_class:
                    real = option.as_option(grid.pipe)
                    assert any(
                        floor.time_s <= real.time_s * (1 + 1e-9)
                        and floor.sync_s <= real.sync_s * (1 + 1e-9) + 1e-15
                        and floor.saved_bytes <= real.saved_bytes
                        and floor.static_bytes + floor.saved_bytes
                        <= real.static_bytes + real.saved_bytes
                        and floor.static_bytes + floor.saved_bytes + floor.transient_bytes
                        <= real.static_bytes + real.saved_bytes + real.transient_bytes
                        for floor in offered
                    ), (grid, kind)
            assert problem.num_stages == grid.pipe.num_stages
    assert close > 3 or "two kinds" in name


@pytest.mark.parametrize("name", ["gpt", "experts"])
def test_meshes_share_what_is_kept_only_where_it_is_the_same(name):
    planner, asked = SETTINGS[name](), set()
    shared = Floors(planner.pricer)
    for grid in grids(planner.setting):
        for kind in range(len(planner.setting.chain.classes)):
            asked.add((grid.base, kind))
            alone = Floors(planner.pricer)._kept_on(grid, kind)
            assert shared._kept_on(grid, kind) == alone, (grid, kind)
    assert len(shared._kept) < len(asked)


@pytest.mark.parametrize("name", ["gpt", "gpt on devices of two kinds"])
def test_schedules_share_a_bound_only_where_it_is_the_same(name):
    planner = SETTINGS[name]()
    shared, asked = planner.bounds, grids(planner.setting)
    for grid in asked:
        alone, bound = Bounds(planner.shardings), shared.computed(grid)
        assert bound == alone.computed(grid), grid
        if bound < math.inf:
            held = shared.sharper(grid, Sharpness.SHARDED)
            assert held == alone.sharper(grid, Sharpness.SHARDED), grid
    assert len(shared._plain) < 2 * len(asked) and len(shared._holding) < len(asked)


def test_what_parameters_take_is_found_out_only_where_shardings_leave_a_grid():
    planner, known = SETTINGS["gpt"](), {}
    for grid in grids(planner.setting):
        bounds = Bounds(planner.shardings)
        plain, sharpness = bounds.sharper(grid, Sharpness.COMPUTE)
        assert not bounds._floors and sharpness == Sharpness.SHARDED
        known[grid] = plain.step_s / max(bounds.computed(grid), 1e-9)
    assert min(known.values()) >= 1 - 1e-9 and max(known.values()) > 1 + 1e-3


@pytest.mark.parametrize("name", ["mlp", "gpt", "experts"])
def test_whatever_bytes_cost_no_option_is_below_its_frontier(name):
    planner, random, priced = SETTINGS[name](), np.random.default_rng(0), 0
    whole, blocks = planner.pricer.home, len(planner.setting.chain.blocks)
    frontiers = Frontiers(planner.shardings, Floors(planner.pricer))
    for grid in grids(planner.setting)[::5]:
        if set(planner.pricer.places.homes(grid)) != {whole}:
            continue
        less = keeps_one_less(grid)
        for options, _ in planner.problems(grid):
            for kind, of_class in options.items():
                corners = frontiers.options(grid, kind)
                for option in (each.as_option(grid.pipe) for each in of_class):
                    for held, saved in 10.0 ** random.uniform(-12, -6, (9, 2)):
                        # of so many blocks on a rank one runs
                        ran = held / random.integers(1, blocks + 1)
                        least = min(
                            c.time_s
                            + held * c.static_bytes
                            + (saved + (not less) * held) * c.saved_bytes
                            + ran * c.transient_bytes
                            for c in corners
                        )
                        real = (
                            option.time_s
                            + held * (option.static_bytes + option.saved_bytes)
                            + saved * option.saved_bytes
                            + ran * option.transient_bytes
                        )
                        assert least <= real * (1 + 1e-9), (grid, kind)
                    assert corners[0].sync_s <= option.sync_s * (1 + 1e-9) + 1e-15
                priced += len({c.static_bytes for c in corners}) > 1
    assert priced > 3 or name != "experts"


@pytest.mark.parametrize(("schedule", "chunks"), [c for c in FREE if SCHEDULES[c[0]].flushes])
def test_no_schedule_takes_less_than_its_least(schedule, chunks):
    checked = 0
    for ranks, batches in product((2, 3, 4, 8), (1, 2, 5, 8, 24)):
        if SCHEDULES[schedule].why_not(ranks, chunks, batches):
            continue
        pipe = Pipeline(schedule=schedule, ranks=ranks, chunks=chunks, micro_batches=batches)
        for forward, weight in ((1 / 3, 1 / 3), (0.2, 0.5), (0.5, 0.1), (0.34, 0.0)):
            step = equal_step(pipe, Shares(forward, weight))
            assert least_step(pipe, 1.0, forward, weight) <= step * (1 + 1e-9)
            assert least_step(pipe, weight=weight) <= step * (1 + 1e-9)
            assert least_step(pipe) <= step * (1 + 1e-9)
            checked += 1
    assert checked > 20
