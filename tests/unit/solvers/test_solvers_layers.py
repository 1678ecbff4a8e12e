from __future__ import annotations

import dataclasses
import math

import numpy as np
import pulp
import pytest

from solvers.backends import get_backend
from solvers.brute_force import best_layers
from solvers.layers import pooled_bound, solve_layers
from solvers.layers_problem import LayersProblem
from solvers.random_problems import random_layers_problem
from solvers.solution import Status


def step_s(problem: LayersProblem, counts: tuple[tuple[int, ...], ...]) -> float:
    """The objective again, layer by layer as the formula has it."""
    times, bottleneck, tail = [], 0.0, 0.0
    for stage, row in enumerate(counts):
        layers = [option for option, count in enumerate(row) for _ in range(count)]
        assert layers
        held = sum(problem.option_bytes[stage][o] for o in layers)
        assert held <= problem.free_bytes[stage] * (1 + 1e-9)
        times.append(sum(problem.time_s[o] for o in layers) + problem.end_s[stage])
        bottleneck = max(bottleneck, times[-1])
        tail = max(tail, sum(problem.synced_s[o] for o in layers) - sum(times))
    assert sum(map(sum, counts)) == problem.num_layers
    return sum(times) + (problem.num_micro_batches - 1) * bottleneck + tail


@pytest.mark.parametrize("block", range(4))
def test_equals_brute_force(block):
    for seed in range(600 * block, 600 * (block + 1)):
        problem = random_layers_problem(seed)
        solution, best = solve_layers([problem]), best_layers(problem)
        assert pooled_bound(problem) <= best * (1 + 1e-9), seed
        if math.isinf(best):
            assert solution.status is Status.INFEASIBLE, seed
            assert (solution.counts, solution.problem) == ((), -1)
            continue
        assert solution.status is Status.OPTIMAL, seed
        assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-12), seed
        assert solution.bound <= best * (1 + 1e-9)
        assert step_s(problem, solution.counts) == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "without",
    [
        lambda p: {"num_micro_batches": 1},
        lambda p: {"free_bytes": (math.inf,) * p.num_stages},
        lambda p: {"end_s": (0.0,) * p.num_stages},
        lambda p: {"synced_s": p.time_s},
        lambda p: {"option_bytes": (p.option_bytes[0],) * p.num_stages},
    ],
    ids=["bottleneck", "bytes", "ends", "sync", "bytes of stages"],
)
def test_random_problems_are_decided_by_every_term(without):
    problems = [random_layers_problem(seed) for seed in range(300)]
    best = [best_layers(p) for p in problems]
    plain = [best_layers(dataclasses.replace(p, **without(p))) for p in problems]
    assert sum(a != b for a, b in zip(best, plain, strict=True)) > 50
    assert 20 <= sum(map(math.isinf, best)) <= 150
    assert len({(p.num_stages, len(p.time_s)) for p in problems}) == 12


def test_the_best_of_several_is_the_first_of_the_least():
    for seed in range(60):
        problems = [random_layers_problem(100 * seed + i) for i in range(8)]
        best = [best_layers(problem) for problem in problems]
        solution = solve_layers([*problems, *problems])
        if math.isinf(min(best)):
            assert solution.status is Status.INFEASIBLE
            continue
        assert solution.status is Status.OPTIMAL
        assert solution.objective == pytest.approx(min(best), rel=1e-9, abs=1e-12)
        chosen = problems[solution.problem % len(problems)]
        assert chosen.objective(solution.counts) == solution.objective
        assert solution == solve_layers([*problems, *problems])


def llama(stages: int = 4, micro_batches: int = 32) -> LayersProblem:
    """32 layers, options of any kind that none beats, and memory for few of the fast ones."""
    rng = np.random.default_rng(stages)
    time_s = np.sort(rng.uniform(0.01, 0.02, 12))
    used = np.sort(rng.uniform(0.4e9, 4e9, 12))[::-1]
    return LayersProblem(
        num_layers=32,
        num_micro_batches=micro_batches,
        time_s=tuple(time_s.tolist()),
        synced_s=tuple((time_s + rng.choice([0.0, 0.0005, 0.002], 12)).tolist()),
        end_s=(0.01, *[0.0] * (stages - 2), 0.02)[:stages],
        option_bytes=tuple(tuple((used * (1 - 0.02 * k)).tolist()) for k in range(stages)),
        free_bytes=(50e9 / stages,) * stages,
    )


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_many_layers_of_many_options_are_proven(stages):
    problem = llama(stages)
    solution = solve_layers([problem])
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(step_s(problem, solution.counts), rel=1e-12)
    assert 0.5 * solution.objective < pooled_bound(problem) < solution.objective


