"""Batch entries that are no tensors: part of the program, checked against every batch."""

import pytest
import torch
from torch import nn

from autopar.compiler import PlanOptions, plan_model
from autopar.errors import InputError

X = torch.zeros(4, 8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=1.0, mode=None, extra=None):
        return (self.linear(x) * scale).sum()


def index(**entries):
    planned = plan_model(Scaled(), {"x": X, **entries}, "local:1", PlanOptions())
    return planned.files()["__init__.py"]


def test_they_are_written_down_unless_none():
    text = index(scale=2.0, mode=("a", 3), extra=None)
    assert "FIXED_ENTRIES = {'scale': 2.0, 'mode': ('a', 3)}\n" in text
    assert "FIXED_ENTRIES = {}\n" in index()


def test_what_has_no_literal_is_refused():
    with pytest.raises(InputError, match="batch entry 'extra' has type object; besides tensors"):
        index(extra=object())
