"""Models of unusual wiring against the eager run, and what cannot be run alike and says so."""

import pytest
import torch
from beside import Beside
from torch import nn
from wiring_models import WIRINGS, regression

import autopar
from autopar.errors import CaptureError, InputError, RuntimeFailure

pytestmark = pytest.mark.distributed

GRIDS = {
    "dp2tp2": {"data": 2, "tensor": 2, "micro_batches": 3},
    "pp4": {"pipeline": 4, "micro_batches": 3},
    "tp2pp2": {"tensor": 2, "pipeline": 2, "micro_batches": 2, "recompute": "all"},
}
TOO_FEW_BLOCKS = {"AttentionWeights", "Convolutions", "DenseExperts", "WritesInPlace"}
"""For a pipeline of four."""


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("model", [m.__name__ for m in WIRINGS])
def test_equals_the_eager_run(pool4, model, grid):
    pins = GRIDS[grid]
    if grid == "pp4" and model in TOO_FEW_BLOCKS:
        pins = {"pipeline": 2, "data": 2, "micro_batches": 3, "schedule": "gpipe"}
    pool4.run(check_wiring, model, pins)


def check_wiring(name, pins):
    model, batch = next((m, b) for m, b in WIRINGS.items() if m.__name__ == name)
    torch.manual_seed(0)
    both = Beside(model(), pins, optimizer=(torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3}))
    both.train(batch, 2)
    both.same_evaluation(batch)


class Draws(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.alpha = nn.AlphaDropout(0.5)

    def forward(self, x, y):
        h = self.a(x)
        if self.kind == "noise":
            h = h + torch.randn_like(h)
        elif self.kind == "alpha":
            h = self.alpha(h)
        else:
            h = nn.functional.dropout(h, 0.5, training=True)
        return nn.functional.mse_loss(self.b(h), y)


def check_refusals():
    torch.manual_seed(0)
    batch, messages = regression(), []
    for kind in ("noise", "alpha"):
        with pytest.raises(InputError) as caught:
            autopar.parallelize(Draws(kind), "local:2", batch=as_float(batch), pins={"tensor": 2})
        messages.append(str(caught.value))
    torch.manual_seed(0)
    both = Beside(Draws("always"), {"tensor": 2})
    both.train(batch, 1)
    with pytest.raises(CaptureError) as refused:
        both.parallel.eval_step(batch)
    return [*messages, str(refused.value)]


def as_float(batch):
    return {key: value.float() for key, value in batch.items()}


def test_random_numbers_that_ranks_would_draw_apart_are_refused(pool2):
    for noise, alpha, always in pool2.run(check_refusals):
        assert "aten.randn_like.default draws random numbers" in noise
        assert "aten.alpha_dropout.default draws random numbers" in alpha
        assert "drops in evaluation" in always


def check_failure_while_planning():
    def fail(*args, **kwargs):
        raise ZeroDivisionError("a bug of ours")

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.api.plan_model", fail)
        with pytest.raises((ZeroDivisionError, RuntimeFailure)) as caught:
            autopar.parallelize(nn.Linear(8, 8), "local:2", batch=as_float(regression()))
    return type(caught.value).__name__, str(caught.value)


def test_a_failure_while_planning_reaches_every_rank(pool2):
    first, second = pool2.run(check_failure_while_planning)
    assert first == ("ZeroDivisionError", "a bug of ours")
    assert second[0] == "RuntimeFailure"
    assert "planning failed on rank 0: ZeroDivisionError: a bug of ours" in second[1]


def check_other_inputs():
    rank, messages = torch.distributed.get_rank(), []
    for model_seed, batch_seed in ((rank, 0), (0, rank)):
        torch.manual_seed(model_seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(batch_seed)),)
        with pytest.raises(InputError) as caught:
            autopar.parallelize(model, "local:2", batch=batch, loss_fn=lambda out, _: out.sum())
        messages.append(str(caught.value))
    return messages


def test_other_weights_or_batches_on_other_ranks_are_refused(pool2):
    """Models built without a seed, or a distributed sampler: ranks would cut parts of different
    wholes (allenai/OLMo-core#307)."""
    for weights, batches in pool2.run(check_other_inputs):
        assert "rank 1 was given another weight '0.weight' than rank 0" in weights
        assert "call torch.manual_seed" in weights
        assert "rank 1 was given another batch entry '0' than rank 0" in batches
