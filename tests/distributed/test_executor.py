"""Hand-written stage programs against the same computation on one device."""

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.errors import InputError, RuntimeFailure
from autopar.ir.placement import R_STAR, R, Shard
from autopar.ir.size import Size
from autopar.runtime import comm, kernels
from autopar.runtime.axes import create_world
from autopar.runtime.data import InputSpec
from autopar.runtime.engine import Engine
from autopar.runtime.parameters import ParameterSpec, ParameterStore
from autopar.runtime.program import BoundarySpec, StageProgram
from autopar.runtime.recompute import Recomputation
from autopar.schedules.action import Action, ActionKind, Schedule
from autopar.schedules.registry import build_schedule

pytestmark = pytest.mark.distributed

B = Size(0, 1)
F64 = "float64"


def parameter(fqn, *shape, layout=(R_STAR,), **changes):
    return ParameterSpec(fqn=fqn, shape=shape, dtype=F64, layout=layout, **changes)


def boundary(name, *shape, grad=True, dtype=F64):
    return BoundarySpec(
        name=name, shape=(B, *(Size(n) for n in shape)), dtype=dtype, requires_grad=grad
    )


def values(specs):
    """Deterministic whole values of parameters, by name."""
    result = {}
    for spec in (spec for group in specs.values() for spec in group):
        generator = torch.Generator().manual_seed(sum(map(ord, spec.fqn)))
        result[spec.fqn] = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return result


class Case:
    """A model as stages over one data axis, and the same on one device."""

    inputs = (InputSpec(key="x", shape=(B, Size(3)), dtype=F64),)

    def batch(self, samples):
        generator = torch.Generator().manual_seed(1)
        return {"x": torch.randn(samples, 3, generator=generator, dtype=torch.float64)}


class Skip(Case):
    """`h = a(x); y = b(h); c(y) + h` on three stages: h is passed on through the second."""

    specs: ClassVar = {
        0: (parameter("a.weight", 4, 3), parameter("a.bias", 4)),
        1: (parameter("b.weight", 4, 4),),
        2: (parameter("c.weight", 4, 4),),
    }

    @staticmethod
    def first(w, ctx, received, inputs, setup):
        return (torch.tanh(kernels.linear(inputs["x"], w["a.weight"], w["a.bias"], ctx)),)

    @staticmethod
    def second(w, ctx, received, inputs, setup):
        (h,) = received
        y = torch.tanh(kernels.linear(h, w["b.weight"], None, ctx))
        return kernels.dropout(y, 0.5, ctx, op=0, dims=((ctx.sample_offset, 4), (0, 1))), h

    @staticmethod
    def third(w, ctx, received, inputs, setup):
        y, h = received
        out = kernels.linear(y, w["c.weight"], None, ctx) + h
        return (out**2).sum() / ctx.global_batch, out

    def stages(self):
        middle = (boundary("h", 4),)
        later = (boundary("y", 4), boundary("h", 4))
        return (
            StageProgram(index=0, forward=self.first, sends=middle, inputs=("x",)),
            StageProgram(index=1, forward=self.second, receives=middle, sends=later),
            StageProgram(index=2, forward=self.third, receives=later),
        )

    def reference(self, w, batch, ctx):
        (h,) = self.first(w, ctx, (), batch, {})
        return self.third(w, ctx, self.second(w, ctx, (h,), {}, {}), {}, {})[0]