def engine_bound(problem: LayersProblem, *, time_limit_s: float = 60.0) -> float:
    """A bound on the objective by an engine, from the formula as it stands."""
    model = pulp.LpProblem("layers", pulp.LpMinimize)
    longest = model.add_variable("longest", lowBound=0.0)
    tail = model.add_variable("tail", lowBound=0.0)
    done, counts = pulp.LpAffineExpression(), []
    for k, (row, end) in enumerate(zip(problem.option_bytes, problem.end_s, strict=True)):
        own = [model.add_variable(f"n_{k}_{o}", lowBound=0, cat="Integer") for o in range(len(row))]
        counts += own
        stage_s = pulp.lpDot(own, problem.time_s) + end
        done = done + stage_s
        model += stage_s <= longest
        model += pulp.lpDot(own, problem.synced_s) - done <= tail
        model += pulp.lpDot(own, [b / 1e9 for b in row]) <= problem.free_bytes[k] / 1e9
        model += pulp.lpSum(own) >= 1
    model += pulp.lpSum(counts) == problem.num_layers
    model.setObjective(done + (problem.num_micro_batches - 1) * longest + tail)
    return get_backend("highs").solve(model, time_limit_s=time_limit_s, gap=1e-7).bound


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 8), (4, 1)])
def test_an_engine_agrees_on_many_layers(stages, micro_batches):
    problem = llama(stages, micro_batches)
    assert solve_layers([problem]).objective == pytest.approx(engine_bound(problem), rel=1e-6)


def test_more_bytes_or_one_more_option_is_never_worse():
    for seed in range(150):
        problem = random_layers_problem(seed)
        before = solve_layers([problem]).objective
        bytes_more = tuple(nbytes + 1.0 for nbytes in problem.free_bytes)
        option_more = {
            "time_s": (*problem.time_s, 1.0),
            "synced_s": (*problem.synced_s, 1.5),
            "option_bytes": tuple((*row, 2.0) for row in problem.option_bytes),
        }
        for change in ({"free_bytes": bytes_more}, option_more):
            after = solve_layers([dataclasses.replace(problem, **change)])
            assert after.objective <= before * (1 + 1e-9)


def test_time_limit_is_labelled():
    solution = solve_layers([llama(), llama(2)], time_limit_s=0.0)
    assert solution.status is Status.TIME_LIMIT
    assert solution.counts == ()
    assert 0 < solution.bound <= solve_layers([llama(), llama(2)]).objective


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"synced_s": (1.0,)}, "synced_s: expected 2 values, found 1"),
        ({"option_bytes": ((1.0, 2.0), (1.0,))}, r"option_bytes\[1\]: expected 2 values, found 1"),
        ({"free_bytes": (1.0,)}, "free_bytes: expected 2 values, found 1"),
        ({"num_layers": 0}, "num_layers: expected at least 1, found 0"),
        ({"end_s": (0.0, math.nan)}, "end_s: expected finite numbers from 0, found nan"),
        ({"time_s": (), "synced_s": ()}, "time_s: expected 1 values, found 0"),
    ],
)
def test_malformed_problems_are_refused(change, message):
    good = {
        "num_layers": 4,
        "num_micro_batches": 2,
        "time_s": (1.0, 2.0),
        "synced_s": (1.0, 2.0),
        "end_s": (0.0, 0.0),
        "option_bytes": ((2.0, 1.0), (2.0, 1.0)),
        "free_bytes": (9.0, 9.0),
    }
    with pytest.raises(ValueError, match=message):
        LayersProblem(**(good | change))
    with pytest.raises(ValueError, match="problems: expected at least one"):
        solve_layers([])
