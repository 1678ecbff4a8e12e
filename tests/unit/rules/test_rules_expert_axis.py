"""What an axis that splits samples offers besides: the experts, where a graph has any."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import BY_EXPERT, P, R, Shard
from autopar.rules import GraphFacts
from model_zoo.registry import ZOO

DATA = MeshAxis(name="data", size=4)


def facts(model, batch):
    return GraphFacts(capture(model, batch).graph)


def zoo(name):
    with torch.device("meta"):
        return facts(ZOO[name].build(), ZOO[name].example(2, 8))


def offered(found, op):
    """The strategies that split experts, of all nodes of one op."""
    nodes = [found.nodes[name] for name in found.experts]
    return {str(found.experts[n.name].strategy) for n in nodes if n.op == op}


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny", "mlp"])
def test_dense_models_have_none(name):
    assert zoo(name).experts == {}


def test_experts_with_a_capacity():
    found = zoo("switch_tiny")
    assert {found.nodes[name].op for name in found.experts} == {"aten.einsum", "aten.gelu"}
    assert offered(found, "aten.einsum") == {"S(1), S(0) -> S(1)"}
    assert offered(found, "aten.gelu") == {"S(1) -> S(1)"}


@pytest.mark.parametrize("name", ["mixtral_tiny", "qwen3_moe_tiny", "deepseek_tiny"])
def test_dropless_experts(name):
    found = zoo(name)
    assert offered(found, "autopar.route") == {"S(0) -> S(0), P(sum), E [route_exchange]"}
    assert offered(found, "autopar.to_experts") == {
        "S(0), S(0), P(sum), E -> E [to_experts_exchange]"
    }
    assert offered(found, "autopar.expert_mm") == {"E, S(0), E -> E"}
    assert offered(found, "aten.mul") == {"E, E -> E"}
    assert offered(found, "autopar.from_experts") == {
        "E, S(0), P(sum), E -> S(0) [from_experts_exchange]"
    }


def test_rows_sent_are_priced_in_both_passes_and_counts_in_one():
    found = zoo("mixtral_tiny")
    of = {found.nodes[n].op: e.strategy.collectives for n, e in found.experts.items()}
    rows = of["autopar.to_experts"]
    assert [(c.phase, c.times, c.nbytes((16, 32))) for c in rows] == [
        ("forward", 2, 2 * 16 * 32 * 4),
        ("backward", 2, 2 * 16 * 32 * 4),
    ]
    (counts,) = of["autopar.route"]
    assert (counts.phase, counts.nbytes((16, 2))) == ("forward", 4 * 8)


def test_no_more_ranks_than_experts():
    found = zoo("mixtral_tiny")
    node = next(n for n in found.graph.nodes if n.op == "autopar.expert_mm")
    both = found.strategies(node, DATA)
    assert [s.outputs for s in both] == [(Shard(0),), (BY_EXPERT,)]
    assert both[0].inputs[2] == P
    for size in (1, 5):
        assert len(found.strategies(node, MeshAxis(name="data", size=size))) == 1


class Batched(nn.Module):
    """Dense experts as a batched product, of a weight that is stored transposed."""

    def __init__(self, apart=False):
        super().__init__()
        self.apart = apart
        if apart:
            self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(4))
        else:
            self.weight = nn.Parameter(torch.randn(4, 8, 8))
        self.bias = nn.Parameter(torch.randn(4, 1, 8))

    def forward(self, x):
        weight = torch.stack(list(self.weights)) if self.apart else self.weight.transpose(1, 2)
        slots = x.unsqueeze(0).expand(4, -1, -1)
        return (torch.bmm(slots, weight) + self.bias).pow(2).mean()


def test_weights_are_followed_to_their_parameters():
    found = facts(Batched(), (torch.randn(3, 8),))
    assert offered(found, "aten.transpose") == {"S(0) -> S(0)"}
    assert offered(found, "aten.bmm") == {"S(0), S(0) -> S(0)"}
    assert offered(found, "aten.add") == {"S(0), S(0) -> S(0)"}
    pow_node = next(n for n in found.graph.nodes if n.op == "aten.pow")
    assert found.experts[pow_node.name].strategy.outputs == (Shard(0),)


def test_experts_that_are_parameters_of_their_own_are_not_split():
    assert facts(Batched(apart=True), (torch.randn(3, 8),)).experts == {}


class Reshaped(nn.Module):
    """Slots of all samples in one dim, as a batched product takes them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        slots = torch.einsum("gecm,emf->gecf", F.relu(x), self.weight)
        return slots.reshape(slots.shape[0], 4, -1).square().mean()


def test_views_between_products_keep_the_experts():
    found = facts(Reshaped(), (torch.randn(3, 4, 5, 8),))
    assert offered(found, "aten.reshape") == {"S(1) -> S(1)"}
    assert all(R not in e.strategy.outputs for e in found.experts.values())
