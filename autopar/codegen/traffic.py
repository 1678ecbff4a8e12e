"""The collectives of one step, from the decisions the source is printed from.

The list has what the program of a rank will communicate, in the order of phases: equal to what its
recorder notes when a step runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from autopar.codegen.model import ModelView
from autopar.ir.collective import Collective, CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.mesh import batch_count, batch_size
from autopar.ir.placement import R_STAR, Layout, chunk_sizes, local_shape, nested_chunk
from autopar.ir.size import shape_at
from autopar.plan.buckets import GradientEntry, buckets
from autopar.plan.flow import BlockFlow, move_bytes
from autopar.plan.plan import NodeChoice, Plan, StagePlan

LOSS_BYTES = 8
"""The loss is added up in float64."""


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

    `at` is its place on the mesh axes, by default the first; `counts` are its samples of each
    micro-batch, by default those of the plan's global batch.
    """
    # Samples are counted per rank: on the axes that split them any place holds an even share.
    split = batch_count(view.mesh.axes)
    place = (*(0,) * split, *(at or (0,) * len(view.mesh.sizes))[split:])
    found: Counter[Collective] = Counter()
    counts = micro_batch_counts(view.plan) if counts is None else tuple(counts)
    found.update(_setup(view, stage))
    for samples, times in Counter(count for count in counts if count).items():
        for item in _micro_batch(view, stage, samples, place):
            found[item] += times
    found.update(_sync(view, stage, place))
    found[_collective(CollectiveOp.ALL_REDUCE, LOSS_BYTES, ("world",), "sync", "loss")] += 1
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
        for item in _block(view, flow, variant.choices, samples, at):
            yield item
            if use.recompute and item.phase == "forward":
                yield replace(item, phase="recompute")
    yield from _sends(view, stage, samples, at)


def _block(
    view: ModelView,
    flow: BlockFlow,
    choices: Sequence[NodeChoice],
    samples: int,
    at: tuple[int, ...],
) -> Iterator[Collective]:
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
                    yield _collective(op, nbytes, (view.mesh.axes[axis],), phase, str(move.value))
    for choice in choices:
        yield from _inner(view, view.nodes[choice.node], choice, whole_batch, at)


def _inner(
    view: ModelView, node: OpNode, choice: NodeChoice, whole_batch: int, at: tuple[int, ...]
) -> Iterator[Collective]:
    """Collectives inside a node's kernels."""
    for axis, strategy in enumerate(view.strategies(node, choice)):
        if view.mesh.sizes[axis] == 1:
            continue
        for inner in strategy.collectives:
            ref = node.inputs()[inner.like_input]
            layout = choice.inputs[inner.like_input]
            numel = prod(_local(view, view.specs[ref], layout, whole_batch, at))
            nbytes = numel * DTYPE_BYTES[inner.dtype]
            if nbytes:
                yield _collective(inner.op, nbytes, (view.mesh.axes[axis],), inner.phase, node.name)


def _local(
    view: ModelView, spec: TensorSpec, layout: Layout, whole_batch: int, at: tuple[int, ...]
) -> tuple[int, ...]:
    return local_shape(shape_at(spec.shape, whole_batch), layout, view.mesh.sizes, at)


def _sends(
    view: ModelView, stage: StagePlan, samples: int, at: tuple[int, ...]
) -> Iterator[Collective]:
    """Messages to the neighbours: values to the next stage, gradients to the one before."""
    first, last = stage.blocks[0].index, stage.blocks[-1].index
    boundaries = view.chain.boundaries
    whole_batch = samples * batch_size(view.mesh.axes, view.mesh.sizes)

    def message(ref: Ref, phase: str) -> Collective:
        shape = _local(view, view.specs[ref], view.shared[ref], whole_batch, at)
        nbytes = prod(shape) * DTYPE_BYTES[view.specs[ref].dtype]
        return _collective(CollectiveOp.SEND_RECV, nbytes, ("pipeline",), phase, str(ref))

    if last < len(boundaries):
        yield from (message(ref, "forward") for ref in boundaries[last])
    if first:
        yield from (
            message(ref, "backward") for ref in boundaries[first - 1] if ref in view.differentiable
        )


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
    """Gradient sums after the last backward: buckets over axes, then tied parameters."""
    mesh = view.mesh
    entries = []
    owners: Counter[str] = Counter(p.fqn for s in view.plan.stages for p in s.parameters)
    tied = []
    for parameter in stage.parameters:
        if not parameter.trainable:
            continue
        shape = local_shape(parameter.shape, parameter.layout, mesh.sizes, at)
        nbytes = prod(shape) * DTYPE_BYTES[parameter.dtype]
        axes = tuple(
            axis
            for axis, size, placement in zip(mesh.axes, mesh.sizes, parameter.layout, strict=True)
            if placement == R_STAR and size > 1
        )
        entries.append(
            GradientEntry(name=parameter.fqn, nbytes=nbytes, dtype=parameter.dtype, axes=axes)
        )
        if owners[parameter.fqn] > 1:
            tied.append((parameter.fqn, nbytes))
    for bucket in buckets(entries):
        value = bucket.names[0] if len(bucket.names) == 1 else f"{len(bucket.names)} gradients"
        yield _collective(CollectiveOp.ALL_REDUCE, bucket.nbytes, bucket.axes, "sync", value)
    for fqn, nbytes in tied:
        yield _collective(CollectiveOp.ALL_REDUCE, nbytes, ("tied",), "sync", fqn)
