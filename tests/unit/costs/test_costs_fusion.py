"""Chains of pointwise ops as one kernel."""

from __future__ import annotations

from autopar.costs.fusion import fused_values
from autopar.costs.local_op import LocalOp, local_op
from autopar.costs.traffic import op_traffic
from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.size import Size

SPEC = TensorSpec(shape=(Size(const=8), Size(const=16)), dtype="float32")
NBYTES = 4 * 8 * 16


def node(name: str, op: str, *reads: str) -> OpNode:
    return OpNode(
        name=name,
        target=f"aten.{op}.default",
        args=tuple(Ref(read) for read in reads),
        outputs=(SPEC,),
        requires_grad=True,
    )


GATED = (node("act", "silu", "x"), node("out", "mul", "act", "y"), node("sum", "linear", "out"))


def priced(index: int, fused: frozenset[Ref]) -> LocalOp:
    own = GATED[index]
    return local_op(
        own,
        input_shapes=((8, 16),) * len(own.args),
        input_dtypes=("float32",) * len(own.args),
        output_shapes=((8, 16),),
        batch=1,
        grad_inputs=(True,) * len(own.args),
        fused=fused,
    )


def test_a_value_for_one_pointwise_reader_stays_in_registers():
    assert fused_values(GATED) == {Ref("act")}  # `out` is read by a product
    twice = (*GATED, node("again", "mul", "act", "y"))
    assert fused_values(twice) == frozenset()


def test_a_fused_chain_reads_and_writes_its_ends_in_one_kernel():
    fused = fused_values(GATED)
    apart = [op_traffic(priced(i, frozenset())) for i in range(2)]
    joined = [op_traffic(priced(i, fused)) for i in range(2)]
    assert [t.forward_bytes for t in apart] == [2 * NBYTES, 3 * NBYTES]
    assert [t.forward_bytes for t in joined] == [NBYTES, 2 * NBYTES]
    assert [t.forward_kernels for t in joined] == [0, 1]
    assert [t.backward_kernels for t in joined] == [1, 0]
    saved = sum(t.backward_bytes for t in apart) - sum(t.backward_bytes for t in joined)
    assert saved == 2 * NBYTES  # the gradient of `act`, written and read
