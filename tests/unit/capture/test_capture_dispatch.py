"""Dropless experts, however they are spelled, become rows sent, multiplied and sent back."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.verify import verify_capture
from autopar.errors import CaptureError
from autopar.rules import batch_axis
from model_zoo.registry import ZOO

EXPERTS, TOP_K, HIDDEN = 4, 2, 8
DISPATCH = {"route", "to_experts", "expert_mm", "from_experts"}


class Spelled(nn.Module):
    """One dropless layer; subclasses spell how rows are sorted and put back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x):
        tokens = x.reshape(-1, HIDDEN)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K, -1)
        return self.experts(tokens, weights, chosen).pow(2).mean()

    def product(self, rows, counts):
        return F.grouped_mm(rows, self.weight, offs=counts.cumsum(0).to(torch.int32))


class Gathered(Spelled):
    def experts(self, tokens, weights, chosen):
        order = chosen.view(-1).argsort(stable=True)
        counts = F.one_hot(chosen, EXPERTS).sum((0, 1))
        rows = self.product(tokens[order // TOP_K], counts)
        rows = rows[order.argsort()].view(-1, TOP_K, HIDDEN)
        return (rows * weights.unsqueeze(-1)).sum(1)


class IndexAdded(Spelled):
    """Weighted in sorted order, then added to the tokens' rows."""

    def experts(self, tokens, weights, chosen):
        ids, order = chosen.flatten().sort(stable=True)
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        token = order // TOP_K
        rows = self.product(tokens.index_select(0, token), counts)
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, token, rows)


class Scattered(Spelled):
    """With indices spread over the columns, onto a base that is not zero."""

    def experts(self, tokens, weights, chosen):
        order = torch.argsort(chosen.view(-1), stable=True)
        ones = torch.ones_like(chosen.view(-1))
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, chosen.view(-1), ones)
        token = (order // TOP_K).reshape(-1, 1).expand(-1, HIDDEN)
        rows = self.product(torch.gather(tokens, 0, token), counts)
        rows = rows * weights.view(-1)[order].reshape(-1, 1)
        return tokens.scatter_add(0, token, rows)


class Placed(Spelled):
    """Put back by writing every row where its choice stands; a bias by sorted expert."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def experts(self, tokens, weights, chosen):
        ids, order = torch.sort(chosen.reshape(-1))
        counts = F.one_hot(ids, EXPERTS).sum(0)
        rows = torch.tanh(self.product(tokens[order // TOP_K], counts) + self.bias[ids])
        back = torch.zeros_like(rows)
        back[order] = rows
        return (back.unflatten(0, (-1, TOP_K)) * weights[..., None]).sum(1)


SPELLINGS = (Gathered, IndexAdded, Scattered, Placed)


def batch(samples=3):
    return (torch.randn(samples, 5, HIDDEN),)


def own_ops(graph):
    return {node.op.removeprefix("autopar.") for node in graph.nodes if "autopar." in node.op}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_every_spelling_is_understood_and_means_the_same(spelled):
    model = spelled()
    captured = capture(model, batch())
    assert own_ops(captured.graph) >= DISPATCH
    assert not {"aten.argsort", "aten.sort", "aten.histc"} & {n.op for n in captured.graph.nodes}
    assert batch_axis(captured.graph).coupled == ()
    verify_capture(model, batch(), captured)
    verify_capture(model, batch(7), captured)


@pytest.mark.parametrize("name", ["mixtral_tiny", "qwen3_moe_tiny", "deepseek_tiny"])
def test_zoo_models_are_understood(name):
    model, example = ZOO[name].build(), ZOO[name].example(3, 8)
    captured = capture(model, example)
    assert own_ops(captured.graph) >= DISPATCH
    assert batch_axis(captured.graph).coupled == ()
    verify_capture(model, example, captured)


@pytest.mark.parametrize("name", ["switch_tiny", "glam_tiny"])
def test_capacity_models_do_not_couple_samples(name):
    model, example = ZOO[name].build(), ZOO[name].example(3, 8)
    captured = capture(model, example)
    assert batch_axis(captured.graph).coupled == ()
    verify_capture(model, example, captured)


class KeepsPositions(Gathered):
    """The sorted positions themselves leave the layer."""

    def experts(self, tokens, weights, chosen):
        order = chosen.view(-1).argsort(stable=True)
        return super().experts(tokens, weights, chosen) * order.float().mean()


class WeightsInTheWrongOrder(Spelled):
    """Rows in sorted order meet weights in token order: wrong, perhaps, but what it says."""

    def experts(self, tokens, weights, chosen):
        order = chosen.view(-1).argsort(stable=True)
        counts = F.one_hot(chosen.view(-1), EXPERTS).sum(0)
        rows = tokens[order // TOP_K] * weights.reshape(-1, 1)
        rows = self.product(rows, counts)
        return rows[order.argsort()]


class Shuffled(Spelled):
    """A grouped product of rows that were never sorted."""

    def experts(self, tokens, weights, chosen):
        order = chosen.view(-1).argsort(stable=True)
        counts = F.one_hot(chosen.view(-1), EXPERTS).sum(0)
        rows = self.product(tokens.repeat_interleave(TOP_K, 0), counts)
        return rows[order.argsort()]


@pytest.mark.parametrize("spelled", [KeepsPositions, WeightsInTheWrongOrder, Shuffled])
def test_what_is_not_understood_is_left_alone(spelled):
    model = spelled()
    captured = capture(model, batch())
    assert "route" not in own_ops(captured.graph)
    assert batch_axis(captured.graph).coupled
    verify_capture(model, batch(), captured)


class BatchWideBalance(Gathered):
    """Switch's auxiliary loss over the whole batch: a product of two means."""

    def forward(self, x):
        tokens = x.reshape(-1, HIDDEN)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(TOP_K, -1)
        share = F.one_hot(chosen[:, 0], EXPERTS).float().mean(0)
        balance = EXPERTS * (share * probabilities.mean(0)).sum()
        return self.experts(tokens, weights, chosen).pow(2).mean() + balance


def test_a_balance_over_the_whole_batch_is_named_as_what_couples_samples():
    graph = capture(BatchWideBalance(), batch()).graph
    assert own_ops(graph) >= DISPATCH
    ((node, reason),) = batch_axis(graph).coupled
    assert next(n for n in graph.nodes if n.name == node).op == "aten.mul"
    assert "summed over the samples and depends on a parameter" in reason


class LoopOverChosen(Spelled):
    def experts(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            rows = tokens[token] @ self.weight[expert]
            result = result.index_add(0, token, rows * weights[token, place, None])
        return result


class LoopOverCounts(Spelled):
    def experts(self, tokens, weights, chosen):
        order = chosen.view(-1).argsort(stable=True)
        rows, parts = tokens[order // TOP_K], []
        counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
        for expert, part in enumerate(rows.split(counts.tolist())):
            parts.append(part @ self.weight[expert])
        return torch.cat(parts)[order.argsort()]


class IndexedByChosen(LoopOverChosen):
    """As `LoopOverChosen`, without asking how many rows there are."""

    def experts(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            rows = tokens[token] @ self.weight[expert]
            result = result.index_add(0, token, rows * weights[token, place, None])
        return result


@pytest.mark.parametrize("spelled", [LoopOverChosen, LoopOverCounts, IndexedByChosen])
def test_sizes_that_depend_on_the_routing_are_refused_with_a_way_out(spelled):
    with pytest.raises(CaptureError) as error:
        capture(spelled(), batch())
    text = str(error.value)
    assert "test_capture_dispatch.py:" in text
    assert "grouped_mm" in text
    assert "capacity" in text
    assert 'experts_implementation="grouped_mm"' in text


class MaskedLoop(Spelled):
    """Every expert on every token: no size depends on the routing."""

    def experts(self, tokens, weights, chosen):
        result = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            result = result + share * (tokens @ self.weight[expert])
        return result


def test_a_loop_over_all_experts_with_masks_is_captured():
    model = MaskedLoop()
    captured = capture(model, batch())
    assert batch_axis(captured.graph).coupled == ()
    verify_capture(model, batch(), captured)
