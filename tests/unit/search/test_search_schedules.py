"""What schedules mean for plans: stages of a rank, memory together, objective, what is tried."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture, find_blocks
from autopar.costs.clusters import parse_cluster
from autopar.costs.memory import Training
from autopar.errors import InputError
from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.precision import PRECISIONS
from autopar.ir.size import Size
from autopar.plan.check import check_plan
from autopar.plan.pipeline import plan_schedule, rank_groups, ranks_peak_bytes
from autopar.plan.split import split_products
from autopar.plan.table import plan_table
from autopar.schedules.arrivals import arrivals, most_under_way
from autopar.schedules.in_flight import (
    held_at_peak,
    peak_in_flight,
    peak_weighted,
    weight_versions,
)
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import SCHEDULES
from autopar.schedules.simulate import simulate
from autopar.schedules.step import StageLoad, simulate_step
from autopar.schedules.timeline import StageTimes
from autopar.search import make_plan
from autopar.search.pins import parse_pins
from autopar.search.pipelines import (
    FREE,
    HIDES_MESSAGES,
    Pipeline,
    Shares,
    Weights,
    equal_step,
    has_closed_form,
    held_together,
    in_flight,
    least_step,
    messages_under_way,
    stage_share,
)
from autopar.search.setting import Setting
from solvers.partition import BlockOption, PartitionProblem, solve_partition


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


@functools.cache
def captured():
    with torch.device("meta"):
        return capture(Stack(), {key: torch.randn(4, 64) for key in "xy"}).graph


def planned(cluster="local:4", **pins):
    """A plan with these pins, whose price is not asked for."""
    graph = captured()
    setting = Setting(
        name="stack",
        graph=graph,
        chain=find_blocks(graph, min_blocks=8),
        cluster=parse_cluster(cluster),
        global_batch=32,
        training=Training(precision=PRECISIONS["fp32"]),
        pins=parse_pins([(key, str(value)) for key, value in pins.items()], SCHEDULES),
        price_pins=False,
    )
    return make_plan(setting)


def pipelines():
    return list(_pipelines())


def _pipelines():
    for name, row in SCHEDULES.items():
        for chunks in {"one": (1,), "two": (2,), "many": (2, 3)}[row.chunks]:
            for ranks, micro_batches in ((2, 4), (4, 8), (4, 11), (3, 40)):
                yield Pipeline(
                    schedule=name, ranks=ranks, chunks=chunks, micro_batches=micro_batches
                )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_of_every_schedule_adds_up(name):
    chunks = 1 if SCHEDULES[name].chunks == "one" else 2
    plan = planned(pipeline=4, schedule=name, chunks=chunks, micro_batches=8)
    check_plan(plan)
    schedule, row = plan_schedule(plan), SCHEDULES[name]
    assert len(plan.stages) == 4 * chunks
    assert tuple(stage.ranks[0] for stage in plan.stages) == row.placement(4, chunks)
    assert tuple(stage.in_flight for stage in plan.stages) == peak_in_flight(schedule)
    peaks = [ranks_peak_bytes(group) for group in rank_groups(plan.stages)]
    assert plan.prediction.peak_bytes == max(peaks)
    for group in rank_groups(plan.stages):
        terms = [dict(stage.memory_bytes) for stage in group]
        for once in ("communication", "context", "transient"):
            assert sum(bool(t.get(once)) for t in terms) <= 1
        assert sum(bool(t["transient"]) for t in terms) == 1
    versions = [dict(stage.memory_bytes).get("weight_versions", 0) for stage in plan.stages]
    for stage, kept, count in zip(plan.stages, versions, weight_versions(schedule), strict=True):
        assert kept == (count if count > 1 else 0) * dict(stage.memory_bytes)["weights"]
    assert ("changes the optimisation" in " ".join(plan.notes)) is not row.flushes
    shape = f"4 ranks x {chunks} chunks" if chunks > 1 else "4 stages"
    assert f"pipeline parallelism over {shape} (" in plan_table(plan)


@pytest.mark.parametrize("pipeline", pipelines(), ids=str)
def test_what_is_held_is_read_off_the_schedule(pipeline):
    if SCHEDULES[pipeline.schedule].why_not(
        pipeline.ranks, pipeline.chunks, pipeline.micro_batches
    ):
        pytest.skip("the schedule does not take these sizes")
    schedule = pipeline.build()
    assert in_flight(pipeline) == peak_in_flight(schedule)
    if pipeline.flushes:
        lowered = insert_communication(schedule)
        assert messages_under_way(pipeline) == most_under_way(lowered, arrivals(lowered))
    saved = [7 * (stage % 3) + 1 for stage in range(pipeline.num_stages)]
    held = held_at_peak(schedule, saved)
    by_rank = [0] * pipeline.ranks
    for stage, rank in enumerate(pipeline.placement):
        by_rank[rank] += held[stage] * saved[stage]
    assert tuple(by_rank) == peak_weighted(schedule, saved)
    assert all(a <= b for a, b in zip(held_together(pipeline), in_flight(pipeline), strict=True))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_collectives_are_no_faster_where_ranks_leave_cores_to_each_other(name, micro_batches):
    pipeline = Pipeline(schedule=name, ranks=2, chunks=1, micro_batches=micro_batches)
    shares = Shares(0.25, 0.25, forward_waits=0.125, backward_waits=0.25)
    load = StageLoad(
        forward_s=0.25,
        backward_s=0.75,
        backward_weight_s=0.25,
        forward_waits_s=0.125,
        backward_waits_s=0.25,
    )
    step = simulate_step(pipeline.build(), [load, load], slowdown=2.0)
    assert equal_step(pipeline, shares, 2.0) == pytest.approx(step.step_s)
    without = equal_step(pipeline, Shares(0.25, 0.25), 2.0)
    if micro_batches == 1:  # one of both computes, twice as fast
        assert without == pytest.approx(1.0)
        assert equal_step(pipeline, shares, 2.0) == pytest.approx(0.625 + 2 * 0.375)
    assert equal_step(pipeline, shares) == equal_step(pipeline, Shares(0.25, 0.25))


@pytest.mark.parametrize("pipeline", pipelines(), ids=str)
def test_the_objective_is_exact_for_equal_stages(pipeline):
    if SCHEDULES[pipeline.schedule].why_not(
        pipeline.ranks, pipeline.chunks, pipeline.micro_batches
    ):
        pytest.skip("the schedule does not take these sizes")
    stages = pipeline.num_stages
    times = StageTimes(
        forward_s=(0.25,) * stages,
        backward_s=(0.75,) * stages,
        backward_input_s=(0.5,) * stages,
        backward_weight_s=(0.25,) * stages,
    )
    simulated = simulate(insert_communication(pipeline.build()), times).step_s
    step = (
        least_step(pipeline)
        if has_closed_form(pipeline)
        else equal_step(pipeline, Shares(0.25, 0.25))
    )
    assert step == pytest.approx(simulated)
    assert least_step(pipeline) <= simulated * (1 + 1e-12)
    weights = Weights.of(step, pipeline)
    problem = PartitionProblem(
        blocks=(0,) * stages,
        classes=((BlockOption(time_s=1.0, static_bytes=0.0, saved_bytes=0.0),),),
        num_stages=stages,
        in_flight=held_together(pipeline),
        capacity_bytes=(1.0,) * stages,
        num_micro_batches=pipeline.micro_batches,
        sum_weight=weights.sum,
        max_weight=weights.longest,
        stage_share=weights.stage,
        stage_rank=pipeline.placement,
    )
    assert solve_partition(problem, method="dp").objective == pytest.approx(simulated)


def objective_and_step(pipeline: Pipeline, stage_s: list[float], message_s: float = 0.0):
    """The objective of stages of these times, a third of each forwards, and what events take."""
    stages, split = pipeline.num_stages, pipeline.splits_backward
    third = tuple(t / 3 for t in stage_s)
    times = StageTimes(
        forward_s=third,
        backward_s=tuple(2 * t for t in third),
        backward_input_s=third,
        backward_weight_s=third,
        send_forward_s=(message_s,) * (stages - 1),
        send_backward_s=(message_s,) * (stages - 1),
    )
    weights = Weights.of(equal_step(pipeline, Shares(1 / 3, 1 / 3 if split else 0.0)), pipeline)
    problem = PartitionProblem(
        blocks=tuple(range(stages)),
        classes=tuple((BlockOption(time_s=t, static_bytes=0.0, saved_bytes=0.0),) for t in stage_s),
        num_stages=stages,
        in_flight=held_together(pipeline),
        capacity_bytes=(1.0,) * stages,
        num_micro_batches=pipeline.micro_batches,
        boundary_s=(message_s,) * (stages - 1),
        sum_weight=weights.sum,
        max_weight=weights.longest,
        stage_share=weights.stage,
        boundary_in_max=pipeline.schedule not in HIDES_MESSAGES,
        stage_rank=pipeline.placement,
    )
    objective = solve_partition(problem, method="dp").objective
    return objective, simulate(insert_communication(pipeline.build()), times).step_s


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"),
    [
        ("interleaved-1f1b", 4, 2),
        ("interleaved-1f1b", 4, 4),
        ("zbv", 4, 2),
        ("zbv", 8, 2),
        ("dualpipev", 4, 2),
    ],
)
def test_a_rank_is_as_slow_as_all_of_its_stages(schedule, ranks, chunks):
    """A head that takes more, with less beside it or not, and ends that are unlike: by half a stage
    where only the sum of a rank counts, by a tenth where its longest stage does too."""
    pipeline = Pipeline(schedule=schedule, ranks=ranks, chunks=chunks, micro_batches=8 * ranks)
    even = [1.0] * pipeline.num_stages
    more = 0.1 if stage_share(schedule, ranks) else 0.5
    ends = ([0.0, more], [-more, 0.6 * more], [0.5 * more, -0.5 * more])
    for first, last in ([0.0, 0.0], *ends):
        stage_s = [1.0 + first, *even[1:-1], 1.0 + last]
        objective, step_s = objective_and_step(pipeline, stage_s)
        assert objective == pytest.approx(step_s, rel=0.04)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "within"),
    [("interleaved-1f1b", 0.12), ("interleaved-zb", 0.12), ("zbv", 0.05), ("dualpipev", 0.05)],
)
def test_rounds_of_uneven_stages_take_what_is_read_off_the_schedule(schedule, ranks, within):
    """Ranks whose first stages are shorter than their second ones, or the other way around: by the
    sum of a rank alone interleaved ones take up to 40% less than they do."""
    pipeline = Pipeline(schedule=schedule, ranks=ranks, chunks=2, micro_batches=16 * ranks)
    for short in (0.03, 0.25, 0.5, 0.8):
        for stage_s in ([short] * ranks + [1.0] * ranks, [1.0] * ranks + [short] * ranks):
            objective, step_s = objective_and_step(pipeline, stage_s)
            assert objective == pytest.approx(step_s, rel=within)


@pytest.mark.parametrize("ranks", [4, 8])
def test_stages_of_a_block_more_take_about_what_is_read_off_the_schedule(ranks):
    """Stages of two and three blocks, here and there."""
    rng = np.random.default_rng(ranks)
    pipeline = Pipeline(
        schedule="interleaved-1f1b", ranks=ranks, chunks=2, micro_batches=16 * ranks
    )
    for _ in range(8):
        stage_s = [float(t) for t in rng.integers(2, 4, pipeline.num_stages)]
        objective, step_s = objective_and_step(pipeline, stage_s)
        assert objective == pytest.approx(step_s, rel=0.16)


def test_what_ranks_wait_for_stages_is_read_off_the_schedule():
    shares = {p: stage_share("interleaved-1f1b", p) for p in (1, 2, 4, 8, 16)}
    assert shares[1] == 0.0
    for ranks in (4, 8, 16):  # what it finds in its runs
        assert shares[ranks] == pytest.approx(1 - 7 / (3 * ranks), abs=1e-5)
    assert shares[2] == pytest.approx(1 / 3, abs=1e-5)
    assert stage_share("looped-bfs", 4) == pytest.approx(1.0)
    assert all(stage_share(v, p) == 0.0 for v in ("zbv", "dualpipev") for p in (1, 2, 4, 8, 16))


@pytest.mark.parametrize("message_s", [0.0, 0.1, 1.0, 2.0])
def test_messages_that_are_hidden_take_their_links(message_s):
    """A rank sends two messages a micro-batch: those longer than a forward or a backward decide."""
    pipeline = Pipeline(schedule="gpipe", ranks=4, chunks=1, micro_batches=32)
    objective, step_s = objective_and_step(pipeline, [1.0] * 4, message_s)
    assert objective == pytest.approx(step_s, rel=0.05)


def test_a_split_backward_defers_what_the_products_need():
    """Per layer a linear's input and the gradient of its output, for every micro-batch deferred."""
    plan = planned(pipeline=4, data=1, tensor=1, schedule="zb-h1", micro_batches=8)
    schedule, layer_bytes = plan_schedule(plan), 2 * plan.training.micro_batch * 64 * 4
    for stage in plan.stages:
        layers = sum(p.fqn.endswith("weight") for p in stage.parameters)
        saved = [0] * len(plan.stages)
        saved[stage.index] = 1
        time_s, held = dict(stage.time_s), dict(stage.memory_bytes)
        assert 0 < time_s["backward_weight"] < time_s["backward"]
        due, rest = divmod(held["weight_gradients_due"], layers * layer_bytes)
        assert rest == 0 and due + held_at_peak(schedule, saved)[stage.index] >= 1
    assert any(dict(stage.memory_bytes)["weight_gradients_due"] for stage in plan.stages)


