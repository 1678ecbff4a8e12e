"""Small fp64 models and batches, each with what one published failure needs to show itself."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

F64 = torch.float64


def draw(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def tokens(samples, seq, vocab, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (samples, seq), generator=generator)
    labels = torch.randint(vocab, (samples, seq), generator=generator)
    return {"ids": ids, "labels": labels}


def regression(samples=8, size=8, targets=None, seq=()):
    return {
        "x": draw(samples, *seq, size),
        "y": draw(samples, *seq, size if targets is None else targets, seed=8),
    }


class Attention(nn.Module):
    """Grouped-query attention on separate projections, with a residual."""

    def __init__(self, heads, kv_heads, head_dim):
        super().__init__()
        hidden = heads * head_dim
        self.head_dim, self.repeat = head_dim, heads // kv_heads
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, kv_heads * head_dim)
        self.v = nn.Linear(hidden, kv_heads * head_dim)
        self.o = nn.Linear(hidden, hidden)

    def forward(self, x, y):
        b, s, _ = x.shape
        q, k, v = (
            proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        k, v = (part.repeat_interleave(self.repeat, dim=1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.o(out.transpose(1, 2).reshape(b, s, -1))
        return {"loss": F.mse_loss(x + out, y), "out": out}


class Packed(nn.Module):
    """Attention on one packed projection, taken apart by `split`, or by `chunk` if all equal."""

    def __init__(self, sizes, head_dim=4, hidden=16):
        super().__init__()
        self.sizes, self.head_dim = sizes, head_dim
        self.qkv = nn.Linear(hidden, sum(sizes))
        self.o = nn.Linear(sizes[0], hidden)

    def forward(self, x, y):
        b, s, _ = x.shape
        packed = self.qkv(x)
        equal = len(set(self.sizes)) == 1
        parts = packed.chunk(3, -1) if equal else packed.split(self.sizes, -1)
        q, k, v = (part.view(b, s, -1, self.head_dim).transpose(1, 2) for part in parts)
        repeat = self.sizes[0] // self.sizes[1]
        k, v = (part.repeat_interleave(repeat, dim=1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        out = self.o(out.transpose(1, 2).flatten(2))
        return {"loss": F.mse_loss(out, y), "out": out}


class Vocabulary(nn.Module):
    """Embedding and untied head over a vocabulary that no rank count divides."""

    def __init__(self, vocab, hidden=4, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(ids))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class RowBias(nn.Module):
    """A row-parallel linear with a large bias, behind a column-parallel one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 3)
        with torch.no_grad():
            self.down.bias.copy_(torch.tensor([100.0, 200.0, 300.0]))

    def forward(self, x, y):
        out = self.down(torch.tanh(self.up(x)))
        return {"loss": F.mse_loss(out, y), "out": out}


class Dropouts(nn.Module):
    """Dropout on a column-sharded output, and on the replicated residual."""

    def __init__(self, p=0.5):
        super().__init__()
        self.up = nn.Linear(8, 64)
        self.down = nn.Linear(64, 8)
        self.inner, self.residual = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x, y):
        out = x + self.residual(self.down(self.inner(torch.tanh(self.up(x)))))
        return {"loss": F.mse_loss(out, y), "out": out}


class SplitMerge(nn.Module):
    """Views that split the sharded dim of 32 in (8, 4), merge it with dims around it, and merge the
    samples: (2, 8, 4) -> (16, 4), (4, 4, 4) -> (8, 8) and (6, 256) -> (-1) are reported.

    A `recut` one cuts elsewhere than the shards are, so that they have to be put together first.
    """

    def __init__(self, recut):
        super().__init__()
        self.recut = recut
        self.up, self.mix, self.wide = nn.Linear(8, 32), nn.Linear(4, 4), nn.Linear(8, 8)

    def forward(self, x, y):
        b, s, _ = x.shape
        h = torch.tanh(self.up(x))
        split = h.view(b, s, 8, 4)  # the sharded dim becomes two
        heads = self.mix(split).transpose(1, 2).reshape(b, 8, s * 4)  # whole dims behind it join
        joined = heads.view(b, 8 * s * 4)  # and then they join it
        rows = h.reshape(b * s, 32)  # samples are joined with the sequence
        loss = F.mse_loss(rows.view(-1), y.reshape(-1)) + joined.pow(3).mean()
        if self.recut:
            square = h.view(b, s * 4, 8) * 2
            loss = loss + self.wide(square).square().mean()
        return {"loss": loss, "rows": rows, "joined": joined}


