"""Nodes that no rule tells apart share an index expression; others have their own."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
from torch import nn

from autopar.capture import capture
from autopar.rules import expressions
from autopar.rules.expressions import Expressions
from autopar.rules.registry import index_expr


def graph_of(layers: int):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)) for _ in range(layers)))
    return capture(model, (torch.ones(2, 8),), loss_fn=lambda y, _: y.sum()).graph


def test_layers_that_repeat_ask_for_a_rule_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        expressions, "index_expr", lambda node, specs: asked.append(node) or index_expr(node, specs)
    )
    graph = graph_of(5)
    found = Expressions(graph.specs())
    for _ in range(2):
        for node in graph.nodes:
            assert found.of(node) == index_expr(node, graph.specs())
    assert len(graph.nodes) == 11
    assert [node.op for node in asked] == ["aten.linear", "aten.softmax", "aten.sum"]
    copy = pickle.loads(pickle.dumps(found))
    assert copy.of(graph.nodes[0]) == found.of(graph.nodes[0])


def test_equal_numbers_of_other_types_are_other_arguments():
    graph = graph_of(1)
    found = Expressions(graph.specs())
    node = next(node for node in graph.nodes if node.op == "aten.softmax")
    forms = {
        found.form(replace(node, name=f"softmax_{i}", args=(node.args[0], dim)))
        for i, dim in enumerate((1, 1, True, 1.0))
    }
    assert len(forms) == 3
