"""Equal layers dealt out to stages: every layer gets a stage and an option; which layer is free."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from solvers.solution import Solution, fits

Counts = tuple[tuple[int, ...], ...]
"""How many layers a stage [first index] runs by an option [second]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersProblem:
    """Deal `num_layers` equal layers out to stages, at least one to each, and choose their options.

    With n[k][o] layers of option o on stage k, S_k = sum_o n[k][o] * time_s[o] + end_s[k] and
    R_k = sum_o n[k][o] * synced_s[o], the time with the sync of its gradients, minimise

        sum_k S_k + (num_micro_batches - 1) * max_k S_k + max(0, max_k (R_k - (S_0 + .. + S_k)))

    such that sum_o n[k][o] * option_bytes[k][o] <= free_bytes[k]. The last term is the sync that
    the last backwards of the stages before do not hide. Raises ValueError naming the field that is
    malformed.
    """

    num_layers: int
    num_micro_batches: int
    time_s: tuple[float, ...]
    synced_s: tuple[float, ...]
    end_s: tuple[float, ...]
    option_bytes: tuple[tuple[float, ...], ...]
    free_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        options, stages = len(self.time_s), len(self.end_s)
        lengths = {
            "time_s": (self.time_s, max(options, 1)),
            "synced_s": (self.synced_s, options),
            "end_s": (self.end_s, max(stages, 1)),
            "option_bytes": (self.option_bytes, stages),
            "free_bytes": (self.free_bytes, stages),
            **{f"option_bytes[{k}]": (row, options) for k, row in enumerate(self.option_bytes)},
        }
        for name, (values, length) in lengths.items():
            if len(values) != length:
                raise ValueError(f"{name}: expected {length} values, found {len(values)}")
        for name, numbers in (
            ("time_s", self.time_s),
            ("synced_s", self.synced_s),
            ("end_s", self.end_s),
            ("option_bytes", tuple(itertools.chain(*self.option_bytes))),
        ):
            for value in numbers:
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name}: expected finite numbers from 0, found {value}")

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.end_s)

    def used_bytes(self, counts: Counts) -> tuple[float, ...]:
        """What the layers of every stage hold."""
        return tuple(map(_total, counts, self.option_bytes))

    def stage_times_s(self, counts: Counts) -> tuple[float, ...]:
        """S of every stage."""
        return tuple(_total(n, self.time_s) + e for n, e in zip(counts, self.end_s, strict=True))

    def objective(self, counts: Counts) -> float:
        """Seconds of a step; inf where a stage is empty or does not fit."""
        empty = any(sum(row) < 1 for row in counts)
        full = all(map(fits, self.used_bytes(counts), self.free_bytes))
        if empty or not full or sum(map(sum, counts)) != self.num_layers:
            return math.inf
        times = self.stage_times_s(counts)
        done = itertools.accumulate(times)
        tail = max(_total(n, self.synced_s) - end for n, end in zip(counts, done, strict=True))
        return math.fsum(times) + (self.num_micro_batches - 1) * max(times) + max(0.0, tail)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersSolution(Solution):
    """The best of several problems: which one, and its counts; -1 and empty without one."""

    problem: int
    counts: Counts


def _total(counts: tuple[int, ...], values: tuple[float, ...]) -> float:
    return math.fsum(n * value for n, value in zip(counts, values, strict=True))
