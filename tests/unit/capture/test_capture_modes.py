"""Training against evaluation, and that verification notices an unfaithful graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, first_difference, same_when_evaluating, verify_capture
from autopar.errors import CaptureError
from autopar.ir.graph import Ref

X = torch.arange(16, dtype=torch.float32).reshape(4, 4).sin()


class Model(nn.Module):
    """Dropout in one of several forms."""

    def __init__(self, form: str = "module") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.form = form

    def forward(self, x):
        h = self.linear(x)
        if self.form == "module":
            h = self.dropout(h)
        elif self.form == "attention":
            q = h.view(-1, 1, 2, 2)
            p = 0.3 if self.training else 0.0
            h = F.scaled_dot_product_attention(q, q, q, dropout_p=p, is_causal=True).flatten(1)
        elif self.form == "branch" and self.training:
            h = h.relu()
        return self.again(h).pow(2).sum()


@pytest.mark.parametrize(
    ("form", "same"), [("module", True), ("attention", True), ("branch", False)]
)
def test_one_graph_serves_both_modes_unless_ops_differ(form, same):
    model = Model(form)
    train, evaluation = capture(model, (X,)).graph, capture(model.eval(), (X,)).graph
    assert train != evaluation
    assert same_when_evaluating(train, evaluation) is same
    if not same:
        assert "aten.relu.default" in first_difference(train, evaluation)


def test_other_arguments_than_the_mode_do_count():
    graph = capture(Model("attention").eval(), (X,)).graph
    i = next(i for i, n in enumerate(graph.nodes) if n.op.endswith("attention"))
    nodes = list(graph.nodes)
    nodes[i] = replace(nodes[i], args=(*nodes[i].args[:5], False))
    assert not same_when_evaluating(graph, replace(graph, nodes=tuple(nodes)))


def test_dropout_may_be_off_or_missing_but_not_on_when_evaluating():
    train, evaluation = capture(Model(), (X,)).graph, capture(Model("plain"), (X,)).graph
    assert same_when_evaluating(train, evaluation)
    for form in ("module", "attention"):
        always_on = capture(Model(form), (X,)).graph
        assert "drops in evaluation" in first_difference(always_on, always_on)


def test_names_and_memory_moves_do_not_count_but_wiring_does():
    graph = capture(Model("plain"), (X,)).graph
    first, second, *rest = graph.nodes
    move = replace(first, name="move", target="aten.contiguous.default", args=(Ref("h"),))
    renamed = replace(first, name="h")
    moved = replace(second, args=(Ref("move"), *second.args[1:]))
    same = replace(graph, nodes=(renamed, move, moved, *rest))
    assert first_difference(graph, same) is None
    rewired = replace(second, args=(Ref("input_0"), *second.args[1:]))
    assert first_difference(graph, replace(graph, nodes=(first, rewired, *rest))) is not None


def test_verification_draws_the_same_random_numbers():
    model = Model()
    captured = capture(model, (X,))
    state = torch.get_rng_state()
    verify_capture(model, (X,), captured)
    assert torch.equal(torch.get_rng_state(), state)


def broken(change):
    """A capture with one node changed."""
    captured = capture(Model("none"), (X,))
    nodes = tuple(change(node) for node in captured.graph.nodes)
    return replace(captured, graph=replace(captured.graph, nodes=nodes))


def scaled_sum(node):
    return replace(node, target="aten.mean.default") if node.op == "aten.sum" else node


def without_gradient(node):
    return replace(node, requires_grad=False) if node.name == "linear" else node


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scaled_sum, "the loss differs by"),
        (without_gradient, "only the model has the gradient of linear.weight"),
    ],
)
def test_verification_names_what_differs(change, message):
    with pytest.raises(CaptureError, match=message):
        verify_capture(Model("none"), (X,), broken(change))


def test_verification_leaves_gradients_alone():
    model = Model()
    model.linear.weight.grad = torch.ones(4, 4)
    verify_capture(model, (X,), capture(model, (X,)))
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))
    assert model.again.weight.grad is None
