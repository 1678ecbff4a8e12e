"""Parts that run again: same gradients, nothing kept but arguments, each part run once more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import RuntimeFailure
from autopar.runtime.recompute import Recomputation
from autopar.runtime.weight_gradients import compute_deferred, linear


class Ctx:
    def __init__(self, deferred=None):
        self.deferred = deferred


def weights():
    torch.manual_seed(0)
    return {name: torch.randn(8, 8, requires_grad=True) for name in ("a", "b", "c")}


def forward(w, x, ctx, runs, *, again=None):
    """Two parts, of which the second reads what the first makes, and products outside of them."""

    def make_gelu(x, w):
        runs.append("gelu")
        return F.gelu(linear(x, w["a"], None, ctx))

    def make_probs(gelu):
        runs.append("probs")
        return gelu.t().softmax(-1), gelu.sigmoid()

    call = again or (lambda function, *args: function(*args))
    gelu = call(make_gelu, x, w)
    y = linear(gelu, w["b"], None, ctx)
    probs, gate = call(make_probs, gelu)
    return (linear(probs.t().contiguous() * gate, w["c"], None, ctx) * y).sum()


def gradients(recompute, *, split=False, in_flight=1, rows=4):
    w, runs, losses, deferred = weights(), [], [], []
    for number in range(in_flight):
        torch.manual_seed(number + 1)
        x = torch.randn(rows, 8, requires_grad=True)
        deferred.append([] if split else None)
        if recompute:
            with Recomputation() as again:
                losses.append(forward(w, x, Ctx(deferred[-1]), runs, again=again))
        else:
            losses.append(forward(w, x, Ctx(deferred[-1]), runs))
    for loss in losses:
        loss.backward()
    for late in deferred:
        if late:
            compute_deferred(late)
    return {name: weight.grad for name, weight in w.items()}, runs


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_gradients_are_equal_to_the_bit_and_every_part_runs_twice(split, in_flight):
    plain, _ = gradients(False, split=split, in_flight=in_flight)
    found, runs = gradients(True, split=split, in_flight=in_flight)
    for name, grad in plain.items():
        assert torch.equal(found[name], grad), name
    assert sorted(runs) == sorted(["gelu", "probs"] * 2 * in_flight)


def test_a_rank_without_samples_runs_the_same_parts_again():
    """Parts may communicate; empty tensors have no memory to be told apart by."""
    assert gradients(True, rows=0)[1] == gradients(True)[1] == ["gelu", "probs"] * 2


def test_hooks_around_a_block_get_what_is_kept_and_nothing_else():
    seen = []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor.clone()

    w, x = {"w": torch.randn(3, 5, requires_grad=True)}, torch.randn(2, 5)
    with saved_tensors_hooks(pack, lambda tensor: tensor), Recomputation() as again:
        y = again(lambda x, w: F.linear(x, w["w"]).exp(), x, w)
        loss = (y * y).sum()
    assert sorted(seen) == [(2, 5), (3, 5)]
    loss.backward()
    assert torch.allclose(w["w"].grad, (2 * F.linear(x, w["w"]).exp() ** 2).t() @ x)


def test_without_gradients_parts_are_plain_calls():
    with torch.no_grad(), Recomputation() as again:
        assert again(lambda x: x + 1, torch.ones(1)).item() == 2


def test_a_part_that_changes_is_reported():
    runs = []

    def part(x):
        runs.append(1)
        return x.exp() if len(runs) == 1 else x.exp().exp()

    with Recomputation() as again:
        y = again(part, torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(RuntimeFailure, match="part saved 1 tensors in the forward and 2"):
        y.backward()
