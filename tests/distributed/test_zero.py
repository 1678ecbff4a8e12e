"""ZeRO levels over data, tensor and pipeline ranks: numbers of one device, memory of a shard."""

import gc
from collections import Counter

import pytest
import test_parameters as base
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from zero_programs import WIDTHS, build_net, gathering, kept, net, net_batch

from autopar.ir.collective import CollectiveOp
from autopar.runtime import comm, kernels
from autopar.runtime.clip import clip_grad_norm_, grad_norm
from autopar.runtime.measure import state_bytes
from autopar.runtime.optim import bind_optimizer
from autopar.runtime.parameters import ParameterStore

pytestmark = pytest.mark.distributed

AG, AR, RS = CollectiveOp.ALL_GATHER, CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER
GRIDS = {"dp4": (1, 4, 1), "dp2tp2": (1, 2, 2), "pp2dp2": (2, 2, 1)}
OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
}
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def build(grid, level, micro_batches, model, recompute=False, schedule="1f1b"):
    return base.build(
        *GRIDS[grid],
        micro_batches,
        model,
        change=lambda stages, sizes: {
            stage: tuple(kept(spec, level, sizes) for spec in specs)
            for stage, specs in stages.items()
        },
        wrap=lambda stage, store: gathering(stage, store, recompute=recompute),
        schedule=schedule,
    )


def check_training(grid, level, optimizer, norm_type=2.0, micro_batches=3, **more):
    model = base.model_on()
    _, store, engine = build(grid, level, micro_batches, model, **more)
    cls, options = OPTIMIZERS[optimizer]
    ours = bind_optimizer((cls, options), store)
    theirs = cls(model.parameters(), **options)
    names = {id(p): name for name, p in model.named_parameters()}
    for step in range(3):
        want = base.reference_step(model, step, 7)
        torch.testing.assert_close(engine.train_step(base.batch(7)), want, rtol=1e-9, atol=0)
        for p in model.parameters():
            if names[id(p)] in store.entries:
                torch.testing.assert_close(store.gather_gradient(names[id(p)]), p.grad, **TIGHT)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        torch.testing.assert_close(clip_grad_norm_(store, 0.05, norm_type), norm)
        assert float(grad_norm(store, norm_type)) <= 0.05
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for name, value in model.state_dict().items():
            if any(name in e.spec.names for e in store.entries.values()):
                torch.testing.assert_close(store.gather_full(name), value, **TIGHT)
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


def living_stores():
    gc.collect()
    return sum(type(item) is ParameterStore for item in gc.get_objects())


@pytest.mark.parametrize("grid", GRIDS)
def test_training_equals_one_device(pool4, grid):
    """Nothing is left of a model afterwards, which the hooks of its leaves could keep alive."""
    before = pool4.run(living_stores)  # of other tests in the same workers
    pool4.run(check_all, grid)
    after = pool4.run(living_stores)
    assert all(now <= then for now, then in zip(after, before, strict=True))


def check_split_backward():
    for level in (2, 3):
        check_training("pp2dp2", level, "momentum", schedule="zb-h1")
        check_training("pp2dp2", level, "momentum", schedule="zb-h1", recompute=True)


def test_backward_in_two_parts_equals_one_device(pool4):
    """Weight gradients come later than input gradients; weights are gathered for either."""
    pool4.run(check_split_backward)


def step_counts(world, engine, optimizer, samples):
    """(op, phase, axes) -> (count, bytes in all) of one step, without the loss."""
    world.recorder.start()
    engine.train_step(net_batch(samples))
    optimizer.step()
    counts, total = Counter(), Counter()
    for item in world.recorder.stop():
        if item.axes != ("world",):
            key = (item.op, item.phase, "+".join(item.axes))
            counts[key] += 1
            total[key] += item.nbytes
    return {key: (counts[key], total[key]) for key in counts}


NUMEL = [WIDTHS[1] * WIDTHS[0], WIDTHS[1], WIDTHS[2] * WIDTHS[1], WIDTHS[2]]
ALL = 8 * sum(NUMEL)


