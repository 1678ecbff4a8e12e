"""Named axes of ranks and the process groups along them.

Every process makes every group of the run, in one order that follows from the arguments alone:
`torch.distributed.new_group` needs all processes to call it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import PlanMismatch
from autopar.ir.placement import Shard, chunk_offsets, local_size, local_slices
from autopar.runtime.groups import end_groups
from autopar.runtime.recorder import Recorder

FORWARD, BACKWARD = "forward", "backward"

Ranges = tuple[tuple[int, int], ...]
"""`(start, length)` of parts of a dim."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AxisGroup:
    """The ranks along one axis, or along several joined ones, through this process.

    `rank` is this process's position in `ranks`. `group` is None where `size` is 1: there is nobody
    to talk to. `axes` are the names of the mesh axes joined.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int
    recorder: Recorder
    group: dist.ProcessGroup | None = None

    @property
    def name(self) -> str:
        """The axis name; joined axes are joined by `+`."""
        return "+".join(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def start(self, size: int) -> int:
        """Where this rank's shard of a dim begins."""
        return chunk_offsets(size, self.size)[self.rank]

    def share(self, size: int, pieces: tuple[int, ...] = ()) -> int:
        """How much of a dim this rank's shard holds."""
        return local_size(size, Shard(0, pieces), self.size, self.rank)

    def ranges(self, size: int, pieces: tuple[int, ...] = ()) -> Ranges:
        """`(start, length)` of each range of a dim that this rank's shard holds."""
        return local_slices(size, Shard(0, pieces), self.size, self.rank)

    def cut(self, ranges: Ranges) -> Ranges:
        """This rank's share of what `ranges` of a dim hold together, as ranges of the dim."""
        total = sum(length for _, length in ranges)
        first, length = self.start(total), self.share(total)
        found, passed = [], 0
        for start, size in ranges:
            low, high = max(first, passed), min(first + length, passed + size)
            if high > low:
                found.append((start + low - passed, high - low))
            passed += size
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """The ranks of one stage as a grid of named axes, outermost first, seen from this process.

    `coordinate` is None, and `axes` empty, where the process is not among the ranks.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    axes: Mapping[str, AxisGroup]
    joined: Mapping[tuple[str, ...], AxisGroup]
    alone: dist.ProcessGroup | None = None

    def along(self, names: tuple[str, ...]) -> AxisGroup:
        """The group along the named axes together. Raises KeyError if it was not asked for."""
        wide = tuple(name for name in names if self.axes[name].size > 1)
        if len(wide) <= 1:
            return self.axes[wide[0] if wide else names[0]]
        return self.joined[wide]

    @property
    def wide(self) -> tuple[int, ...]:
        """Indices of the axes with more than one rank; the first axis where there is none."""
        return tuple(i for i, size in enumerate(self.sizes) if size > 1) or (0,)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The grid for DTensor, made of the groups that exist; axes of size 1 are left out."""
        names = tuple(self.names[i] for i in self.wide)
        groups = [group for name in names if (group := self.axes[name].group or self.alone)]
        grid = torch.tensor(self.ranks).reshape([self.sizes[i] for i in self.wide])
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, grid, mesh_dim_names=names)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """All processes of a run: one mesh per stage, and the groups that cross stages.

    `channels[stage, direction]` carries values between `stage` and `stage + 1`; it is absent where
    both stages have the same ranks. `ties[stages]` joins the ranks at this process's position of
    the stages that own a tied parameter, or all their ranks where their meshes differ; absent where
    that is this process alone.
    """

    rank: int
    size: int
    device: torch.device
    recorder: Recorder
    meshes: tuple[Mesh, ...]
    everyone: AxisGroup
    channels: Mapping[tuple[int, str], dist.ProcessGroup]
    ties: Mapping[tuple[int, ...], AxisGroup]
    groups: tuple[dist.ProcessGroup, ...] = ()

    def close(self) -> None:
        """Give back the process groups made for this run, with their threads and connections.

        Nothing may communicate through them afterwards. All processes call it.
        """
        end_groups(self.groups)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages this process runs, in order."""
        return tuple(i for i, mesh in enumerate(self.meshes) if mesh.coordinate is not None)

    def is_alike(self, stages: Iterable[int]) -> bool:
        """Whether stages have meshes of the same sizes."""
        return _alike(self.meshes[stage].sizes for stage in stages)

    def position(self, stage: int) -> int:
        """Which of the ranks of a stage, one of its own, this process is."""
        return self.meshes[stage].ranks.index(self.rank)


class _Groups:
    """Makes each group of ranks once; every process asks for the same ones in the same order."""

    def __init__(self, world_size: int) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._world = tuple(range(world_size))

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._made:
            whole = ranks == self._world
            made = dist.group.WORLD if whole else dist.new_group(list(ranks))
            assert made is not None
            self._made[ranks] = made
        return self._made[ranks]

    def made(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups made here, in the order they were asked for."""
        return tuple(group for ranks, group in self._made.items() if ranks != self._world)


