"""ZeRO in generated source and in the collectives of a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.compiler import PlanOptions, plan_model
from autopar.ir.collective import CollectiveOp
from autopar.ir.placement import R_STAR, R, Shard
from autopar.plan.techniques import techniques

AG, AR, RS = CollectiveOp.ALL_GATHER, CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER
HIDDEN, LAYERS = 8, 3
WEIGHT, BIAS = 4 * HIDDEN * HIDDEN, 4 * HIDDEN


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()


class Adapted(nn.Module):
    """A frozen linear with trained low-rank adapters."""

    def __init__(self, hidden=64, rank=8):
        super().__init__()
        self.base = nn.Linear(hidden, hidden, bias=False).requires_grad_(False)
        self.a = nn.Linear(hidden, rank, bias=False)
        self.b = nn.Linear(rank, hidden, bias=False)

    def forward(self, x, y):
        return ((self.base(x) + self.b(self.a(x)) - y) ** 2).mean()


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def plan(build, cluster="local:4", hidden=HIDDEN, tokens=False, **pins):
    with torch.device("meta"):
        model = build()
        if tokens:
            ids = torch.empty(4, 6, dtype=torch.long)
            example = {"ids": ids, "labels": ids.clone()}
        else:
            example = {"x": torch.empty(4, hidden), "y": torch.empty(4, hidden)}
    options = PlanOptions(
        global_batch=16, optimizer="adam", pins=tuple((k, str(v)) for k, v in pins.items())
    )
    return plan_model(model, example, cluster, options)


def moved(planned, axis="data"):
    """(op, phase) -> (count, bytes in all) over an axis."""
    found = {}
    for item in planned.plan.collectives:
        if item.axes == (axis,):
            count, total = found.get((item.op, item.phase), (0, 0))
            found[item.op, item.phase] = (count + item.count, total + item.count * item.nbytes)
    return found


def parameters(planned):
    return {p.fqn: p for stage in planned.plan.stages for p in stage.parameters}


ALL = LAYERS * (WEIGHT + BIAS)


@pytest.mark.parametrize("level", [1, 2])
def test_levels_1_and_2_scatter_gradients_and_gather_weights_once_a_step(level):
    """Case 12 of Alpa's tests: reduce-scatter and all-gather, no all-reduce, state sharded."""
    planned = plan(Stack, zero=level, data=4, micro_batches=2)
    assert moved(planned) == {(RS, "sync"): (1, ALL), (AG, "update"): (1, ALL)}
    assert all(p.zero == level and p.stored == (Shard(0), R) for p in parameters(planned).values())
    terms = dict(planned.plan.stages[0].memory_bytes)
    assert (terms["weights"], terms["gradients"]) == (ALL, ALL)
    assert terms["optimizer"] == 2 * ALL / 4


def test_level_3_gathers_in_both_passes_and_reduces_once():
    """Case 12 of Alpa's tests: no all-reduce, two all-gathers and one reduce-scatter a weight.

    The backward of a linear does not read its bias.
    """
    planned = plan(Stack, zero=3, data=4, recompute="none", micro_batches=1)
    assert moved(planned) == {
        (AG, "forward"): (2 * LAYERS, ALL),
        (AG, "backward"): (LAYERS - 1, (LAYERS - 1) * WEIGHT),  # the input has no gradient
        (RS, "sync"): (2 * LAYERS, ALL),
    }
    assert all(p.zero == 3 and p.stored == (Shard(0), R) for p in parameters(planned).values())
    terms = dict(planned.plan.stages[0].memory_bytes)
    assert (terms["weights"], terms["gradients"], terms["optimizer"]) == (ALL / 4, ALL / 4, ALL / 2)


def test_level_3_gathers_for_every_micro_batch_and_again_where_a_forward_is_run_again():
    planned = plan(Stack, zero=3, data=4, recompute="all", micro_batches=4)
    assert moved(planned) == {
        (AG, "forward"): (4 * 2 * LAYERS, 4 * ALL),
        (AG, "backward"): (4 * 2 * LAYERS, 4 * ALL),  # biases too: linears that run again add them
        (RS, "sync"): (2 * LAYERS, ALL),
    }


