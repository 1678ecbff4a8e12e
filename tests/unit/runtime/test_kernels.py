import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.placement import Shard, local_slices, zigzag
from autopar.runtime import kernels
from autopar.runtime.axes import AxisGroup
from autopar.runtime.context import StepContext
from autopar.runtime.counter_random import keep_mask
from autopar.runtime.recompute import Recomputation
from autopar.runtime.recorder import Recorder
from autopar.runtime.reference import reference_random, whole_dims
from autopar.runtime.weight_gradients import compute_deferred

ALONE = AxisGroup(axes=("tensor",), ranks=(0,), rank=0, recorder=Recorder())


def context(**changes):
    return StepContext(axes={}, batch=1, global_batch=1, **{"seed": 3, "step": 5, **changes})


def test_dropout_and_its_gradient():
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    keep = keep_mask(context(), 7, 0.25, whole_dims(x.shape), x)
    y = kernels.dropout(x, 0.25, context(), op=7, dims=whole_dims(x.shape))
    torch.testing.assert_close(y, x * keep / 0.75)
    grad = torch.randn_like(x)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad * keep / 0.75)


def test_dropout_is_off_in_eval():
    x = torch.randn(4)
    assert kernels.dropout(x, 0.5, context(training=False), op=0, dims=whole_dims((4,))) is x
    assert kernels.dropout(x, 0.0, context(), op=0, dims=whole_dims((4,))) is x
    assert not kernels.dropout(x, 1.0, context(), op=0, dims=whole_dims((4,))).any()


def test_dropout_keeps_only_a_bool_mask():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x = torch.randn(4, 4, requires_grad=True)
        kernels.dropout(x, 0.5, context(), op=0, dims=whole_dims((4, 4)))
    assert [t.dtype for t in kept] == [torch.bool]


MASKS = {
    "none": (None, False),
    "causal": (None, True),
    "bool": (torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool(), False),
    "added": (torch.linspace(-2, 2, 15, dtype=torch.float64).view(3, 5), False),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gqa", [False, True])
def test_attention_with_almost_no_dropout_is_torchs(mask, gqa):
    attn_mask, causal = MASKS[mask]
    torch.manual_seed(0)
    heads = 2 if gqa else 4
    q = torch.randn(2, 4, 3, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, heads, 5, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, heads, 5, 7, dtype=torch.float64, requires_grad=True)
    options = {"scale": 0.3, "enable_gqa": gqa}
    want = F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, causal, **options)
    dims = whole_dims((2, 4, 3, 5))
    have = kernels.attention(
        q, k, v, attn_mask, 1e-15, causal, **options, ctx=context(), op=0, dims=dims
    )
    torch.testing.assert_close(have, want)
    grad = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(have, (q, k, v), grad),
        torch.autograd.grad(want, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_attention_dropout_uses_the_mask():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, 5, dtype=torch.float64) for _ in range(3))
    dims = whole_dims((2, 3, 4, 4))
    keep = keep_mask(context(), 2, 0.4, dims, torch.empty(2, 3, 4, 4))
    weights = torch.softmax(q @ k.transpose(-1, -2) / 5**0.5, -1) * keep / 0.6
    have = kernels.attention(q, k, v, None, 0.4, ctx=context(), op=2, dims=dims)
    torch.testing.assert_close(have, weights @ v)
    off = kernels.attention(q, k, v, None, 0.4, ctx=context(training=False), op=2, dims=dims)
    torch.testing.assert_close(off, F.scaled_dot_product_attention(q, k, v))


TARGETS = torch.tensor([1, -100, 3, 0, 9, -100])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_sum_over_count_is_the_mean(smoothing):
    torch.manual_seed(0)
    logits = torch.randn(6, 10, dtype=torch.float64)
    total = kernels.cross_entropy_sum(logits, TARGETS, label_smoothing=smoothing)
    count = kernels.count_valid(TARGETS, dtype=torch.float64)
    assert count.item() == 4
    torch.testing.assert_close(
        total / count, F.cross_entropy(logits, TARGETS, label_smoothing=smoothing)
    )
    alone = kernels.vocab_cross_entropy(
        logits, TARGETS, 0, ALONE, num_classes=10, label_smoothing=smoothing
    )
    torch.testing.assert_close(alone, total)


def test_smoothing_needs_the_number_of_classes():
    with pytest.raises(ValueError, match="num_classes"):
        kernels.vocab_cross_entropy(torch.zeros(1, 2), TARGETS[:1], 0, ALONE, label_smoothing=0.1)


def test_no_samples():
    logits = torch.zeros(0, 10, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64)
    for loss in (
        kernels.cross_entropy_sum(logits, target),
        kernels.vocab_cross_entropy(logits, target, 0, ALONE),
    ):
        assert loss.item() == 0
        loss.backward()
    assert logits.grad.shape == (0, 10)


def test_partial_mean():
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    parts = [kernels.partial_mean(part, (0, 2), True, 20) for part in x.split([1, 3])]
    torch.testing.assert_close(sum(parts), x.mean((0, 2), keepdim=True))


def test_vocab_embedding_on_shards():
    torch.manual_seed(0)
    weight = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 9, 4], [4, 7, 3]])
    grad = torch.randn(2, 3, 3, dtype=torch.float64)
    want = F.embedding(ids, weight, padding_idx=4)
    want.backward(grad)
    parts = [weight.detach()[a:b].requires_grad_() for a, b in ((0, 3), (3, 6), (6, 10), (10, 10))]
    have = sum(
        kernels.vocab_embedding(ids, part, start, padding_idx=4)
        for part, start in zip(parts, (0, 3, 6, 10), strict=True)
    )
    torch.testing.assert_close(have, want)
    have.backward(grad)
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), weight.grad)


