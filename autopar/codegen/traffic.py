"""The collectives of one step, from the decisions the source is printed from.

The list has what the program of a rank will communicate, in the order of phases: equal to what its
recorder notes when a step runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from math import prod

from autopar.codegen.model import ModelView
from autopar.ir.collective import Collective, CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.mesh import batch_count, batch_size, position_of
from autopar.ir.placement import R_STAR, Layout, chunk_sizes, local_shape, nested_chunk
from autopar.ir.precision import PRECISIONS
from autopar.ir.size import shape_at
from autopar.plan.buckets import Bucket, GradientEntry, buckets
from autopar.plan.flow import BlockFlow, move_bytes
from autopar.plan.handover import messages, numel, sent_by, weight_boxes
from autopar.plan.pipeline import schedule_flushes
from autopar.plan.plan import BlockPlan, NodeChoice, ParameterPlan, Plan, StagePlan, Variant
from autopar.plan.zero import stored_layout, zero_shard

LOSS_BYTES = 8
"""The loss is added up in float64."""

OVERFLOW_BYTES = 4
"""Where the loss is scaled, ranks agree on whether a gradient overflowed."""


def micro_batch_counts(
    plan: Plan, samples: int | None = None, at: Sequence[int] = ()
) -> tuple[int, ...]:
    """Samples of each micro-batch on a rank, by the convention of `torch.chunk`; `at` is its place
    on the axes that split samples, by default the first."""
    total = plan.training.global_batch if samples is None else samples
    parts = chunk_sizes(total, plan.training.micro_batches)
    sizes = [axis.size for axis in plan.axes if axis.splits_samples]
    place = at or (0,) * len(sizes)
    return tuple(nested_chunk(part, sizes, place)[1] for part in parts)


def stage_collectives(
    view: ModelView,
    stage: StagePlan,
    counts: Sequence[int] | None = None,
    at: tuple[int, ...] | None = None,
) -> tuple[Collective, ...]:
    """What a rank of a stage communicates in one step, merged and sorted.

    Where a rank has several stages, what it communicates once stands with the first of them. `at`
    is its place on the mesh axes, by default the first; `counts` are its samples of each
    micro-batch, by default those of the plan's global batch.
    """
    view = view.at(stage)
    # Samples are counted per rank: on the axes that split them any place holds an even share.
    split = batch_count(view.mesh.axes)
    at = at or (0,) * len(view.mesh.sizes)
    place = (*(0,) * split, *at[split:])
    found: Counter[Collective] = Counter()
    counts = micro_batch_counts(view.plan) if counts is None else tuple(counts)
    # A rank without samples of a micro-batch that others have moves what weights need all the same.
    training = view.plan.training
    wholes = chunk_sizes(training.global_batch, training.micro_batches)
    run = [(own, whole) for own, whole in zip(counts, wholes, strict=True) if whole]
    updates = 1 if schedule_flushes(view.plan) else len(run)
    found.update(dict.fromkeys(_setup(view, stage), updates))
    for (samples, whole), times in Counter(run).items():
        for item in (
            *_micro_batch(view, stage, samples, place),
            *_sends(view, stage, whole, at),
        ):
            if item.nbytes:
                found[item] += times
    for item in _sync(view, stage, at):
        found[item] += updates
    if _home(view, stage)[0].index == stage.index:
        found[_collective(CollectiveOp.ALL_REDUCE, LOSS_BYTES, ("world",), "sync", "loss")] += 1
        if PRECISIONS[view.plan.training.precision].loss_scale:
            overflow = _collective(
                CollectiveOp.ALL_REDUCE, OVERFLOW_BYTES, ("world",), "sync", "overflow"
            )
            found[overflow] += 1
    if view.plan.num_devices == 1:
        found.clear()
    return tuple(sorted(replace(item, count=times) for item, times in found.items()))


def totals(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Collectives with the values they move forgotten: what a recorder can tell apart."""
    merged: Counter[Collective] = Counter()
    for item in collectives:
        merged[replace(item, value="", count=1)] += item.count
    return tuple(sorted(replace(item, count=times) for item, times in merged.items()))


def _collective(
    op: CollectiveOp, nbytes: int, axes: tuple[str, ...], phase: str, value: str
) -> Collective:
    return Collective(op=op, nbytes=nbytes, axes=axes, phase=phase, value=value)


def _micro_batch(
    view: ModelView, stage: StagePlan, samples: int, at: tuple[int, ...]
) -> Iterator[Collective]:
    """Collectives of one micro-batch of `samples` samples on this rank."""
    variants = {variant.name: variant for variant in view.plan.variants}
    for use in stage.blocks:
        variant = variants[use.variant]
        _, flow = view.variant_flow(variant)
        again = set(variant.steps_again(use.recompute))
        yield from _gathers(view, use, variant, at)
        key = ("traffic", variant.name, samples, at)
        moved = partial(_moved, view, flow, variant.choices, samples, at)
        for step, item in view.once(key, moved):
            yield item
            if step in again and item.phase == "forward":
                yield replace(item, phase="recompute")


