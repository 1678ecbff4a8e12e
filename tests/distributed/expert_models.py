"""Expert layers whose routing a test decides, in double precision."""

import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture.grouped import grouped_mm
from model_zoo.experts import CapacityExperts

HIDDEN, FFN, EXPERTS, TOP_K = 6, 10, 4, 2


class Routed(nn.Module):
    """A dense layer and dropless experts with biases; `preferred` experts get every token.

    The grouped product is the op that capture makes of torch's, which has no double precision.
    """

    def __init__(self, preferred=()):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN))
        self.bias = nn.Parameter(torch.randn(EXPERTS, FFN))
        self.down = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN))
        with torch.no_grad():
            self.router.bias.zero_()
            self.router.bias[list(preferred)] = 100.0

    def forward(self, x, y):
        tokens = (x + self.dense(x)).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K, -1)
        ids, order = chosen.flatten().sort(stable=True)
        offsets = F.one_hot(ids, EXPERTS).sum(0).cumsum(0)
        slots = grouped_mm(tokens[order // TOP_K], self.up, offsets) + self.bias[ids]
        slots = grouped_mm(torch.tanh(slots), self.down, offsets)
        rows = slots[order.argsort()].view(-1, TOP_K, HIDDEN)
        out = (rows * weights.unsqueeze(-1)).sum(1).view_as(x)
        return {"loss": F.mse_loss(x + out, y), "out": out}


class Limited(nn.Module):
    """Experts with a capacity of which the first gets every token and must drop most."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.experts = CapacityExperts(HIDDEN, FFN, experts=EXPERTS, top_k=1, capacity_factor=1.0)
        with torch.no_grad():
            self.experts.router.weight.zero_()

    def forward(self, x, y):
        out, balance = self.experts(x + self.dense(x))
        return {"loss": F.mse_loss(x + out, y) + 0.1 * balance, "out": out}
