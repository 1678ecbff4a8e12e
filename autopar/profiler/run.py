"""Profiling: what is missing in a database is measured, one thing after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Protocol

import torch

from autopar.costs.compute import op_time
from autopar.costs.local_op import LocalOp
from autopar.costs.profiles import LinkRecord, OpRecord
from autopar.errors import RuntimeFailure
from autopar.ir.cluster import DeviceSpec
from autopar.profiler.database import Database
from autopar.profiler.links import GroupRequest, measure_group
from autopar.profiler.optimizers import measure_optimizer
from autopar.profiler.timing import ENOUGH_S, LEAST_RUNS, WARM_UP, Stopwatch

Progress = Callable[[str, float | None], None]

NOT_TRIED = "not tried: "
"""Begins the reason of an op that a limit kept out; another run with another limit tries it."""

_GIB = 2**30


class Ranks(Protocol):
    """Processes that run a function together, such as a `WorkerPool`."""

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The results, that of rank 0 first."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What is not measured: ops whose tensors need more than `nbytes`, ops that are expected to
    take longer than `op_s`, and what is left after `budget_s` seconds."""

    nbytes: int
    op_s: float = 10.0
    budget_s: float | None = None

    def why_not(self, op: LocalOp, expected_s: float) -> str:
        """Why an op is not measured; empty if it is. Gradients take as much as their tensors."""
        needed = (op.total_input_bytes + op.total_output_bytes) * (2 if op.requires_grad else 1)
        if needed > self.nbytes:
            return (
                f"{NOT_TRIED}needs {needed / _GIB:.3g} GiB, over the limit of "
                f"{self.nbytes / _GIB:.3g} GiB"
            )
        if expected_s > self.op_s:
            return (
                f"{NOT_TRIED}expected to take {expected_s:.3g} s, over the limit of {self.op_s:g} s"
            )
        return ""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """How many ops or collectives were wanted, were known before, were measured now, have no time
    and why, and are left for another run."""

    wanted: int = 0
    known: int = 0
    measured: int = 0
    left: int = 0
    reasons: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    op: LocalOp
    expected_s: float

    @property
    def cost_s(self) -> float:
        """About how long measuring takes."""
        return max(ENOUGH_S, (WARM_UP + LEAST_RUNS) * self.expected_s)


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Measures into a database until `limits.budget_s` after `started`."""

    database: Database
    limits: Limits
    progress: Progress = lambda what, done: None
    started: float = field(default_factory=time.monotonic)

    @property
    def _over(self) -> bool:
        budget_s = self.limits.budget_s
        return budget_s is not None and time.monotonic() - self.started >= budget_s

    def ops(self, ops: Sequence[LocalOp], spec: DeviceSpec, device: torch.device) -> Outcome:
        """Measure the ops that have no record, in an order that has nothing to do with what they
        are: a machine that is slower for a while is so for some ops of every size and kind."""
        outcome, tasks = Outcome(wanted=len(ops)), self._missing(ops, spec)
        outcome.known = len(ops) - len(tasks)
        watch, done_s = Stopwatch(device), 0.0
        whole_s = sum(task.cost_s for task in tasks)
        for task in tasks:
            if self._over:
                outcome.left += 1
                continue
            self.progress("measuring ops", done_s / whole_s)
            record = self._measure(task.op, watch)
            if record is not None and not record.reason:
                outcome.measured += 1
            done_s += task.cost_s
        reasons = self.database.op_reasons()
        outcome.reasons = [(op.key, reasons[op.key]) for op in ops if reasons.get(op.key)]
        return outcome

    def _missing(self, ops: Sequence[LocalOp], spec: DeviceSpec) -> list[_Task]:
        """What is left to measure; what a limit keeps out is recorded."""
        known, tasks = self.database.op_reasons(), []
        for op in ops:
            time_s = op_time(op, spec)
            task = _Task(op=op, expected_s=time_s.forward_s + time_s.backward_s)
            reason = self.limits.why_not(op, task.expected_s)
            old = known.get(op.key)
            if old is not None and not (old.startswith(NOT_TRIED) and not reason):
                continue
            if reason:
                self.database.add_op(OpRecord.of(op, reason=reason))
            else:
                tasks.append(task)
        return sorted(tasks, key=lambda task: sha256(task.op.key.encode()).digest())

    def _measure(self, op: LocalOp, watch: Stopwatch) -> OpRecord | None:
        empty = OpRecord.of(op)
        if not self.database.claim_op(empty):
            return None
        try:
            record = watch.measure(op, (WARM_UP + LEAST_RUNS) * self.limits.op_s)
        except KeyboardInterrupt:
            self.database.release_op(empty)
            raise
        self.database.add_op(record)
        return record

    def optimizer(self, ops: Sequence[LocalOp], ranks: Ranks, device: torch.device) -> Outcome:
        """Measure the steps of an optimizer that have no record, all together."""
        known = self.database.op_reasons()
        missing = [op for op in ops if op.key not in known]
        outcome = Outcome(wanted=len(ops), known=len(ops) - len(missing))
        if self._over:
            outcome.left = len(missing)
            return outcome
        if not missing:
            return outcome
        self.progress("measuring the optimizer", None)
        for record in ranks.run(measure_optimizer, missing, device)[0]:
            self.database.add_op(record)
            outcome.measured += 1
        return outcome

    def links(
        self, requests: Sequence[GroupRequest], ranks: Ranks, device: torch.device
    ) -> Outcome:
        """Measure the collectives that have no record, those over one kind of group together."""
        known = self.database.links_done()
        outcome = Outcome(wanted=sum(len(request.keys) for request in requests))
        for done, request in enumerate(requests):
            keys = tuple(key for key in request.keys if key not in known)
            outcome.known += len(request.keys) - len(keys)
            if self._over:
                outcome.left += len(keys)
                continue
            claimed = tuple(key for key in keys if self.database.claim_link(key))
            if not claimed:
                continue
            self.progress("measuring collectives", done / len(requests))
            asked = replace(request, keys=claimed)
            for record in self._run_group(asked, ranks, device):
                self.database.add_link(record)
                outcome.measured += record.time is not None
                if record.reason:
                    outcome.reasons.append((str(record.key), record.reason))
        return outcome

    def _run_group(
        self, request: GroupRequest, ranks: Ranks, device: torch.device
    ) -> list[LinkRecord]:
        try:
            records: list[LinkRecord] = ranks.run(measure_group, request, device, self.limits.op_s)[
                0
            ]
        except KeyboardInterrupt:
            for key in request.keys:
                self.database.release_link(key)
            raise
        except RuntimeFailure as failure:
            reason = str(failure).strip().splitlines()[-1]
            return [LinkRecord(key=key, reason=reason) for key in request.keys]
        return records
