"""Published failures of sharded numerics, each with its trigger and the right values.

Every test trains a parallelized model beside the eager one in double precision: losses, gradients,
gradient norms, weights, outputs in eval mode, and the gathered state dict agree.
"""

from functools import partial

import case_models as models
import pytest
import torch
from beside import Beside, check_training, close, train_beside

import autopar
from autopar.compiler import PlanOptions, plan_model
from autopar.errors import InfeasiblePlan
from autopar.runtime.initialize import initial_values

pytestmark = pytest.mark.distributed

TP2 = {"tensor": 2}
TP4 = {"tensor": 4}


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (20, 10, 2)])
def test_fewer_or_uneven_kv_heads_than_ranks(pool4, heads, kv_heads, head_dim):
    """2 and 10 KV heads on 4 ranks: the views failed in forward, or replicas' gradients were not
    summed (pytorch/torchtitan#2574, NVIDIA-NeMo/Automodel#799). Query heads are split, KV heads
    replicated, their gradients added up."""
    pool4.run(check_attention, heads, kv_heads, head_dim)


def check_attention(heads, kv_heads, head_dim):
    batch = models.regression(3, heads * head_dim, seq=(5,))
    pins = TP4 | {"weight:q.weight": "S(0)", "weight:o.weight": "S(1)"}
    both = train_beside(partial(models.Attention, heads, kv_heads, head_dim), batch, pins)
    assert [both.layout(f"{name}.weight") for name in "qo"] == ["S(0)", "S(1)"]
    assert both.input_placement("scaled_dot_product_attention") == "S(1)"
    assert both.input_placement("repeat_interleave") == "R*"


def test_heads_that_ranks_do_not_divide_are_refused_before_the_run():
    """28 heads on 8 ranks failed in forward (THU-KEG/AdaptThink#1): the plan says why not, and
    what would do."""
    model, batch = models.Attention(28, 4, 2).double(), models.regression(8, 56, seq=(3,))
    options = PlanOptions(precision="fp64", pins=(("tensor", "8"),))
    with pytest.raises(InfeasiblePlan, match=r"28 heads cannot be split evenly over 8 .*: 2, 4"):
        plan_model(model, batch, "local:8", options)


@pytest.mark.parametrize("vocab", [10, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_that_ranks_do_not_divide(pool4, vocab, tied):
    """Shards of 3, 3, 3, 1 and of 2, 2, 1, 0 rows: lost rows, padded rows in the softmax or in the
    checkpoint (huggingface/transformers#37051, NVIDIA/Megatron-LM#1754)."""
    model = partial(models.Vocabulary, vocab, tied=tied)
    expect = {"embed.weight": "S(0)"} | ({} if tied else {"head.weight": "S(0)"})
    pins = TP4 | {f"weight:{name}": placement for name, placement in expect.items()}
    pool4.run(check_training, model, models.vocabulary_batch(vocab), pins, expect)


@pytest.mark.parametrize("vocab", [10, 5])
def test_vocabulary_that_stays_split(pool4, vocab):
    """The same where it pays to look up and to lose on the shards: few tokens, many tokens."""
    few = {"ids": torch.tensor([[vocab - 1, 0]]), "labels": torch.tensor([[-100, vocab - 1]])}
    pool4.run(check_split, vocab, few, "embedding", "S(0)")
    many = models.vocabulary_batch(vocab, 100, 1000)
    pool4.run(check_split, vocab, many, "cross_entropy_loss_sum", "S(1)")


def check_split(vocab, batch, node, placement):
    pins = TP4 | {"weight:embed.weight": "S(0)", "weight:head.weight": "S(0)"}
    both = train_beside(partial(models.Vocabulary, vocab), batch, pins)
    assert both.input_placement(node) == placement


@pytest.mark.parametrize("placement", ["S(0)", "S(0:16|8|8)", None])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (16, 8, 8)])
def test_packed_projection_is_cut_per_piece(pool2, sizes, placement):
    """`chunk` and an uneven `split` of a packed QKV: one cut through the whole concatenation gives
    ranks queries of some heads with keys of others (pytorch/pytorch#140069,
    NVIDIA-NeMo/Automodel#1324). Cut per piece the heads stay together; cut through the whole, by a
    pin, the pieces are put together first. The gathered rows are in the original order."""
    if placement and ":" in placement:
        placement = f"S(0:{'|'.join(map(str, sizes))})"
    pool2.run(check_packed, sizes, placement)


def check_packed(sizes, placement):
    batch = models.regression(4, 16, seq=(3,))
    pins = {"weight:qkv.weight": placement} if placement else {}
    both = train_beside(partial(models.Packed, sizes), batch, TP2 | pins)
    if placement:
        assert both.layout("qkv.weight") == placement
    else:
        assert both.layout("qkv.weight") in ("R", "R*", f"S(0:{'|'.join(map(str, sizes))})")


def test_row_parallel_bias_is_added_once(pool4):
    """A bias of [100, 200, 300] behind a row-sharded weight: added on every rank, or its gradient
    divided by their number (EleutherAI/gpt-neox#962,
    huggingface/text-generation-inference#1036)."""
    expect = {"down.weight": "S(1)"}
    pins = TP4 | {"weight:down.weight": "S(1)"}
    pool4.run(check_training, models.RowBias, models.regression(6, 4, 3), pins, expect)


@pytest.mark.parametrize("pins", [TP4, {"tensor": 2, "data": 2}, {"data": 4}], ids=str)
def test_dropout_masks_are_those_of_one_device(pool4, pins):
    """Dropout on sharded and on replicated values: equal masks on all shards, different ones on
    replicas, or other numbers for other degrees (pytorch/pytorch#168058)."""
    pool4.run(check_dropout, pins)


