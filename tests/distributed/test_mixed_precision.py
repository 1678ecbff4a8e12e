"""bfloat16 and float16 programs with float32 weights: numbers of one device, loss scale, bytes."""

import copy

import pytest
import torch
from torch import nn
from zero_programs import NARROW, build_net, net, net_batch

import autopar
from autopar.errors import InputError, PlanMismatch
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.measure import state_bytes
from autopar.runtime.optim import bind_optimizer
from autopar.runtime.reference import MasterWeights
from autopar.runtime.state import load_training_state, training_state
from autopar.runtime.verify import relative_error

pytestmark = pytest.mark.distributed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUND = {BF16: 2e-2, FP16: 5e-3}


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2)


def check_reference(dtype, level, grad_dtype=""):
    """Against the model in that dtype on one device with float32 copies of its weights."""
    scale = LossScale(init=2.0**8) if dtype is FP16 else None
    more = NARROW | {"grad_dtype": grad_dtype}
    _, store, engine = build_net(
        level=level, dtype=dtype, micro_batches=2, loss_scale=scale, **more
    )
    ours = bind_optimizer(adam, store)
    model = net(dtype)
    masters = MasterWeights(model, adam, LossScale(init=2.0**8) if dtype is FP16 else None)
    for _ in range(3):
        loss = engine.train_step(net_batch(8, dtype))
        expected = model(**net_batch(8, dtype))
        masters.backward(expected)
        assert relative_error(loss, expected) < BOUND[dtype]
        for name, p in masters.names.items():
            grad = store.gather_gradient(name)
            if p.grad is None:
                assert grad is None
            else:
                assert grad.dtype == FP32
                assert relative_error(grad, p.grad) < BOUND[dtype], name
        ours.step()
        ours.zero_grad()
        masters.step()
        for name, p in masters.names.items():
            whole = store.gather_full(name)
            assert whole.dtype == FP32
            assert relative_error(whole, p) < BOUND[dtype], name
    for entry in store.entries.values():
        assert entry.local.dtype == dtype
        assert entry.stored.dtype == FP32
        if level == 3:
            assert entry.local.equal(entry.stored.to(dtype))
    # The leaves are the stored weights, rounded.
    assert engine.eval_step(net_batch(8, dtype))[0].isfinite()
    state = store.full_state_dict()
    assert all(value.dtype == FP32 for value in state.values())


def check_references():
    for dtype in (BF16, FP16):
        for level in (0, 1, 2, 3):
            check_reference(dtype, level)
    for level in (0, 2, 3):
        check_reference(BF16, level, "float32")


def test_equals_one_device_with_master_weights(pool4):
    pool4.run(check_references)


def check_wide_gradients():
    """Many micro-batches add up in float32 where the precision says so: 256 + 1 is 256 in bf16."""
    found = {}
    for grad_dtype in ("", "float32"):
        for level in (0, 2, 3):
            more = NARROW | {"grad_dtype": grad_dtype}
            _, store, engine = build_net(
                axes=(("data", 2),),
                level=level,
                dtype=BF16,
                micro_batches=600,
                forward=ones,
                **more,
            )
            engine.train_step(net_batch(1200, BF16))
            found[grad_dtype, level] = float(store.gather_gradient("up.bias")[0])
    assert {found["", level] for level in (0, 2, 3)} == {512.0}
    assert {found["float32", level] for level in (0, 2, 3)} == {1200.0}


def ones(w, ctx, received, inputs, setup):
    return (w["up.bias"].sum() + 0 * w["up.weight"].sum(),)


def test_gradients_add_up_in_the_precision_of_the_plan(pool2):
    pool2.run(check_wide_gradients)


def check_small_steps():
    """Case C50: 100 Adam steps of 6e-4 from 1.0 under a constant gradient.

    The half-step below 1 in bfloat16 is 0.998046875, so without a master copy nothing moves.
    """
    for stored_dtype, expected in (("float32", 0.94), ("", 1.0)):
        for level in (0, 1, 3):
            _, store, engine = build_net(
                axes=(("data", 2),),
                level=level,
                dtype=BF16,
                forward=ones,
                stored_dtype=stored_dtype,
            )
            start = torch.ones(7)
            store.load_full("up.bias", start)
            optimizer = bind_optimizer((torch.optim.Adam, {"lr": 6e-4}), store)
            for _ in range(100):
                engine.train_step(net_batch(2, BF16))
                optimizer.step()
                optimizer.zero_grad()
            whole = store.gather_full("up.bias")
            torch.testing.assert_close(whole.float(), torch.full((7,), expected), rtol=0, atol=1e-4)
            if not stored_dtype:
                assert whole.equal(start.to(BF16))


