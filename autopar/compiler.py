"""The stages in order: model -> capture -> blocks -> search -> plan -> program.

This is the file to read first. Everything else is called from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured, capture, find_blocks
from autopar.codegen.model import ModelView
from autopar.codegen.program import program_files, write_files
from autopar.codegen.traffic import stage_collectives, totals
from autopar.collecting import seldom_collecting
from autopar.costs.clusters import parse_cluster, priced
from autopar.costs.memory import Training
from autopar.costs.profiles import Profile
from autopar.errors import InputError
from autopar.ir.blocks import BlockChain
from autopar.ir.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.precision import PRECISIONS, Precision
from autopar.pinning import with_pins_of
from autopar.plan.check import check_plan
from autopar.plan.fingerprint import check_cluster, check_model
from autopar.plan.plan import Plan
from autopar.schedules.registry import SCHEDULES
from autopar.search import (
    Pins,
    Setting,
    Store,
    Team,
    check_backend,
    check_objective,
    make_plan,
    parse_pins,
    remembered_plan,
    split_classes,
    working,
)
from autopar.sources import Batch, LossFn, ModelSource, load_source

__all__ = [
    "ModelSource",
    "PlanOptions",
    "Planned",
    "load_source",
    "plan_captured",
    "plan_model",
    "plan_source",
]

Progress = Callable[[str, float | None], None]

DTYPES = {name: getattr(torch, row.param_dtype) for name, row in PRECISIONS.items()}
"""Precision name to the dtype that a source is built in."""

_TRACED_SAMPLES = 4


def _quiet(what: str, done: float | None) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What a planning request asks for, besides model and cluster.

    `global_batch` defaults to the source's own. `pins` are (key, value) texts; without `price_pins`
    the plan does not say what they cost, which saves a search of everything that they rule out.
    `objective` is what is least: `time`, `memory` or `cost`, for which `prices` say what a device
    of each kind costs an hour, where the cluster does not. The search ends once the plan is proven
    to be within `gap` of the best, or at the time limit. It names the techniques that came next:
    those it met, or `top` of them, searched for. With `all_devices` the plan leaves no device out
    and keeps the order of the cluster's groups. Long searches are shared by `workers` processes,
    where more than one; the plan does not depend on how many. What was found before is taken from
    the folder `cache_dir`, if there is one, and what is found is kept there.
    """

    global_batch: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pins: tuple[tuple[str, str], ...] = ()
    price_pins: bool = True
    memory_limit_bytes: int | None = None
    time_limit_s: float = 120.0
    objective: str = "time"
    prices: Mapping[str, float] = field(default_factory=dict)
    gap: float = 0.0
    top: int | None = None
    backend: str = "highs"
    profile: Profile | None = None
    all_devices: bool = False
    workers: int = 1
    cache_dir: Path | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with the captured model it was made for, and what is known of its graph."""

    captured: Captured
    chain: BlockChain
    plan: Plan
    worked_out: dict[int, dict[str, object]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def view(self) -> ModelView:
        """The model as code generation sees it."""
        graph, worked_out = self.captured.graph, self.worked_out
        return ModelView(graph, self.chain, self.plan, worked_out=worked_out)

    def files(self) -> dict[str, str]:
        """The program: file name to text."""
        return program_files(self.view, self.captured.fixed_entries)


@seldom_collecting()
def plan_model(
    model: nn.Module,
    batch: Batch,
    cluster: Cluster | str,
    options: PlanOptions,
    *,
    name: str = "model",
    loss_fn: LossFn | None = None,
    progress: Progress = _quiet,
) -> Planned:
    """Capture a model and plan it.

    Raises CaptureError, InputError or InfeasiblePlan with the reason.
    """
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    _checked(options, where)
    progress("capturing the model", None)
    captured = capture(model, batch, loss_fn=loss_fn)
    options = replace(options, pins=with_pins_of(model, options.pins))
    return plan_captured(captured, where, options, name=name, progress=progress)


@seldom_collecting()
def plan_captured(
    captured: Captured,
    cluster: Cluster | str,
    options: PlanOptions,
    *,
    name: str = "model",
    progress: Progress = _quiet,
) -> Planned:
    """Plan a model that is captured already, in the dtype of `options.precision`.

    Raises InputError or InfeasiblePlan with the reason.
    """
    with working(options.workers) as team:
        return _planned(captured, cluster, options, name, progress, team)


def _planned(
    captured: Captured,
    cluster: Cluster | str,
    options: PlanOptions,
    name: str,
    progress: Progress,
    team: Team | None,
) -> Planned:
    setting = planning_setting(captured, cluster, options, name=name, progress=progress)
    setting = replace(setting, team=team)
    plan = remembered_plan(setting, lambda: make_plan(setting, progress))
    return with_collectives(
        Planned(captured=captured, chain=setting.chain, plan=plan, worked_out=setting.worked_out)
    )


def planning_setting(
    captured: Captured,
    cluster: Cluster | str,
    options: PlanOptions,
    *,
    name: str = "model",
    progress: Progress = _quiet,
) -> Setting:
    """What a search over the plans of a captured model is given. Raises InputError."""
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    pins, precision = _checked(options, where)
    where = priced(where, options.prices)
    progress("finding blocks", None)
    return Setting(
        name=name,
        graph=captured.graph,
        chain=_blocks(captured.graph, pins, _least_blocks(pins)),
        cluster=where,
        global_batch=options.global_batch or captured.graph.example_batch,
        training=Training(
            precision=precision,
            optimizer=options.optimizer,
            optimizer_kwargs=options.optimizer_kwargs,
        ),
        pins=pins,
        price_pins=options.price_pins,
        memory_limit_bytes=options.memory_limit_bytes,
        profile=options.profile,
        backend=options.backend,
        time_limit_s=options.time_limit_s,
        objective=options.objective,
        gap=options.gap,
        top=options.top,
        all_devices=options.all_devices,
        store=None if options.cache_dir is None else Store.at(options.cache_dir),
    )


def source_setting(
    source: ModelSource, cluster: Cluster | str, options: PlanOptions, progress: Progress = _quiet
) -> Setting:
    """What a search over the plans of a model by name is given; the model is not allocated."""
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    captured, options = capture_source(source, where, options, progress)
    return planning_setting(captured, where, options, name=source.name, progress=progress)


def capture_source(
    source: ModelSource, cluster: Cluster, options: PlanOptions, progress: Progress
) -> tuple[Captured, PlanOptions]:
    """A model by name, captured without memory for it, and the options with its batch size."""
    progress("building the model", None)
    model, batch, loss_fn = build_meta(source, options)
    _checked(options, cluster)
    progress("capturing the model", None)
    captured = capture(model, batch, loss_fn=loss_fn)
    batch_size = options.global_batch or source.default_batch
    pins = with_pins_of(model, options.pins)
    return captured, replace(options, global_batch=batch_size, pins=pins)


def _checked(options: PlanOptions, cluster: Cluster) -> tuple[Pins, Precision]:
    """Pins and precision by name. Raises InputError, of the backend too."""
    pins, precision = parse_pins(options.pins, SCHEDULES), PRECISIONS.get(options.precision)
    if precision is None:
        raise InputError(
            f"unknown precision {options.precision!r}; choose one of {', '.join(PRECISIONS)}"
        )
    check_backend(options.backend)
    check_objective(options.objective, priced(cluster, options.prices))
    _check_products(precision, cluster)
    return pins, precision


def _check_products(precision: Precision, cluster: Cluster) -> None:
    """Raise InputError where a device cannot multiply in the precision's dtype."""
    dtype = precision.product_dtype
    lacking = [g.device for g in cluster.groups if dtype and dtype not in dict(g.device.peak_flops)]
    if lacking:
        rated = ", ".join(rate for rate, _ in lacking[0].peak_flops)
        raise InputError(
            f"precision {precision.name}: {lacking[0].name} has no rate for products of {dtype}; "
            f"it has {rated}: choose another precision or device"
        )


