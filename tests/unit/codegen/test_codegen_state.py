"""Plans under which buffers that a forward updates would not be those of one device are refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.codegen.program import program_files
from autopar.compiler import PlanOptions, plan_model
from autopar.errors import InputError, PlanMismatch
from autopar.ir.placement import R_STAR, R, Shard


class Normed(nn.Module):
    """Four times linear and batch norm; one norm for all if asked for."""

    def __init__(self, shared=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        norms = [nn.BatchNorm1d(8)] * 4 if shared else [nn.BatchNorm1d(8) for _ in range(4)]
        self.norms = nn.ModuleList(norms)

    def forward(self, x, y):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.tanh(layer(x)))
        return (x - y).square().mean()


def plan(model, cluster="local:2", **pins):
    example = {"x": torch.empty(8, 8), "y": torch.empty(8, 8)}
    options = PlanOptions(pins=tuple((key, str(value)) for key, value in pins.items()))
    return plan_model(model, example, cluster, options)


def files(planned, changed):
    return program_files(replace(planned, plan=changed).view, {})


def test_one_micro_batch_alone():
    planned = plan(Normed(), data=2)
    assert planned.plan.training.micro_batches == 1
    training = replace(planned.plan.training, micro_batches=2)
    with pytest.raises(PlanMismatch, match="has 2 micro-batches, expected 1: batch_norm: autopar"):
        files(planned, replace(planned.plan, training=training))


def test_a_norm_that_stages_share_is_refused():
    assert plan(Normed(shared=True), data=2).files()
    with pytest.raises(
        InputError, match=r"buffer norms\.0\.num_batches_tracked is updated in 2 pipe"
    ):
        plan(Normed(shared=True), pipeline=2).files()


def test_buffers_lie_where_they_are_updated():
    """Over a tensor axis the statistics are cut as the channels are: a slice of a whole buffer
    would be updated in its place."""
    planned = plan(Normed(), tensor=2, **{"weight:norms.0.weight": "S(0)"})
    (stage,) = planned.plan.stages
    layouts = {p.fqn: p.layout[-1] for p in stage.parameters}
    assert layouts["norms.0.running_mean"] == layouts["norms.0.running_var"] == Shard(0)
    assert layouts["norms.0.num_batches_tracked"] == R
    parameters = tuple(
        replace(p, layout=(*p.layout[:-1], R)) if p.fqn == "norms.0.running_mean" else p
        for p in stage.parameters
    )
    with pytest.raises(
        PlanMismatch, match=r"norms\.0\.running_mean is updated where it lies, as S\(0"
    ):
        files(planned, replace(planned.plan, stages=(replace(stage, parameters=parameters),)))


def test_a_buffer_that_is_whole_keeps_its_norm_whole():
    """Slicing it would cost nothing, and lose what the slice learns."""
    state = ("norms.0.running_mean", "norms.0.running_var")
    planned = plan(Normed(), tensor=2, **{f"weight:{name}": "R" for name in state})
    layouts = {p.fqn: p.layout[-1] for p in planned.plan.stages[0].parameters}
    assert [layouts[name] for name in state] == [R, R]
    assert layouts["norms.0.weight"] in (R, R_STAR)
    assert planned.files()
