"""Memory of one device as a sum of named terms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from autopar.costs.optimizer_state import optimizer_state_bytes
from autopar.ir.cluster import DeviceSpec
from autopar.ir.graph import DTYPE_BYTES, TensorSpec
from autopar.ir.precision import Precision

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerms:
    """What a device holds at its peak.

    `activations_bytes` are the tensors saved for backward, of all micro-batches in flight;
    `boundary_bytes` the inputs a stage keeps to recompute or to receive into; `transient_bytes`
    the working set of the block that runs; `recompute_bytes` what recomputing one block rebuilds;
    `communication_bytes` gathered parameters and buffers of collectives; `reserve_bytes` what the
    runtime and the allocator take.
    """

    weights_bytes: int = 0
    gradients_bytes: int = 0
    master_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    boundary_bytes: int = 0
    transient_bytes: int = 0
    recompute_bytes: int = 0
    communication_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all terms."""
        return sum(getattr(self, term.name) for term in fields(self))

    def __add__(self, other: MemoryTerms) -> MemoryTerms:
        return MemoryTerms(
            **{
                term.name: getattr(self, term.name) + getattr(other, term.name)
                for term in fields(self)
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What decides the state of a parameter: precision and optimizer (class name, options)."""

    precision: Precision
    optimizer: str = "adamw"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)


class StateBytes(NamedTuple):
    """Bytes of one parameter's state."""

    weights: int
    gradients: int = 0
    master: int = 0
    optimizer: int = 0

    @property
    def terms(self) -> MemoryTerms:
        """The same as memory terms."""
        return MemoryTerms(
            weights_bytes=self.weights,
            gradients_bytes=self.gradients,
            master_bytes=self.master,
            optimizer_bytes=self.optimizer,
        )


def state_bytes(numel_local: int, trainable: bool, dtype: str, training: Training) -> StateBytes:
    """State of a parameter or buffer of `numel_local` local elements, `dtype` as captured.

    A frozen parameter has weights only, is never widened, and may be narrowed to the precision's
    dtype; integers keep their dtype.
    """
    precision = training.precision
    floating = TensorSpec(shape=(), dtype=dtype).is_floating
    if not (trainable and floating):
        kept = [DTYPE_BYTES[dtype], *([DTYPE_BYTES[precision.param_dtype]] if floating else [])]
        return StateBytes(weights=numel_local * min(kept))
    return StateBytes(
        weights=numel_local * DTYPE_BYTES[precision.param_dtype],
        gradients=numel_local * DTYPE_BYTES[precision.grad_dtype],
        master=numel_local * DTYPE_BYTES["float32"] * precision.master,
        optimizer=optimizer_state_bytes(
            training.optimizer,
            training.optimizer_kwargs,
            numel_local,
            precision.param_dtype,
            master=precision.master,
        ),
    )


def total_bytes(states: Iterable[StateBytes]) -> StateBytes:
    """The state of several parameters together, by term."""
    return StateBytes(*map(sum, zip(StateBytes(weights=0), *states, strict=True)))


def zero_bytes(
    whole: StateBytes, shard: StateBytes, level: int, *, accumulates: bool = False
) -> StateBytes:
    """State of a parameter at a ZeRO level, from that of the whole and that of a rank's shard.

    Level 1 splits master weight and optimizer state, 2 also the gradient, 3 also the weight
    (Rajbhandari et al. 2020, figure 1). Without master weights the shard that levels 1 and 2 update
    is a copy of a part of the weight, and counted as one. Where gradients of several micro-batches
    accumulate, the buffer they add up in is whole at every level, since they are reduced once a
    step.
    """
    copied = level in (1, 2) and not whole.master
    return StateBytes(
        weights=shard.weights if level == 3 else whole.weights,
        gradients=shard.gradients if level >= 2 and not accumulates else whole.gradients,
        master=shard.weights if copied else shard.master if level else whole.master,
        optimizer=shard.optimizer if level else whole.optimizer,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Memory of a device that is no tensor of the program: `fixed_bytes`, `each_bytes` for every
    communicator, and `fraction` of the device's memory."""

    name: str
    source: str
    fixed_bytes: int = 0
    each_bytes: int = 0
    fraction: float = 0.0

    def nbytes(self, device: DeviceSpec, communicators: int) -> int:
        """Bytes on a device whose rank is in so many communicators."""
        shared = int(self.fraction * device.memory_bytes)
        return self.fixed_bytes + communicators * self.each_bytes + shared


NCCL_BUFFER_BYTES, NCCL_CHANNELS = 4 * MIB, 16

CUDA_RESERVES = (
    Reserve(
        name="context",
        fixed_bytes=992 * MIB + 32 * MIB,
        source="CUDA context with the kernels of torch and its libraries; 32 MiB workspace of "
        "cuBLAS on Hopper (PyTorch, CUDA semantics, cuBLAS workspaces)",
    ),
    Reserve(
        name="communicators",
        each_bytes=2 * NCCL_CHANNELS * NCCL_BUFFER_BYTES,
        source="a buffer of NCCL_BUFFSIZE (4 MiB unless set; NCCL, environment variables) to send "
        "and one to receive for each channel of a ring",
    ),
    Reserve(
        name="fragmentation",
        fixed_bytes=2 * MIB + 20 * MIB,
        fraction=0.04,
        source="one segment of small blocks (2 MiB) and one of large (20 MiB) partly filled "
        "(c10/cuda/CUDACachingAllocator.cpp: kSmallBuffer, kLargeBuffer; blocks are multiples of "
        "512 bytes); 4 % between blocks",
    ),
)

RESERVES: dict[str, tuple[Reserve, ...]] = {"cuda": CUDA_RESERVES, "cpu": ()}
"""By `DeviceSpec.kind`; other kinds are taken like `cuda`. On a CPU the limit is the program's
own."""


def reserve_terms(device: DeviceSpec, communicators: int = 0) -> tuple[tuple[str, int], ...]:
    """What of a device's memory a program cannot use, by name."""
    rows = RESERVES.get(device.kind, CUDA_RESERVES)
    return tuple((row.name, row.nbytes(device, communicators)) for row in rows)


def reserve_bytes(device: DeviceSpec, communicators: int = 0) -> int:
    """Memory of `device` that a program cannot use."""
    return sum(nbytes for _, nbytes in reserve_terms(device, communicators))
