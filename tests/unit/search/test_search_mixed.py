"""Plans for clusters whose devices are not all alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.compiler import Planned, PlanOptions, plan_model
from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import axis_route
from autopar.costs.hardware import GIB
from autopar.costs.memory import reserve_bytes
from autopar.errors import PlanMismatch
from autopar.ir.cluster import Axis, Cluster
from autopar.plan.check import check_plan
from autopar.plan.explain import explain
from autopar.plan.fingerprint import check_cluster
from autopar.plan.pipeline import mesh_text, rank_groups, ranks_peak_bytes
from autopar.plan.plan import Plan
from autopar.plan.serialize import from_json, to_json
from autopar.plan.simulated import simulate_plan


class Stack(nn.Module):
    """Equal linear layers with GELU, and a mean squared error."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return ((x - y) ** 2).mean()


HIDDEN = 4096


def planned(
    cluster: Cluster | str, layers: int = 12, *, all_devices: bool = False, **pins: object
) -> Planned:
    with torch.device("meta"):
        model = Stack(layers, HIDDEN)
        batch = {name: torch.empty(64, HIDDEN) for name in "xy"}
    options = PlanOptions(
        pins=tuple((name, str(value)) for name, value in pins.items()),
        price_pins=False,
        all_devices=all_devices,
    )
    where = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    return plan_model(model, batch, where, options, name="stack")


def layers_of(plan: Plan) -> list[int]:
    return [sum(p.fqn.endswith("weight") for p in stage.parameters) for stage in plan.stages]


def with_memories(memories: list[float]) -> Cluster:
    """Devices of one node that differ in memory alone, in GiB."""
    base = parse_cluster("1:rtx3090")
    group = base.groups[0]
    groups = tuple(
        replace(group, device=replace(group.device, memory_bytes=int(memory * GIB)))
        for memory in memories
    )
    return Cluster(groups=groups, links=(replace(base.links[0], span=len(memories)),), spec="mixed")


def test_a_stage_has_as_many_blocks_as_its_device_is_fast():
    asked = {"pipeline": 2, "micro_batches": 16, "schedule": "1f1b"}
    plan = planned("1:h100-sxm+1:a100-80gb", **asked).plan
    layers = layers_of(plan)
    assert layers[0] > layers[1]
    forward = [dict(stage.time_s)["forward"] for stage in plan.stages]
    assert forward[1] / layers[1] > 1.2 * forward[0] / layers[0]
    alike = planned("2x1:h100-sxm", **asked).plan
    slow = planned("2x1:a100-80gb", **asked).plan
    assert alike.prediction.step_s < plan.prediction.step_s < slow.prediction.step_s


def test_the_step_of_a_mixed_plan_is_the_simulation_of_its_own_stages():
    plan = planned("1:h100-sxm+1:a100-80gb", pipeline=2).plan
    check_plan(plan)
    again = from_json(to_json(plan))
    assert again.cluster == plan.cluster
    assert simulate_plan(again).step_s == pytest.approx(plan.prediction.step_s, rel=1e-6)
    assert plan.certificate.bound_s <= plan.certificate.objective_s


def test_a_stage_over_two_kinds_is_as_slow_as_the_slowest():
    mixed = planned("2:h100-sxm+2:a100-80gb", data=4, pipeline=1).plan
    slow = planned("2x2:a100-80gb", data=4, pipeline=1).plan
    forward = [dict(plan.stages[0].time_s)["forward"] for plan in (mixed, slow)]
    assert forward[0] == pytest.approx(forward[1])


def test_a_group_reaches_itself_by_its_own_links():
    cluster = parse_cluster("4:h100-sxm+4:a100-80gb")
    (h100,), (a100,) = (group.links for group in cluster.groups)
    assert cluster.link((0, 3)) == h100
    assert cluster.link((4, 7)) == a100
    assert cluster.link((3, 4)).name == "network"
    assert axis_route(Axis(name="data", size=4, stride=1), cluster).flat.link == h100
    assert axis_route(Axis(name="data", size=4, stride=1), cluster, 4).flat.link == a100
    assert axis_route(Axis(name="data", size=2, stride=4), cluster).neighbour.name == "network"


def test_messages_between_islands_alone_take_the_slow_link():
    plan = planned("2x1:h100-sxm+2x1:h100-sxm@network=10", pipeline=4).plan
    group = plan.cluster.groups[0]
    links = tuple(replace(link, bandwidth_bytes_s=1e9) for link in plan.cluster.links)
    fast = tuple(replace(link, bandwidth_bytes_s=50e9) for link in group.links)
    islands = replace(plan.cluster, groups=(replace(group, links=fast),) * 2, links=links)
    sends = [dict(s.time_s)["send_forward"] for s in planned(islands, pipeline=4).plan.stages]
    assert sends[0] == sends[2] < sends[1] / 4


