"""The collectives of a step, for plans that can be worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from autopar.codegen.traffic import micro_batch_counts, stage_collectives, totals
from autopar.compiler import PlanOptions, load_source, plan_model, plan_source
from autopar.ir.collective import Collective, CollectiveOp

AR, SEND = CollectiveOp.ALL_REDUCE, CollectiveOp.SEND_RECV


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x, y):
        return ((self.down(torch.relu(self.up(x))) - y) ** 2).mean()


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()


def plan(build, cluster, batch=8, **pins):
    with torch.device("meta"):
        example = {"x": torch.empty(4, 8), "y": torch.empty(4, 8)}
        model = build()
    options = PlanOptions(global_batch=batch, pins=tuple((k, str(v)) for k, v in pins.items()))
    return plan_model(model, example, cluster, options)


def collective(op, nbytes, axis, phase, count=1):
    return Collective(op=op, nbytes=nbytes, axes=(axis,), phase=phase, count=count)


LOSS = collective(AR, 8, "world", "sync")


def test_data_and_tensor_parallel_layers():
    """Column then row: one sum of [2, 8] floats forward, none backward as `x` has no gradient."""
    planned = plan(TwoLayers, "local:4", data=2, tensor=2, micro_batches=2)
    assert planned.plan.collectives == tuple(
        sorted(
            [
                LOSS,
                collective(AR, 2 * 8 * 4, "tensor", "forward", 2),
                collective(AR, 2 * 8 * 8 * 4, "data", "sync"),  # both halves in one bucket
            ]
        )
    )


def test_recomputed_blocks_communicate_twice_forward():
    planned = plan(TwoLayers, "local:2", tensor=2, micro_batches=2, recompute="all")
    assert planned.plan.collectives == tuple(
        sorted(
            [
                LOSS,
                collective(AR, 4 * 8 * 4, "tensor", "forward", 2),
                collective(AR, 4 * 8 * 4, "tensor", "recompute", 2),
            ]
        )
    )


def test_what_ends_a_block_communicates_once_though_all_is_recomputed():
    """Of the two sums of a transformer layer, no backward of the layer reads the second."""
    pins = (("tensor", "2"), ("micro_batches", "1"), ("recompute", "all"))
    planned = plan_source(
        load_source("gpt_tiny"), "local:2", PlanOptions(global_batch=2, pins=pins)
    )
    layers = [v.class_index for v in planned.plan.variants if len(v.choices) > 20]
    (stage,) = planned.plan.stages
    nodes = {
        name
        for block in planned.chain.blocks
        if block.class_index in layers
        for name in planned.chain.representative(block.class_index).nodes
    }
    moved = Counter()
    for item in stage.collectives:
        if item.op is AR and item.axes == ("tensor",) and item.value in nodes:
            moved[item.phase] += item.count
    assert moved["forward"] == 2 * moved["recompute"] > 0


def test_stages_send_values_on_and_gradients_back():
    planned = plan(Chain, "local:2", pipeline=2, micro_batches=4)
    first, last = planned.plan.stages
    message = 2 * 8 * 4
    assert totals(first.collectives) == (LOSS, collective(SEND, message, "pipeline", "forward", 4))
    assert totals(last.collectives) == (LOSS, collective(SEND, message, "pipeline", "backward", 4))


def test_a_short_last_micro_batch_is_counted_at_its_size():
    planned = plan(Chain, "local:2", batch=7, pipeline=2, micro_batches=2)
    assert micro_batch_counts(planned.plan) == (4, 3)
    sends = [c for c in planned.plan.stages[0].collectives if c.op is SEND]
    assert [(c.nbytes, c.count) for c in sends] == [(3 * 8 * 4, 1), (4 * 8 * 4, 1)]


@pytest.mark.parametrize(("rank", "counts"), [(0, (2, 1)), (1, (1, 1))])
def test_uneven_samples_over_data_ranks(rank, counts):
    planned = plan(Chain, "local:2", batch=5, data=2, micro_batches=2)
    assert micro_batch_counts(planned.plan, at=(rank,)) == counts
    listed = stage_collectives(planned.view, planned.plan.stages[0], counts)
    parameters = 4 * (8 * 8 + 8)
    assert totals(listed) == (LOSS, collective(AR, 4 * parameters, "data", "sync"))


def test_one_device_communicates_nothing():
    assert plan(Chain, "local:1").plan.collectives == ()


def test_totals_forget_values_and_add_counts():
    a = Collective(op=AR, nbytes=4, axes=("data",), phase="sync", value="a", count=2)
    b = Collective(op=AR, nbytes=4, axes=("data",), phase="sync", value="b", count=1)
    assert totals([a, b]) == (collective(AR, 4, "data", "sync", 3),)
