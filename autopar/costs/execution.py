"""How what runs a plan runs it: by default the program that autopar emits.

Plans that others ran are priced with what their frameworks do instead.
"""

from __future__ import annotations

from dataclasses import dataclass

EARLY_LEVELS = frozenset({2, 3})
"""ZeRO levels at which the runtime sums gradients while the last backward runs."""

HOST_COLLECTIVE = 4
"""Kernels that a collective takes a host as long to start as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What overlaps and what is fused.

    `early_sync` are the ZeRO levels at which gradients are summed during the last backward.
    `fuses`: a chain of pointwise ops is one kernel; `fuses_accumulation`: a product that makes a
    weight's gradient adds it to the sum itself. `hides_messages`: those between stages run
    beside compute. `scatters_messages`: tensor ranks that hold the same value each send a part of
    it, gathered on the other side. `host_s`: seconds of the host to start a kernel, where it may
    not keep ahead of the device. `step_bytes` are moved per parameter in passes of their own before
    the optimizer's.
    """

    early_sync: frozenset[int] = EARLY_LEVELS
    fuses: bool = False
    fuses_accumulation: bool = False
    hides_messages: bool = True
    scatters_messages: bool = False
    host_s: float = 0.0
    step_bytes: int = 0

    def host_floor_s(self, kernels: float, collectives: float) -> float:
        """What a pass of a block takes at least, however fast the device is."""
        return self.host_s * (kernels + HOST_COLLECTIVE * collectives)

    def accumulation_bytes(self, width: int, sum_width: int, micro_batches: int) -> float:
        """Bytes moved per parameter and micro-batch to add its gradient to the sum, as wide as
        given: both are read and the sum is written; the first gradient becomes the sum."""
        if self.fuses_accumulation:
            return 0.0
        return (width + 2 * sum_width) * (micro_batches - 1) / micro_batches
