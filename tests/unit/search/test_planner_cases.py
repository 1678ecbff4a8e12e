"""Plans for models that other planners were seen to get wrong, each with the public report."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.compiler import Planned, PlanOptions, adopt_plan, plan_model
from autopar.costs.clusters import parse_cluster
from autopar.errors import InfeasiblePlan, InputError, PlanMismatch
from autopar.ir.graph import Ref
from autopar.ir.placement import R_STAR, R, Shard, chunk_sizes
from autopar.plan.check import check_plan
from autopar.plan.serialize import from_json, to_json
from autopar.rules import axis_strategies
from autopar.search.block import node_options
from autopar.search.pricer import Pricer
from autopar.search.setting import Setting
from model_zoo.gpt import GPT, GPTConfig

STATE = ("weights", "gradients", "master", "optimizer")


class Stack(nn.Module):
    """Linear layers with GELU, and a mean squared error."""

    def __init__(self, layers, hidden):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return ((x - y) ** 2).mean()


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, residual blocks without attention, norm and head."""

    def __init__(self, layers, hidden, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class TwoLayers(nn.Module):
    """`hidden` in and out, `wide` between."""

    def __init__(self, hidden, wide, bias=False):
        super().__init__()
        self.up = nn.Linear(hidden, wide, bias=bias)
        self.down = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x, y):
        return ((self.down(torch.relu(self.up(x))) - y) ** 2).mean()


def vectors(hidden, samples=8):
    return {"x": torch.empty(samples, hidden), "y": torch.empty(samples, hidden)}


def tokens(seq, samples=4):
    ids = torch.empty(samples, seq, dtype=torch.long)
    return {"ids": ids, "labels": ids.clone()}


def plan(build, batch, cluster="local:1", pins=(), **options) -> Planned:
    """Plan a model without allocating it; `pins` as on the command line."""
    with torch.device("meta"):
        model, example = build(), {k: v.to("meta") for k, v in batch.items()}
    given = tuple(tuple(pin.split("=", 1)) for pin in pins)
    return plan_model(model, example, cluster, PlanOptions(pins=given, **options))


def total_bytes(stage):
    return sum(figure for _, figure in stage.memory_bytes)


def state_bytes(stage):
    terms = dict(stage.memory_bytes)
    return sum(terms[name] for name in STATE)


def grid(planned):
    return planned.plan.pipeline, planned.plan.axis("data"), planned.plan.axis("tensor")


# -- activations are part of the estimate (DeepSpeed#4527, #2797, #5102, #2302) -------------------

LAYERS, HIDDEN, BATCH = 4, 256, 4096
PARAMETERS = LAYERS * (HIDDEN + 1) * HIDDEN
LAYER_OUTPUT = BATCH * HIDDEN * 4


def stack(cluster="local:1", **options):
    return plan(
        lambda: Stack(LAYERS, HIDDEN),
        vectors(HIDDEN),
        cluster,
        global_batch=BATCH,
        optimizer="adam",
        **options,
    )


def test_activations_are_a_term_of_their_own():
    """DeepSpeed#4527: an estimate of 0.49 GB a GPU for a run that takes 20 GB."""
    planned = stack(pins=["micro_batches=1"])
    stage = json.loads(to_json(planned.plan))["stages"][0]
    terms = dict(stage["memory_bytes"])
    assert terms["weights"] == terms["gradients"] == 4 * PARAMETERS
    assert terms["optimizer"] == 8 * PARAMETERS
    # inputs of four GELUs, their outputs but the last into the next layer, x - y of the square
    assert terms["activations"] == 8 * LAYER_OUTPUT
    assert terms["transient"] >= LAYER_OUTPUT
    assert sum(terms.values()) == pytest.approx(planned.plan.prediction.peak_bytes, rel=1e-6)


@pytest.mark.parametrize("cluster", ["local:1", "local:2"])
@pytest.mark.parametrize("pins", [(), ("micro_batches=1",)], ids=["free", "one micro-batch"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_no_plan_is_predicted_to_exceed_the_limit(cluster, pins, share):
    """DeepSpeed#4527: between model state and state with activations something has to give."""
    state, activations = 16 * PARAMETERS, 8 * LAYER_OUTPUT
    limit = int(state + share * activations)
    try:
        planned = stack(cluster, pins=pins, memory_limit_bytes=limit)
    except InfeasiblePlan as error:
        assert pins, "smaller micro-batches would have fitted"
        assert re.search(r"needs .* of .*, \d+ bytes too much: weights .*activations", str(error))
        return
    check_plan(planned.plan)
    assert all(total_bytes(stage) <= limit for stage in planned.plan.stages)
    blocks = [block for stage in planned.plan.stages for block in stage.blocks]
    assert (
        planned.plan.training.micro_batches > 1
        or any(block.recompute for block in blocks)
        or planned.plan.num_devices > 1
    )


def kept_by_autograd(parallel, batch):
    """Bytes of the storages that a training step keeps for backward, parameters and batch aside."""
    own = [entry.local for entry in parallel.program.store.entries.values()]
    held = {tensor.untyped_storage().data_ptr() for tensor in (*own, *batch.values())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parallel.train_step(batch)
    return sum(s.nbytes() for address, s in kept.items() if address not in held)


@pytest.fixture
def alone():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("build", "example", "pins"),
    [
        (lambda: Stack(LAYERS, HIDDEN), vectors(HIDDEN, 512), {}),
        (lambda: LanguageModel(2, 32, 64), {k: torch.zeros_like(v) for k, v in tokens(16).items()}, {}),
        (
            lambda: GPT(GPTConfig(layers=2, hidden=32, heads=4, vocab=64, seq_len=16)),
            {k: torch.zeros(4, 16, dtype=torch.long) for k in ("input_ids", "labels")},
            {},
        ),
    ],
    ids=["stack", "language model", "gpt"],
)
def test_predicted_activations_are_those_that_autograd_keeps(alone, build, example, pins):
    """DeepSpeed#4527, counted by `saved_tensors_hooks` in the generated program."""
    torch.manual_seed(0)
    batch = {
        k: torch.randn_like(v) if v.is_floating_point() else v.clone() for k, v in example.items()
    }
    parallel = autopar.parallelize(
        build(),
        "local:1",
        batch=batch,
        optimizer=(torch.optim.Adam, {}),
        pins={"micro_batches": 1, "recompute": "none", **pins},
    )
    counted = kept_by_autograd(parallel, batch)
    predicted = dict(parallel.plan.stages[0].memory_bytes)["activations"]
    assert predicted == pytest.approx(counted, rel=0.1)