class Tied(Case):
    """An embedding whose weight is the output layer too, mean loss over valid labels."""

    inputs = (
        InputSpec(key="ids", shape=(B, Size(5)), dtype="int64"),
        InputSpec(key="labels", shape=(B, Size(5)), dtype="int64"),
    )
    tied = parameter("embed.weight", 10, 4, tied=("head.weight",))
    specs: ClassVar = {
        0: (tied, parameter("a.weight", 4, 4)),
        1: (parameter("b.weight", 4, 4), tied),
    }

    def batch(self, samples):
        generator = torch.Generator().manual_seed(2)
        ids = torch.randint(10, (samples, 5), generator=generator)
        labels = torch.randint(10, (samples, 5), generator=generator)
        for row, valid in enumerate([1, 0, 5, 5, 2, 0, 3, 4][:samples]):
            labels[row, valid:] = -100
        return {"ids": ids, "labels": labels}

    @staticmethod
    def first(w, ctx, received, inputs, setup):
        x = F.embedding(inputs["ids"], w["embed.weight"])
        return torch.tanh(x @ w["a.weight"].t()), inputs["ids"]

    @staticmethod
    def second(w, ctx, received, inputs, setup):
        x, ids = received
        logits = torch.tanh(x @ w["b.weight"].t()) @ w["head.weight"].t()
        total = kernels.cross_entropy_sum(logits.flatten(0, 1), inputs["labels"].flatten())
        return total / setup["valid"] + ids.sum() * 0, logits

    @staticmethod
    def setup(w, ctx, inputs):
        return {"valid": kernels.count_valid(inputs["labels"], dtype=torch.float64)}

    def stages(self):
        sends = (boundary("x", 5, 4), boundary("ids", 5, grad=False, dtype="int64"))
        return (
            StageProgram(index=0, forward=self.first, sends=sends, inputs=("ids",)),
            StageProgram(
                index=1, forward=self.second, receives=sends, inputs=("labels",), setup=self.setup
            ),
        )

    def reference(self, w, batch, ctx):
        received = self.first(w, ctx, (), batch, {})
        return self.second(w, ctx, received, batch, self.setup(w, ctx, batch))[0]


class Frozen(Skip):
    """The first stage is frozen: nothing is sent back to it."""

    specs: ClassVar = {
        0: (
            parameter("a.weight", 4, 3, layout=(R,), trainable=False),
            parameter("a.bias", 4, layout=(R,), trainable=False),
        ),
        1: (parameter("b.weight", 4, 4),),
        2: (parameter("c.weight", 4, 4, layout=(R,), trainable=False),),
    }

    def stages(self):
        middle = (boundary("h", 4, grad=False),)
        later = (boundary("y", 4), boundary("h", 4, grad=False))
        return (
            StageProgram(index=0, forward=self.first, sends=middle, inputs=("x",)),
            StageProgram(index=1, forward=self.second, receives=middle, sends=later),
            StageProgram(index=2, forward=self.third, receives=later),
        )


CASES = {"skip": Skip, "tied": Tied, "frozen": Frozen}


def split_backward(schedule):
    """The same schedule with every backward in two parts, the weight part last."""
    rows = []
    for row in schedule.ranks:
        parts = [
            Action(ActionKind.BACKWARD_INPUT, a.stage, a.micro_batch)
            if a.kind is ActionKind.BACKWARD
            else a
            for a in row
        ]
        late = [a for a in row if a.kind is ActionKind.BACKWARD]
        parts += [Action(ActionKind.BACKWARD_WEIGHT, a.stage, a.micro_batch) for a in late]
        rows.append(tuple(parts))
    return Schedule(
        name="split",
        num_stages=schedule.num_stages,
        num_micro_batches=schedule.num_micro_batches,
        ranks=tuple(rows),
    )


def build(case, stage_ranks, data, schedule, failing=None):
    axes = [("data", data)]
    specs = {i: tuple(group) for i, group in case.specs.items()}
    owners = {}
    for stage, group in specs.items():
        for spec in group:
            owners.setdefault(spec.fqn, []).append(stage)
    world = create_world(axes, stage_ranks, ties=[tuple(o) for o in owners.values() if len(o) > 1])
    store = ParameterStore(specs, world)
    whole = values(specs)
    for fqn in store.entries:
        store.load_full(fqn, whole[fqn])
    stages = [stage for stage in case.stages() if stage.index in world.stages]
    if failing is not None:
        stages = [failing(stage) for stage in stages]
    engine = Engine(
        world=world, store=store, train=stages, schedule=schedule, inputs=case.inputs, seed=3
    )
    return world, store, engine, whole


