"""What each command does: arguments in, a result on stdout, an exit status out.

A handler has the name of its command. It reads and checks everything the user gave before the work
starts, calls the public API once, and prints text or one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError, PlanMismatch
from autopar.plan.check import check_plan, plan_problems
from autopar.plan.diff import diff_plans, plan_changes
from autopar.plan.explain import explain as explain_plan
from autopar.plan.plan import Plan
from autopar.plan.serialize import read_plan, write_plan, write_text
from autopar.plan.simulated import rank_names, simulate_plan
from autopar.plan.step_table import step_summary, step_text
from autopar.plan.table import plan_summary, plan_table, sequence_length
from autopar.plan.text import columns, digits, left_last, number, section
from autopar.profiler.files import merge, profile_for, read_profiles, write_profiles
from autopar.profiler.summary import profiles_summary, profiles_table
from autopar.progress import Report, progress
from autopar.report.timeline import step_trace

if TYPE_CHECKING:
    from autopar.compiler import ModelSource, Planned, PlanOptions
    from autopar.ir.cluster import Cluster

_DONE, _NO = 0, 1

_PLANNING = (
    "global_batch",
    "precision",
    "optimizer",
    "time_limit",
    "gap",
    "backend",
    "all_devices",
)
_ASKED = ("objective", "top")
_GIB = 2**30


def plan(options: Namespace) -> int:
    """Find a plan; print it, and write it where asked."""
    from autopar import compiler

    if options.output:
        check_file(options.output)
    request = planning_options(options)
    source = compiler.load_source(options.model, seq_len=options.seq_len)
    measured = read_profiles(options.profile) if options.profile else ()
    with progress() as report:
        cluster = cluster_of(options, report)
        if options.profile:
            request = replace(request, profile=profile_for(measured, cluster, options.profile))
        planned = compiler.plan_source(source, cluster, request, report)
    write_found(options, planned.plan)
    summary = plan_summary(planned.plan) | {"output": options.output}
    print_result(options, summary, plan_table(planned.plan))
    return _DONE


def profile(options: Namespace) -> int:
    """Measure what plans of a model can need."""
    from autopar import profiling

    request = planning_options(options)
    with progress(timed=True) as report:
        cluster = cluster_of(options, report)
        result = profiling.profile_model(
            options.model,
            options.seq_len,
            cluster,
            request,
            output=options.output,
            limits=profiling.limits_for(
                cluster, options.size_limit, options.op_limit, options.budget
            ),
            links=not options.no_links,
            progress=report,
        )
    print_result(options, result.as_dict(), result.text)
    return _DONE


def profiles(options: Namespace) -> int:
    """Show profiles, put together; write them where asked."""
    found = merge(item for path in options.profiles for item in read_profiles(path))
    if options.output:
        check_file(options.output)
        write_profiles(found, options.output)
    print_result(
        options, profiles_summary(found) | {"output": options.output}, profiles_table(found)
    )
    if options.output:
        print(f"autopar: wrote {options.output}", file=sys.stderr)
    return _DONE


def show(options: Namespace) -> int:
    """Print a plan as a table."""
    found = read_sound(options.plan)
    print_result(options, plan_summary(found), plan_table(found))
    return _DONE


def trace(options: Namespace) -> int:
    """Write the simulated step of a plan as a timeline."""
    check_file(options.output)
    found = read_sound(options.plan)
    step = simulate_plan(found)
    write_text(step_trace(step, rank_names(found)), options.output)
    print_result(
        options, step_summary(found, step) | {"output": options.output}, step_text(found, step)
    )
    print(f"autopar: wrote {options.output}", file=sys.stderr)
    return _DONE


def explain(options: Namespace) -> int:
    """Say why a plan is as it is."""
    found = read_sound(options.plan)
    text = explain_plan(found, options.op)
    print_result(options, {"plan": plan_summary(found), "op": options.op, "text": text}, text)
    return _DONE


def diff(options: Namespace) -> int:
    """Say what changed between two plans."""
    a, b = read_sound(options.a), read_sound(options.b)
    changes = [{"path": path, "a": old, "b": new} for path, old, new in plan_changes(a, b)]
    data = {
        "identical": not changes,
        "step_s": {"a": a.prediction.step_s, "b": b.prediction.step_s},
        "changes": changes,
    }
    print_result(options, data, diff_plans(a, b))
    return _DONE


def check(options: Namespace) -> int:
    """Answer whether a plan is sound and, with a model, whether it was made for it.

    A file that is no plan is bad input; a plan that does not match is the answer no.
    """
    found = read_plan(options.plan)
    problems = list(plan_problems(found))
    if options.model and not problems:
        source = _source(options.model, found)
        try:
            with progress() as report:
                _adopt(found, source, report)
        except PlanMismatch as error:
            problems.append(str(error))
    target = options.model or "itself"
    lines = problems or [f"sound, made for {found.model.name} on {found.cluster.spec}"]
    text = "\n".join(f"{options.plan}: {line}" for line in lines)
    print_result(options, {"ok": not problems, "against": target, "problems": problems}, text)
    return _NO if problems else _DONE


def codegen(options: Namespace) -> int:
    """Write the program of a plan."""
    from autopar import compiler

    _check_folder(options.output)
    found = read_sound(options.plan)
    source = _source(options.model or found.model.name, found)
    with progress() as report, _named(options.plan):
        compiler.write_program(_adopt(found, source, report), options.output)
    files = sorted(
        path.relative_to(options.output).as_posix()
        for path in Path(options.output).rglob("*")
        if path.is_file()
    )
    text = "\n".join(os.path.join(options.output, name) for name in files)
    print_result(options, {"output": options.output, "files": files}, text)
    return _DONE


def verify(options: Namespace) -> int:
    """Answer whether the parallel program gives what the model gives on one device."""
    from autopar import local

    source, request, given = _request(options)
    with progress() as report:
        cluster = cluster_of(options, report)
        result = local.verify_source(source, cluster, request, given, report)
    print_result(options, result.as_dict(), result.text)
    return _DONE if result.ok else _NO


def train(options: Namespace) -> int:
    """Train for some steps, in parallel."""
    from autopar import local

    source, request, given = _request(options)
    with progress() as report:
        cluster = cluster_of(options, report)
        result = local.train_source(source, cluster, request, given, options.steps, report)
    print_result(options, result, _mapping_text(result))
    return _DONE


def zoo(options: Namespace) -> int:
    """List the models of the zoo."""
    from model_zoo.registry import ZOO

    models = [
        {
            "name": spec.name,
            "family": spec.family,
            "parameters": spec.num_parameters,
            "seq_len": spec.default_seq_len,
            "source": spec.source,
        }
        for spec in ZOO.values()
    ]
    rows = [
        (m.name, number(m.num_parameters), str(m.default_seq_len or "-"), f"  {m.source}")
        for m in ZOO.values()
    ]
    print_result(
        options, {"models": models}, left_last(("model", "parameters", "tokens", "  source"), rows)
    )
    return _DONE


def hardware(options: Namespace) -> int:
    """List devices, their usual links, and where the figures are from."""
    from autopar.costs.hardware import DEVICES

    dtypes = ("bfloat16", "float16", "float32")
    rows = []
    for row in DEVICES.values():
        device, links = row.device, row.links
        rows.append(
            (
                device.name,
                digits(device.memory_bytes / _GIB),
                digits(device.memory_bandwidth_bytes_s / 1e9),
                *(digits(device.flops(dtype) / 1e12) for dtype in dtypes),
                digits(device.matmul_efficiency),
                str(row.devices_per_node),
                digits(links.node_bandwidth_bytes_s / 1e9),
                digits(links.network_bandwidth_bytes_s / 1e9),
            )
        )
    rates = ("bf16 TFLOP/s", "fp16", "fp32", "matmul efficiency")
    links_header = ("per node", "node GB/s", "network GB/s")
    table = columns(("device", "GiB", "GB/s", *rates, *links_header), rows)
    sources = [f"{r.device.name}: {r.device.source}; {r.links.source}" for r in DEVICES.values()]
    lines = "\n".join(sources)
    data = {"devices": [_hardware_data(asdict(row)) for row in DEVICES.values()]}
    print_result(options, data, f"{table}\n\n{section('Sources', lines)}")
    return _DONE


def _hardware_data(row: dict[str, Any]) -> dict[str, Any]:
    device = row["device"] | {"peak_flops": dict(row["device"]["peak_flops"])}
    return row | {"device": device}


def read_sound(path: str) -> Plan:
    """A plan from a file, sound in itself; every error names the file."""
    found = read_plan(path)
    with _named(path):
        check_plan(found)
    return found


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except PlanMismatch as error:
        raise PlanMismatch(f"{path}: {error}") from None


def _source(spec: str, found: Plan) -> ModelSource:
    """The model of a plan, at the plan's sequence length where autopar chooses that."""
    from autopar import compiler

    return compiler.load_source(spec, seq_len=None if ":" in spec else sequence_length(found))


