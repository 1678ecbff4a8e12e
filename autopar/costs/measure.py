"""Measured figures of the device at hand: its rates, and times of ops. The one torch part here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from autopar.costs.local_op import SLOT, LocalOp
from autopar.costs.profiles import Profile
from autopar.costs.strides import VIEW_OPS
from autopar.costs.traffic import op_traffic
from autopar.ir.cluster import DeviceSpec
from autopar.ir.graph import Arg, Ref

MATMUL_DIMS = (128, 256, 384)
COPY_BYTES = 2**25
CALIBRATED_DTYPES = ("float32", "float64", "bfloat16")
PROFILE_LIMIT_BYTES = 2**30
"""Ops whose tensors need more than this are not measured: profiling must not run out of memory."""


def measure_device(
    *, name: str = "cpu", workers: int = 1, memory_bytes: int | None = None
) -> DeviceSpec:
    """The local CPU as one of `workers` equal devices that share it.

    Measured on one thread, which other processes disturb least, and scaled to the cores a worker
    gets: several threads, or a fraction of a core. Memory is shared evenly unless given. Takes
    about a second.
    """
    cores = (os.cpu_count() or 1) / workers
    share = max(1, int(cores)) if cores >= 1 else cores
    with _threads(1):
        rates = tuple((dtype, share * _matmul_flops(dtype)) for dtype in CALIBRATED_DTYPES)
        bandwidth = min(share, 1.0) * _copy_bandwidth()
        overhead_s = _op_overhead_s() / min(share, 1.0)
    return DeviceSpec(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes or _physical_memory() // workers,
        memory_bandwidth_bytes_s=bandwidth,
        peak_flops=rates,
        matmul_efficiency=1.0,
        kernel_launch_s=overhead_s,
        source=f"measured on one thread of this machine, times {share:g} for each of {workers}",
    )


def measure_ops(
    ops: Sequence[LocalOp],
    *,
    device: str = "cpu",
    name: str = "cpu",
    repeats: int = 5,
    limit_bytes: int = PROFILE_LIMIT_BYTES,
) -> Profile:
    """Median times of each distinct op, forward and backward, on random tensors.

    Left out, and priced by the analytic model, is an op that fails (unknown here, or not runnable
    on random values), needs more than `limit_bytes`, moves nothing (a view), or copies because of
    strides, which a `LocalOp` does not have. What starting the autograd engine for one op takes is
    not the op's, and is subtracted.
    """
    entries: dict[str, tuple[float, float]] = {}
    engine_s = _engine_s(device)
    for op in {op.key: op for op in ops}.values():
        large = op.total_input_bytes + op.total_output_bytes > limit_bytes
        if large or not _measurable(op, device):
            continue
        try:
            forward_s, backward_s = _time_op(op, device, repeats)
            entries[op.key] = forward_s, max(0.0, backward_s - engine_s)
        except Exception:  # whatever an op raises, it has no measured time
            continue
    return Profile(device=name, entries=entries)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best_s(run: Callable[[], Any], budget_s: float, least: int = 4) -> float:
    """Fastest of as many runs as fit `budget_s`: on a shared machine the others measure it."""
    best, started, count = float("inf"), time.perf_counter(), 0
    while count < least or time.perf_counter() - started < budget_s:
        before = time.perf_counter()
        run()
        best, count = min(best, time.perf_counter() - before), count + 1
    return best


def _matmul_flops(dtype: str) -> float:
    """Best rate over the sizes."""

    def rate(dim: int) -> float:
        left = torch.randn(dim, dim, dtype=getattr(torch, dtype))
        return 2 * dim**3 / _best_s(lambda: left @ left, budget_s=0.08)

    return max(rate(dim) for dim in MATMUL_DIMS)


def _copy_bandwidth() -> float:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best_s(lambda: target.copy_(source), budget_s=0.15)


def _op_overhead_s() -> float:
    """Time of an op with next to nothing to do, recorded by autograd."""
    tiny = torch.ones(8, requires_grad=True)

    def hundred() -> None:
        for _ in range(100):
            torch.add(tiny, tiny)

    return _best_s(hundred, budget_s=0.05) / 100


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _time_op(op: LocalOp, device: str, repeats: int) -> tuple[float, float]:
    """Median seconds of (forward, backward)."""
    call = _callable(op.target)
    inputs = [_tensor(op, index, device) for index in range(len(op.input_shapes))]
    args = [_bind(arg, inputs, device) for arg in op.args]
    if op.name in _SIZE_ARGUMENT:
        args[_SIZE_ARGUMENT[op.name]] = list(op.output_shapes[0])
    kwargs = {name: _bind(arg, inputs, device) for name, arg in op.kwargs}
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(repeats + 1):
        result, seconds = _timed(lambda: call(*args, **kwargs), device)
        forward.append(seconds)
        if op.requires_grad:
            backward.append(_time_backward(result, inputs, device))
    return median(forward[1:]), median(backward[1:]) if backward else 0.0


def _time_backward(result: Any, inputs: Sequence[torch.Tensor], device: str) -> float:
    outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    outputs = [output for output in outputs if output.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = [torch.ones_like(output) for output in outputs]
    return _timed(
        lambda: torch.autograd.grad(outputs, wanted, gradients, allow_unused=True), device
    )[1]


def _measurable(op: LocalOp, device: str) -> bool:
    """Whether the op moves something, and does so on row-major tensors too."""
    traffic = op_traffic(op, torch.device(device).type)
    moves = traffic.forward_kernels or traffic.backward_kernels
    return bool(moves) and not (op.copies and op.name in (*VIEW_OPS, "contiguous"))


def _engine_s(device: str) -> float:
    """Time of a backward pass with nothing to do."""
    leaf = torch.ones(1, device=device, requires_grad=True)
    return median(_time_backward(leaf.view(1), [leaf], device) for _ in range(20))


def _timed(run: Callable[[], Any], device: str) -> tuple[Any, float]:
    _synchronize(device)
    started = time.perf_counter()
    result = run()
    _synchronize(device)
    return result, time.perf_counter() - started


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _tensor(op: LocalOp, index: int, device: str) -> torch.Tensor:
    shape, dtype = op.input_shapes[index], getattr(torch, op.input_dtypes[index])
    if dtype.is_floating_point or dtype.is_complex:
        tensor = torch.randn(shape, dtype=dtype, device=device)
        return tensor.requires_grad_(op.needs_grad(index))
    limit = 2 if dtype == torch.bool else _INDEX_LIMITS.get(op.name, _two)(op)
    return torch.randint(0, max(1, limit), shape, device=device).to(dtype)


def _two(op: LocalOp) -> int:
    return 2


def _rows(op: LocalOp) -> int:
    return op.input_shapes[0][0]


def _classes(op: LocalOp) -> int:
    shape = op.input_shapes[0]
    return shape[1] if len(shape) > 1 else shape[0]


def _smallest(op: LocalOp) -> int:
    return min(op.input_shapes[0])


_INDEX_LIMITS: dict[str, Callable[[LocalOp], int]] = {
    "embedding": _rows,
    "cross_entropy_loss": _classes,
    "cross_entropy_sum": _classes,
    **dict.fromkeys(("index", "index_select", "gather", "scatter", "scatter_add"), _smallest),
}
"""Bound of the integers an op reads, where they are indices into something."""

_SIZE_ARGUMENT = dict.fromkeys(
    ("view", "reshape", "expand", "new_zeros", "new_ones", "new_full"), 1
)
"""Ops with the size of their result as an argument, which sharding changes, and its position."""


def _bind(arg: Arg, inputs: Sequence[torch.Tensor], device: str) -> Any:
    """A torch argument: slots become tensors, `dtype:float32` and the like torch's objects."""
    if isinstance(arg, Ref):
        if arg.name != SLOT:
            raise ValueError(f"{arg} is no slot of a local op")
        return inputs[arg.index]
    if isinstance(arg, tuple):
        return [_bind(item, inputs, device) for item in arg]
    if isinstance(arg, str) and ":" in arg:
        kind, _, value = arg.partition(":")
        return device if kind == "device" else getattr(torch, value)
    return arg


def _callable(target: str) -> Callable[..., Any]:
    """The function of a target such as `aten.linear.default`. AttributeError if there is none."""
    if target in _OWN_OPS:
        return _OWN_OPS[target]
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _cross_entropy_sum(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, smoothing: float = 0.0
) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float() if logits.dtype.itemsize < 4 else logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction="sum",
    )


def _count_valid(target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    return (target != ignore_index).sum()


def _batch_norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    weight, bias, eps = rest[0], rest[1], rest[-1]
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


_OWN_OPS: dict[str, Callable[..., Any]] = {
    "autopar.cross_entropy_sum.default": _cross_entropy_sum,
    "autopar.count_valid.default": _count_valid,
    "autopar.batch_norm.default": _batch_norm,
}
"""Ops that capture introduces, in plain torch."""
