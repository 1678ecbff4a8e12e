"""Parameters over data, tensor and pipeline ranks: storage, gradients, norm, optimizers, states."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import InputError, PlanMismatch
from autopar.ir.placement import R_STAR, R, Shard
from autopar.ir.size import Size
from autopar.runtime import comm, kernels
from autopar.runtime.axes import create_world
from autopar.runtime.clip import clip_grad_norm_, grad_norm
from autopar.runtime.data import InputSpec
from autopar.runtime.engine import Engine
from autopar.runtime.initialize import initialize
from autopar.runtime.optim import bind_optimizer
from autopar.runtime.parameters import ParameterSpec, ParameterStore
from autopar.runtime.program import BoundarySpec, OutputSpec, StageProgram
from autopar.schedules.registry import build_schedule

pytestmark = pytest.mark.distributed

B = Size(0, 1)
VOCAB, HIDDEN = 10, 4


class Model(nn.Module):
    """A tied embedding, a packed projection, a bias after a row split, a mean of valid labels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, 14)
        self.down = nn.Linear(7, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((HIDDEN,), 1.5))
        self.double()

    def forward(self, ids, labels):
        gate, up = self.up(self.embed(ids)).chunk(2, -1)
        x = F.dropout(self.down(torch.tanh(gate) * up), 0.25, self.training)
        logits = self.head(self.norm(x * self.scale))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(samples):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (samples, 3), generator=generator)
    labels = torch.randint(VOCAB, (samples, 3), generator=generator)
    labels[1] = -100
    return {"ids": ids, "labels": labels}


def first(w, ctx, received, inputs, setup):
    tensor = ctx.axes["tensor"]
    x = kernels.vocab_embedding(inputs["ids"], w["embed.weight"], tensor.start(VOCAB))
    x = comm.sum_partial_and_gradient(x, tensor)
    gate, up = torch.split(
        kernels.linear(x, w["up.weight"], w["up.bias"], ctx), tensor.share(7), -1
    )
    x = comm.sum_partial(torch.tanh(gate) * up @ w["down.weight"].t(), tensor) + w["down.bias"]
    return (x,)


def second(w, ctx, received, inputs, setup):
    tensor, (x,) = ctx.axes["tensor"], received
    dims = ((ctx.sample_offset, 3 * HIDDEN), (0, HIDDEN), (0, 1))
    x = kernels.dropout(x, 0.25, ctx, op=0, dims=dims) * w["scale"]
    x = F.layer_norm(x, (HIDDEN,), w["norm.weight"], w["norm.bias"])
    x = comm.sum_gradient(x, tensor)
    logits = x @ w["head.weight"].t()
    loss = kernels.vocab_cross_entropy(
        logits.flatten(0, 1), inputs["labels"].flatten(), tensor.start(VOCAB), tensor
    )
    return loss / setup["valid"], logits


def setup_sums(w, ctx, inputs):
    return {"valid": kernels.count_valid(inputs["labels"], dtype=torch.float64)}


# The first line of `first` has no gradient on ids; its P -> R* is right because all that follows
# until the row split is computed on shards.
def spec(fqn, shape, tensor, **changes):
    return ParameterSpec(fqn=fqn, shape=shape, dtype="float64", layout=(R_STAR, tensor), **changes)


EMBED = spec("embed.weight", (VOCAB, HIDDEN), Shard(0), tied=("head.weight",))
SPECS = {
    0: (
        EMBED,
        spec("up.weight", (14, HIDDEN), Shard(0, (7, 7))),
        spec("up.bias", (14,), Shard(0, (7, 7))),
        spec("down.weight", (HIDDEN, 7), Shard(1)),
        spec("down.bias", (HIDDEN,), R),
    ),
    1: (
        spec("norm.weight", (HIDDEN,), R),
        spec("norm.bias", (HIDDEN,), R),
        EMBED,
        ParameterSpec(
            fqn="scale",
            shape=(HIDDEN,),
            dtype="float64",
            layout=(R, R),
            trainable=False,
            is_buffer=True,
        ),
    ),
}
X = (BoundarySpec(name="x", shape=(B, Size(3), Size(4)), dtype="float64", requires_grad=True),)
STAGES = (
    StageProgram(index=0, forward=first, sends=X, inputs=("ids",)),
    StageProgram(index=1, forward=second, receives=X, inputs=("labels",), setup=setup_sums),
)
INPUTS = tuple(InputSpec(key=key, shape=(B, Size(3)), dtype="int64") for key in ("ids", "labels"))
LOGITS = OutputSpec(
    name="logits",
    stage=1,
    shape=(B, Size(3), Size(VOCAB)),
    dtype="float64",
    layout=(Shard(0), Shard(2)),
)


