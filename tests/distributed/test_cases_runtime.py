"""Published failures of pipelines and training loops, each with its trigger and the right values.

Every test runs a parallelized model beside the eager one in double precision.
"""

from functools import partial

import case_models as models
import pytest
import torch
import torch.distributed as dist
from beside import Beside, check_training, close, train_beside

import autopar
from autopar.codegen.traffic import totals
from autopar.errors import InputError
from autopar.ir.collective import CollectiveOp

pytestmark = pytest.mark.distributed

SGD = torch.optim.SGD
PP2 = {"pipeline": 2}
PP2DP2 = {"pipeline": 2, "data": 2}
PP2TP2 = {"pipeline": 2, "tensor": 2}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("samples", "micro_batches"), [(8, 3), (7, 4)])
@pytest.mark.parametrize("pins", [PP2DP2, {"pipeline": 4}], ids=str)
def test_uneven_micro_batches(pool4, pins, samples, micro_batches, schedule):
    """8 samples in 3 micro-batches, 7 in 4: a shape error on some ranks while others hang or leave
    wrong gradients (pytorch/pytorch#126600). Samples keep their weight."""
    pins = pins | {"micro_batches": micro_batches, "schedule": schedule}
    pool4.run(check_training, models.Chain, models.regression(samples), pins)


def test_a_changed_sequence_length_is_refused_everywhere(pool2):
    """Receivers with buffers of the old shape abort (pytorch/torchtitan#431,
    deepspeedai/DeepSpeed#5729). Every rank refuses before anything is sent, and can go on."""
    errors = pool2.run(check_sequence_change)
    assert len(errors) == 2
    assert all("captured with 3 in dim 1 (sequence, not samples), got 5" in e for e in errors)
    assert len(set(errors)) == 1


def check_sequence_change():
    torch.manual_seed(0)
    both = Beside(models.Chain(4, 4), PP2 | {"micro_batches": 2})
    batch = models.regression(4, 4, seq=(3,))
    both.train(batch, 1)
    recorder = both.parallel.program.world.recorder
    recorder.start()
    with pytest.raises(InputError) as caught:
        both.parallel.backward_step(models.regression(4, 4, seq=(5,)))
    assert recorder.stop() == ()
    both.train(batch, 1)
    return str(caught.value)


@pytest.mark.parametrize("pins", [{"pipeline": 4}, PP2DP2], ids=str)
def test_skips_over_several_stages(pool4, pins):
    """A U-Net's skips: "backward of skip connections not supported yet", or a gradient of one path
    alone (hpcaitech/ColossalAI#2490, pytorch/PiPPy#1008)."""
    pins = pins | {"micro_batches": 3}
    both_stages = pool4.run(check_skips, pins)
    assert both_stages[0] == pins["pipeline"]


def check_skips(pins):
    both = train_beside(models.UNet, models.regression(), pins)
    owners = {p.fqn.split(".")[0]: s.index for s in both.parallel.plan.stages for p in s.parameters}
    assert owners["a"] == 0 and owners["d"] == pins["pipeline"] - 1
    return len(set(owners.values()))


@pytest.mark.parametrize("pins", [PP2DP2, PP2TP2], ids=str)
def test_a_weight_tied_over_two_stages(pool4, pins):
    """Copies that drift apart, each with a part of the gradient (pytorch/pytorch#51931,
    uw-syfi/piper#13): equal after every step, counted once, both names in the state dict."""
    copies = pool4.run(check_tied, pins)
    assert all(copy.equal(copies[0]) for copy in copies[1:])


def check_tied(pins):
    model = partial(models.Vocabulary, 10, tied=True)
    both = train_beside(model, models.vocabulary_batch(10), pins | {"micro_batches": 2}, steps=3)
    owners = [s.index for s in both.parallel.plan.stages for p in s.parameters if "embed" in p.fqn]
    assert owners == [0, 1]
    full = both.parallel.full_state_dict()
    if dist.get_rank() == 0:
        assert full["embed.weight"].equal(full["head.weight"])
    return both.store.gather_full("embed.weight")


def structured(mask=True, **extra):
    batch = {"x": models.draw(6, 8), "labels": models.draw(6, 8, seed=9)}
    return batch | ({"mask": models.draw(6, 8, seed=4) > 0} if mask else {}) | extra


@pytest.mark.parametrize("pins", [PP2, {"data": 2}], ids=str)
@pytest.mark.parametrize("batch", [structured(), structured(mask=False)], ids=["mask", "no mask"])
def test_inputs_of_later_stages_and_structured_outputs(pool2, pins, batch):
    """Labels, masks and keywords that only a later stage reads, None and numbers in the output
    (pytorch/pytorch#130055, pytorch/pytorch#136416)."""
    pool2.run(check_training, models.Structured, batch, pins)


def test_keywords_that_are_no_tensors(pool2):
    """A number among the batch's entries is part of the program; another number is refused."""
    for message in pool2.run(check_keywords):
        assert "batch entry 'scale' was captured with 2.0, got 3.0" in message


