"""The techniques that came next, and why each lost: by its time, or because it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil, inf

from autopar.plan.plan import Candidate
from autopar.plan.text import amount, duration
from autopar.search.found import Found
from autopar.search.grid import Grid
from autopar.search.simulated import Simulated, Simulator
from autopar.search.stages import Staged
from solvers.partition import lower_bound
from solvers.solution import Status

SHOWN = 5
"""Runners-up of a plan where no number is asked for."""

_PLENTY_BYTES = 2.0**80


def runners_up(
    found: Found, best: Simulated, simulator: Simulator, scale: float = 1.0
) -> tuple[Candidate, ...]:
    """The next `top` techniques after the `best`, each by its best grid, in the order of their
    simulated steps.

    A grid that differs in its micro-batch alone is no other technique. One that does not fit stands
    where its bound would place it, if that is before the last of those that fit; bounds are stated
    times `scale`, as the certificate states its own.
    """
    top = simulator.pricer.setting.top
    count = SHOWN if top is None else top
    solved = _of_techniques(found.solved, lambda staged: staged.solution.objective)
    solved.pop(best.staged.grid.technique, None)
    missed = [staged for staged in found.unfit if staged.solution.status is Status.INFEASIBLE]
    unfit = _of_techniques(missed, _least_s)
    known = {staged.grid.technique for staged in found.solved}
    next_best = sorted(solved.values(), key=lambda item: item[0])[:count]
    simulated = map(simulator.of, (staged for _, staged in next_best))
    ranked = [(own.prediction.step_s, _slower(own, best)) for own in simulated]
    last_s = max(step_s for step_s, _ in ranked) if len(ranked) == count else inf
    ranked += [
        (scale * time_s, _too_large(staged, scale * time_s))
        for technique, (time_s, staged) in unfit.items()
        if technique not in known and scale * time_s < last_s
    ]
    ranked.sort(key=lambda item: item[0])
    return tuple(candidate for _, candidate in ranked[:count])


def _of_techniques(
    found: Iterable[Staged], time_s: Callable[[Staged], float]
) -> dict[object, tuple[float, Staged]]:
    """The best of every technique, with its time."""
    least: dict[object, tuple[float, Staged]] = {}
    for staged in found:
        key, own = staged.grid.technique, time_s(staged)
        if key not in least or own < least[key][0]:
            least[key] = (own, staged)
    return least


def _least_s(staged: Staged) -> float:
    """What a grid that does not fit would take at the least if memory were no matter."""
    plenty = (_PLENTY_BYTES,) * staged.problem.num_stages
    return lower_bound(replace(staged.problem, capacity_bytes=plenty))


def _slower(own: Simulated, best: Simulated) -> Candidate:
    """A candidate that fits, with the term of the step in which it loses most."""
    step_s, best_s = own.prediction.step_s, best.prediction.step_s
    before = dict(best.prediction.time_s)
    name, more_s = max(
        ((name, time_s - before.get(name, 0.0)) for name, time_s in own.prediction.time_s),
        key=lambda term: term[1],
    )
    why = f": {name.replace('_', ' ')} +{duration(more_s)}" if more_s > 0 else ""
    return _candidate(
        own.staged,
        step_s=step_s,
        peak_bytes=own.prediction.peak_bytes,
        verdict=f"{step_s / best_s - 1:+.1%} step time{why}",
    )


def _too_large(staged: Staged, bound_s: float) -> Candidate:
    """A candidate that does not fit, with what it lacks at the least."""
    name, short = max(staged.solution.conflict, key=lambda item: item[1])
    verdict = (
        f"does not fit: {name} lacks {amount(ceil(short))}; takes at least {duration(bound_s)}"
    )
    return _candidate(staged, step_s=None, peak_bytes=None, verdict=verdict)


def _candidate(
    staged: Staged, *, step_s: float | None, peak_bytes: float | None, verdict: str
) -> Candidate:
    grid = staged.grid
    return Candidate(
        pipeline=grid.pipeline,
        axes=grid.mesh,
        micro_batch=grid.micro_batch,
        schedule=grid.schedule,
        chunks=grid.chunks,
        step_s=step_s,
        peak_bytes=peak_bytes,
        verdict=f"{_own_text(grid)}{verdict}",
    )


def _own_text(grid: Grid) -> str:
    """The meshes of the ranks of the pipeline, where they differ: `ranks of 2 x 1, 1 x 2; `."""
    sizes = ", ".join(" x ".join(map(str, own)) for own in grid.own)
    return f"ranks of {sizes}; " if sizes else ""
