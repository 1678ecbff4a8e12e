"""What searches found is found again for as long as it holds, and changes no plan."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from autopar.compiler import PlanOptions, load_source, plan_source, source_setting
from autopar.plan.serialize import to_json
from autopar.rules import register_elementwise
from autopar.rules.registry import RULES
from autopar.search import store as stored
from autopar.search.digest import Undigestible, digest_of
from autopar.search.remembered import remembered_plan
from autopar.search.store import Store
from solvers.choice_family import ChoiceFamily

ROOT = Path(__file__).parents[3]
OPTIONS = PlanOptions(precision="bf16", global_batch=4)
MODELS = {
    "llama_tiny": "1x4:a100-40gb",
    "mixtral_tiny": "1x2:a100-40gb",
}


def plan_text(model, folder, cluster=None, **options):
    request = replace(OPTIONS, cache_dir=folder, **options)
    return to_json(plan_source(load_source(model), cluster or MODELS[model], request).plan)


@pytest.fixture
def solved(monkeypatch):
    """Counts the blocks that are solved, not found."""
    solved, solve = [], ChoiceFamily.solve

    def counted(self, *args, **options):
        solved.append(self)
        return solve(self, *args, **options)

    monkeypatch.setattr(ChoiceFamily, "solve", counted)
    return solved


def entries(folder):
    return sorted(path for path in folder.glob("??/*") if path.is_file())


def plan_entries(folder):
    return [path for path in entries(folder) if '\\"version\\"' in path.read_text()]


@pytest.mark.parametrize("model", MODELS)
def test_plans_are_the_same_with_a_cache_cold_or_warm_or_in_part_or_corrupt(
    model, tmp_path, solved
):
    without = plan_text(model, None)
    assert solved
    assert plan_text(model, tmp_path) == without
    kept = {path: path.read_text() for path in entries(tmp_path)}
    [whole] = plan_entries(tmp_path)
    solved.clear()
    assert plan_text(model, tmp_path) == without
    whole.unlink()
    assert plan_text(model, tmp_path) == without
    assert not solved
    for index, path in enumerate(kept):
        text = kept[path]
        harm = (text[: len(text) // 2], "", text.replace("0", "1"), text[:41] + "{}", "\0")
        path.write_text(harm[index % len(harm)])
    assert plan_text(model, tmp_path) == without
    assert solved
    assert {path: path.read_text() for path in entries(tmp_path)} == kept


def test_an_entry_under_another_name_is_none(tmp_path):
    store = Store.at(tmp_path)
    store.write("a", 1)
    store.write("b", 2)
    assert (store.read("a"), store.read("b"), store.read("c")) == (1, 2, None)
    one, other = entries(tmp_path)
    one.write_text(other.read_text())
    assert sorted(map(str, (store.read("a"), store.read("b")))) in (["1", "None"], ["2", "None"])


def test_an_edit_takes_what_still_holds(tmp_path, solved):
    plan_text("llama_tiny", tmp_path)
    first = len(solved)
    for edit in ({"memory_limit_bytes": 2**33}, {"pins": (("pipeline", "2"),)}):
        solved.clear()
        without = plan_text("llama_tiny", None, **edit)
        anew = len(solved)
        solved.clear()
        assert plan_text("llama_tiny", tmp_path, **edit) == without
        assert len(solved) <= anew - first


EDITS = {
    "global_batch": 8,
    "precision": "fp32",
    "optimizer": "sgd",
    "pins": (("tensor", "2"),),
    "memory_limit_bytes": 2**33,
    "time_limit_s": 119.0,
    "objective": "memory",
    "prices": {"a100-40gb": 2.0},
    "gap": 0.1,
    "top": 1,
    "backend": "cbc",
    "all_devices": True,
}


def test_a_plan_is_kept_for_one_setting(tmp_path):
    def digest(model="mlp", cluster="1x2:a100-40gb", **options):
        request = replace(OPTIONS, **options)
        return digest_of(source_setting(load_source(model), cluster, request))

    found = {name: digest(**{name: value}) for name, value in EDITS.items()}
    found["model"] = digest("mlp_wide")
    found["cluster"] = digest(cluster="1x2:a100-80gb")
    found["none"] = digest()
    assert len(set(found.values())) == len(found)
    assert digest() == found["none"]
    assert digest(workers=3, cache_dir=tmp_path) == found["none"]
    unlike = set(PlanOptions.__slots__) - set(EDITS)
    assert unlike == {"optimizer_kwargs", "price_pins", "profile", "workers", "cache_dir"}


def test_digests_are_the_same_in_every_process():
    code = (
        "from autopar.compiler import PlanOptions, load_source, source_setting; "
        "from autopar.search.digest import digest_of; "
        "options = PlanOptions(precision='bf16', global_batch=4); "
        "print(digest_of(source_setting(load_source('mixtral_tiny'), '1x2:a100-40gb', options)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@dataclass(frozen=True)
class Point:
    x: object


@dataclass(frozen=True)
class Place:
    x: object


def test_values_that_say_different_things_have_different_digests():
    values = [
        *(None, 0, False, 0.0, -0.0, "0", b"0", (), frozenset(), {}, (0,), ((0,),), (0, 0)),
        *(frozenset({0}), {0: 0}, {0: 0, 1: 1}, {1: 1, 0: 0}, Point(0), Place(0), Point(1)),
        *(
            np.zeros(2),
            np.zeros(2, dtype=int),
            np.zeros((1, 2)),
            np.ones(2),
            ("ab", "c"),
            ("a", "bc"),
        ),
    ]
    assert len({digest_of(value) for value in values}) == len(values)


def test_a_value_of_unknown_kind_has_no_digest():
    with pytest.raises(Undigestible):
        digest_of((1, {"a": lambda: 1}))


def test_a_setting_that_has_no_digest_is_searched(tmp_path):
    options = replace(OPTIONS, cache_dir=tmp_path, optimizer_kwargs={"lr": object()})
    setting = source_setting(load_source("mlp"), "1x2:a100-40gb", options)
    assert remembered_plan(setting, lambda: "made") == "made"


def test_plans_by_rules_from_outside_are_not_kept(tmp_path):
    register_elementwise("mylib::square")
    try:
        plan_text("mlp", tmp_path, "1x2:a100-40gb")
    finally:
        del RULES["mylib.square"]
    assert plan_entries(tmp_path) == []


def test_a_plan_that_a_limit_on_time_may_have_changed_is_not_kept(tmp_path):
    plan_text("mlp", tmp_path, "1x2:a100-40gb", time_limit_s=1e-6)
    assert plan_entries(tmp_path) == []


def test_other_code_finds_nothing(tmp_path, monkeypatch):
    Store.at(tmp_path).write("a", 1)
    monkeypatch.setattr(stored, "_LIBRARIES", ())
    assert Store.at(tmp_path).read("a") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert plan_text("mlp", blocked, "1x2:a100-40gb") == plan_text("mlp", None, "1x2:a100-40gb")


def test_what_was_used_the_longest_time_ago_goes_first(tmp_path):
    store = Store.at(tmp_path)
    for name in "abcd":
        store.write(name, name * 5000)
        for age, path in enumerate(sorted(entries(tmp_path), key=os.path.getmtime)):
            os.utime(path, (age, age))
    assert store.read("a") == "a" * 5000
    store.trim(limit_bytes=3 * 8192)
    assert [name for name in "abcd" if store.read(name)] == ["a", "c", "d"]
    store.trim(limit_bytes=0)
    assert entries(tmp_path) == []


def test_processes_share_a_folder(tmp_path):
    code = (
        "import sys; from autopar.search.store import Store; store = Store.at(sys.argv[1])\n"
        "for index in range(200):\n"
        "    store.write(str(index % 20), [index % 20] * 2000)\n"
        "    found = store.read(str(index * 7 % 20))\n"
        "    assert found is None or found == [index * 7 % 20] * 2000\n"
        "    store.trim(limit_bytes=10 * 8192)\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(2)
    ]
    assert [run.wait() for run in runs] == [0, 0]
    for path in entries(tmp_path):
        checked, text = path.read_text().split("\n", 1)
        assert len(checked) == 40
        assert len(json.loads(text)) == 2000
