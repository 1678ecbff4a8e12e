"""Pipelines whose stages have meshes of other sizes, or other numbers of devices.

They are as pinned, where any stage has pins of its own: then ranks of the pipeline without such
pins have one mesh among them. With `meshes=own` they are searched. All stages split the sequence
alike over the context axis, and between blocks alike over the tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from math import prod

from autopar.ir.cluster import DeviceGroup
from autopar.ir.mesh import AXES, CONTEXT, TENSOR, MeshAxis, batch_size
from autopar.search.pins import Pins
from autopar.search.setting import Setting

Mesh = tuple[MeshAxis, ...]
Meshes = Callable[[Setting, int, Pins], Iterable[Mesh]]
"""The meshes of so many devices under some pins."""

MOST_LAYOUTS = 400
"""Layouts of stages with meshes of their own that are searched at most."""

MESH_OF_A_GROUP = (
    "; and where the devices are of several groups, any number of stages on each of them, with a "
    "data x tensor mesh of its own"
)
"""The pipelines whose stages have other meshes on each group, in words."""

Own = tuple[tuple[int, ...], ...]
"""Sizes of the axes by rank of the pipeline; none where all are alike."""


def stage_meshes(setting: Setting, pipeline: int, meshes: Meshes) -> Iterator[tuple[Mesh, Own]]:
    """The axes, in the sizes of the rank whose samples are split the most, and the sizes of all."""
    devices = stage_devices(setting, pipeline)
    pins = [own_pins(setting.pins, place) for place in range(pipeline)]
    if devices is None:
        return
    kinds = list(zip(devices, pins, strict=True))
    distinct = list(dict.fromkeys(kinds))
    offered = [list(meshes(setting, count, own)) for count, own in distinct]
    for chosen in product(*offered):
        flags = _flags(chosen)
        if flags is not None:
            by_kind = dict(zip(distinct, chosen, strict=True))
            yield _together([by_kind[kind] for kind in kinds], flags)


def stage_devices(setting: Setting, pipeline: int) -> tuple[int, ...] | None:
    """Devices of every rank of the pipeline: those pinned, and an even share of the rest; None
    where that is not whole."""
    pinned = [setting.pins.of_stage(place).get("devices") for place in range(pipeline)]
    left = setting.cluster.num_devices - sum(count or 0 for count in pinned)
    free = pinned.count(None)
    if (left if not free else left % free) or left < free:
        return None
    return tuple(left // free if count is None else count for count in pinned)


def own_pins(pins: Pins, place: int) -> Pins:
    """The pins as they are for a rank of the pipeline: a degree of its own leaves its other one
    free. Samples are split over one axis unless `shard` is pinned."""
    own = pins.of_stage(place)
    both = replace(pins, zero=None, shard=pins.shard or 1, stages=())
    if not own:
        return both
    tensor = own.get("tensor", None if "data" in own else pins.tensor)
    return replace(both, data=own.get("data"), tensor=tensor)


def own_layouts(setting: Setting, meshes: Meshes) -> list[tuple[int, Mesh, Own]]:
    """Pipelines with their meshes, not all alike, where `meshes=own` is pinned: any data x tensor
    mesh on each rank, or where the cluster has several groups any number of ranks on the devices of
    each, on one mesh a group. One more than `MOST_LAYOUTS` where there are more."""
    return list(islice(_own_layouts(setting, meshes), MOST_LAYOUTS + 1))


def _own_layouts(setting: Setting, meshes: Meshes) -> Iterator[tuple[int, Mesh, Own]]:
    pins, most = setting.pins, len(setting.chain.blocks)
    single = replace(pins, zero=None, shard=pins.shard or 1, context=pins.context or 1)
    groups = setting.cluster.groups
    if len(groups) == 1:
        devices = setting.cluster.num_devices
        counts = [n for n in range(2, min(most, devices) + 1) if devices % n == 0]
        wanted = [n for n in counts if pins.pipeline in (None, n)]
        parts = [[(1, list(meshes(setting, devices // n, single)))] * n for n in wanted]
        offers = [[[(1, mesh) for mesh in own] for _, own in places] for places in parts]
    else:
        offers = [[_of_group(setting, group, single, meshes) for group in groups]]
    for offered in offers:
        for chosen in product(*offered):
            flags = _flags([mesh for _, mesh in chosen])
            pipeline = sum(count for count, _ in chosen)
            if flags is None or pipeline > most or pins.pipeline not in (None, pipeline):
                continue
            mesh, own = _together([mesh for count, mesh in chosen for _ in range(count)], flags)
            if own:
                yield pipeline, mesh, own


def _of_group(
    setting: Setting, group: DeviceGroup, pins: Pins, meshes: Meshes
) -> list[tuple[int, Mesh]]:
    """Numbers of ranks on the devices of a group, and a mesh for each."""
    return [
        (count, mesh)
        for count in range(1, group.num_devices + 1)
        if group.num_devices % count == 0
        for mesh in meshes(setting, group.num_devices // count, pins)
    ]


def own_text(setting: Setting) -> str:
    """Which stages with meshes of their own are searched, in words; none unless pinned."""
    if setting.pins.stages:
        return "; stages with meshes of their own as pinned"
    if setting.pins.meshes != "own":
        return ""
    if len(setting.cluster.groups) == 1:
        return "; of these the pipelines whose ranks have other data and tensor degrees each"
    return "; of these the pipelines whose groups have other meshes each" + MESH_OF_A_GROUP


def _flags(chosen: Sequence[Mesh]) -> dict[str, MeshAxis] | None:
    """The axes that any of the meshes has, with how they split the sequence; None where they
    disagree."""
    found: dict[str, MeshAxis] = {}
    for mesh in chosen:
        for axis in mesh:
            known = found.get(axis.name)
            if known is None or known.size == 1:
                found[axis.name] = axis
            elif axis.size > 1 and replace(axis, size=known.size) != known:
                return None
    contexts = {axis.size for mesh in chosen for axis in mesh if axis.name == CONTEXT}
    several = len(contexts) > 1 or (
        bool(contexts) and any(all(a.name != CONTEXT for a in mesh) for mesh in chosen)
    )
    return None if several else found


def _together(places: Sequence[Mesh], flags: dict[str, MeshAxis]) -> tuple[Mesh, Own]:
    names = [name for name in AXES if name in flags]
    sizes = [{axis.name: axis.size for axis in mesh} for mesh in places]
    own = tuple(tuple(by_name.get(name, 1) for name in names) for by_name in sizes)
    most = max(own, key=lambda each: batch_size(names, each))
    mesh = tuple(replace(flags[name], size=size) for name, size in zip(names, most, strict=True))
    return mesh, own if len(set(own)) > 1 else ()


def own_reasons(setting: Setting, meshes: Meshes) -> list[str]:
    """What keeps `meshes=own` from being met."""
    if len(own_layouts(setting, meshes)) > MOST_LAYOUTS:
        return [
            f"meshes=own leaves more than {MOST_LAYOUTS} ways to lay out the stages, of which none "
            "is searched: pin pipeline, tensor or micro_batches, or name the meshes (stageK.tensor)"
        ]
    return ["meshes=own needs at least two ranks of the pipeline, with devices for two meshes"]


def stage_reasons(setting: Setting) -> list[str]:
    """What keeps the pins of stages from being met."""
    pins, devices = setting.pins, setting.cluster.num_devices
    places = max(place for place, _, _ in pins.stages) + 1
    if pins.pipeline is not None and pins.pipeline < places:
        last = f"stage{places - 1}"
        return [f"pipeline={pins.pipeline} has ranks 0 to {pins.pipeline - 1}, and no {last}"]
    pipeline = pins.pipeline or places
    shares = stage_devices(setting, pipeline)
    if shares is None:
        return [
            f"{devices} devices cannot be shared by {pipeline} ranks of the pipeline as pinned: "
            "those without stageK.devices get equal shares of what the others leave"
        ]
    reasons = []
    for place, count in enumerate(shares):
        own = own_pins(pins, place)
        whole = prod(getattr(own, name) or 1 for name in ("data", "context", TENSOR))
        if count % whole:
            reasons.append(
                f"stage{place} has {count} devices, which data {own.data or 'free'} x context "
                f"{own.context or 'free'} x tensor {own.tensor or 'free'} does not divide"
            )
    return reasons
