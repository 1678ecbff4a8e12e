"""What the arguments of a command ask for: models, clusters, plans, options; read and checked."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError, PlanMismatch
from autopar.plan.check import check_plan
from autopar.plan.plan import Plan
from autopar.plan.serialize import read_plan
from autopar.plan.table import sequence_length
from autopar.progress import Report

if TYPE_CHECKING:
    from autopar.compiler import ModelSource, Planned, PlanOptions
    from autopar.ir.cluster import Cluster

_PLANNING = (
    "global_batch",
    "precision",
    "optimizer",
    "gap",
    "backend",
    "all_devices",
)
_ASKED = ("objective", "top")
_GIB = 2**30


def read_sound(path: str) -> Plan:
    """A plan from a file, sound in itself; every error names the file."""
    found = read_plan(path)
    with naming(path):
        check_plan(found)
    return found


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Has what does not match name the file."""
    try:
        yield
    except PlanMismatch as error:
        raise PlanMismatch(f"{path}: {error}") from None


def source_of(spec: str, found: Plan) -> ModelSource:
    """The model of a plan, at the plan's sequence length where autopar chooses that."""
    from autopar import compiler

    return compiler.load_source(spec, seq_len=None if ":" in spec else sequence_length(found))


def adopted(found: Plan, source: ModelSource, report: Report) -> Planned:
    """A plan with the model it was made for, captured anew. Raises PlanMismatch if it was not."""
    from autopar import compiler

    request = compiler.PlanOptions(precision=found.training.precision)
    model, batch, loss_fn = compiler.build_meta(source, request)
    return compiler.adopt_plan(found, model, batch, loss_fn=loss_fn, progress=report)


def cluster_of(options: Namespace, report: Report, spec: str | None = None) -> Cluster:
    """The cluster asked for, its local processes as measured on this machine if not told not to."""
    from autopar import devices
    from autopar.costs.clusters import parse_cluster

    spec = spec or options.cluster
    if options.no_measure:
        return parse_cluster(devices.resolve(spec))
    return devices.measured_cluster(spec, progress=report)


def planning_options(options: Namespace) -> PlanOptions:
    """The planning options given; the others keep their defaults. Checks the pins at once."""
    from autopar import compiler
    from autopar.schedules.registry import SCHEDULES
    from autopar.search.pins import parse_pins

    parse_pins(options.pin, SCHEDULES)
    pins = tuple(options.pin)
    given: dict[str, Any] = {name: getattr(options, name) for name in _PLANNING}
    if options.memory_limit is not None:
        given["memory_limit_bytes"] = int(options.memory_limit * _GIB)
    for name in _ASKED:  # by some commands alone
        given[name] = getattr(options, name, None)
    if prices := getattr(options, "price", []):
        given["prices"] = dict(prices)
    given = {name: value for name, value in given.items() if value is not None}
    if getattr(options, "keep", None):
        pins = _kept(options)
        given["price_pins"] = False
    elif getattr(options, "free", ()):
        raise InputError("--free without --keep: nothing is kept; name the plan with --keep")
    return with_search(options, compiler.PlanOptions(pins=pins, **given))


def with_search(options: Namespace, request: PlanOptions) -> PlanOptions:
    """The request with how to search for its plan as the arguments say."""
    return replace(
        request,
        time_limit_s=options.time_limit or request.time_limit_s,
        workers=options.workers or _cores(),
        cache_dir=_plan_cache(options),
    )


def _plan_cache(options: Namespace) -> Path | None:
    """The folder that keeps what searches find. Raises InputError where none can be asked for."""
    from autopar.devices import plans_folder

    if options.no_cache:
        if options.cache_dir:
            raise InputError(f"--cache-dir {options.cache_dir} with --no-cache: leave out one")
        return None
    return Path(options.cache_dir) if options.cache_dir else plans_folder()


def _cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # where there is no such call
        return os.cpu_count() or 1


def _kept(options: Namespace) -> tuple[tuple[str, str], ...]:
    """The decisions of a plan to keep, those pinned aside; says which are left to the search."""
    from autopar.search.keep import kept_pins

    kept = kept_pins(read_sound(options.keep), options.free)
    pinned = {key for key, _ in options.pin}
    if left := [key for key in kept.left if key not in pinned]:
        names = ", ".join(left)
        print(f"autopar: {options.keep}: left to the search: {names}", file=sys.stderr)
    return (*options.pin, *(each for each in kept.pins if each[0] not in pinned))


def request_of(options: Namespace) -> tuple[ModelSource, PlanOptions, Plan | None]:
    """The model, the options, and the plan given, whose setup then replaces the options'."""
    from autopar import compiler

    if not options.plan:
        request = planning_options(options)
        return compiler.load_source(options.model, seq_len=options.seq_len), request, None
    names = ("seq_len", *_PLANNING, "time_limit", "memory_limit", "pin")
    given = [
        f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, [])
    ]
    if given:
        raise InputError(
            f"--plan {options.plan} with {', '.join(given)}: a plan has these decided; leave them "
            "out, or leave out --plan to make a new plan"
        )
    found = read_sound(options.plan)
    training = found.training
    request = compiler.PlanOptions(
        global_batch=training.global_batch,
        precision=training.precision,
        optimizer=training.optimizer,
    )
    return source_of(options.model, found), request, found
