"""The step of a plan by events, against the closed form that the search ranks by."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture, find_blocks
from autopar.cli import main
from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import axis_collective_time_s
from autopar.costs.execution import Execution
from autopar.costs.memory import Training
from autopar.ir.cluster import Axis
from autopar.ir.precision import PRECISIONS
from autopar.plan.pipeline import rank_groups, ranks_peak_bytes
from autopar.plan.serialize import read_plan, write_plan
from autopar.plan.simulated import simulate_plan
from autopar.schedules.registry import SCHEDULES
from autopar.search import make_plan
from autopar.search.assemble import stage_plans
from autopar.search.pins import parse_pins
from autopar.search.planner import Planner
from autopar.search.setting import Setting
from autopar.search.simulated import predict

LAYERS, HIDDEN = 8, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


@functools.cache
def captured():
    with torch.device("meta"):
        batch = {key: torch.randn(2, 2048, HIDDEN) for key in "xy"}
        graph = capture(Residual(), batch).graph
    return graph, find_blocks(graph, min_blocks=8)


def setting(execution=None, **pins):
    graph, chain = captured()
    return Setting(
        name="residual",
        graph=graph,
        chain=chain,
        cluster=parse_cluster("2x4:a100-80gb"),
        global_batch=32,
        training=Training(precision=PRECISIONS["bf16"]),
        pins=parse_pins([(key, str(value)) for key, value in pins.items()], SCHEDULES),
        price_pins=False,
        execution=execution or Execution(),
    )


@functools.cache
def planned(**pins):
    return make_plan(setting(**pins))


def chunks(name):
    return 1 if SCHEDULES[name].chunks == "one" else 2


def solved(**pins):
    """Every stage assignment of a search, with its stages and what it is predicted to take."""
    planner = Planner(setting=setting(**pins))
    for staged in planner.search().solved:
        _, stages = stage_plans(planner.pricer, staged)
        yield staged, stages, predict(planner.setting, staged, stages)


GRIDS = [
    {"pipeline": p, "data": d, "zero": z, "schedule": s, "micro_batches": m}
    for (p, d, m), z, s in itertools.product(
        ((1, 8, 2), (2, 4, 8), (4, 2, 8)), (0, 1), ("1f1b", "gpipe")
    )
]


@pytest.mark.parametrize("pins", GRIDS, ids=lambda pins: " ".join(map(str, pins.values())))
def test_events_take_what_the_closed_form_says(pins):
    """Equal layers in equal stages: what differs is who waits for whom at the ends of a step, and
    the messages that a closed form counts in the longest stage though they hide."""
    for staged, stages, prediction in solved(**pins):
        sends_s = sum(dict(s.time_s)[n] for s in stages for n in ("send_forward", "send_backward"))
        above = staged.solution.objective - prediction.step_s
        tail_s = max(dict(s.time_s)["optimizer"] + dict(s.time_s)["weight_gather"] for s in stages)
        assert above <= pins["micro_batches"] * sends_s + tail_s + 1e-9
        assert -above <= 0.02 * prediction.step_s


def test_where_ranks_share_cores_both_ends_of_a_cut_are_at_its_messages():
    """Each neighbour counts half of them where messages take links, all where they take cores."""
    group = parse_cluster("local:2").groups[0]
    counted = {}
    for cores in (1, 2):
        cluster = replace(parse_cluster("local:2"), groups=(replace(group, cores=cores),))
        pins = {"pipeline": 2, "micro_batches": 2, "schedule": "1f1b", "recompute": "none"}
        planner = Planner(setting=replace(setting(**pins), cluster=cluster))
        staged = planner.search().solved[0]
        _, stages = stage_plans(planner.pricer, staged)
        times = dict(stages[0].time_s), dict(stages[1].time_s)
        sends_s = times[0]["send_forward"] + times[1]["send_backward"]
        counted[cores] = staged.problem.boundary_s[staged.solution.cuts[0] - 1] / sends_s
    assert counted == pytest.approx({1: 1.0, 2: 0.5})


@pytest.mark.parametrize("zero", [2, 3])
def test_sums_beside_the_last_backward_are_those_that_the_program_starts_there(zero):
    """Level 2 sums in buckets, here one, which is full when the backward ends: nothing hides. Level
    3 sums every weight as soon as it is there."""
    (stage,) = planned(pipeline=1, data=8, zero=zero, micro_batches=2).stages
    found, times = dict(stage.communication_s), dict(stage.time_s)
    assert (found["sum_beside"] > 0) is (zero == 3)
    assert times["gradient_sync"] == pytest.approx(found["sum_left"])
    assert (times["weight_gather"] > 0) is (zero == 2)
    assert (found["forward_beside"] > 0) is (zero == 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_is_simulated_again_from_its_file(name, tmp_path):
    pins = {"pipeline": 4, "data": 2, "schedule": name, "chunks": chunks(name)}
    plan = planned(**pins, micro_batches=8)
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    step, prediction = simulate_plan(again), plan.prediction
    assert step.step_s == pytest.approx(prediction.step_s, rel=1e-7)
    assert step.bubble_fraction == pytest.approx(prediction.bubble_fraction, rel=1e-6, abs=1e-9)
    certificate = plan.certificate
    assert certificate.bound_s <= certificate.objective_s <= prediction.step_s * (1 + 1e-9)
    assert sum(figure for _, figure in prediction.time_s) == pytest.approx(prediction.step_s)
    if SCHEDULES[name].flushes:
        peaks = [ranks_peak_bytes(group) for group in rank_groups(plan.stages)]
        assert simulate_plan(plan).peak_bytes == pytest.approx(peaks, rel=1e-12)


def test_messages_that_do_not_hide_are_remembered():
    pins = {"pipeline": 4, "data": 2, "schedule": "1f1b", "micro_batches": 8}
    plan = make_plan(setting(Execution(hides_messages=False), **pins))
    hidden = planned(**pins)
    assert plan.prediction.step_s > hidden.prediction.step_s
    assert simulate_plan(plan).step_s == pytest.approx(plan.prediction.step_s)


def test_trace_writes_a_file_whole(tmp_path, capsys):
    path, target = tmp_path / "plan.json", tmp_path / "step.json"
    write_plan(planned(pipeline=4, data=2, schedule="1f1b", micro_batches=8), path)
    assert main(["trace", str(path), "-o", str(target), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    trace = json.loads(target.read_text())
    assert printed["step_s"] * 1e6 == pytest.approx(trace["otherData"]["step_us"], rel=1e-6)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"ranks {2 * i}-{2 * i + 1}, stage {i}" for i in range(4)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "step.json"]
    assert main(["trace", str(path), "-o", str(tmp_path / "no" / "step.json")]) == 2


def test_gradients_of_a_tied_embedding_are_summed_between_its_stages():
    """Priced as the collective that the program is listed to run."""
    source = load_source("gpt_tiny")
    cluster = parse_cluster("2x4:a100-80gb")
    pins = (("pipeline", "4"), ("data", "2"), ("schedule", "1f1b"), ("micro_batches", "4"))
    options = PlanOptions(pins=pins, price_pins=False)
    plan = plan_source(source, cluster, options).plan
    (tied,) = {(c.op, c.nbytes) for c in plan.collectives if c.axes == ("tied",)}
    first, last = plan.stages[0].ranks[0], plan.stages[-1].ranks[0]
    axis = Axis(name="tied", size=2, stride=last - first)
    times = [dict(stage.time_s).get("tied_sync", 0.0) for stage in plan.stages]
    expected = axis_collective_time_s(*tied, axis, cluster)
    assert times == [pytest.approx(expected), 0.0, 0.0, pytest.approx(expected)]
    step = simulate_plan(plan)
    assert step.meet_s[0] == step.meet_s[3] == step.step_s
    assert dict(plan.prediction.time_s)["tied_sync"] == pytest.approx(expected)