def check_keywords():
    batch = structured(scale=2.0)
    both = train_beside(models.Structured, batch, PP2)
    with pytest.raises(InputError, match=r"'scale' was captured with 2\.0, and is missing"):
        both.parallel.backward_step(structured())
    with pytest.raises(InputError) as caught:
        both.parallel.backward_step(batch | {"scale": 3.0})
    return str(caught.value)


def test_frozen_stages(pool4):
    """Nothing to backpropagate on the first stage, a low-rank update on the second, a frozen third
    that passes gradients on: "element 0 does not require grad", or gradients sent to no use
    (tdrussell/qlora-pipe#56, pytorch/PiPPy#1122)."""
    # The second stage is the first with something to train, so it sends no gradient on.
    assert pool4.run(check_frozen) == [[], [], [2], [2]]


def check_frozen():
    torch.manual_seed(0)
    pins = {"pipeline": 4, "micro_batches": 2, "boundary": ["adapted", "third", "last"]}
    both = Beside(models.FrozenStart(), pins)
    before = {k: v.clone() for k, v in both.reference.state_dict().items()}
    batch = models.regression(4)
    both.train(batch)
    frozen = [e for e in both.store.entries.values() if not e.spec.trainable]
    assert all(e.shared.grad is None and e.local.equal(before[e.spec.fqn]) for e in frozen)
    recorder = both.parallel.program.world.recorder
    recorder.start()
    both.backward(batch)
    ran = totals(recorder.stop())
    return [c.count for c in ran if c.op is CollectiveOp.SEND_RECV and c.phase == "backward"]


@pytest.mark.parametrize("pins", [PP2DP2, PP2TP2], ids=str)
def test_evaluation_before_between_and_after(pool4, pins):
    """Evaluation before training, with a loss, and back: backward sends that nobody receives,
    dropout left on, gradients left behind (pytorch/pytorch#162822)."""
    pool4.run(check_evaluation, pins)


def check_evaluation(pins):
    torch.manual_seed(0)
    both = Beside(models.Chain(p=0.5), pins | {"micro_batches": 2})
    batch, other = models.regression(6), models.regression(5)
    for _ in range(2):
        both.same_evaluation(batch)
        assert all(p.grad is None for p in both.parallel.parameters())
        both.train(batch, 1)
    both.same_evaluation(other)
    both.same_evaluation(batch)
    # The same through torch's own words.
    loss = both.parallel.train()(batch)
    close(loss, both.eager(batch))
    both.same_gradients()
    both.reference.eval()
    output = both.parallel.eval()(batch)
    close(output["out"], both.reference(**batch)["out"].detach())


@pytest.mark.parametrize("pins", [PP2DP2, PP2TP2], ids=str)
def test_accumulated_gradients_are_the_sum(pool4, pins):
    """Scaling the whole gradient after each of two passes makes 1.25 of what should be 2
    (pytorch/torchtitan#1733)."""
    pool4.run(check_accumulation, pins)


def check_accumulation(pins):
    torch.manual_seed(0)
    both = Beside(models.Chain(p=0.2), pins | {"micro_batches": 4})
    first, second = models.regression(8), models.regression(8)
    second["x"] = second["x"] * 0.5
    for unfinished in (False, True):
        close(both.parallel.backward_step(first, accumulate=unfinished), both.eager(first))
        both.backward(second)
        both.same_gradients()
        both.step()
    both.same_weights()


@pytest.mark.parametrize("form", ["mean", "sum", "by hand"])
@pytest.mark.parametrize("micro_batches", [4, 2])
def test_tokens_are_counted_over_the_whole_batch(pool4, form, micro_batches):
    """Rows of 1, 0, 5 and 5 valid labels in micro-batches of one or two samples over two replicas:
    a mean of means, NaN for the row without labels, or a count left out
    (pytorch/torchtitan#2972, huggingface/transformers#34191)."""
    pins = PP2DP2 | {"micro_batches": micro_batches}
    pool4.run(check_training, partial(models.Counted, form), models.counted_batch(), pins)


def test_an_optimizer_built_before(pool2):
    """It goes on stepping the old weights, silently (pytorch/pytorch#149205,
    hpcaitech/ColossalAI#5539). Given, it is bound to the new ones, its groups as they were; not
    given, it is refused."""
    for message in pool2.run(check_stale_optimizer):
        assert "a SGD was built on this model's parameters" in message
        assert "pass it as optimizer=" in message
    pool2.run(check_bound_optimizer, PP2)
    pool2.run(check_bound_optimizer, {"tensor": 2})


def groups(model):
    """Weights decay, biases do not and learn faster."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if "bias" in n], "lr": 0.5},
    ]


def check_stale_optimizer():
    model = models.Chain().double()
    stale = SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError) as caught:
        autopar.parallelize(model, "local:2", pins=PP2)
    del stale
    return str(caught.value)


def check_bound_optimizer(pins):
    torch.manual_seed(0)
    model = models.Chain().double()
    optimizer = SGD(groups(model), lr=0.1, momentum=0.9)
    both = Beside(model, pins, optimizer=optimizer)
    both.theirs = SGD(groups(both.reference), lr=0.1, momentum=0.9)
    both.train(models.regression(), steps=3)
    assert both.parallel.optimizer is optimizer
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5]
