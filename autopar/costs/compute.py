"""Time of one op on one device: measured where a profile has it, else a roofline.

    time = max(flops / (peak * efficiency), bytes / (bandwidth * memory efficiency)) + launches

The efficiency of a matrix product falls smoothly with its dims and its total work:

    efficiency = t / (t / best + ramp),  t = flops / peak
    best = device.matmul_efficiency * sustained * shape(m, n, k) / shape(8192, 8192, 8192)
    shape = s(m) s(n) s(k),  s(x) = x / (x + half)

so that a product of 8192-cubes runs at the efficiency the device was measured at, less what it
loses when it is busy for hours (power, clocks). The constants are fitted to published training runs
(`costs.calibration`) for the devices that there are enough of; a profile replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.costs.attention import FUSED, attention_kernel, is_attention
from autopar.costs.calibration import curve_of
from autopar.costs.flops import Contraction, attention_contractions, contraction, op_flops
from autopar.costs.local_op import LocalOp
from autopar.costs.narrow import cast_traffic, is_linear
from autopar.costs.profiles import Profile, TimeSource
from autopar.costs.traffic import FREE, op_traffic
from autopar.ir.cluster import DeviceSpec

REFERENCE_DIM = 8192
"""Dim of the square product that `DeviceSpec.matmul_efficiency` holds for."""

VECTOR_EFFICIENCY = 0.5
"""Share of the float32 peak that pointwise arithmetic reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTime:
    """Seconds of one op in each pass, and where they are from."""

    forward_s: float
    backward_s: float
    source: TimeSource = TimeSource.MODELLED


def matmul_efficiency(product: Contraction, dtype: str, device: DeviceSpec) -> float:
    """Share of the peak that a matrix product reaches; see the module docstring."""
    curve = curve_of(device)
    half = curve.half_dim

    def shape(*dims: float) -> float:
        return prod(dim / (dim + half) for dim in dims)

    cube = shape(REFERENCE_DIM, REFERENCE_DIM, REFERENCE_DIM)
    best = device.matmul_efficiency * curve.sustained
    best *= shape(product.m / product.groups, product.n, product.k) / cube
    return _with_ramp(min(1.0, best), product.flops, dtype, device)


def _with_ramp(best: float, flops: float, dtype: str, device: DeviceSpec) -> float:
    """Efficiency `best`, less what filling and draining the device costs."""
    ideal_s = flops / device.flops(dtype)
    return ideal_s / (ideal_s / best + curve_of(device).ramp_s) if flops and best else 0.0


def attention_efficiency(op: LocalOp, device: DeviceSpec, share: float = 1.0) -> float:
    """Share of the peak that attention reaches; fused kernels depend on the work, not on dims.
    `share` is how fast theirs are next to the device's best."""
    kernel = attention_kernel(op, op.input_shapes[:3], op.input_dtypes[0], device.kind)
    if kernel != FUSED:
        return matmul_efficiency(attention_contractions(op)[0], op.input_dtypes[0], device)
    flops = op_flops(op).forward_flops
    return _with_ramp(share * curve_of(device).attention, flops, op.input_dtypes[0], device)


def memory_s(nbytes: float, device: DeviceSpec, kernels: int = 1) -> float:
    """Seconds to move `nbytes` through memory in `kernels` kernels (an optimizer step, a cast)."""
    bandwidth = device.memory_bandwidth_bytes_s * curve_of(device).memory
    return nbytes / bandwidth + kernels * device.kernel_launch_s


def op_time(
    op: LocalOp,
    device: DeviceSpec,
    profile: Profile | None = None,
    *,
    product_dtype: str = "",
    attention: float = 1.0,
) -> OpTime:
    """Forward and backward time of `op` on `device`.

    With `product_dtype` the operands of linear layers are cast to it before each product; what a
    profile measured without does not count for those. `attention` is how fast fused
    attention is next to the device's best.

    The backward time covers the gradients of all inputs marked in `grad_inputs`; price the op with
    fewer marks to split it (backward for input, backward for weight).
    """
    flops, traffic = op_flops(op), op_traffic(op, device.kind)
    if not op.is_fused and not traffic.forward_kernels and not traffic.backward_kernels:
        return OpTime(forward_s=0.0, backward_s=0.0, source=TimeSource.FREE)
    narrow = bool(product_dtype) and is_linear(op)
    if not narrow and profile is not None and (found := profile.lookup(op)) is not None:
        forward_s, backward_s, source = found
        return OpTime(
            forward_s=forward_s, backward_s=backward_s if op.requires_grad else 0.0, source=source
        )
    rate = _flop_rate(op, device, product_dtype if narrow else "", attention)
    casts = cast_traffic(op) if narrow else FREE

    def roofline(work: float, nbytes: int, kernels: int) -> float:
        if not nbytes:
            return kernels * device.kernel_launch_s
        compute_s = work / rate if rate else 0.0
        return max(compute_s, memory_s(nbytes, device, 0)) + kernels * device.kernel_launch_s

    forward_s = roofline(flops.forward_flops, traffic.forward_bytes, traffic.forward_kernels)
    forward_s += memory_s(casts.forward_bytes, device, casts.forward_kernels)
    backward_s = roofline(flops.backward_flops, traffic.backward_bytes, traffic.backward_kernels)
    backward_s += memory_s(casts.backward_bytes, device, casts.backward_kernels)
    return OpTime(forward_s=forward_s, backward_s=backward_s if op.requires_grad else 0.0)


def _flop_rate(op: LocalOp, device: DeviceSpec, product_dtype: str, share: float) -> float:
    """FLOP/s that `op` reaches; float32 products run at the float32 rate, as torch's default is."""
    if is_attention(op.name):
        return device.flops(op.input_dtypes[0]) * attention_efficiency(op, device, share)
    if product := contraction(op):
        dtype = product_dtype or op.output_dtypes[0]
        narrow = curve_of(device).narrow if product_dtype else 1.0
        return device.flops(dtype) * narrow * matmul_efficiency(product, dtype, device)
    return device.flops("float32") * VECTOR_EFFICIENCY


__all__ = [
    "OpTime",
    "Profile",
    "attention_efficiency",
    "matmul_efficiency",
    "memory_s",
    "op_time",
]