@pytest.mark.parametrize(("cluster", "layer_values"), [("local:4", 3), ("4:h100-sxm", 0)])
def test_a_backward_in_two_parts_reads_from_memory_what_a_cache_would_keep(cluster, layer_values):
    """Per layer the gradient of the output is written, and read with the input."""
    pins = {"pipeline": 4, "data": 1, "tensor": 1, "micro_batches": 8}
    whole, parts = (planned(cluster, schedule=name, **pins) for name in ("1f1b", "zb-h1"))
    more_s = sum(
        dict(parts_of.time_s)["backward"] - dict(stage.time_s)["backward"]
        for parts_of, stage in zip(parts.stages, whole.stages, strict=True)
    )
    device = parse_cluster(cluster).groups[0].device
    layer_s = layer_values * 4 * 64 * 4 / device.memory_bandwidth_bytes_s
    assert more_s == pytest.approx(8 * layer_s, abs=1e-12)


def test_less_bubble_is_found_where_micro_batches_are_few():
    """Four micro-batches over four ranks idle three of seven times under 1F1B."""
    free = planned(pipeline=4, micro_batches=4)
    fixed = planned(pipeline=4, micro_batches=4, schedule="1f1b")
    assert (free.schedule, free.chunks) in FREE[1:]
    assert free.prediction.step_s < fixed.prediction.step_s
    assert free.certificate.objective_s < fixed.certificate.objective_s
    assert free.certificate.bound_s <= free.certificate.objective_s


