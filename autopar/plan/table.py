"""The plan as plain text for a reviewer, and as a short JSON object for a program.

Both are functions of the plan alone. `check_plan` comes first: they take a sound plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from typing import Any

from autopar.ir.collective import Collective
from autopar.ir.mesh import TENSOR, MeshAxis
from autopar.plan.pipeline import mesh_text, rank_groups, ranks_peak_bytes
from autopar.plan.placing import device_lines, stage_devices
from autopar.plan.plan import (
    Candidate,
    Certificate,
    Plan,
    Prediction,
    Recompute,
    StagePlan,
    Terms,
)
from autopar.plan.price import hourly_price, price_text, sample_price
from autopar.plan.simulated import simulate_plan
from autopar.plan.step_table import step_summary, step_text
from autopar.plan.techniques import techniques, variant_parameters
from autopar.plan.text import (
    amount,
    columns,
    decimals,
    duration,
    left_last,
    number,
    page,
    percent,
    plural,
    section,
    size_unit,
    spans,
    time_unit,
)


def plan_table(plan: Plan) -> str:
    """The whole plan: setup, stages, memory, layouts, collectives, prediction, certificate."""
    step = simulate_plan(plan)
    return page(
        [
            _header(plan),
            section("Techniques", "\n".join(techniques(plan))),
            section("Devices", "\n".join(device_lines(plan))),
            _stages(plan),
            _memory(plan),
            section("Parameters", _parameters(plan)),
            section("Collectives per step and rank", _collectives(plan)),
            section("Prediction", _prediction(plan)),
            section("Simulated step", step_text(plan, step)),
            section("Certificate", certificate_text(plan.certificate)),
            section("Runners-up", runners_up_text(plan)),
            section("Pins", pins_text(plan)),
            section("Notes", "\n".join(plan.notes)),
        ]
    )


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The figures of the plan that a program is likely to read; JSON data."""
    certificate = plan.certificate
    return {
        "model": plan.model.name,
        "parameters": parameter_count(plan),
        "cluster": plan.cluster.spec,
        "devices": plan.num_devices,
        "global_batch": plan.training.global_batch,
        "precision": plan.training.precision,
        "optimizer": plan.training.optimizer,
        "pipeline": plan.pipeline,
        "chunks": plan.chunks,
        "axes": {axis.name: axis.size for axis in plan.axes},
        "micro_batch": plan.training.micro_batch,
        "micro_batches": plan.training.micro_batches,
        "schedule": plan.schedule,
        "techniques": list(techniques(plan)),
        "stages": [
            {**_stage_summary(stage), "devices": stage_devices(plan, stage)}
            for stage in plan.stages
        ],
        "step_s": plan.prediction.step_s,
        "samples_per_s": plan.prediction.samples_per_s,
        "tokens_per_s": tokens_per_s(plan),
        "bubble_fraction": plan.prediction.bubble_fraction,
        "peak_bytes": plan.prediction.peak_bytes,
        "simulated": step_summary(plan, simulate_plan(plan)),
        "op_times": {
            "measured": plan.prediction.measured_ops,
            "interpolated": plan.prediction.interpolated_ops,
            "modelled": plan.prediction.modelled_ops,
        },
        "objective": plan.objective,
        "price_per_hour": hourly_price(plan.cluster),
        "price_per_sample": sample_price(plan),
        "status": certificate.status,
        "bound_s": certificate.bound_s,
        "gap": certificate.gap,
        "pins": [{"key": pin.key, "value": pin.value, "cost_s": pin.cost_s} for pin in plan.pins],
        "notes": list(plan.notes),
    }


def grid_text(plan: Plan) -> str:
    """`pipeline 2 x data 2 x tensor 2, 8 micro-batches of 2, schedule 1f1b`."""
    chunks = [("chunks", plan.chunks)] if plan.chunks > 1 else []
    degrees = [("pipeline", plan.pipeline), *chunks]
    shape = " x ".join([*(f"{name} {size}" for name, size in degrees), mesh_text(plan)])
    training = plan.training
    batches = plural(training.micro_batches, "micro-batch")
    return f"{shape}, {batches} of {training.micro_batch}, schedule {plan.schedule}"


