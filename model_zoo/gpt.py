"""GPT: decoder-only transformer with learned positions and pre-layer-norm (GPT-2, GPT-3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import Embedding, Linear, next_token_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of a GPT. `seq_len` is the longest sequence; `tied` shares embedding and head."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    seq_len: int = 1024
    dropout: float = 0.0
    tied: bool = True

    @property
    def residual_std(self) -> float:
        """Init of the projections into the residual stream: 0.02 / sqrt(2 layers), as in GPT-2."""
        return 0.02 / math.sqrt(2 * self.layers)


class Attention(nn.Module):
    """Causal self-attention over heads, with one packed query-key-value projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.hidden = config.hidden
        self.head_dim = config.hidden // config.heads
        self.dropout = config.dropout
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=True)
        self.proj = Linear(config.hidden, config.hidden, bias=True, std=config.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        batch, seq, _ = x.shape
        q, k, v = (
            part.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).split(self.hidden, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, self.hidden))


class FeedForward(nn.Module):
    """Linear, GELU, linear; four times wider inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, 4 * config.hidden, bias=True)
        self.down = Linear(4 * config.hidden, config.hidden, bias=True, std=config.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.feed_forward(self.norm_2(x)))


class GPT(nn.Module):
    """The language model: embeddings, blocks, norm, head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = Embedding(config.vocab, config.hidden)
        self.position = Embedding(config.seq_len, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (batch, seq, vocab) and, given `labels`, the mean next-token loss."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token(input_ids) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": next_token_loss(logits, labels), "logits": logits}
