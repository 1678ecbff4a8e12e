"""Tables of another planner: the proven best of the four budgets, scored from the file."""

from __future__ import annotations

import json
import sys

import partition
import pytest

from autopar.errors import InputError
from solvers.brute_force import best_layers
from solvers.layers_problem import LayersProblem
from solvers.random_problems import random_layers_problem

TABLES_S = 1e-6
"""The tables are rounded to this; what is best known was found in tables that were not."""


@pytest.fixture(scope="module")
def data():
    return partition.read(partition.DATA)


def test_the_best_of_every_budget_is_proven_and_no_worse_than_any_known(data):
    rows = [partition.solve(data, budget, time_limit_s=60.0) for budget in data["budgets"]]
    assert [row["status"] for row in rows] == ["optimal"] * 4
    assert [row["score_s"] for row in rows] == pytest.approx([5.02526, 5.10482, 4.180743, 3.79512])
    assert [row["answer"]["micro_batches"] for row in rows] == [4, 4, 1, 8]
    for row in rows:
        assert row["bound_s"] == pytest.approx(row["score_s"], rel=1e-9)
        rounding_s = 0.5 * TABLES_S * row["answer"]["micro_batches"] * (data["layers"] + 1)
        known = row["best_known"]["sum_plus_bottleneck_s"]
        assert row["score_s"] == pytest.approx(known, abs=rounding_s)
        assert row["score_s"] < row["galvatron"]["sum_plus_bottleneck_s"]


def sample(problems: list[LayersProblem]) -> dict:
    """A file of the format, of problems that all have as many layers, under one budget."""
    return {
        "layers": problems[0].num_layers,
        "budgets": [{"memory_gb": 1, "budget_mb": 100}],
        "instances": [
            {
                "micro_batches": p.num_micro_batches,
                "stages": p.num_stages,
                "options": [f"option {o}" for o in range(len(p.time_s))],
                "option_time_s": list(p.time_s),
                "option_time_with_sync_s": list(p.synced_s),
                "option_memory_mb": [list(row) for row in p.option_bytes],
                "end_time_s": list(p.end_s),
                # both are rounded before they count
                "end_memory_mb": [100 - free - 3 - 0.25 for free in p.free_bytes],
                "transient_memory_mb": 3.75,
            }
            for p in problems
        ],
    }


def test_any_file_of_the_format_is_solved_as_by_brute_force(tmp_path, capsys, monkeypatch):
    whole = [p for p in map(random_layers_problem, range(400)) if p.free_bytes[0] % 1 == 0]
    path = tmp_path / "tables.json"
    for layers in range(1, 7):
        problems = [p for p in whole if p.num_layers == layers][:8]
        path.write_text(json.dumps(sample(problems)))
        monkeypatch.setattr(sys, "argv", ["partition.py", str(path), "--json"])
        partition.main()
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["status"] == "optimal"
        assert row["score_s"] == pytest.approx(min(map(best_layers, problems)))
    monkeypatch.setattr(sys, "argv", ["partition.py", str(path)])
    partition.main()
    assert "8 instances, 1 budgets" in capsys.readouterr().out


def test_an_answer_is_scored_as_the_file_says():
    instance = {
        "micro_batches": 3,
        "stages": 2,
        "option_time_s": [1.0, 2.0],
        "option_time_with_sync_s": [1.5, 9.0],
        "option_memory_mb": [[5, 2], [4, 1]],
        "end_time_s": [0.5, 0.25],
        "end_memory_mb": [1.5, 0.0],
        "transient_memory_mb": 1.9,
    }
    # S = (3.5, 1.25), R = (10.5, 1.5); sync lasts 7.0 longer than the first stage
    assert partition.score(instance, 3, 10, ((1, 1), (1, 0))) == 4.75 + 2 * 3.5 + 7.0
    with pytest.raises(ValueError, match="stage 0: 10 MB of 9"):
        partition.score(instance, 3, 9, ((1, 1), (1, 0)))
    for counts in (((1, 1), (0, 0)), ((1, 1), (1, 1)), ((2, 1),)):
        with pytest.raises(ValueError, match="layers are not 3 on all stages"):
            partition.score(instance, 3, 10, counts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("layers"), "no field 'layers'"),
        (lambda data: data["instances"][0].pop("end_time_s"), r"instances\[0\]: no field 'end_"),
        (lambda data: data["instances"][0]["option_time_s"].append(1.0), r"instances\[0\]: "),
        (lambda data: data["instances"][0].update(stages=9), r"instances\[0\]: as many stages"),
        (lambda data: data["budgets"].append({}), r"budgets\[1\]: no field 'budget_mb'"),
        (lambda data: data["budgets"].append({"budget_mb": "x"}), r"budgets\[1\]: could not"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_the_place(tmp_path, change, message):
    file, data = tmp_path / "tables.json", sample([random_layers_problem(1)])
    file.write_text(json.dumps(data))
    assert partition.read(file) == data
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        partition.read(file)


def test_a_file_that_is_no_json_is_refused(tmp_path, capsys, monkeypatch):
    file = tmp_path / "tables.json"
    file.write_text("{")
    monkeypatch.setattr(sys, "argv", ["partition.py", str(file)])
    with pytest.raises(SystemExit) as ended:
        partition.main()
    assert ended.value.code == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