def test_pins_that_no_schedule_can_meet_are_named():
    with pytest.raises(InputError, match="4 pipeline ranks of 16 stages each are more than the"):
        planned(pipeline=4, chunks=16)
    with pytest.raises(InputError, match=r"schedule zbv cannot run over 3 stages per rank"):
        planned(pipeline=2, schedule="zbv", chunks=3)
    with pytest.raises(InputError, match="pipedream updates every stage by itself: with zero=3"):
        planned(pipeline=2, schedule="pipedream", zero=3, data=2)


def node(name, target, *inputs, grad=True, shape=(4, 4)):
    spec = TensorSpec(shape=tuple(map(Size, shape)), dtype="float32")
    return OpNode(name=name, target=target, args=inputs, outputs=(spec,), requires_grad=grad)


def test_products_with_weights_are_split_and_others_are_not():
    w, b, x = Ref("w"), Ref("b"), Ref("x")
    nodes = [
        node("plain", "aten.linear.default", x, w, b),
        node("turned", "aten.t.default", Ref("v")),
        node("through", "aten.matmul.default", Ref("plain"), Ref("turned")),
        node("scores", "aten.matmul.default", Ref("through"), Ref("plain")),
        node("sum", "aten.addmm.default", Ref("scores"), x, Ref("z")),
        node("used", "aten.linear.default", x, Ref("u")),
        node("elsewhere", "aten.mul.Tensor", Ref("u"), x),
    ]
    specs = {Ref(n.name): n.outputs[0] for n in nodes}
    specs |= dict.fromkeys((w, x, Ref("v"), Ref("u"), Ref("z")), nodes[0].outputs[0])
    specs[b] = TensorSpec(shape=(Size(4),), dtype="float32")
    found = split_products(nodes, (w, b, Ref("v"), Ref("u"), Ref("z")), specs)
    # not: a product of two activations, a bias of two dims, a weight that is used otherwise too
    assert {name: product.function for name, product in found.items()} == {
        "plain": "linear",
        "through": "matmul",
    }
