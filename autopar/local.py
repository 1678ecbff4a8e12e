"""Running programs on local CPU processes for the command line: verify and train."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from autopar.codegen.traffic import micro_batch_counts, stage_collectives, totals
from autopar.compiler import Planned, PlanOptions, adopt_source, plan_source, write_program
from autopar.costs.clusters import parse_cluster
from autopar.errors import InputError
from autopar.ir.cluster import Cluster
from autopar.ir.collective import Collective
from autopar.ir.mesh import batch_count
from autopar.jobs import Job, optimizer_class, train_job, verify_job
from autopar.plan.pipeline import schedule_flushes
from autopar.plan.plan import Plan
from autopar.plan.table import grid_text
from autopar.runtime.launch import WorkerPool
from autopar.runtime.load import runnable
from autopar.runtime.verify import TOLERANCE, RankReport
from autopar.sources import ModelSource

Progress = Callable[[str, float | None], None]

ADAM_EPS = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 1e-1, "float16": 1e-1}
"""Adam's eps when comparing weights after some steps.

Adam divides a gradient by its own size. One that is zero but for rounding (a key bias's, say) would
become a full step in a direction set by rounding; the coarser the dtype of the gradients, the
larger an eps keeps such steps out.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Whether a parallel program and the single-device model agree, and by how much."""

    grid: str
    steps: int
    tolerance: float
    worst: Mapping[str, float]
    first_difference: str | None
    unplanned: tuple[str, ...]
    losses: tuple[float, ...] = field(default=())
    skipped: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything agrees, in at least one step that trained."""
        return self.trained and self.first_difference is None and not self.unplanned

    @property
    def trained(self) -> bool:
        """Whether a step had gradients that are numbers; others are skipped and prove nothing."""
        return self.skipped < max(self.steps, 1)

    @property
    def text(self) -> str:
        """The report for people."""
        lines = [f"{self.grid}, {self.steps} steps against one device"]
        lines += [f"  {what:<22} largest relative error {e:.1e}" for what, e in self.worst.items()]
        answer = "equal to the plan's list in op, bytes, group and count"
        if self.unplanned:
            answer = "differ from the plan's list: " + "; ".join(self.unplanned)
        lines.append(f"  {'collectives':<22} {answer}")
        if self.first_difference:
            lines.append(f"  first difference: {self.first_difference}")
        if self.skipped:
            lines.append(
                f"  {'overflow':<22} skipped {self.skipped} of {self.steps} steps, as on one device"
            )
        verdict = "same numbers as one device" if self.ok else "NOT the same as one device"
        if not self.trained:
            verdict = "NOTHING compared: every step overflowed on one device; try bf16"
        lines.append(f"{verdict} (tolerance {self.tolerance:.0e})")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "ok": self.ok,
            "grid": self.grid,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "largest_relative_error": dict(self.worst),
            "first_difference": self.first_difference,
            "unplanned_collectives": list(self.unplanned),
            "losses": list(self.losses),
            "skipped_steps": self.skipped,
        }


def verify_source(
    source: ModelSource,
    cluster: Cluster | str,
    options: PlanOptions,
    plan: Plan | None,
    progress: Progress,
    *,
    steps: int = 3,
) -> VerifyReport:
    """Train the program on local processes beside the eager model, and compare.

    Raises InputError for a cluster that is not local or a precision that cannot be run.
    """
    planned, job = _prepare(source, cluster, options, plan, progress, steps)
    if not schedule_flushes(planned.plan):
        raise InputError(
            f"schedule {planned.plan.schedule} trains on stale weights: no single device has its "
            "numbers to compare with; verify the model with another schedule"
        )
    if "adam" in job.optimizer and "eps" not in job.optimizer_kwargs:
        damped = {**job.optimizer_kwargs, "eps": ADAM_EPS[job.dtype]}
        job = replace(job, optimizer_kwargs=damped)
    reports = _run(planned, job, verify_job, progress)
    return summarise(planned, reports, TOLERANCE[job.dtype], steps)


def train_source(
    source: ModelSource,
    cluster: Cluster | str,
    options: PlanOptions,
    plan: Plan | None,
    steps: int,
    progress: Progress,
) -> dict[str, Any]:
    """Train on local processes; losses and seconds per step."""
    planned, job = _prepare(source, cluster, options, plan, progress, steps)
    results: list[tuple[float, float]] = _run(planned, job, train_job, progress)[0]
    seconds = [seconds for _, seconds in results]
    return {
        "grid": grid_text(planned.plan),
        "losses": [loss for loss, _ in results],
        "seconds_per_step": median(seconds[1:] or seconds),
        "predicted_seconds_per_step": planned.plan.prediction.step_s,
    }


