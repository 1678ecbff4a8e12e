"""The step of a plan by events, from the figures in its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.cluster import Cluster
from autopar.ir.mesh import BATCH_AXES, MeshAxis, sized
from autopar.plan.pipeline import plan_schedule, rank_groups
from autopar.plan.plan import RESERVED, Plan, StagePlan
from autopar.plan.text import spans
from autopar.schedules.action import Schedule
from autopar.schedules.held import StageMemory
from autopar.schedules.step import StageLoad, Step, simulate_step


def simulate_plan(plan: Plan) -> Step:
    """The step that the prediction of the plan is of; its ranks are those of the pipeline."""
    loads = stage_loads(plan.stages, plan.axes, plan.cluster)
    return simulate_step(
        plan_schedule(plan), loads, plan.prediction.hides_messages, plan.cluster.slowdown
    )


def rank_names(plan: Plan) -> list[str]:
    """The ranks of the pipeline by devices and stages: `ranks 0-3, stages 0, 4`."""
    names = []
    for group in rank_groups(plan.stages):
        stages = spans(stage.index for stage in group)
        ranks, many = spans(group[0].ranks), "s" if len(group[0].ranks) > 1 else ""
        names.append(f"rank{many} {ranks}, stage{'s' if len(group) > 1 else ''} {stages}")
    return names


def simulate_stages(
    stages: Sequence[StagePlan],
    schedule: Schedule,
    axes: Sequence[MeshAxis],
    cluster: Cluster,
    *,
    hides_messages: bool = True,
) -> Step:
    """The same before there is a plan; without `hides_messages` they take compute's time."""
    loads = stage_loads(stages, axes, cluster)
    return simulate_step(schedule, loads, hides_messages, cluster.slowdown)


def stage_loads(
    stages: Sequence[StagePlan], axes: Sequence[MeshAxis], cluster: Cluster
) -> tuple[StageLoad, ...]:
    """What every stage asks of its ranks."""
    tied = _tied_ranks(stages)
    shares: dict[tuple[int, ...], bool] = {}
    for stage in stages:
        if stage.sizes not in shares:
            own = sized(axes, stage.sizes)
            shares[stage.sizes] = _shares_links(stage, stages, own, cluster)
    return tuple(_load(stage, shares[stage.sizes], tied[stage.index]) for stage in stages)


def _tied_ranks(stages: Sequence[StagePlan]) -> dict[int, tuple[int, ...]]:
    """For every stage the pipeline ranks, its own too, that hold trained parameters of it."""
    rank_of = {s.index: rank for rank, group in enumerate(rank_groups(stages)) for s in group}
    holders: dict[str, set[int]] = {}
    for stage in stages:
        for parameter in stage.parameters:
            if parameter.trainable:
                holders.setdefault(parameter.fqn, set()).add(rank_of[stage.index])
    return {
        stage.index: tuple(sorted(set().union(*(holders.get(p.fqn, ()) for p in stage.parameters))))
        for stage in stages
    }


def _load(stage: StagePlan, shares_links: bool, tied_ranks: tuple[int, ...]) -> StageLoad:
    times, beside = dict(stage.time_s), dict(stage.communication_s)
    return StageLoad(
        forward_s=times.get("forward", 0.0),
        backward_s=times.get("backward", 0.0),
        backward_weight_s=times.get("backward_weight", 0.0),
        send_forward_s=times.get("send_forward", 0.0),
        send_backward_s=times.get("send_backward", 0.0),
        forward_waits_s=beside.get("forward_waits", 0.0),
        backward_waits_s=beside.get("backward_waits", 0.0),
        forward_beside_s=beside.get("forward_beside", 0.0),
        backward_beside_s=beside.get("backward_beside", 0.0),
        last_backward_s=beside.get("last_backward", 0.0),
        sum_beside_s=beside.get("sum_beside", 0.0),
        sum_left_s=beside.get("sum_left", 0.0),
        sync_s=times.get("gradient_sync", 0.0),
        tied_s=times.get("tied_sync", 0.0),
        tied_ranks=tied_ranks,
        optimizer_s=times.get("optimizer", 0.0),
        gather_s=times.get("weight_gather", 0.0),
        shares_links=shares_links,
        memory=_memory(stage),
    )


def _memory(stage: StagePlan) -> StageMemory:
    """What the stage holds around its actions, its reserve at all times; a plan without that is
    taken to hold its peak."""
    if not stage.held_bytes:
        return StageMemory(static_bytes=sum(figure for _, figure in stage.memory_bytes))
    found = StageMemory(**dict(stage.held_bytes))
    reserve = sum(figure for name, figure in stage.memory_bytes if name in RESERVED)
    return replace(found, static_bytes=found.static_bytes + reserve)


def _shares_links(
    stage: StagePlan, stages: Sequence[StagePlan], axes: Sequence[MeshAxis], cluster: Cluster
) -> bool:
    """Whether ranks of a stage that split the samples reach each other by the links of the messages
    between stages."""
    first = stage.ranks
    other = next((stage.ranks for stage in stages if stage.ranks != first), None)
    if other is None:
        return False
    together, stride = [0], 1
    for axis in reversed(axes):
        if axis.name in BATCH_AXES:
            together = [at + i * stride for i in range(axis.size) for at in together]
        stride *= axis.size
    if len(together) == 1:
        return False
    data = cluster.link(tuple(first[at] for at in together))
    return data == cluster.link((first[0], other[0]))
