"""Small models whose wiring is unusual, each with a batch, for parity with the eager run."""

import torch
import torch.nn.functional as F
from case_models import draw, regression, tokens
from torch import nn


class SharedLayer(nn.Module):
    """One layer used four times (as ALBERT does): on every stage, with one gradient."""

    def __init__(self):
        super().__init__()
        self.start, self.layer, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, y):
        x = self.start(x)
        for _ in range(4):
            x = x + torch.tanh(self.layer(self.norm(x)))
        return F.mse_loss(x, y)


class Temperature(nn.Module):
    """A scalar computed once from a parameter and read by every layer; one output twice."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y):
        scale = self.log.exp()
        for layer in self.layers:
            x = torch.tanh(layer(x) * scale)
        return {"loss": F.mse_loss(x, y), "scale": scale, "x": x, "again": x}


class Unused(nn.Module):
    """A head whose result has no gradient, state that nothing reads, outputs of ints and bools."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.pool, self.idle = (nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x, y):
        out = self.down(torch.tanh(self.up(x)))
        loss = F.mse_loss(out, y)
        return {"loss": loss, "best": out.argmax(-1), "sign": out > 0, "pool": self.pool(out)}


class IntegersCross(nn.Module):
    """Integers and a mask made on one stage and read on a later one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids, labels):
        x = torch.tanh(self.a(self.embed(ids)))
        best = x.argmax(-1)
        x = torch.tanh(self.b(x))
        x = torch.where((ids > 2)[..., None], x, x * 0.5) + best[..., None] * 0.01
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 16)

    def forward(self, x, y):
        return F.mse_loss(self.head(self.layers(x)), y)


class AttentionWeights(nn.Module):
    """torch's attention that returns its weights, with dropout on them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, 16)

    def forward(self, x, y):
        out, weights = self.attention(x, x, x, need_weights=True)
        return {"loss": F.mse_loss(self.head(out), y), "weights": weights}


class Convolutions(nn.Module):
    """A strided convolution, a depthwise one, group norm, pooling over space."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.head = nn.GroupNorm(4, 8), nn.Linear(8, 5)

    def forward(self, x, y):
        x = F.relu(self.norm(self.depthwise(F.relu(self.stem(x)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class DenseExperts(nn.Module):
    """Every expert on every token, weighted by the two largest routing scores."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 16) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 16, 8) * 0.1)

    def forward(self, x, y):
        scores = self.router(x).softmax(-1)
        top, index = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(-1, index, top)
        hidden = torch.einsum("bsd,edf->bsef", x, self.up).relu()
        out = torch.einsum("bsef,efd->bsed", hidden, self.down)
        return F.mse_loss((out * gates[..., None]).sum(2) + x, y)


class WritesInPlace(nn.Module):
    """In-place arithmetic, a constant written into a slice, a cumulative sum, a gate."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x, y):
        h = self.a(x)
        h.mul_(2).add_(self.shift)
        h = torch.cumsum(h, -1)
        h = F.normalize(F.glu(torch.cat([h, h], -1), -1), dim=-1)
        out = self.b(h).clone()
        out[:, :2] = 0.5
        return F.smooth_l1_loss(out, y)


class TiedTwice(nn.Module):
    """A padded embedding read at both ends, scaled; positions from a parameter; soft labels."""

    def __init__(self):
        super().__init__()
        self.embed, self.kind = nn.Embedding(6, 8, padding_idx=0), nn.Embedding(2, 8)
        self.position = nn.Parameter(torch.randn(5, 8))
        self.mix = nn.Linear(8, 8)

    def forward(self, ids, labels):
        x = self.embed(ids) * 8**0.5 + self.position[: ids.shape[1]]
        x = x + self.kind(torch.zeros_like(ids))
        x = x + torch.tanh(self.mix(x))
        logits = (x @ self.embed.weight.t()).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)


class CrossAttention(nn.Module):
    """An encoder whose output every decoder layer reads, on whichever stage it is."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.queries = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.memories = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))

    def forward(self, x, y):
        memory, z = x, x * 0.5
        for layer in self.encoder:
            memory = memory + torch.relu(layer(memory))
        b, s, _ = x.shape
        for query, key_value in zip(self.queries, self.memories, strict=True):
            parts = (query(z), *key_value(memory).chunk(2, -1))
            heads = (part.view(b, s, 2, 4).transpose(1, 2) for part in parts)
            out = F.scaled_dot_product_attention(*heads)
            z = z + out.transpose(1, 2).reshape(b, s, 8)
        return {"loss": F.mse_loss(z, y), "memory": memory}


class AuxiliaryLoss(nn.Module):
    """A second loss made on an early stage, weighted by a learned scalar, and returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head, self.weight = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x, y):
        early = x
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            early = x if i == 1 else early
        aux = F.mse_loss(self.head(early), y)
        return {"loss": F.mse_loss(x, y) + self.weight.sigmoid() * aux, "aux": aux}


class ClassToken(nn.Module):
    """A learned token before the sequence, two poolings, samples weighted and normalised by hand;
    widths that no rank count divides."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.start, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, weight, y):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.start(x)], 1)
        for layer in self.layers:
            x = x + F.gelu(layer(F.layer_norm(x, (6,))))
        out = self.head(x[:, 0] + x[:, 1:].max(1).values)
        each = F.cross_entropy(out, y, reduction="none")
        return (each * weight).sum() / weight.sum()


class ComplexRotary(nn.Module):
    """Rotary positions in complex numbers, from a buffer outside of the state dict."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        angles = torch.arange(12.0, dtype=torch.float64).view(3, 4)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x, y):
        pairs = self.a(x).unflatten(-1, (4, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs) * self.turns)
        return F.mse_loss(self.b(turned.flatten(-2)), y)


WIRINGS = {
    SharedLayer: regression(),
    Temperature: regression(),
    Unused: regression(),
    IntegersCross: tokens(8, 5, 6),
    Encoder: regression(8, 16, seq=(4,)),
    AttentionWeights: regression(8, 16, seq=(4,)),
    Convolutions: {"x": draw(8, 3, 8, 8), "y": torch.arange(8) % 5},
    DenseExperts: regression(seq=(3,)),
    WritesInPlace: regression(),
    TiedTwice: tokens(8, 5, 6),
    CrossAttention: regression(seq=(3,)),
    AuxiliaryLoss: regression(),
    ClassToken: {"x": draw(8, 3, 8), "weight": draw(8, seed=5).abs(), "y": torch.arange(8) % 3},
    ComplexRotary: regression(seq=(3,)),
}