def one_stage(w, ctx, received, inputs, setup):
    return second(w, ctx, first(w, ctx, (), inputs, setup), inputs, setup)


def build(
    pipeline,
    data,
    tensor,
    micro_batches,
    model,
    change=lambda specs, sizes: specs,
    wrap=lambda stage, store: stage,
    schedule="1f1b",
):
    """`change` is applied to the specs, given the mesh sizes, `wrap` to every stage."""
    from autopar.ir.placement import P

    per_stage = data * tensor
    ranks = [range(s * per_stage, (s + 1) * per_stage) for s in range(pipeline)]
    specs, stages, outputs = SPECS, STAGES, LOGITS
    if pipeline == 1:
        merged = {s.fqn: s for group in SPECS.values() for s in group}
        specs = {0: tuple(merged.values())}
        stages = (
            StageProgram(index=0, forward=one_stage, inputs=("ids", "labels"), setup=setup_sums),
        )
        outputs = OutputSpec(
            name="logits", stage=0, shape=LOGITS.shape, dtype="float64", layout=LOGITS.layout
        )
    specs = change(specs, (data, tensor))
    world = create_world([("data", data), ("tensor", tensor)], ranks, ties=[(0, 1)][: pipeline - 1])
    store = ParameterStore(specs, world, cap_bytes=200)
    initialize(store, model)
    engine = Engine(
        world=world,
        store=store,
        train=[wrap(stages[i], store) for i in world.stages],
        schedule=build_schedule(schedule, pipeline, micro_batches),
        inputs=INPUTS,
        outputs=(outputs,),
        loss_layout=(P, P),
        seed=11,
        bucket_cap_bytes=200,
    )
    return world, store, engine


def reference_step(model, step, samples):
    from autopar.runtime.reference import reference_random

    with reference_random(11, step):
        loss = model(**batch(samples))["loss"]
    loss.backward()
    return loss.detach()


def model_on():
    torch.manual_seed(0)
    return Model()


PLANS = {"pp2tp2": (2, 1, 2), "dp2tp2": (1, 2, 2), "pp2dp2": (2, 2, 1), "tp4": (1, 1, 4)}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
}


def check_training(plan, optimizer, norm_type):
    model = model_on()
    world, store, engine = build(*PLANS[plan], 3, model)
    cls, options = OPTIMIZERS[optimizer]
    ours = bind_optimizer((cls, options), store)
    theirs = cls(model.parameters(), **options)
    for step in range(3):
        want = reference_step(model, step, 7)
        torch.testing.assert_close(engine.train_step(batch(7)), want)
        names = {id(p): name for name, p in model.named_parameters()}
        for p in model.parameters():
            if names[id(p)] in store.entries:
                torch.testing.assert_close(store.gather_gradient(names[id(p)]), p.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        torch.testing.assert_close(grad_norm(store, norm_type), norm)
        torch.testing.assert_close(clip_grad_norm_(store, 0.05, norm_type), norm)
        torch.testing.assert_close(
            grad_norm(store, norm_type),
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type),
        )
        ours.step()
        theirs.step()
        store.tree.zero_grad()
        model.zero_grad()
        for name, value in model.state_dict().items():
            if any(name in e.spec.names for e in store.entries.values()):
                torch.testing.assert_close(store.gather_full(name), value)
    state = store.full_state_dict()
    if world.rank == 0:
        assert sorted(state) == sorted(model.state_dict())
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)
    else:
        assert state == {}
    model.eval()
    with torch.no_grad():
        want = model(**batch(7))
    loss, outputs = engine.eval_step(batch(7))
    torch.testing.assert_close(loss, want["loss"])
    torch.testing.assert_close(outputs["logits"], want["logits"])


@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_one_device(pool4, plan):
    pool4.run(check_training, plan, "adamw" if plan == "tp4" else "sgd", 2.0)


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_norms(pool4, norm_type):
    pool4.run(check_training, "pp2tp2", "adamw", norm_type)


