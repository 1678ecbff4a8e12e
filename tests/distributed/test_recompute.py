"""What runs again in the backward: the same gradients to the bit, and no more kept than planned.

What is kept is measured as the storages that are alive between forward and backward, however they
are held.
"""

from __future__ import annotations

import time
from math import inf
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.codegen.traffic import totals
from autopar.plan.plan import Recompute
from autopar.runtime.executor import _HANDLERS
from autopar.schedules.action import ActionKind

pytestmark = pytest.mark.distributed

KINDS = {"none": set(), "selective": {Recompute.SELECTIVE}, "all": {Recompute.FULL}}


class Layer(nn.Module):
    def __init__(self, width, heads, *, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, q, k, v):
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return F.dropout(scores.softmax(-1), 0.1) @ v

    def forward(self, x):
        y = self.norm1(x)
        split = (y.shape[0], y.shape[1], self.heads, -1)
        q, k, v = (f(y).view(split).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(y), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Net(nn.Module):
    def __init__(self, *, fused, layers=2, width=32, heads=4):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width, heads, fused=fused) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x, y):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return ((self.head(x) - y) ** 2).mean()


def build(name):
    torch.manual_seed(0)
    batch = {key: torch.randn(4, 48, 8) for key in "xy"}
    return Net(fused=name == "fused"), batch


class Made(TorchDispatchMode):
    """Notes every storage that ops make."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.seen.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    def alive(self, held):
        return sum(
            nbytes
            for key, (reference, nbytes) in self.seen.items()
            if key not in held and not reference.expired()
        )


def settled(made, held):
    """Bytes alive once the threads of gloo have let go of what they sent."""
    return min(made.alive(held) for _ in range(10) if not time.sleep(0.02))


def step(name, pins):
    """One step on this rank: loss, gradients, bytes alive before the first backward, the plan's
    figure, collectives as run and as planned, how the blocks run."""
    model, batch = build(name)
    parallel = autopar.parallelize(
        model, "local:2", batch=batch, optimizer=(torch.optim.SGD, {"lr": 0.1}), pins=pins
    )
    store = parallel.program.store
    own = [entry.local for entry in store.entries.values()]
    held = {tensor.untyped_storage()._cdata for tensor in (*own, *batch.values())}
    found = []
    backward = _HANDLERS[ActionKind.BACKWARD]

    def watch(run, action):
        found.append(settled(made, held))
        backward(run, action)

    recorder = parallel.program.world.recorder
    with mock.patch.dict(_HANDLERS, {ActionKind.BACKWARD: watch}):
        recorder.start()
        with Made() as made:
            loss = parallel.backward_step(batch)
        events = recorder.stop()
    rank = torch.distributed.get_rank()
    stage = next(stage for stage in parallel.plan.stages if rank in stage.ranks)
    terms = dict(stage.memory_bytes)
    return {
        "loss": float(loss),
        "grads": {name: store.gather_gradient(name) for name in store.entries},
        "alive": found[0],
        "kept": terms["activations"] + terms["boundary"],
        "run": totals(events),
        "planned": totals(stage.collectives),
        "kinds": {b.recompute_kind for b in stage.blocks} - {Recompute.NONE},
        "sends": stage.index < parallel.plan.pipeline - 1,
    }


GRIDS = {
    "single": {"micro_batches": 1, "data": 1, "schedule": "1f1b"},
    "tensor": {"micro_batches": 1, "tensor": 2},
    "data": {"micro_batches": 1, "data": 2},
    "zero 3": {"micro_batches": 2, "data": 2, "zero": 3},
    "pipeline": {"micro_batches": 2, "pipeline": 2, "schedule": "1f1b"},
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ["eager", "fused"])
def test_the_same_bits_and_as_much_memory_as_planned(pool2, name, grid):
    runs = {
        pin: pool2.run(step, name, {**GRIDS[grid], "recompute": pin})
        for pin in ("none", "selective", "all")
    }
    previous = [inf] * 2
    for pin, ranks in runs.items():
        for own, plain in zip(ranks, runs["none"], strict=True):
            assert own["run"] == own["planned"]
            assert own["kinds"] == KINDS[pin]
            if not own["sends"]:  # the executor keeps what a stage sends until its backward
                assert own["alive"] == pytest.approx(own["kept"], rel=0.02)
            assert own["loss"] == plain["loss"]
            for key, grad in own["grads"].items():
                assert torch.equal(grad, plain["grads"][key]), (pin, key)
        kept = [own["kept"] for own in ranks]
        assert all(less < more for less, more in zip(kept, previous, strict=True))
        previous = kept