def parameter_count(plan: Plan) -> int:
    """Elements of all parameters, tied ones once; buffers do not count."""
    sizes = {
        parameter.fqn: prod(parameter.shape)
        for stage in plan.stages
        for parameter in stage.parameters
        if not parameter.buffer
    }
    return sum(sizes.values())


def sequence_length(plan: Plan) -> int | None:
    """Tokens of a sample: the second dim of an integer input of samples by positions, if any."""
    for entry in plan.model.inputs:
        shape = entry.shape
        if entry.dtype in ("int64", "int32") and len(shape) == 2 and not shape[1].is_batch:
            return shape[1].const
    return None


def tokens_per_s(plan: Plan) -> float | None:
    """Predicted tokens per second; None for a model without tokens."""
    length = sequence_length(plan)
    return None if length is None else plan.prediction.samples_per_s * length


def peak_bytes(stage: StagePlan) -> float:
    """What a rank of the stage needs."""
    return sum(figure for _, figure in stage.memory_bytes)


def certificate_text(certificate: Certificate) -> str:
    """How good the plan is known to be, in words."""
    c = certificate
    return "\n".join(
        [
            f"{c.status}: objective {duration(c.objective_s)}, proven bound {duration(c.bound_s)}, "
            f"gap {percent(c.gap)}",
            f"{plural(c.grids, 'grid')}: {c.solved} solved, {c.pruned} pruned by their bound",
            f"searched: {c.space}",
        ]
    )


def runners_up_text(plan: Plan) -> str:
    """The grids that came next, each with what the search says of it."""
    header = ("pipeline", "mesh", "micro-batch", "schedule", "step", "peak", "  lost by")
    rows = [_candidate(candidate) for candidate in plan.certificate.runners_up]
    return left_last(header, rows, left=0) if rows else ""


def pins_text(plan: Plan) -> str:
    """What the user fixed, and what it costs a step against the free optimum."""
    lines = []
    for pin in plan.pins:
        price = "cost not known" if pin.cost_s is None else _price(pin.cost_s)
        lines.append(f"{pin.key}={pin.value}: {price}")
    return "\n".join(lines)


def _price(cost_s: float) -> str:
    return f"costs {duration(cost_s)} a step" if cost_s else "costs nothing"


def _candidate(candidate: Candidate) -> tuple[str, ...]:
    step = "" if candidate.step_s is None else duration(candidate.step_s)
    mesh = " x ".join(map(_axis_text, candidate.axes))
    chunks = f" x {candidate.chunks}" if candidate.chunks > 1 else ""
    degrees = (str(candidate.pipeline), mesh, str(candidate.micro_batch))
    peak = "" if candidate.peak_bytes is None else amount(candidate.peak_bytes)
    return (*degrees, candidate.schedule + chunks, step, peak, f"  {candidate.verdict}")


def _axis_text(axis: MeshAxis) -> str:
    along = " (sequence)" if axis.sequence and axis.name == TENSOR else ""
    return f"{axis.name} {axis.size}{along}"


def _header(plan: Plan) -> str:
    training = plan.training
    length = sequence_length(plan)
    tokens = "" if length is None else f", {length} tokens each"
    rows = [
        ("model", f"{plan.model.name}, {number(parameter_count(plan))} parameters"),
        ("cluster", f"{plan.cluster.spec}, {plan.num_devices} of {_devices(plan)} used"),
        (
            "training",
            f"global batch {training.global_batch}{tokens}, precision {training.precision}, "
            f"optimizer {training.optimizer}",
        ),
        ("grid", grid_text(plan)),
        ("step", _step(plan)),
    ]
    hourly, price = hourly_price(plan.cluster), sample_price(plan)
    if hourly is not None and price is not None:
        per = price * 1e6 / (length or 1)
        what = "samples" if length is None else "tokens"
        rows.append(("cost", f"{price_text(hourly)} an hour, {price_text(per)} a million {what}"))
    if plan.objective != "time":
        rows.append(("least", plan.objective))
    return columns(*_split(rows), left=2)


