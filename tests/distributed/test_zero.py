"""ZeRO levels over data, tensor and pipeline ranks: numbers of one device, memory of a shard."""

from dataclasses import replace

import pytest
import test_parameters as base
import torch

from autopar.ir.placement import local_shape
from autopar.plan.zero import shard_layout
from autopar.runtime import comm
from autopar.runtime.clip import clip_grad_norm_, grad_norm
from autopar.runtime.gather import ShardedWeight
from autopar.runtime.optim import bind_optimizer

pytestmark = pytest.mark.distributed

GRIDS = {"dp4": (1, 4, 1), "dp2tp2": (1, 2, 2), "pp2dp2": (2, 2, 1)}
OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
}


def sharded(level, frozen=()):
    """Specs at a level; the tied embedding stays at level 1."""

    def change(stages, sizes):
        return {
            stage: tuple(_sharded(spec, level, sizes, spec.fqn in frozen) for spec in specs)
            for stage, specs in stages.items()
        }

    return change


def _sharded(spec, level, sizes, frozen):
    if spec.is_buffer:
        return spec
    level = min(level, 1) if spec.tied else level
    stored = shard_layout(spec.shape, spec.layout, sizes, [0])
    level = level if stored else 0
    return replace(spec, zero=level, stored=stored if level else (), trainable=not frozen)


def gathering(forward, stages, sizes):
    """The stage as generated code has it: weights that live in shards are gathered first."""
    specs = {spec.fqn: spec for specs in stages.values() for spec in specs}

    def run(w, ctx, *args):
        whole = {}
        at = tuple(axis.rank for axis in ctx.axes.values())
        for name, weight in w.items():
            whole[name] = weight
            if isinstance(weight, ShardedWeight):
                spec = specs[name]
                dim = spec.stored[0].dim
                size = local_shape(spec.shape, spec.layout, sizes, at)[dim]
                whole[name] = comm.gather_weight(weight, ctx.axes["data"], dim, size)
        return forward(whole, ctx, *args)

    return run


def build(grid, level, micro_batches, model, frozen=(), recompute=False):
    pipeline, data, tensor = GRIDS[grid]
    change = sharded(level, frozen)
    specs = change(base.SPECS, (data, tensor))

    def wrapped(stage):
        forward = gathering(stage.forward, specs, (data, tensor))
        if recompute:
            forward = recomputed(forward)
        return replace(stage, forward=forward)

    return base.build(pipeline, data, tensor, micro_batches, model, change=change, wrap=wrapped)


def recomputed(forward):
    from autopar.runtime.program import recompute

    return lambda *args: recompute(forward, *args)


def check_training(grid, level, optimizer, norm_type=2.0, micro_batches=3, recompute=False):
    model = base.model_on()
    _, store, engine = build(grid, level, micro_batches, model, recompute=recompute)
    cls, options = OPTIMIZERS[optimizer]
    ours = bind_optimizer((cls, options), store)
    theirs = cls(model.parameters(), **options)
    names = {id(p): name for name, p in model.named_parameters()}
    for step in range(3):
        want = base.reference_step(model, step, 7)
        torch.testing.assert_close(engine.train_step(base.batch(7)), want, rtol=1e-9, atol=0)
        for p in model.parameters():
            if names[id(p)] in store.entries:
                have = store.gather_gradient(names[id(p)])
                torch.testing.assert_close(have, p.grad, rtol=1e-9, atol=1e-12)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        torch.testing.assert_close(clip_grad_norm_(store, 0.05, norm_type), norm)
        assert float(grad_norm(store, norm_type)) <= 0.05
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for name, value in model.state_dict().items():
            if any(name in e.spec.names for e in store.entries.values()):
                torch.testing.assert_close(store.gather_full(name), value, rtol=1e-9, atol=1e-12)
    model.eval()
    with torch.no_grad():
        want = model(**base.batch(7))
    loss, outputs = engine.eval_step(base.batch(7))
    torch.testing.assert_close(loss, want["loss"])
    torch.testing.assert_close(outputs["logits"], want["logits"])


def check_all(grid):
    for level in (1, 2, 3):
        for optimizer in OPTIMIZERS:
            check_training(grid, level, optimizer)
        check_training(grid, level, "adamw", float("inf"), micro_batches=1)
        check_training(grid, level, "momentum", 2.0, recompute=True)


@pytest.mark.parametrize("grid", GRIDS)
def test_training_equals_one_device(pool4, grid):
    pool4.run(check_all, grid)
