"""The grids of the outer search: every way to lay degrees and micro-batches on the devices."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from autopar.errors import InputError
from autopar.ir.mesh import CONTEXT, MeshAxis, stage_mesh
from autopar.ir.placement import zigzag
from autopar.schedules.registry import SCHEDULES
from autopar.search.grid import Grid
from autopar.search.pins import MESH_DEGREES, Pins
from autopar.search.pipelines import FREE
from autopar.search.setting import Setting
from autopar.search.stage_meshes import (
    MOST_LAYOUTS,
    own_layouts,
    own_reasons,
    own_text,
    stage_meshes,
    stage_reasons,
)
from autopar.search.state import FREE_LEVELS

WIDEST_TENSOR = 8


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def widest_tensor(setting: Setting) -> int:
    """Largest tensor degree searched unless pinned: the fastest links' domain, at least 8."""
    return max(setting.cluster.domain, WIDEST_TENSOR)


def space_text(setting: Setting) -> str:
    """The declared space in words."""
    return (
        f"pipeline x data x context x tensor over all {setting.cluster.num_devices} devices, "
        f"tensor up to {widest_tensor(setting)}, context x tensor up to "
        f"{setting.cluster.domain} with one sample a micro-batch; micro-batches of 1, 2, 4, "
        "... samples a data rank, up to all of them; stages of any consecutive blocks; "
        "per op any placement its rules allow; per block any ops run again, and ZeRO "
        f"levels {', '.join(map(str, FREE_LEVELS))} over the data axes; schedules "
        f"{_schedules_text()}{own_text(setting)}"
    )


def _schedules_text() -> str:
    chunks: dict[str, list[int]] = {}
    for name, count in FREE:
        chunks.setdefault(name, []).append(count)
    names = [
        name if counts == [1] else f"{name} with {' or '.join(map(str, counts))} stages a rank"
        for name, counts in chunks.items()
        if name in SCHEDULES
    ]
    others = [name for name in SCHEDULES if name not in chunks]
    where_pinned = f" ({', '.join(others)} where pinned)" if others else ""
    return f"{', '.join(names)}{where_pinned}"