@pytest.mark.parametrize("level", [2, 3])
def test_a_pipeline_reduces_gradients_once_a_step(level):
    """Case of DeepSpeed#823 and #1629: gradients of four micro-batches accumulate whole, and are
    reduced once."""
    planned = plan(Stack, zero=level, pipeline=2, data=2, schedule="1f1b", micro_batches=4)
    scattered = {k: v for k, v in moved(planned).items() if k[0] is not AG}
    assert list(scattered) == [(RS, "sync")]
    assert scattered[RS, "sync"][1] == ALL
    for stage in planned.plan.stages:
        sizes = [4 * torch.Size(p.shape).numel() for p in stage.parameters]
        terms = dict(stage.memory_bytes)
        assert terms["gradients"] == sum(sizes)
        assert terms["optimizer"] == sum(sizes)
        # the last backward sends one gradient at a time: half of a weight in place of a whole sum
        kept = max(sizes) / 2 if level == 3 else 0
        assert terms.get("unreduced", 0) == kept


def test_state_is_split_by_a_dim_that_tensor_parallelism_leaves():
    planned = plan(Stack, zero=1, data=2, tensor=2)
    for parameter in parameters(planned).values():
        split = {p.dim for p in parameter.layout if isinstance(p, Shard)}
        free = set(range(len(parameter.shape))) - split
        assert parameter.zero == (1 if free else 0)
        if free:
            assert parameter.stored == (Shard(min(free)), parameter.layout[1])


@pytest.mark.parametrize(("level", "frozen"), [(1, 0), (2, 0), (3, 3)])
def test_frozen_weights_have_nothing_but_weights_to_split(level, frozen):
    """Case of pytorch#104690: gradients and Adam state for the adapters alone."""
    planned = plan(Adapted, hidden=64, zero=level, data=4, recompute="none", micro_batches=1)
    base, trained = 4 * 64 * 64, 4 * 2 * 64 * 8
    found = parameters(planned)
    assert found["base.weight"].zero == frozen
    assert found["base.weight"].stored == ((Shard(0), R) if frozen else ())
    assert moved(planned)[RS, "sync"][1] == trained
    terms = dict(planned.plan.stages[0].memory_bytes)
    assert terms["optimizer"] == 2 * trained / 4
    split = 4 if level == 3 else 1
    assert terms["weights"] == (base + trained) / split


def test_a_weight_of_several_blocks_is_level_1_at_most():
    planned = plan(Tied, tokens=True, zero=3, data=4)
    found = parameters(planned)
    assert {p.zero for name, p in found.items() if name != "embed.weight"} == {3}
    assert found["embed.weight"].zero == 1
    assert found["embed.weight"].layout == (R_STAR, R)
    assert moved(planned)[AG, "update"] == (1, 4 * 16 * HIDDEN)


def test_a_block_gathers_its_weights_in_plain_sight():
    planned = plan(Stack, zero=3, data=4)
    text = next(t for name, t in planned.files().items() if "gather_weight" in t)
    lines = [line.strip() for line in text.splitlines()]
    first = next(i for i, line in enumerate(lines) if "comm.gather_weight" in line)
    assert lines[first].startswith(
        'layers_0_weight = comm.gather_weight(w["layers.0.weight"], data, 0, 8)'
    )
    assert lines[first - 1].startswith("# S(0) -> whole on data: ")
    assert "layers.0.weight: [2, 8] S(0) on data" in lines
    assert not any("w[" in line for line in lines if "gather_weight" not in line)


def test_a_stage_starts_the_gathering_of_the_next_block_before_it_runs_one():
    files = plan(Stack, zero=3, data=4).files()
    stage = next(text for text in files.values() if "def forward(w, ctx, received" in text)
    steps = [
        "start" if "comm.prefetch(" in line else "take" if "w_block = w_next" in line else "run"
        for line in stage.splitlines()
        if "comm.prefetch(" in line or "w_block = w_next" in line or "(w_block, " in line
    ]
    assert steps[:4] == ["start", "take", "start", "run"]
    assert steps[-2:] == ["take", "run"]
    assert steps.count("start") == LAYERS
    block = next(text for text in files.values() if "gather_weight" in text)
    assert "    \"layers.0.weight\": (('data',), 0, 8)," in block.splitlines()
    assert not any("prefetch" in text for text in plan(Stack, zero=1, data=4).files().values())


def test_levels_are_named_with_their_axes():
    names = {level: techniques(plan(Stack, zero=level, data=4).plan) for level in range(4)}
    assert not any("ZeRO" in line for line in names[0])
    assert "ZeRO-1 (optimizer state sharded) over data 4" in names[1]
    assert "ZeRO-2 (optimizer state and gradients sharded) over data 4" in names[2]
    assert "ZeRO-3 / FSDP (weights, gradients and optimizer state sharded) over data 4" in names[3]
