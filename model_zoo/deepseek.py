"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, shared and routed experts.

Without the multi-token-prediction module of section 2.2, which training adds and inference drops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.experts import DroplessExperts, GroupedSigmoidRouter
from model_zoo.layers import Linear, RMSNorm
from model_zoo.llama import Decoder, FeedForward, Rotary, rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekConfig:
    """Sizes of a DeepSeek-V3.

    `q_rank` and `kv_rank` are the widths of the latent vectors; a head's query and key have
    `nope_dim` dims without position and `rope_dim` dims with it, which all heads' keys share. The
    first `dense_layers` have a feed-forward of width `ffn`; the experts' width is `expert_ffn`.
    """

    layers: int
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    ffn: int
    expert_ffn: int
    experts: int
    shared_experts: int
    top_k: int
    groups: int
    top_groups: int
    dense_layers: int
    vocab: int
    scale: float = 2.5
    norm_eps: float = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention (section 2.1.1): queries, keys and values from narrow vectors."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.heads, self.kv_rank = config.heads, config.kv_rank
        self.nope_dim, self.rope_dim = config.nope_dim, config.rope_dim
        self.value_dim = config.value_dim
        head_dim = config.nope_dim + config.rope_dim
        self.q_down = Linear(config.hidden, config.q_rank, bias=False)
        self.q_norm = RMSNorm(config.q_rank, config.norm_eps)
        self.q_up = Linear(config.q_rank, config.heads * head_dim, bias=False)
        self.kv_down = Linear(config.hidden, config.kv_rank + config.rope_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_rank, config.norm_eps)
        kv_dim = config.heads * (config.nope_dim + config.value_dim)
        self.kv_up = Linear(config.kv_rank, kv_dim, bias=False)
        self.o_proj = Linear(config.heads * config.value_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        batch, seq, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, seq, self.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope_dim], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(batch, seq, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope_dim, self.value_dim], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MixtureOfExperts(nn.Module):
    """Routed experts beside shared ones, which see every token (section 2.1.2)."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.router = GroupedSigmoidRouter(
            config.hidden,
            experts=config.experts,
            top_k=config.top_k,
            groups=config.groups,
            top_groups=config.top_groups,
            scale=config.scale,
        )
        self.experts = DroplessExperts(config.hidden, config.expert_ffn, experts=config.experts)
        self.shared = FeedForward(config.hidden, config.shared_experts * config.expert_ffn)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        tokens = x.flatten(0, 1)
        return self.experts(tokens, self.router(tokens)).view_as(x) + self.shared(x)


class Block(nn.Module):
    """Attention and feed-forward or experts, each behind a norm and added to the stream."""

    def __init__(self, config: DeepSeekConfig, *, sparse: bool) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.hidden, config.norm_eps)
        self.attention = LatentAttention(config)
        self.norm_2 = RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward: nn.Module = (
            MixtureOfExperts(config) if sparse else FeedForward(config.hidden, config.ffn)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.feed_forward(self.norm_2(x))


class DeepSeek(Decoder):
    """A decoder whose first blocks are dense and whose others have experts."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(
            vocab=config.vocab,
            hidden=config.hidden,
            rotary=Rotary(config.rope_dim),
            blocks=(Block(config, sparse=i >= config.dense_layers) for i in range(config.layers)),
            norm_eps=config.norm_eps,
        )
