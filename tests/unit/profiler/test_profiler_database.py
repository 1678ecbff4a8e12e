"""The database and its files: what is kept, what is refused, and that files say the same."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest
from torch import nn

import autopar
from autopar.costs.clusters import parse_cluster
from autopar.costs.profiles import LinkKey, LinkRecord, Machine, OpRecord, Profile, Timing
from autopar.errors import InputError
from autopar.ir.collective import CollectiveOp
from autopar.profiler.database import FATAL, VERSION, Database, read_database
from autopar.profiler.files import (
    from_json,
    merge,
    profile_for,
    read_profiles,
    to_json,
    write_profiles,
)
from autopar.profiler.summary import profiles_summary, profiles_table

MACHINE = Machine(device="A CPU", row="cpu", kind="cpu", driver="", torch="2.13", cores=4)
TIME = Timing(median_s=1.25e-5, spread_s=3e-7, count=9)


def record(key, **fields):
    return OpRecord(key=key, family="f", extents=(4, 8), work=32.0, **fields)


OPS = (
    record("aten.b.default() on x", forward=TIME, backward=TIME),
    record("aten.a.default() on x", forward=TIME),
    record("aten.c.default() on x", reason="RuntimeError: no"),
)
LINK = LinkKey(op=CollectiveOp.ALL_REDUCE, ranks=2, level="node", packed=1, nbytes=1024)
PROFILE = Profile(
    machine=MACHINE,
    ops={op.key: op for op in OPS},
    links={LINK: LinkRecord(key=LINK, time=TIME)},
)


def filled(path, profile=PROFILE):
    with Database(path, profile.machine) as database:
        for op in profile.ops.values():
            assert database.claim_op(op)
            database.add_op(op)
        for link in profile.links.values():
            assert database.claim_link(link.key)
            database.add_link(link)
    return path


def test_what_is_added_is_read_again(tmp_path):
    path = filled(tmp_path / "p.sqlite")
    assert read_database(path) == (PROFILE,)
    assert [item.name for item in tmp_path.iterdir()] == ["p.sqlite"]
    with Database(path, MACHINE) as database:
        assert database.op_reasons() == {op.key: op.reason for op in OPS}
        assert database.links_done() == {LINK}


def test_a_claimed_op_is_no_record_yet(tmp_path):
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        database.claim_op(OPS[0])
        database.claim_link(LINK)
        assert database.op_reasons() == {} and database.links_done() == set()
    (profile,) = read_database(tmp_path / "p.sqlite")
    assert profile.ops == {} and profile.links == {}


def test_what_ends_the_process_twice_is_given_up(tmp_path):
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        assert [database.claim_op(OPS[0]) for _ in range(3)] == [True, True, False]
        assert database.op_reasons() == {OPS[0].key: FATAL}
        assert [database.claim_link(LINK) for _ in range(3)] == [True, True, False]
        assert database.links_done() == {LINK}


def test_a_claim_that_is_taken_back_does_not_count(tmp_path):
    with Database(tmp_path / "p.sqlite", MACHINE) as database:
        for _ in range(5):
            assert database.claim_op(OPS[0]) and database.claim_link(LINK)
            database.release_op(OPS[0])
            database.release_link(LINK)


def test_machines_share_a_file(tmp_path):
    path, other = filled(tmp_path / "p.sqlite"), replace(MACHINE, torch="3.0")
    with Database(path, other) as database:
        assert database.op_reasons() == {}
        database.add_op(OPS[0])
    assert [p.machine.torch for p in read_database(path)] == ["2.13", "3.0"]
    found = profile_for(read_profiles(path), parse_cluster("local:8"), "p")
    assert (found.machine, found.slowdown) == (other, 2.0)
    assert profile_for(read_profiles(path), parse_cluster("local:4"), "p").slowdown == 1.0


def not_sqlite(path):
    path.write_bytes(b"\x00\x01 not a database")
    return "neither"


def foreign(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    return "another program"


def older(path):
    filled(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 0")
    connection.close()
    return f"version 0, expected {VERSION}"


def cut_off(path):
    data = filled(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return "malformed|broken"


def json_of_others(path):
    path.write_text('{"version": 1}')
    return "no profile"


def old_json(path):
    path.write_text(to_json((PROFILE,)).replace(f'"version": {VERSION}', '"version": 7'))
    return f"version 7, expected {VERSION}"


def wrong_json(path):
    path.write_text(to_json((PROFILE,)).replace('"count": 9', '"count": "many"'))
    return "count"


@pytest.mark.parametrize(
    "make", [not_sqlite, foreign, older, cut_off, json_of_others, old_json, wrong_json]
)
def test_other_files_are_refused(tmp_path, make):
    path = tmp_path / "p.sqlite"
    message = make(path)
    with pytest.raises(InputError, match=rf"p\.sqlite.*({message})"):
        read_profiles(path)
    if "json" not in make.__name__:
        with pytest.raises(InputError, match=r"p\.sqlite"):
            Database(path, MACHINE)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.sqlite.*No such file"):
        read_profiles(tmp_path / "none.sqlite")


def test_json_is_sorted_and_round_trips(tmp_path):
    path = filled(tmp_path / "p.sqlite")
    write_profiles(read_profiles(path), tmp_path / "p.json")
    assert read_profiles(tmp_path / "p.json") == (PROFILE,)
    reversed_ops = replace(PROFILE, ops=dict(reversed(PROFILE.ops.items())))
    assert to_json((reversed_ops,)) == (tmp_path / "p.json").read_text()
    keys = [op["key"] for op in json.loads(to_json((PROFILE,)))["profiles"][0]["ops"]]
    assert keys == sorted(keys)
    write_profiles(from_json(to_json((PROFILE,))), tmp_path / "again.sqlite")
    assert read_profiles(tmp_path / "again.sqlite") == (PROFILE,)


def test_files_of_one_device_merge(tmp_path):
    first, second = (
        Profile(machine=MACHINE, ops={op.key: op}) for op in (OPS[0], record("d", forward=TIME))
    )
    (merged,) = merge((first, second))
    assert merged.ops.keys() == first.ops.keys() | second.ops.keys()
    write_profiles((first,), tmp_path / "m.sqlite")
    write_profiles((second,), tmp_path / "m.sqlite")
    assert read_profiles(tmp_path / "m.sqlite") == (merged,)
    newer = Profile(machine=replace(MACHINE, torch="3.0"), ops=second.ops)
    assert len(merge((first, newer))) == 2


def test_files_of_different_devices_do_not_merge():
    with pytest.raises(InputError, match=r"'A CPU' and 'A GPU'"):
        merge((PROFILE, Profile(machine=replace(MACHINE, device="A GPU"))))


def test_a_profile_of_another_device_is_refused():
    with pytest.raises(InputError, match=r"p: holds times of cpu \(A CPU\).*h100-sxm"):
        profile_for((PROFILE,), parse_cluster("8:h100-sxm"), "p")


def test_the_summary_counts():
    (summary,) = profiles_summary((PROFILE,))["profiles"]
    counts = [summary[k] for k in ("ops_measured", "ops_without_time", "collectives_measured")]
    assert counts == [2, 1, 1]
    late = record("d", reason="not tried: needs 2 GiB, over the limit of 1 GiB")
    text = profiles_table((replace(PROFILE, ops={**PROFILE.ops, late.key: late}),))
    assert "1 op: not tried: over the limit of 1 GiB" in text
    assert "A CPU, 4 cores, torch 2.13" in text and "all_reduce" in text and "1 op: Runtime" in text


def test_parallelize_takes_a_profile(tmp_path):
    path = tmp_path / "p.json"
    write_profiles((PROFILE,), path)
    parallel = autopar.parallelize(nn.Linear(2, 2), "local:4", profile=path)
    assert parallel._options.profile == PROFILE
    with pytest.raises(InputError, match=r"p\.json: holds times of cpu"):
        autopar.parallelize(nn.Linear(2, 2), "8:h100-sxm", profile=path)
