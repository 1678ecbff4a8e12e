"""What is known of a graph is worked out once for all that look at it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.capture import capture
from autopar.rules import GraphFacts, facts


@dataclass(frozen=True)
class Named(GraphFacts):
    """Facts with something of its own."""

    name: str = ""


def graph_of(width: int):
    return capture(nn.Linear(4, width), (torch.ones(2, 4),), loss_fn=lambda y, _: y.sum()).graph


def test_copies_share_what_was_worked_out(monkeypatch):
    made = []
    batch_axis = facts.batch_axis
    monkeypatch.setattr(facts, "batch_axis", lambda *given: made.append(1) or batch_axis(*given))
    first = Named(graph_of(3), name="first")
    copy = replace(first, name="copy")
    other = GraphFacts(first.graph, worked_out=copy.worked_out)
    assert copy.batch is first.batch is other.batch
    assert made == [1]
    assert GraphFacts(first.graph).batch == first.batch
    assert made == [1, 1]


def test_another_graph_has_its_own():
    first = Named(graph_of(3))
    wide = replace(first, graph=graph_of(5))
    assert [s.shape[-1].const for r, s in first.specs.items() if r.name == "linear"] == [3]
    assert [s.shape[-1].const for r, s in wide.specs.items() if r.name == "linear"] == [5]
