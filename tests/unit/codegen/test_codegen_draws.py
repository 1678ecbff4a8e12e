"""Which random ops are drawn by position, and which are refused."""

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.codegen.draws import is_random, refuse_other_draws
from autopar.errors import InputError

X = torch.zeros(4, 3, 8)


class Drawing(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5 if form == "lstm" else 0.0)
        self.dropout = nn.Dropout(0.5)
        self.channels = nn.Dropout1d(0.5)

    def forward(self, x):
        h = self.linear(x)
        match self.form:
            case "dropout":
                h = self.dropout(h)
            case "lstm" | "plain lstm":
                h = self.lstm(h)[0]
            case "channels":
                h = self.channels(h)
            case "uniform":
                h = h + torch.rand_like(h)
            case "bernoulli":
                h = h * torch.bernoulli(torch.full_like(h, 0.5))
        return h.sum()


def graph_of(form, training=True):
    return capture(Drawing(form).train(training), (X,)).graph


@pytest.mark.parametrize("form", ["dropout", "plain lstm"])
def test_dropout_and_what_draws_nothing_may_run(form):
    graph = graph_of(form)
    refuse_other_draws(graph)
    assert any(map(is_random, graph.nodes)) == (form == "dropout")


@pytest.mark.parametrize(
    ("form", "op"),
    [
        ("lstm", "aten.lstm.input"),
        ("channels", "aten.feature_dropout.default"),
        ("uniform", "aten.rand_like.default"),
        ("bernoulli", "aten.bernoulli.default"),
    ],
)
def test_other_random_ops_are_refused_with_their_line(form, op):
    with pytest.raises(InputError, match=rf"test_codegen_draws.py:\d+: {op} draws random numbers"):
        refuse_other_draws(graph_of(form))


@pytest.mark.parametrize("form", ["lstm", "channels", "dropout"])
def test_nothing_is_drawn_in_evaluation(form):
    graph = graph_of(form, training=False)
    refuse_other_draws(graph)
    assert not any(map(is_random, graph.nodes))
