"""The techniques that came next, and why each lost: by its time, or because it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil

from autopar.plan.plan import Candidate, Prediction
from autopar.plan.text import amount, duration
from autopar.search.planner import Found
from autopar.search.stages import Staged
from solvers.partition import lower_bound
from solvers.solution import Status

SHOWN = 5
"""Runners-up of a plan where no number is asked for."""

_PLENTY_BYTES = 2.0**80

Predict = Callable[[Staged], Prediction]


def runners_up(
    found: Found, best: Prediction, top: int | None, predict: Predict, scale: float = 1.0
) -> tuple[Candidate, ...]:
    """The next `top` techniques after the `best`, each by its best grid, in the order of their step
    times.

    A grid that differs in its micro-batch alone is no other technique. One that does not fit stands
    where its bound would place it, if that is before the last of those that fit. Times are stated
    times `scale`, as the certificate states those of the best.
    """
    count = SHOWN if top is None else top
    solved = _of_techniques(found.solved, lambda staged: staged.solution.objective)
    solved.pop(found.best.grid.technique, None)
    missed = [staged for staged in found.unfit if staged.solution.status is Status.INFEASIBLE]
    unfit = _of_techniques(missed, _least_s)
    known = {staged.grid.technique for staged in found.solved}
    last_s = sorted(time_s for time_s, _ in solved.values())[:count]
    ranked = [(time_s, 0, staged) for time_s, staged in solved.values()]
    ranked += [
        (time_s, 1, staged)
        for technique, (time_s, staged) in unfit.items()
        if technique not in known and (len(last_s) < count or time_s < last_s[-1])
    ]
    ranked.sort(key=lambda item: item[:2])
    return tuple(
        _too_large(staged, scale * time_s)
        if lacks
        else _slower(staged, found.best, predict(staged), best, scale)
        for time_s, lacks, staged in ranked[:count]
    )


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


def _slower(
    staged: Staged, best: Staged, prediction: Prediction, chosen: Prediction, scale: float
) -> Candidate:
    """A candidate that fits, with the term of the step in which it loses most."""
    objective, best_s = staged.solution.objective, best.solution.objective
    before = dict(chosen.time_s)
    name, more_s = max(
        ((name, time_s - before.get(name, 0.0)) for name, time_s in prediction.time_s),
        key=lambda term: term[1],
    )
    why = f": {name.replace('_', ' ')} +{duration(more_s)}" if more_s > 0 else ""
    return _candidate(
        staged,
        step_s=scale * objective,
        peak_bytes=prediction.peak_bytes,
        verdict=f"{objective / best_s - 1:+.1%} step time{why}",
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
        verdict=verdict,
    )
