"""Language models with mixture-of-experts layers, plain PyTorch.

`CapacityModel` is Switch Transformer (top-1) and GLaM (top-2, GShard), `DroplessModel` Mixtral and
Qwen3-MoE. DeepSeek-V3 is in `model_zoo.deepseek`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.experts import CapacityExperts, DroplessExperts, TopKRouter
from model_zoo.layers import Embedding, Linear, RMSNorm, next_token_loss
from model_zoo.llama import Decoder, Rotary, repeat_heads, rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Sizes of grouped-query attention; `norm` puts an RMS norm on each head's query and key."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    norm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig:
    """Sizes of a Switch or GLaM model: every second layer has experts.

    `gated` makes the feed-forward of the other layers a gated linear unit. `balance` weighs the
    auxiliary loss.
    """

    layers: int
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int
    top_k: int
    capacity_factor: float = 1.25
    gated: bool = False
    balance: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class DroplessConfig:
    """Sizes of a Mixtral or Qwen3 model: experts in every layer; `normalize` as in `TopKRouter`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int
    top_k: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-5
    head_norm: bool = False
    normalize: bool = True


class Attention(nn.Module):
    """Causal self-attention with rotary positions; heads need not fill the hidden width."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.heads // config.kv_heads
        q_dim, kv_dim = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, q_dim, bias=False)
        self.k_proj = Linear(config.hidden, kv_dim, bias=False)
        self.v_proj = Linear(config.hidden, kv_dim, bias=False)
        self.o_proj = Linear(q_dim, config.hidden, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q, k, v = rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2)
        k, v = repeat_heads(k, self.queries_per_kv), repeat_heads(v, self.queries_per_kv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Linear, GELU, linear; or a gated linear unit with GELU (Shazeer 2020)."""

    def __init__(self, config: CapacityConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.ffn, bias=False)
        self.gate = Linear(config.hidden, config.ffn, bias=False) if config.gated else None
        self.down = Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class CapacityBlock(nn.Module):
    """Attention and a feed-forward, which is made of experts in every second block."""

    def __init__(self, config: CapacityConfig, *, sparse: bool) -> None:
        super().__init__()
        heads = AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=config.head_dim,
        )
        self.norm_1 = RMSNorm(config.hidden, 1e-6)
        self.attention = Attention(heads)
        self.norm_2 = RMSNorm(config.hidden, 1e-6)
        self.experts: CapacityExperts | None = None
        self.feed_forward: FeedForward | None = None
        if sparse:
            self.experts = CapacityExperts(
                config.hidden,
                config.ffn,
                experts=config.experts,
                top_k=config.top_k,
                capacity_factor=config.capacity_factor,
            )
        else:
            self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """(batch, seq, hidden) to the same shape, and the auxiliary loss of a sparse block."""
        x = x + self.attention(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        if self.experts is not None:
            y, balance = self.experts(y)
            return x + y, balance
        assert self.feed_forward is not None
        return x + self.feed_forward(y), None


class CapacityModel(nn.Module):
    """A decoder of Switch or GLaM blocks: embedding, blocks, norm, head."""

    def __init__(self, config: CapacityConfig) -> None:
        super().__init__()
        self.balance = config.balance
        self.token = Embedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.head_dim)
        self.blocks = nn.ModuleList(
            CapacityBlock(config, sparse=index % 2 == 1) for index in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, 1e-6)
        self.head = Linear(config.hidden, config.vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (batch, seq, vocab) and, given `labels`, next-token plus auxiliary loss."""
        x = self.token(input_ids)
        cos, sin = self.rotary(x)
        balance = []
        for block in self.blocks:
            x, own = block(x, cos, sin)
            balance += [] if own is None else [own]
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        auxiliary = self.balance * torch.stack(balance).sum()
        return {"loss": next_token_loss(logits, labels) + auxiliary, "logits": logits}


class DroplessBlock(nn.Module):
    """Attention and experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: DroplessConfig) -> None:
        super().__init__()
        heads = AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            norm=config.head_norm,
        )
        self.norm_1 = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(heads)
        self.norm_2 = RMSNorm(config.hidden, config.norm_eps)
        self.router = TopKRouter(
            config.hidden, experts=config.experts, top_k=config.top_k, normalize=config.normalize
        )
        self.experts = DroplessExperts(config.hidden, config.ffn, experts=config.experts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.norm_1(x), cos, sin)
        tokens = self.norm_2(x).flatten(0, 1)
        return x + self.experts(tokens, self.router(tokens)).view_as(x)


class DroplessModel(Decoder):
    """A decoder with experts in every block."""

    def __init__(self, config: DroplessConfig) -> None:
        super().__init__(
            vocab=config.vocab,
            hidden=config.hidden,
            rotary=Rotary(config.head_dim, config.rope_theta),
            blocks=(DroplessBlock(config) for _ in range(config.layers)),
            norm_eps=config.norm_eps,
        )