def test_no_device_holds_more_than_it_has_units():
    """Memory of [24, 24, 24, 12] units and eight blocks of four units of state: C13."""
    state = 16 * (HIDDEN * HIDDEN + HIDDEN)  # weights, gradients and two moments in float32
    unit = state / 4
    reserve = reserve_bytes(parse_cluster("1:rtx3090").device(0), 4)
    memories = [(units * unit + 1.1 * reserve) / GIB for units in (24, 24, 24, 12)]
    plan = planned(with_memories(memories), layers=8, pipeline=4, micro_batches=8).plan
    assert sum(layers_of(plan)) == 8
    assert layers_of(plan)[3] <= 3
    assert_within_limits(plan)


@pytest.mark.parametrize("memories", [[24.0, 2.6], [2.6, 24.0]])
def test_a_small_device_has_fewer_layers_than_its_time_would_allow(memories):
    pins = {"pipeline": 2, "micro_batches": 8, "schedule": "1f1b"}
    plan = planned(with_memories(memories), layers=12, all_devices=True, **pins).plan
    layers = dict(zip(memories, layers_of(plan), strict=True))
    assert 3 * layers[2.6] <= layers[24.0]
    assert_within_limits(plan)


def assert_within_limits(plan: Plan) -> None:
    for stages in rank_groups(plan.stages):
        for rank in stages[0].ranks:
            assert ranks_peak_bytes(stages) <= plan.cluster.device(rank).memory_bytes * (1 + 1e-6)
            assert stages[0].memory_limit_bytes <= plan.cluster.device(rank).memory_bytes


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.integers(min_value=30, max_value=80), min_size=3, max_size=4))
def test_memory_is_never_above_a_device_s_own(tenths):
    plan = planned(with_memories([t / 10 for t in tenths]), layers=6, micro_batches=4).plan
    assert_within_limits(plan)


def test_the_plan_says_which_devices_run_what():
    text = explain(planned("1:h100-sxm+1:a100-80gb", all_devices=True, pipeline=2).plan)
    assert "Which devices run what" in text
    assert "rank 0 on h100-sxm of 80 GiB" in text
    assert "rank 1 on a100-80gb of 80 GiB" in text
    alike = explain(planned("2x1:h100-sxm", pipeline=2).plan)
    assert "Which devices run what" not in alike


def test_devices_that_only_slow_things_down_are_left_out():
    plan = planned("4:h100-sxm+1:a100-80gb@network=1", micro_batches=1).plan
    assert plan.num_devices == plan.cluster.num_devices < 5
    (left,) = (each for each in plan.left_out if each.device == "a100-80gb")
    assert left.devices == (4,)
    assert left.step_s is not None
    assert left.step_s > plan.prediction.step_s
    again = from_json(to_json(plan))
    assert again.devices == plan.devices
    assert again.left_out[0].step_s == pytest.approx(left.step_s)
    assert "left out: 1 x a100-80gb, device 4: with all devices" in explain(plan)
    check_cluster(plan, plan.cluster)
    check_cluster(plan, parse_cluster("4:h100-sxm+1:a100-80gb@network=1"))
    with pytest.raises(PlanMismatch, match="number of devices"):
        check_cluster(plan, parse_cluster("8:h100-sxm"))


def test_all_devices_are_used_where_that_is_asked_for():
    cluster = "4:h100-sxm+1:a100-80gb@network=1"
    assert planned(cluster, all_devices=True).plan.num_devices == 5


@pytest.mark.parametrize("count", [3, 5, 7])
def test_any_number_of_devices_has_a_plan(count):
    plan = planned(f"{count}:h100-sxm").plan
    assert plan.num_devices + sum(len(left.devices) for left in plan.left_out) == count
    assert planned(f"{count}:h100-sxm", pipeline=count, all_devices=True).plan.pipeline == count


def test_each_group_may_have_a_mesh_of_its_own_without_being_asked():
    cluster = "2:a100-80gb+1:v100-32gb"
    free, alike = planned(cluster).plan, planned(cluster, meshes="alike").plan
    assert free.prediction.step_s < 0.97 * alike.prediction.step_s
    assert (free.devices, free.pins) == ((2, 0, 1), ())
    assert mesh_text(free) == "data 1 x tensor 1 (stage 1: data 1 x tensor 2)"
    assert alike.num_devices == 2
    assert "a data x tensor mesh of its own" in free.certificate.space
    assert "mesh of its own" not in alike.certificate.space
    again = planned(cluster, pipeline=2, data=1).plan
    assert again.prediction.step_s == free.prediction.step_s
    assert all(pin.key != "meshes" for pin in again.pins)


def test_the_group_that_a_pipeline_begins_with_is_searched():
    given = planned("1:h100-sxm+1:a100-80gb", all_devices=True, pipeline=2).plan
    free = planned("1:h100-sxm+1:a100-80gb", pipeline=2).plan
    turned = planned("1:a100-80gb+1:h100-sxm", all_devices=True, pipeline=2).plan
    assert free.prediction.step_s == turned.prediction.step_s < given.prediction.step_s
    assert (free.devices, free.left_out) == ((1, 0), ())
    assert given.devices == ()
    assert "ranks are devices 1, 0 of the cluster that was asked for" in explain(free)
