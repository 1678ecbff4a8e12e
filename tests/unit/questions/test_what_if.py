"""A plan made again with a change is the plan that would have been made with it."""

import json

import pytest

from autopar.cli import main
from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.errors import InputError
from autopar.plan.serialize import read_plan, write_plan
from autopar.questions.what_if import what_if

CLUSTER = "2x2:h100-sxm"


@pytest.fixture(scope="module")
def plan():
    return planned(CLUSTER, pins=(("tensor", "2"),), price_pins=False, global_batch=32)


def planned(cluster, **options):
    return plan_source(load_source("mlp"), cluster, PlanOptions(**options)).plan


@pytest.mark.parametrize(
    ("changes", "cluster", "options"),
    [
        ([("network", "x2")], "2x2:h100-sxm@network=92", {}),
        (
            [("network", "20"), ("global-batch", "64")],
            f"{CLUSTER}@network=20",
            {"global_batch": 64},
        ),
        ([("nodes", "1")], "2:h100-sxm", {}),
        ([("cluster", "2:a10g"), ("pin.tensor", "free")], "2:a10g", {"pins": ()}),
        ([("pin.pipeline", "1")], CLUSTER, {"pins": (("tensor", "2"), ("pipeline", "1"))}),
    ],
)
def test_a_change_gives_the_plan_that_is_asked_for_with_it(quiet, plan, changes, cluster, options):
    given = {"pins": (("tensor", "2"),), "global_batch": 32} | options
    found = what_if(plan, changes, quiet)
    assert found.before == plan
    assert found.after == planned(cluster, price_pins=False, **given)


def test_it_says_what_the_change_is_worth(quiet, plan):
    found = what_if(plan, [("links", "x4"), ("memory", "40")], quiet)
    a, b = plan.prediction.step_s, found.after.prediction.step_s
    assert b < a
    assert found.after.stages[0].memory_limit_bytes == 40 * 2**30
    assert found.text.startswith(f"links=x4, memory=40: step {a * 1e6:.1f} us -> ")
    assert f"({(b - a) / a:+.1%}), peak memory" in found.text.split("\n")[0]
    assert "\n  cluster: 2x2:h100-sxm -> " in found.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memry", "40"), "change memry=40: nothing of a plan has that name; did you mean memory"),
        (("memory", "much"), "change memory=much: expected GiB of memory of a device"),
        (("links", "20"), "change links=20: expected x2 for twice as fast, or one by its name"),
        (("network", "x0"), "change network=0: expected a bandwidth in GB/s, or x2"),
        (("nodes", "0"), "change nodes=0: expected a whole number of at least 1"),
        (("precision", "int3"), "unknown precision 'int3'"),
    ],
)
def test_a_change_that_is_none_is_refused(quiet, plan, change, message):
    with pytest.raises(InputError, match=message):
        what_if(plan, [change], quiet)


def test_the_command_writes_the_new_plan(capsys, tmp_path, plan):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    write_plan(plan, old)
    cache = tmp_path / "cache"
    searching = ["--cache-dir", str(cache), "--workers", "1", "--time-limit", "60"]
    assert main(["what-if", str(old), "nodes=1", "-o", str(new), "--json", *searching]) == 0
    assert any(path.is_file() for path in cache.rglob("*"))
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"]["after"] == pytest.approx(read_plan(new).prediction.step_s)
    assert read_plan(new).cluster.spec == "2:h100-sxm"
