"""A sharp lower bound on a partition problem: its linear relaxation, stage by stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import pulp

from solvers.backends import Backend
from solvers.partition_bound import least_bottleneck, least_cuts, lower_bound
from solvers.partition_longest import least_longest
from solvers.partition_problem import PartitionProblem
from solvers.solution import CAPACITY_TOLERANCE, Status

_SLACK = 1e-6
_BRANCHES = 3
_LONGEST = "longest"
_Terms = list[tuple[pulp.LpVariable, float]]


def relaxed_bound(
    problem: PartitionProblem,
    backend: Backend,
    *,
    enough: float = math.inf,
    time_limit_s: float = 10.0,
) -> float:
    """A lower bound on the objective, never below `lower_bound`; inf where nothing fits.

    Blocks may be split and stages take any of them, but every stage keeps to its own memory, with
    its own number of micro-batches in flight, and no rank may be longer than the longest. A first
    or last block that is alone of its class stays in the first or last stage.

    Whole blocks tell more: either the longest rank takes at least what some option takes, or no
    block runs by that option or by a longer one. The smaller of both relaxations is a bound again,
    and is taken for the first option longer than the longest rank so far, until that gains
    nothing or the bound is `enough`.
    """
    cheap = lower_bound(problem)
    if math.isinf(cheap) or cheap >= enough:
        return cheap
    scaled = problem.scaled()
    scale = min(scaled.time_scale)
    times = sorted({scale * o.time_s for kind in set(scaled.blocks) for o in scaled.classes[kind]})

    def relax(least_s: float, below_s: float = math.inf) -> tuple[float, float]:
        return _relax(scaled, backend, time_limit_s, max(least_s, shortest_s), below_s)

    shortest_s = max(least_bottleneck(scaled), least_longest(scaled))
    if math.isinf(shortest_s):
        return math.inf
    bound, longest_s = relax(shortest_s)
    for _ in range(_BRANCHES):
        step_s = next((t for t in times if t > longest_s * (1 + _SLACK)), math.inf)
        if bound >= enough or math.isinf(step_s):
            break
        without, _ = relax(shortest_s, step_s)
        if without <= bound * (1 + _SLACK):
            break
        longer, longest_s = relax(step_s)
        bound = max(bound, min(without, longer))
        if without <= longer:
            break
    return max(cheap, bound)


def _relax(
    problem: PartitionProblem,
    backend: Backend,
    time_limit_s: float,
    least_s: float,
    below_s: float,
) -> tuple[float, float]:
    """A bound where the longest rank takes `least_s` and no block `below_s` or more, and how long
    the longest rank is then."""
    model = _model(problem, least_s, below_s)
    if model is None:
        return math.inf, math.inf
    result = backend.solve(model, time_limit_s=time_limit_s, gap=0.0, relax=True)
    if result.status is Status.INFEASIBLE:
        return math.inf, math.inf
    if not math.isfinite(result.bound):
        return 0.0, math.inf
    longest_s = model.variablesDict()[_LONGEST].value()
    bound = (result.bound + least_cuts(problem)) * (1 - _SLACK)
    return bound, math.inf if longest_s is None else longest_s


def _model(problem: PartitionProblem, least_s: float, below_s: float) -> pulp.LpProblem | None:
    """How many blocks of a class run by which option on which stage, in parts; None where some
    class has no option that takes less than `below_s`."""
    model = pulp.LpProblem("stages", pulp.LpMinimize)
    longest = model.add_variable(_LONGEST, lowBound=least_s)
    sync = model.add_variable("sync", lowBound=0.0)
    counts = Counter(problem.blocks)
    work: list[_Terms] = [[] for _ in range(problem.num_stages)]
    held: list[_Terms] = [[] for _ in range(problem.num_stages)]
    once: list[_Terms] = [[] for _ in range(problem.num_stages)]
    for kind, count in sorted(counts.items()):
        parts = []
        for option, values in enumerate(problem.classes[kind]):
            if min(problem.time_scale) * values.time_s >= below_s:
                continue
            for stage in _stages(problem, kind, count):
                if values.device != problem.stage_device[stage]:
                    continue
                part = model.add_variable(f"n_{kind}_{option}_{stage}", lowBound=0.0)
                parts.append(part)
                work[stage].append((part, problem.time_scale[stage] * values.time_s))
                saved = problem.in_flight[stage] * values.saved_bytes
                held[stage].append((part, values.static_bytes + saved))
                once[stage].append((part, values.sync_s))
        if not parts:
            return None
        model += pulp.lpSum(parts) == count
    for stages in problem.rank_stages():
        for spent in _counted(problem, [work[stage] for stage in stages]):
            model += pulp.LpAffineExpression(spent) <= longest
        used = [term for stage in stages for term in held[stage]]
        unit = max(1.0, problem.capacity_bytes[stages[0]])
        model += (
            pulp.LpAffineExpression([(part, nbytes / unit) for part, nbytes in used])
            <= _free_bytes(problem, stages) / unit
        )
        model += pulp.LpAffineExpression([t for stage in stages for t in once[stage]]) <= sync
    model.setObjective(
        pulp.LpAffineExpression([term for terms in work for term in terms])
        + problem.bottleneck_weight * longest
        + sync
    )
    return model


def _counted(problem: PartitionProblem, stages: list[_Terms]) -> Iterator[_Terms]:
    """What a rank's stages count for, whichever of them is the longest."""
    share, several = problem.stage_share, len(stages)
    for longest in range(several if share else 1):
        own_s = [1 - share + share * several * (index == longest) for index in range(several)]
        yield [
            (part, (own if share else 1.0) * seconds)
            for own, terms in zip(own_s, stages, strict=True)
            for part, seconds in terms
        ]


def _stages(problem: PartitionProblem, kind: int, count: int) -> Iterator[int]:
    """The stages on which blocks of a class may run."""
    first, last = problem.blocks[0], problem.blocks[-1]
    if count == 1 and kind == first:
        yield 0
    elif count == 1 and kind == last:
        yield problem.num_stages - 1
    else:
        yield from range(problem.num_stages)


def _free_bytes(problem: PartitionProblem, stages: Sequence[int]) -> float:
    """What a rank has for its stages' blocks, beside the least that one of them needs to run."""
    capacity = problem.capacity_bytes[stages[0]] * (1 + CAPACITY_TOLERANCE)
    running = min(
        option.transient_bytes for kind in set(problem.blocks) for option in problem.classes[kind]
    )
    return capacity - sum(problem.stage_fixed_bytes[k] for k in stages) - running
