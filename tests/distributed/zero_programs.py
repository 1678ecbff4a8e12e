"""Small programs whose parameters are kept in shards or in another dtype between steps."""

from dataclasses import replace

import torch
from torch import nn

from autopar.ir.placement import R_STAR, P
from autopar.ir.size import Size
from autopar.plan.zero import shard_layout
from autopar.runtime import comm, kernels
from autopar.runtime.axes import create_world
from autopar.runtime.data import InputSpec
from autopar.runtime.engine import Engine
from autopar.runtime.gather import ShardedWeight
from autopar.runtime.initialize import initialize
from autopar.runtime.parameters import ParameterSpec, ParameterStore
from autopar.runtime.program import StageProgram
from autopar.runtime.recompute import Recomputation
from autopar.schedules.registry import build_schedule

WIDTHS = (6, 7, 10)
NARROW = {"stored_dtype": "float32"}
"""What a spec in bfloat16 or float16 has besides."""


def kept(spec, level, sizes, over=(0,), frozen=()):
    """The spec at a ZeRO level over some mesh axes; level 0 where no dim can be split."""
    spec = replace(spec, trainable=spec.trainable and spec.fqn not in frozen)
    if spec.is_buffer or not (spec.trainable or level == 3):
        return spec
    layout = spec.layout
    if not spec.trainable:
        layout = tuple(type(p)() if p == R_STAR else p for p in layout)
    stored = shard_layout(spec.shape, layout, sizes, over, trainable=spec.trainable)
    level = min(level, 1) if spec.tied else level
    if not (stored and level):
        return replace(spec, layout=layout)
    return replace(spec, layout=layout, zero=level, stored=stored)


def gathering(stage, store, *, recompute=False):
    """A stage as generated code has it: a block gathers the weights that live in shards first."""

    def block(w, *args):
        whole = dict(w)
        for name, weight in w.items():
            if isinstance(weight, ShardedWeight):
                split = store.entries[name].split
                whole[name] = comm.gather_weight(weight, split.axis, split.dim, split.size)
        return stage.forward(whole, *args)

    def forward(w, ctx, received, inputs, setup):
        def make_results(*received):
            return block(w, ctx, received, inputs, setup)

        if not recompute:
            return make_results(*received)
        with Recomputation() as again:
            return again(make_results, *received)

    return replace(stage, forward=forward)


class Net(nn.Module):
    """Two linears and a parameter that nothing reads."""

    def __init__(self, dtype=torch.float64, widths=WIDTHS):
        super().__init__()
        self.up = nn.Linear(widths[0], widths[1])
        self.down = nn.Linear(widths[1], widths[2])
        self.unread = nn.Parameter(torch.ones(12))
        self.to(dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).pow(2).sum(1).mean()


def net(dtype=torch.float64, widths=WIDTHS):
    torch.manual_seed(0)
    return Net(dtype, widths)


def net_forward(w, ctx, received, inputs, setup):
    h = torch.tanh(kernels.linear(inputs["x"], w["up.weight"], w["up.bias"], ctx))
    out = kernels.linear(h, w["down.weight"], w["down.bias"], ctx)
    return (out.pow(2).sum() / ctx.global_batch,)


def net_batch(samples, dtype=torch.float64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, WIDTHS[0], generator=generator, dtype=torch.float64).to(dtype)
    }


def net_specs(dtype, level, axes, over, frozen, widths, **more):
    names = [(n, tuple(p.shape)) for n, p in net(widths=widths).named_parameters()]
    sizes = tuple(size for _, size in axes)
    specs = [
        ParameterSpec(
            fqn=name,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            layout=(R_STAR,) * len(axes),
            **more,
        )
        for name, shape in names
    ]
    return tuple(kept(spec, level, sizes, over, frozen) for spec in specs)


def build_net(
    axes=(("data", 4),),
    level=0,
    over=(0,),
    dtype=torch.float64,
    micro_batches=1,
    frozen=(),
    recompute=False,
    loss_scale=None,
    cap_bytes=200,
    forward=net_forward,
    widths=WIDTHS,
    **more,
):
    """World, store and engine of `Net` on all ranks."""
    ranks = 1
    for _, size in axes:
        ranks *= size
    names = tuple(name for name, _ in axes)
    joins = {
        names,
        tuple(names[i] for i in over),
        tuple(n for i, n in enumerate(names) if i not in over),
    }
    world = create_world(axes, [range(ranks)], joins=sorted(joins))
    specs = net_specs(dtype, level, axes, over, frozen, widths, **more)
    store = ParameterStore({0: specs}, world, cap_bytes)
    initialize(store, net(dtype, widths))
    stage = StageProgram(index=0, forward=forward, inputs=("x",))
    engine = Engine(
        world=world,
        store=store,
        train=[gathering(stage, store, recompute=recompute)],
        schedule=build_schedule("1f1b", 1, micro_batches),
        inputs=(
            InputSpec(
                key="x",
                shape=(Size(0, 1), Size(widths[0])),
                dtype=str(dtype).removeprefix("torch."),
            ),
        ),
        loss_layout=(P,) * len(axes),
        bucket_cap_bytes=cap_bytes,
        loss_scale=loss_scale,
    )
    return world, store, engine
