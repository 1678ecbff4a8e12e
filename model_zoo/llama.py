"""Llama 2 and 3: RMS norm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers import Embedding, Linear, RMSNorm, next_token_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama. `ffn` is the inner width of the feed-forward."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


class Rotary(nn.Module):
    """Cosine and sine of the rotary position angles (Su et al. 2021), in real arithmetic."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.theta = theta
        self.head_dim = head_dim
        self.register_buffer("inv_freq", torch.empty(head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the frequencies, which are fixed, not learned."""
        exponent = torch.arange(0, self.head_dim, 2, device=self.inv_freq.device) / self.head_dim
        self.inv_freq.copy_(self.theta**-exponent)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two (seq, head_dim) tensors in the dtype of `x`, for positions 0 to seq - 1 of `x`."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq.float()[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) of (..., seq, head_dim) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat each head of (batch, heads, seq, head_dim) `times` times, next to itself."""
    if times == 1:
        return x
    batch, heads, seq, head_dim = x.shape
    x = x[:, :, None].expand(batch, heads, times, seq, head_dim)
    return x.reshape(batch, heads * times, seq, head_dim)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key-value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.heads // config.kv_heads
        kv_dim = config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = Linear(config.hidden, kv_dim, bias=False)
        self.v_proj = Linear(config.hidden, kv_dim, bias=False)
        self.o_proj = Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        batch, seq, hidden = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = repeat_heads(k, self.queries_per_kv), repeat_heads(v, self.queries_per_kv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, hidden))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn, bias=False)
        self.up = Linear(hidden, ffn, bias=False)
        self.down = Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.norm_2 = RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward = FeedForward(config.hidden, config.ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.feed_forward(self.norm_2(x))


class Decoder(nn.Module):
    """A language model with rotary positions: embedding, blocks, norm, head.

    Every block takes the stream (batch, seq, hidden) with the cosines and sines of the positions.
    Embedding and head are not tied.
    """

    def __init__(
        self,
        *,
        vocab: int,
        hidden: int,
        rotary: Rotary,
        blocks: Iterable[nn.Module],
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.token = Embedding(vocab, hidden)
        self.rotary = rotary
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(hidden, norm_eps)
        self.head = Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (batch, seq, vocab) and, given `labels`, the mean next-token loss."""
        x = self.token(input_ids)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": next_token_loss(logits, labels), "logits": logits}


class Llama(Decoder):
    """The dense model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(
            vocab=config.vocab,
            hidden=config.hidden,
            rotary=Rotary(config.head_dim, config.rope_theta),
            blocks=(Block(config) for _ in range(config.layers)),
            norm_eps=config.norm_eps,
        )
