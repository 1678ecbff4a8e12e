"""autopar: an automatic parallelism planner and auto-sharding compiler for PyTorch.

    parallel = autopar.parallelize(model, cluster, optimizer=(torch.optim.AdamW, {"lr": 1e-4}))
    loss = parallel.train_step(batch)

One small model after each stage, `class Net(nn.Module)` with two linear layers and a mean loss:

    capture   linear, relu, linear_1, sub, pow_1, mean          six ops, `float32[batch, 64]`
    rules     linear: x R*, w S(0) -> y S(1)                    a column split on one axis
    search    pipeline 1 x data 2 x tensor 2                    proven best over the grids
    plan      up.weight S(0), down.weight S(1) on tensor        plan.json
    codegen   linear = F.linear(x_tensor, w["up.weight"])       block_0.py, stage_0.py
    runtime   the program, on every rank, with the numbers of one device
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AutoparError,
    CaptureError,
    InfeasiblePlan,
    InputError,
    PlanMismatch,
    RuntimeFailure,
    UnsupportedOp,
    VerificationError,
)

if TYPE_CHECKING:
    from autopar.api import Parallel, parallelize
    from autopar.costs.clusters import parse_cluster
    from autopar.devices import measured_cluster
    from autopar.ir.cluster import Cluster
    from autopar.pinning import pin
    from autopar.plan.plan import Plan
    from autopar.plan.serialize import read_plan, write_plan
    from autopar.runtime.deferred import deferred_init
    from autopar.runtime.launch import launch

__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "InfeasiblePlan",
    "InputError",
    "Parallel",
    "Plan",
    "PlanMismatch",
    "RuntimeFailure",
    "UnsupportedOp",
    "VerificationError",
    "deferred_init",
    "launch",
    "measured_cluster",
    "parallelize",
    "parse_cluster",
    "pin",
    "read_plan",
    "write_plan",
]

_WHERE = {
    "Cluster": "autopar.ir.cluster",
    "Parallel": "autopar.api",
    "Plan": "autopar.plan.plan",
    "deferred_init": "autopar.runtime.deferred",
    "launch": "autopar.runtime.launch",
    "measured_cluster": "autopar.devices",
    "parallelize": "autopar.api",
    "parse_cluster": "autopar.costs.clusters",
    "pin": "autopar.pinning",
    "read_plan": "autopar.plan.serialize",
    "write_plan": "autopar.plan.serialize",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")
