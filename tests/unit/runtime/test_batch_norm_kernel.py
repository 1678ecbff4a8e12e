"""The batch norm of generated programs on one rank against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from autopar.runtime import kernels
from autopar.runtime.context import StepContext
from autopar.runtime.recompute import Recomputation
from autopar.runtime.recorder import Recorder

MOMENTUM, EPS = 0.3, 1e-3


def context(**changes):
    return StepContext(axes={}, batch=1, global_batch=1, **changes)


def state(channels, dtype=torch.float64):
    return [
        torch.linspace(-1, 1, channels, dtype=dtype),
        torch.linspace(0.5, 2, channels, dtype=dtype),
        torch.tensor(4),
    ]


def leaves(shape, dtype=torch.float64, affine=True):
    torch.manual_seed(0)
    x = (torch.randn(shape, dtype=dtype) * 3 + 2).requires_grad_()
    weights = [torch.randn(shape[1], dtype=dtype, requires_grad=True) for _ in range(2)]
    return [x, *(weights if affine else (None, None))]


@pytest.mark.parametrize("shape", [(6, 4), (5, 4, 3), (3, 4, 2, 5)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_is_torchs(shape, affine, dtype):
    mine, theirs = leaves(shape, dtype, affine), leaves(shape, dtype, affine)
    held, expected = state(4, dtype), state(4, dtype)
    count = mine[0].numel() // 4
    y = kernels.batch_norm(*mine, *held, MOMENTUM, EPS, context(), count, [])
    want = F.batch_norm(theirs[0], *expected[:2], *theirs[1:], True, MOMENTUM, EPS)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(held[:2], expected[:2])
    assert int(held[2]) == 5
    grad = torch.randn(shape, dtype=torch.float64).to(dtype)
    y.backward(grad)
    want.backward(grad)
    for own, other in zip(mine, theirs, strict=True):
        if own is not None:
            assert own.grad.dtype == own.dtype
            torch.testing.assert_close(own.grad, other.grad)


def test_bfloat16_computes_in_float32():
    """Closer to exact than half a unit in the last place of the largest values, and some."""
    mine, held = leaves((8, 4, 3), torch.bfloat16), state(4, torch.float32)
    exact = [value.detach().double().requires_grad_() for value in mine]
    y = kernels.batch_norm(*mine, *held, MOMENTUM, EPS, context(), 24, [])
    want = F.batch_norm(exact[0], None, None, *exact[1:], True, eps=EPS)
    y.float().square().sum().backward()
    want.square().sum().backward()
    close = {"rtol": 2**-7, "atol": 2**-7, "check_dtype": False}
    torch.testing.assert_close(y, want, **close)
    assert [value.grad.dtype for value in mine] == [torch.bfloat16] * 3
    for own, other in zip(mine[1:], exact[1:], strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=2**-6, atol=0.25, check_dtype=False)
    moved = exact[0].detach().mean((0, 2)) * MOMENTUM + state(4)[0] * (1 - MOMENTUM)
    torch.testing.assert_close(held[0], moved, rtol=1e-5, atol=1e-5, check_dtype=False)


def test_gradients_by_differences():
    x, weight, bias = leaves((4, 2, 3))

    def run(*values):
        return kernels.batch_norm(*values, None, None, None, MOMENTUM, EPS, context(), 12, [])

    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradcheck(lambda v: run(v, None, None), (x,))
    assert torch.autograd.gradcheck(lambda w: run(x.detach(), w, None), (weight,))


def test_evaluation_uses_the_running_statistics():
    values, held = leaves((6, 4)), state(4)
    y = kernels.batch_norm(*values, *held, MOMENTUM, EPS, context(training=False), 6, [])
    want = F.batch_norm(values[0], *held[:2], *values[1:], False, MOMENTUM, EPS)
    torch.testing.assert_close(y, want)
    assert [value.tolist() for value in held] == [value.tolist() for value in state(4)]
    y = kernels.batch_norm(*values, None, None, None, MOMENTUM, EPS, context(training=False), 6, [])
    torch.testing.assert_close(y, F.batch_norm(values[0], None, None, *values[1:], True, eps=EPS))


def test_a_forward_that_runs_again_updates_nothing():
    values, held, recorder = leaves((6, 4)), state(4), Recorder()
    ctx = context(recorder=recorder)

    def block(x):
        return (kernels.batch_norm(x, *values[1:], *held, MOMENTUM, EPS, ctx, 6, []).square(),)

    with Recomputation() as again:
        (y,) = again(block, values[0])
    once = [value.clone() for value in held]
    with recorder.during("backward"):
        y.sum().backward()
    assert all(map(torch.equal, held, once)) and int(held[2]) == 5
    grad, values[0].grad = values[0].grad, None
    block(values[0])[0].sum().backward()
    torch.testing.assert_close(grad, values[0].grad)


def test_one_value_per_channel_is_refused():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        kernels.batch_norm(*leaves((1, 4)), *state(4), MOMENTUM, EPS, context(), 1, [])
