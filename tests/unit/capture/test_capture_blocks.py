"""Chains of blocks: layers from the graph alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, check_chain, find_blocks
from autopar.capture.flow import Flow
from autopar.errors import CaptureError
from autopar.ir.blocks import BlockChain
from autopar.ir.graph import OpGraph, Ref

HIDDEN = 8


class Layer(nn.Module):
    """Pre-norm attention and feed-forward on a residual stream."""

    def __init__(self, ffn: int = 32) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, ffn), nn.Linear(ffn, HIDDEN)

    def forward(self, x, mask=None, scale=None):
        q, k, v = self.qkv(self.norm_1(x)).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + (y if scale is None else y * scale)


class Transformer(nn.Module):
    """Embedding, layers, norm, tied head, loss. `read` picks how layers are called."""

    def __init__(self, layers: list[Layer], call=lambda layer, i, x: layer(x)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(HIDDEN)
        self.call = call

    def forward(self, ids):
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            x = self.call(layer, i, x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


IDS = torch.arange(12).reshape(2, 6)


def chain_of(model: nn.Module, *batch: torch.Tensor, min_blocks: int = 1) -> BlockChain:
    graph = capture(model, batch or (IDS,)).graph
    chain = find_blocks(graph, min_blocks=min_blocks)
    check_chain(graph, chain)
    return chain


def members(chain: BlockChain) -> list[tuple[int, ...]]:
    return [block_class.members for block_class in chain.classes]


def paths(chain: BlockChain) -> list[str]:
    return [block.module_path for block in chain.blocks]


def test_a_transformer_is_embedding_layers_and_head():
    chain = chain_of(Transformer([Layer() for _ in range(12)]))
    assert members(chain) == [(0,), tuple(range(1, 13)), (13,)]
    assert paths(chain)[:3] == ["embedding", "layers.0", "layers.1"]
    assert [block_class.name for block_class in chain.classes] == ["embedding", "layers", "norm"]


def test_one_value_crosses_between_layers():
    chain = chain_of(Transformer([Layer() for _ in range(4)]))
    assert [len(crossing) for crossing in chain.boundaries] == [1] * 5
    for i, crossing in enumerate(chain.boundaries):
        assert chain.blocks[i].outputs == crossing
        assert chain.blocks[i + 1].inputs == crossing


def test_entries_of_a_class_correspond():
    model = Transformer([Layer() for _ in range(3)])
    graph = capture(model, (IDS,)).graph
    chain = find_blocks(graph)
    nodes, specs = {n.name: n for n in graph.nodes}, graph.specs()
    first, *others = (chain.blocks[i] for i in chain.classes[1].members)
    fqn = {source.name: source.fqn for source in graph.sources}
    for other in others:
        assert [nodes[n].target for n in first.nodes] == [nodes[n].target for n in other.nodes]
        ours = [fqn[ref.name].split(".", 2)[2] for ref in first.parameters]
        theirs = [fqn[ref.name].split(".", 2)[2] for ref in other.parameters]
        assert ours == theirs
        assert [specs[r] for r in first.inputs] == [specs[r] for r in other.inputs]


def test_a_tied_weight_is_the_same_ref_in_both_blocks():
    chain = chain_of(Transformer([Layer() for _ in range(2)]))
    tied = Ref("p_embedding_weight")
    assert tied in chain.blocks[0].parameters
    assert tied in chain.blocks[-1].parameters


def test_a_layer_used_again_is_one_class_with_one_set_of_parameters():
    layer = Layer()
    chain = chain_of(Transformer([layer] * 4))
    assert members(chain) == [(0,), (1, 2, 3, 4), (5,)]
    assert len({block.parameters for block in chain.blocks[1:5]}) == 1


def test_layers_of_another_shape_are_another_class():
    chain = chain_of(Transformer([Layer(), Layer(), Layer(48), Layer(48)]))
    assert members(chain) == [(0,), (1, 2), (3, 4), (5,)]


def test_alternating_layers_are_blocks_of_their_own():
    chain = chain_of(Transformer([Layer(32), Layer(48)] * 3))
    assert members(chain) == [(0,), (1, 3, 5), (2, 4, 6), (7,)]


def test_an_odd_first_layer_is_a_block_of_its_own():
    chain = chain_of(Transformer([Layer(48), *(Layer() for _ in range(4))]))
    assert members(chain) == [(0,), (1,), (2, 3, 4, 5), (6,)]


def test_frozen_layers_are_another_class():
    model = Transformer([Layer() for _ in range(4)])
    for layer in model.layers[2:]:
        layer.requires_grad_(False)
    assert members(chain_of(model)) == [(0,), (1, 2), (3, 4), (5,)]


def test_layers_that_read_other_masks_of_one_shape_are_one_class():
    def call(layer, i, x):
        mask = torch.ones(6, 6, dtype=torch.bool).tril(i % 2)
        return layer(x, mask=mask)

    chain = chain_of(Transformer([Layer() for _ in range(4)], call))
    assert members(chain) == [(0,), (1, 2, 3, 4), (5,)]
    assert all(len(chain.blocks[i].shared) == 1 for i in range(1, 5))
    assert "tril" in chain.setup


def test_a_value_that_all_layers_read_does_not_hide_them():
    class Conditioned(Transformer):
        def forward(self, ids):
            scale = self.norm(self.embedding(ids[:, :1]))
            self.call = lambda layer, i, x: layer(x, scale=scale)
            return super().forward(ids)

    chain = chain_of(Conditioned([Layer() for _ in range(4)]))
    layers = max(chain.classes, key=lambda c: len(c.members))
    assert len(layers.members) == 4
    assert {chain.blocks[i].module_path for i in layers.members} == {
        f"layers.{i}" for i in range(4)
    }
    assert [len(crossing) for crossing in chain.boundaries[1:4]] == [2, 2, 2]


class MLP(nn.Module):
    """Linear layers of the given widths with GELU between."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x, y):
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.mse_loss(self.layers[-1](x), y)


