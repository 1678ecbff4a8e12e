"""Which devices run what, where they are not all alike, and why."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.plan import Plan, StagePlan
from autopar.plan.text import amount, duration, percent, plural, spans

_FULL = 0.9
"""Share of its memory from which a rank is said to have as much as it holds."""

_IDLE = 0.1
"""Share of the longest stage's time from which another is said to have less to do."""


def device_lines(plan: Plan) -> Iterator[str]:
    """What the ranks of every stage are and do; nothing in a cluster of one group."""
    if len(plan.cluster.groups) == 1:
        return
    groups = rank_groups(plan.stages)
    total = sum(len(stage.blocks) for stage in plan.stages)
    longest_s = max(map(_work_s, groups))
    for stages in groups:
        ranks, work_s = stages[0].ranks, _work_s(stages)
        used = ranks_peak_bytes(stages) / stages[0].memory_limit_bytes
        blocks = sum(len(stage.blocks) for stage in stages)
        yield (
            f"rank{'s' * (len(ranks) > 1)} {spans(ranks)} on {stage_devices(plan, stages[0])}: "
            f"{blocks} of {plural(total, 'block')}, {duration(work_s)} a micro-batch, "
            f"{percent(used)} of the memory{_reason(used, work_s / longest_s if longest_s else 1)}"
        )


def stage_devices(plan: Plan, stage: StagePlan) -> str:
    """The kinds of devices that share a stage: `h100-sxm of 80 GiB`."""
    devices = dict.fromkeys(
        f"{device.name} of {amount(device.memory_bytes)}"
        for device in map(plan.cluster.device, stage.ranks)
    )
    together = " and ".join(devices)
    return f"{together}, as slow and as small as either" if len(devices) > 1 else together


def _reason(used: float, share: float) -> str:
    if share < 1 - _IDLE:
        full = used >= _FULL
        return "; more does not fit" if full else f"; done {percent(1 - share)} before the slowest"
    return ""


def _work_s(stages: list[StagePlan]) -> float:
    times = [dict(stage.time_s) for stage in stages]
    return sum(t.get("forward", 0.0) + t.get("backward", 0.0) for t in times)