def create_world(
    axes: Sequence[tuple[str, int]],
    stages: Sequence[Sequence[int]],
    *,
    stage_sizes: Sequence[Sequence[int]] = (),
    joins: Iterable[tuple[str, ...]] = (),
    ties: Iterable[tuple[int, ...]] = (),
    device: torch.device | str = "cpu",
) -> World:
    """Make all process groups of a run. Collective over all processes, with equal arguments.

    `axes` are `(name, size)` of every stage's mesh, outermost first; `stages` the ranks of each
    stage; `stage_sizes` its own sizes of the axes, none where they are those of `axes`. `joins` are
    sets of axes whose ranks must reach each other in one collective (a gradient
    summed over two axes), `ties` sets of stages that own a tied parameter. Raises PlanMismatch
    where a stage's rank count is not the product of the axes or a rank does not exist.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own_sizes = stage_sizes or [()] * len(stages)
    named = [_sized(axes, sizes) for sizes in own_sizes]
    _check(named, stages, size)
    groups, recorder, wanted = _Groups(size), Recorder(), list(joins)
    meshes = tuple(
        _mesh(own, tuple(ranks), rank, _wide_joins(own, wanted), groups, recorder)
        for own, ranks in zip(named, stages, strict=True)
    )
    channels = _channels([tuple(ranks) for ranks in stages])
    everyone = _group(("world",), tuple(range(size)), rank, groups, recorder)
    sizes = [mesh.sizes for mesh in meshes]
    tied = _ties(stages, sizes, sorted(set(ties)), rank, groups, recorder)
    return World(
        rank=rank,
        size=size,
        device=torch.device(device),
        recorder=recorder,
        meshes=meshes,
        everyone=everyone,
        channels=channels,
        ties=tied,
        groups=(*groups.made(), *dict.fromkeys(channels.values())),
    )


def _channels(stages: Sequence[tuple[int, ...]]) -> dict[tuple[int, str], dist.ProcessGroup]:
    """A group for every way that messages go: boundaries between the same ranks, where ranks have
    several stages, share theirs, since messages are taken in the order they are sent."""
    made: dict[tuple[tuple[int, ...], tuple[int, ...], str], dist.ProcessGroup] = {}
    channels = {}
    for stage, (here, there) in enumerate(pairwise(stages)):
        if here == there:
            continue
        for direction in (FORWARD, BACKWARD):
            way = (here, there, direction)
            if way not in made:
                made[way] = dist.new_group(sorted({*here, *there}))
            channels[stage, direction] = made[way]
    return channels


def _sized(axes: Sequence[tuple[str, int]], sizes: Sequence[int]) -> Sequence[tuple[str, int]]:
    if not sizes:
        return axes
    return [(name, size) for (name, _), size in zip(axes, sizes, strict=True)]


def _check(
    axes: Sequence[Sequence[tuple[str, int]]], stages: Sequence[Sequence[int]], world_size: int
) -> None:
    for stage, (own, ranks) in enumerate(zip(axes, stages, strict=True)):
        expected = prod(size for _, size in own)
        shape = " x ".join(f"{name} {size}" for name, size in own)
        if len(ranks) != expected or len(set(ranks)) != expected:
            raise PlanMismatch(
                f"stage {stage} has ranks {list(ranks)}; the mesh {shape} needs {expected} distinct"
            )
        if not set(ranks) <= set(range(world_size)):
            raise PlanMismatch(
                f"stage {stage} uses rank {max(ranks)}, but {world_size} processes were started; "
                f"start as many as the plan has devices"
            )


def _wide_joins(
    axes: Sequence[tuple[str, int]], joins: Iterable[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """The joins without axes of size 1, in mesh order; those of one axis need no group of their
    own."""
    wide = [name for name, size in axes if size > 1]
    kept = {tuple(name for name in wide if name in join) for join in joins}
    return tuple(sorted(join for join in kept if len(join) > 1))


def _group(
    axes: tuple[str, ...],
    ranks: tuple[int, ...],
    rank: int,
    groups: _Groups,
    recorder: Recorder,
) -> AxisGroup:
    group = groups.get(ranks) if len(ranks) > 1 else None
    return AxisGroup(axes=axes, ranks=ranks, rank=ranks.index(rank), recorder=recorder, group=group)


def _mesh(
    axes: Sequence[tuple[str, int]],
    ranks: tuple[int, ...],
    rank: int,
    joins: tuple[tuple[str, ...], ...],
    groups: _Groups,
    recorder: Recorder,
) -> Mesh:
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    at = dict(zip(product(*map(range, sizes)), ranks, strict=True))
    coordinate = next((where for where, owner in at.items() if owner == rank), None)
    mine: dict[tuple[str, ...], AxisGroup] = {}
    for join in (*((name,) for name in names), *joins):
        for line in _lines(at, [names.index(name) for name in join]):
            if len(line) > 1:
                groups.get(line)
            if rank in line:
                mine[join] = _group(join, line, rank, groups, recorder)
    alone = groups.get(ranks) if len(ranks) == 1 else None
    return Mesh(
        names=names,
        sizes=sizes,
        ranks=ranks,
        coordinate=coordinate,
        axes={join[0]: group for join, group in mine.items() if len(join) == 1},
        joined={join: group for join, group in mine.items() if len(join) > 1},
        alone=alone,
    )


def _lines(at: Mapping[tuple[int, ...], int], along: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks that differ only in the coordinates `along`, for each value of the others."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for where, owner in at.items():
        fixed = tuple(-1 if i in along else c for i, c in enumerate(where))
        lines.setdefault(fixed, []).append(owner)
    return [tuple(line) for line in lines.values()]


def _alike(sizes: Iterable[tuple[int, ...]]) -> bool:
    return len(set(sizes)) == 1


def _ties(
    stages: Sequence[Sequence[int]],
    sizes: Sequence[tuple[int, ...]],
    ties: Sequence[tuple[int, ...]],
    rank: int,
    groups: _Groups,
    recorder: Recorder,
) -> dict[tuple[int, ...], AxisGroup]:
    mine: dict[tuple[int, ...], AxisGroup] = {}
    for owners in ties:
        lines = [set().union(*(stages[stage] for stage in owners))]
        if _alike(sizes[stage] for stage in owners):
            lines = [set(line) for line in zip(*(stages[s] for s in owners), strict=True)]
        for line in lines:
            ranks = tuple(sorted(line))
            if len(ranks) > 1:
                groups.get(ranks)
                if rank in ranks:
                    mine[owners] = _group(("tied",), ranks, rank, groups, recorder)
    return mine