def _adopt(found: Plan, source: ModelSource, report: Report) -> Planned:
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
    given["time_limit_s"] = given.pop("time_limit")
    if options.memory_limit is not None:
        given["memory_limit_bytes"] = int(options.memory_limit * _GIB)
    for name in _ASKED:  # by some commands alone
        given[name] = getattr(options, name, None)
    if prices := getattr(options, "price", []):
        given["prices"] = dict(prices)
    given["workers"] = options.workers or _cores()
    given["cache_dir"] = _plan_cache(options)
    given = {name: value for name, value in given.items() if value is not None}
    if getattr(options, "keep", None):
        pins = _kept(options)
        given["price_pins"] = False
    elif getattr(options, "free", ()):
        raise InputError("--free without --keep: nothing is kept; name the plan with --keep")
    return compiler.PlanOptions(pins=pins, **given)


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


def _request(options: Namespace) -> tuple[ModelSource, PlanOptions, Plan | None]:
    """The model, the options, and the plan given, whose setup then replaces the options'."""
    from autopar import compiler

    if not options.plan:
        request = planning_options(options)
        return compiler.load_source(options.model, seq_len=options.seq_len), request, None
    names = ("seq_len", *_PLANNING, "memory_limit", "pin")
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
    return _source(options.model, found), request, found


