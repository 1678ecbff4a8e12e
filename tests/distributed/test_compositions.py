"""Every row of `compositions` against one device: each number, each collective.

Run as a script this file measures all rows, or those with one of the given words in their name, and
writes `docs/parity.md`.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from compositions import DTYPES, ROWS, SAMPLES, SEQUENCE, SHOWN, WIDE, Row
from many_ranks import verify_in_threads
from parity_doc import DOC, document
from test_parity import check_complete

from autopar import local
from autopar.capture import Captured, capture
from autopar.compiler import (
    Planned,
    PlanOptions,
    build_meta,
    load_source,
    plan_captured,
    write_program,
)
from autopar.jobs import Job, verify_job
from autopar.plan.plan import Plan
from autopar.plan.techniques import techniques
from autopar.runtime.launch import WorkerPool
from autopar.runtime.verify import TOLERANCE, RankReport

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@functools.cache
def captured_model(model: str, precision: str) -> Captured:
    source = load_source(model, seq_len=SEQUENCE)
    module, batch, loss_fn = build_meta(source, PlanOptions(precision=precision))
    return capture(module, batch, loss_fn=loss_fn)


def planned_row(row: Row) -> Planned:
    options = PlanOptions(
        global_batch=SAMPLES,
        precision=row.precision,
        pins=tuple(row.settled.items()),
        price_pins=False,
    )
    captured = captured_model(row.model, row.precision)
    return plan_captured(captured, f"local:{row.devices}", options, name=row.model)


Verify = Callable[[Job], list[RankReport]]
"""Runs a job on all ranks of a row."""


def in_processes(pool: WorkerPool) -> Verify:
    return lambda job: pool.run(verify_job, job)


def in_threads(ranks: int) -> Verify:
    return lambda job: verify_in_threads(ranks, job)


def run_row(verify: Verify, row: Row, folder: Path) -> local.VerifyReport:
    """Plan a row, train it beside the eager model on all ranks, compare."""
    planned = planned_row(row)
    write_program(planned, folder)
    dtype = DTYPES[row.precision]
    job = Job(
        source=row.model,
        seq_len=SEQUENCE,
        folder=str(folder),
        dtype=dtype,
        samples=SAMPLES,
        optimizer_kwargs={"lr": 1e-3, "eps": local.ADAM_EPS[dtype]},
        constants=planned.captured.constants,
    )
    reports = verify(job)
    report = local.summarise(planned, reports, TOLERANCE[dtype], job.steps)
    assert report.ok, report.text
    missing = row.techniques - {"dropout", row.precision} - shown(planned.plan)
    assert not missing, f"the plan does without {', '.join(sorted(missing))}"
    check_complete(planned, reports)
    return report


def shown(plan: Plan) -> frozenset[str]:
    """The techniques that a plan has, as `Row.techniques` calls them."""
    text = "\n".join(techniques(plan))
    named = {name for name, words in SHOWN.items() if words in text}
    return frozenset(named | ({plan.schedule} if plan.pipeline > 1 else set()))


def params():
    for row in ROWS:
        marks = pytest.mark.xfail(reason=row.fails, strict=True) if row.fails else ()
        yield pytest.param(row, id=row.name, marks=marks)


@pytest.mark.parametrize("row", params())
def test_numbers_and_collectives_equal(row, request, tmp_path):
    if row in WIDE:
        verify = in_threads(row.devices)
    else:
        verify = in_processes(request.getfixturevalue(f"pool{row.devices}"))
    run_row(verify, row, tmp_path / "program")


def measured(words: Sequence[str]) -> Iterator[tuple[str, local.VerifyReport]]:
    """The report of every row that is not known to fail and has one of the words in its name."""
    with ExitStack() as stack:
        sizes = sorted({row.devices for row in ROWS if row not in WIDE})
        verify = {
            size: in_processes(stack.enter_context(WorkerPool(size, timeout_s=60.0)))
            for size in sizes
        }
        for row in ROWS:
            if row.fails or not any(word in row.name for word in words):
                continue
            how = verify.get(row.devices) or in_threads(row.devices)
            with tempfile.TemporaryDirectory() as folder:
                yield row.name, run_row(how, row, Path(folder) / "program")


if __name__ == "__main__":
    page = DOC.read_text() if DOC.exists() else ""
    found = {}
    for name, report in measured(sys.argv[1:] or [""]):
        print(name, report.text, sep="\n", flush=True)
        found[name] = report
    DOC.write_text(document(found, page))