def check_collectives():
    """Buckets of 200 bytes hold no two weights, so every gradient is in a collective of its own."""
    for micro_batches in (1, 3):
        for level in (1, 2):
            world, store, engine = build_net(level=level, micro_batches=micro_batches)
            optimizer = bind_optimizer((torch.optim.SGD, {"lr": 0.1}), store)
            step_counts(world, engine, optimizer, 12)  # the parameter nobody reads has no gradient
            found = step_counts(world, engine, optimizer, 12)
            gathered = ALL + 8 * 12
            assert found[RS, "sync", "data"][1] == ALL
            assert found[AG, "update", "data"][1] == gathered
            assert found.keys() == {(RS, "sync", "data"), (AG, "update", "data")}
        world, store, engine = build_net(level=3, micro_batches=micro_batches)
        optimizer = bind_optimizer((torch.optim.SGD, {"lr": 0.1}), store)
        found = step_counts(world, engine, optimizer, 12)
        # Of the backward's ops only the second linear reads its weight: the input has no gradient.
        assert found == {
            (AG, "forward", "data"): (5 * micro_batches, (ALL + 8 * 12) * micro_batches),
            (AG, "backward", "data"): (micro_batches, 8 * NUMEL[2] * micro_batches),
            (RS, "sync", "data"): (4, ALL),
        }
        world, store, engine = build_net(level=3, micro_batches=micro_batches, recompute=True)
        optimizer = bind_optimizer((torch.optim.SGD, {"lr": 0.1}), store)
        found = step_counts(world, engine, optimizer, 12)
        assert found == {
            (AG, "forward", "data"): (5 * micro_batches, (ALL + 8 * 12) * micro_batches),
            (AG, "recompute", "data"): (5 * micro_batches, (ALL + 8 * 12) * micro_batches),
            (RS, "sync", "data"): (4, ALL),
        }


def test_each_gradient_is_reduced_once_a_step(pool4):
    pool4.run(check_collectives)


def check_hybrid(level, over):
    axes = (("data", 2), ("shard", 2))
    model = net()
    world, store, engine = build_net(axes=axes, level=level, over=over, micro_batches=2)
    ours = bind_optimizer((torch.optim.AdamW, {"lr": 0.01}), store)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        world.recorder.start()
        engine.train_step(net_batch(9))
        events = world.recorder.stop()
        model(**net_batch(9)).backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                assert store.gather_gradient(name) is None
            else:
                torch.testing.assert_close(store.gather_gradient(name), p.grad, **TIGHT)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        torch.testing.assert_close(grad_norm(store), norm)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for name, p in model.named_parameters():
            torch.testing.assert_close(store.gather_full(name), p.detach(), **TIGHT)
    reduced = {(e.op, e.axes) for e in events if e.phase == "sync" and e.axes != ("world",)}
    if over == (1,):
        assert reduced == {(RS, ("shard",)), (AR, ("data",))}
        shards = sum(e.nbytes for e in events if e.op is AR and e.axes == ("data",))
        own = [e.stored.numel() for e in store.entries.values() if e.spec.fqn != "unread"]
        assert shards == 8 * sum(own)
    else:
        # Dims that the ranks of both axes divide evenly are split over both, others over one.
        assert (AR, ("data",)) in reduced or (RS, ("data", "shard")) in reduced


def check_hybrids():
    for level in (1, 2, 3):
        for over in ((1,), (0, 1)):
            check_hybrid(level, over)


def test_hybrid_sharding_equals_one_device(pool4):
    pool4.run(check_hybrids)


def check_frozen():
    """Case C10: no gradient, no state, no master copy, and no collective for a frozen weight."""
    frozen = ("up.weight", "down.bias")
    for level in (1, 2, 3):
        model = net()
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        world, store, engine = build_net(level=level, micro_batches=2, frozen=frozen)
        ours = bind_optimizer((torch.optim.Adam, {"lr": 0.01}), store)
        theirs = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(2):
            world.recorder.start()
            engine.train_step(net_batch(8))
            events = world.recorder.stop()
            model(**net_batch(8)).backward()
            ours.step()
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
        for name, p in model.named_parameters():
            torch.testing.assert_close(store.gather_full(name), p.detach(), **TIGHT)
        assert sum(e.nbytes for e in events if e.op is RS) == 8 * (NUMEL[1] + NUMEL[2])
        assert all(store.entries[name].shared.grad is None for name in frozen)
        held = {id(p) for group in ours.param_groups for p in group["params"]}
        assert not held & {id(store.entries[name].shared) for name in frozen}


