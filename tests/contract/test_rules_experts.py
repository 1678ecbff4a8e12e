"""Dropless expert ops split by tokens, on virtual ranks: the chain gives the whole's rows, and the
gradients add up. Counts are each rank's share."""

import pytest
import torch
from spmd import cut

from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.placement import R_STAR, P, R, Shard
from autopar.ir.size import Size
from autopar.rules import axis_strategies
from autopar.runtime import experts as kernels

TOKENS, TOP_K, EXPERTS, HIDDEN, FFN = 12, 2, 3, 5, 7


def spec(*shape, dtype="float64"):
    return TensorSpec(shape=tuple(map(Size, shape)), dtype=dtype)


ROWS = TOKENS * TOP_K
ORDER, COUNTS = spec(ROWS, dtype="int64"), spec(EXPERTS, dtype="int64")
SPECS = {
    "chosen": spec(TOKENS, TOP_K, dtype="int64"),
    "tokens": spec(TOKENS, HIDDEN),
    "slots": spec(ROWS, HIDDEN),
    "weight": spec(EXPERTS, HIDDEN, FFN),
    "table": spec(EXPERTS, HIDDEN),
    "order": ORDER,
    "counts": COUNTS,
    "held": COUNTS,
}
NODES = {
    "route": (("chosen", EXPERTS), (ORDER, COUNTS, COUNTS)),
    "to_experts": (("tokens", "order", "counts", "held"), (spec(ROWS, HIDDEN),)),
    "expert_mm": (("slots", "weight", "held"), (spec(ROWS, FFN),)),
    "expert_rows": (("table", "held", "order"), (spec(ROWS, HIDDEN),)),
    "from_experts": (("slots", "order", "counts", "held"), (spec(ROWS, HIDDEN),)),
}


def strategies(op, size=4):
    names, outputs = NODES[op]
    args = tuple(Ref(name) if isinstance(name, str) else name for name in names)
    node = OpNode(name="n", target=f"autopar.{op}.default", args=args, outputs=outputs)
    specs = {Ref(name): item for name, item in SPECS.items()}
    return {(s.inputs, s.outputs) for s in axis_strategies(node, specs, size=size, batch=1)}


def test_strategies():
    by_token, by_column = Shard(0), Shard(1)
    assert ((by_token,), (by_token, P, P)) in strategies("route")
    assert ((by_token, by_token, P, P), (by_token,)) in strategies("to_experts")
    assert ((by_column, R, R, R), (by_column,)) in strategies("to_experts")
    assert ((P, R, R, R), (P,)) in strategies("to_experts")
    assert ((by_token, R_STAR, P), (by_token,)) in strategies("expert_mm")
    assert ((R_STAR, Shard(2), R), (by_column,)) in strategies("expert_mm")
    assert ((by_column, Shard(1), R), (P,)) in strategies("expert_mm")
    assert ((R_STAR, P, by_token), (by_token,)) in strategies("expert_rows")
    assert ((by_token, by_token, P, P), (by_token,)) in strategies("from_experts")
    # neither experts nor choices are split by position
    for op in NODES:
        for inputs, outputs in strategies(op):
            placed = zip(NODES[op][0], inputs, strict=False)
            assert all(p != Shard(0) for name, p in placed if name in ("weight", "table"))
            assert all(not isinstance(p, Shard) or not p.pieces for p in (*inputs, *outputs))


def layer(chosen, tokens, weight, table, weights):
    order, counts, held = kernels.route(chosen, EXPERTS)
    slots = kernels.to_experts(tokens, order, TOP_K)
    slots = kernels.expert_mm(slots + kernels.expert_rows(table, held), weight, held)
    rows = kernels.from_experts(
        slots * kernels.to_experts(weights.flatten(), order)[:, None], order
    )
    return rows.view(-1, TOP_K, FFN).sum(1), counts


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_split_by_tokens(size):
    """Five ranks over 12 tokens leave the last with none."""
    torch.manual_seed(0)
    chosen = torch.rand(TOKENS, EXPERTS).topk(TOP_K, -1).indices
    inputs = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((TOKENS, HIDDEN), (EXPERTS, HIDDEN, FFN), (EXPERTS, HIDDEN), (TOKENS, TOP_K))
    ]
    tokens, weight, table, weights = inputs
    whole, counts = layer(chosen, *inputs)
    grad = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, inputs, grad)
    parts, totals = [], torch.zeros_like(counts)
    for rank in range(size):
        own = [cut(x, Shard(0), size, rank) for x in (chosen, tokens, weights)]
        part, held = layer(own[0], own[1], weight, table, own[2])
        parts.append(part)
        totals += held
    assert torch.equal(totals, counts)
    torch.testing.assert_close(torch.cat(parts), whole)
    found = torch.autograd.grad(torch.cat(parts), inputs, grad)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 7])
def test_products_of_any_dtype_and_width(dtype, width):
    """Also where torch's kernel does not run: double precision, odd widths, expanded gradients."""
    torch.manual_seed(0)
    slots = torch.randn(9, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, width, dtype=dtype, requires_grad=True)
    held = torch.tensor([3, 0, 6, 0])
    found = kernels.expert_mm(slots, weight, held)
    wanted = torch.cat([slots[:3] @ weight[0], slots[3:] @ weight[2]])
    torch.testing.assert_close(found, wanted)
    mine = torch.autograd.grad(found.sum(), (slots, weight))
    theirs = torch.autograd.grad(wanted.sum(), (slots, weight))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert mine[1][[1, 3]].abs().sum() == 0


def test_rows_behind_the_last_offset_are_zero():
    found = kernels.grouped_mm(torch.ones(5, 3), torch.ones(2, 3, 3), torch.tensor([1, 3]))
    assert found[:, 0].tolist() == [3, 3, 3, 0, 0]
