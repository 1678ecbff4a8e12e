"""Tiny models on up to four devices, everything tried: the shardings of a block, the partitions of
every grid of the declared space."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, planning_setting
from autopar.errors import InfeasiblePlan
from autopar.ir.graph import Ref
from autopar.plan.flow import block_flow
from autopar.plan.plan import NodeChoice
from autopar.search.grids import grids
from autopar.search.planner import Planner
from autopar.search.sharding import Upkeep, sync_shares_s
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


def tried_shardings(space, prices, upkeep):
    """(seconds, kept bytes) of every combination of strategies and of layouts of parameters, with
    the moves that the program makes."""
    sources = [Ref(source.name) for source, _ in space.parameters]
    stored = [list(enumerate(layouts)) for _, layouts in space.parameters]
    for options in product(*space.options):
        chosen = dict(zip(space.nodes, options, strict=True))
        choices = {
            node.name: NodeChoice(node=node.name, inputs=o.inputs, outputs=o.outputs)
            for node, o in chosen.items()
        }
        run_s = sum(
            sum(prices.compute(node, o, prices)) + sum(prices.inner_s(node, o))
            for node, o in chosen.items()
        )
        made = {Ref(n.name, i): x for n, o in chosen.items() for i, x in enumerate(o.outputs)}
        for layouts in product(*stored):
            own = {ref: layout for ref, (_, layout) in zip(sources, layouts, strict=True)}
            held = {**made, **own}
            kept = sum(w * prices.local_bytes(ref, held[ref]) for ref, w in upkeep.kept.items())
            sync_s = sum(
                upkeep.sync_s[ref][i]
                for ref, (i, _) in zip(sources, layouts, strict=True)
                if ref in upkeep.sync_s
            )
            given = {**space.given, **own}
            try:
                flow = block_flow(space.nodes, choices, given, space.required, space.differentiable)
            except KeyError:  # a move that does not exist
                continue
            yield run_s + sync_s + sum(sum(prices.move_s(m)) for m in flow.moves()), kept


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_shardings_of_a_block_are_the_best_of_all_combinations(settings, devices):
    """Free memory, a price of a byte at which both count, and bytes above all."""
    planner = Planner(setting=settings("mlp", devices))
    seen, largest = set(), 0
    for grid in grids(planner.setting):
        for block_class in planner.setting.chain.classes:
            problem = planner.shardings.of(grid, block_class.index)
            if id(problem) in seen:
                continue
            seen.add(id(problem))
            prices = planner.pricer.prices(grid)
            kept = {Ref(source.name): 4.0 for source, _ in problem.space.parameters}
            block = planner.setting.chain.representative(block_class.index)
            saved = planner.pricer.backwards.saved(block).values
            kept |= {value.ref: 1.0 for value in saved if value.kind == "made"}
            sync_s = sync_shares_s(problem.space, prices, grid.micro_batches)
            upkeep = Upkeep(sync_s=sync_s, kept=kept)
            tried = list(tried_shardings(problem.space, prices, upkeep))
            largest = max(largest, len(tried))
            for price_s in (0.0, 1e-9, 3e-8, 1.0):
                solved = problem.solve(upkeep, price_s)
                least = min(seconds + price_s * nbytes for seconds, nbytes in tried)
                assert solved.objective + price_s * solved.kept_bytes == pytest.approx(
                    least, rel=1e-5
                )
    assert largest >= 50
