"""Mixture-of-experts layers: routers, experts behind a capacity, and dropless experts.

Shapes: g sequences (the batch), s tokens of a sequence, e experts, k choices a token, c slots an
expert has for a sequence, m hidden, f inner width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import Linear

Routes = tuple[Tensor, Tensor]
"""Weights and indices, (tokens, k) each, of the experts chosen for every token."""


def at_least_single(x: Tensor) -> Tensor:
    """The values in float32, or as they are in float64: routers keep to single precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExpertLinear(nn.Module):
    """A weight of shape (experts, d_in, d_out), from N(0, std)."""

    def __init__(self, experts: int, d_in: int, d_out: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(experts, d_in, d_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, slots: Tensor, offsets: Tensor) -> Tensor:
        """(rows, d_in) to (rows, d_out): rows up to `offsets[i]`, and not before, are expert i's.

        `offsets` is int32, the running sum of the number of rows of each expert.
        """
        return F.grouped_mm(slots, self.weight, offs=offsets)


class CapacityExperts(nn.Module):
    """GShard's layer (Lepikhin et al. 2020, section 2.2): a fixed number of slots an expert.

    Every sequence is a group of its own: each expert takes at most `capacity` tokens of it, first
    choices before second ones, earlier tokens before later ones; the others pass by on the residual
    stream. So no sequence depends on another. With `top_k` 1 this is the layer of Switch
    Transformer (Fedus et al. 2021, section 2.2).
    """

    def __init__(
        self, hidden: int, ffn: int, *, experts: int, top_k: int, capacity_factor: float
    ) -> None:
        super().__init__()
        self.experts, self.top_k, self.capacity_factor = experts, top_k, capacity_factor
        self.router = Linear(hidden, experts, bias=False)
        self.up = ExpertLinear(experts, hidden, ffn)
        self.down = ExpertLinear(experts, ffn, hidden)

    def capacity(self, seq: int) -> int:
        """Slots of one expert for one sequence (Fedus et al. 2021, equation 3)."""
        return math.ceil(self.top_k * seq * self.capacity_factor / self.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(g, s, m) to the same shape, and the auxiliary loss."""
        dispatch, combine, balance = self.route(x)
        slots = torch.einsum("gsec,gsm->gecm", dispatch, x)
        inner = F.gelu(torch.einsum("gecm,emf->gecf", slots, self.up.weight), approximate="tanh")
        slots = torch.einsum("gecf,efm->gecm", inner, self.down.weight)
        return torch.einsum("gsec,gecm->gsm", combine, slots), balance

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Dispatch (0 or 1) and combine (gate) tensors, (g, s, e, c) each, and the auxiliary loss.

        The loss is e * sum_i f_i P_i of every sequence by itself, with f_i the share of its tokens
        whose first choice is expert i and P_i the mean probability of i, averaged over sequences:
        GShard's, one group a sequence (Algorithm 1). Switch Transformer's (equations 4 to 6) takes
        f and P over the whole batch, a product of two means, which no split of the batch can form.
        """
        groups, seq, _ = x.shape
        probabilities = self.router(x).to(at_least_single(x).dtype).softmax(-1)
        gates, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        # (g, k * s, e), first choices of all tokens first: the order in which slots are taken
        mask = F.one_hot(chosen.transpose(1, 2), self.experts).reshape(groups, -1, self.experts)
        position = ((mask.cumsum(1) - 1) * mask).sum(-1)
        capacity = self.capacity(seq)
        slot = F.one_hot(position.clamp(max=capacity), capacity + 1)[..., :capacity]
        mask, slot = mask.to(x.dtype), slot.to(x.dtype)
        taken = torch.einsum("gne,gnc->gnec", mask, slot)
        taken = taken.view(groups, self.top_k, seq, self.experts, capacity)
        combine = torch.einsum("gks,gksec->gsec", gates.transpose(1, 2).to(x.dtype), taken)
        first = at_least_single(mask[:, :seq]).mean(1)
        balance = (first * probabilities.mean(1)).sum(-1).mean() * self.experts
        return taken.sum(1), combine, balance


class TopKRouter(nn.Module):
    """Softmax over all experts, then the `top_k` largest (Mixtral, Qwen3).

    With `normalize` the weights of a token add up to one, which makes it a softmax over the chosen
    (Jiang et al. 2024, section 2.1).
    """

    def __init__(self, hidden: int, *, experts: int, top_k: int, normalize: bool) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.gate = Linear(hidden, experts, bias=False)

    def forward(self, tokens: Tensor) -> Routes:
        """Routes of (tokens, hidden)."""
        probabilities = at_least_single(self.gate(tokens)).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(tokens.dtype), chosen


class GroupedSigmoidRouter(nn.Module):
    """DeepSeek-V3's router (DeepSeek-AI 2024, sections 2.1.2 and 4.2).

    Sigmoid affinities; experts lie in `groups`, of which the `top_groups` with the largest sums of
    their two best affinities stay open; the `top_k` best experts of those are chosen, with their
    affinities as weights, normalised and scaled. `bias`, a buffer that training moves towards
    balance without a loss, counts for the choice and not for the weights.
    """

    bias: Tensor

    def __init__(
        self,
        hidden: int,
        *,
        experts: int,
        top_k: int,
        groups: int,
        top_groups: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.top_k, self.groups, self.top_groups, self.scale = top_k, groups, top_groups, scale
        self.gate = Linear(hidden, experts, bias=False)
        self.register_buffer("bias", torch.empty(experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """No expert is preferred."""
        nn.init.zeros_(self.bias)

    def forward(self, tokens: Tensor) -> Routes:
        """Routes of (tokens, hidden)."""
        affinity = at_least_single(self.gate(tokens)).sigmoid()
        preferred = affinity.detach() + self.bias.to(affinity.dtype)
        grouped = preferred.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1)
        open_groups = best.topk(self.top_groups, dim=-1).indices
        is_open = torch.zeros_like(best).scatter(-1, open_groups, 1.0).bool()
        preferred = grouped.masked_fill(~is_open.unsqueeze(-1), -math.inf).flatten(-2)
        chosen = preferred.topk(self.top_k, dim=-1).indices
        weights = affinity.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        return weights.to(tokens.dtype), chosen


class DroplessExperts(nn.Module):
    """SwiGLU experts that take every token sent to them, in one grouped product per weight.

    Tokens are sorted by expert, as in MegaBlocks (Gale et al. 2022), and put back afterwards.
    """

    def __init__(self, hidden: int, ffn: int, *, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.gate = ExpertLinear(experts, hidden, ffn)
        self.up = ExpertLinear(experts, hidden, ffn)
        self.down = ExpertLinear(experts, ffn, hidden)

    def forward(self, tokens: Tensor, routes: Routes) -> Tensor:
        """(tokens, hidden) to the same shape."""
        weights, chosen = routes
        top_k = chosen.shape[-1]
        by_token = chosen.flatten()
        order = by_token.argsort(stable=True)
        counts = F.one_hot(by_token, self.experts).sum(0)
        offsets = counts.cumsum(0, dtype=torch.int32)
        slots = tokens[order // top_k]
        slots = F.silu(self.gate(slots, offsets)) * self.up(slots, offsets)
        slots = self.down(slots, offsets)
        rows = slots[order.argsort()].unflatten(0, (-1, top_k))
        return (rows * weights.unsqueeze(-1)).sum(1)
