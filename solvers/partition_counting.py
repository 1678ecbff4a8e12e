"""What the times of a rank's stages count for towards the longest, for many ways to run them at
once; `PartitionProblem.counted` says it of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.partition_problem import PartitionProblem

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """What times of the stages of a rank count for: see `PartitionProblem`."""

    share: float
    cuts_in_max: bool

    @staticmethod
    def of(problem: PartitionProblem) -> Counting:
        """That of a problem."""
        return Counting(share=problem.stage_share, cuts_in_max=problem.boundary_in_max)

    def __call__(self, work_s: Array, cuts_s: Array) -> Array:
        """Of times [..., stage]."""
        if self.cuts_in_max:
            return self._counted(work_s + cuts_s)
        return np.maximum(self._counted(work_s), self._counted(cuts_s))

    def _counted(self, times: Array) -> Array:
        longest = times.shape[-1] * times.max(axis=-1)
        return np.asarray((1 - self.share) * times.sum(axis=-1) + self.share * longest)

    def least(self, total_s: Array, longest_s: Array, cuts_s: Array) -> Array:
        """The least where the work takes `total_s` and of some stage, with its cuts where these are
        in it, `longest_s`."""
        own = float(cuts_s.sum()) if self.cuts_in_max else 0.0
        total = np.where(np.isfinite(total_s), total_s + own, 0.0)
        counted = (1 - self.share) * total + self.share * len(cuts_s) * longest_s
        counted = np.maximum(counted, total)
        return counted if self.cuts_in_max else np.maximum(counted, self._counted(cuts_s))