def test_frozen_weights_have_weights_only(pool4):
    pool4.run(check_frozen)


def check_pipeline(level, schedule):
    """Case C14: four micro-batches, one reduce-scatter a step, gradients of one device."""
    model = base.model_on()
    world, store, engine = build("pp2dp2", level, 4, model, schedule=schedule)
    want = base.reference_step(model, 0, 8)
    world.recorder.start()
    torch.testing.assert_close(engine.train_step(base.batch(8)), want)
    events = world.recorder.stop()
    split = [entry for entry in store.trainable() if entry.split is not None]
    assert {entry.spec.zero for entry in split} == {1, level}
    numel = sum(torch.Size(entry.read_shape).numel() for entry in split)
    assert sum(e.nbytes for e in events if e.op is RS) == 8 * numel
    for name, p in model.named_parameters():
        if name in store.entries:
            torch.testing.assert_close(store.gather_gradient(name), p.grad, **TIGHT)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("level", [2, 3])
def test_a_pipeline_reduces_once_a_step(pool4, level, schedule):
    pool4.run(check_pipeline, level, schedule)


def check_accumulation():
    """Case C46: two backward passes before an optimizer step give the sum of both gradients."""
    for level in (0, 1, 2, 3):
        for first in (False, True):
            model = net()
            world, store, engine = build_net(level=level, micro_batches=4)
            world.recorder.start()
            engine.train_step(net_batch(8), accumulate=first)
            if first:
                assert not [e for e in world.recorder.stop() if e.phase == "sync"][1:]
                assert all(e.shared.grad is None for e in store.entries.values())
            engine.train_step(net_batch(12, seed=4))
            (model(**net_batch(8)) + model(**net_batch(12, seed=4))).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    torch.testing.assert_close(store.gather_gradient(name), p.grad, **TIGHT)


def test_gradients_of_several_passes_add_up(pool4):
    pool4.run(check_accumulation)


def check_shared_gradient():
    """Autograd may hand one tensor to several weights: it is not written to."""
    _, store, engine = build_net(axes=(("data", 2),), level=3)
    engine.sync.begin(3)
    gradient = torch.ones(WIDTHS[1], dtype=torch.float64)
    for _ in range(3):
        store.gathers.reduce("up.bias", gradient)
    engine.sync.finish()
    assert gradient.equal(torch.ones_like(gradient))
    assert store.gather_gradient("up.bias").equal(6 * gradient)


def test_a_gradient_of_several_weights_is_left_alone(pool2):
    pool2.run(check_shared_gradient)


def check_forgotten():
    """The gathered weight is gone after the forward, and gathered once for two readers."""
    world, store, _ = build_net(level=3)
    weight, gone = store.weights(0)["down.weight"], []
    store.gathers.reduce = lambda name, grad: gone.append((name, grad.clone()))
    split = store.entries["down.weight"].split
    x = torch.randn(3, WIDTHS[1], dtype=torch.float64, requires_grad=True)

    def forward(x):
        whole = comm.gather_weight(weight, split.axis, split.dim, split.size)
        storage = StorageWeakRef(whole.untyped_storage())
        return torch.tanh(x @ whole.t()) @ whole.detach(), storage

    with store.gathers.forgetting():
        y, storage = forward(x)
    assert storage.expired()
    world.recorder.start()
    y.sum().backward()
    assert [(e.op, e.phase) for e in world.recorder.stop()] == [(AG, "backward")]
    whole = store.gather_full("down.weight").requires_grad_()
    again = x.detach().requires_grad_()
    (torch.tanh(again @ whole.t()) @ whole.detach()).sum().backward()
    torch.testing.assert_close(x.grad, again.grad, **TIGHT)
    ((name, grad),) = gone
    assert name == "down.weight"
    torch.testing.assert_close(grad, whole.grad, **TIGHT)

    # Without a backward to come nothing is noted; a weight that was changed is kept as it is.
    with torch.no_grad(), store.gathers.forgetting():
        forward(x)
    with store.gathers.forgetting():
        whole = comm.gather_weight(weight, split.axis, split.dim, split.size)
        with torch.no_grad():
            whole.mul_(2)
        y = (x @ whole.t()).sum()
    world.recorder.start()
    y.backward()
    assert world.recorder.stop() == ()


