"""`torch.distributed.tensor` as second witness: on our input placements it must find the same
output placement and communicate nothing, or the difference is explained here."""

import pytest
import torch
import torch.distributed as dist
from op_table import CASES
from spmd import outputs_of, rebuild
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.placement import Partial, Shard

SIZE = 2
OPS = {
    "aten.mm.default", "aten.bmm.default", "aten.linear.default", "aten.matmul.default",
    "aten.addmm.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.neg.default",
    "aten.relu.default", "aten.gelu.default", "aten.layer_norm.default", "aten.softmax.int",
    "aten.embedding.default", "aten.view.default", "aten.transpose.int", "aten.permute.default",
    "aten.sum.dim_IntList", "aten.mean.dim", "aten.argmax.default", "aten.cat.default",
    "aten.unsqueeze.default", "aten.slice.Tensor", "aten.expand.default", "aten.gather.default",
}  # fmt: skip
OP_CASES = [
    case
    for case in CASES
    if case.target in OPS and not case.hints and all(t.dtype != torch.bool for t in case.tensors())
]

COMMUNICATES = "DTensor finds no such strategy and communicates"
DIFFERENT = "DTensor gives another output placement"
RAISES = "DTensor raises"

EXPLAINED: dict[tuple[str, str, str], str] = {
    ("aten.expand.default", "R* -> S", DIFFERENT): (
        "DTensor makes the whole and never a share; each rank can make its share alone"
    ),
    ("aten.gather.default", "P(sum), R -> P(sum)", COMMUNICATES): (
        "DTensor's rule has no partial sums; picking elements is linear"
    ),
    ("aten.mean.dim", "P(sum) -> P(sum)", COMMUNICATES): (
        "DTensor passes only averages through a mean; a sum over the same count is linear too"
    ),
    ("aten.mean.dim", "-> P(sum) [partial_mean]", COMMUNICATES): (
        "DTensor averages local means, which is wrong for uneven shards, so it gathers; our kernel "
        "divides by the global count"
    ),
    ("aten.linear.default", "S(1), R*, R* -> S(1)", RAISES): (
        "DTensor runs it as a product of matrices and cannot flatten (batch, sequence) split on "
        "the sequence; the local op can (pytorch#172102)"
    ),
    ("aten.matmul.default", "S(1)", RAISES): "the same",
    ("aten.matmul.default", "R*, S(1) -> S(1)", COMMUNICATES): (
        "DTensor expands and flattens the leading dims, of which this is not the first"
    ),
}
"""By op, part of the strategy's text, and what DTensor does."""


def explained(case, strategy, outcome):
    return any(
        (target, kind) == (case.target, outcome) and text in str(strategy)
        for target, text, kind in EXPLAINED
    )


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
    yield init_device_mesh("cpu", (SIZE,))
    dist.destroy_process_group()


def to_dtensor_placement(placement):
    if isinstance(placement, Shard):
        return DShard(placement.dim)
    return DPartial() if isinstance(placement, Partial) else DReplicate()


def distribute(tensor, placement, mesh):
    local = tensor
    if isinstance(placement, Shard):
        local = tensor.chunk(SIZE, placement.dim)[0]
    return DTensor.from_local(
        local, mesh, [to_dtensor_placement(placement)],
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def outcome(case, strategy, mesh):
    """None where DTensor agrees, else how it differs."""
    inputs = [
        distribute(tensor, placement, mesh)
        for tensor, placement in zip(case.tensors(), strategy.inputs, strict=True)
    ]
    try:
        with CommDebugMode() as comm:
            outs = outputs_of(case.run(rebuild(case, inputs)))
    except (RuntimeError, NotImplementedError):
        return RAISES
    if comm.get_total_counts():
        return COMMUNICATES
    expected = [to_dtensor_placement(placement) for placement in strategy.outputs]
    # a masked partial sum is a partial sum whose mask DTensor keeps beside it
    found = [DPartial() if out.placements[0].is_partial() else out.placements[0] for out in outs]
    return None if found == expected else DIFFERENT


@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_dtensor_agrees(case, mesh):
    for strategy in case.strategies(SIZE):
        result = outcome(case, strategy, mesh)
        known = result is None or explained(case, strategy, result)
        assert known, f"{case} as {strategy}: {result}"


def test_explanations_are_needed(mesh):
    needed = set()
    for case in OP_CASES:
        for strategy in case.strategies(SIZE):
            result = outcome(case, strategy, mesh)
            needed |= {
                key
                for key in EXPLAINED
                if (key[0], key[2]) == (case.target, result) and key[1] in str(strategy)
            }
    assert needed == set(EXPLAINED)