def _blocks(graph: OpGraph, pins: Pins, least: int) -> BlockChain:
    """The chain of blocks of a graph, in classes that are decided alike."""
    return split_classes(find_blocks(graph, min_blocks=least), graph.sources, pins.weights)


def _least_blocks(pins: Pins) -> int:
    chunks = pins.chunks or 1
    if pins.schedule is not None and SCHEDULES[pins.schedule].chunks == "two":
        chunks = 2
    ranks = max([pins.pipeline or 1, *(place + 1 for place, _, _ in pins.stages)])
    return max(ranks * chunks, len(pins.boundaries) + 1)


def with_collectives(planned: Planned) -> Planned:
    """The same plan with the collectives of a step listed, per stage and in all."""
    view = planned.view
    stages = tuple(
        replace(stage, collectives=stage_collectives(view, stage)) for stage in planned.plan.stages
    )
    merged = totals(item for stage in stages for item in stage.collectives)
    plan = replace(planned.plan, stages=stages, collectives=merged)
    check_plan(plan)
    return replace(planned, plan=plan)


def adopt_plan(
    plan: Plan,
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress = _quiet,
) -> Planned:
    """A plan that was made before, for a model that is here now.

    Raises PlanMismatch naming the field in which plan, model or cluster differ.
    """
    check_plan(plan)
    if cluster is not None:
        check_cluster(plan, parse_cluster(cluster) if isinstance(cluster, str) else cluster)
    progress("capturing the model", None)
    captured = capture(model, batch, loss_fn=loss_fn)
    check_model(plan, captured.graph)
    progress("finding blocks", None)
    pins = parse_pins(((pin.key, pin.value) for pin in plan.pins), SCHEDULES)
    chain = _blocks(captured.graph, pins, len(plan.stages))
    return Planned(captured=captured, chain=chain, plan=plan)


def build_meta(source: ModelSource, options: PlanOptions) -> tuple[nn.Module, Batch, LossFn | None]:
    """The source's model and a small batch without memory for either."""
    return source.build(device="meta", dtype=_dtype(options.precision), samples=_TRACED_SAMPLES)


def _dtype(precision: str) -> torch.dtype:
    if precision not in DTYPES:
        raise InputError(f"unknown precision {precision!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[precision]


def adopt_source(
    plan: Plan, source: ModelSource, cluster: Cluster | str | None, progress: Progress = _quiet
) -> Planned:
    """A plan that was made before, for a model by name."""
    options = PlanOptions(precision=plan.training.precision)
    progress("building the model", None)
    model, batch, loss_fn = build_meta(source, options)
    return adopt_plan(plan, model, batch, cluster=cluster, loss_fn=loss_fn, progress=progress)


@seldom_collecting()
def plan_source(
    source: ModelSource, cluster: Cluster | str, options: PlanOptions, progress: Progress = _quiet
) -> Planned:
    """Plan a model by name, without allocating it."""
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    with working(options.workers, where.num_devices) as team:
        captured, options = capture_source(source, where, options, progress)
        return _planned(captured, where, options, source.name, progress, team)


def write_program(planned: Planned, folder: Path | str) -> None:
    """Write the program of a plan as a folder of readable source."""
    write_files(planned.files(), Path(folder))