def check_tree():
    world, store, engine = build(2, 1, 2, 1, model_on())
    engine.train_step(batch(4))
    known = dict(model_on().named_parameters(remove_duplicate=False))
    tree = dict(store.tree.named_parameters(remove_duplicate=False))
    assert set(tree) <= set(known)
    for name, p in tree.items():
        entry = next(e for e in store.entries.values() if name in e.spec.names)
        assert p.shape == known[name].shape
        assert entry.local.grad is None
        assert p.to_local().data_ptr() == entry.local.data_ptr()
    if 1 in world.stages:
        assert dict(store.tree.named_buffers()).keys() == {"scale"}
    # torch's own clipping agrees with ours on the parameters of one stage.
    norm = torch.nn.utils.get_total_norm([p.grad for p in store.tree.parameters()])
    whole = [store.gather_gradient(fqn) for fqn in store.entries if fqn != "scale"]
    want = torch.nn.utils.get_total_norm(whole)
    torch.testing.assert_close(norm.full_tensor(), want)


def test_tree_has_original_names_and_shares_memory(pool4):
    pool4.run(check_tree)


def check_initial_values():
    """Bit-equal whatever the plan, from a meta model without data."""
    states = []
    for plan in PLANS.values():
        with torch.device("meta"):
            model = MetaModel()
        _, store, _ = build(*plan, 1, model)
        states.append(store.full_state_dict())
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(value.equal(states[0][name]) for name, value in state.items())


class MetaModel(Model):
    """The buffer has data; the weights have none."""

    def __init__(self):
        super().__init__()
        self.scale = torch.full((HIDDEN,), 1.5, dtype=torch.float64, device="cpu")


def test_initial_weights_do_not_depend_on_the_plan(pool4):
    pool4.run(check_initial_values)


def check_optimizers():
    model = model_on()
    decay = [model.up.weight, model.down.weight]
    others = [p for p in model.parameters() if all(p is not q for q in decay)]
    existing = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(existing, lambda step: 0.5**step)
    world, store, _ = build(2, 1, 2, 1, model)
    bound = bind_optimizer(existing, store, model)
    assert bound is existing
    held = {id(p) for group in bound.param_groups for p in group["params"]}
    assert held == {id(p) for p in store.tree.parameters()}
    assert [group["weight_decay"] for group in bound.param_groups] == [0.5, 0.0]
    assert len(bound.param_groups[0]["params"]) == (2 if 0 in world.stages else 0)
    for p in store.tree.parameters():
        p.grad = torch.zeros_like(p)
    bound.step()
    scheduler.step()
    assert bound.param_groups[0]["lr"] == 0.05
    with pytest.raises(InputError, match="stepped already"):
        bind_optimizer(bound, store, model)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(InputError, match=r"parameter 0 of group 0 of SGD \(shape \(3,\)\) is not"):
        bind_optimizer(stranger, store, model)
    made = bind_optimizer(lambda params: torch.optim.SGD(params, lr=0.1), store)
    assert len(made.param_groups[0]["params"]) == len(list(store.tree.parameters()))


def test_optimizers_are_bound(pool4):
    pool4.run(check_optimizers)


def check_refusals():
    axes, ranks = [("data", 2), ("tensor", 2)], [range(4), range(4)]
    world = create_world(axes, ranks)
    with pytest.raises(PlanMismatch, match="has layout"):
        ParameterStore(
            {0: (ParameterSpec(fqn="w", shape=(2,), dtype="float32", layout=(R,)),)}, world
        )
    with pytest.raises(PlanMismatch, match="must be alike"):
        other = spec("embed.weight", (VOCAB, HIDDEN), R)
        ParameterStore({0: (EMBED,), 1: (other,)}, world)
    with pytest.raises(PlanMismatch, match="needs 4 distinct"):
        create_world(axes, [[0, 1, 2]])
    with pytest.raises(PlanMismatch, match="4 processes were started"):
        create_world(axes, [[0, 1, 2, 9]])


def test_wrong_plans_are_refused(pool4):
    pool4.run(check_refusals)


def check_nested():
    """Both axes cut one dim, unevenly: the inner one cuts what the outer one left."""
    world = create_world([("data", 2), ("tensor", 2)], [range(4)])
    layout = (Shard(0), Shard(0))
    nested = ParameterSpec(fqn="deep.w", shape=(7, 3), dtype="float64", layout=layout)
    store = ParameterStore({0: (nested,)}, world)
    whole = torch.arange(21.0, dtype=torch.float64).view(7, 3)
    store.load_full("deep.w", whole)
    rows = [[0, 1], [2, 3], [4, 5], [6]][world.rank]
    assert store.weights(0)["deep.w"].equal(whole[rows])
    assert store.gather_full("deep.w").equal(whole)
    assert store.tree.get_parameter("deep.w").full_tensor().equal(whole)
    with pytest.raises(PlanMismatch, match=r"has shape \(3, 7\); the plan has \(7, 3\)"):
        store.load_full("deep.w", whole.t())


def test_two_axes_cut_one_dim(pool4):
    pool4.run(check_nested)
