"""Op times: orderings and values that hold on any device in the table."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from autopar.costs.compute import OpTime, matmul_efficiency, op_time
from autopar.costs.flops import Contraction
from autopar.costs.local_op import SLOT, LocalOp, op_name
from autopar.costs.profiles import Machine, OpRecord, Profile, TimeSource, Timing
from autopar.costs.traffic import op_traffic
from autopar.ir.cluster import DeviceSpec
from autopar.ir.graph import Ref

GPU = DeviceSpec(
    name="gpu",
    kind="cuda",
    memory_bytes=80 * 2**30,
    memory_bandwidth_bytes_s=3e12,
    peak_flops=(("bfloat16", 989e12), ("float32", 67e12)),
    matmul_efficiency=0.75,
    kernel_launch_s=4e-6,
    source="test",
)


def make(target, inputs, outputs, *args, dtype="bfloat16", grads=None, dtypes=None, **fields):
    grads = (True,) * len(inputs) if grads is None else grads
    return LocalOp(
        target=target,
        input_shapes=inputs,
        input_dtypes=dtypes or (dtype,) * len(inputs),
        output_shapes=outputs,
        output_dtypes=(dtype,) * len(outputs),
        args=(*(Ref(SLOT, i) for i in range(len(inputs))), *args),
        requires_grad=any(grads),
        grad_inputs=grads,
        **fields,
    )


def linear(m, n, k, **kwargs):
    return make("aten.linear.default", ((m, k), (n, k)), ((m, n),), **kwargs)


@pytest.mark.parametrize("target", ["div_", "add_"])
def test_names_lose_overload_and_in_place_mark(target):
    assert op_name(f"aten.{target}.Tensor") == target[:-1]
    assert op_name("aten.__and__.Tensor") == "__and__"
    assert op_name("autopar.cross_entropy_sum.default") == "cross_entropy_sum"


def test_a_large_product_runs_at_the_tables_efficiency():
    op = linear(8192, 8192, 8192)
    times = op_time(op, GPU)
    expected = 2 * 8192**3 / (989e12 * 0.75)
    assert times.forward_s == pytest.approx(expected + 4e-6, rel=2e-3)
    assert times.backward_s == pytest.approx(2 * (expected + 4e-6), rel=2e-3)
    assert times.source is TimeSource.MODELLED


@pytest.mark.parametrize(
    ("dim", "low", "high"),
    [(4096, 0.65, 0.75), (2048, 0.5, 0.68), (1024, 0.2, 0.45), (256, 0, 0.05)],
)
def test_efficiency_of_cubes_is_in_the_range_of_published_sweeps(dim, low, high):
    cube = Contraction(m=dim, n=dim, k=dim)
    assert low <= matmul_efficiency(cube, "bfloat16", GPU) <= high


@given(*(st.integers(1, 16384) for _ in range(4)), st.sampled_from("mnk"))
def test_efficiency_grows_with_every_dim_and_stays_a_share(batch, m, n, k, grown):
    small = Contraction(batch=batch, m=m, n=n, k=k)
    large = replace(small, **{grown: 2 * getattr(small, grown)})
    first, second = (matmul_efficiency(part, "bfloat16", GPU) for part in (small, large))
    assert 0 < first <= second <= 1


@given(*(st.integers(1, 4096) for _ in range(3)))
def test_splitting_a_product_never_costs_more_than_the_whole(m, n, k):
    whole, half = op_time(linear(m, 2 * n, k), GPU), op_time(linear(m, n, k), GPU)
    assert half.forward_s <= whole.forward_s
    assert whole.forward_s <= 2 * half.forward_s * (1 + 1e-9)


def test_float32_products_run_at_the_float32_rate():
    wide, narrow = (
        op_time(linear(8192, 8192, 8192, dtype=d), GPU) for d in ("float32", "bfloat16")
    )
    assert wide.forward_s == pytest.approx(narrow.forward_s * 989 / 67, rel=0.01)


X = (4096, 4096)
BYTES = 2 * prod(X)


def test_pointwise_ops_are_bound_by_memory():
    times = op_time(make("aten.gelu.default", (X,), (X,)), GPU)
    assert times.forward_s == pytest.approx(2 * BYTES / (3e12 * 0.8) + 4e-6)
    assert times.backward_s == pytest.approx(3 * BYTES / (3e12 * 0.8) + 4e-6)


TRAFFIC = {
    "softmax": (make("aten.softmax.int", (X,), (X,), -1), 2 * BYTES, 3 * BYTES),
    "mul": (make("aten.mul.Tensor", (X, X), (X,)), 3 * BYTES, 5 * BYTES),
    "dropout": (
        make("aten.dropout.default", (X,), (X,), 0.1, True),
        2 * BYTES + prod(X),
        2 * BYTES + prod(X),
    ),
    "clone": (make("aten.clone.default", (X,), (X,)), 2 * BYTES, 0),
    "contiguous copy": (make("aten.contiguous.default", (X,), (X,), copies=True), 2 * BYTES, 0),
    "reshape copy": (make("aten.reshape.default", (X,), (X,), X, copies=True), 2 * BYTES, 0),
    "cat": (make("aten.cat.default", (X, X), ((8192, 4096),)), 4 * BYTES, 0),
    "slice": (make("aten.slice.Tensor", (X,), ((2048, 4096),), 0, 0, 2048), 0, 2 * BYTES),
    "embedding": (
        make(
            "aten.embedding.default",
            ((32000, 4096), (4096,)),
            (X,),
            grads=(True, False),
            dtypes=("bfloat16", "int64"),
        ),
        2 * BYTES + 8 * 4096,
        32000 * 4096 * 2 + 3 * BYTES + 8 * 4096,
    ),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_moved(name):
    op, forward, backward = TRAFFIC[name]
    traffic = op_traffic(op)
    assert (traffic.forward_bytes, traffic.backward_bytes) == (forward, backward)


FREE = {
    "view": make("aten.view.default", (X,), (X,), X),
    "transpose": make("aten.transpose.int", (X,), (X,), 0, 1),
    "reshape": make("aten.reshape.default", (X,), (X,), X),
    "contiguous": make("aten.contiguous.default", (X,), (X,)),
    "to same": make("aten.to.dtype", (X,), (X,), "dtype:bfloat16"),
    "dropout eval": make("aten.dropout.default", (X,), (X,), 0.1, False),
    "assert": make("aten._assert_tensor_metadata.default", (X,), ()),
}


@pytest.mark.parametrize("name", FREE)
def test_views_are_free(name):
    times = op_time(FREE[name], GPU)
    assert (times.forward_s, times.backward_s) == (0, 0)


@pytest.mark.parametrize("name", FREE)
def test_a_cpu_takes_the_start_of_every_op_that_makes_a_value(name):
    op, cpu = FREE[name], replace(GPU, kind="cpu")
    times = op_time(op, cpu)
    expected = cpu.kernel_launch_s * bool(op.output_shapes)
    assert (times.forward_s, times.backward_s) == (expected, expected * op.requires_grad)


def test_ops_without_gradient_have_no_backward():
    op = make("aten.gelu.default", (X,), (X,), grads=(False,))
    times = op_time(op, GPU)
    assert times.forward_s > 0
    assert times.backward_s == 0


def test_backward_can_be_split_into_input_and_weight():
    whole = op_time(linear(8192, 8192, 8192), GPU)
    parts = [
        op_time(linear(8192, 8192, 8192, grads=g), GPU) for g in ((True, False), (False, True))
    ]
    assert sum(p.backward_s for p in parts) == pytest.approx(whole.backward_s)


def test_written_out_attention_costs_more_than_fused():
    shape = (8, 32, 4096, 128)
    fused = op_time(make("aten.scaled_dot_product_attention.default", (shape,) * 3, (shape,)), GPU)
    dropped = op_time(
        make("aten.scaled_dot_product_attention.default", (shape,) * 3, (shape,), None, 0.1), GPU
    )
    assert dropped.forward_s > 1.5 * fused.forward_s
    assert dropped.backward_s > fused.backward_s


def test_a_profile_goes_first():
    op = linear(64, 64, 64)
    record = OpRecord.of(op, timing(1.0), timing(2.0))
    machine = Machine(device="x", row="x", kind="cuda", driver="1", torch="2")
    profile = Profile(machine=machine, ops={op.key: record})
    times = op_time(op, GPU, profile)
    assert times == OpTime(forward_s=1.0, backward_s=2.0, source=TimeSource.MEASURED)
    far = op_time(linear(64, 64, 64 * 5), GPU, profile)
    assert far == op_time(linear(64, 64, 64 * 5), GPU)
    assert far.source is TimeSource.MODELLED


def timing(seconds):
    return Timing(median_s=seconds, spread_s=0.0, count=1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        heads = self.inner(x).view(2, 8, 2, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + F.dropout(F.gelu(y.transpose(1, 2).flatten(2)), 0.1)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_every_op_that_makes_data_has_a_cost(graphs):
    ops = graphs.local_ops(graphs.to_graph(Model(), torch.zeros(2, 8, dtype=torch.long)))
    free = {op.name for op in ops if op_time(op, GPU).forward_s == 0}
    assert free == {"view", "transpose", "flatten"}
    assert all(op_time(op, GPU).backward_s > 0 for op in ops if op.name not in free)
