"""Dropout masks that are a function of position, so that every plan draws the same ones.

Whether an element is kept depends on the seed, the step, the number of the random op in the program
and the element's index in the whole tensor; never on a generator's state. A rank that holds a shard
computes the slice of the one-device mask that belongs to it.

The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), in int64 arithmetic that wraps: element `i` of stream `key` is
`mix(key + (i + 1) * GAMMA)`, with `mix` the variant 13 of Stafford's 64-bit finalizers, and the key
is `mix` chained over seed, step and op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Range = tuple[int, int]
Where = int | tuple[Range, ...]
Dims = Sequence[tuple[Where, int]]
"""Per dim: where the local part lies, a start or `(start, length)` ranges, and the dim's stride in
the elements of the whole tensor."""

GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MASK = (1 << 64) - 1
_CHUNK_ELEMENTS = 1 << 22
"""Elements hashed at a time: the int64 temporaries take 24 bytes for each."""


class RandomKey(Protocol):
    """The part of a step context that decides random numbers."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def step(self) -> int:
        """The number of the training step."""

    @property
    def training(self) -> bool:
        """Whether random ops are on."""


def mix(value: int) -> int:
    """The finalizer on one unsigned 64-bit number."""
    for shift, multiplier in _MULTIPLIERS:
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> _LAST_SHIFT)


def stream(*numbers: int) -> int:
    """A 64-bit key of some numbers; their order counts."""
    key = 0
    for number in numbers:
        key = mix((key + GAMMA + number) & _MASK)
    return key


def keep_mask(key: RandomKey, op: int, p: float, dims: Dims, like: Tensor) -> Tensor:
    """Which elements of the local part stay when each is dropped with probability `p`: bool.

    The mask has the shape and device of `like`, whose dims lie in the whole tensor as `dims` says.
    """
    start = stream(key.seed, key.step, op)
    threshold = min(round((1.0 - p) * 2.0**63), 2**63 - 1)
    index = [
        _positions(where, extent, like.device) * stride
        for (where, stride), extent in zip(dims, like.shape, strict=True)
    ]
    keep = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    if not index or not like.numel():
        return keep.fill_(_below(_signed(start + GAMMA), threshold)) if not index else keep
    rows = max(1, _CHUNK_ELEMENTS // max(1, like.numel() // like.shape[0]))
    for first in range(0, like.shape[0], rows):
        part = [index[0][first : first + rows], *index[1:]]
        keep[first : first + rows] = _hash(_outer_sum(part), start).lt_(threshold).bool()
    return keep


def _below(key: int, threshold: int) -> bool:
    return (mix(key & _MASK) >> 1) < threshold


def _positions(where: Where, extent: int, device: torch.device) -> Tensor:
    """Global indices along one dim of the local elements."""
    if isinstance(where, int):
        return torch.arange(where, where + extent, device=device)
    found = [torch.arange(start, start + length, device=device) for start, length in where]
    index = torch.cat(found) if found else torch.arange(0, device=device)
    if len(index) != extent:
        raise ValueError(f"ranges {where} hold {len(index)} elements; the dim has {extent}")
    return index


def _outer_sum(parts: Sequence[Tensor]) -> Tensor:
    """`result[i, j, ...] = parts[0][i] + parts[1][j] + ...`."""
    total, last = parts[0], len(parts) - 1
    for part in parts[1:]:
        total = total.unsqueeze(-1) + part
    return total.clone() if last == 0 else total


def _hash(index: Tensor, key: int) -> Tensor:
    """63 random bits for each index, in place."""
    z = index.add_(1).mul_(_signed(GAMMA)).add_(_signed(key))
    for shift, multiplier in _MULTIPLIERS:
        z.bitwise_xor_(_logical_shift(z, shift)).mul_(_signed(multiplier))
    z.bitwise_xor_(_logical_shift(z, _LAST_SHIFT))
    return _logical_shift(z, 1)


def _logical_shift(z: Tensor, shift: int) -> Tensor:
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