X = torch.arange(32, dtype=torch.float32).reshape(4, 8).sin()


def weights(chain: BlockChain) -> list[int]:
    return [len(block.parameters) // 2 for block in chain.blocks]


def test_a_uniform_mlp_is_cut_into_pairs_of_layers():
    chain = chain_of(MLP(*[8] * 9), X, X)
    # the first layer's input takes no gradient, so the layer is not equal to the others
    assert members(chain) == [(0,), (1, 2, 3), (4,)]
    assert weights(chain) == [1, 2, 2, 2, 1]


def test_smaller_blocks_are_made_on_demand():
    chain = chain_of(MLP(*[8] * 9), X, X, min_blocks=7)
    assert weights(chain) == [1] * 8


def test_blocks_begin_where_few_bytes_cross():
    chain = chain_of(MLP(8, *[32, 8] * 4), X, X)
    specs = capture(MLP(8, *[32, 8] * 4), (X, X)).graph.specs()
    widths = [specs[ref].shape[-1].const for crossing in chain.boundaries for ref in crossing]
    assert set(widths) == {8}
    assert members(chain) == [(0,), (1, 2), (3,)]


class Skip(nn.Module):
    """h = a(x); y = b(h); c(y) + h: a value that jumps over a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        h = self.a(x)
        return (self.c(self.b(h).relu()) + h).pow(2).sum()


def test_a_skip_connection_crosses_every_boundary_on_its_way():
    chain = chain_of(Skip(), X, min_blocks=3)
    assert len(chain.blocks) >= 3
    skipping = chain.blocks[0].outputs
    assert len(skipping) == 1
    assert [skipping[0] in crossing for crossing in chain.boundaries[:2]] == [True, True]
    assert skipping[0] in chain.blocks[2].inputs


def test_a_graph_that_cannot_be_cut_so_often_gives_its_longest_chain():
    chain = chain_of(MLP(8, 8), X, X, min_blocks=50)
    assert 1 <= len(chain.blocks) < 50


def test_outputs_besides_the_loss_cross_nothing():
    class WithLogits(MLP):
        def forward(self, x, y):
            hidden = F.gelu(self.layers[0](x))
            return {"loss": super().forward(hidden, y), "hidden": hidden}

    chain = chain_of(WithLogits(8, 8, 8, 8), X, X, min_blocks=3)
    assert all(len(crossing) == 1 for crossing in chain.boundaries)


def test_the_loss_crosses_what_comes_after_it():
    class Auxiliary(MLP):
        def forward(self, x, y):
            return {"loss": super().forward(x, y), "extra": self.layers[0](y).relu()}

    flow = Flow(capture(Auxiliary(8, 8), (X, X)).graph)
    assert flow.main[-1].op == "aten.relu"
    assert flow.graph.loss in flow.crossings([len(flow) - 1])[0]


def test_random_numbers_are_drawn_in_one_block():
    class Noisy(MLP):
        def forward(self, x, y):
            return super().forward(x + torch.rand_like(x), y)

    chain = chain_of(Noisy(8, 8, 8), X, X)
    assert not chain.setup
    assert "rand_like" in chain.blocks[0].nodes


def test_names_and_paths_decide_nothing():
    graph = capture(Transformer([Layer() for _ in range(4)]), (IDS,)).graph
    bare = replace(graph, nodes=tuple(replace(n, module_path="", source="") for n in graph.nodes))
    ours, theirs = find_blocks(graph), find_blocks(bare)
    assert [block.nodes for block in ours.blocks] == [block.nodes for block in theirs.blocks]
    assert [c.digest for c in ours.classes] == [c.digest for c in theirs.classes]


@pytest.fixture(scope="module")
def small() -> tuple[OpGraph, BlockChain]:
    graph = capture(Transformer([Layer() for _ in range(2)]), (IDS,)).graph
    return graph, find_blocks(graph)


def changed(chain: BlockChain, index: int, **fields) -> BlockChain:
    blocks = list(chain.blocks)
    blocks[index] = replace(blocks[index], **fields)
    return replace(chain, blocks=tuple(blocks))


def test_the_check_names_what_is_wrong(small):
    graph, chain = small
    block = chain.blocks[1]
    missing = changed(chain, 1, nodes=block.nodes[:-1])
    doubled = changed(chain, 1, nodes=(*block.nodes, chain.blocks[0].nodes[0]))
    foreign = changed(chain, 1, nodes=(*block.nodes, "nowhere"))
    swapped = changed(chain, 1, nodes=block.nodes[::-1])
    unlisted = changed(chain, 1, parameters=block.parameters[1:])
    for broken, message in (
        (missing, f"missing from the chain: {block.nodes[-1]}"),
        (doubled, f"more than once: {chain.blocks[0].nodes[0]}"),
        (foreign, "not in the graph: nowhere"),
        (swapped, "not in the order"),
        (unlisted, f"reads {block.parameters[0]} without listing it"),
    ):
        with pytest.raises(CaptureError, match=message):
            check_chain(graph, broken)