def test_gathered_weights_are_forgotten(pool4):
    pool4.run(check_forgotten)


def check_memory():
    """Bytes on this rank: weights, master, gradients, Adam state, as ZeRO's levels divide them."""
    shard = {}
    for level in (0, 1, 2, 3):
        for micro_batches in (1, 2):
            _, store, engine = build_net(level=level, micro_batches=micro_batches)
            optimizer = bind_optimizer((torch.optim.Adam, {"lr": 0.01}), store)
            engine.train_step(net_batch(8))
            optimizer.step()
            found = state_bytes(store, engine.sync, optimizer)
            read = 8 * (sum(NUMEL) + 12)
            own = sum(e.stored.nbytes for e in store.entries.values())
            grads = own - store.entries["unread"].stored.nbytes
            assert found["weights"] == (own if level == 3 else read)
            assert found["master"] == (own if level in (1, 2) else 0)
            assert found["optimizer"] == 2 * grads
            if level < 2 or micro_batches == 2:
                assert found["gradients"] >= 8 * sum(NUMEL) * (level < 2)
            shard[level, micro_batches] = found["gradients"]
    # Whole gradients of a bucket at most exist beside the shards.
    assert shard[2, 1] < shard[0, 1]
    assert shard[3, 1] < shard[0, 1]
    assert shard[2, 2] == shard[0, 2]


def test_memory_is_that_of_the_level(pool4):
    pool4.run(check_memory)


def tied_forward(w, ctx, received, inputs, setup):
    """Rank 0 reads a weight twice, in an order of its own: readiness differs between ranks."""
    h = torch.tanh(kernels.linear(inputs["x"], w["up.weight"], w["up.bias"], ctx))
    out = kernels.linear(h, w["down.weight"], w["down.bias"], ctx)
    extra = w["up.weight"].sum() + w["unread"].sum()
    if ctx.axes["data"].rank == 0:
        extra = w["unread"].sum() + w["up.weight"].sum()
    return (out.pow(2).sum() / ctx.global_batch + 0 * extra,)


def check_order():
    """Buckets are reduced in one order whatever the order of the backward."""
    for micro_batches in (1, 3):
        _, store, engine = build_net(level=2, micro_batches=micro_batches, forward=tied_forward)
        for _ in range(2):
            engine.train_step(net_batch(12))
        model = net()
        (2 * model(**net_batch(12))).backward()
        for name, p in model.named_parameters():
            have = store.gather_gradient(name)
            want = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(have, want, **TIGHT)


def test_ranks_reduce_in_one_order(pool4):
    pool4.run(check_order)


def check_other_optimizers():
    """Weights that were changed behind the bound optimizer are read by the next forward."""
    for level in (1, 2):
        model = net()
        _, store, engine = build_net(level=level)
        loose = torch.optim.SGD(store.tree.parameters(), lr=0.1)
        engine.train_step(net_batch(8))
        loose.step()
        model(**net_batch(8)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        want = model(**net_batch(8)).detach()
        torch.testing.assert_close(engine.eval_step(net_batch(8))[0], want, **TIGHT)
        with torch.no_grad():
            for p in store.tree.parameters():
                p.to_local().mul_(0.5)
            for p in model.parameters():
                p.mul_(0.5)
        want = model(**net_batch(8)).detach()
        torch.testing.assert_close(engine.eval_step(net_batch(8))[0], want, **TIGHT)


def test_changed_weights_are_read(pool4):
    pool4.run(check_other_optimizers)
