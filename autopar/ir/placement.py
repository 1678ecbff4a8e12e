"""How a tensor lies on one mesh axis, and what its local part is.

A value in the forward pass and its gradient in the backward pass lie on an axis in one of four
ways:

| text     | value                    | gradient                 |
|----------|--------------------------|--------------------------|
| `S(d)`   | split along dim `d`      | split along dim `d`      |
| `R`      | the same on every rank   | the same on every rank   |
| `R*`     | the same on every rank   | a partial sum on each    |
| `P(sum)` | a partial sum on each    | the same on every rank   |

`R` and `R*` differ only for values that carry a gradient. Going from `R` to `R*` moves nothing
forward and all-reduces the gradient backward (the `f` of Megatron-LM); `P(sum)` to `R` all-reduces
forward and moves nothing backward (its `g`). `S(d:a|b|c)` splits every piece of the dim by itself,
as a packed query-key-value projection needs: a rank holds its share of each piece. A piece with a
minus sign is dealt out from the last rank to the first: under `S(1:8|-8)` the first rank holds the
two ends of the dim and the last one its middle, which balances causal attention ("zig-zag"). `E`
are rows sorted by expert of which a rank holds those of its experts, with their gradients.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Union

_SHARD = re.compile(r"^S\((\d+)(?::(-?\d+(?:\|-?\d+)*))?\)$")


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Split along `dim`; each of `pieces` (whose sizes sum to the dim) is split by itself if given,
    a negative one in the reverse order of ranks."""

    dim: int
    pieces: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"S({self.dim}:{'|'.join(map(str, self.pieces))})" if self.pieces else f"S({self.dim})"
        )


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """The same value on every rank; `grad_partial` makes it `R*`."""

    grad_partial: bool = False

    def __str__(self) -> str:
        return "R*" if self.grad_partial else "R"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """Each rank holds one summand of the value."""

    def __str__(self) -> str:
        return "P(sum)"


@dataclass(frozen=True, slots=True, order=True)
class ByExpert:
    """Rows sorted by expert, of which each rank holds those of its experts (see `rules.experts`).

    How many those are the routing decides; in plans they are taken to be even.
    """

    def __str__(self) -> str:
        return "E"


Placement = Union[Shard, Replicate, Partial, ByExpert]
Layout = tuple[Placement, ...]
"""One placement per mesh axis, outermost axis first."""

R = Replicate()
R_STAR = Replicate(grad_partial=True)
P = Partial()
BY_EXPERT = ByExpert()


def parse_placement(text: str) -> Placement:
    """Inverse of `str` on placements. Raises ValueError on anything else."""
    fixed: dict[str, Placement] = {"R": R, "R*": R_STAR, "P(sum)": P, "E": BY_EXPERT}
    if text in fixed:
        return fixed[text]
    if match := _SHARD.match(text):
        pieces = tuple(int(piece) for piece in match.group(2).split("|")) if match.group(2) else ()
        return Shard(int(match.group(1)), pieces)
    raise ValueError(f"not a placement: {text!r}; expected S(dim), R, R*, P(sum) or E")


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Sizes of the chunks of a dim over `parts` ranks.

    The convention of `torch.chunk` and DTensor: all chunks but the last non-empty one hold
    `ceil(size / parts)`, so trailing ranks may hold fewer or none. (10, 4) gives (3, 3, 3, 1).
    """
    chunk = -(-size // parts)
    return tuple(max(0, min(chunk, size - rank * chunk)) for rank in range(parts))


def chunk_at(size: int, parts: int, rank: int) -> tuple[int, int]:
    """Start and size of the chunk of `chunk_sizes` that `rank` holds."""
    chunk = -(-size // parts)
    start = min(size, rank * chunk)
    return start, min(chunk, size - start)


def chunk_offsets(size: int, parts: int) -> tuple[int, ...]:
    """Start of each chunk of `chunk_sizes`."""
    return (0, *accumulate(chunk_sizes(size, parts)))[:parts]


def nested_chunk(size: int, parts: Sequence[int], at: Sequence[int]) -> tuple[int, int]:
    """Start and size of a rank's chunk of a dim that several axes cut one after the other.

    `parts` are the axes' sizes, outermost first; `at` the rank's place on each.
    """
    start = 0
    for count, rank in zip(parts, at, strict=True):
        offset, size = chunk_at(size, count, rank)
        start += offset
    return start, size


def local_size(size: int, placement: Shard, parts: int, rank: int) -> int:
    """Extent of the sharded dim on `rank`; rank 0 holds the largest share of every piece that is
    not reversed."""
    return sum(length for _, length in local_slices(size, placement, parts, rank))


def local_slices(size: int, placement: Shard, parts: int, rank: int) -> tuple[tuple[int, int], ...]:
    """`(start, length)` ranges of the dim that `rank` holds, in order; one range per piece."""
    ranges, start = [], 0
    for piece in placement.pieces or (size,):
        length = abs(piece)
        at = rank if piece >= 0 else parts - 1 - rank
        offset, own = chunk_at(length, parts, at)
        ranges.append((start + offset, own))
        start += length
    return tuple(ranges)


def zigzag(size: int, parts: int) -> tuple[int, ...]:
    """Pieces that give every rank an early and a late part of a dim; none where it cannot be cut in
    `2 * parts` equal ones."""
    return () if size % (2 * parts) else (size // 2, -(size // 2))


def local_shape(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of the part that the rank at `coordinate` holds; later axes split what earlier left."""
    result = list(shape)
    for placement, parts, rank in zip(layout, axis_sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] = local_size(result[placement.dim], placement, parts, rank)
        elif isinstance(placement, ByExpert):
            result[0] = chunk_at(result[0], parts, rank)[1]
    return tuple(result)


def largest_shape(
    shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape on the rank that holds the most: time and memory are priced on that rank."""
    result = list(shape)
    for placement, parts in zip(layout, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            pieces = placement.pieces or (result[placement.dim],)
            result[placement.dim] = sum(-(-abs(piece) // parts) for piece in pieces)
        elif isinstance(placement, ByExpert):
            result[0] = -(-result[0] // parts)
    return tuple(result)
