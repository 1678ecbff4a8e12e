"""What ZeRO costs and saves, and when the search chooses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture import capture, find_blocks
from autopar.compiler import PlanOptions, load_source, plan_model, plan_source
from autopar.costs.clusters import parse_cluster
from autopar.costs.compute import memory_s
from autopar.costs.execution import Execution
from autopar.costs.memory import Training
from autopar.costs.optimizer_state import optimizer_op
from autopar.costs.profiles import Machine, OpRecord, Profile, Timing
from autopar.errors import InfeasiblePlan, InputError
from autopar.ir.collective import CollectiveOp
from autopar.ir.mesh import stage_mesh
from autopar.ir.precision import PRECISIONS
from autopar.plan.techniques import techniques
from autopar.search.options import class_options, undominated
from autopar.search.pins import parse_pins
from autopar.search.pricer import Grid, Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.setting import Setting
from autopar.search.state import (
    UNSPLIT,
    ZeroChoice,
    least_state_bytes,
    parameter_states,
    shared_choices,
    state_cost,
    zero_choices,
)

LAYERS, HIDDEN = 4, 1024
WEIGHTS = LAYERS * HIDDEN * HIDDEN
AG, AR, RS = CollectiveOp.ALL_GATHER, CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER
GPUS = "2x4:a100-80gb"


class Stack(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(LAYERS))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        batch = {"x": torch.empty(4, HIDDEN), "y": torch.empty(4, HIDDEN)}
        graph = capture(Stack(), batch).graph
    return graph, find_blocks(graph)


@pytest.fixture
def pricer(captured):
    graph, chain = captured

    def make(cluster=GPUS, pins=(), precision="fp32"):
        return Pricer(
            Setting(
                name="stack",
                graph=graph,
                chain=chain,
                cluster=parse_cluster(cluster),
                global_batch=64,
                training=Training(precision=PRECISIONS[precision], optimizer="adam"),
                pins=parse_pins([tuple(p.split("=")) for p in pins], ()),
            )
        )

    return make


def grid(data=8, shard=1, tensor=1, micro_batches=1):
    mesh = stage_mesh(data=data, shard=shard, context=1, tensor=tensor, sequence=False)
    return Grid(pipeline=1, mesh=mesh, micro_batch=1, micro_batches=micro_batches, schedule="1f1b")


def cost(pricer, on, choice):
    """State of the first block that has a weight."""
    block = next(b for b in pricer.setting.chain.blocks if b.parameters)
    option = class_options(ShardingProblems(pricer), on, block.class_index, {})[0]
    layouts = [(name, state.layout) for name, state in option.states]
    states = parameter_states(pricer.setting, block, layouts, pricer.prices(on), choice, UNSPLIT)
    return state_cost(pricer, block, states, on)


def test_choices_are_levels_over_all_batch_axes_and_over_the_inner_one(pricer):
    found = zero_choices(pricer().prices(grid(data=2, shard=4)), None)
    both, inner = ("data", "shard"), ("shard",)
    assert found == (
        UNSPLIT,
        *(ZeroChoice(level=level, over=over) for level in (1, 2, 3) for over in (both, inner)),
    )
    assert shared_choices(found) == (ZeroChoice(level=1, over=both), UNSPLIT)
    assert zero_choices(pricer().prices(grid(data=1, tensor=8)), None) == (UNSPLIT,)
    pinned = zero_choices(pricer().prices(grid()), 3)
    assert pinned == (ZeroChoice(level=3, over=("data",)),)
    assert shared_choices(pinned) == (ZeroChoice(level=1, over=("data",)),)


def test_collectives_of_each_level_are_priced(pricer):
    """Gradients of all layers are summed in one bucket, weights that lie in shards one by one."""
    found, on = pricer(), grid()
    nbytes = 4 * HIDDEN * HIDDEN

    def seconds(op, parts=1):
        return found.prices(on).collective(op, parts * nbytes, "data") / parts

    costs = [cost(found, on, ZeroChoice(level=k, over=("data",) if k else ())) for k in range(4)]
    assert costs[0].sync_s == seconds(AR, LAYERS) < seconds(AR)
    assert costs[1].sync_s == costs[2].sync_s == seconds(RS, LAYERS) + seconds(AG, LAYERS)
    assert costs[3].sync_s == seconds(RS)
    assert [c.gather_s for c in costs] == [0, 0, 0, seconds(AG)]
    assert [c.optimizer_s / costs[0].optimizer_s for c in costs] == [1, 1 / 8, 1 / 8, 1 / 8]
    assert [c.gathered_bytes for c in costs] == [0, 0, 0, nbytes]
    assert [c.unreduced_bytes for c in costs] == [0, 0, nbytes, nbytes]


@pytest.mark.parametrize("data", [8, 4])
def test_a_bucket_is_no_fuller_than_a_stage_fills_it(pricer, data):
    found, on = pricer(), replace(grid(data=data), pipeline=8 // data)
    stages = 8 // data
    summed = found.prices(on).collective(AR, 4 * WEIGHTS / stages, "data") / (LAYERS / stages)
    assert cost(found, on, UNSPLIT).sync_s == pytest.approx(summed)


def test_the_optimizer_takes_what_was_measured(pricer):
    found, on = pricer(), grid()
    op = optimizer_op("adam", {}, HIDDEN * HIDDEN, "float32")
    record = OpRecord.of(op, Timing(median_s=0.25, spread_s=0.0, count=9))
    machine = Machine(device="A100", row="a100-80gb", kind="cuda", driver="", torch="2.13")
    profile = Profile(machine=machine, ops={op.key: record}, slowdown=2.0)
    measured = Pricer(replace(found.setting, profile=profile))
    assert cost(measured, on, UNSPLIT).optimizer_s == 0.5
    other = replace(profile, machine=replace(machine, row="h100-sxm"))
    foreign = Pricer(replace(found.setting, profile=other))
    assert cost(foreign, on, UNSPLIT) == cost(found, on, UNSPLIT)


def test_adding_up_gradients_takes_a_pass_over_them_for_each_micro_batch_but_the_first(pricer):
    found = pricer()
    seconds = [cost(found, grid(micro_batches=count), UNSPLIT).sum_s for count in (1, 2, 4)]
    nbytes = 3 * 4 * HIDDEN * HIDDEN
    whole_s = memory_s(nbytes, found.device, kernels=0)
    assert seconds == pytest.approx([0.0, whole_s / 2, 3 * whole_s / 4])
    fused = replace(found.setting, execution=Execution(fuses_accumulation=True))
    assert cost(Pricer(fused), grid(micro_batches=4), UNSPLIT).sum_s == 0.0


def test_hybrid_sharding_reduces_the_shard_over_the_copies(pricer):
    found, on = pricer(), grid(data=2, shard=4)
    nbytes, prices = 4 * HIDDEN * HIDDEN, found.prices(on)
    inner = cost(found, on, ZeroChoice(level=3, over=("shard",)))
    scatter = prices.collective(RS, nbytes, "shard")
    assert inner.sync_s == scatter + prices.collective(AR, nbytes / 4, "data")
    assert inner.gather_s == prices.collective(AG, nbytes, "shard")
    whole = cost(found, on, ZeroChoice(level=3, over=("data", "shard")))
    flat = cost(found, grid(), ZeroChoice(level=3, over=("data",)))
    assert whole == flat  # eight ranks in either order of naming


def test_gradients_accumulate_whole_over_micro_batches(pricer):
    found, over = pricer(precision="bf16"), ("data",)
    once = cost(found, grid(), ZeroChoice(level=2, over=over))
    often = cost(found, grid(micro_batches=4), ZeroChoice(level=2, over=over))
    assert often.held.gradients == 8 * once.held.gradients
    assert often.unreduced_bytes == 0


def test_gathering_adds_what_does_not_hide_behind_compute(pricer):
    """The first of four layers waits for its own weights: a quarter of what could hide does not."""
    found = pricer(pins=["zero=3", "recompute=none"])
    block = next(b for b in found.setting.chain.blocks if b.parameters)
    (option,) = class_options(ShardingProblems(found), grid(), block.class_index, {})
    run, gather = option.cost, option.state.gather_s
    assert option.overlaps
    assert option.cold == 1 / LAYERS
    warm = replace(option, cold=0.0, hidden=1.0)
    slow = replace(run, forward_compute_s=gather / 4)
    assert replace(warm, cost=slow).forward_s == run.forward_s + gather * 3 / 4
    assert replace(warm, cost=slow, overlaps=False).forward_s == run.forward_s + gather
    fast = replace(run, forward_compute_s=2 * gather)
    assert replace(warm, cost=fast).forward_s == run.forward_s
    assert replace(warm, cost=fast, hidden=0.9).forward_s == pytest.approx(
        run.forward_s + 0.1 * gather
    )
    exposed = replace(option, cost=fast, hidden=1.0).forward_s - run.forward_s
    assert exposed == pytest.approx(gather / 4)


@pytest.mark.parametrize(("level", "early"), [(0, False), (1, False), (2, True), (3, True)])
def test_gradients_of_levels_2_and_3_are_summed_beside_the_last_backward(pricer, level, early):
    found = pricer(pins=[f"zero={level}", "recompute=none"])
    block = next(b for b in found.setting.chain.blocks if b.parameters)
    option = class_options(ShardingProblems(found), grid(), block.class_index, {})[0]
    option = replace(option, cold=0.0, hidden=1.0)
    state, again_s = option.state, option.state.gather_again_s(option.again.weights)
    together = LAYERS if level == 2 else 1
    summed = found.prices(grid()).collective(RS, together * 4 * HIDDEN * HIDDEN, "data") / together
    assert state.early_s == (summed if early else 0.0)
    run = replace(option.cost, backward_compute_s=again_s + summed / 4)
    hidden = summed / 4 if early else 0.0
    assert replace(option, cost=run).sync_s == pytest.approx(state.sync_s - hidden)
    assert replace(option, cost=run, overlaps=False).sync_s == pytest.approx(state.sync_s)


def test_gradients_are_sent_in_the_dtype_that_they_are_added_up_in(pricer):
    found = pricer()
    wide = replace(found.setting.training.precision, grad_dtype="float64")
    twice = Pricer(replace(found.setting, training=replace(found.setting.training, precision=wide)))
    choice = ZeroChoice(level=1, over=("data",))
    scatter, gather = (
        found.prices(grid()).collective(op, 4 * WEIGHTS, "data") / LAYERS for op in (RS, AG)
    )
    assert cost(found, grid(), choice).sync_s == scatter + gather
    more = found.prices(grid()).collective(RS, 8 * WEIGHTS, "data") / LAYERS
    assert cost(twice, grid(), choice).sync_s == more + gather


def test_on_a_cpu_nothing_hides(pricer):
    found = pricer("local:8", pins=["zero=3", "recompute=none"])
    block = next(b for b in found.setting.chain.blocks if b.parameters)
    (option,) = class_options(ShardingProblems(found), grid(), block.class_index, {})
    assert option.forward_s == option.cost.forward_s + option.state.gather_s


def test_undominated_options_are_those_that_no_other_beats(pricer):
    """With several micro-batches level 2 holds what level 1 does, and sums gradients during the
    last backward."""
    on = grid(micro_batches=4)
    block = next(b for b in pricer().setting.chain.blocks if b.parameters)
    every = [
        option
        for level in range(4)
        for option in class_options(
            ShardingProblems(pricer(pins=[f"zero={level}"])), on, block.class_index, {}
        )
    ]

    def beats(a, b):
        fields = ("time_s", "sync_s", "static_bytes", "saved_bytes", "transient_bytes")
        pairs = [(getattr(a.as_option(), f), getattr(b.as_option(), f)) for f in fields]
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    best = [o for o in every if not any(beats(other, o) for other in every)]
    kept = undominated(every)
    assert {o.as_option() for o in kept} == {o.as_option() for o in best}
    assert len({o.as_option() for o in kept}) == len(kept) < len(every)
    assert {o.zero for o in kept} == {0, 2, 3}
    assert {o.as_option() for o in undominated(every[::-1])} == {o.as_option() for o in best}


@pytest.mark.parametrize(
    ("pins", "each"),
    [(["zero=0"], 16), (["zero=1"], 8 + 12 / 8), ([], 16 / 8), (["zero=3"], 16 / 8)],
)
def test_the_least_state_knows_that_zero_divides_it(pricer, pins, each):
    assert least_state_bytes(pricer(pins=pins), grid()) == each * WEIGHTS
    split = pricer(pins=["zero=3"])
    assert least_state_bytes(split, grid(micro_batches=2)) == (4 + 12 / 8) * WEIGHTS
    assert least_state_bytes(split, grid(data=2, tensor=4)) == 16 / 8 * WEIGHTS


def plan(cluster="local:4", memory=None, **pins):
    """Of a model with more gradients than a bucket holds."""
    with torch.device("meta"):
        model = Stack(4 * HIDDEN)
        batch = {key: torch.empty(4, 4 * HIDDEN) for key in "xy"}
    options = PlanOptions(
        global_batch=16,
        optimizer="adam",
        pins=tuple((k, str(v)) for k, v in pins.items()),
        memory_limit_bytes=memory,
    )
    return plan_model(model, batch, cluster, options).plan


def test_memory_falls_from_level_to_level():
    peaks = [plan(data=4, zero=level, micro_batches=1).prediction.peak_bytes for level in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_zero_is_chosen_where_nothing_else_fits():
    whole = plan(data=4, zero=0).prediction.peak_bytes
    room = int(whole * 0.6)
    with pytest.raises(InfeasiblePlan):
        plan(data=4, zero=0, memory=room)
    found = plan(data=4, memory=room)
    assert found.prediction.peak_bytes <= room
    assert any(block.zero for stage in found.stages for block in stage.blocks)


def test_a_level_without_data_parallel_ranks_is_refused():
    with pytest.raises(InputError, match="zero=2 splits state over data-parallel ranks"):
        plan(data=1, zero=2)


@pytest.mark.slow
def test_llama_7b_on_eight_gpus_needs_no_tensor_parallelism():
    """State of 16 bytes a parameter (108 GB) does not fit 80 GB; sharded it does, and leaves room
    for the activations of the fastest micro-batch."""
    options = PlanOptions(global_batch=64, precision="bf16", optimizer="adamw")
    found = plan_source(load_source("llama2_7b"), "8:a100-80gb", options).plan
    assert (found.pipeline, found.axis("data"), found.axis("tensor")) == (1, 8, 1)
    assert any(line.startswith("ZeRO-") for line in techniques(found))
    levels = {block.zero for stage in found.stages for block in stage.blocks}
    assert 0 not in levels
