"""Saved tensors against what torch's autograd really saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs.saved import INPUT, MADE, keep_rule, saved_refs
from autopar.costs.strides import trace_storage
from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.size import Size


class Attention(nn.Module):
    def __init__(self, width=32, heads=4, *, mask=None, contiguous=True, packed=False):
        super().__init__()
        self.heads, self.contiguous, self.packed = heads, contiguous, packed
        self.register_buffer("mask", mask)
        self.qkv = nn.Linear(width, 3 * width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, s, h = x.shape
        qkv = self.qkv(x).chunk(3, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in qkv)
        y = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.mask is None)
        y = y.transpose(1, 2)
        y = y.contiguous().view(b, s, h) if self.contiguous else y.reshape(b, s, h)
        return self.out(y)


class ExplicitAttention(Attention):
    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            t.view(b, s, self.heads, -1).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x))
        )
        scores = q @ k.transpose(-1, -2) / (h // self.heads) ** 0.5
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((p @ v).transpose(1, 2).reshape(b, s, h))


class RMSNorm(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.heads = heads

    def rotate(self, x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, x):
        b, s, h = x.shape
        d = h // self.heads
        angle = torch.arange(s)[:, None] * torch.arange(d)[None].float()
        cos, sin = angle.cos(), angle.sin()
        q, k, v = (
            f(x).view(b, s, self.heads, d).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(b, s, h)


class SwiGLU(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 96, bias=False), nn.Linear(width, 96, bias=False)
        self.down = nn.Linear(96, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Head(nn.Module):
    def __init__(self, width=32, vocab=100):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        logits = self.head(self.norm(self.embed(tokens)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), tokens.reshape(-1))


class Block(nn.Module):
    """Pre-norm block with residuals: the stream is kept by the norm, not by the additions."""

    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tanh(nn.Module):
    """The tanh form of GELU written out, as GPT-2 has it."""

    def __init__(self, width=32):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)

    def forward(self, x):
        y = self.inner(x)
        return 0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.044715 * torch.pow(y, 3.0))))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        y = F.relu(self.first(x.transpose(1, 2).unsqueeze(-1)))
        return self.second(F.max_pool2d(y.expand(-1, -1, -1, 16).contiguous(), 2))


MASK = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
CASES = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)),
    "attention": Attention,
    "attention reshape": lambda: Attention(contiguous=False),
    "attention packed": lambda: Attention(packed=True),
    "attention mask": lambda: Attention(mask=MASK),
    "attention float mask": lambda: Attention(mask=MASK.float()),
    "explicit attention": ExplicitAttention,
    "rms norm": lambda: nn.Sequential(nn.Linear(32, 32), RMSNorm(), nn.Linear(32, 32)),
    "torch rms norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 32)),
    "rotary": Rotary,
    "swiglu": SwiGLU,
    "layer norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)),
    "block": Block,
    "tanh": Tanh,
    "conv": Conv,
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_bytes_equal_counted(graphs, name):
    torch.manual_seed(0)
    module, x = CASES[name](), torch.randn(2, 16, 32)
    check(graphs, module, x)


def test_cross_entropy_head(graphs):
    check(graphs, Head(), torch.randint(0, 100, (2, 16)))


def test_frozen_weights_keep_nothing_for_their_gradient(graphs):
    module = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    for parameter in module[2].parameters():
        parameter.requires_grad_(False)
    check(graphs, module, torch.randn(2, 16, 32))


def test_c01_linear_gelu_stack(graphs):
    """4 x Linear(256, 256) + GELU at batch 4096: each layer keeps its input and GELU's."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    predicted = check(graphs, nn.Sequential(*layers), torch.randn(4096, 256))
    assert predicted == 8 * 4096 * 256 * 4


def check(graphs, module, *inputs):
    graph = graphs.to_graph(module, *inputs)
    saved = saved_refs(
        graph.nodes,
        graph.specs(),
        graph.differentiable(),
        exclude=graphs.owned(graph),
        device_kind="cpu",
    )
    assert not saved.assumed
    predicted = saved.nbytes(graphs.numel_of(graph), graph.specs())
    counted = graphs.counted_bytes(module, *inputs)
    assert predicted == pytest.approx(counted, rel=1e-9)
    return predicted
