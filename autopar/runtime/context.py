"""What a stage's code knows about the step it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import chunk_sizes
from autopar.runtime.axes import AxisGroup
from autopar.runtime.recorder import Recorder

DeferredGradient = Callable[[], list[tuple[GradientEdge, Tensor]]]
"""Computes gradients of weights, each with the place in autograd's graph where it belongs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """One micro-batch of one step, on one rank.

    `axes` has every axis of the stage's mesh, those of one rank too; `joined` those sets of axes
    that collectives run over together. `batch` counts the samples this rank holds of the
    micro-batch's `whole_batch`, `sample_offset` is the position of the first of them among the
    `global_batch` samples of the step. `deferred`, where the schedule splits the backward, collects
    the weight gradients that its weight action computes.
    """

    axes: Mapping[str, AxisGroup]
    batch: int
    global_batch: int
    whole_batch: int = 0
    sample_offset: int = 0
    micro_batch: int = 0
    seed: int = 0
    step: int = 0
    training: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    recorder: Recorder = field(default_factory=Recorder)
    deferred: list[DeferredGradient] | None = None
    joined: Mapping[tuple[str, ...], AxisGroup] = field(default_factory=dict)

    @property
    def recomputing(self) -> bool:
        """Whether this is a forward that the backward runs once more."""
        return self.recorder.phase == "backward"

    def along(self, *names: str) -> AxisGroup:
        """The group along several axes together."""
        return self.joined[names]

    def sample_shares(self, axis: AxisGroup, per_sample: int = 1) -> tuple[int, ...]:
        """Extents, on the ranks along an axis that splits samples, of a dim that has `per_sample`
        elements for each sample."""
        samples = self.whole_batch
        for name in BATCH_AXES:
            if name in self.axes:
                split = self.axes[name]
                if split is axis:
                    break
                samples = chunk_sizes(samples, split.size)[split.rank]
        return tuple(share * per_sample for share in chunk_sizes(samples, axis.size))
