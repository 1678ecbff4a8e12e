"""Weights in shards, gathered one block ahead: what is started when, and what exists at once.

Two ranks in one process: the other one's shard is twice this one's.
"""

import re

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime import comm, primitives
from autopar.runtime.axes import AxisGroup
from autopar.runtime.context import StepContext
from autopar.runtime.gather import Gathers, ShardedWeight
from autopar.runtime.recompute import Recomputation
from autopar.runtime.recorder import Recorder

SIZE, BLOCKS = 6, 4
AXIS = AxisGroup(axes=("data",), ranks=(0, 1), rank=0, recorder=Recorder())
CTX = StepContext(axes={"data": AXIS}, batch=2, global_batch=4)
GATHERS = {"a": (("data",), 0, SIZE), "b": (("data",), 0, SIZE)}


class Wire:
    """Notes messages, `+` when one starts and `-` when it is waited for, and the blocks that hold
    gathered weights whenever one starts."""

    def __init__(self):
        self.names, self.events, self.most = {}, [], 0
        self._made = []

    def start(self, x, axis, dim, sizes, *, backward=False):
        name = self.names[x.data_ptr()]
        stacked = torch.stack([x, 2 * x])
        self._made.append((name[0], StorageWeakRef(stacked.untyped_storage())))
        self.most = max(self.most, len({b for b, at in self._made if not at.expired()}))
        self.events.append(f"+{name}")

        def finish():
            self.events.append(f"-{name}")
            return stacked

        return finish

    def take(self):
        """The messages since the last call."""
        events, self.events = self.events, []
        return " ".join(events)


@pytest.fixture
def wire(monkeypatch):
    wire = Wire()
    monkeypatch.setattr(primitives, "start_all_gather", wire.start)
    return wire


def weights_of(wire):
    generator, gathers, found = torch.Generator().manual_seed(0), Gathers(), []
    for block in range(BLOCKS):
        found.append({})
        for key in GATHERS:
            shard = torch.randn(SIZE // 2, SIZE, generator=generator, dtype=torch.float64)
            wire.names[shard.data_ptr()] = f"{block}{key}"
            leaf = ShardedWeight.of(shard, f"{block}{key}", gathers).requires_grad_()
            found[-1][key] = leaf
    return gathers, found


def run_block(w, x):
    a = comm.gather_weight(w["a"], AXIS, *GATHERS["a"][1:])
    b = comm.gather_weight(w["b"], AXIS, *GATHERS["b"][1:])

    def make(a, b, x):
        return torch.tanh(x @ a) @ b

    return make, (a, b, x)


def kept(w, x):
    make, args = run_block(w, x)
    return make(*args)


def made_again(w, x):
    with Recomputation() as again:
        make, args = run_block(w, x)
        return again(make, *args)


def forward(weights, x, block):
    """A stage as generated code has it."""
    w_next = comm.prefetch(weights[0], GATHERS, CTX)
    for i in range(len(weights)):
        w_block = w_next
        if i + 1 < len(weights):
            w_next = comm.prefetch(weights[i + 1], GATHERS, CTX)
        x = block(w_block, x)
    return x


def inputs(requires_grad=True):
    x = torch.linspace(-1, 1, 2 * SIZE, dtype=torch.float64).reshape(2, SIZE)
    return x.requires_grad_(requires_grad)


FORWARD = "+0a +0b +1a +1b -0a -0b +2a +2b -1a -1b +3a +3b -2a -2b -3a -3b"
KEPT = "+3a +3b +2a +2b -3b -3a +1a +1b -2b -2a +0a +0b -1b -1a -0b -0a"
AGAIN = "+3a +3b +2a +2b -3a -3b +1a +1b -2a -2b +0a +0b -1a -1b -0a -0b"


@pytest.mark.parametrize(("block", "backward"), [(kept, KEPT), (made_again, AGAIN)])
def test_both_passes_gather_one_block_ahead_and_hold_two(wire, block, backward):
    gathers, weights = weights_of(wire)
    found = {}
    gathers.reduce = found.__setitem__
    x = inputs()
    with gathers.forgetting():
        y = forward(weights, x, block)
    assert wire.take() == FORWARD
    y.pow(2).sum().backward()
    assert wire.take() == backward
    assert wire.most == 2

    again = inputs()
    whole = [
        {k: torch.cat([w, 2 * w]).detach().requires_grad_() for k, w in b.items()} for b in weights
    ]
    y = again
    for w in whole:
        y = torch.tanh(y @ w["a"]) @ w["b"]
    y.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    assert sorted(found) == sorted(f"{i}{key}" for i in range(BLOCKS) for key in GATHERS)
    for name, grad in found.items():
        torch.testing.assert_close(grad, whole[int(name[0])][name[1]].grad)


def test_what_the_backward_does_not_read_is_not_gathered_again(wire):
    gathers, weights = weights_of(wire)
    gathers.reduce = lambda name, grad: None
    with gathers.forgetting():
        y = forward(weights, inputs(requires_grad=False), kept)
    wire.take()
    y.sum().backward()
    assert wire.take() == KEPT.replace("+0a ", "").replace(" -0a", "")


def test_a_block_that_reads_no_weight_backward_is_passed_over(wire):
    gathers, weights = weights_of(wire)
    gathers.reduce = lambda name, grad: None

    def added(w, x):
        if w["a"].fqn != "2a":
            return kept(w, x)
        _, (a, b, x) = run_block(w, x)
        return x + a[:1] + b[:1]

    with gathers.forgetting():
        y = forward(weights, inputs(), added)
    wire.take()
    y.sum().backward()
    assert wire.take() == "+3a +3b +1a +1b -3b -3a +0a +0b -1b -1a -0b -0a"


def test_micro_batches_in_flight_do_not_mix(wire):
    """Two forwards before either backward, as pipelines have them."""
    gathers, weights = weights_of(wire)
    gathers.reduce = lambda name, grad: None
    results = []
    for _ in range(2):
        with gathers.forgetting():
            results.append(forward(weights, inputs(), kept))
    assert wire.take() == f"{FORWARD} {FORWARD}"
    for y in results:
        y.sum().backward()
        assert wire.take() == KEPT
    assert wire.most == 2


def test_a_forward_without_a_backward_is_gathered_ahead_too(wire):
    _, weights = weights_of(wire)
    with torch.no_grad():
        forward(weights, inputs(), kept)
    assert wire.take() == FORWARD
    assert wire.most == 2


def test_a_weight_that_no_stage_started_is_gathered_at_once(wire):
    gathers, weights = weights_of(wire)
    gathers.reduce = lambda name, grad: None
    with gathers.forgetting():
        y = kept(weights[0], inputs())
    assert wire.take() == "+0a -0a +0b -0b"
    y.sum().backward()
    assert re.sub(r"\d", "", wire.take()) == "+b +a -b -a"
