"""Expert layers against their definitions, token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from model_zoo.experts import (
    CapacityExperts,
    DroplessExperts,
    GroupedSigmoidRouter,
    TopKRouter,
)
from model_zoo.registry import ZOO

HIDDEN, FFN, EXPERTS = 8, 12, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def capacity_layer(top_k, factor):
    layer = CapacityExperts(
        HIDDEN, FFN, experts=EXPERTS, top_k=top_k, capacity_factor=factor
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def by_hand(layer, x):
    """Outputs of one sequence and its auxiliary loss, by the papers' words."""
    probabilities = layer.router(x).softmax(-1)
    gates, chosen = probabilities.topk(layer.top_k, -1)
    if layer.top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    free = [layer.capacity(len(x))] * EXPERTS
    result, dropped = torch.zeros_like(x), 0
    for choice in range(layer.top_k):
        for token in range(len(x)):
            expert = int(chosen[token, choice])
            if free[expert] == 0:
                dropped += 1
                continue
            free[expert] -= 1
            inner = F.gelu(x[token] @ layer.up.weight[expert], approximate="tanh")
            result[token] += gates[token, choice] * (inner @ layer.down.weight[expert])
    share = torch.stack([(chosen[:, 0] == e).double().mean() for e in range(EXPERTS)])
    return result, EXPERTS * (share * probabilities.mean(0)).sum(), dropped


@pytest.mark.parametrize(("top_k", "factor"), [(1, 1.25), (1, 0.5), (2, 1.0), (2, 0.5)])
def test_capacity_experts_by_hand(top_k, factor):
    layer, x = capacity_layer(top_k, factor), torch.randn(3, 10, HIDDEN, dtype=torch.float64)
    found, balance = layer(x)
    wanted, balances, dropped = zip(*(by_hand(layer, sequence) for sequence in x), strict=True)
    torch.testing.assert_close(found, torch.stack(wanted))
    torch.testing.assert_close(balance, torch.stack(balances).mean())
    assert sum(dropped) > 0, "no token was dropped, so the capacity was not tested"


def test_an_even_routing_has_an_auxiliary_loss_of_one():
    layer = capacity_layer(1, 1.0)
    torch.nn.init.zeros_(layer.router.weight)
    _, balance = layer(torch.randn(2, 8, HIDDEN, dtype=torch.float64))
    assert balance.item() == pytest.approx(1.0)


@pytest.mark.parametrize("experts", [EXPERTS, 16])
def test_dropless_experts_by_hand(experts):
    """With 16 experts and 10 choices some have no token; their gradient is zero, not None."""
    layer = DroplessExperts(HIDDEN, 16, experts=experts)
    router = TopKRouter(HIDDEN, experts=experts, top_k=2, normalize=True)
    tokens = torch.randn(5, HIDDEN)
    weights, chosen = routes = router(tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    found = layer(tokens, routes)
    for token in range(5):
        wanted = torch.zeros(HIDDEN)
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up, down = (m.weight[expert] for m in (layer.gate, layer.up, layer.down))
            wanted += weight * ((F.silu(tokens[token] @ gate) * (tokens[token] @ up)) @ down)
        torch.testing.assert_close(found[token], wanted)
    found.pow(2).sum().backward()
    unused = sorted(set(range(experts)) - set(chosen.flatten().tolist()))
    assert bool(unused) == (experts == 16)
    assert layer.up.weight.grad[unused].abs().sum() == 0


def test_deepseek_routes_within_the_best_groups():
    router = GroupedSigmoidRouter(
        HIDDEN, experts=8, top_k=3, groups=4, top_groups=2, scale=2.5
    ).double()
    torch.nn.init.normal_(router.gate.weight)
    router.bias.copy_(torch.randn(8))
    tokens = torch.randn(20, HIDDEN, dtype=torch.float64)
    weights, chosen = router(tokens)
    for token in range(20):
        affinity = router.gate(tokens[token]).sigmoid()
        preferred = affinity + router.bias
        best = [preferred[2 * g : 2 * g + 2].sum() for g in range(4)]
        groups = sorted(range(4), key=lambda g: -best[g])[:2]
        allowed = [e for g in groups for e in (2 * g, 2 * g + 1)]
        wanted = sorted(allowed, key=lambda e: -preferred[e])[:3]
        assert chosen[token].tolist() == wanted
        torch.testing.assert_close(weights[token], affinity[wanted] / affinity[wanted].sum() * 2.5)


@pytest.mark.parametrize("name", ["switch_tiny", "glam_tiny"])
def test_the_loss_is_next_token_loss_plus_the_weighted_auxiliary_one(name):
    model, batch = ZOO[name].build(), ZOO[name].example(2, 8)
    found = model(**batch)
    plain = F.cross_entropy(
        found["logits"][:, :-1].reshape(-1, 512), batch["labels"][:, 1:].flatten()
    )
    seen = []
    model.blocks[1].experts.register_forward_hook(lambda _, __, output: seen.append(output[1]))
    model(**batch)
    torch.testing.assert_close(found["loss"], plain + 0.01 * seen[0])


@pytest.mark.parametrize("name", ["switch_tiny", "glam_tiny"])
def test_sequences_do_not_reach_each_other(name):
    model, ids = ZOO[name].build(), ZOO[name].example(2, 8)["input_ids"]
    alone = model(ids[:1])["logits"]
    torch.testing.assert_close(model(ids)["logits"][:1], alone)
