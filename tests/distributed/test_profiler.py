"""Profiling from the command line: collectives on processes, kills, resuming, planning with it."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
import torch

from autopar import compiler
from autopar.costs.clusters import parse_cluster
from autopar.costs.profiles import Machine, wait_key
from autopar.ir.collective import CollectiveOp
from autopar.profiler.database import Database, read_database
from autopar.profiler.links import group_requests
from autopar.profiler.ops import needed_ops
from autopar.profiler.optimizers import optimizer_ops
from autopar.profiler.run import Limits, Profiler
from autopar.runtime.launch import WorkerPool

pytestmark = pytest.mark.distributed

MACHINE = Machine(device="A CPU", row="cpu", kind="cpu", driver="", torch="2.13", cores=2)
MODEL, PINS = "gpt_tiny", ("--pin", "tensor=2")


def command(path, *more):
    words = (sys.executable, "-m", "autopar", "profile", MODEL, "--cluster", "local:2")
    return [*words, "--no-measure", *PINS, "-o", str(path), "--no-links", "--json", *more]


def start(path, *more):
    """Run the command where it can be interrupted: what a shell runs in the background is not."""
    return subprocess.Popen(
        command(path, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def measured(path):
    """Medians, counts and attempts of the ops that are done; empty while there is no file."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        rows = connection.execute(
            "SELECT key, forward, backward, reason FROM ops WHERE state = 'done'"
        ).fetchall()
        connection.close()
    except sqlite3.Error:
        return {}
    return {key: rest for key, *rest in rows}


def attempts(path):
    return dict(sqlite3.connect(path).execute("SELECT key, attempts FROM ops").fetchall())


def stop_midway(path, number):
    process = start(path)
    while len(measured(path)) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate()
    return process.returncode, out, err


def wanted_keys():
    options = compiler.PlanOptions(pins=(("tensor", "2"),))
    setting = compiler.source_setting(
        compiler.load_source(MODEL), parse_cluster("local:2"), options
    )
    return {op.key for op in needed_ops(setting)}


def test_the_optimizer_is_measured_on_every_rank(tmp_path):
    cluster, options = parse_cluster("local:2"), compiler.PlanOptions(optimizer="sgd")
    setting = compiler.source_setting(compiler.load_source(MODEL), cluster, options)
    ops = optimizer_ops(setting)[::4]
    with Database(tmp_path / "p.sqlite", MACHINE) as database, WorkerPool(2) as ranks:
        profiler = Profiler(database=database, limits=Limits(nbytes=2**30))
        outcomes = [profiler.optimizer(ops, ranks, torch.device("cpu")) for _ in range(2)]
    assert [(found.measured, found.known) for found in outcomes] == [(len(ops), 0), (0, len(ops))]
    (profile,) = read_database(tmp_path / "p.sqlite")
    seconds = [profile.lookup(op)[0] for op in ops]
    assert 0 < seconds[0] < seconds[-1]
    assert seconds[1] < profile.lookup(optimizer_ops(setting)[6])[0] < seconds[2]


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "p.sqlite"
    status, _, _ = stop_midway(path, signal.SIGKILL)
    before = measured(path)
    assert status == -signal.SIGKILL and 3 <= len(before) < len(wanted_keys())
    process = start(path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    after = measured(path)
    assert after.keys() == wanted_keys()
    assert {key: after[key] for key in before} == before
    counts = attempts(path)
    # one op may have been on its way when the process was killed
    assert all(counts[key] == 1 for key in before)
    assert sorted(counts.values())[:-1] == [1] * (len(counts) - 1) and max(counts.values()) <= 2
    assert json.loads(out)["ops"]["known"] == len(before)
    again = subprocess.run(command(path), check=True, capture_output=True, text=True)
    assert json.loads(again.stdout)["ops"]["measured"] == 0
    assert measured(path) == after and attempts(path) == counts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_says_how_to_go_on(tmp_path, number):
    path = tmp_path / "p.sqlite"
    status, out, err = stop_midway(path, number)
    assert status == 130
    assert f"kept in {path}: run the same command again" in err
    assert json.loads(out)["error"] == "KeyboardInterrupt"
    assert 3 <= len(measured(path)) < len(wanted_keys())
    assert len(read_database(path)[0].ops) == len(measured(path))


def test_collectives_are_measured_and_priced(pool2, tmp_path):
    cluster = parse_cluster("local:2")
    requests = group_requests(cluster, (1024, 4096))
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        profiler = Profiler(database=database, limits=Limits(nbytes=1))
        outcome = profiler.links(requests, pool2, torch.device("cpu"))
        assert (outcome.wanted, outcome.measured, outcome.known) == (11, 11, 0)
        outcome = profiler.links(requests, None, torch.device("cpu"))
        assert (outcome.wanted, outcome.measured, outcome.known) == (11, 0, 11)
    (profile,) = read_database(tmp_path / "p.sqlite")
    assert {key.op for key in profile.links} == set(CollectiveOp)
    for key, record in profile.links.items():
        between = key.op is CollectiveOp.SEND_RECV or not key.nbytes  # else the fastest third
        assert record.time.median_s >= 0 and record.time.count == (12 if between else 4)
        group = (key.ranks, key.level, key.packed)
        found = profile.link_s(key.op, key.nbytes, *group) if key.nbytes else profile.wait_s(*group)
        assert found == record.time.median_s
        assert found > 0 or not key.nbytes


def test_groups_of_every_kind(pool4):
    cluster = parse_cluster("local:4")
    (pairs, whole, sends) = group_requests(cluster, (1024,))
    assert [(r.size, r.stride, len(r.keys)) for r in (pairs, whole, sends)] == [
        (2, 1, 5),
        (4, 1, 5),
        (2, 1, 1),
    ]
    assert pairs.keys.count(wait_key(2, pairs.keys[-1].level, 1)) == 1
    nodes = group_requests(parse_cluster("2x4:h100-sxm"), (1024,))
    assert all(k.nbytes for r in nodes for k in r.keys)
    kinds = {(k.ranks, k.level, k.packed) for r in nodes for k in r.keys}
    assert kinds == {
        (2, "node", 1),
        (4, "node", 1),
        (2, "network", 1),
        (4, "network", 2),
        (8, "network", 4),
    }
    far = next(r for r in nodes if r.keys[0].op == "send_recv" and r.keys[0].level == "network")
    assert (far.size, far.stride) == (2, 4)


def test_torchrun_measures_too(tmp_path):
    path = tmp_path / "p.sqlite"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    words += ["autopar", "profile", MODEL, "--cluster", "local:2", "--no-measure", *PINS]
    words += ["-o", str(path), "--budget", "1e-9"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 measured now" in done.stdout
