"""Handlers of the commands that ask about plans rather than for one."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from autopar.costs.clusters import resized
from autopar.outputs import check_file, print_result, write_found
from autopar.progress import progress
from autopar.requests import cluster_of, planning_options, read_sound, with_search

_DONE, _NO = 0, 1


def sweep(options: Namespace) -> int:
    """Plan a model on clusters of several sizes."""
    from autopar.compiler import load_source
    from autopar.questions.sweep import sweep as plan_all

    request = planning_options(options)
    source = load_source(options.model, seq_len=options.seq_len)
    with progress() as report:
        clusters = [cluster_of(options, report, spec) for spec in options.cluster.split(",")]
        if options.nodes:
            clusters = [resized(c, nodes=count) for c in clusters for count in options.nodes]
        result = plan_all(source, clusters, request, report, weak=options.weak)
    print_result(options, result.as_dict(), result.text)
    return _DONE


def fit(options: Namespace) -> int:
    """Find the size that fits; the answer is no where none does."""
    from autopar.compiler import load_source
    from autopar.questions.fit import fit as find

    request = planning_options(options)
    source = load_source(options.model, seq_len=options.seq_len)
    with progress() as report:
        result = find(options.size, source, cluster_of(options, report), request, report)
    print_result(options, result.as_dict(), result.text)
    return _DONE if result.best else _NO


def what_if(options: Namespace) -> int:
    """Make a plan again with changes."""
    from autopar.questions.what_if import what_if as ask

    if options.output:
        check_file(options.output)
    found = read_sound(options.plan)
    with progress() as report:
        result = ask(
            found,
            options.changes,
            report,
            model=options.model,
            search=partial(with_search, options),
        )
    write_found(options, result.after)
    print_result(options, result.as_dict() | {"output": options.output}, result.text)
    return _DONE