def summarise(
    planned: Planned, reports: Sequence[RankReport], tolerance: float, steps: int
) -> VerifyReport:
    """All ranks' comparisons as one report."""
    worst: dict[str, float] = {}
    first: str | None = None
    deviations = [d for report in reports for d in report.deviations]
    for deviation in sorted(deviations, key=lambda d: d.step):
        worst[deviation.what] = max(worst.get(deviation.what, 0.0), deviation.error)
        if deviation.error > tolerance and first is None:
            first = (
                f"{deviation.what} {deviation.name} at step {deviation.step}: relative error "
                f"{deviation.error:.1e}, expected at most {tolerance:.0e}"
            )
    return VerifyReport(
        grid=grid_text(planned.plan),
        steps=steps,
        tolerance=tolerance,
        worst=worst,
        first_difference=first,
        unplanned=tuple(_unplanned(planned, reports)),
        losses=reports[0].losses,
        skipped=reports[0].skipped,
    )


def planned_collectives(planned: Planned, rank: int) -> tuple[Collective, ...]:
    """What the plan says that a rank communicates in one step."""
    plan = planned.plan
    found: list[Collective] = []
    for stage in plan.stages:
        if rank in stage.ranks:
            place = plan.place(stage, rank)
            split = place[: batch_count(plan.axis_names)]
            counts = micro_batch_counts(plan.on(stage), at=split)
            found += stage_collectives(planned.view, stage, counts, place)
    return totals(found)


def _unplanned(planned: Planned, reports: Sequence[RankReport]) -> list[str]:
    found = []
    for report in reports:
        real = set(totals(report.collectives))
        want = set(planned_collectives(planned, report.rank))
        for item in sorted(real - want):
            found.append(f"rank {report.rank} ran {_shown(item)}, not planned")
        for item in sorted(want - real):
            found.append(f"rank {report.rank} did not run {_shown(item)}")
    return found


def _shown(item: Collective) -> str:
    group = "+".join(item.axes)
    return f"{item.count} x {item.op} of {item.nbytes} bytes over {group} ({item.phase})"


def _prepare(
    source: ModelSource,
    cluster: Cluster | str,
    options: PlanOptions,
    plan: Plan | None,
    progress: Progress,
    steps: int,
) -> tuple[Planned, Job]:
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if where.device(0).kind != "cpu":
        raise InputError(
            f"cluster {where.spec}: verify and train start local CPU processes; give local:N. On "
            "other clusters start a script of your own with torchrun and call autopar.parallelize"
        )
    precision = options.precision if plan is None else plan.training.precision
    dtype = runnable(precision).param_dtype
    optimizer_class(options.optimizer)
    if plan is None:
        planned = plan_source(source, where, replace(options, price_pins=False), progress)
    else:
        here = _on_local(plan, where)
        planned = adopt_source(here, source, where if here is plan else None, progress)
    training = planned.plan.training
    job = Job(
        source=source.spec,
        seq_len=source.seq_len,
        folder="",
        dtype=dtype,
        samples=training.global_batch,
        optimizer=training.optimizer,
        optimizer_kwargs=dict(options.optimizer_kwargs) or {"lr": 1e-3},
        steps=steps,
        constants=planned.captured.constants,
    )
    return planned, job


def _on_local(plan: Plan, where: Cluster) -> Plan:
    """A plan made for accelerators, to run its shapes on as many local processes: the same
    numbers, in other times and memory."""
    if plan.cluster.device(0).kind == "cpu":
        return plan
    if where.num_devices != plan.cluster.num_devices:
        raise InputError(
            f"cluster {where.spec}: the plan is for {plan.cluster.num_devices} devices "
            f"({plan.cluster.spec}); give local:{plan.cluster.num_devices} to run its shapes here"
        )
    return replace(plan, cluster=where)


def _run(
    planned: Planned, job: Job, function: Callable[[Job], Any], progress: Progress
) -> list[Any]:
    progress("writing the program", None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "program"
        write_program(planned, target)
        placed = replace(job, folder=str(target))
        progress(f"running {planned.plan.num_devices} processes", None)
        with WorkerPool(planned.plan.num_devices) as pool:
            return pool.run(function, placed)
