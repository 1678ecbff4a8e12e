"""What the schedule of a plan implies: its action lists, and which stages share ranks."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.mesh import MeshAxis
from autopar.plan.plan import Plan, StagePlan
from autopar.plan.text import spans
from autopar.schedules.action import Schedule
from autopar.schedules.registry import SCHEDULES, build_schedule

TITLES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "interleaved 1F1B",
    "looped-bfs": "looped breadth-first",
    "zb-h1": "zero bubble H1",
    "zbv": "zero bubble V",
    "dualpipev": "DualPipeV",
    "pipedream": "PipeDream, stale weights",
}
"""Schedules by the names the field has for them."""


def plan_schedule(plan: Plan) -> Schedule:
    """The action lists that a plan's prediction simulates and its program runs."""
    return build_schedule(plan.schedule, plan.pipeline, plan.training.micro_batches, plan.chunks)


def splits_backward(plan: Plan) -> bool:
    """Whether input and weight gradients are computed apart."""
    return SCHEDULES[plan.schedule].splits_backward


def schedule_flushes(plan: Plan) -> bool:
    """Whether all micro-batches of a step see the same weights."""
    return SCHEDULES[plan.schedule].flushes


def rank_groups(stages: Sequence[StagePlan]) -> list[list[StagePlan]]:
    """The stages that share their ranks, in order of the first of each."""
    groups: dict[tuple[int, ...], list[StagePlan]] = {}
    for stage in stages:
        groups.setdefault(stage.ranks, []).append(stage)
    return list(groups.values())


def ranks_peak_bytes(stages: Sequence[StagePlan]) -> float:
    """What a rank that runs these stages needs at its peak."""
    return sum(figure for stage in stages for _, figure in stage.memory_bytes)


def own_meshes(plan: Plan) -> dict[tuple[MeshAxis, ...], list[StagePlan]]:
    """The stages by their mesh; the plan's, where a stage has it, comes first."""
    found: dict[tuple[MeshAxis, ...], list[StagePlan]] = {}
    for stage in sorted(plan.stages, key=lambda stage: plan.mesh(stage) != plan.axes):
        found.setdefault(plan.mesh(stage), []).append(stage)
    return found


def mesh_text(plan: Plan) -> str:
    """`data 2 x tensor 2`, and where stages differ `data 4 x tensor 1 (stage 1: data ...)`."""
    text = _axes_text(plan.axes)
    for mesh, stages in own_meshes(plan).items():
        if mesh != plan.axes:
            which = f"stage{'s' * (len(stages) > 1)} {spans(stage.index for stage in stages)}"
            text += f" ({which}: {_axes_text(mesh)})"
    return text


def _axes_text(axes: Sequence[MeshAxis]) -> str:
    return " x ".join(f"{axis.name} {axis.size}" for axis in axes)


def pipeline_text(plan: Plan) -> str:
    """`4 stages (1F1B)`, `4 ranks x 2 chunks (interleaved 1F1B)`."""
    title = TITLES.get(plan.schedule, plan.schedule)
    shape = (
        f"{plan.pipeline} stages"
        if plan.chunks == 1
        else f"{plan.pipeline} ranks x {plan.chunks} chunks"
    )
    return f"{shape} ({title})"
