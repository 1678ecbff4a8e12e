"""The decisions of a plan as pins, so that another search keeps them all but some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.ir.mesh import BATCH_AXES, CONTEXT, SHARD, TENSOR
from autopar.ir.placement import Shard
from autopar.plan.pipeline import rank_groups
from autopar.plan.plan import Plan, Recompute
from autopar.search.pins import within

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Pins that hold a plan's decisions, and what of it no pin can hold."""

    pins: Pairs
    left: tuple[str, ...]


def kept_pins(plan: Plan, free: Sequence[str] = ()) -> Kept:
    """The decisions of a plan but for those of the kinds in `free`; see `DECISIONS`.

    What differs from block to block, where a pin holds for all, is left to the search. Raises
    InputError for an unknown kind.
    """
    for kind in free:
        if kind not in DECISIONS:
            raise InputError(f"--free {kind}: expected one of {', '.join(DECISIONS)}")
    pins: list[tuple[str, str]] = []
    left: list[str] = []
    for kind, decided in DECISIONS.items():
        if kind in free:
            continue
        for key, value in decided(plan):
            if value is None:
                left.append(key)
            else:
                pins.append((key, value))
    return Kept(pins=tuple(pins), left=tuple(left))


Decided = Iterator[tuple[str, str | None]]
"""Pins, with None for a decision that a pin cannot hold."""


def _pipeline(plan: Plan) -> Decided:
    yield "pipeline", str(plan.pipeline)
    if plan.pipeline > 1:
        yield "chunks", str(plan.chunks)
        yield "schedule", plan.schedule
        yield from _boundaries(plan)


def _boundaries(plan: Plan) -> Decided:
    """The modules that start a stage, where each is the first block of its module."""
    blocks = [block for stage in plan.stages for block in stage.blocks]
    found = []
    for stage in plan.stages[1:]:
        path, index = stage.blocks[0].module_path, stage.blocks[0].index
        first = next((b.index for b in blocks if path and within(b.module_path, path)), None)
        if first != index:
            yield "boundary", None
            return
        found.append(path)
    yield from (("boundary", path) for path in found)


def _data(plan: Plan) -> Decided:
    yield "data", str(plan.batch_ranks)
    yield "shard", str(plan.axis(SHARD))
    split = [
        axis.size
        for index, axis in enumerate(plan.axes)
        if axis.name in BATCH_AXES
        and axis.size > 1
        and any(isinstance(p.layout[index], Shard) for s in plan.stages for p in s.parameters)
    ]
    if split:
        yield "expert", str(split[-1])
    yield from _stages(plan, "data")


def _stages(plan: Plan, degree: str) -> Decided:
    """What ranks of the pipeline have of a degree, and of devices, where their meshes differ."""
    ranks = [group[0] for group in rank_groups(plan.stages)]
    counts = {len(stage.ranks) for stage in ranks}
    for place, stage in enumerate(ranks):
        if stage.sizes:
            own = plan.on(stage)
            yield (
                f"stage{place}.{degree}",
                str(own.batch_ranks if degree == "data" else own.axis(degree)),
            )
        if len(counts) > 1 and degree == "data":
            yield f"stage{place}.devices", str(len(stage.ranks))


def _context(plan: Plan) -> Decided:
    yield "context", str(plan.axis(CONTEXT))
    if plan.axis(CONTEXT) > 1:
        yield "attention", None


def _tensor(plan: Plan) -> Decided:
    yield "tensor", str(plan.axis(TENSOR))
    if plan.axis(TENSOR) > 1:
        along = any(axis.sequence for axis in plan.axes if axis.name == TENSOR)
        yield "sequence", "on" if along else "off"
    yield from _stages(plan, TENSOR)


def _weights(plan: Plan) -> Decided:
    """How parameters lie on the tensor axis."""
    if any(stage.sizes for stage in plan.stages):
        yield "weight:NAME", None
        return
    if plan.axis(TENSOR) == 1:
        return
    index = plan.axis_names.index(TENSOR)
    seen: set[str] = set()
    for stage in plan.stages:
        for parameter in stage.parameters:
            if parameter.buffer or parameter.fqn in seen:
                continue
            seen.add(parameter.fqn)
            placement = parameter.layout[index]
            text = str(placement) if isinstance(placement, Shard) else "R"
            yield f"weight:{parameter.fqn}", text


def _micro_batch(plan: Plan) -> Decided:
    yield "micro_batch", str(plan.training.micro_batch)


def _recompute(plan: Plan) -> Decided:
    kinds = {block.recompute_kind for stage in plan.stages for block in stage.blocks}
    value = {
        frozenset({Recompute.NONE}): "none",
        frozenset({Recompute.FULL}): "all",
        frozenset({Recompute.SELECTIVE}): "selective",
    }.get(frozenset(kinds))
    yield "recompute", value


def _zero(plan: Plan) -> Decided:
    levels = {block.zero for stage in plan.stages for block in stage.blocks}
    yield "zero", str(levels.pop()) if len(levels) == 1 else None


DECISIONS: dict[str, Callable[[Plan], Decided]] = {
    "pipeline": _pipeline,
    "data": _data,
    "context": _context,
    "tensor": _tensor,
    "weights": _weights,
    "micro-batch": _micro_batch,
    "recompute": _recompute,
    "zero": _zero,
}
"""Kinds of decisions, and the pins that hold them."""