def test_small_steps_need_a_master_copy(pool2):
    pool2.run(check_small_steps)


class Injected:
    """Gradient hooks that put one infinite element on one rank at one step."""

    def __init__(self, store, name, rank):
        self.armed = False
        leaf = store.entries[name].local
        if store.world.rank == rank:
            leaf.register_hook(self._hook)

    def _hook(self, grad):
        if not self.armed:
            return grad
        grad = grad.clone()
        grad.view(-1)[0] = float("inf")
        return grad


def check_overflow():
    """Case C49: all ranks skip step 2, halve the scale alike, and go on with step 3."""
    for level in (0, 1, 2):
        scale = LossScale(init=2.0**10)
        _, store, engine = build_net(
            level=level, dtype=FP16, micro_batches=2, loss_scale=scale, **NARROW
        )
        optimizer = bind_optimizer((torch.optim.Adam, {"lr": 0.01}), store)
        injected = Injected(store, "down.weight", rank=2)
        scales, states = [], []
        for step in range(3):
            injected.armed = step == 1
            engine.train_step(net_batch(8, FP16))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(scale.value)
            states.append(
                [e.stored.clone() for e in store.entries.values()]
                + [e.local.detach().clone() for e in store.entries.values()]
            )
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        assert all(a.equal(b) for a, b in zip(states[0], states[1], strict=True))
        moved = [not a.equal(b) for a, b in zip(states[1], states[2], strict=True)]
        assert any(moved)
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert steps == {2}


def test_an_overflow_on_one_rank_is_skipped_by_all(pool4):
    pool4.run(check_overflow)


def check_large_scale():
    """The first steps of a scale that is too large are skipped until it fits."""
    scale = LossScale(init=2.0**24)
    _, store, engine = build_net(level=1, dtype=FP16, loss_scale=scale, **NARROW)
    optimizer = bind_optimizer((torch.optim.SGD, {"lr": 0.1}), store)
    skipped = 0
    for _ in range(30):
        engine.train_step(net_batch(8, FP16))
        if all(e.shared.grad is None for e in store.entries.values()):
            skipped += 1
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < skipped < 20
    assert scale.value == 2.0 ** (24 - skipped)


def test_a_scale_that_is_too_large_is_found(pool4):
    pool4.run(check_large_scale)


def check_bytes():
    """16 bytes a parameter with Adam, of which ZeRO divides its parts over 4 ranks."""
    for level, (weights, master, state) in {
        0: (2, 4, 8),
        1: (2, 1, 2),
        2: (2, 1, 2),
        3: (0.5, 1, 2),
    }.items():
        axes = (("data", 4),)
        _, store, engine = build_net(
            axes=axes, level=level, dtype=BF16, widths=(64, 96, 32), **NARROW
        )
        optimizer = bind_optimizer((torch.optim.Adam, {"lr": 0.01}), store)
        x = {"x": torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(BF16)}
        engine.train_step(x)
        optimizer.step()
        numel = sum(torch.Size(e.spec.shape).numel() for e in store.entries.values())
        read = numel - 12  # the parameter nobody reads has no gradient and no state
        found = state_bytes(store, engine.sync, optimizer)
        assert found["weights"] == weights * numel
        assert found["master"] == master * numel
        assert found["optimizer"] == state * read
        if level < 2:
            assert found["gradients"] == 2 * read
        else:  # and one bucket on its way
            assert read / 2 <= found["gradients"] < 2 * read


def test_bytes_are_those_of_the_precision(pool4):
    pool4.run(check_bytes)


