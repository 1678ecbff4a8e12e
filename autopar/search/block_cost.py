"""What one sharding of a block costs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.local_op import LocalOp
from autopar.search.recompute import Again


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """What one sharding of a block costs.

    Seconds are per micro-batch, those of `compute` without any collective. Bytes are per rank.
    `ways` are what it may keep and what it then runs again, the fastest first. `weight_s` is the
    part of `backward_s` that computes weight gradients, `deferred_bytes` what is held until then
    for each micro-batch, and `apart_s` what the backward then takes more, where a schedule splits
    it. `unmeasured` are ops that a profile has no time of. What the block's parameters cost besides
    is in `search.state`.
    """

    forward_s: float
    backward_s: float
    forward_compute_s: float
    backward_compute_s: float
    ways: tuple[Again, ...] = ()
    priced_ops: int
    measured_ops: int
    interpolated_ops: int = 0
    unmeasured: frozenset[LocalOp] = frozenset()
    weight_s: float = 0.0
    apart_s: float = 0.0
    deferred_bytes: int = 0
