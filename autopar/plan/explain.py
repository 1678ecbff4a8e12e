"""Why a plan is as it is: what bounds its step, what its memory holds, what else was close."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from autopar.errors import InputError
from autopar.ir.collective import Collective
from autopar.ir.placement import Layout
from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.placing import device_lines
from autopar.plan.plan import (
    BlockPlan,
    NodeChoice,
    ParameterPlan,
    Plan,
    StagePlan,
    Terms,
    Variant,
)
from autopar.plan.table import (
    certificate_text,
    grid_text,
    pins_text,
    runners_up_text,
)
from autopar.plan.techniques import techniques
from autopar.plan.text import amount, duration, page, percent, plural, section, spans


def explain(plan: Plan, op: str | None = None) -> str:
    """Why this plan; with `op`, why that op or parameter lies as it does.

    `op` is the name of an op of a block class's first block, or of a parameter. Raises InputError
    that lists near names where the plan has neither.
    """
    return _explain_plan(plan) if op is None else _explain_name(plan, op)


def _explain_plan(plan: Plan) -> str:
    return page(
        [
            f"{plan.model.name} on {plan.cluster.spec}: {grid_text(plan)}",
            section("What it does", "\n".join(techniques(plan))),
            section("Which devices run what", "\n".join(device_lines(plan))),
            section("What bounds the step", "\n".join(_step_lines(plan))),
            section("What fills the memory", "\n".join(_memory_lines(plan))),
            section("How good it is", certificate_text(plan.certificate)),
            section("What came next", runners_up_text(plan)),
            section("What was fixed", pins_text(plan)),
            section("Notes", "\n".join(plan.notes)),
        ]
    )


def _step_lines(plan: Plan) -> Iterator[str]:
    prediction = plan.prediction
    for name, figure in _largest_first(prediction.time_s):
        share = percent(figure / prediction.step_s) if prediction.step_s else ""
        yield f"{name.replace('_', ' ')}: {duration(figure)}, {share} of the step"
    slowest = max(plan.stages, key=_work_s)
    fastest = min(plan.stages, key=_work_s)
    yield (
        f"slowest stage: {slowest.index}, {duration(_work_s(slowest))} a micro-batch, forward and "
        "backward"
    )
    if _work_s(slowest) > _work_s(fastest):
        idle = 1 - _work_s(fastest) / _work_s(slowest)
        yield f"fastest stage: {fastest.index}, waits {percent(idle)} of that time"
    bubble = percent(prediction.bubble_fraction)
    stages = plural(plan.pipeline * plan.chunks, "stage")
    on = f" on {plural(plan.pipeline, 'rank')}" if plan.chunks > 1 else ""
    yield (
        f"bubble: {bubble} with {stages}{on} and "
        f"{plural(plan.training.micro_batches, 'micro-batch')}"
    )


def _largest_first(terms: Terms) -> Terms:
    """Terms that are not zero."""
    return tuple(sorted((term for term in terms if term[1]), key=lambda term: -term[1]))


def _work_s(stage: StagePlan) -> float:
    times = dict(stage.time_s)
    return times.get("forward", 0.0) + times.get("backward", 0.0)


def _memory_lines(plan: Plan) -> Iterator[str]:
    groups = rank_groups(plan.stages)
    fullest = max(groups, key=lambda stages: ranks_peak_bytes(stages) / _limit(stages))
    peak, limit = ranks_peak_bytes(fullest), _limit(fullest)
    where = f"stage {fullest[0].index}"
    if len(fullest) > 1:
        where = f"ranks {spans(fullest[0].ranks)}, stages {spans(s.index for s in fullest)}"
    yield (
        f"fullest: {where}, {amount(peak)} of {amount(limit)}, "
        f"{amount(limit - peak)} ({percent(1 - peak / limit)}) free"
    )
    terms: dict[str, float] = {}
    for name, figure in (term for stage in fullest for term in stage.memory_bytes):
        terms[name] = terms.get(name, 0.0) + figure
    for name, figure in _largest_first(tuple(terms.items())):
        share = percent(figure / peak) if peak else ""
        yield f"{name.replace('_', ' ')}: {amount(figure)}, {share} of it"
    for stage in fullest:
        of = f" of stage {stage.index}" if len(fullest) > 1 else ""
        yield f"activations of {plural(stage.in_flight, 'micro-batch')} in flight{of}"


def _limit(stages: list[StagePlan]) -> int:
    return min(stage.memory_limit_bytes for stage in stages)


def _explain_name(plan: Plan, name: str) -> str:
    parts = []
    for variant in plan.variants:
        for choice in variant.choices:
            if choice.node == name:
                parts.append(_op_text(plan, variant, choice))
    holders = [
        (stage, parameter)
        for stage in plan.stages
        for parameter in stage.parameters
        if name in (parameter.fqn, *parameter.tied)
    ]
    parts += [_parameter_text(plan, stage, parameter) for stage, parameter in holders]
    if not parts:
        raise InputError(_unknown(plan, name))
    names = {name, *(parameter.fqn for _, parameter in holders)}
    parts.append(section("Collectives of it", "\n".join(_collective_lines(plan, names))))
    return page(parts)


def _op_text(plan: Plan, variant: Variant, choice: NodeChoice) -> str:
    blocks = [
        block for stage in plan.stages for block in stage.blocks if block.variant == variant.name
    ]
    lines = [f"runs in {plural(len(blocks), 'block')}: {spans(block.index for block in blocks)}"]
    lines += _where(blocks)
    lines += [f"input {i}: {_layout(plan, layout)}" for i, layout in enumerate(choice.inputs)]
    lines += [f"output {i}: {_layout(plan, layout)}" for i, layout in enumerate(choice.outputs)]
    return section(f"op {choice.node} of variant {variant.name}", "\n".join(lines))


def _where(blocks: list[BlockPlan]) -> Iterator[str]:
    paths = [block.module_path for block in blocks if block.module_path]
    if paths:
        last = f" to {paths[-1]}" if len(paths) > 1 else ""
        yield f"in {paths[0]}{last}"


def _parameter_text(plan: Plan, stage: StagePlan, parameter: ParameterPlan) -> str:
    lines = [
        f"{parameter.dtype} {list(parameter.shape)}, "
        + ("trained" if parameter.trainable else "not trained"),
        f"layout: {_layout(plan, parameter.layout)}",
    ]
    if parameter.tied:
        lines.append(f"tied to {', '.join(parameter.tied)}")
    if parameter.shard_sizes:
        lines.append(f"shards of {', '.join(map(str, parameter.shard_sizes))}")
    return section(f"parameter {parameter.fqn} on stage {stage.index}", "\n".join(lines))


def _layout(plan: Plan, layout: Layout) -> str:
    named = zip(plan.axes, layout, strict=True)
    return ", ".join(f"{axis.name} {placement}" for axis, placement in named) or "whole"


def _collective_lines(plan: Plan, names: set[str]) -> Iterator[str]:
    """Each collective that moves one of the values, with the stages it runs on."""
    stages: dict[Collective, list[int]] = {}
    for stage in plan.stages:
        for item in stage.collectives:
            stages.setdefault(item, []).append(stage.index)
    for item, indices in stages.items():
        if item.value in names or item.value.rsplit(".", 1)[0] in names:
            yield (
                f"{item.phase}: {item.op} of {amount(item.nbytes)} over {' x '.join(item.axes)}, "
                f"{item.count} a step on stages {spans(indices)}"
            )


def _unknown(plan: Plan, name: str) -> str:
    ops = [choice.node for variant in plan.variants for choice in variant.choices]
    parameters = [parameter.fqn for stage in plan.stages for parameter in stage.parameters]
    near = get_close_matches(name, [*ops, *parameters], n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"ops: {', '.join(sorted(ops)[:10])}"
    return (
        f"no op or parameter {name!r} in the plan, which names {plural(len(set(ops)), 'op')} of "
        f"its blocks and {plural(len(set(parameters)), 'parameter')}; {hint}"
    )