def reference(case, whole, samples, step=0, training=True):
    from autopar.runtime.context import StepContext

    trainable = {s.fqn: s.trainable for group in case.specs.values() for s in group}
    w = {fqn: x.clone().requires_grad_(trainable[fqn]) for fqn, x in whole.items()}
    by_name = dict(w)
    for group in case.specs.values():
        for spec in group:
            by_name.update(dict.fromkeys(spec.names, w[spec.fqn]))
    ctx = StepContext(
        axes={}, batch=samples, global_batch=samples, seed=3, step=step, training=training
    )
    loss = case.reference(by_name, case.batch(samples), ctx)
    loss.backward()
    return loss.detach(), {fqn: x.grad for fqn, x in w.items()}


def check_step(name, stage_ranks, data, schedule, samples):
    case = CASES[name]()
    _, store, engine, whole = build(case, stage_ranks, data, schedule)
    want_loss, want = reference(case, whole, samples)
    off_loss, _ = reference(case, whole, samples, training=False)
    torch.testing.assert_close(engine.eval_step(case.batch(samples))[0], off_loss)
    assert all(entry.shared.grad is None for entry in store.entries.values())
    loss = engine.train_step(case.batch(samples))
    torch.testing.assert_close(loss, want_loss)
    for fqn, entry in store.entries.items():
        if not entry.spec.trainable:
            assert entry.shared.grad is None
            assert entry.local.equal(whole[fqn])
        else:
            torch.testing.assert_close(store.gather_gradient(fqn), want[fqn])
    torch.testing.assert_close(engine.eval_step(case.batch(samples))[0], off_loss)


