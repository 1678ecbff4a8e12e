import math

import pytest
import torch

from autopar.runtime.context import StepContext
from autopar.runtime.counter_random import keep_mask, mix, stream
from autopar.runtime.reference import whole_dims


def context(**changes):
    return StepContext(axes={}, batch=1, global_batch=1, **{"seed": 3, "step": 5, **changes})


def mask(shape, p=0.5, op=0, dims=None, **changes):
    return keep_mask(context(**changes), op, p, dims or whole_dims(shape), torch.empty(shape))


def test_mix_is_splitmix64():
    # First outputs of SplitMix64 seeded with 1234567, from the reference C code (Vigna, 2015).
    gamma, state, seen = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + gamma) % 2**64
        seen.append(mix(state))
    assert seen == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_tensor_arithmetic_equals_integers():
    threshold = round(0.7 * 2**63)
    start, gamma = stream(3, 5, 2), 0x9E3779B97F4A7C15
    expected = [(mix((start + (i + 1) * gamma) % 2**64) >> 1) < threshold for i in range(50)]
    assert mask((50,), p=0.3, op=2).tolist() == expected
    assert mask((), p=0.3, op=2).item() == expected[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_kept(p):
    n = 1 << 20
    share = mask((n,), p=p).double().mean().item()
    assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)


def test_streams_and_neighbours_are_uncorrelated():
    n = 1 << 20
    signs = {
        name: mask((n,), **change).double() * 2 - 1
        for name, change in {
            "base": {},
            "op": {"op": 1},
            "step": {"step": 6},
            "seed": {"seed": 4},
        }.items()
    }
    bound = 4 / math.sqrt(n)
    for name in ("op", "step", "seed"):
        assert abs((signs["base"] * signs[name]).mean().item()) < bound
    for lag in (1, 2, 64, 1024):
        assert abs((signs["base"][lag:] * signs["base"][:-lag]).mean().item()) < bound


def test_runs_of_eight_bits_are_uniform():
    n = 1 << 20
    bits = mask((n // 8, 8)).long() @ (2 ** torch.arange(8))
    counts = torch.bincount(bits, minlength=256).double()
    expected = n / 8 / 256
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert 180 < chi2 < 340  # 255 degrees of freedom: 255 +- 3.7 sigma


def test_shards_are_slices_of_the_whole():
    shape = (6, 10, 4)
    whole = mask(shape)
    part = mask((2, 10, 4), dims=((4, 40), (0, 4), (0, 1)))
    assert part.equal(whole[4:])
    part = mask((6, 3, 4), dims=((0, 40), (3, 4), (0, 1)))
    assert part.equal(whole[:, 3:6])
    ranges = ((1, 2), (7, 3))
    part = mask((6, 5, 4), dims=((0, 40), (ranges, 4), (0, 1)))
    assert part.equal(whole[:, [1, 2, 7, 8, 9]])
    assert mask((0, 4), dims=((6, 4), (0, 1))).shape == (0, 4)


def test_ranges_must_fit():
    with pytest.raises(ValueError, match="hold 2 elements; the dim has 5"):
        mask((5,), dims=((((0, 2),), 1),))


def test_large_tensors_are_hashed_in_parts(monkeypatch):
    whole = mask((9, 5, 3))
    monkeypatch.setattr("autopar.runtime.counter_random._CHUNK_ELEMENTS", 31)
    assert mask((9, 5, 3)).equal(whole)


def test_always_and_never():
    assert mask((100,), p=0.0).all()
    assert not mask((100,), p=1.0).any()
