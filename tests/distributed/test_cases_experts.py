"""Experts split over ranks: experts without tokens, ranks without samples, tokens that are dropped.

Published failures: a hang where one rank's experts had no token (NVIDIA-NeMo/Automodel#935), tokens
sent once per tensor rank (microsoft/DeepSpeed#2074), more ranks than experts
(databricks/megablocks#15). Every model trains beside its eager copy in double precision.
"""

from functools import partial

import case_models as models
import expert_models
import pytest
from beside import train_beside

from autopar.compiler import PlanOptions, plan_model
from autopar.errors import InputError

pytestmark = pytest.mark.distributed

EP2 = {"data": 2, "expert": 2}


def batch_of(samples):
    return models.regression(samples, expert_models.HIDDEN, seq=(5,))


def collectives(both, batch):
    """What this rank runs in one backward step: op, group and phase of each."""
    recorder = both.store.world.recorder
    recorder.start()
    both.parallel.backward_step(batch)
    return [(str(c.op), c.axes, c.phase) for c in recorder.stop()]


def check(model, samples, pins, unused=()):
    """Trains; gives this rank's collectives. `unused` experts have gradients of zero."""
    batch = batch_of(samples)
    both = train_beside(model, batch, pins)
    both.backward(batch)
    both.same_gradients()
    for name in ("up", "bias", "down") if unused else ():
        grad = both.store.gather_gradient(name)
        assert grad is not None
        assert grad[list(unused)].abs().sum() == 0
        assert grad.abs().sum() > 0
    both.parallel.optimizer.zero_grad()
    return collectives(both, batch)


def exchanges(found):
    return [item for item in found if item[0] == "all_to_all"]


@pytest.mark.parametrize("preferred", [(0, 1), (2, 3), (0, 3), ()])
def test_experts_without_tokens(pool2, preferred):
    """All tokens on the first rank, on the second, one expert of each, or as they fall."""
    unused = tuple(sorted(set(range(expert_models.EXPERTS)) - set(preferred))) if preferred else ()
    model = partial(expert_models.Routed, preferred)
    found = pool2.run(check, model, 4, EP2, unused)
    assert found[0] == found[1]
    # counts, rows and rows back; rows and rows back in the backward
    assert len(exchanges(found[0])) == 5


@pytest.mark.parametrize("model", [expert_models.Routed, expert_models.Limited])
def test_a_rank_without_samples_takes_part_in_every_exchange(pool4, model):
    """5 samples in 3 micro-batches of 2, 2, 1 over 4 ranks, experts on all of them or on pairs."""
    for expert in (4, 2):
        pins = {"data": 4, "expert": expert, "micro_batches": 3}
        pool4.run(check, model, 5, pins)


def test_a_capacity_that_drops_tokens(pool2):
    found = pool2.run(check, expert_models.Limited, 4, EP2)
    assert found[0] == found[1]
    assert len(exchanges(found[0])) == 4


def test_experts_over_samples_and_columns(pool4):
    """Tensor ranks hold columns of the same experts: each sends its tokens once."""
    for model in (expert_models.Routed, expert_models.Limited):
        found = pool4.run(check, model, 4, {"data": 2, "expert": 2, "tensor": 2})
        assert all(exchanges(one) == exchanges(found[0]) for one in found)


def test_more_ranks_than_experts_are_refused():
    options = PlanOptions(precision="fp64", pins=(("data", "8"), ("expert", "8")))
    model = expert_models.Routed().double()
    with pytest.raises(InputError, match=r"expert=8.* 4 experts"):
        plan_model(model, batch_of(8), "local:8", options)
