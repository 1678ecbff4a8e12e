"""One model on clusters of several sizes: what each gives, and how well it scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.compiler import PlanOptions, Progress, capture_source, plan_captured
from autopar.errors import InfeasiblePlan
from autopar.ir.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.plan.table import grid_text, plan_summary, tokens_per_s
from autopar.plan.text import amount, duration, left_last, number, percent
from autopar.sources import ModelSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A cluster with its plan, or with what keeps the model from fitting it."""

    cluster: Cluster
    global_batch: int
    plan: Plan | None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The sizes in the order asked for."""

    model: str
    sizes: tuple[Size, ...]

    def efficiency(self, size: Size) -> float | None:
        """Samples a device gives per second, against those on the smallest cluster that fits."""
        fitting = [each.plan for each in self.sizes if each.plan]
        if size.plan is None or not fitting:
            return None
        return _per_device(size.plan) / _per_device(min(fitting, key=lambda p: p.num_devices))

    def as_dict(self) -> dict[str, Any]:
        """JSON data: a row per size, with the plan's summary."""
        return {
            "model": self.model,
            "sizes": [
                {
                    "cluster": size.cluster.spec,
                    "devices": size.cluster.num_devices,
                    "global_batch": size.global_batch,
                    "efficiency": self.efficiency(size),
                    "why_not": size.why_not or None,
                    "plan": size.plan and plan_summary(size.plan),
                }
                for size in self.sizes
            ],
        }

    @property
    def text(self) -> str:
        """A table of the scaling curve."""
        plans = [size.plan for size in self.sizes if size.plan]
        has_tokens = bool(plans) and tokens_per_s(plans[0]) is not None
        rate = "tokens/s" if has_tokens else "samples/s"
        header = ("cluster", "devices", "batch", "step", rate, "efficiency", "peak", "  grid")
        rows = [self._row(size) for size in self.sizes]
        return left_last(header, rows)

    def _row(self, size: Size) -> tuple[str, ...]:
        devices, batch = str(size.cluster.num_devices), str(size.global_batch)
        plan = size.plan
        if plan is None:
            why = size.why_not.split("\n")[-1].strip()
            return (size.cluster.spec, devices, batch, "", "", "", "", f"  does not fit: {why}")
        tokens = tokens_per_s(plan)
        return (
            size.cluster.spec,
            devices,
            batch,
            duration(plan.prediction.step_s),
            number(plan.prediction.samples_per_s if tokens is None else tokens),
            percent(self.efficiency(size) or 0.0),
            amount(plan.prediction.peak_bytes),
            f"  {grid_text(plan)}",
        )


def _per_device(plan: Plan) -> float:
    return plan.prediction.samples_per_s / plan.num_devices


def sweep(
    source: ModelSource,
    clusters: Sequence[Cluster],
    options: PlanOptions,
    progress: Progress,
    *,
    weak: bool = False,
) -> Sweep:
    """Plan a model, captured once, on every cluster.

    The global batch is the same for all; with `weak` it is that of the first cluster, and grows
    with the devices. A cluster that the model does not fit is in the result, with the reason.
    """
    captured, options = capture_source(source, clusters[0], options, progress)
    batch = options.global_batch or captured.graph.example_batch
    sizes = []
    for cluster in clusters:
        grown = batch * cluster.num_devices // clusters[0].num_devices if weak else batch
        grown = max(grown, 1)
        asked = replace(options, global_batch=grown)
        plan, why_not = None, ""
        try:
            planned = plan_captured(captured, cluster, asked, name=source.name, progress=progress)
            plan = planned.plan
        except InfeasiblePlan as error:
            why_not = str(error)
        sizes.append(Size(cluster=cluster, global_batch=grown, plan=plan, why_not=why_not))
    return Sweep(model=source.name, sizes=tuple(sizes))
