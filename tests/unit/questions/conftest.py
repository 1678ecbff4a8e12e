"""A small stack of layers as a model source, and its planning options."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.sources import ModelSource

HIDDEN, BATCH = 256, 512


class Stack(nn.Module):
    """Linear layers with GELU, and a mean squared error."""

    def __init__(self, layers=8, hidden=HIDDEN):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return ((x - y) ** 2).mean()


def made(samples=None):
    """Model, batch and loss function."""
    return Stack(), {key: torch.empty(BATCH, HIDDEN) for key in ("x", "y")}, None


@pytest.fixture
def source():
    return ModelSource(name="stack", spec="stack.py:made", seq_len=None, make=made)


@pytest.fixture
def quiet():
    return lambda what, done: None
