"""The decoder-only transformers of published runs as plain PyTorch, by sizes and kernels.

What the published frameworks run as one kernel is one op here: norms, attention, the masked
softmax. Rotary positions stand for the kernel that turns queries and keys: they move the same
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.experts import DroplessExperts, TopKRouter
from model_zoo.layers import Embedding, Linear
from model_zoo.llama import rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Sizes of one model without its depth, and the kernels it was run with.

    `gated` has three matrices in the feed-forward (SwiGLU), RMS norms, rotary positions and no
    biases, as Llama; otherwise two, layer norms, learned positions and biases, as GPT-3. With
    `fused_attention` scores never reach memory, with `fused_norm` and
    `fused_rotary` a norm, and what turns queries and keys, is one kernel. `experts` 0 is a dense
    feed-forward.
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int
    gated: bool
    tied: bool
    dropout: float
    fused_attention: bool
    fused_norm: bool
    fused_rotary: bool
    experts: int = 0
    top_k: int = 0
    dtype: str = "bfloat16"


class Norm(nn.Module):
    """RMS norm, in one op or written out in float32."""

    def __init__(self, hidden: int, fused: bool) -> None:
        super().__init__()
        self.weight, self.fused = nn.Parameter(torch.ones(hidden)), fused

    def forward(self, x: Tensor) -> Tensor:
        if not self.fused:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            return wide.to(x.dtype) * self.weight
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def norm(a: Architecture) -> nn.Module:
    """The norm of a model."""
    return Norm(a.hidden, a.fused_norm) if a.gated else nn.LayerNorm(a.hidden)


def in_one_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Moves what the fused kernel for rotary positions moves; the angles are not its own."""
    return x * cos + x * sin


class Attention(nn.Module):
    """Causal attention in which several query heads may share one key-value head."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.a, self.head_dim = a, a.hidden // a.heads
        kv = a.kv_heads * self.head_dim
        self.q = Linear(a.hidden, a.hidden, bias=not a.gated)
        self.k = Linear(a.hidden, kv, bias=not a.gated)
        self.v = Linear(a.hidden, kv, bias=not a.gated)
        self.out = Linear(a.hidden, a.hidden, bias=not a.gated)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (
            part(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if angles is not None:
            turn = in_one_kernel if self.a.fused_rotary else rotate
            q, k = (turn(part, *angles) for part in (q, k))
        if self.a.fused_attention:
            if self.a.kv_heads < self.a.heads:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = self.written_out(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))

    def written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Products, and the fused scale, mask and softmax of Megatron-LM as one softmax."""
        if self.a.kv_heads < self.a.heads:
            times = self.a.heads // self.a.kv_heads
            k, v = (x[:, :, None].expand(-1, -1, times, -1, -1).reshape(q.shape) for x in (k, v))
        weights = torch.matmul(q, k.transpose(-1, -2)).softmax(-1)
        return torch.matmul(F.dropout(weights, self.a.dropout, self.training), v)


class FeedForward(nn.Module):
    """SwiGLU, or linear, GELU, linear."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate = Linear(a.hidden, a.ffn, bias=False) if a.gated else None
        self.up = Linear(a.hidden, a.ffn, bias=not a.gated)
        self.down = Linear(a.ffn, a.hidden, bias=not a.gated)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Dropless experts behind a top-k router."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.router = TopKRouter(a.hidden, experts=a.experts, top_k=a.top_k, normalize=True)
        self.experts = DroplessExperts(a.hidden, a.ffn, experts=a.experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return self.experts(tokens, self.router(tokens)).view_as(x)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(a), norm(a)
        self.attention = Attention(a)
        self.feed_forward = Experts(a) if a.experts else FeedForward(a)
        self.dropout = a.dropout

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x), angles))
        return x + self.drop(self.feed_forward(self.norm_2(x)))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """The language model: embeddings, layers, norm, head. Labels are the next tokens, as the data
    loaders of frameworks hand them out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, a: Architecture, layers: int) -> None:
        super().__init__()
        self.a = a
        self.token = Embedding(a.vocab, a.hidden)
        self.position = None if a.gated else Embedding(a.seq_len, a.hidden)
        self.layers = nn.ModuleList(Layer(a) for _ in range(layers))
        self.norm = norm(a)
        self.head = Linear(a.hidden, a.vocab, bias=False)
        self.register_buffer("cos", torch.empty(a.seq_len, a.hidden // a.heads), persistent=False)
        self.register_buffer("sin", torch.empty(a.seq_len, a.hidden // a.heads), persistent=False)
        if a.tied:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(input_ids)
        angles = (self.cos, self.sin) if self.position is None else None
        if self.position is not None:
            x = x + self.position(torch.arange(x.shape[1], device=x.device))
            if self.a.dropout:
                x = F.dropout(x, self.a.dropout, self.training)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, self.a.vocab), labels.view(-1))


def parameters(a: Architecture, layers: int) -> float:
    """How many parameters a model has, without biases and norms."""
    kv = a.kv_heads * a.hidden // a.heads
    attention = 2 * a.hidden * (a.hidden + kv)
    one = (3 if a.gated else 2) * a.hidden * a.ffn
    ffn = one * max(1, a.experts) + a.hidden * a.experts
    ends = a.vocab * a.hidden * (1 if a.tied else 2) + (0 if a.gated else a.seq_len * a.hidden)
    return float(layers * (attention + ffn) + ends)


def flops(a: Architecture, layers: int, tokens: int) -> float:
    """Operations of forward and backward, causal attention counted once, nothing run again."""
    active = a.top_k if a.experts else 1
    kv = a.kv_heads * a.hidden // a.heads
    ffn = (3 if a.gated else 2) * a.hidden * a.ffn * active
    one = 2 * a.hidden * (a.hidden + kv) + ffn
    return 6.0 * tokens * (layers * (one + a.seq_len * a.hidden) + a.vocab * a.hidden)


def build(a: Architecture, layers: int, samples: int) -> tuple[Decoder, dict[str, Tensor]]:
    """The model and a batch, without memory for either."""
    with torch.device("meta"):
        model = Decoder(a, layers).to(getattr(torch, a.dtype))
        ids = torch.zeros(samples, a.seq_len, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


__all__ = ["Architecture", "build", "flops", "parameters"]
