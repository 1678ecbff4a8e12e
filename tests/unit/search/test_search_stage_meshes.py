"""Stages with meshes of their own: what pins offer, what is written, priced and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.compiler import PlanOptions, load_source, plan_source, source_setting
from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import ClusterCollectives
from autopar.errors import InputError, PlanMismatch
from autopar.ir.mesh import stage_mesh
from autopar.plan.check import check_plan, plan_problems
from autopar.plan.serialize import from_json, to_json
from autopar.plan.simulated import simulate_plan, stage_loads
from autopar.plan.table import grid_text
from autopar.search.grid import Grid
from autopar.search.handovers import message_s
from autopar.search.home import Places
from autopar.search.keep import kept_pins
from autopar.search.pricer import Pricer

PINNED = "pipeline=2 micro_batches=2 schedule=1f1b"
MIXED = f"{PINNED} data=2 tensor=1 stage1.tensor=2 sequence=off"


def plan(pins, devices="local:4", model="llama_tiny", samples=8):
    pairs = tuple(tuple(pin.split("=")) for pin in pins.split())
    options = PlanOptions(global_batch=samples, pins=pairs, price_pins=False)
    return plan_source(load_source(model, seq_len=16), devices, options).plan


def sizes(found):
    return [tuple(axis.size for axis in found.mesh(stage)) for stage in found.stages]


@pytest.fixture(scope="module")
def mixed():
    return plan(MIXED)


def test_a_stage_has_the_mesh_that_is_pinned_and_the_others_theirs(mixed):
    assert mixed.axis_names == ("data", "tensor")
    assert sizes(mixed) == [(2, 1), (1, 2)]
    assert [stage.ranks for stage in mixed.stages] == [(0, 1), (2, 3)]
    assert [stage.sizes for stage in mixed.stages] == [(), (1, 2)]
    assert "data 2 x tensor 1 (stage 1: data 1 x tensor 2)" in grid_text(mixed)


def test_only_the_stage_with_tensor_ranks_splits_its_weights(mixed):
    split = [any("S(" in str(p.layout[1]) for p in s.parameters) for s in mixed.stages]
    assert split == [False, True]


def test_the_plan_reads_as_it_was_written_and_is_the_same_again(mixed):
    text = to_json(mixed)
    assert to_json(from_json(text)) == text
    assert to_json(plan(MIXED)) == text


def test_the_step_that_is_told_is_that_of_the_stages(mixed):
    assert simulate_plan(mixed).step_s == pytest.approx(mixed.prediction.step_s, rel=1e-6)


def test_a_rank_sends_in_parts_what_ranks_elsewhere_hold(mixed):
    sends = [
        sorted((i.phase, i.nbytes, i.count) for i in stage.collectives if i.op == "send_recv")
        for stage in mixed.stages
    ]
    # two samples of 16 x 64 floats on each data rank, for both tensor ranks; their gradients back
    # in as many parts, of which every tensor rank sends one
    (forward, nbytes, count), (backward, back, times) = sends[0][0], sends[1][0]
    assert (forward, backward) == ("forward", "backward")
    assert (nbytes, count, times) == (back, 4, 2)


def test_own_meshes_are_searched_and_not_all_alike():
    found = plan(f"{PINNED} sequence=off meshes=own")
    assert len(set(sizes(found))) > 1
    assert "other data and tensor degrees each" in found.certificate.space
    assert found.certificate.grids == 2  # data or tensor on either rank: all but the two alike
    assert "each" not in plan(f"{PINNED} data=2 tensor=1").certificate.space


def test_groups_of_a_cluster_have_as_many_ranks_as_they_are_laid_out_in():
    found = plan("micro_batches=2 schedule=1f1b meshes=own", "1x2:h100-sxm+1x1:a100-80gb")
    groups = [{found.cluster.device(rank).name for rank in stage.ranks} for stage in found.stages]
    assert all(len(names) == 1 for names in groups)
    assert len({stage.ranks for stage in found.stages}) == len(found.stages)
    assert found.num_devices == 3


def test_stages_of_other_sizes_are_priced_by_the_links_that_they_are_on():
    """The middle one of 2, 4 and 2 devices lies on two nodes of four."""
    cluster = parse_cluster("2x4:h100-sxm")
    own = ((2, 1), (4, 1), (2, 1))
    grid = Grid(
        pipeline=3,
        mesh=stage_mesh(data=4),
        micro_batch=1,
        micro_batches=2,
        schedule="1f1b",
        own=own,
    )
    places = Places(cluster=cluster)
    assert [grid.ranks(place) for place in range(3)] == [range(2), range(2, 6), range(6, 8)]
    slow = [
        ClusterCollectives(home.links, grid.at(place).axes(), home.first)
        .routes("data")[0]
        .flat.link.span
        for place, home in enumerate(places.homes(grid))
    ]
    assert slow == [4, 8, 4]


def test_the_decisions_of_a_plan_are_kept_as_pins(mixed):
    kept = kept_pins(mixed)
    assert {("stage1.data", "1"), ("stage1.tensor", "2"), ("data", "2")} <= set(kept.pins)
    options = PlanOptions(global_batch=8, pins=kept.pins, price_pins=False)
    again = plan_source(load_source("llama_tiny", seq_len=16), "local:4", options).plan
    assert sizes(again) == sizes(mixed)


def test_stages_may_have_other_numbers_of_devices():
    found = plan(f"{PINNED} stage0.devices=2 stage0.tensor=2 stage1.devices=1", devices="local:3")
    assert sizes(found) == [(1, 2), (1, 1)]
    assert [stage.ranks for stage in found.stages] == [(0, 1), (2,)]
    check_plan(found)


def test_a_rank_sees_its_own_mesh_and_its_share_of_the_samples():
    grid = Grid(
        pipeline=3,
        mesh=stage_mesh(data=4),
        micro_batch=2,
        micro_batches=2,
        schedule="1f1b",
        own=((4, 1), (2, 2), (3, 1)),
    )
    assert [grid.at(place).sizes for place in range(3)] == list(grid.own)
    # eight samples over 4, 2 and 3 ranks: of these the first has three
    assert [grid.at(place).micro_batch for place in range(3)] == [2, 4, 3]
    assert not any(grid.at(place).own for place in range(3))


def test_sums_share_the_links_of_messages_where_a_stage_splits_samples(mixed):
    loads = stage_loads(mixed.stages, mixed.axes, mixed.cluster)
    assert [load.shares_links for load in loads] == [True, False]


def test_a_handover_takes_what_the_busiest_rank_takes(mixed):
    options = PlanOptions(global_batch=8, pins=(("pipeline", "2"),))
    pricer = Pricer(source_setting(load_source("llama_tiny", seq_len=16), "local:4", options))
    nbytes = 2 * 16 * 64 * 4  # of two samples: what a data rank has of the one value that crosses
    forward_s, backward_s = (
        dict(mixed.stages[at].time_s)[name]
        for at, name in ((0, "send_forward"), (1, "send_backward"))
    )
    # a data rank sends all that it has to both tensor ranks; of those each sends back one half
    assert forward_s == pytest.approx(2 * message_s(pricer, 0, 2, nbytes))
    assert backward_s == pytest.approx(message_s(pricer, 0, 2, nbytes))


def test_blocks_of_one_class_run_one_source_for_each_mesh():
    pins = f"{PINNED} stage0.devices=1 stage1.devices=2 stage1.data=2 recompute=none zero=0"
    found = plan(pins, devices="local:3")
    used = [{block.variant for block in stage.blocks} for stage in found.stages]
    assert not used[0] & used[1]
    kinds = {variant.name: variant.class_index for variant in found.variants}
    assert {kinds[name] for name in used[0]} & {kinds[name] for name in used[1]}


@pytest.mark.parametrize(
    ("pins", "devices", "message"),
    [
        ("pipeline=2 stage2.tensor=2", "local:4", "has ranks 0 to 1, and no stage2"),
        ("pipeline=2 stage1.tensor=3", "local:4", "stage1 has 2 devices, which data free x"),
        ("pipeline=2 stage0.devices=4", "local:4", "cannot be shared by 2 ranks"),
        ("stage1.context=2", "local:4", "unknown pin 'stage1.context'"),
        ("stage1.tensor=0", "local:4", "expected a whole number of at least 1"),
        ("meshes=alike stage1.tensor=2 pipeline=2 tensor=1", "local:4", "no grid of 4 devices"),
        ("meshes=own pipeline=4", "local:4", "at least two ranks"),
        ("meshes=own pipeline=4 micro_batches=2", "local:64", "more than 400 ways"),
    ],
)
def test_pins_that_cannot_be_met_say_why(pins, devices, message):
    with pytest.raises(InputError, match=message):
        plan(pins, devices=devices)


def _stage(found, index, **changes):
    stages = list(found.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(found, stages=tuple(stages))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (2,)}, "stage 1: sizes: expected 2, one per mesh axis, found 1"),
        ({"sizes": (1, 4)}, "stage 1: expected 4 ranks (data 1 x tensor 4), found 2"),
        ({"sizes": (0, 2)}, "stage 1: data: expected at least 1, found 0"),
    ],
)
def test_a_mesh_that_does_not_fit_its_stage_is_named(mixed, change, message):
    assert message in plan_problems(_stage(mixed, 1, **change))


def test_a_variant_runs_on_one_mesh(mixed):
    shared = mixed.stages[0].blocks[-1].variant
    first, *rest = mixed.stages[1].blocks
    changed = _stage(mixed, 1, blocks=(replace(first, variant=shared), *rest))
    with pytest.raises(PlanMismatch, match="runs on stages 0 and 1, whose meshes differ"):
        check_plan(changed)


def test_a_sequence_is_not_cut_anew_between_stages():
    found = plan("pipeline=2 context=2 tensor=1 data=1 micro_batches=2 schedule=1f1b")
    problems = plan_problems(_stage(found, 1, sizes=(2, 1, 1)))
    assert any("context 1: expected 2, as on the other stages" in line for line in problems)
