"""What a parameter adds to a step's end: its part of the buckets that gradients and updated weights
travel in, and its update by the optimizer."""

from __future__ import annotations

from math import prod

from autopar.costs.compute import memory_s
from autopar.costs.optimizer_state import optimizer_op
from autopar.ir.collective import CollectiveOp
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.search.grid import Grid
from autopar.search.pricer import Pricer


def bucket_share_s(
    pricer: Pricer, grid: Grid, op: CollectiveOp, nbytes: float, axes: tuple[str, ...]
) -> float:
    """Seconds of a parameter's part of a collective that many parameters share.

    A bucket is taken to be as full as the parameters of an even stage fill it: one parameter by
    itself would pay a latency that all of its bucket pay once.
    """
    whole = pricer.setting.whole_state.weights / grid.pipe.num_stages / grid.tensor
    full = min(float(DEFAULT_CAP_BYTES), max(nbytes, whole))
    return pricer.joined_s(grid, op, full, axes) * nbytes / full if full else 0.0


def update_s(pricer: Pricer, shape: tuple[int, ...], moved_bytes: float) -> float:
    """Seconds of the optimizer's step on one parameter of a local shape: as measured, else what
    moving `moved_bytes` takes."""
    training = pricer.setting.training
    precision, profile = training.precision, pricer.profile
    if profile is not None and not pricer.setting.execution.step_bytes:
        dtype = "float32" if precision.master else precision.param_dtype
        op = optimizer_op(training.optimizer, training.optimizer_kwargs, prod(shape), dtype)
        found = profile.lookup(op)
        if found is not None:
            return found[0]
    return memory_s(moved_bytes, pricer.device, kernels=0)