def _devices(plan: Plan) -> str:
    return plural(plan.cluster.num_devices, "device")


def _split(rows: list[tuple[str, str]]) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Rows without a header, for `columns`."""
    return rows[0], rows[1:]


def _step(plan: Plan) -> str:
    prediction = plan.prediction
    tokens = tokens_per_s(plan)
    rate = "" if tokens is None else f", {number(tokens)} tokens/s"
    return (
        f"predicted {duration(prediction.step_s)}, {number(prediction.samples_per_s)} samples/s"
        f"{rate}, bubble {percent(prediction.bubble_fraction)}"
    )


def _stages(plan: Plan) -> str:
    names = _term_names([stage.time_s for stage in plan.stages])
    scale, unit = time_unit(figure for stage in plan.stages for _, figure in stage.time_s)
    figures = _figures([stage.time_s for stage in plan.stages], names, scale)
    header = ("stage", "modules", "ranks", "blocks", "recompute", "in flight", "parameters")
    rows = [
        (
            str(stage.index),
            _modules(stage),
            spans(stage.ranks),
            spans(block.index for block in stage.blocks),
            _recompute(stage),
            str(stage.in_flight),
            number(sum(prod(p.shape) for p in stage.parameters if not p.buffer)),
            *times,
        )
        for stage, times in zip(plan.stages, figures, strict=True)
    ]
    title = f"Stages (times in {unit}: per micro-batch; gradient sync and optimizer per step)"
    return section(title, columns((*header, *_labels(names)), rows, left=4))


def _modules(stage: StagePlan) -> str:
    """Module paths of the blocks, runs of numbered ones shortened: `embed, layers.0-2`."""
    parts = []
    paths = [block.module_path for block in stage.blocks if block.module_path]
    split = [_numbered(path) for path in dict.fromkeys(paths)]
    for prefix, group in groupby(split, key=lambda item: item[0]):
        parts.append(prefix + spans(last for _, last in group if last is not None))
    return ", ".join(parts)


def _numbered(path: str) -> tuple[str, int | None]:
    """`("layers.", 3)` of `layers.3`; `(path, None)` of another path."""
    prefix, dot, last = path.rpartition(".")
    return (prefix + dot, int(last)) if last.isdecimal() else (path, None)


def _recompute(stage: StagePlan) -> str:
    """`none`, `full`, or how many blocks run again in part or whole: `2 selective, 1 full`."""
    counts = Counter(block.recompute_kind for block in stage.blocks)
    done = [(kind, n) for kind, n in sorted(counts.items()) if kind is not Recompute.NONE]
    if len(counts) == 1:
        return str(stage.blocks[0].recompute_kind)
    return ", ".join(f"{count} {kind}" for kind, count in done) or "none"


def _memory(plan: Plan) -> str:
    terms = [(*stage.memory_bytes, ("total", peak_bytes(stage))) for stage in plan.stages]
    scale, unit = size_unit(peak_bytes(stage) for stage in plan.stages)
    names = _term_names(terms)
    used = {
        stages[0].index: ranks_peak_bytes(stages) / stages[0].memory_limit_bytes
        for stages in rank_groups(plan.stages)
    }
    rows = [
        (
            str(stage.index),
            *figures,
            amount(stage.memory_limit_bytes),
            percent(used[stage.index]) if stage.index in used else "",
        )
        for stage, figures in zip(plan.stages, _figures(terms, names, scale), strict=True)
    ]
    header = ("stage", *_labels(names), "limit", "used")
    title = f"Memory per rank ({unit})"
    if plan.chunks > 1:
        title = f"Memory by stage ({unit}); used: of the rank, with its other stages"
    return section(title, columns(header, rows))


def _term_names(terms: Sequence[Terms]) -> list[str]:
    """Names of the terms that are not zero everywhere, in order of first appearance."""
    used = {name for row in terms for name, figure in row if figure}
    return [
        name for name in dict.fromkeys(name for row in terms for name, _ in row) if name in used
    ]


def _labels(names: list[str]) -> tuple[str, ...]:
    return tuple(name.replace("_", " ") for name in names)


def _figures(terms: Sequence[Terms], names: list[str], scale: float) -> list[tuple[str, ...]]:
    """The terms of each row by name, in one unit and with the same number of decimals."""
    places = decimals(max((figure for row in terms for _, figure in row), default=0) / scale)
    return [
        tuple(f"{row[name] / scale:.{places}f}" if name in row else "-" for name in names)
        for row in map(dict, terms)
    ]


def _parameters(plan: Plan) -> str:
    split = [i for i, axis in enumerate(plan.axes) if axis.size > 1]
    rows = [
        (
            row.variant or "-",
            row.name,
            f"x{row.count}",
            str(list(row.parameter.shape)),
            row.parameter.dtype,
            *(str(row.parameter.layout[i]) for i in split),
            _remarks(row.parameter.tied, row.parameter.shard_sizes, row.parameter.trainable),
        )
        for row in variant_parameters(plan)
    ]
    axes = [plan.axes[i].name for i in split]
    header = ("variant", "parameter", "count", "shape", "dtype", *axes, "")
    return columns(header, rows, left=len(header)) if rows else ""


def _remarks(tied: tuple[str, ...], shard_sizes: tuple[int, ...], trainable: bool) -> str:
    remarks = [] if trainable else ["not trained"]
    if tied:
        remarks.append(f"tied to {', '.join(tied)}")
    if shard_sizes:
        remarks.append(f"shards of {', '.join(map(str, shard_sizes))}")
    return "; ".join(remarks)


def collective_totals(
    collectives: Iterable[Collective],
) -> dict[tuple[str, str, str], tuple[int, int]]:
    """By op, axes and phase: how many a step and rank, and their bytes together."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for item in collectives:
        key = (item.op.value, " x ".join(item.axes), item.phase)
        count, nbytes = totals.get(key, (0, 0))
        totals[key] = (count + item.count, nbytes + item.count * item.nbytes)
    return totals