def check_dropout(pins):
    torch.manual_seed(0)
    batch = models.regression(8)
    both = Beside(models.Dropouts(), pins | {"micro_batches": 2})
    losses = []
    for _ in range(2):
        losses.append(float(both.backward(batch)))
        both.same_gradients()
        both.parallel.optimizer.zero_grad()
        both.theirs.zero_grad()
    assert losses[0] != losses[1], "two steps drew the same masks"
    both.same_evaluation(batch)
    if pins == TP4:
        assert both.input_placement("dropout") == "S(1)"
        assert both.input_placement("dropout_1") == "R"
    off = Beside(models.Dropouts(0.0), pins)
    off.train(batch)


INIT_PLANS = (
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (4, {"tensor": 4}),
    (4, {"data": 2, "tensor": 2}),
    (4, {"pipeline": 2, "tensor": 2}),
    (4, {"data": 4}),
)


def test_initial_weights_are_those_of_every_plan(pool2, pool4):
    """Weights drawn per shard depend on the plan, and on the local fan-in (pytorch/pytorch#168058,
    allenai/OLMo-core#307). From a meta model, whole weights are bit-equal over plans."""
    pools = {2: pool2, 4: pool4}
    with torch.device("meta"):
        model = models.Vocabulary(10)
    expected = dict(initial_values(model, list(model.state_dict()), seed=5))
    for devices, pins in INIT_PLANS:
        results = pools[devices].run(initial_weights, devices, pins)
        seen = set()
        for held in results:
            for name, value in held.items():
                assert value.equal(expected[name]), (pins, name)
                seen.add(name)
        assert seen == set(expected)


def initial_weights(devices, pins):
    """Whole weights of this rank's stage."""
    with torch.device("meta"):
        model = models.Vocabulary(10)
    parallel = autopar.parallelize(
        model, f"local:{devices}", batch=models.vocabulary_batch(10), pins=pins, seed=5
    )
    store = parallel.program.store
    return {fqn: store.gather_full(fqn) for fqn in store.entries}


@pytest.mark.parametrize("recut", [False, True])
@pytest.mark.parametrize(
    ("pins", "samples"),
    [(TP4, 2), ({"data": 2, "tensor": 2}, 3), ({"data": 4}, 6)],
    ids=["tp4", "dp2tp2", "dp4"],
)
def test_views_that_split_and_merge_sharded_dims(pool4, pins, samples, recut):
    """`view` over a sharded dim raised, on some ranks only, or gave wrong values
    (pytorch/pytorch#143372, pytorch/pytorch#172102)."""
    pool4.run(check_views, pins, samples, recut)


def check_views(pins, samples, recut):
    batch = {"x": models.draw(samples, 4, 8), "y": models.draw(samples, 4, 32)}
    column = {"weight:up.weight": "S(0)"} if "tensor" in pins else {}
    both = train_beside(partial(models.SplitMerge, recut), batch, pins | column)
    if column and not recut:
        assert both.input_placement("view") == "S(2)"  # split as it is
        assert both.input_placement("view_1") == "S(1)"  # and merged


@pytest.mark.parametrize("pins", [TP4, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "data": 2}])
def test_clipping_counts_every_gradient_once(pool4, pins):
    """A sharded linear, a replicated norm, a weight tied over two stages: norms too small by the
    square root of the shards, wrong for inf, or a replica counted twice
    (pytorch/torchtitan#596, pytorch/torchtitan#649, pytorch/pytorch#180346)."""
    results = pool4.run(check_clipping, pins)
    assert all(norms == results[0] for norms in results)


def check_clipping(pins):
    torch.manual_seed(0)
    both, limit, norms = Beside(models.Clipped(), pins | {"micro_batches": 2}), 0.01, []
    for kind in (2.0, 1.0, float("inf")):
        both.backward(models.tokens(4, 3, 10))
        expected = torch.nn.utils.clip_grad_norm_(both.reference.parameters(), limit, kind)
        norm = both.parallel.clip_grad_norm_(limit, kind)
        close(norm, expected)
        close(both.parallel.grad_norm(kind), limit * expected / (expected + 1e-6))
        both.same_gradients()
        both.step()
        norms.append(float(norm))
    both.same_weights()
    return norms


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_multi_head_attention_of_torch(pool2, p):
    """`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` needed replacing, or raised mixed
    tensors (pytorch/PiPPy#477, pytorch/pytorch#99432). Their packed projection is cut per block of
    heads, with and without attention weights, in training and evaluation."""
    pool2.run(check_multi_head, p)


def check_multi_head(p):
    packed = "S(0:16|16|16)"
    for need_weights in (False, True):
        model = partial(models.MultiHead, need_weights, p)
        both = train_beside(model, models.padded_batch(), TP2 | {"micro_batches": 2})
        assert both.layout("attention.in_proj_weight") == packed
        assert both.layout("attention.in_proj_bias") == packed
        assert both.layout("attention.out_proj.weight") in ("S(0)", "S(1)")
    wanted = {"self_attn.in_proj_weight": packed, "self_attn.out_proj.weight": "S(1)"}
    weights = {
        f"{layer}.{name}": placement
        for layer in ("post", "pre")
        for name, placement in (wanted | {"linear1.weight": "S(0)"}).items()
    }
    pins = TP2 | {f"weight:{name}": placement for name, placement in weights.items()}
    both = train_beside(partial(models.EncoderLayers, p), models.padded_batch(), pins)
    assert {name: both.layout(name) for name in weights} == weights
