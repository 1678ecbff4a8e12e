"""A vocabulary split over ranks, unevenly, against the whole on one device."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.ir.collective import CollectiveOp
from autopar.runtime import comm, kernels, shards
from autopar.runtime.axes import create_world

pytestmark = pytest.mark.distributed

SIZE = 4


def check_vocab(vocab, smoothing, shape):
    axis = create_world([("tensor", SIZE)], [range(SIZE)]).meshes[0].axes["tensor"]
    torch.manual_seed(0)
    whole = torch.randn(shape[0], vocab, *shape[1:], dtype=torch.float64) * 30
    target = torch.randint(vocab, shape)
    target.view(-1)[0], target.view(-1)[1] = vocab - 1, -100
    logits = whole.clone().requires_grad_()
    want = F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
    (want * 0.5).backward()
    part = shards.take(whole, 1, (), SIZE, axis.rank).clone().requires_grad_()
    axis.recorder.start()
    partial = kernels.vocab_cross_entropy(
        part, target, axis.start(vocab), axis, num_classes=vocab, label_smoothing=smoothing
    )
    loss = partial.detach().clone()
    axis.recorder.phase = "backward"
    (partial * 0.5).backward()
    events = axis.recorder.stop()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(part.grad, shards.take(logits.grad, 1, (), SIZE, axis.rank))
    assert [(event.op, event.nbytes, event.phase) for event in events] == [
        (CollectiveOp.ALL_REDUCE, 8 * target.numel(), "forward")
    ] * 2


@pytest.mark.parametrize("vocab", [10, 5, 8])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(pool4, vocab, smoothing):
    pool4.run(check_vocab, vocab, smoothing, (6,))
    pool4.run(check_vocab, vocab, smoothing, (2, 3))


def check_embedding(vocab):
    axis = create_world([("tensor", SIZE)], [range(SIZE)]).meshes[0].axes["tensor"]
    torch.manual_seed(0)
    table = torch.randn(vocab, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(vocab).repeat(2).view(2, vocab)
    want = F.embedding(ids, table)
    grad = torch.randn_like(want)
    want.backward(grad)
    part = shards.take(table.detach(), 0, (), SIZE, axis.rank).clone().requires_grad_()
    have = comm.sum_partial(kernels.vocab_embedding(ids, part, axis.start(vocab)), axis)
    have.backward(grad)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(part.grad, shards.take(table.grad, 0, (), SIZE, axis.rank))


@pytest.mark.parametrize("vocab", [10, 5])
def test_embedding(pool4, vocab):
    pool4.run(check_embedding, vocab)


def check_half_precision():
    axis = create_world([("tensor", SIZE)], [range(SIZE)]).meshes[0].axes["tensor"]
    torch.manual_seed(0)
    whole, target = torch.randn(5, 16).bfloat16(), torch.randint(16, (5,))
    part = shards.take(whole, 1, (), SIZE, axis.rank).clone().requires_grad_()
    loss = kernels.vocab_cross_entropy(part, target, axis.start(16), axis)
    loss.backward()
    assert loss.dtype == part.grad.dtype == torch.bfloat16
    total = loss.detach().float()
    dist.all_reduce(total)
    want = F.cross_entropy(whole.float(), target, reduction="sum")
    torch.testing.assert_close(total, want, atol=0, rtol=0.02)


def test_half_precision(pool4):
    pool4.run(check_half_precision)
