"""Which rank of a stage sends what of a value to which rank of the next: the one answer that is
priced, listed and run.

Both stages lay a value out over their own mesh, so every rank has a box of it: some ranges of every
dim. Where two boxes meet there is a message. Ranks that hold the same box take turns to send it,
and every rank is sent all of its own. Between equal meshes a rank sends to the rank at its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.mesh import MeshAxis, place_of, position_of
from autopar.ir.placement import Layout, Shard, local_slices, nested_chunk
from autopar.ir.size import Shape, Size

Ranges = tuple[tuple[int, int], ...]
"""`(start, length)` of parts of a dim, in the order in which a rank holds them."""

Box = tuple[Ranges, ...]
"""The ranges of every dim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What of a value goes from a rank to another, by their positions in their stages."""

    sender: int
    receiver: int
    box: Box

    @property
    def numel(self) -> int:
        """Elements that are sent."""
        return numel(self.box)


def numel(box: Box) -> int:
    """Elements in a box."""
    return prod(map(extent, box))


def extent(ranges: Ranges) -> int:
    """Elements along one dim."""
    return sum(length for _, length in ranges)


def boxes(shape: Shape, samples: int, layout: Layout, axes: Sequence[MeshAxis]) -> tuple[Box, ...]:
    """What every rank of a mesh holds of a value of a micro-batch of so many samples."""
    sizes = [axis.size for axis in axes]
    return tuple(
        _box(shape, samples, layout, axes, place_of(position, sizes))
        for position in range(prod(sizes))
    )


def weight_boxes(shape: Sequence[int], layout: Layout, axes: Sequence[MeshAxis]) -> tuple[Box, ...]:
    """The same of a parameter, or of its gradient."""
    return boxes(tuple(Size(extent) for extent in shape), 0, layout, axes)


def _box(
    shape: Shape,
    samples: int,
    layout: Layout,
    axes: Sequence[MeshAxis],
    place: Sequence[int],
) -> Box:
    split = [(axis.size, at) for axis, at in zip(axes, place, strict=True) if axis.splits_samples]
    start, own = nested_chunk(samples, [size for size, _ in split], [at for _, at in split])
    found: list[Ranges] = []
    for dim, size in enumerate(shape):
        if size.is_batch:
            found.append(((size.per_sample * start, size.const + size.per_sample * own),))
            continue
        ranges: Ranges = ((0, size.const),)
        for axis, placement, at in zip(axes, layout, place, strict=True):
            if isinstance(placement, Shard) and placement.dim == dim:
                cut = local_slices(extent(ranges), placement, axis.size, at)
                ranges = tuple(part for one in cut for part in within(ranges, one))
        found.append(ranges)
    return tuple(found)


def within(ranges: Ranges, part: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """What a range of the elements that `ranges` hold is in the dim itself."""
    passed, (first, length) = 0, part
    for start, size in ranges:
        low, high = max(first, passed), min(first + length, passed + size)
        if high > low:
            yield start + low - passed, high - low
        passed += size


def common(one: Box, other: Box) -> Box:
    """Where two boxes meet, in the order of the first."""
    return tuple(
        tuple(
            (max(a, b), min(a + m, b + n) - max(a, b))
            for a, m in first
            for b, n in second
            if min(a + m, b + n) > max(a, b)
        )
        for first, second in zip(one, other, strict=True)
    )


def local(box: Box, held: Box) -> Box:
    """A box, which lies in another one, by the place of its elements there."""
    return tuple(
        _joined(_inside(part, whole) for part in ranges)
        for ranges, whole in zip(box, held, strict=True)
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges with those made one that follow each other."""
    found: list[tuple[int, int]] = []
    for start, length in ranges:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return tuple(found)


def _inside(part: tuple[int, int], ranges: Ranges) -> tuple[int, int]:
    passed, (start, length) = 0, part
    for first, size in ranges:
        if first <= start and start + length <= first + size:
            return passed + start - first, length
        passed += size
    raise ValueError(f"range {part} is not in {ranges}")


def messages(have: Sequence[Box], want: Sequence[Box]) -> tuple[Message, ...]:
    """What brings a value from the ranks that `have` it to those that `want` it, by receiver."""
    if tuple(have) == tuple(want):
        return tuple(
            Message(sender=rank, receiver=rank, box=box)
            for rank, box in enumerate(want)
            if numel(box)
        )
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(have):
        holders.setdefault(box, []).append(rank)
    taken = dict.fromkeys(holders, 0)
    found = []
    for receiver, wanted in enumerate(want):
        for box, ranks in holders.items():
            shared = common(wanted, box)
            if numel(shared):
                sender = ranks[taken[box] % len(ranks)]
                found.append(Message(sender=sender, receiver=receiver, box=shared))
                taken[box] += 1
    return tuple(found)


def sent_by(
    place: Sequence[int],
    shape: Shape,
    samples: int,
    layout: Layout,
    here: Sequence[MeshAxis],
    there: Sequence[MeshAxis],
) -> tuple[Box, ...]:
    """What the rank at a place of a mesh sends of a value to the ranks of another mesh."""
    if tuple(here) == tuple(there):
        own = _box(shape, samples, layout, here, place)
        return (own,) if numel(own) else ()
    have, want = (boxes(shape, samples, layout, axes) for axes in (here, there))
    rank = position_of(place, [axis.size for axis in here])
    return tuple(message.box for message in messages(have, want) if message.sender == rank)
