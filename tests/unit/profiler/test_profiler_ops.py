"""Measuring ops: which ones a plan may need, what is recorded of each, and of those that fail."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace

import pytest
import torch

from autopar import compiler
from autopar.costs.clusters import parse_cluster
from autopar.costs.compute import op_time
from autopar.costs.local_op import SLOT, LocalOp, StoredDim
from autopar.costs.profiles import Machine, OpRecord, Profile
from autopar.errors import RuntimeFailure
from autopar.ir.graph import Ref
from autopar.profiler.arguments import Arguments
from autopar.profiler.database import Database, read_database
from autopar.profiler.links import group_requests
from autopar.profiler.ops import needed_ops
from autopar.profiler.run import NOT_TRIED, Limits, Profiler
from autopar.profiler.timing import HostClock, Stopwatch, timing_of
from autopar.search import make_plan
from autopar.search.pricer import Pricer

MACHINE = Machine(device="A CPU", row="cpu", kind="cpu", driver="", torch="2.13", cores=4)
CPU = torch.device("cpu")
CLUSTER = parse_cluster("local:2")
NO_LIMITS = Limits(nbytes=2**40, op_s=1e9)


def op(target, *args, shape=(4, 8), out=None, dtype="float32", grads=(True,), **fields):
    return LocalOp(
        target=target,
        input_shapes=(shape,),
        input_dtypes=(dtype,),
        output_shapes=(out or shape,),
        output_dtypes=(dtype,),
        args=(Ref(SLOT, 0), *args),
        requires_grad=any(grads),
        grad_inputs=grads,
        **fields,
    )


def reshaped(**fields):
    return op("aten.reshape.default", (6, 4), shape=(2, 3, 4), out=(6, 4), **fields)


def stored(*dims):
    return (tuple(StoredDim(dim=d, broadcast="b" in kind, cut="c" in kind) for d, kind in dims),)


SWAPPED = stored((0, ""), (2, ""), (1, ""))
CUT = stored((0, ""), (1, "c"), (2, ""))
REPEATED = stored((1, "b"), (0, ""), (2, ""))


@pytest.fixture(scope="module")
def setting():
    source = compiler.load_source("llama_tiny")
    options = compiler.PlanOptions(pins=(("tensor", "2"),), price_pins=False, global_batch=2)
    return compiler.source_setting(source, CLUSTER, options)


def test_every_op_that_the_search_prices_is_needed(setting, monkeypatch):
    needed = {item.key for item in needed_ops(setting)}
    priced = {}
    local = Pricer.local

    def noted(self, node, option, prices):
        made = local(self, node, option, prices)
        priced[made.key] = made
        return made

    monkeypatch.setattr(Pricer, "local", noted)
    make_plan(setting)
    device = CLUSTER.device(0)
    free = {key for key, item in priced.items() if op_time(item, device).source == "free"}
    assert priced.keys() - free <= needed
    assert len(needed) > 50


def test_a_plan_has_the_times_of_its_profile(setting, tmp_path):
    needed = needed_ops(setting)
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        profiler = Profiler(database=database, limits=NO_LIMITS)
        outcome = profiler.ops(needed, CLUSTER.device(0), CPU)
    assert outcome.measured == len(needed) - len(outcome.reasons)
    (profile,) = read_database(tmp_path / "p.sqlite")
    plan = make_plan(replace(setting, profile=profile))
    prediction = plan.prediction
    assert prediction.measured_ops + prediction.interpolated_ops <= prediction.priced_ops
    assert prediction.measured_ops >= 0.9 * prediction.priced_ops > 0
    assert any("op times measured on A CPU" in note for note in plan.notes)
    pricer = Pricer(replace(setting, profile=profile))
    for item in needed:
        if profile.ops[item.key].forward is not None:
            time = pricer.op_time(item)
            assert (time.forward_s, time.backward_s) == profile.ops[item.key].times_s


def test_a_plan_names_the_ops_that_could_not_be_measured(setting):
    failed = {item.key: OpRecord.of(item, reason="OOM") for item in needed_ops(setting)}
    plan = make_plan(replace(setting, profile=Profile(machine=MACHINE, ops=failed)))
    prediction = plan.prediction
    assert (prediction.measured_ops, prediction.interpolated_ops) == (0, 0)
    named = [note for note in plan.notes if note.startswith("not measured: ")]
    assert len(named) == 5 and all(note.endswith(": OOM") for note in named)
    assert "more ops were not measured" in plan.notes[-1]


def test_a_second_run_measures_nothing(tmp_path, monkeypatch):
    ops = [op("aten.gelu.default"), op("aten.silu.default"), op("custom.nothing.default")]
    path = tmp_path / "p.sqlite"
    with Database(path, MACHINE) as database:
        first = Profiler(database=database, limits=NO_LIMITS).ops(ops, CLUSTER.device(0), CPU)
    kept = read_database(path)
    monkeypatch.setattr(Stopwatch, "measure", None)
    with Database(path, MACHINE) as database:
        again = Profiler(database=database, limits=NO_LIMITS).ops(ops, CLUSTER.device(0), CPU)
    assert (first.wanted, first.known, first.measured, first.left) == (3, 0, 2, 0)
    assert (again.wanted, again.known, again.measured, again.left) == (3, 3, 0, 0)
    assert [key for key, _ in again.reasons] == [ops[2].key]
    assert read_database(path) == kept


def test_limits_leave_ops_out_until_they_are_raised(tmp_path):
    ops = [op("aten.gelu.default", shape=(2**10, 2**8)), op("aten.silu.default")]
    small, slow = Limits(nbytes=2**20), Limits(nbytes=2**30, op_s=1e-12)
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        outcome = Profiler(database=database, limits=small).ops(ops, CLUSTER.device(0), CPU)
        assert outcome.measured == 1
        ((key, reason),) = outcome.reasons
        assert key == ops[0].key and reason.startswith(NOT_TRIED) and "GiB" in reason
        outcome = Profiler(database=database, limits=slow).ops(ops, CLUSTER.device(0), CPU)
        assert (outcome.measured, outcome.known) == (0, 2)
        outcome = Profiler(database=database, limits=NO_LIMITS).ops(ops, CLUSTER.device(0), CPU)
        assert (outcome.measured, outcome.known, outcome.reasons) == (1, 1, [])


def test_a_spent_budget_leaves_ops_for_another_run(tmp_path):
    ops = [op("aten.gelu.default"), op("aten.silu.default")]
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        limits = replace(NO_LIMITS, budget_s=0.0)
        outcome = Profiler(database=database, limits=limits).ops(ops, CLUSTER.device(0), CPU)
        assert (outcome.measured, outcome.left) == (0, 2)


def test_an_interrupt_leaves_what_was_measured(tmp_path, monkeypatch):
    ops = [op("aten.relu.default"), op("aten.gelu.default", shape=(64, 64))]
    measure, path = Stopwatch.measure, tmp_path / "p.sqlite"

    def interrupted(self, item, limit_s):
        if item.name == "gelu":
            raise KeyboardInterrupt
        return measure(self, item, limit_s)

    monkeypatch.setattr(Stopwatch, "measure", interrupted)
    with Database(path, MACHINE) as database:
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                Profiler(database=database, limits=NO_LIMITS).ops(ops, CLUSTER.device(0), CPU)
    (profile,) = read_database(path)
    assert list(profile.ops) == [ops[0].key]
    monkeypatch.setattr(Stopwatch, "measure", measure)
    with Database(path, MACHINE) as database:
        outcome = Profiler(database=database, limits=NO_LIMITS).ops(ops, CLUSTER.device(0), CPU)
    assert (outcome.measured, outcome.known, outcome.reasons) == (1, 1, [])


def test_claims_count_processes(tmp_path):
    """An op that takes the process with it is claimed and never recorded."""
    item, path = op("aten.relu.default"), tmp_path / "p.sqlite"
    for _ in range(2):
        with Database(path, MACHINE) as database:
            assert database.claim_op(OpRecord.of(item))
    with Database(path, MACHINE) as database:
        outcome = Profiler(database=database, limits=NO_LIMITS).ops([item], CLUSTER.device(0), CPU)
    assert outcome.measured == 0
    assert "ended the process" in outcome.reasons[0][1]
    rows = sqlite3.connect(path).execute("SELECT attempts FROM ops").fetchall()
    assert rows == [(3,)]


@pytest.mark.parametrize(
    "item",
    [
        *(reshaped(orders=orders, copies=True) for orders in (SWAPPED, CUT, REPEATED)),
        op("aten.contiguous.default", shape=(2, 3, 4), orders=SWAPPED, copies=True),
        op("aten.expand.default", (4, 8), shape=(1, 8), out=(4, 8)),
        op("aten.softmax.int", -1, dtype="bfloat16"),
    ],
)
def test_an_op_is_measured_forward_and_backward(item):
    record = Stopwatch(CPU).measure(item, 1.0)
    assert record.reason == ""
    assert record.forward.median_s > 0 and record.backward.median_s >= 0
    assert record.forward.count == record.backward.count >= 5


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (op("custom.nothing.default"), "AttributeError: .*nothing"),
        (op("aten.softmax.int", 7), "IndexError: Dimension out of range"),
    ],
)
def test_an_op_that_fails_has_the_reason(item, message):
    record = Stopwatch(CPU).measure(item, 1.0)
    assert record.forward is None and record.backward is None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(record.reason)


@pytest.mark.parametrize(
    ("orders", "strides"),
    [((), (12, 4, 1)), (SWAPPED, (12, 1, 3)), (CUT, (24, 4, 1)), (REPEATED, (4, 0, 1))],
)
def test_tensors_lie_in_memory_as_in_the_model(orders, strides):
    arguments = Arguments.of(op("aten.relu.default", shape=(2, 3, 4), orders=orders), CPU)
    assert arguments.inputs[0].stride() == strides
    assert arguments.inputs[0].is_leaf and arguments.inputs[0].requires_grad


def test_experts_get_rows_that_add_up():
    item = LocalOp(
        target="autopar.expert_mm.default",
        input_shapes=((10, 8), (4, 8, 16), (4,)),
        input_dtypes=("float32", "float32", "int64"),
        output_shapes=((10, 16),),
        output_dtypes=("float32",),
        args=(Ref(SLOT, 0), Ref(SLOT, 1), Ref(SLOT, 2)),
        requires_grad=True,
        grad_inputs=(True, True, False),
    )
    arguments = Arguments.of(item, CPU)
    assert arguments.inputs[2].tolist() == [3, 3, 2, 2]
    assert arguments.call().shape == (10, 16)
    assert Stopwatch(CPU).measure(item, 1.0).reason == ""


def test_a_group_that_fails_has_the_reason(tmp_path):
    class Broken:
        def run(self, fn, *args):
            raise RuntimeFailure("rank 1 of 2 failed: Traceback\n  File ...\nValueError: no route")

    (request, *_) = group_requests(CLUSTER, (1024,))
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        profiler = Profiler(database=database, limits=NO_LIMITS)
        outcome = profiler.links([request], Broken(), CPU)
        assert outcome.measured == 0 and len(outcome.reasons) == len(request.keys) == 5
        assert {reason for _, reason in outcome.reasons} == {"ValueError: no route"}
        assert profiler.links([request], Broken(), CPU).known == 5


def test_the_clock_of_a_cpu_stands_still_while_others_run():
    assert HostClock().seconds(lambda: time.sleep(0.05))[1] < 0.04


def test_medians_and_spread():
    timing = timing_of([1.0, 2.0, 3.0, 10.0, 2.5], less_s=0.5)
    assert (timing.median_s, timing.spread_s, timing.count) == (2.0, 0.5, 5)
    assert timing_of([1.0], less_s=2.0).median_s == 0.0


def test_profiles_are_independent_of_the_order(setting):
    keys = [item.key for item in needed_ops(setting)]
    assert keys == [item.key for item in needed_ops(setting)]
    assert len(keys) == len(set(keys))
    assert Profile(machine=MACHINE).lookup(needed_ops(setting)[0]) is None