def variants(setting: Setting, pipeline: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """The schedules, with stages per rank, to try with so many pipeline ranks.

    A rank has a block for each of its stages at least, and pinned boundaries cut the chain into
    exactly as many stages as there are. One rank alone has no pipeline to schedule.
    """
    pins = setting.pins
    offered: tuple[tuple[str, int], ...] = FREE
    if pins.schedule is not None:
        counts = {"one": (1,), "two": (2,), "many": (2, 4, 1)}[SCHEDULES[pins.schedule].chunks]
        counts = counts if pins.chunks is None else (pins.chunks,)
        offered = tuple((pins.schedule, count) for count in counts)
    elif pins.chunks is not None:
        offered = (*FREE, ("interleaved-1f1b", pins.chunks))
    elif pipeline == 1:
        offered = FREE[:1]
    for name, chunks in dict.fromkeys(offered):
        stages = pipeline * chunks
        if name not in SCHEDULES or pins.chunks not in (None, chunks):
            continue
        if chunks > 1 and pins.boundaries and len(pins.boundaries) != stages - 1:
            continue
        row = SCHEDULES[name]
        if pipeline > 1 and not row.flushes and _forbids_staleness(setting):
            continue
        if stages <= len(setting.chain.blocks) and not row.why_not(pipeline, chunks, micro_batches):
            yield name, chunks


def micro_batch_sizes(setting: Setting, mesh: tuple[MeshAxis, ...]) -> Iterator[tuple[int, int]]:
    """(samples per data rank, number of micro-batches) to try.

    Where a sample is split over a context axis that was not asked for, one at a time is enough.
    """
    pins, batch = setting.pins, setting.global_batch
    data = prod(axis.size for axis in mesh if axis.splits_samples)
    alone = pins.context is None and any(axis.name == CONTEXT for axis in mesh)
    if setting.batch.coupled:
        if data == 1 and pins.micro_batches in (None, 1) and pins.micro_batch in (None, batch):
            yield batch, 1
        return
    if setting.batch.at_once:
        size = ceil(batch / data)
        if pins.micro_batches in (None, 1) and pins.micro_batch in (None, size):
            yield size, 1
        return
    if pins.micro_batches is not None:
        whole = ceil(batch / pins.micro_batches)
        size = ceil(whole / data)
        if pins.micro_batch in (None, size):
            yield size, pins.micro_batches
        return
    most = 1 if alone else ceil(batch / data)
    powers = {2**k for k in range(most.bit_length())}
    sizes = {pins.micro_batch} if pins.micro_batch else powers | {most}
    for size in sorted(size for size in sizes if size <= most):
        yield size, ceil(batch / (size * data))


def meshes(
    setting: Setting, devices: int, pins: Pins | None = None
) -> Iterator[tuple[MeshAxis, ...]]:
    """The meshes of a stage of that many devices, by default under the setting's pins."""
    pins = pins or setting.pins
    for tensor in divisors(devices):
        if not _is_offered(tensor, pins.tensor, widest_tensor(setting)):
            continue
        for context in divisors(devices // tensor):
            ranks = devices // tensor // context
            if not _may_split_sequence(setting, context, tensor):
                continue
            if pins.data not in (None, ranks) or ranks > setting.global_batch:
                continue
            if pins.zero and ranks == 1:
                continue
            for shard in _shards(setting, pins, ranks):
                for sequence in _sequence_choices(setting, tensor, context):
                    yield stage_mesh(
                        data=ranks // shard,
                        shard=shard,
                        context=context,
                        tensor=tensor,
                        sequence=sequence,
                        zigzag=setting.has_causal_attention
                        and bool(zigzag(setting.sequence_length, context)),
                    )


def _shards(setting: Setting, pins: Pins, ranks: int) -> Iterator[int]:
    """Sizes of the inner of two axes that split samples: the pinned one, or where the model has
    experts any that they could be split by inside the fastest links."""
    most = max((e.experts for e in setting.experts.values()), default=1)
    if pins.expert is not None and (pins.expert > most or ranks % pins.expert):
        return
    span = min(most, setting.cluster.domain)
    for shard in divisors(ranks):
        if pins.shard is not None:
            offered = shard == pins.shard
        elif pins.expert is not None:
            offered = shard == (1 if ranks == pins.expert else pins.expert)
        else:
            offered = shard == 1 or (shard <= span and shard < ranks)
        if offered:
            yield shard


def _is_offered(degree: int, pinned: int | None, widest: int) -> bool:
    return degree <= widest if pinned is None else degree == pinned


def _may_split_sequence(setting: Setting, context: int, tensor: int) -> bool:
    """Whether a context degree is searched: the pinned one, or any inside the fastest links."""
    span = setting.cluster.domain
    if context == 1:
        return setting.pins.context in (None, 1)
    if setting.sequence_length < 2 * context:
        return False
    if setting.pins.context is not None:
        return context == setting.pins.context
    return context * tensor <= span


def _sequence_choices(setting: Setting, tensor: int, context: int) -> tuple[bool, ...]:
    """Whether values between blocks are split along the sequence on the tensor axis."""
    if tensor == 1 or setting.sequence_length < 2 * tensor * context:
        return (False,)
    pinned = setting.pins.sequence
    return (False, True) if pinned is None else (pinned == "on",)


def grids(setting: Setting) -> tuple[Grid, ...]:
    """All grids that the pins allow. Raises InputError where they allow none, saying why."""
    pins, blocks, found = setting.pins, len(setting.chain.blocks), list[Grid]()
    for pipeline, mesh, own in _laid_out(setting):
        if pins.pipeline in (None, pipeline) and pipeline <= blocks:
            found += [
                Grid(
                    pipeline=pipeline,
                    mesh=mesh,
                    own=own,
                    micro_batch=size,
                    micro_batches=count,
                    schedule=schedule,
                    chunks=chunks,
                )
                for size, count in micro_batch_sizes(setting, mesh)
                for schedule, chunks in variants(setting, pipeline, count)
                if chunks == 1 or not own or pins.schedule or pins.chunks
            ]
    if not found:
        raise InputError(_no_grid(setting))
    return tuple(found)


def _laid_out(
    setting: Setting,
) -> Iterator[tuple[int, tuple[MeshAxis, ...], tuple[tuple[int, ...], ...]]]:
    """Pipeline degrees with the mesh of a stage, and where they differ the sizes of each rank's."""
    devices, pins = setting.cluster.num_devices, setting.pins
    if pins.stages:
        places = max(place for place, _, _ in pins.stages) + 1
        for pipeline in range(places, devices + 1):
            if pins.pipeline not in (None, pipeline):
                continue
            for mesh, own in stage_meshes(setting, pipeline, meshes):
                if pins.meshes in (None, "own" if own else "alike"):
                    yield pipeline, mesh, own
        return
    if pins.meshes == "own":
        layouts = own_layouts(setting, meshes)
        yield from layouts if len(layouts) <= MOST_LAYOUTS else ()
        return
    for pipeline in divisors(devices):
        if pins.pipeline in (None, pipeline):
            for mesh in meshes(setting, devices // pipeline):
                yield pipeline, mesh, ()


def _no_grid(setting: Setting) -> str:
    pins, devices = setting.pins, setting.cluster.num_devices
    fixed = ", ".join(f"{key}={value}" for key, value in pins.items()) or "no pins"
    blocks = len(setting.chain.blocks)
    reasons = stage_reasons(setting) if pins.stages else _indivisible(pins, devices)
    if pins.meshes == "own" and not pins.stages:
        reasons = own_reasons(setting, meshes)
    if pins.pipeline is not None and pins.pipeline > blocks:
        reasons.append(
            f"pipeline={pins.pipeline} is more than the {blocks} blocks that the model can be cut "
            "into"
        )
    if pins.data is not None and pins.data > setting.global_batch:
        reasons.append(f"data={pins.data} exceeds the global batch {setting.global_batch}")
    most = max((found.experts for found in setting.experts.values()), default=0)
    if pins.expert is not None and pins.expert > max(most, 1):
        what = f"the model has {most} experts" if most else "no weight of the model is an expert's"
        reasons.append(f"expert={pins.expert} needs as many experts; {what}")
    if pins.context is not None and setting.sequence_length < 2 * pins.context:
        reasons.append(
            f"context={pins.context} needs a sequence of at least {2 * pins.context}; "
            + (
                f"the model's is {setting.sequence_length}"
                if setting.sequence_length
                else "the model has no dim that runs over a sequence"
            )
        )
    reasons += _unscheduled(setting)
    if setting.batch.coupled:
        node, why = setting.batch.coupled[0]
        reasons.append(f"the batch cannot be split: {node}: {why}")
    if setting.batch.at_once:
        node, why = setting.batch.at_once[0]
        reasons.append(f"there can be one micro-batch only: {node}: {why}")
    if pins.zero:
        reasons.append(f"zero={pins.zero} splits state over data-parallel ranks, at least two")
    if not reasons:
        reasons.append(
            f"every data degree left exceeds the global batch {setting.global_batch}, or no "
            "micro-batch size is left"
        )
    return f"no grid of {devices} devices satisfies {fixed}: " + "; ".join(reasons)


def _forbids_staleness(setting: Setting) -> str | None:
    """Why stages cannot update their weights one by one; None if they can."""
    if setting.pins.zero == 3:
        return "with zero=3 the weights that a micro-batch saw would have to be gathered again"
    for block_class in setting.chain.classes:
        block = setting.chain.representative(block_class.index)
        for position in setting.shared_positions[block_class.index]:
            source = setting.sources[block.parameters[position].name]
            if source.trainable:
                return f"{source.fqn} is read by several blocks, which may lie on two stages"
    return None


def _unscheduled(setting: Setting) -> list[str]:
    """What pinned schedule and chunks ask for that cannot be."""
    pins, blocks = setting.pins, len(setting.chain.blocks)
    if pins.schedule is None and pins.chunks is None:
        return []
    name = pins.schedule or "interleaved-1f1b"
    row = SCHEDULES[name]
    chunks = pins.chunks or (2 if row.chunks == "two" else 1)
    pipeline = pins.pipeline or 1
    reason = row.why_not(pipeline, chunks, pins.micro_batches or setting.global_batch)
    if reason is not None:
        return [f"schedule {name} cannot run over {reason}"]
    if not row.flushes and (found := _forbids_staleness(setting)):
        return [f"schedule {name} updates every stage by itself: {found}"]
    if pipeline * chunks > blocks:
        return [
            f"{pipeline} pipeline ranks of {chunks} stages each are more than the {blocks} blocks "
            "that the model can be cut into"
        ]
    return []


def _indivisible(pins: Pins, devices: int) -> list[str]:
    """How the pinned degrees fail to divide the devices."""
    degrees = {n: getattr(pins, n) for n in MESH_DEGREES if getattr(pins, n)}
    single = [
        f"{name}={degree} does not divide {devices} devices"
        for name, degree in degrees.items()
        if devices % degree
    ]
    if single:
        return [*single, f"degrees that do: {', '.join(map(str, divisors(devices)))}"]
    whole = prod(degrees.values())
    if devices % whole or ({"pipeline", "data", "tensor"} <= set(degrees) and whole != devices):
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        return [f"{text} = {whole} devices, the cluster has {devices}"]
    return []
