"""Saved tensors against what torch's autograd really saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs.saved import INPUT, MADE, saved_refs
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


class CopiedOperand(ExplicitAttention):
    """The base of a transposed operand is kept by GELU, its copy by the product."""

    def forward(self, x):
        q = self.q(x)
        heads = q.view(*q.shape[:2], self.heads, -1).transpose(1, 2)
        return F.gelu(q).sum() + (heads @ heads.mT).sum() + self.k(q.transpose(1, 2).mT).sum()


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
        q, k, v = (f(x).view(b, s, self.heads, d).transpose(1, 2) for f in (self.q, self.k, self.v))
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
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

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
    "copied operand": CopiedOperand,
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


def node(name, target, *args, shape=(4, 8), dtype="float32", **kwargs):
    spec = TensorSpec(shape=tuple(map(Size, shape)), dtype=dtype)
    return OpNode(
        name=name,
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
        outputs=(spec,),
        requires_grad=True,
    )


def saved_of(nodes, inputs, **kwargs):
    """Saved set of hand-made nodes; all values and inputs carry gradients."""
    specs = dict(inputs)
    for op in nodes:
        specs.update({Ref(op.name, i): spec for i, spec in enumerate(op.outputs)})
    grads = {ref for ref, spec in specs.items() if spec.is_floating}
    return saved_refs(nodes, specs, grads, **kwargs)


X = {Ref("x"): TensorSpec(shape=(Size(4), Size(8)), dtype="float32")}


def test_values_outside_the_nodes_are_inputs():
    saved = saved_of(
        [node("a", "aten.gelu.default", Ref("x")), node("b", "aten.gelu.default", Ref("a"))], X
    )
    assert [(v.ref.name, v.kind) for v in saved.values] == [("x", INPUT), ("a", MADE)]


def test_a_view_of_an_earlier_block_keeps_its_base():
    view = node("v", "aten.view.default", Ref("x"), (32,), shape=(32,))
    gelu = node("g", "aten.gelu.default", Ref("v"), shape=(32,))
    specs = {**X, Ref("v"): view.outputs[0], Ref("g"): gelu.outputs[0]}
    storage = trace_storage([view, gelu], specs)
    saved = saved_refs([gelu], specs, set(specs), storage=storage)
    assert [v.ref for v in saved.values] == [Ref("x")]
    assert not saved_refs([gelu], specs, set(specs), storage=storage, exclude={Ref("x")}).values


def test_dropout_keeps_one_byte_an_element_and_nothing_when_idle():
    active = saved_of([node("d", "aten.dropout.default", Ref("x"), 0.1, True)], X)
    assert not active.values
    assert [(e.like, e.bytes_per_element) for e in active.extras] == [(Ref("d"), 1)]
    for args in ((0.1, False), (0.0, True)):
        idle = node("d", "aten.dropout.default", Ref("x"), *args)
        after = node("g", "aten.gelu.default", Ref("d"))
        saved = saved_of([idle, after], X)
        assert [v.ref for v in saved.values] == [Ref("x")]
        assert not saved.extras


@pytest.mark.parametrize(("logits", "each"), [("bfloat16", 4), ("float32", 4), ("float64", 8)])
def test_loss_keeps_a_wide_log_softmax_and_the_target(logits, each):
    inputs = {
        Ref("x"): TensorSpec(shape=(Size(4), Size(8)), dtype=logits),
        Ref("t"): TensorSpec(shape=(Size(4),), dtype="int64"),
    }
    loss = node("l", "autopar.cross_entropy_sum.default", Ref("x"), Ref("t"), -100, 0.0, shape=())
    saved = saved_of([loss], inputs)
    assert [v.ref for v in saved.values] == [Ref("t")]
    assert [(e.like, e.bytes_per_element) for e in saved.extras] == [(Ref("x"), each)]


def test_a_fused_loss_keeps_the_logits_before_they_are_widened():
    specs = {
        Ref("x"): TensorSpec(shape=(Size(4), Size(8)), dtype="bfloat16"),
        Ref("w"): TensorSpec(shape=(Size(4), Size(8)), dtype="float32"),
        Ref("t"): TensorSpec(shape=(Size(4),), dtype="int64"),
    }
    wide = node("w", "aten.to.dtype", Ref("x"), "float32")
    loss = node("l", "autopar.cross_entropy_sum.default", Ref("w"), Ref("t"), -100, 0.0, shape=())
    for fuses, each in ((False, 4), (True, 2)):
        saved = saved_refs([wide, loss], specs, {Ref("x"), Ref("w")}, fuses_loss=fuses)
        assert [(e.like, e.bytes_per_element) for e in saved.extras] == [(Ref("w"), each)]


def attention(dropout=0.0, dtype="float32"):
    shape = (2, 4, 16, 8)
    refs = {Ref(n): TensorSpec(shape=tuple(map(Size, shape)), dtype=dtype) for n in "qkv"}
    op = node(
        "a",
        "aten.scaled_dot_product_attention.default",
        *refs,
        None,
        dropout,
        shape=shape,
        dtype=dtype,
    )
    return op, refs


def test_attention_with_dropout_writes_the_scores():
    op, inputs = attention(dropout=0.1, dtype="bfloat16")
    saved = saved_of([op], inputs)
    per_output = sum(e.bytes_per_element for e in saved.extras if e.like == Ref("a"))
    assert per_output * 8 == 16 * (2 + 1 + 2)  # softmax, mask, dropped softmax of 16 keys


@pytest.mark.parametrize(("kind", "fused"), [("cpu", True), ("cuda", False)])
def test_float64_attention_is_fused_on_cpu_alone(kind, fused):
    op, inputs = attention(dtype="float64")
    saved = saved_of([op], inputs, device_kind=kind)
    assert (Ref("a") in {v.ref for v in saved.values}) is fused


def test_an_unknown_op_keeps_everything_and_is_named():
    saved = saved_of([node("u", "custom.thing.default", Ref("x"))], X)
    assert {v.ref.name for v in saved.values} == {"x", "u"}
    assert saved.assumed == ("custom.thing.default",)


def test_a_node_without_gradient_keeps_nothing():
    op = node("g", "aten.gelu.default", Ref("x"))
    specs = {**X, Ref("g"): op.outputs[0]}
    saved = saved_refs([op], specs, set())
    assert not saved.values
    assert not saved.extras


class Wrap(nn.Module):
    """One op on two values that carry gradients and that nothing else keeps."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.function(x + self.a, x + self.b)


