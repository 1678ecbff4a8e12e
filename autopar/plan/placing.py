"""Which devices run what, where they are not all alike, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.plan import Plan, StagePlan
from autopar.plan.text import amount, duration, percent, plural, spans

_FULL = 0.9
"""Share of its memory from which a rank is said to have as much as it holds."""

_IDLE = 0.1
"""Share of the longest stage's time from which another is said to have less to do."""


def device_lines(plan: Plan) -> Iterator[str]:
    """What the ranks of every stage are and do, and which devices do nothing; no lines where all
    devices of one group are used."""
    if len(plan.cluster.groups) > 1:
        yield from _rank_lines(plan)
    if plan.devices:
        yield f"ranks are devices {spans_in_order(plan.devices)} of the cluster that was asked for"
    for left in plan.left_out:
        count = len(left.devices)
        why = "no plan with all devices fits"
        if left.step_s is not None:
            here = duration(plan.prediction.step_s)
            why = f"with all devices a step takes {duration(left.step_s)}, without them {here}"
        yield (
            f"left out: {count} x {left.device}, device{'s' * (count > 1)} "
            f"{spans(left.devices)}: {why}"
        )


def spans_in_order(numbers: Sequence[int]) -> str:
    """Runs of consecutive numbers in the order given: `4-7, 0-3`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(spans(run) for run in runs)


def _rank_lines(plan: Plan) -> Iterator[str]:
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