LAYOUTS = {
    "skip-3": ("skip", [[0], [1], [2]], 1),
    "frozen-3": ("frozen", [[0], [1], [2]], 1),
    "tied-2": ("tied", [[0], [1]], 1),
    "tied-2x2": ("tied", [[0, 1], [2, 3]], 2),
    "skip-1x4": ("skip", [[0, 1, 2, 3]] * 3, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_equals_one_device(pool4, layout):
    pool4.run(check_many, layout)


def check_many(layout):
    name, ranks, data = LAYOUTS[layout]
    stages = len(ranks)
    for kind, samples, micro_batches in (
        ("gpipe", 8, 3),
        ("1f1b", 8, 4),
        ("1f1b", 7, 4),
        ("1f1b", 6, 4),
        ("gpipe", 2, 2),
    ):
        if ranks[0] == ranks[-1]:
            schedule = on_one_rank(stages, micro_batches)
        else:
            schedule = build_schedule(kind, stages, micro_batches)
        if samples in {6, 8}:
            schedule = split_backward(schedule) if kind == "1f1b" else schedule
        check_step(name, ranks, data, schedule, samples)


def on_one_rank(stages, micro_batches):
    row = []
    for m in range(micro_batches):
        row += [f"{s}F{m}" for s in range(stages)]
        row += [f"{s}B{m}" for s in reversed(range(stages))]
    return Schedule.parse("one", stages, micro_batches, [" ".join(row)])


def check_v_shape():
    """Two ranks, three stages: the ends of the chain share a rank, and a tied weight there."""
    row0 = "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1"
    row1 = "1F0 1F1 1B0 1B1"
    schedule = Schedule.parse("v", 3, 2, [row0, row1])
    check_step("skip", [[0, 1], [2, 3], [0, 1]], 2, schedule, 5)


def test_stages_that_share_a_rank(pool4):
    pool4.run(check_v_shape)


def check_accumulation():
    case = Skip()
    _, store, engine, whole = build(
        case, [[0, 1], [2, 3], [0, 1]], 2, Schedule.parse("v", 3, 1, ["0F0 2F0 2B0 0B0", "1F0 1B0"])
    )
    _, first = reference(case, whole, 4, step=0)
    _, second = reference(case, whole, 4, step=1)
    _, third = reference(case, whole, 4, step=2)
    batch = case.batch(4)
    engine.train_step(batch, accumulate=True)
    assert all(entry.shared.grad is None for entry in store.entries.values())
    engine.train_step(batch)
    for fqn in store.entries:
        torch.testing.assert_close(store.gather_gradient(fqn), first[fqn] + second[fqn])
    engine.train_step(batch)
    for fqn in store.entries:
        total = first[fqn] + second[fqn] + third[fqn]
        torch.testing.assert_close(store.gather_gradient(fqn), total)
    store.tree.zero_grad()
    engine.step = 0
    engine.train_step(batch)
    for fqn in store.entries:
        torch.testing.assert_close(store.gather_gradient(fqn), first[fqn])


def test_accumulation_is_a_sum(pool4):
    pool4.run(check_accumulation)


def check_refusal():
    case = Tied()
    _, _, engine, _ = build(case, [[0, 1], [2, 3]], 2, build_schedule("gpipe", 2, 2))
    batch = case.batch(4)
    wrong = {**batch, "ids": torch.zeros(4, 6, dtype=torch.int64)}
    with pytest.raises(InputError, match=r"captured with 5 in dim 1 .*, got 6"):
        engine.train_step(wrong)
    engine.train_step(batch)


def test_a_wrong_batch_is_refused_before_anything_is_sent(pool4):
    pool4.run(check_refusal)


class Broken:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, w, ctx, received, inputs, setup):
        if ctx.micro_batch == 1:
            raise ValueError("the seventh seal")
        return self.forward(w, ctx, received, inputs, setup)


def break_second(stage):
    if stage.index != 1:
        return stage
    return StageProgram(
        index=1, forward=Broken(stage.forward), receives=stage.receives, sends=stage.sends
    )


def check_failure():
    _, _, engine, _ = build(
        Skip(), [[0], [1], [2]], 1, build_schedule("1f1b", 3, 4), failing=break_second
    )
    engine.train_step(Skip().batch(8))


def test_a_failure_names_its_place(pool4):
    with pytest.raises(RuntimeFailure) as failure:
        pool4.run(check_failure)
    text = str(failure.value)
    assert "rank 1, stage 1, micro-batch 1, action 1F1 (forward): ValueError" in text
    assert 'raise ValueError("the seventh seal")' in text


TENSOR = (
    (parameter("up.weight", 6, 4, layout=(R_STAR, Shard(0))),),
    (
        parameter("down.weight", 4, 6, layout=(R_STAR, Shard(1))),
        parameter("bias", 4, layout=(R_STAR, R)),
    ),
)


def tensor_first(w, ctx, received, inputs, setup):
    x = comm.sum_gradient(inputs["x"], ctx.axes["tensor"])
    return (torch.relu(x @ w["up.weight"].t()),)


def tensor_second(w, ctx, received, inputs, setup):
    (h,) = received
    out = comm.sum_partial(h @ w["down.weight"].t(), ctx.axes["tensor"]) + w["bias"]
    return (out**2).sum() / ctx.global_batch, out


def check_row_parallel_bias():
    """A value cut over the tensor axis crosses stages; the bias is added once."""
    specs = dict(enumerate(TENSOR))
    cut = BoundarySpec(
        name="h", shape=(B, Size(6)), dtype=F64, requires_grad=True, layout=(("tensor", Shard(1)),)
    )
    stages = (
        StageProgram(index=0, forward=tensor_first, sends=(cut,), inputs=("x",)),
        StageProgram(index=1, forward=tensor_second, receives=(cut,)),
    )
    world = create_world([("data", 1), ("tensor", 2)], [[0, 1], [2, 3]])
    store, whole = ParameterStore(specs, world), values(specs)
    for fqn in store.entries:
        store.load_full(fqn, whole[fqn])
    engine = Engine(
        world=world,
        store=store,
        train=[stages[i] for i in world.stages],
        schedule=build_schedule("1f1b", 2, 3),
        inputs=(InputSpec(key="x", shape=(B, Size(4)), dtype=F64),),
    )
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = {fqn: value.clone().requires_grad_() for fqn, value in whole.items()}
    out = torch.relu(x @ w["up.weight"].t()) @ w["down.weight"].t() + w["bias"]
    want = (out**2).sum() / 5
    want.backward()
    torch.testing.assert_close(engine.train_step({"x": x}), want.detach())
    for fqn in store.entries:
        torch.testing.assert_close(store.gather_gradient(fqn), w[fqn].grad)


def test_row_parallel_bias(pool4):
    pool4.run(check_row_parallel_bias)


def check_recorder():
    """What is noted in a step is what torch.distributed was asked for, sends included."""
    case = Tied()
    world, _, engine, _ = build(case, [[0, 1], [2, 3]], 2, build_schedule("1f1b", 2, 3))
    seen, kept = [], {}
    for name in ("all_reduce", "isend", "broadcast", "all_gather_single", "reduce_scatter_single"):
        kept[name] = getattr(dist, name)

        def call(tensor, *args, _name=name, **kwargs):
            seen.append((_name, tensor.nbytes))
            return kept[_name](tensor, *args, **kwargs)

        setattr(dist, name, call)
    world.recorder.start()
    engine.train_step(case.batch(6))
    events = world.recorder.stop()
    for name, function in kept.items():
        setattr(dist, name, function)
    names = {"all_reduce": "all_reduce", "send_recv": "isend"}
    assert [(names[event.op.value], event.nbytes) for event in events] == seen
    last = 0 if 0 in world.stages else 1
    values = [event.phase for event in events if event.op.value == "send_recv"]
    assert values == (["forward"] * 6 if last == 0 else ["backward"] * 3)
    sync = [(event.axes, event.nbytes) for event in events if event.phase == "sync"]
    # 10x4 tied and 4x4 weights in one bucket, the tied one over both stages, then the loss.
    assert sync == [(("data",), 56 * 8), (("tied",), 40 * 8), (("world",), 8)]
    setup = [(event.axes, event.nbytes) for event in events if event.phase == "setup"]
    assert setup == ([] if last == 0 else [(("data",), 8)])


def test_a_step_is_recorded_honestly(pool4):
    pool4.run(check_recorder)


def check_recompute():
    def first(w, ctx, received, inputs, setup):
        def make_y(x, w):
            y = torch.relu(x @ w["up.weight"].t())
            y = kernels.dropout(y, 0.5, ctx, op=0, dims=((ctx.sample_offset, 6), (0, 1)))
            return comm.sum_partial(y @ w["down.weight"].t(), ctx.axes["tensor"])

        x = comm.sum_gradient(inputs["x"], ctx.axes["tensor"])
        with Recomputation() as again:
            return (again(make_y, x, w) ** 2,)

    def loss(w, ctx, received, inputs, setup):
        (y,) = first(w, ctx, received, inputs, setup)
        return (y.sum(),)

    specs = {
        0: (
            parameter("up.weight", 6, 4, layout=(R_STAR, Shard(0))),
            parameter("down.weight", 4, 6, layout=(R_STAR, Shard(1))),
        )
    }
    world = create_world([("data", 1), ("tensor", 4)], [range(4)])
    store, whole = ParameterStore(specs, world), values(specs)
    for fqn in store.entries:
        store.load_full(fqn, whole[fqn])
    engine = Engine(
        world=world,
        store=store,
        train=[StageProgram(index=0, forward=loss, inputs=("x",))],
        schedule=build_schedule("gpipe", 1, 1),
        inputs=(InputSpec(key="x", shape=(B, Size(4)), dtype=F64),),
    )
    world.recorder.start()
    engine.train_step({"x": torch.ones(3, 4, dtype=torch.float64)})
    phases = [event.phase for event in world.recorder.stop()]
    assert phases == ["forward", "recompute", "sync"]


def test_recomputed_collectives_are_told_apart(pool4):
    pool4.run(check_recompute)