WEIGHTS = {
    "embedding": (11, 4),
    "linear": (6, 4),
    "bias": (6,),
    "addmm": (6, 5),
    "addmm_bias": (5,),
    "transposed": (7, 5),
    "batched": (3, 7, 2),
}


def products(w, ctx, ids, again):
    """Every product with a weight, one after the other; `again` runs the middle ones twice."""

    def middle(x):
        y = torch.tanh(kernels.linear(x, w["linear"], w["bias"], ctx))
        y = torch.tanh(kernels.addmm(w["addmm_bias"], y.flatten(0, 1), w["addmm"], ctx))
        y, weight = y.unflatten(0, (3, 4)), w["transposed"].t()
        return (kernels.matmul(y, weight, ctx) + kernels.matmul(2 * y, weight, ctx),)

    x = kernels.embedding(ids, w["embedding"], ctx, padding_idx=2)
    if not again:
        return kernels.bmm(*middle(x), w["batched"], ctx)
    with Recomputation() as twice:
        (y,) = twice(middle, x)
        return kernels.bmm(y, w["batched"], ctx)


@pytest.mark.parametrize("again", [False, True])
def test_weight_gradients_are_computed_when_asked_for(again):
    torch.manual_seed(0)
    w = {name: torch.randn(shape, dtype=torch.float64) for name, shape in WEIGHTS.items()}
    ids = torch.tensor([[0, 2, 4, 4], [4, 7, 3, 10], [1, 1, 1, 9]])
    for weight in w.values():
        weight.requires_grad_()
    grad = torch.randn(3, 4, 2, dtype=torch.float64)
    want = torch.autograd.grad(products(w, context(), ids, False), list(w.values()), grad)
    deferred = []
    for _ in range(2):
        products(w, context(deferred=deferred), ids, again).backward(grad)
    assert all(weight.grad is None for weight in w.values())
    compute_deferred(deferred)
    assert deferred == []
    for weight, expected in zip(w.values(), want, strict=True):
        torch.testing.assert_close(weight.grad, 2 * expected, rtol=1e-14, atol=1e-14)


def test_a_frozen_weight_gets_no_gradient_and_its_input_does():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    deferred = []
    ctx = context(deferred=deferred)
    kernels.linear(x, weight, bias.requires_grad_(), ctx).sum().backward()
    compute_deferred(deferred)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3))
    assert weight.grad is None
    assert bias.grad.equal(torch.full((4,), 2.0, dtype=torch.float64))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.3, batch_first=True, dtype=torch.float64
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.inside(self.drop(x))
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if self.training else 0.0)


def test_reference_random_is_a_function_of_seed_and_step():
    torch.manual_seed(0)
    model, x = Small(), torch.randn(2, 5, 8, dtype=torch.float64)

    def run(seed, step):
        with reference_random(seed, step):
            return model(x)

    assert run(1, 0).equal(run(1, 0))
    assert not run(1, 0).equal(run(1, 1))
    assert not run(1, 0).equal(run(2, 0))
    model.eval()
    torch.testing.assert_close(run(1, 0), model(x))


def test_reference_random_numbers_ops_in_order():
    ctx = context()
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    with reference_random(3, 5):
        F.dropout(x, 0.0)
        F.dropout(x, 0.5, training=False)
        first = nn.Dropout(0.5)(x)
        second = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        third = torch.ops.aten.dropout.default(x, 0.5, True)
    dims = whole_dims(x.shape)
    assert first.equal(kernels.dropout(x, 0.5, ctx, op=0, dims=dims))
    want = kernels.attention(x, x, x, None, 0.1, ctx=ctx, op=1, dims=whole_dims((3, 4, 5, 5)))
    assert second.equal(want)
    assert third.equal(kernels.dropout(x, 0.5, ctx, op=2, dims=dims))


def test_reference_random_reaches_dropout_inside_multi_head_attention():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with reference_random(0, 0):
        _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    keep = keep_mask(context(seed=0, step=0), 0, 0.5, whole_dims((4, 3, 3)), torch.empty(4, 3, 3))
    assert (weights.view(4, 3, 3) != 0).equal(keep)


@pytest.mark.parametrize("heads", [2, 4])
def test_causal_attention_of_some_queries_is_that_of_all(heads):
    """Ranges of queries, with grouped keys too, against the whole causal attention."""
    q = torch.randn(2, 4, 12, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, heads, 12, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    grouped = heads != 4
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    for size in (2, 3, 4):
        parts = [((3 * r, 3),) if size == 4 else zigzag_ranges(r, size) for r in range(size)]
        assert sorted(i for rows in parts for s, n in rows for i in range(s, s + n)) == [*range(12)]
        for rows in parts:
            index = torch.tensor([i for start, n in rows for i in range(start, start + n)])
            local = q.index_select(2, index)
            got = kernels.attention(local, k, v, None, 0.0, True, enable_gqa=grouped, rows=rows)
            torch.testing.assert_close(got, whole.index_select(2, index))
            wanted = torch.autograd.grad(
                whole.index_select(2, index).square().sum(), (q, k, v), retain_graph=True
            )
            given = torch.autograd.grad(got.square().sum(), (q, k, v), retain_graph=True)
            for a, b in zip(given, wanted, strict=True):
                torch.testing.assert_close(a, b)


def zigzag_ranges(rank, size):
    return local_slices(12, Shard(0, zigzag(12, size)), size, rank)