def check_state():
    """A run that goes on from a saved state takes the same steps, bit by bit."""
    for level in (0, 1, 3):
        losses = []
        saved = None
        for part in (0, 1):
            scale = LossScale(init=2.0**6)
            _, store, engine = build_net(level=level, dtype=FP16, loss_scale=scale, **NARROW)
            optimizer = bind_optimizer((torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}), store)
            if part:
                assert saved is not None
                load_training_state(saved, store, engine, optimizer, scale)
                assert engine.step == 2
            for step in range(4 - 2 * part):
                if step == 2:
                    scale.update(overflowed=True)
                    state = training_state(store, engine, optimizer, scale)
                    saved = copy.deepcopy(state)
                losses.append(float(engine.train_step(net_batch(8, FP16))))
                optimizer.step()
                optimizer.zero_grad()
            assert scale.value == 2.0**5
        assert losses[2:4] == losses[4:]
        assert saved is not None
        assert {p.dtype for p in saved["model"].values()} == {FP32}
        assert saved["loss_scale"] == {"scale": 2.0**5, "clean_steps": 0}
        assert "exp_avg" in saved["optimizer"]["state"]["up.weight"]
        _, other, engine = build_net(level=level, dtype=FP16, widths=(6, 8, 10), **NARROW)
        with pytest.raises(PlanMismatch, match="another model or plan"):
            load_training_state(saved, other, engine, None)


def test_a_saved_state_goes_on_as_if_nothing_had_been(pool4):
    pool4.run(check_state)


def test_the_scale_follows_grad_scaler():
    """The same overflows give the same scales as `torch.amp.GradScaler`."""
    scale = LossScale(init=8.0, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in (False, False, False, True, False, True, True, False, False, False, False):
        theirs.scale(weight.sum())
        weight.grad = torch.full((1,), float("inf") if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        scale.update(overflowed=overflowed)
        assert scale.value == theirs.get_scale()
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert (again.value, again.state_dict()) == (scale.value, scale.state_dict())


class Small(nn.Module):
    """A frozen linear, a buffer in floating point, and a linear that is trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.top = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((8,), 1.25))

    def forward(self, x, y):
        return ((self.top(torch.tanh(self.base(x) * self.scale)) - y) ** 2).mean()


def small(dtype=FP32):
    torch.manual_seed(1)
    return Small().to(dtype)


def small_batch(dtype=FP32):
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(8, n, generator=generator) for n in (8, 4))
    return {"x": x.to(dtype), "y": y.to(dtype)}


def check_parallelize():
    """A float32 model in bf16: cast as `model.to` would, but for the weights that are trained."""
    for given, precision in ((FP32, "bf16"), (BF16, None), (FP32, "fp16")):
        dtype = FP16 if precision == "fp16" else BF16
        parallel = autopar.parallelize(
            small(given), "local:2", optimizer=adam, precision=precision, pins={"data": 2}
        )
        batch = small_batch(given)
        masters = MasterWeights(
            small(given).to(dtype), adam, LossScale(2.0**8) if dtype is FP16 else None
        )
        model = masters.model
        if precision == "bf16":
            whole = parallel.prepare(batch).program.store.gather_full("top.weight")
            assert whole.equal(small().top.weight)  # not rounded to bfloat16
        if dtype is FP16:  # 2^16, the gradient that the backward starts with, is no float16 number
            parallel.train_step(batch)
        loss = parallel.train_step(batch)
        expected = model(**small_batch(dtype))
        assert relative_error(loss, expected) < BOUND[dtype]
        masters.backward(expected)
        masters.step()
        state = parallel.full_state_dict()
        kinds = {name: e.local.dtype for name, e in parallel.program.store.entries.items()}
        assert set(kinds.values()) == {dtype}
        assert parallel.plan.training.precision == (precision or "bf16")
        assert parallel.loss_scale == (2.0**15 if dtype is FP16 else 1.0)
        entry = parallel.program.store.entries["base.weight"]
        assert entry.stored is entry.local or entry.is_one_memory
        if state:
            for name, p in masters.names.items():
                assert relative_error(state[name], p) < BOUND[dtype], name
            assert state["base.weight"].dtype == dtype
            assert state["top.weight"].dtype == FP32


def test_a_model_is_cast_for_its_program(pool2):
    pool2.run(check_parallelize)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(InputError, match=rf"precision {precision} cannot be run.* bf16, fp16"):
        autopar.parallelize(small(), "local:2", precision=precision)


def test_dtypes_that_no_precision_has_are_refused():
    model = small()
    model.base.double()
    with pytest.raises(InputError, match=r"parameters are float32, float64; expected one of"):
        autopar.parallelize(model, "local:2")