LABELS = torch.zeros(16, dtype=torch.long)
CALLS = {
    "abs": lambda a, b: a.abs(),
    "add": lambda a, b: a + b,
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "addmm": lambda a, b: torch.addmm(a[0], a, b[:8]),
    "amax": lambda a, b: a.amax(-1),
    "atan2": torch.atan2,
    "bce": lambda a, b: F.binary_cross_entropy_with_logits(a, torch.ones(16, 8)),
    "bmm": lambda a, b: torch.bmm(a.view(2, 8, 8), b.view(2, 8, 8)),
    "cat": lambda a, b: torch.cat([a, b]),
    "celu": lambda a, b: F.celu(a),
    "clamp": lambda a, b: a.clamp(0, 1),
    "cos": lambda a, b: a.cos(),
    "cross_entropy": lambda a, b: F.cross_entropy(a, LABELS),
    "cumsum": lambda a, b: a.cumsum(-1),
    "div": lambda a, b: a / b,
    "div scalar": lambda a, b: a / 3,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "elu": lambda a, b: F.elu(a),
    "embedding": lambda a, b: F.embedding(LABELS, a),
    "exp": lambda a, b: a.exp(),
    "gather": lambda a, b: a.gather(1, LABELS[:, None]),
    "glu": lambda a, b: F.glu(a),
    "hardswish": lambda a, b: F.hardswish(a),
    "hardtanh": lambda a, b: F.hardtanh(a),
    "index": lambda a, b: a[LABELS],
    "index_select": lambda a, b: a.index_select(0, LABELS),
    "leaky_relu": lambda a, b: F.leaky_relu(a),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "log": lambda a, b: a.log(),
    "log_softmax": lambda a, b: a.log_softmax(-1),
    "logsumexp": lambda a, b: a.logsumexp(-1),
    "masked_fill": lambda a, b: a.masked_fill(LABELS[:, None] > 0, 0.0),
    "max": lambda a, b: a.max(-1)[0],
    "maximum": torch.maximum,
    "mean": lambda a, b: a.mean(),
    "mish": lambda a, b: F.mish(a),
    "mse": F.mse_loss,
    "mul": lambda a, b: a * b,
    "mul constant": lambda a, b: a * torch.ones(16, 8),
    "mul scalar": lambda a, b: a * 2,
    "nan_to_num": lambda a, b: a.nan_to_num(),
    "norm": lambda a, b: a.norm(dim=-1),
    "pad": lambda a, b: F.pad(a, (0, 1)),
    "pow": lambda a, b: a**2,
    "pow scalar": lambda a, b: 2**a,
    "pow tensor": lambda a, b: a**b,
    "pow one": lambda a, b: a**1,
    "prod": lambda a, b: a.prod(-1),
    "reciprocal": lambda a, b: a.reciprocal(),
    "relu": lambda a, b: a.relu(),
    "rsqrt": lambda a, b: a.rsqrt(),
    "rsub": lambda a, b: 1 - a,
    "scatter_add": lambda a, b: a.scatter_add(1, LABELS[:, None], b),
    "selu": lambda a, b: F.selu(a),
    "sigmoid": lambda a, b: a.sigmoid(),
    "silu": lambda a, b: F.silu(a),
    "softplus": lambda a, b: F.softplus(a),
    "sort": lambda a, b: a.sort(-1)[0],
    "sqrt": lambda a, b: a.sqrt(),
    "std": lambda a, b: a.std(-1),
    "sum": lambda a, b: a.sum(-1),
    "tan": lambda a, b: a.tan(),
    "tanh": lambda a, b: a.tanh(),
    "to": lambda a, b: a.double(),
    "topk": lambda a, b: a.topk(2)[0],
    "tril": lambda a, b: a.tril(),
    "var": lambda a, b: a.var(-1),
    "where": lambda a, b: torch.where(LABELS[:, None] > 0, a, b),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_agree_with_autograd(graphs, name):
    check(graphs, Wrap(CALLS[name]), torch.rand(16, 8).add(0.5))


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
    assert predicted == pytest.approx(counted, rel=1e-9, abs=8)
    return predicted
