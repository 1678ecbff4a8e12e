"""Pins that coupled samples leave no grid for; layouts of parameters that blocks share."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, find_blocks
from autopar.compiler import PlanOptions, plan_model
from autopar.costs.clusters import parse_cluster
from autopar.costs.memory import Training
from autopar.errors import InputError
from autopar.ir.graph import Source, SourceKind, TensorSpec
from autopar.ir.mesh import stage_mesh
from autopar.ir.placement import R_STAR, P, R, Shard
from autopar.ir.precision import PRECISIONS
from autopar.ir.size import Size
from autopar.search.block import parameter_layouts
from autopar.search.setting import Setting

BATCH = {"x": torch.zeros(8, 4), "y": torch.zeros(8, 4)}


class Contrast(nn.Module):
    """Every sample is compared with every other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        scores = self.a(x) @ self.b(y).t()
        return F.cross_entropy(scores, torch.arange(scores.shape[0]))


def plan(**pins):
    pairs = tuple((key, str(value)) for key, value in pins.items())
    return plan_model(Contrast(), BATCH, "local:2", PlanOptions(pins=pairs)).plan


def test_coupled_samples_stay_in_one_micro_batch():
    assert plan(tensor=2).training.micro_batches == 1
    assert plan(tensor=2, micro_batches=1).training.micro_batch == 8


@pytest.mark.parametrize("pin", [{"micro_batches": 2}, {"micro_batch": 4}, {"data": 2}])
def test_a_pin_that_would_part_coupled_samples_is_refused(pin):
    with pytest.raises(InputError, match="the batch cannot be split: matmul"):
        plan(**({"tensor": 2} if "data" not in pin else {}), **pin)


WEIGHT = Source(
    name="p_w",
    kind=SourceKind.PARAMETER,
    fqn="w",
    spec=TensorSpec(shape=(Size(4), Size(4)), dtype="float32"),
    trainable=True,
)
WANTED = [(R_STAR, R), (R_STAR, R_STAR), (R_STAR, Shard(0)), (R_STAR, P)]


def test_a_pinned_replica_may_sum_its_gradient_late():
    found = parameter_layouts(WEIGHT, WANTED, {"w": {1: R}}, 2)
    assert set(found) == {(R_STAR, R), (R_STAR, R_STAR)}


def test_a_layout_shared_between_blocks_is_met_exactly():
    """Stages that hold a tied weight in two layouts cannot sum its gradient."""
    for layout in ((R_STAR, R), (R_STAR, R_STAR), (R_STAR, Shard(0))):
        assert parameter_layouts(WEIGHT, WANTED, {"w": dict(enumerate(layout))}, 2) == (layout,)


def test_layouts_between_blocks_follow_the_order_of_the_sequence():
    """Zig-zag asks for twice as many equal parts as ranks: a wider axis may have none."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x.square().mean()

    graph = capture(Positions(), {"x": torch.zeros(2, 12, 4)}).graph
    setting = Setting(
        name="positions",
        graph=graph,
        chain=find_blocks(graph, min_blocks=2),
        cluster=parse_cluster("local:4"),
        global_batch=2,
        training=Training(precision=PRECISIONS["fp32"]),
    )
    ref = setting.chain.boundaries[0][0]
    found = [
        setting.shared(stage_mesh(context=size, zigzag=dealt))[ref][1]
        for size, dealt in ((2, True), (2, False), (3, True), (4, True))
    ]
    assert found == [Shard(1, (6, -6)), Shard(1), Shard(1, (6, -6)), Shard(1)]
