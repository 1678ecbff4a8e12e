"""Whether the parts of a plan agree with each other.

`CHECKS` is the list of what must hold; each check yields one line per problem. What a plan says of
a model or of a cluster at hand is checked in `fingerprint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import isclose, prod
from typing import TypeVar

from autopar.errors import PlanMismatch
from autopar.ir.collective import Collective
from autopar.ir.mesh import CONTEXT
from autopar.ir.placement import Layout, Partial, Shard
from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.plan import NOT_AT_ONCE, ParameterPlan, Plan, Recompute, StagePlan, Variant
from autopar.plan.text import amount, plural, spans
from autopar.plan.zero import zero_problems
from autopar.schedules.registry import SCHEDULES

GROUPS = ("pipeline", "tied", "world")
"""Groups of collectives that are no mesh axes: neighbouring stages, stages that hold one parameter,
all ranks."""

_SHOWN = 20
_TOLERANCE = 1e-6
"""Relative; figures in a file are rounded."""

Problems = Iterator[str]
_Key = TypeVar("_Key")


def check_plan(plan: Plan) -> None:
    """Raise PlanMismatch that lists what in the plan contradicts itself, if anything does."""
    problems = plan_problems(plan)
    if problems:
        lines = [f"  {problem}" for problem in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"  and {len(problems) - _SHOWN} more")
        raise PlanMismatch(
            "\n".join([f"the plan contradicts itself in {plural(len(problems), 'place')}:", *lines])
        )


def plan_problems(plan: Plan) -> tuple[str, ...]:
    """Everything in the plan that contradicts itself; empty for a sound plan."""
    return tuple(problem for check in CHECKS for problem in check(plan))


def shared_parameters(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameters that lie on several stages, with those stages.

    Their gradients have to be summed between the stages: a tied embedding, for one.
    """
    stages: dict[str, list[int]] = {}
    for stage in plan.stages:
        for parameter in stage.parameters:
            stages.setdefault(parameter.fqn, []).append(stage.index)
    return {fqn: tuple(found) for fqn, found in stages.items() if len(set(found)) > 1}


def _degrees(plan: Plan) -> Problems:
    training = plan.training
    sizes = {
        "pipeline": plan.pipeline,
        "chunks": plan.chunks,
        "training.global_batch": training.global_batch,
        "training.micro_batch": training.micro_batch,
        "training.micro_batches": training.micro_batches,
        **{f"axis {axis.name}": axis.size for axis in plan.axes},
    }
    for what, size in sizes.items():
        if size < 1:
            yield f"{what}: expected at least 1, found {size}"
    for name, count in Counter(axis.name for axis in plan.axes).items():
        if count > 1 or name in GROUPS:
            yield f"axis {name}: expected one mesh axis of a name, none of {', '.join(GROUPS)}"
    yield from _pipeline(plan)
    covered = training.micro_batch * training.micro_batches * plan.batch_ranks
    if covered < training.global_batch:
        yield (
            f"training: {training.micro_batches} micro-batches of {training.micro_batch} over "
            f"{plan.axis('data')} data-parallel ranks hold {covered} samples of the global batch "
            f"of {training.global_batch}"
        )


def _pipeline(plan: Plan) -> Problems:
    """The stages are as many as the schedule takes, and its limits are kept."""
    count, chunks = len(plan.stages), plan.chunks
    if chunks == 1 and plan.pipeline != count:
        yield f"pipeline: expected {count}, the number of stages, found {plan.pipeline}"
    elif plan.pipeline * chunks != count:
        yield (
            f"pipeline x chunks: expected {count}, the number of stages, found {plan.pipeline} x "
            f"{chunks}"
        )
    row = SCHEDULES.get(plan.schedule)
    if row is None:
        yield f"schedule: expected one of {', '.join(SCHEDULES)}, found {plan.schedule!r}"
    elif min(plan.pipeline, chunks, plan.training.micro_batches) > 0:
        reason = row.why_not(plan.pipeline, chunks, plan.training.micro_batches)
        if reason is not None:
            yield f"schedule: {plan.schedule} over {reason}"