def write_found(options: Namespace, found: Plan) -> None:
    """Write a plan where asked, and say so; before it is printed, to a reader that may go."""
    if options.output:
        write_plan(found, options.output)
        print(f"autopar: wrote {options.output}", file=sys.stderr)


def check_file(path: str) -> None:
    """Raise InputError where a file cannot be written there, before work is spent on it."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"-o {path}: is a folder; give the name of a file")
    _check_parent(path)


def _check_folder(path: str) -> None:
    """As `_check_file`. A folder with other things in it than a program is not written into."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise InputError(f"-o {path}: is a file; give the name of a folder")
    if target.is_dir() and any(target.iterdir()) and not (target / "plan.json").exists():
        raise InputError(f"-o {path}: holds other files than a program; give a new folder")
    _check_parent(path)


def _check_parent(path: str) -> None:
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise InputError(f"-o {path}: there is no folder {Path(path).parent}; make it first")
    if not os.access(parent, os.W_OK):
        raise InputError(f"-o {path}: the folder {Path(path).parent} cannot be written to")


def print_result(options: Namespace, data: Mapping[str, Any], text: str) -> None:
    """One JSON object if asked for, else text."""
    print(json.dumps(data, indent=1) if options.json else text)


def _mapping_text(result: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in result.items())
