"""Plan and JSON: the round trip, the bytes, and what is said of a file that is no plan."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from types import NoneType
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InputError, PlanMismatch
from autopar.ir.placement import BY_EXPERT, R_STAR, ByExpert, P, Partial, Replicate, Shard
from autopar.ir.size import Size
from autopar.plan.plan import Plan, Terms
from autopar.plan.serialize import from_json, read_plan, to_json, write_plan

NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(lambda x: float(f"{x:.9g}"))
NUMBERS = NUMBERS.filter(lambda x: abs(x) != float("inf"))
NATURALS = st.integers(0, 10**6)
PLACEMENTS = st.one_of(
    st.builds(Replicate, st.booleans()),
    st.sampled_from((P, BY_EXPERT)),
    st.builds(Shard, NATURALS, st.lists(st.integers(1, 99), max_size=3).map(tuple)),
)
LEAVES = {
    bool: st.booleans(),
    int: st.integers(),
    float: NUMBERS,
    str: st.text(max_size=8),
    Size: st.builds(Size, NATURALS, NATURALS),
    Shard | Replicate | Partial | ByExpert: PLACEMENTS,
    Terms: st.dictionaries(st.text(max_size=4), NUMBERS, max_size=3).map(
        lambda terms: tuple(terms.items())
    ),
}


def values(hint):
    """Every value of a type hint a plan may use, written independently of the codecs."""
    if hint in LEAVES:
        return LEAVES[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        members = {f.name: values(hints[f.name]) for f in fields(hint) if f.name != "version"}
        return st.builds(hint, **members)
    item = values(get_args(hint)[0])
    if NoneType in get_args(hint):
        return st.none() | item
    return st.lists(item, max_size=2).map(tuple)


@given(values(Plan))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_plan_survives_the_round_trip(plan):
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text


def test_floats_are_rounded_to_nine_digits_and_nothing_else(sample_plan):
    text = to_json(sample_plan)
    again = from_json(text)
    assert again.prediction.bubble_fraction == 0.111111111
    assert again.stages[0].memory_bytes[2] == ("activations", 6979321860.0)
    exact = ("version", "model", "cluster", "training", "axes", "variants", "collectives", "pins")
    for name in exact:
        assert getattr(again, name) == getattr(sample_plan, name)
    assert to_json(again) == text


def test_the_text_is_laid_out_for_people(sample_plan):
    lines = to_json(sample_plan).splitlines()
    assert lines[0] == "{"
    assert lines[1] == ' "version": 1,'
    assert ' "axes": [{"name": "data", "size": 2}, {"name": "tensor", "size": 2}],' in lines
    assert max(map(len, lines)) <= 140
    assert any('"layout": ["R*", "S(0)"]' in line for line in lines)
    keys = [line.split('"')[1] for line in lines if line.startswith(' "')]
    rearranged = ("devices", "left_out")  # of a cluster that is not used as it is
    assert keys == [f.name for f in fields(Plan) if f.name not in rearranged]


def test_flags_and_empty_fields_at_their_default_are_left_out(sample_plan):
    data = json.loads(to_json(sample_plan))
    plain, tied = data["stages"][0]["parameters"][1], data["stages"][0]["parameters"][0]
    assert list(plain) == ["fqn", "shape", "dtype", "layout", "trainable"]
    assert list(tied) == [*plain, "tied"]
    assert data["stages"][0]["collectives"][-1]["count"] == 1


def test_a_term_named_twice_is_not_written(sample_plan):
    prediction = replace(sample_plan.prediction, time_s=(("a", 1.0), ("a", 2.0)))
    with pytest.raises(PlanMismatch, match=r"prediction\.time_s: a term is named twice"):
        to_json(replace(sample_plan, prediction=prediction))


def test_long_lists_are_filled_into_lines(sample_plan):
    stage = replace(sample_plan.stages[0], ranks=tuple(range(1000, 1200)))
    text = to_json(replace(sample_plan, stages=(stage,)))
    lines = [line for line in text.splitlines() if line.strip().startswith("1")]
    assert 10 <= len(lines) <= 11
    assert all(len(line) <= 140 for line in lines)
    assert from_json(text).stages[0].ranks == stage.ranks


def test_numpy_figures_are_written_as_plain_numbers(sample_plan):
    numpy = pytest.importorskip("numpy")
    prediction = replace(
        sample_plan.prediction, step_s=numpy.float64(0.04), peak_stage=numpy.int64(0)
    )
    plan = replace(sample_plan, prediction=prediction)
    assert to_json(plan) == to_json(sample_plan)


def test_figures_that_are_not_finite_are_not_written(sample_plan):
    certificate = replace(sample_plan.certificate, gap=float("inf"))
    with pytest.raises(PlanMismatch, match=r"certificate\.gap: .*finite.*inf"):
        to_json(replace(sample_plan, certificate=certificate))


def _set(path, value):
    def edit(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        data[last] = value

    return edit


def _drop(*path):
    def edit(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        del data[last]

    return edit


BAD_FIELDS = [
    (_set(["version"], 2), "version: expected 1, found 2"),
    (_set(["version"], "1"), 'version: expected 1, found "1"'),
    (_set(["version"], True), "version: expected 1, found true"),
    (_drop("version"), "version: expected 1, found none"),
    (_set(["extra"], 1), "extra: unknown field; expected version, model"),
    (_set(["stage"], 1), "stage: unknown field; did you mean stages?"),
    (_set(["a b\x1b[31m"], 1), '"a b\\u001b[31m": unknown field'),
    (_drop("cluster"), "cluster: missing field of Plan"),
    (_drop("stages", 1, "ranks"), "stages[1].ranks: missing field of StagePlan"),
    (_set(["pipeline"], "2"), 'pipeline: expected an integer, found "2"'),
    (_set(["pipeline"], 2.0), "pipeline: expected an integer, found 2.0"),
    (_set(["pipeline"], True), "pipeline: expected an integer, found true"),
    (_set(["schedule"], None), "schedule: expected a string, found null"),
    (
        _set(["stages", 0, "blocks", 1, "recompute"], 1),
        "stages[0].blocks[1].recompute: expected a string, found 1",
    ),
    (_set(["stages"], {}), "stages: expected an array, found an object of 0 fields"),
    (_set(["axes", 0], 7), "axes[0]: expected an object (MeshAxis), found 7"),
    (
        _set(["prediction", "step_s"], "fast"),
        'prediction.step_s: expected a number, found "fast"',
    ),
    (
        _set(["prediction", "time_s"], [1, 2]),
        "prediction.time_s: expected an object of numbers, found [1, 2]",
    ),
    (
        _set(["prediction", "time_s", "forward"], None),
        "prediction.time_s.forward: expected a number, found null",
    ),
    (
        _set(["prediction", "step_s"], 10**400),
        "prediction.step_s: expected a number a float can hold",
    ),
    (
        _set(["stages", 0, "parameters", 0, "layout", 1], "S(x)"),
        "stages[0].parameters[0].layout[1]: expected a placement: S(dim), R, R*, P(sum) or E, "
        'found "S(x)"',
    ),
    (
        _set(["stages", 0, "parameters", 0, "layout", 1], "S(00)"),
        "stages[0].parameters[0].layout[1]: expected a placement: S(dim), R, R*, P(sum) or E, "
        'found "S(00)"',
    ),
    (
        _set(["model", "inputs", 0, "shape", 0], "batch*2"),
        'model.inputs[0].shape[0]: expected a size such as 64, batch or 64*batch, found "batch*2"',
    ),
    (
        _set(["model", "inputs", 0, "shape", 1], 32),
        "model.inputs[0].shape[1]: expected a size such as 64, batch or 64*batch, found 32",
    ),
    (
        _set(["stages", 0, "collectives", 0, "op"], "broadcast"),
        "stages[0].collectives[0].op: expected one of all_reduce, all_gather, reduce_scatter, "
        'all_to_all, send_recv, found "broadcast"',
    ),
    (
        _set(["stages", 0, "collectives", 0, "op"], []),
        "stages[0].collectives[0].op: expected one of all_reduce",
    ),
]


@pytest.mark.parametrize(("edit", "message"), BAD_FIELDS, ids=[m[:45] for _, m in BAD_FIELDS])
def test_a_bad_field_is_named(sample_plan, edit, message):
    data = json.loads(to_json(sample_plan))
    edit(data)
    with pytest.raises(PlanMismatch) as caught:
        from_json(json.dumps(data))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


BROKEN_TEXTS = [
    ("", "broken JSON at line 1 column 1: Expecting value"),
    ('{"version": 1,\n "model": }', "broken JSON at line 2 column 11: Expecting value"),
    ("[]", "plan: expected an object (Plan), found []"),
    ("null", "plan: expected an object (Plan), found null"),
    ('"plan"', 'plan: expected an object (Plan), found "plan"'),
    ('{"version": 1, "version": 1}', 'broken JSON: an object has the key "version" twice'),
    ('{"version": NaN}', "broken JSON: NaN is no JSON number"),
    ("[" * 100_000, "broken JSON: nested too deeply"),
    ('{"version": ' + "9" * 5000 + "}", "broken JSON: Exceeds the limit"),
    ("\ufeff{}", "broken JSON at line 1 column 1"),
    ("version: 1", "broken JSON at line 1 column 1"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_TEXTS, ids=range(len(BROKEN_TEXTS)))
def test_broken_text_is_refused_with_its_place(text, message):
    with pytest.raises(PlanMismatch) as caught:
        from_json(text)
    assert str(caught.value).startswith(message)


def test_a_defaulted_field_may_be_missing(sample_plan):
    data = json.loads(to_json(sample_plan))
    del data["pins"], data["notes"]
    assert from_json(json.dumps(data)) == replace(
        from_json(to_json(sample_plan)), pins=(), notes=()
    )


def test_a_whole_number_is_read_as_a_float(sample_plan):
    data = json.loads(to_json(sample_plan))
    data["prediction"]["samples_per_s"] = 800
    step = from_json(json.dumps(data)).prediction.samples_per_s
    assert type(step) is float and step == 800.0


def test_files(sample_plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("an older file, much longer than nothing")
    write_plan(sample_plan, path)
    assert path.read_bytes() == to_json(sample_plan).encode()
    assert to_json(read_plan(path)) == to_json(sample_plan)
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_keeps_the_old_file(sample_plan, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(InputError, match=r"cannot write .*plan\.json: disk full"):
        write_plan(sample_plan, path)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*none\.json: No such file"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read_plan(tmp_path)
    (tmp_path / "raw").write_bytes(b"\x80\x04pickle")
    with pytest.raises(PlanMismatch, match="raw: not a plan: byte 0 is not UTF-8"):
        read_plan(tmp_path / "raw")
    (tmp_path / "empty").write_text("")
    with pytest.raises(PlanMismatch, match="empty: broken JSON at line 1"):
        read_plan(tmp_path / "empty")


def test_a_missing_folder_is_named(sample_plan, tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*plan\.json: No such file or directory"):
        write_plan(sample_plan, tmp_path / "missing" / "plan.json")


def test_placements_of_the_sample_are_the_types(sample_plan):
    layout = from_json(to_json(sample_plan)).stages[0].parameters[0].layout
    assert layout == (R_STAR, Shard(0))
