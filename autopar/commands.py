"""What each command does: arguments in, a result on stdout, an exit status out.

A handler has the name of its command. It reads and checks everything the user gave before the work
starts, calls the public API once, and prints text or one JSON object.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autopar.errors import PlanMismatch
from autopar.outputs import check_file, check_folder, print_result, write_found
from autopar.plan.check import plan_problems
from autopar.plan.diff import diff_plans, plan_changes
from autopar.plan.explain import explain as explain_plan
from autopar.plan.serialize import read_plan, write_text
from autopar.plan.simulated import rank_names, simulate_plan
from autopar.plan.step_table import step_summary, step_text
from autopar.plan.table import plan_summary, plan_table
from autopar.plan.text import columns, digits, left_last, number, section
from autopar.profiler.files import merge, profile_for, read_profiles, write_profiles
from autopar.profiler.summary import profiles_summary, profiles_table
from autopar.progress import progress
from autopar.report.timeline import step_trace
from autopar.requests import (
    adopted,
    cluster_of,
    naming,
    planning_options,
    read_sound,
    request_of,
    source_of,
)

_DONE, _NO = 0, 1


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
        source = source_of(options.model, found)
        try:
            with progress() as report:
                adopted(found, source, report)
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

    check_folder(options.output)
    found = read_sound(options.plan)
    source = source_of(options.model or found.model.name, found)
    with progress() as report, naming(options.plan):
        compiler.write_program(adopted(found, source, report), options.output)
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

    source, request, given = request_of(options)
    with progress() as report:
        cluster = cluster_of(options, report)
        result = local.verify_source(source, cluster, request, given, report)
    print_result(options, result.as_dict(), result.text)
    return _DONE if result.ok else _NO


def train(options: Namespace) -> int:
    """Train for some steps, in parallel."""
    from autopar import local

    source, request, given = request_of(options)
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
    from autopar.costs.hardware import DEVICES, GIB

    dtypes = ("bfloat16", "float16", "float32")
    rows = []
    for row in DEVICES.values():
        device, links = row.device, row.links
        rows.append(
            (
                device.name,
                digits(device.memory_bytes / GIB),
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


def _mapping_text(result: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in result.items())
