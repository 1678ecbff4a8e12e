"""Batch norm over ranks beside one device, in double precision.

With micro-batches in a row the statistics would be those of a part of the batch: running ones of
-0.0694 where one device has -0.0201, four updates in place of one (kakaobrain/torchgpipe#14,
pytorch/pytorch#46516). Here they are those of the whole batch: there is one micro-batch, whose
ranks sum.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import Beside, close
from torch import nn

import autopar
from autopar.codegen.traffic import totals
from autopar.errors import InputError
from autopar.ir.collective import CollectiveOp
from autopar.runtime import kernels
from autopar.runtime.axes import create_world
from autopar.runtime.context import StepContext

pytestmark = pytest.mark.distributed


class ConvNet(nn.Module):
    """Convolution, batch norm twice (of images, then of features), linear; dropout if asked for."""

    def __init__(self, p=0.0, affine=True):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, affine=affine)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.hidden = nn.Linear(8, 8)
        self.flat = nn.BatchNorm1d(8, momentum=0.3)
        self.untracked = nn.BatchNorm1d(8, track_running_stats=False)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(8, 4)

    def forward(self, x, y):
        h = torch.relu(self.norm(self.conv(x)))
        h = torch.relu(self.depthwise(h)).mean((2, 3))
        h = self.untracked(self.dropout(self.flat(self.hidden(h))))
        return {"loss": F.mse_loss(self.head(h), y), "out": h}


def images(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, 4, 4, generator=generator, dtype=torch.float64) * 2 + 5
    return {"x": x, "y": torch.randn(samples, 4, generator=generator, dtype=torch.float64)}


SPLIT = {f"weight:{name}.weight": "S(0)" for name in ("conv", "norm", "depthwise")}
"""Channels on the tensor axis, also where it does not pay."""

GRIDS = (
    {"data": 4},
    {"data": 4, "shard": 2, "zero": 2},
    {"pipeline": 2, "data": 2, "recompute": "all"},
    {"data": 2, "tensor": 2, "zero": 1} | SPLIT,
    {"tensor": 4} | SPLIT,
    {"pipeline": 2, "tensor": 2},
)


def check_norms(pins):
    torch.manual_seed(0)
    # The bias before a norm has no gradient but for rounding: Adam would make a step of it.
    optimizer = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
    both = Beside(ConvNet(0.3), pins, optimizer=optimizer, batch=images(8))
    both.same_evaluation(images(6, 9))
    both.same_weights()
    for step, samples in enumerate((8, 8, 7, 3)):
        batch = images(samples, step)
        both.backward(batch)
        both.same_gradients()
        both.step()
        both.same_weights()  # running statistics and counters among them
        same_on_all_ranks(both)
    both.same_evaluation(images(6, 9))
    both.same_weights()
    assert all(int(v) == 4 for n, v in both.reference.named_buffers() if "tracked" in n)
    check_collectives(both)
    if "weight:conv.weight" in pins:
        assert both.layout("norm.running_mean") == both.layout("depthwise.weight") == "S(0)"


def same_on_all_ranks(both):
    """Replicas hold equal bits."""
    for fqn in sorted(n for n, _ in both.reference.named_buffers()):
        held = both.store.gather_full(fqn) if fqn in both.store.entries else None
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, held)
        values = [value for value in everyone if value is not None]
        assert values and all(value.equal(values[0]) for value in values)


def check_collectives(both):
    """What the plan lists is what runs."""
    parallel = both.parallel
    mine = next(s for s in parallel.plan.stages if dist.get_rank() in s.ranks)
    recorder = parallel.program.world.recorder
    recorder.start()
    parallel.backward_step(images(8))
    parallel.optimizer.step()
    ran, listed = totals(recorder.stop()), totals(mine.collectives)
    assert ran == listed, (set(ran) ^ set(listed), dist.get_rank())


@pytest.mark.parametrize("pins", GRIDS, ids=str)
def test_batch_norm_equals_one_device(pool4, pins):
    pool4.run(check_norms, pins)


def check_far_from_zero():
    """float32 values of mean 10,000 and deviation 1, on a rank with six samples and one with none:
    sums of squares in float32 would leave nothing of the variance."""
    world = create_world([("data", 2)], [[0, 1]])
    axis = world.meshes[0].axes["data"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, 5, generator=generator, dtype=torch.float64) + 1e4
    own = x.float() if world.rank == 0 else x.float()[:0]
    mean, var, counter = torch.zeros(4), torch.ones(4), torch.tensor(0)
    ctx = StepContext(axes=world.meshes[0].axes, batch=len(own), global_batch=6)
    y = kernels.batch_norm(own, None, None, mean, var, counter, 1.0, 1e-5, ctx, 30, [axis])
    assert y.shape == own.shape and int(counter) == 1
    want = x.float().double().var((0, 2))
    torch.testing.assert_close(var.double(), want, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), x.float().double().mean((0, 2)), rtol=1e-6, atol=0)


def test_statistics_far_from_zero_and_a_rank_without_samples(pool2):
    pool2.run(check_far_from_zero)


def check_refusal():
    torch.manual_seed(0)
    with pytest.raises(InputError) as caught:
        both = Beside(ConvNet(), {"data": 2, "micro_batches": 2})
        both.parallel.backward_step(images(8))
    both = Beside(ConvNet(), {"data": 2})
    both.backward(images(8))
    plan = both.parallel.plan
    summed = [c for c in plan.collectives if c.op is CollectiveOp.ALL_REDUCE]
    counts = {
        phase: sum(c.count for c in summed if c.phase == phase and c.axes == ("data",))
        for phase in ("forward", "backward", "sync")
    }
    return str(caught.value), plan.training.micro_batches, plan.notes, counts


def test_several_micro_batches_are_refused_with_the_reason(pool2):
    message, micro_batches, notes, counts = pool2.run(check_refusal)[0]
    assert "there can be one micro-batch only" in message and "batch_norm" in message
    assert micro_batches == 1
    assert any("one micro-batch only" in note and "(and 2 more)" in note for note in notes)
    assert counts == {"forward": 3, "backward": 3, "sync": 1}


def check_converted():
    """A model made for DistributedDataParallel: the norm of each rank's batch, synchronised by
    collectives of its own. Captured on one device, it is one over the whole batch."""
    torch.manual_seed(0)
    model = ConvNet().double()
    twin = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert isinstance(twin.norm, nn.SyncBatchNorm)
    optimizer = (torch.optim.SGD, {"lr": 0.1})
    parallel = autopar.parallelize(twin, "local:2", pins={"data": 2}, optimizer=optimizer)
    close(parallel.backward_step(images(5)), model(**images(5))["loss"].detach())
    held = parallel.full_state_dict()
    for name, value in held.items():
        close(value, model.state_dict()[name])


def test_a_synchronised_batch_norm_is_a_batch_norm(pool2):
    pool2.run(check_converted)


def check_given_statistics():
    """A norm in eval mode inside a model that trains uses its running statistics, unchanged; one
    with `affine=False` on the batch itself updates them once, not once per stage."""
    torch.manual_seed(0)
    model = Frozen()
    model.bn.eval()
    both = Beside(model, {"pipeline": 2, "data": 2, "micro_batches": 1})
    for step in range(2):
        both.reference.train()
        both.reference.bn.eval()
        close(both.parallel.backward_step(flat(6, step)), eager(both, flat(6, step)))
        both.same_gradients()
        both.step()
        both.same_weights()
    assert int(both.reference.first.num_batches_tracked) == 2
    assert int(both.reference.bn.num_batches_tracked) == 0


def eager(both, batch):
    loss = both.reference(**batch)
    loss.backward()
    return loss.detach()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(8, affine=False)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x, y):
        x = self.first(x)
        return F.mse_loss(self.b(self.bn(torch.tanh(self.a(x)))) + x, y)


def flat(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(samples, 8, generator=generator, dtype=torch.float64) for k in "xy"}


def test_given_statistics_and_norms_of_the_batch_itself(pool4):
    pool4.run(check_given_statistics)
