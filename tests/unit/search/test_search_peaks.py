"""What a partition is held to against what its ranks hold: a sum over blocks, and a walk over
actions."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, plan_captured, planning_setting
from autopar.errors import InfeasiblePlan
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.search.grids import grids
from autopar.search.planner import Planner
from autopar.search.stages import walked_bytes
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.mlp import MLP
from solvers.partition import solve_partition


def wide_mlp(hidden=8192):
    """Weights that are far larger than a bucket of gradients."""
    with torch.device("meta"):
        return capture(MLP(4, hidden), {name: torch.empty(64, hidden) for name in ("x", "y")})


def wide_gpt():
    config = GPTConfig(layers=1, hidden=4096, heads=32, vocab=64000, seq_len=512)
    with torch.device("meta"):
        tokens = torch.zeros(16, 512, dtype=torch.long)
        return capture(GPT(config), {"input_ids": tokens, "labels": tokens})


@pytest.mark.slow
@pytest.mark.parametrize("build", [wide_mlp, wide_gpt])
def test_no_rank_holds_more_than_the_sum_but_for_a_few_buckets(build):
    """Where more room than that is left the search takes no closer look."""
    draw, tightest = random.Random(0), 0.0
    planner = Planner(setting=planning_setting(build(), "local:4", PlanOptions(price_pins=False)))
    for grid in grids(planner.setting):
        options, problem = next(iter(planner.problems(grid)))
        plenty = dataclasses.replace(problem, capacity_bytes=(1e15,) * problem.num_stages)
        found = solve_partition(plenty, method="dp")
        sent = max(o.state.unreduced_bytes for each in options.values() for o in each)
        for _ in range(8):
            cuts = sorted(draw.sample(range(1, len(problem.blocks)), problem.num_stages - 1))
            chosen = tuple(draw.randrange(len(problem.classes[kind])) for kind in problem.blocks)
            use = problem.use(tuple(cuts), chosen)
            drawn = dataclasses.replace(
                found, cuts=tuple(cuts), options=chosen, stage_bytes=use.used_bytes
            )
            peaks = walked_bytes(
                planner.pricer, grid, options, problem, drawn, problem.rank_stages()
            )
            for on_rank in problem.rank_stages():
                held = sum(use.used_bytes[k] for k in on_rank)
                assert peaks[on_rank[0]] <= held + 2 * DEFAULT_CAP_BYTES + sent, (grid, chosen)
                tightest = max(tightest, peaks[on_rank[0]] / held)
    assert tightest > 0.99


@pytest.mark.parametrize(
    "pins",
    [
        {"data": 4, "zero": 3, "micro_batch": 4},
        {"pipeline": 2, "data": 2, "zero": 3, "micro_batch": 2, "schedule": "gpipe"},
    ],
    ids=["the gradient that is sent", "gradients of all micro-batches"],
)
def test_memory_that_is_not_enough_is_told_from_memory_that_is(pins):
    """Nothing leaner is left to choose: what fits has a plan, and a little less has none."""
    captured = wide_mlp(16384)

    def plan(limit=None):
        pairs = tuple((key, str(value)) for key, value in pins.items())
        options = PlanOptions(price_pins=False, pins=pairs, memory_limit_bytes=limit)
        return plan_captured(captured, "4:h100-sxm", options).plan

    peak = plan().prediction.peak_bytes
    assert plan(int(1.01 * peak)).prediction.peak_bytes <= 1.01 * peak
    for share in (0.99, 0.97, 0.94):
        with pytest.raises(InfeasiblePlan):
            plan(int(share * peak))