def _collectives(plan: Plan) -> str:
    """One row per kind of collective and total; stages that agree share the row."""
    stages: dict[tuple[tuple[str, str, str], tuple[int, int]], list[int]] = {}
    for stage in plan.stages:
        for item in collective_totals(stage.collectives).items():
            stages.setdefault(item, []).append(stage.index)
    rows = [
        (op, group, phase, spans(indices), str(count), amount(nbytes / count), amount(nbytes))
        for ((op, group, phase), (count, nbytes)), indices in stages.items()
    ]
    header = ("collective", "group", "phase", "stages", "count", "mean", "total")
    return columns(header, rows, left=4) if rows else ""


def _prediction(plan: Plan) -> str:
    prediction = plan.prediction
    rows = [
        (name, duration(figure), percent(figure / prediction.step_s) if prediction.step_s else "")
        for name, figure in prediction.time_s
        if figure
    ]
    rows.append(("step", duration(prediction.step_s), ""))
    lines = [columns(("critical path", "time", "share"), rows)]
    lines.append(f"peak memory {amount(prediction.peak_bytes)} on stage {prediction.peak_stage}")
    if prediction.priced_ops:
        lines.append(_op_sources(prediction))
    return "\n".join(lines)


def _op_sources(prediction: Prediction) -> str:
    return (
        f"op times: {prediction.measured_ops} of {prediction.priced_ops} measured, "
        f"{prediction.interpolated_ops} interpolated between measured sizes, "
        f"{prediction.modelled_ops} from the cost model"
    )


def _stage_summary(stage: StagePlan) -> dict[str, Any]:
    return {
        "index": stage.index,
        "ranks": list(stage.ranks),
        "blocks": [block.index for block in stage.blocks],
        "recompute": {
            str(block.index): block.recompute
            for block in stage.blocks
            if block.recompute_kind is not Recompute.NONE
        },
        "parameters": sum(prod(p.shape) for p in stage.parameters if not p.buffer),
        "time_s": dict(stage.time_s),
        "memory_bytes": dict(stage.memory_bytes),
        "peak_bytes": peak_bytes(stage),
        "memory_limit_bytes": stage.memory_limit_bytes,
    }