class Clipped(nn.Module):
    """A column-sharded linear, a replicated norm, and a weight tied over both ends."""

    def __init__(self, vocab=10, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.up = nn.Linear(hidden, 16)
        self.down = nn.Linear(16, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Chain(nn.Module):
    """Linear layers in a row, dropout between them."""

    def __init__(self, layers=4, size=8, p=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.dropout = nn.Dropout(p)

    def forward(self, x, y):
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return {"loss": F.mse_loss(x, y), "out": x}


class UNet(nn.Module):
    """`h = a(x); y = b(h); z = c(y); d(z + y) + h`: h skips stages, y skips one."""

    def __init__(self, size=8):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x, y):
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        out = self.d(torch.tanh(self.c(second)) + second) + first
        return {"loss": F.mse_loss(out, y), "first": first, "out": out}


class Structured(nn.Module):
    """Labels, mask and a keyword that later stages read; an output with dict, None and ints."""

    def __init__(self, size=8):
        super().__init__()
        self.a = nn.Linear(size, size)
        self.b = nn.Linear(size, size)

    def forward(self, x, labels=None, mask=None, *, scale=1.0):
        h = torch.tanh(self.a(x))
        out = self.b(h) * scale
        if mask is not None:
            out = out.masked_fill(~mask, 0.0)
        loss = F.mse_loss(out, labels)
        return {"loss": loss, "logits": out, "none": None, "sizes": (3, [4, out]), "hidden": [h]}


class LowRank(nn.Module):
    """A frozen linear with a trained update of rank 2."""

    def __init__(self, size):
        super().__init__()
        self.base = nn.Linear(size, size)
        self.base.requires_grad_(False)
        self.down = nn.Linear(size, 2, bias=False)
        self.up = nn.Linear(2, size, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class FrozenStart(nn.Module):
    """Frozen, frozen with a trained low-rank update, frozen but passing gradients, trained."""

    def __init__(self, size=8):
        super().__init__()
        self.first = nn.Linear(size, size).requires_grad_(False)
        self.adapted = LowRank(size)
        self.third = nn.Linear(size, size).requires_grad_(False)
        self.last = nn.Linear(size, size)

    def forward(self, x, y):
        h = torch.tanh(self.first(x))
        z = torch.tanh(self.adapted(h))
        z = torch.tanh(self.third(z))
        return F.mse_loss(self.last(z) + h, y)  # `h` crosses all stages and needs no gradient


class Counted(nn.Module):
    """A token loss in three forms: mean over valid tokens, their sum, and a mean made by hand."""

    def __init__(self, form, vocab=7, hidden=8):
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(vocab, hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(ids)))).flatten(0, 1)
        labels = labels.flatten()
        if self.form in ("mean", "sum"):
            return F.cross_entropy(logits, labels, reduction=self.form)
        valid = labels != -100
        each = F.cross_entropy(logits, labels, reduction="none")
        return (each * valid).sum() / valid.sum()


def counted_batch():
    """Rows of 1, 0, 5 and 5 valid labels."""
    batch = tokens(4, 5, 7)
    for row, valid in enumerate([1, 0, 5, 5]):
        batch["labels"][row, valid:] = -100
    return batch


def vocabulary_batch(vocab, samples=4, seq=5):
    """Ids and labels up to the last one, some labels left out."""
    batch = tokens(samples, seq, vocab)
    batch["ids"][0, 0] = batch["ids"][3, 4] = batch["labels"][2, 2] = vocab - 1
    batch["labels"][1, 1:] = -100
    return batch


class Adapted(nn.Module):
    """A tied vocabulary around a frozen linear with a trained low-rank update, and a norm."""

    def __init__(self, vocab=12, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.adapted = LowRank(hidden)
        self.up, self.down = nn.Linear(hidden, 16), nn.Linear(16, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = torch.tanh(self.adapted(self.embed(ids)))
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class MultiHead(nn.Module):
    """torch's own attention on one packed projection, with padding, with or without weights."""

    def __init__(self, need_weights, p=0.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, dropout=p, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x, y, pad):
        out, weights = self.attention(x, x, x, key_padding_mask=pad, need_weights=self.need_weights)
        loss = F.mse_loss(x + out, y)
        if weights is not None:
            loss = loss + weights.square().mean()
        return {"loss": loss, "out": out, "weights": weights}


class EncoderLayers(nn.Module):
    """torch's own encoder layers, norms after or before."""

    def __init__(self, p=0.0):
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 16, 4, 32, dropout=p, batch_first=True)
        self.post, self.pre = layer(), layer(norm_first=True, activation="gelu")

    def forward(self, x, y, pad):
        out = self.post(x, src_key_padding_mask=pad)
        out = self.pre(out, src_key_padding_mask=pad)
        return {"loss": F.mse_loss(out, y), "out": out}


def padded_batch(samples=5, seq=5, size=16):
    """Samples of 5 tokens, the second of which has two that are padding."""
    pad = torch.zeros(samples, seq, dtype=torch.bool)
    pad[1, 3:] = True
    return regression(samples, size, seq=(seq,)) | {"pad": pad}
