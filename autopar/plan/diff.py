"""What changed between two plans, and what it costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from autopar.plan.codec import codec_of
from autopar.plan.plan import ParameterPlan, Plan, Recompute, StagePlan
from autopar.plan.table import certificate_text, collective_totals, grid_text, peak_bytes
from autopar.plan.text import amount, columns, duration, number, page, percent, section, spans
from autopar.plan.zero import zero_shard

_ABSENT = "-"


def diff_plans(a: Plan, b: Plan) -> str:
    """The differences as text: figures with their change, then the decisions that differ."""
    changes = plan_changes(a, b)
    if not changes:
        return "the plans are identical"
    return page(
        [
            section("Figures", _figures(a, b)),
            section("Made for", _pairs(a, b, _MADE_FOR)),
            section("Grid", _pairs(a, b, {"grid": grid_text})),
            section("Stages", _stages(a, b)),
            section("Parameter layouts", _layouts(a, b)),
            section("Op layouts", _ops(a, b)),
            section("Collectives per step, all stages", _collectives(a, b)),
            section("Certificate", _pairs(a, b, _CERTIFICATE)),
            _other(changes),
        ]
    )


def plan_changes(a: Plan, b: Plan) -> tuple[tuple[str, Any, Any], ...]:
    """Every JSON path at which the plans differ, with the data in `a` and in `b` (None: absent)."""
    codec = codec_of(Plan)
    return tuple(_walk(codec.encode(a, ""), codec.encode(b, ""), ""))


def _walk(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _walk(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list):
        for index, (left, right) in enumerate(zip_longest(a, b)):
            yield from _walk(left, right, f"{path}[{index}]")
    elif a != b:
        yield path, a, b


_MADE_FOR: dict[str, Callable[[Plan], str]] = {
    "model": lambda plan: plan.model.name,
    "op list": lambda plan: f"{plan.model.num_ops} ops, {plan.model.ops_digest[:12]}",
    "cluster": lambda plan: plan.cluster.spec,
    "global batch": lambda plan: str(plan.training.global_batch),
    "precision": lambda plan: plan.training.precision,
    "optimizer": lambda plan: plan.training.optimizer,
    "objective": lambda plan: plan.objective,
    "pins": lambda plan: ", ".join(f"{pin.key}={pin.value}" for pin in plan.pins) or "none",
}

_CERTIFICATE: dict[str, Callable[[Plan], str]] = {
    "certificate": lambda plan: certificate_text(plan.certificate).split("\n", 1)[0],
}

_FIGURES: dict[str, tuple[Callable[[Plan], float], Callable[[float], str]]] = {
    "step": (lambda plan: plan.prediction.step_s, duration),
    "samples/s": (lambda plan: plan.prediction.samples_per_s, number),
    "bubble": (lambda plan: plan.prediction.bubble_fraction, percent),
    "peak memory": (lambda plan: plan.prediction.peak_bytes, amount),
    "devices": (lambda plan: float(plan.num_devices), number),
}


def _figures(a: Plan, b: Plan) -> str:
    rows = []
    for name, (figure, text) in _FIGURES.items():
        before, after = figure(a), figure(b)
        rows.append((name, text(before), text(after), _change(before, after)))
    return columns(("", "a", "b", "change"), rows)


def _change(before: float, after: float) -> str:
    if before == after:
        return "same"
    return f"{(after - before) / before:+.1%}" if before else "new"


def _pairs(a: Plan, b: Plan, fields: dict[str, Callable[[Plan], str]]) -> str:
    """Fields that differ, one under the other where they are long."""
    lines = []
    for name, text in fields.items():
        before, after = text(a), text(b)
        if before != after:
            lines.append(f"{name}: {before} -> {after}")
    return "\n".join(lines)


def _stages(a: Plan, b: Plan) -> str:
    rows = []
    for index, (old, new) in enumerate(zip_longest(a.stages, b.stages)):
        cells: list[tuple[str, ...]] = []
        for stage in (old, new):
            if stage is None:
                cells.append((_ABSENT,) * 5)
                continue
            recomputed = recomputed_blocks(stage)
            blocks = spans(block.index for block in stage.blocks)
            peak = amount(peak_bytes(stage))
            levels = sorted({block.zero for block in stage.blocks})
            zero = ", ".join(map(str, levels)) if any(levels) else ""
            cells.append((blocks, spans(stage.ranks), recomputed, zero, peak))
        if cells[0] != cells[1]:
            rows += [(str(index), side, *cell) for side, cell in zip("ab", cells, strict=True)]
    header = ("stage", "", "blocks", "ranks", "recompute", "ZeRO", "memory")
    return columns(header, rows, left=6) if rows else ""


def recomputed_blocks(stage: StagePlan) -> str:
    """The blocks that run again, in part or whole: `0-3 selective, 4 full`."""
    kinds = (Recompute.SELECTIVE, Recompute.FULL)
    blocks = {kind: [b.index for b in stage.blocks if b.recompute_kind is kind] for kind in kinds}
    return ", ".join(f"{spans(own)} {kind}" for kind, own in blocks.items() if own) or "none"


def _layouts(a: Plan, b: Plan) -> str:
    """Parameters whose layout differs; those that differ by a number in their name as one."""
    before, after = _parameter_layouts(a), _parameter_layouts(b)
    groups: Counter[tuple[str, str, str]] = Counter()
    for fqn in dict.fromkeys((*before, *after)):
        pair = (before.get(fqn, _ABSENT), after.get(fqn, _ABSENT))
        if pair[0] != pair[1]:
            groups[(re.sub(r"(?<=\.)\d+(?=\.)", "*", fqn), *pair)] += 1
    rows = [(name, f"x{count}", old, "->", new) for (name, old, new), count in groups.items()]
    return columns(("parameter", "count", "a", "", "b"), rows, left=5) if rows else ""


def _parameter_layouts(plan: Plan) -> dict[str, str]:
    """Layout by parameter; axes of one rank are left out, for a grid may lack them."""
    return {
        parameter.fqn: _named_layout(plan, tuple(map(str, parameter.layout)))
        + _zero(plan, parameter)
        for stage in plan.stages
        for parameter in stage.parameters
    }


def _zero(plan: Plan, parameter: ParameterPlan) -> str:
    """The ZeRO level of a parameter and the axes it is over, if any."""
    found = zero_shard(parameter, [axis.name for axis in plan.axes])
    return f", ZeRO-{parameter.zero} over {' x '.join(found.axes)} dim {found.dim}" if found else ""


def _named_layout(plan: Plan, layout: tuple[str, ...]) -> str:
    named = zip(plan.axes, layout, strict=False)
    return " ".join(f"{axis.name} {text}" for axis, text in named if axis.size > 1) or "whole"


def _ops(a: Plan, b: Plan) -> str:
    before, after = _op_layouts(a), _op_layouts(b)
    lines = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if old != new:
            lines.append(f"{key[1]} of class {key[0]}: {old} -> {new}")
    return "\n".join(lines)


def _op_layouts(plan: Plan) -> dict[tuple[int, str], str]:
    """Output layouts by block class and op; variants of a class that differ are listed together."""
    found: dict[tuple[int, str], list[str]] = {}
    for variant in plan.variants:
        for choice in variant.choices:
            text = ", ".join(
                _named_layout(plan, tuple(map(str, layout))) for layout in choice.outputs
            )
            texts = found.setdefault((variant.class_index, choice.node), [])
            if text not in texts:
                texts.append(text)
    return {key: " or ".join(texts) for key, texts in found.items()}


def _collectives(a: Plan, b: Plan) -> str:
    before, after = _totals(a), _totals(b)
    rows = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, (0, 0)), after.get(key, (0, 0))
        if old != new:
            counts, sizes = (f"{old[0]} -> {new[0]}", f"{amount(old[1])} -> {amount(new[1])}")
            rows.append((*key, counts, sizes))
    return columns(("collective", "axis", "phase", "count", "bytes"), rows, left=5) if rows else ""


def _totals(plan: Plan) -> dict[tuple[str, str, str], tuple[int, int]]:
    return collective_totals(item for stage in plan.stages for item in stage.collectives)


def _other(changes: tuple[tuple[str, Any, Any], ...]) -> str:
    """How many values differ by part of the plan, so that nothing goes unmentioned."""
    parts = Counter(re.split(r"[.\[]", path, maxsplit=1)[0] for path, _, _ in changes)
    return "values that differ: " + ", ".join(f"{name} {count}" for name, count in parts.items())
