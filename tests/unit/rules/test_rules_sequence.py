"""The dim that runs over the sequence, and the strategies of an axis that splits it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.ir.graph import Ref
from autopar.ir.mesh import CONTEXT, MeshAxis
from autopar.ir.placement import Shard, zigzag
from autopar.rules import GraphFacts

SEQUENCE, HIDDEN, HEADS = 12, 8, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.position = nn.Parameter(torch.zeros(SEQUENCE, HIDDEN))

    def forward(self, x):
        x = x + self.position
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().mean()


@pytest.fixture(scope="module")
def facts():
    return GraphFacts(capture(Layer(), {"x": torch.zeros(2, SEQUENCE, HIDDEN)}).graph)


def placed(facts, op, axis):
    node = next(node for node in facts.nodes.values() if node.op == op)
    return [str(strategy) for strategy in facts.strategies(node, axis)]


def test_the_sequence_is_followed_through_heads_and_positions(facts):
    found = {str(ref): dim for ref, dim in facts.sequence.items()}
    attention = next(n.name for n in facts.nodes.values() if "attention" in n.op)
    assert found[attention] == 2 and found["x"] == 1
    assert facts.sequence[Ref("p_position")] == 0
    extents = {facts.specs[ref].shape[dim].const for ref, dim in facts.sequence.items()}
    assert extents == {SEQUENCE}


def test_rows_of_a_plain_matrix_model_have_no_sequence():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.b(self.a(x).relu()).square().mean()

    facts = GraphFacts(capture(Plain(), {"x": torch.zeros(4, 8)}).graph)
    assert facts.sequence == {}


def test_a_context_axis_leaves_weights_whole(facts):
    plain = MeshAxis(name=CONTEXT, size=2, sequence=True)
    for node in facts.nodes.values():
        for strategy in facts.strategies(node, plain):
            for ref, placement in zip(node.inputs(), strategy.inputs, strict=True):
                if ref in facts.parameters and isinstance(placement, Shard):
                    assert facts.sequence[ref] == placement.dim


def test_zigzag_gives_every_rank_an_early_and_a_late_part(facts):
    axis = MeshAxis(name=CONTEXT, size=2, sequence=True, zigzag=True)
    attention = placed(facts, "aten.scaled_dot_product_attention", axis)
    assert "S(2:6|-6), R*, R* -> S(2:6|-6) [causal_rows]" in attention
    assert "S(1), S(1), S(1) -> S(1)" in attention
    assert not any("S(2)" in text for text in attention)
    assert zigzag(12, 2) == (6, -6) and zigzag(12, 4) == ()
