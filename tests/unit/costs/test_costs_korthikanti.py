"""Activations of a GPT layer against the closed form of Korthikanti et al., 2022, section 4.

s b h (34 + 5 a s / h) bytes for 2-byte activations where the attention scores are written out:
34 = 4 (norm inputs) + 4 (inputs of the first linears) + 6 (query, key, value) + 2 (input of the
output projection) + 8 + 8 (input of GELU and of the second MLP linear) + 2 (dropout masks), and 5
of a s s b: softmax 2, its dropout mask 1, the dropped softmax 2. The paper leaves out the
statistics of the norms: float32 mean and rstd of two norms, 16 bytes a token.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs.saved import saved_refs
from autopar.ir.graph import Ref

SEQ, BATCH, HIDDEN, HEADS = 1024, 2, 512, 8
SBH, SCORES = SEQ * BATCH * HIDDEN, HEADS * SEQ * SEQ * BATCH
STATISTICS = 16 * SEQ * BATCH


class Layer(nn.Module):
    def __init__(self, *, fused):
        super().__init__()
        self.fused = fused
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.1)

    def attend(self, q, k, v):
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5
        return self.drop(scores.softmax(-1)) @ v

    def forward(self, x):
        q, k, v = (
            t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


@pytest.fixture
def layer(graphs):
    def build(*, fused):
        module = Layer(fused=fused).to("meta", torch.bfloat16)
        x = torch.empty(BATCH, SEQ, HIDDEN, device="meta", dtype=torch.bfloat16)
        graph = graphs.to_graph(module, x)
        saved = saved_refs(
            graph.nodes, graph.specs(), graph.differentiable(), exclude=graphs.owned(graph)
        )
        assert not saved.assumed
        return graph, saved

    return build


def test_written_out_attention(graphs, layer):
    graph, saved = layer(fused=False)
    found = saved.nbytes(graphs.numel_of(graph), graph.specs())
    formula = SBH * (34 + 5 * HEADS * SEQ / HIDDEN)
    assert found == formula + STATISTICS
    assert found == pytest.approx(formula, rel=0.01)


def test_fused_attention_drops_the_scores(graphs, layer):
    graph, saved = layer(fused=True)
    log_sum_exp = 4 * HEADS * SEQ * BATCH
    found = saved.nbytes(graphs.numel_of(graph), graph.specs())
    assert found == SBH * 34 + STATISTICS + log_sum_exp


@pytest.mark.parametrize("ways", [2, 8])
def test_tensor_parallel_divides_what_lies_between_the_linears(graphs, layer, ways):
    """s b h (10 + 24 / t + 5 a s / (h t)): norms, their results and the masks stay whole."""
    graph, saved = layer(fused=False)
    whole = {Ref("x")} | {
        Ref(node.name)
        for node in graph.nodes
        if node.op in ("aten.layer_norm", "aten.add", "aten.dropout")
        and len(node.outputs[0].shape) == 3
    }
    numel = graphs.numel_of(graph)
    found = saved.nbytes(lambda ref: numel(ref) // (1 if ref in whole else ways), graph.specs())
    formula = SBH * (10 + 24 / ways + 5 * HEADS * SEQ / (HIDDEN * ways))
    assert found == formula + STATISTICS
    everything = saved.nbytes(lambda ref: numel(ref) // ways, graph.specs())
    assert everything == SBH * (34 + 5 * HEADS * SEQ / HIDDEN) / ways + STATISTICS / ways