def _stages(plan: Plan) -> Problems:
    for position, stage in enumerate(plan.stages):
        if stage.index != position:
            yield f"stages[{position}].index: expected {position}, found {stage.index}"
    indices = [block.index for stage in plan.stages for block in stage.blocks]
    for index, count in sorted(Counter(indices).items()):
        if count > 1:
            yield f"block {index}: expected on one stage, found {count} times"
    missing = sorted(set(range(max(indices, default=-1) + 1)) - set(indices))
    if missing:
        yield f"blocks {spans(missing)}: on no stage"
    for before, after in pairwise(indices):
        if after < before:
            yield f"block {after}: expected the stages to hold the blocks in order, after {before}"
    for stage in plan.stages:
        if not stage.blocks:
            yield f"stage {stage.index}: holds no block"
        if stage.in_flight < 1:
            yield f"stage {stage.index}: in_flight: expected at least 1, found {stage.in_flight}"


def _ranks(plan: Plan) -> Problems:
    owner: dict[int, StagePlan] = {}
    first: dict[int, StagePlan] = {}
    for stage, place in zip(plan.stages, _placement(plan), strict=True):
        if stage.sizes and len(stage.sizes) != len(plan.axes):
            continue  # told of as a mesh
        axes = plan.mesh(stage)
        mesh = prod(axis.size for axis in axes)
        shape = " x ".join(f"{axis.name} {axis.size}" for axis in axes) or "no axes"
        if len(stage.ranks) != mesh:
            yield f"stage {stage.index}: expected {mesh} ranks ({shape}), found {len(stage.ranks)}"
        together = first.setdefault(place, stage)
        if stage.ranks != together.ranks:
            yield (
                f"stage {stage.index}: expected the ranks of stage {together.index}, "
                f"{spans(together.ranks)}, where schedule {plan.schedule} puts it, found "
                f"{spans(stage.ranks)}"
            )
            continue
        for rank, count in Counter(stage.ranks).items():
            if count > 1:
                yield f"rank {rank}: {count} times on stage {stage.index}"
            if owner.setdefault(rank, together) is not together:
                yield f"rank {rank}: on stage {owner[rank].index} and on stage {stage.index}"
    outside = sorted(rank for rank in owner if not 0 <= rank < plan.cluster.num_devices)
    if outside:
        devices = plural(plan.cluster.num_devices, "device")
        yield f"rank {spans(outside)}: outside the cluster of {devices}"


def _meshes(plan: Plan) -> Problems:
    """Stages with sizes of their own: what may differ between them, and what may not."""
    own = [stage for stage in plan.stages if stage.sizes]
    wrong = [stage for stage in own if len(stage.sizes) != len(plan.axes)]
    for stage in wrong:
        found = f"found {len(stage.sizes)}"
        yield f"stage {stage.index}: sizes: expected {len(plan.axes)}, one per mesh axis, {found}"
    if wrong or not own:
        return
    for stage in own:
        for axis, before in zip(plan.mesh(stage), plan.axes, strict=True):
            if axis.size < 1:
                yield f"stage {stage.index}: {axis.name}: expected at least 1, found {axis.size}"
            if axis.name == CONTEXT and axis.size != before.size:
                yield (
                    f"stage {stage.index}: {axis.name} {axis.size}: expected {before.size}, as on "
                    "the other stages: a sequence is not cut anew between stages; let their data "
                    "and tensor degrees differ"
                )
    first: dict[tuple[int, ...], StagePlan] = {}
    runs: dict[str, StagePlan] = {}
    for stage in plan.stages:
        together = first.setdefault(stage.ranks, stage)
        if plan.mesh(stage) != plan.mesh(together):
            yield f"stage {stage.index}: expected the mesh of stage {together.index}, of its ranks"
        for block in stage.blocks:
            other = runs.setdefault(block.variant, stage)
            if plan.mesh(stage) != plan.mesh(other):
                yield (
                    f"block {block.index}: variant {block.variant} runs on stages {other.index} "
                    f"and {stage.index}, whose meshes differ"
                )


