"""A small stack of layers as a model source, and its planning options."""

import pytest
import torch

from autopar.sources import ModelSource
from model_zoo.mlp import MLP

HIDDEN, BATCH = 256, 512


def made(samples=None):
    """Model, batch and loss function."""
    return MLP(8, HIDDEN), {key: torch.empty(BATCH, HIDDEN) for key in ("x", "y")}, None


@pytest.fixture
def source():
    return ModelSource(name="stack", spec="stack.py:made", seq_len=None, make=made)


@pytest.fixture
def quiet():
    return lambda what, done: None