def _moved(
    view: ModelView,
    flow: BlockFlow,
    choices: Sequence[NodeChoice],
    samples: int,
    at: tuple[int, ...],
) -> tuple[tuple[str, Collective], ...]:
    return tuple(_block(view, flow, choices, samples, at))


def _block(
    view: ModelView,
    flow: BlockFlow,
    choices: Sequence[NodeChoice],
    samples: int,
    at: tuple[int, ...],
) -> Iterator[tuple[str, Collective]]:
    """Collectives of the moves and kernels of a block, each with the move or node it is of."""
    sizes = view.mesh.sizes
    whole_batch = samples * batch_size(view.mesh.axes, sizes)
    for move in flow.moves():
        spec, axis = view.specs[move.value], move.axis
        if sizes[axis] == 1:
            continue
        for op, phase in (
            (move.transition.forward, "forward"),
            (move.transition.backward, "backward"),
        ):
            if op is not None:
                nbytes = move_bytes(spec, move, op, sizes, whole_batch, at)
                if nbytes:
                    axes = (view.mesh.axes[axis],)
                    yield move.name, _collective(op, nbytes, axes, phase, str(move.value))
    for choice in choices:
        for item in _inner(view, view.nodes[choice.node], choice, whole_batch, at):
            yield choice.node, item


def _gathers(
    view: ModelView, use: BlockPlan, variant: Variant, at: tuple[int, ...]
) -> Iterator[Collective]:
    """Weights that a block gathers from shards: in its forward, and once more those that its
    backward, or what that runs again, reads."""
    block = view.chain.blocks[use.index]
    first = view.chain.representative(block.class_index)
    own = dict(zip(first.parameters, block.parameters, strict=True))
    read = view.read_by(variant, variant.steps_again(use.recompute))
    again = view.gathered_again(block) | {own[ref] for ref in read if ref in own}
    for ref, shard in view.gathers(block).items():
        parameter = view.parameter_plans[ref.name]
        nbytes = _local_bytes(view, parameter, parameter.layout, at)
        for phase in ("forward", *(("backward",) if ref in again else ())):
            yield _collective(CollectiveOp.ALL_GATHER, nbytes, shard.axes, phase, parameter.fqn)


def _inner(
    view: ModelView, node: OpNode, choice: NodeChoice, whole_batch: int, at: tuple[int, ...]
) -> Iterator[Collective]:
    """Collectives inside a node's kernels."""
    for axis, strategy in enumerate(view.chosen(node, choice)):
        if view.mesh.sizes[axis] == 1:
            continue
        for inner in strategy.collectives:
            ref = node.inputs()[inner.like_input]
            layout = choice.inputs[inner.like_input]
            nbytes = inner.nbytes(_local(view, view.specs[ref], layout, whole_batch, at))
            if nbytes and (inner.phase == "forward" or node.requires_grad):
                item = _collective(
                    inner.op, nbytes, (view.mesh.axes[axis],), inner.phase, node.name
                )
                yield from repeat(item, inner.count(view.mesh.sizes[axis]))


def _local(
    view: ModelView, spec: TensorSpec, layout: Layout, whole_batch: int, at: tuple[int, ...]
) -> tuple[int, ...]:
    return local_shape(shape_at(spec.shape, whole_batch), layout, view.mesh.sizes, at)


def _home(view: ModelView, stage: StagePlan) -> list[StagePlan]:
    """The stages that share the ranks of a stage, in order."""
    return [other for other in view.plan.stages if other.ranks == stage.ranks]


def _sends(
    view: ModelView, stage: StagePlan, samples: int, at: tuple[int, ...]
) -> Iterator[Collective]:
    """Messages to the neighbours: values to the next stage, gradients to the one before.

    `samples` are those of the whole micro-batch.
    """
    first, last = stage.blocks[0].index, stage.blocks[-1].index
    boundaries, plan = view.chain.boundaries, view.plan

    def handed_over(ref: Ref, other: StagePlan, phase: str) -> Iterator[Collective]:
        spec = view.specs[ref]
        for box in sent_by(at, spec.shape, samples, view.shared[ref], plan.axes, plan.mesh(other)):
            nbytes = numel(box) * DTYPE_BYTES[spec.dtype]
            yield _collective(CollectiveOp.SEND_RECV, nbytes, ("pipeline",), phase, str(ref))

    if last < len(boundaries) and plan.stages[stage.index + 1].ranks != stage.ranks:
        for ref in boundaries[last]:
            yield from handed_over(ref, plan.stages[stage.index + 1], "forward")
    if first and plan.stages[stage.index - 1].ranks != stage.ranks:
        for ref in boundaries[first - 1]:
            if ref in view.differentiable:
                yield from handed_over(ref, plan.stages[stage.index - 1], "backward")


def _setup(view: ModelView, stage: StagePlan) -> Iterator[Collective]:
    """Sums over all samples that are taken before the first micro-batch."""
    axes = tuple(a.name for a in view.plan.axes if a.splits_samples and a.size > 1)
    if not axes:
        return
    for name in view.stage_sums(stage):
        spec = view.specs[Ref(name)]
        nbytes = spec.nbytes(1)
        yield _collective(CollectiveOp.ALL_REDUCE, nbytes, axes, "setup", name)