def _placement(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of every stage; one each where the schedule does not say."""
    row, count = SCHEDULES.get(plan.schedule), len(plan.stages)
    if row is None or plan.pipeline < 1 or plan.pipeline * plan.chunks != count:
        return tuple(range(count))
    return row.placement(plan.pipeline, plan.chunks)


def _parameters(plan: Plan) -> Problems:
    shapes = {entry.fqn: tuple(map(str, entry.shape)) for entry in plan.model.parameters}
    shared = shared_parameters(plan)
    first: dict[tuple[str, tuple[int, ...]], ParameterPlan] = {}
    for stage in plan.stages:
        where = f"stage {stage.index}"
        mesh = stage.sizes or tuple(axis.size for axis in plan.axes)
        for fqn, count in Counter(parameter.fqn for parameter in stage.parameters).items():
            if count > 1:
                yield f"{where}: parameter {fqn}: expected once, found {count} times"
        for parameter in stage.parameters:
            known = shapes.get(parameter.fqn)
            if known is None:
                yield f"{where}: parameter {parameter.fqn}: not one of the model's"
            elif known != tuple(map(str, parameter.shape)):
                yield (
                    f"{where}: parameter {parameter.fqn}: expected the model's shape "
                    f"[{', '.join(known)}], found {list(parameter.shape)}"
                )
            yield from _layout_problems(
                plan, parameter.layout, f"{where}: parameter {parameter.fqn}", parameter
            )
            for problem in zero_problems(parameter, [axis.name for axis in plan.axes]):
                yield f"{where}: parameter {parameter.fqn}: {problem}"
            if parameter.zero > 1 and parameter.fqn in shared:
                yield f"{where}: parameter {parameter.fqn}: zero {parameter.zero} on several stages"
            if first.setdefault((parameter.fqn, mesh), parameter) != parameter:
                yield f"{where}: parameter {parameter.fqn}: not as on an earlier stage"
    placed = {fqn for fqn, _ in first}
    for fqn in shapes:
        if fqn not in placed:
            yield f"parameter {fqn}: on no stage"


def _layout_problems(
    plan: Plan, layout: Layout, where: str, parameter: ParameterPlan | None = None
) -> Problems:
    if len(layout) != len(plan.axes):
        yield (
            f"{where}: expected {plural(len(plan.axes), 'placement')}, one per mesh axis, found "
            f"{len(layout)}"
        )
    if parameter is None:
        return
    shape = parameter.shape
    for placement in layout:
        if isinstance(placement, Partial):
            yield f"{where}: a parameter cannot be {placement}"
        if isinstance(placement, Shard):
            if placement.dim >= len(shape):
                yield f"{where}: {placement} of a tensor of {plural(len(shape), 'dim')}"
            elif placement.pieces and sum(map(abs, placement.pieces)) != shape[placement.dim]:
                yield f"{where}: the pieces of {placement} are not {shape[placement.dim]} together"


def _variants(plan: Plan) -> Problems:
    used = {block.variant for stage in plan.stages for block in stage.blocks}
    names = Counter(variant.name for variant in plan.variants)
    for name, count in names.items():
        if count > 1:
            yield f"variant {name}: expected once, found {count} times"
        if name not in used:
            yield f"variant {name}: run by no block"
    for stage in plan.stages:
        for block in stage.blocks:
            if block.variant not in names:
                yield f"block {block.index}: no variant is called {block.variant!r}"
    for variant in plan.variants:
        yield from _recompute(plan, variant)
        for choice in variant.choices:
            where = f"variant {variant.name}: op {choice.node}"
            for layout in (*choice.inputs, *choice.outputs):
                yield from _layout_problems(plan, layout, where)


def _recompute(plan: Plan, variant: Variant) -> Problems:
    """What runs again: blocks name what their variant has, and it names its own ops and moves."""
    blocks = [b for stage in plan.stages for b in stage.blocks if b.variant == variant.name]
    known = [Recompute.NONE.value, *(again.name for again in variant.recompute)]
    for block in blocks:
        if block.recompute not in known:
            yield (
                f"block {block.index}: recompute: expected one of {', '.join(known)}, which "
                f"variant {variant.name} has, found {block.recompute!r}"
            )
    nodes = {choice.node for choice in variant.choices}
    for again in variant.recompute:
        where = f"variant {variant.name}: recompute {again.name}"
        if again.name.partition("_")[0] not in (Recompute.SELECTIVE, Recompute.FULL):
            yield f"{where}: expected a name that begins with selective or full"
        for step, count in Counter(again.steps).items():
            if step not in nodes and " as " not in step:
                yield f"{where}: {step!r} is neither an op of the variant nor a move"
            if count > 1:
                yield f"{where}: {step!r} is listed {count} times"


def _collectives(plan: Plan) -> Problems:
    known = {axis.name for axis in plan.axes} | set(GROUPS)
    for where, collectives in (
        ("plan", plan.collectives),
        *((f"stage {stage.index}", stage.collectives) for stage in plan.stages),
    ):
        for item in collectives:
            unknown = sorted(set(item.axes) - known)
            if unknown:
                yield f"{where}: {item.op} of {item.value}: no axis is called {', '.join(unknown)}"
            if item.nbytes < 0 or item.count < 1:
                yield f"{where}: {item.op} of {item.value}: {item.count} times {item.nbytes} bytes"
    listed = (item for stage in plan.stages for item in stage.collectives)
    for key, (stated, found) in _differing(_totals(plan.collectives), _totals(listed)).items():
        yield f"plan: {' '.join(key)}: {amount(stated)} in all, {amount(found)} over the stages"


def _totals(collectives: Iterable[Collective]) -> Counter[tuple[str, ...]]:
    """Bytes by op, phase and group."""
    totals: Counter[tuple[str, ...]] = Counter()
    for item in collectives:
        totals[item.op.value, item.phase, *item.axes] += item.count * item.nbytes
    return totals


def _differing(a: Counter[_Key], b: Counter[_Key]) -> dict[_Key, tuple[int, int]]:
    return {key: (a[key], b[key]) for key in dict.fromkeys((*a, *b)) if a[key] != b[key]}


def _memory(plan: Plan) -> Problems:
    peaks: dict[int, float] = {}
    for stage in plan.stages:
        for name, figure in (*stage.memory_bytes, *stage.time_s):
            if figure < 0 and name != NOT_AT_ONCE:
                yield f"stage {stage.index}: {name}: expected no negative figure, found {figure}"
        if stage.memory_limit_bytes < 1:
            found = stage.memory_limit_bytes
            yield f"stage {stage.index}: memory_limit_bytes: expected at least 1, found {found}"
    for stages in rank_groups(plan.stages):
        peak, limit = ranks_peak_bytes(stages), min(stage.memory_limit_bytes for stage in stages)
        peaks |= {stage.index: peak for stage in stages}
        if peak > limit * (1 + _TOLERANCE):
            terms = Counter[str]()
            for stage in stages:
                terms.update({name: int(figure) for name, figure in stage.memory_bytes})
            listed = ", ".join(f"{name} {amount(figure)}" for name, figure in terms.most_common(4))
            where = f"{'stage' if len(stages) == 1 else 'stages'} {spans(s.index for s in stages)}"
            needs = "needs" if len(stages) == 1 else "need"
            yield f"{where}: {needs} {amount(peak)} of {amount(limit)}: {listed}"
    stated = plan.prediction.peak_bytes
    if plan.prediction.peak_stage not in peaks:
        yield f"prediction.peak_stage: there is no stage {plan.prediction.peak_stage}"
    elif not isclose(stated, max(peaks.values()), rel_tol=_TOLERANCE):
        fullest = amount(max(peaks.values()))
        yield f"prediction.peak_bytes: states {amount(stated)}, the stages add up to {fullest}"


CHECKS: tuple[Callable[[Plan], Problems], ...] = (
    _degrees,
    _stages,
    _meshes,
    _ranks,
    _parameters,
    _variants,
    _collectives,
    _memory,
)
"""Every check, in the order in which problems are listed."""
