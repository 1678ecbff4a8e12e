"""Times of an optimizer's step on one parameter, as the runtime holds parameters: DTensors.

A CPU's optimizer goes from parameter to parameter, so that a step is the sum over them; each costs
what it moves and, however small it is, the dispatch of every op on a DTensor. On GPUs torch updates
all parameters in a few kernels, which the bytes they move price well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.costs.local_op import LocalOp
from autopar.costs.optimizer_state import optimizer_op
from autopar.costs.profiles import OpRecord
from autopar.profiler.timing import ENOUGH_S, LEAST_RUNS, MOST_RUNS, WARM_UP, clock_of, timing_of
from autopar.runtime.groups import end_groups
from autopar.runtime.optim import OPTIMIZERS
from autopar.search.setting import Setting

SIZES = tuple(4**k for k in range(3, 13))
"""Elements of a parameter: 64 to 16 million."""

_TOGETHER = 4
"""Parameters that are stepped at once, so that what a step costs besides them counts little."""


def optimizer_ops(setting: Setting) -> tuple[LocalOp, ...]:
    """The steps to measure for a setting; none where torch does not have its optimizer."""
    training = setting.training
    if training.optimizer.rsplit(".", 1)[-1].lower() not in OPTIMIZERS:
        return ()
    dtype = "float32" if training.precision.master else training.precision.param_dtype
    return tuple(
        optimizer_op(training.optimizer, training.optimizer_kwargs, size, dtype) for size in SIZES
    )


def measure_optimizer(ops: Sequence[LocalOp], device: torch.device) -> list[OpRecord]:
    """The records of optimizer steps. Every rank calls it alike; each has its own parameters."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]
    mesh = DeviceMesh.from_group(own, device.type)
    records = [OpRecord.of(op, timing_of(_seconds(op, mesh, device))) for op in ops]
    end_groups(groups)
    return records


def _seconds(op: LocalOp, mesh: DeviceMesh, device: torch.device) -> list[float]:
    """Seconds of every run, for each of the parameters."""
    shape, dtype = op.input_shapes[0], getattr(torch, op.input_dtypes[0])

    def tensor() -> DTensor:
        local = torch.randn(shape, dtype=dtype, device=device)
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)

    parameters = [nn.Parameter(tensor()) for _ in range(_TOGETHER)]
    build: Callable[..., Optimizer] = OPTIMIZERS[op.name]
    optimizer = build(parameters, **dict(op.kwargs))
    for parameter in parameters:
        parameter.grad = tensor()
    clock, seconds = clock_of(device), list[float]()
    while len(seconds) < WARM_UP + MOST_RUNS:
        seconds.append(clock.seconds(optimizer.step)[1] / _TOGETHER)
        measured = seconds[WARM_UP:]
        if len(measured) >= LEAST_RUNS and sum(measured) * _TOGETHER >= ENOUGH_S:
            break
    return seconds[WARM_UP:]
