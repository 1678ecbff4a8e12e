"""Where the simulated step of a plan goes, rank by rank of its pipeline: as text and as data."""

from __future__ import annotations

from typing import Any

from autopar.plan.pipeline import rank_groups
from autopar.plan.plan import Plan
from autopar.plan.text import amount, columns, decimals, duration, percent, spans, time_unit
from autopar.schedules.memory_curve import Point
from autopar.schedules.step import Step


def step_text(plan: Plan, step: Step) -> str:
    """One line for all ranks, and a row for each rank of the pipeline."""
    exposed_s = sum(rank.exposed_s for rank in step.ranks) / len(step.ranks)
    line = (
        f"devices compute {percent(step.utilization)} of the time; exposed communication "
        f"{duration(exposed_s)} a rank ({percent(step.exposed_fraction)}), bubble "
        f"{percent(step.bubble_fraction)}"
    )
    scale, unit = time_unit(rank.step_s for rank in step.ranks)
    places = decimals(step.step_s / scale)
    rows = []
    for group, rank, curve in zip(rank_groups(plan.stages), step.ranks, step.memory, strict=True):
        peak = _peak(curve)
        times = (rank.compute_s, rank.collectives_s, rank.messages_s, rank.idle_s)
        rows.append(
            (
                spans(stage.index for stage in group),
                *(f"{seconds / scale:.{places}f}" if seconds else "" for seconds in times),
                percent(rank.utilization),
                amount(peak.held_bytes),
                f"{peak.time_s / scale:.{places}f}",
            )
        )
    waits = ("compute", "collectives", "messages", "bubble", "utilization", "peak memory")
    header = ("stages" if plan.chunks > 1 else "stage", *waits, "reached at")
    return "\n".join([line, f"times in {unit}:", columns(header, rows)])


def step_summary(plan: Plan, step: Step) -> dict[str, Any]:
    """The same as JSON data."""
    return {
        "step_s": step.step_s,
        "utilization": step.utilization,
        "exposed_communication_fraction": step.exposed_fraction,
        "bubble_fraction": step.bubble_fraction,
        "ranks": [
            {
                "stages": [stage.index for stage in group],
                "ranks": list(group[0].ranks),
                "compute_s": rank.compute_s,
                "collectives_s": rank.collectives_s,
                "messages_s": rank.messages_s,
                "bubble_s": rank.idle_s,
                "utilization": rank.utilization,
                "peak_bytes": _peak(curve).held_bytes,
                "peak_at_s": _peak(curve).time_s,
            }
            for group, rank, curve in zip(
                rank_groups(plan.stages), step.ranks, step.memory, strict=True
            )
        ],
    }


def _peak(curve: tuple[Point, ...]) -> Point:
    """The first moment of the most."""
    return max(curve, key=lambda point: point.held_bytes)
