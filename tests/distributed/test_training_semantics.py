"""What a training loop does between passes, on every kind of plan beside one device.

Gradients that add up over several passes, losses per valid token, batches of other sizes than
planned, clipping, parameter groups, learning-rate schedules, frozen weights: all of it in one loop,
in double precision, over every way of splitting samples, state, layers and weights.
"""

import math

import case_models as models
import pytest
import torch
import torch.distributed as dist
from beside import Beside, close
from torch import nn

import autopar
from autopar.codegen.traffic import totals
from autopar.ir.collective import CollectiveOp
from autopar.runtime.measure import state_bytes

pytestmark = pytest.mark.distributed

GRIDS = (
    {"data": 4, "zero": 1, "micro_batches": 2},
    {"data": 4, "zero": 3},
    {"data": 4, "shard": 2, "zero": 2, "micro_batches": 3},
    {"pipeline": 2, "data": 2, "zero": 3, "micro_batches": 4},
    {"data": 2, "context": 2, "micro_batches": 2},
    {"tensor": 2, "data": 2, "zero": 1, "micro_batches": 2},
    {"pipeline": 2, "tensor": 2, "micro_batches": 4, "schedule": "gpipe"},
    {"pipeline": 2, "data": 2, "zero": 2, "micro_batches": 4, "schedule": "zb-h1"},
)


def ragged(samples, seed, seq=4, vocab=12):
    """Tokens of which each sample has another number of labels, the first none."""
    batch = models.tokens(samples, seq, vocab, seed)
    for row in range(samples):
        batch["labels"][row, row % (seq + 1) :] = -100
    if samples == 1:
        batch["labels"][0, 1] = 5
    return batch


