"""What a parameter adds to a step's end: its part of the buckets that gradients and updated weights
travel in, and its update by the optimizer."""

from __future__ import annotations

from autopar.costs.optimizer_state import optimizer_op
from autopar.ir.collective import CollectiveOp
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer

StateCollective = tuple[CollectiveOp, float, tuple[str, ...]]
"""One on a parameter or its gradient: bytes, and the mesh axes that it joins."""

SUMS = (CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_REDUCE)


def bucket_share_s(
    pricer: Pricer, grid: Grid, collective: StateCollective, level: int, local_bytes: int
) -> float:
    """Seconds of the part that a parameter of `local_bytes` has in a collective on a bucket."""
    op, nbytes, axes = collective
    parts = bucket_parts(pricer, grid, op, level, local_bytes)
    return pricer.joined_s(grid, op, parts * nbytes, axes) / parts


def bucket_parts(
    pricer: Pricer, grid: Grid, op: CollectiveOp, level: int, local_bytes: int
) -> float:
    """How many parameters of `local_bytes` share a collective with this one.

    A gradient of a weight that lies in shards (ZeRO `level` 3) is summed by itself, unless what
    runs the plan has a block's parameters as one.
    """
    alone = level == 3 and op in SUMS and not pricer.setting.execution.flat
    return 1.0 if alone else pricer.prices(grid).bucket_parts(local_bytes)


def update_s(pricer: Pricer, numel: int, moved_bytes: float) -> float:
    """Seconds of the optimizer's step on so many elements of one parameter: as measured, else what
    moving `moved_bytes` takes."""
    training = pricer.setting.training
    precision, profile = training.precision, pricer.profile
    if profile is not None and not pricer.setting.execution.step_bytes:
        dtype = "float32" if precision.master else precision.param_dtype
        op = optimizer_op(training.optimizer, training.optimizer_kwargs, numel, dtype)
        found = profile.lookup(op)
        if found is not None:
            return found[0]
    return pricer.memory_s(moved_bytes)
