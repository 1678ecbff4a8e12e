"""Selective recompute of the attention core (Korthikanti et al. 2022, section 5) is found.

A layer keeps s b h (34 + 5 a s / h) bytes where the scores are written out; running scores, softmax
and dropout again drops the second term. Norms keep 16 bytes a token besides.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar.search.block_cost as block_cost_module
from autopar.capture import capture, find_blocks
from autopar.costs.clusters import parse_cluster
from autopar.costs.memory import Training
from autopar.ir.mesh import stage_mesh
from autopar.ir.precision import PRECISIONS
from autopar.plan.plan import Recompute
from autopar.search.grid import Grid
from autopar.search.options import class_options
from autopar.search.pricer import Pricer
from autopar.search.problems import ShardingProblems
from autopar.search.recompute import RecomputeProblem
from autopar.search.setting import Setting
from autopar.search.state import UNSPLIT
from solvers.tradeoff import between

SEQ, HIDDEN, HEADS = 2048, 1024, 16
SBH, TERM = SEQ * HIDDEN, 5 * HEADS * SEQ * SEQ
STATISTICS = 16 * SEQ
CORE = ["matmul", "mul", "softmax", "dropout"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (
            t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) * (HIDDEN // HEADS) ** -0.5
        y = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


@pytest.fixture(scope="module")
def solved():
    """The problem of a middle layer on one device, its options, and the seconds of its steps."""
    with torch.device("meta"):
        model = Net().to(torch.bfloat16)
        captured = capture(model, (torch.empty(2, SEQ, HIDDEN, dtype=torch.bfloat16),))
    chain = find_blocks(captured.graph)
    setting = Setting(
        name="korthikanti",
        graph=captured.graph,
        chain=chain,
        cluster=parse_cluster("1x1:a100-80gb"),
        global_batch=2,
        # Gradients that are widened for the update would take more than the activations.
        training=Training(precision=replace(PRECISIONS["bf16"], grad_dtype="float32")),
    )
    found = []

    class Spy(RecomputeProblem):
        def __init__(self, storages, saved, held, seconds, running):
            super().__init__(storages, saved, held, seconds, running)
            found.append((self, seconds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_cost_module, "RecomputeProblem", Spy)
        mesh = stage_mesh()
        grid = Grid(pipeline=1, mesh=mesh, micro_batch=1, micro_batches=2, schedule="1f1b")
        layer = max(chain.classes, key=lambda block_class: len(block_class.members))
        options = class_options(ShardingProblems(Pricer(setting)), grid, layer.index, {}, UNSPLIT)
    problem, seconds = found[0]
    return problem, options, seconds


def stems(steps):
    return [step.rstrip("0123456789").rstrip("_") for step in steps]


def test_the_scores_go_at_a_supported_point(solved):
    problem, _, seconds = solved
    nothing, least = problem.ways()[0], problem.solve(problem._dear())
    assert nothing.kept_bytes == SBH * 34 + TERM + STATISTICS
    points = [nothing, *between(problem.solve, nothing, least, depth=12), least]
    chosen = next(point for point in points if stems(point.steps).count("softmax"))
    # What costs less a byte goes with it: the GELU, the results of the norms and, again, their
    # statistics. The values are kept twice: as part of q, k, v, and as the product's operand.
    assert sorted(stems(chosen.steps)) == sorted([*CORE, "gelu", "layer_norm", "layer_norm"])
    assert chosen.kept_bytes == SBH * (34 - 8 - 4 + 2)
    assert chosen.time_s == pytest.approx(sum(seconds[step].total for step in chosen.steps))
    before = points[points.index(chosen) - 1]
    core = {step for step in chosen.steps if stems([step])[0] in CORE}
    assert core | set(before.steps) == set(chosen.steps)


def test_the_core_alone_saves_exactly_the_second_term(solved):
    """As Megatron does it: the core with its second product, from queries, keys and values."""
    problem, _, seconds = solved
    core = frozenset(
        index
        for index, group in enumerate(problem._groups)
        if {stems([step.name])[0] for step in group.steps} & {"matmul", "softmax", "mul"}
        or any(storage in problem._groups[index].reads for storage in _softmax(problem))
    )
    way = problem._way(core)
    assert sorted(s for s in stems(way.steps) if s not in ("transpose", "reshape")) == sorted(
        [*CORE, "matmul"]
    )
    assert way.kept_bytes == SBH * 34 + STATISTICS
    assert way.time_s == pytest.approx(sum(seconds[step].total for step in way.steps))


def _softmax(problem):
    return [
        storage
        for group in problem._groups
        for storage in group.makes
        if stems([storage[0].name]) == ["softmax"]
    ]


def test_a_handful_of_options_are_offered(solved):
    _, options, _ = solved
    kinds = [option.again.kind for option in options]
    assert kinds[0] is Recompute.NONE and kinds[-1] is Recompute.FULL
    assert 3 <= len(options) <= 6
    assert options[-1].saved_bytes == 2 * SBH