def grouped(model):
    """Matrices decay, the rest does not; a group may be empty on a stage, and learns faster."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if p.dim() == 1 and "norm" not in n]},
        {"params": [p for n, p in named.items() if "norm" in n], "lr": 0.05, "weight_decay": 0},
    ]


def beside(pins):
    torch.manual_seed(0)
    model = models.Adapted().double()
    optimizer = torch.optim.AdamW(grouped(model), lr=0.02, eps=1e-3)
    both = Beside(model, pins, optimizer=optimizer, batch=ragged(8, 0))
    both.theirs = torch.optim.AdamW(grouped(both.reference), lr=0.02, eps=1e-3)
    return both


def schedules(optimizer):
    """Warm-up, then a cosine: of the closed and of the chained kind."""
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])


def accumulate(both, sizes, seed, *, unfinished):
    """Passes over batches of these sizes; gradients are the sum of all, on every rank.

    Until the last one, `unfinished` passes communicate no gradient of a weight.
    """
    recorder = both.parallel.program.world.recorder
    for i, samples in enumerate(sizes):
        batch, last = ragged(samples, seed + i), i == len(sizes) - 1
        recorder.start()
        loss = both.parallel.backward_step(batch, accumulate=unfinished and not last)
        synced = [c for c in recorder.stop() if c.phase == "sync" and c.axes != ("world",)]
        assert not (synced and unfinished and not last), synced
        close(loss, both.eager(batch))
    both.same_gradients()


def clip(both, limit, kind):
    """The norm before, equal on all ranks; the gradients after."""
    trained = [p for p in both.reference.parameters() if p.requires_grad]
    want = torch.nn.utils.clip_grad_norm_(trained, limit, kind)
    norm = both.parallel.clip_grad_norm_(limit, kind)
    close(norm, want)
    close(both.parallel.grad_norm(kind), limit * want / (want + 1e-6))
    both.same_gradients()
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert all(other.equal(norm) for other in norms)


def check_loop(pins):
    both = beside(pins)
    plan = both.parallel.plan
    kinds = {axis.name: axis.size for axis in plan.axes}
    assert plan.training.micro_batches == pins.get("micro_batches", 1)
    assert max(p.zero for s in plan.stages for p in s.parameters) == pins.get("zero", 0)
    assert kinds.get("context", 1) == pins.get("context", 1)
    assert kinds.get("shard", 1) == pins.get("shard", 1)
    ours, theirs = schedules(both.parallel.optimizer), schedules(both.theirs)
    frozen = {n: p.clone() for n, p in both.reference.named_parameters() if not p.requires_grad}
    rates = []
    for step, (sizes, kind) in enumerate(
        [((8,), 2.0), ((8, 5, 2), 1.0), ((3, 8), math.inf), ((1,), 2.0)]
    ):
        accumulate(both, sizes, 10 * step, unfinished=step % 2 == 1)
        clip(both, 0.01, kind)
        both.step()
        ours.step()
        theirs.step()
        assert ours.get_last_lr() == theirs.get_last_lr()
        rates.append(tuple(ours.get_last_lr()))
        both.same_weights()
    assert len(set(rates)) == len(rates), "the schedule never moved"
    for fqn, value in frozen.items():
        if fqn in both.store.entries:
            assert both.store.gather_full(fqn).equal(value)
            assert both.store.entries[fqn].shared.grad is None


@pytest.mark.parametrize("pins", GRIDS, ids=str)
def test_a_training_loop_equals_one_device(pool4, pins):
    """Averages instead of sums over passes (pytorch/torchtitan#1733), counts of valid labels left
    out on ranks that have none (pytorch/torchtitan#2972), norms that count a shard or replica
    wrongly (pytorch/torchtitan#596), groups lost (pytorch/pytorch#149205)."""
    pool4.run(check_loop, pins)


class LowRankUpdate(nn.Module):
    """A frozen 1024 x 1024 weight with a trained update of rank 8."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
        self.down = nn.Linear(1024, 8, bias=False)
        self.up = nn.Linear(8, 1024, bias=False)

    def forward(self, x, y):
        return (self.base(x) + self.up(self.down(x)) - y).square().mean()


TRAINED, FROZEN = 4 * 16_384, 4 * 1024 * 1024


def check_low_rank(zero):
    """float32: gradients and Adam state of 16,384 elements, and nothing else of the frozen ones."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(4, 1024, generator=generator) for name in "xy"}
    parallel = autopar.parallelize(
        LowRankUpdate(),
        "local:2",
        batch=batch,
        optimizer=(torch.optim.Adam, {"lr": 0.1}),
        pins={"data": 2, "zero": zero},
    )
    program = parallel.program
    before = program.store.gather_full("base.weight").clone()
    recorder = program.world.recorder
    recorder.start()
    parallel.train_step(batch)
    ran = totals(recorder.stop())
    assert program.store.gather_full("base.weight").equal(before)
    assert program.store.entries["base.weight"].shared.grad is None
    assert ran == totals(parallel.plan.stages[0].collectives)
    held = state_bytes(program.store, program.engine.sync, parallel.optimizer)
    assert len(parallel.optimizer.state) == 2
    planned = dict(parallel.plan.stages[0].memory_bytes)
    synced = {c.op: c.nbytes for c in ran if c.phase == "sync" and c.axes == ("data",)}
    return held, planned, synced


@pytest.mark.parametrize("zero", [0, 2])
def test_frozen_weights_have_no_gradient_and_no_state(pool2, zero):
    """Estimates of four times the parameters (pytorch/pytorch#104690), gradient elements of whole
    blocks for those of a low-rank update (Lightning-AI/litgpt#1538)."""
    held, planned, synced = pool2.run(check_low_rank, zero)[0]
    share = 2 if zero else 1
    assert TRAINED + 2 * TRAINED == 196_608 and FROZEN == 4_194_304
    assert planned["weights"] == FROZEN + TRAINED == held["weights"]
    assert planned["optimizer"] == 2 * TRAINED / share == held["optimizer"]
    assert planned["gradients"] + planned["unreduced"] * (zero == 0) == TRAINED / share
    assert held["gradients"] <= TRAINED + TRAINED // share
    op = CollectiveOp.REDUCE_SCATTER if zero else CollectiveOp.ALL_REDUCE
    assert synced == {op: TRAINED}
