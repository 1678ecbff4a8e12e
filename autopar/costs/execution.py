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

    `early_sync` are the ZeRO levels at which gradients are summed during the last backward, or of
    `reduces_each` during that of every micro-batch. `fuses`: a chain of pointwise ops is one
    kernel; `fuses_accumulation`: a product that makes a weight's gradient adds it to the sum
    itself; `fuses_loss`: a kernel makes the gradient of logits without a copy of them in float32.
    `hides_messages`: those between stages run beside compute; `hides_tensor`: what tensor
    ranks gather and scatter moves beside the products that read or make it, in a part for each of
    them. `scatters`: tensor ranks that hold the same value each send a part of it to the next stage
    or to experts, gathered on the other side. `host_s`: seconds of the host to start a kernel,
    where it may not keep ahead of the device. `step_bytes` are moved per parameter in passes of
    their own before the optimizer's. `attention` is how fast its fused attention is next to the
    device's best. `whole_outside`: modules by name outside which tensor ranks all run ops whole, if
    any; `whole_loss`: each of them computes the loss, on logits gathered. `flat`: weights at ZeRO
    level 3 are gathered, and their gradients summed, in buckets.
    At ZeRO level 3 a weight stays whole from its use to the next in a micro-batch where fewer than
    `reuse_parameters` are used in between.
    """

    early_sync: frozenset[int] = EARLY_LEVELS
    reduces_each: frozenset[int] = frozenset()
    fuses: bool = False
    fuses_accumulation: bool = False
    fuses_loss: bool = False
    hides_messages: bool = True
    hides_tensor: bool = False
    scatters: bool = False
    host_s: float = 0.0
    step_bytes: int = 0
    attention: float = 1.0
    whole_outside: tuple[str, ...] = ()
    whole_loss: bool = False
    flat: bool = False
    reuse_parameters: float = 0.0

    def host_floor_s(self, kernels: float, collectives: float) -> float:
        """What a pass of a block takes at least, however fast the device is."""
        return self.host_s * (kernels + HOST_COLLECTIVE * collectives)

    def regathered_share(self, parameters: float, uses: int) -> float:
        """The part of a stage's parameters, at ZeRO level 3, that the backward gathers anew.

        Those last in the forward stay whole: between its forward and its backward a weight waits
        for one use of each behind it there, and then for one, or with them run again two, here.
        """
        return max(0.0, 1 - self.reuse_parameters / (uses * parameters)) if parameters else 0.0

    def hidden_tensor_s(
        self, tensor_s: float, compute_s: float, ranks: int, hidden: float
    ) -> float:
        """What of `tensor_s`, gathering and scattering over tensor ranks, hides behind compute: all
        but the first part or the last (userbuffers of NVIDIA Transformer Engine)."""
        if not self.hides_tensor:
            return 0.0
        return hidden * (1 - 1 / ranks) * min(tensor_s, compute_s)

    def accumulation_bytes(self, width: int, sum_width: int, micro_batches: int) -> float:
        """Bytes moved per parameter and micro-batch to add its gradient to the sum, as wide as
        given: both are read and the sum is written; the first gradient becomes the sum."""
        if self.fuses_accumulation:
            return 0.0
        return (width + 2 * sum_width) * (micro_batches - 1) / micro_batches