def _sync(view: ModelView, stage: StagePlan, at: tuple[int, ...]) -> Iterator[Collective]:
    """Gradient sums after the last backward: buckets over axes, then tied parameters; and the
    updated weights of which every rank keeps more than it updates."""
    owners: dict[str, set[tuple[int, ...]]] = {}
    for other in view.plan.stages:
        for parameter in other.parameters:
            owners.setdefault(parameter.fqn, set()).add(other.ranks)
    earlier = {
        parameter.fqn
        for other in _home(view, stage)
        if other.index < stage.index
        for parameter in other.parameters
    }
    trainable = [p for p in stage.parameters if p.trainable and p.fqn not in earlier]
    entries = {p.fqn: _gradient(view, p, at) for p in trainable}
    # A weight that blocks gather is reduced by itself, where the backward is done with it.
    gathered = [p.fqn for p in trainable if p.zero == 3]
    together = [entry for name, entry in entries.items() if name not in gathered]
    for bucket in (*buckets(together), *(b for name in gathered for b in buckets([entries[name]]))):
        value = _bucket_name(bucket, "gradients")
        if bucket.scatter:
            yield _collective(
                CollectiveOp.REDUCE_SCATTER, bucket.nbytes, bucket.scatter, "sync", value
            )
        nbytes = bucket.shard_nbytes if bucket.scatter else bucket.nbytes
        if bucket.rest and nbytes:
            yield _collective(CollectiveOp.ALL_REDUCE, nbytes, bucket.rest, "sync", value)
    for parameter in trainable:
        if len(owners[parameter.fqn]) > 1:
            yield from _tied(view, stage, parameter, at)
    for bucket in buckets(_updated(view, p, at) for p in trainable if p.zero in (1, 2)):
        value = _bucket_name(bucket, "weights")
        yield _collective(CollectiveOp.ALL_GATHER, bucket.nbytes, bucket.axes, "update", value)


def _tied(
    view: ModelView, stage: StagePlan, parameter: ParameterPlan, at: tuple[int, ...]
) -> Iterator[Collective]:
    """What sums a gradient between the stages that hold the parameter: one all-reduce, or where
    their meshes differ what every other stage wants of it (`runtime.ties`)."""
    plan, holders = view.plan, dict[tuple[int, ...], tuple[StagePlan, ParameterPlan]]()
    for other in plan.stages:
        for own in other.parameters:
            if own.fqn == parameter.fqn:
                holders.setdefault(other.ranks, (other, own))
    if all(plan.mesh(other) == plan.axes for other, _ in holders.values()):
        nbytes = _local_bytes(view, parameter, stored_layout(parameter), at)
        if nbytes:
            yield _collective(CollectiveOp.ALL_REDUCE, nbytes, ("tied",), "sync", parameter.fqn)
        return
    shape, here = parameter.shape, position_of(at, view.mesh.sizes)
    have = weight_boxes(shape, stored_layout(parameter), plan.axes)
    for other, own in holders.values():
        if other.ranks == stage.ranks:
            continue
        for message in messages(have, weight_boxes(shape, stored_layout(own), plan.mesh(other))):
            if message.sender == here:
                nbytes = message.numel * DTYPE_BYTES[parameter.dtype]
                yield _collective(CollectiveOp.SEND_RECV, nbytes, ("tied",), "sync", parameter.fqn)


def _bucket_name(bucket: Bucket, what: str) -> str:
    return bucket.names[0] if len(bucket.names) == 1 else f"{len(bucket.names)} {what}"


def _gradient(view: ModelView, parameter: ParameterPlan, at: tuple[int, ...]) -> GradientEntry:
    """What is to be summed of a parameter's gradient."""
    mesh, shard = view.mesh, zero_shard(parameter, view.mesh.axes)
    return GradientEntry(
        name=parameter.fqn,
        nbytes=_local_bytes(view, parameter, parameter.layout, at),
        dtype=parameter.dtype,
        axes=tuple(
            axis
            for axis, size, placement in zip(mesh.axes, mesh.sizes, parameter.layout, strict=True)
            if placement == R_STAR and size > 1
        ),
        scatter=shard.axes if shard else (),
        shard_nbytes=_local_bytes(view, parameter, parameter.stored, at) if shard else 0,
        early=parameter.zero >= 2,
    )


def _updated(view: ModelView, parameter: ParameterPlan, at: tuple[int, ...]) -> GradientEntry:
    """What is to be gathered of a weight after the optimizer's step."""
    shard = zero_shard(parameter, view.mesh.axes)
    return GradientEntry(
        name=parameter.fqn,
        nbytes=_local_bytes(view, parameter, parameter.layout, at),
        dtype=parameter.dtype,
        axes=shard.axes if shard else (),
    )


def _local_bytes(
    view: ModelView, parameter: ParameterPlan, layout: Layout, at: tuple[int, ...]
) -> int:
    shape = local_shape(parameter.shape, layout, view.mesh.sizes, at)
    return prod(shape) * DTYPE_BYTES[parameter.dtype]
