"""Scaling curves: the same plans as one by one, and efficiency against the smallest that fits."""

import json

import pytest

from autopar import compiler
from autopar.cli import main
from autopar.compiler import PlanOptions, plan_source
from autopar.costs.clusters import parse_cluster
from autopar.questions import sweep as sweeps
from autopar.questions.sweep import sweep


def clusters(*specs):
    return [parse_cluster(spec) for spec in specs]


def test_every_size_has_the_plan_it_has_alone(source, quiet, monkeypatch):
    captures = []
    capture = compiler.capture
    monkeypatch.setattr(
        compiler, "capture", lambda *args, **kw: captures.append(1) or capture(*args, **kw)
    )
    found = sweep(source, clusters("local:1", "local:2"), PlanOptions(), quiet)
    assert len(captures) == 1
    for size in found.sizes:
        assert size.plan == plan_source(source, size.cluster, PlanOptions()).plan
    one, two = (size.plan.prediction.samples_per_s for size in found.sizes)
    assert [found.efficiency(size) for size in found.sizes] == pytest.approx([1, two / one / 2])


def test_a_size_that_does_not_fit_says_why(source, quiet):
    """Weights, gradients and state of 8 layers: 8.4 MB in all, two halves on two devices."""
    options = PlanOptions(memory_limit_bytes=7_000_000)
    found = sweep(source, clusters("local:1", "local:2"), options, quiet)
    assert found.sizes[0].plan is None and "bytes too much" in found.sizes[0].why_not
    assert found.efficiency(found.sizes[0]) is None
    assert found.efficiency(found.sizes[1]) == 1
    assert "does not fit" in found.text.split("\n")[1]
    assert found.as_dict()["sizes"][0]["plan"] is None


def test_under_weak_scaling_the_batch_grows_with_the_devices(source, quiet):
    options = PlanOptions(global_batch=64)
    found = sweep(source, clusters("local:1", "local:2"), options, quiet, weak=True)
    assert [size.plan.training.global_batch for size in found.sizes] == [64, 128]


def test_the_command_takes_sizes_or_nodes(capsys, monkeypatch, source):
    monkeypatch.setattr(compiler, "load_source", lambda spec, seq_len: source)
    common = ("sweep", "stack.py:made", "--json", "--precision", "bf16")
    assert main([*common, "--cluster", "1:h100-sxm,2x1:h100-sxm@network=10"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert main([*common, "--cluster", "2x1:h100-sxm@network=10", "--nodes", "1,2"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in counted["sizes"]] == [1, 2]
    assert counted["sizes"][1] == listed["sizes"][1]
    assert counted["sizes"][1]["cluster"] == "2x1:h100-sxm@network=10"
    assert main(["sweep", "m", "--cluster", "local:2", "--nodes", "1,0"]) == 2


def test_a_table_has_a_row_a_size(source, quiet):
    text = sweep(source, clusters("local:2"), PlanOptions(), quiet).text.split("\n")
    assert text[0].split()[:6] == ["cluster", "devices", "batch", "step", "samples/s", "efficiency"]
    assert text[1].startswith("local:2        2    512") and "100.0%" in text[1]
    assert sweeps.Sweep(model="m", sizes=()).as_dict() == {"model": "m", "sizes": []}
