"""Working sets on graphs small enough to follow by hand."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs.saved import saved_refs
from autopar.costs.strides import trace_storage
from autopar.costs.transient import transient_bytes
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.size import Size


def spec(*shape, dtype="float32"):
    return TensorSpec(shape=tuple(map(Size, shape)), dtype=dtype)


def node(name, target, *args, out=None, grad=True):
    return OpNode(
        name=name,
        target=target,
        args=args,
        outputs=(out or spec(100),),
        requires_grad=grad,
    )


def walk(nodes, sources, outputs=(), parameters=(), grads=None):
    specs = dict(sources) | {Ref(n.name): n.outputs[0] for n in nodes}
    differentiable = {ref for ref, s in specs.items() if s.is_floating} if grads is None else grads
    storage = trace_storage(nodes, specs)
    saved = saved_refs(nodes, specs, differentiable, storage=storage, exclude=parameters)
    return transient_bytes(
        nodes,
        lambda ref: prod(s.const for s in specs[ref].shape) * DTYPE_BYTES[specs[ref].dtype],
        specs=specs,
        storage=storage,
        saved=saved,
        differentiable=differentiable,
        outputs=outputs,
        parameters=parameters,
    )


X, A, B, C, D = map(Ref, "xabcd")
ONE = 400  # bytes of 100 float32


def test_values_die_at_their_last_reader():
    chain = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.add.Tensor", A, 1),
        node("c", "aten.add.Tensor", B, 1),
        node("d", "aten.add.Tensor", C, 1),
    ]
    found = walk(chain, {X: spec(100)}, outputs=(D,))
    assert found.forward_bytes == 2 * ONE
    assert found.backward_bytes == 2 * ONE
    held = [*chain[:3], node("d", "aten.add.Tensor", C, A)]
    assert walk(held, {X: spec(100)}, outputs=(D,)).forward_bytes == 3 * ONE


def test_saved_values_are_not_transient():
    nodes = [node("a", "aten.exp.default", X), node("b", "aten.exp.default", A)]
    assert walk(nodes, {X: spec(100)}, outputs=(B,)).forward_bytes == 0


def test_views_take_no_room():
    nodes = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.view.default", A, (10, 10), out=spec(10, 10)),
        node("c", "aten.add.Tensor", B, 1, out=spec(10, 10)),
    ]
    found = walk(nodes, {X: spec(100)}, outputs=(C,))
    assert found.forward_bytes == 2 * ONE
    assert found.backward_bytes == 2 * ONE


def test_a_second_gradient_is_held_beside_the_first():
    nodes = [
        node("a", "aten.add.Tensor", X, 1),
        node("b", "aten.exp.default", A),
        node("c", "aten.sum.default", B, out=spec()),
        node("d", "aten.sum.default", A, out=spec()),
        node("e", "aten.add.Tensor", C, D, out=spec()),
    ]
    # while b runs backward: gradients of b and of a (through d), and b's share of a's
    assert walk(nodes, {X: spec(100)}, outputs=(Ref("e"),)).backward_bytes == 3 * ONE


def test_parameter_gradients_are_dropped_when_added():
    u, v, w = map(Ref, "uvw")
    sources = {ref: spec(100) for ref in (X, u, v, w)}
    nodes = [
        node("a", "aten.mul.Tensor", X, u),
        node("b", "aten.mul.Tensor", A, v),
        node("c", "aten.mul.Tensor", B, w),
    ]
    grads = {A, B, C, u, v, w}
    assert walk(nodes, sources, (C,), (u, v, w), grads).backward_bytes == 3 * ONE
    assert walk(nodes, sources, (C,), (), grads).backward_bytes == 4 * ONE


def test_nodes_without_gradient_need_nothing_backward():
    nodes = [node("a", "aten.add.Tensor", X, 1, grad=False)]
    assert walk(nodes, {X: spec(100)}, grads=set()).backward_bytes == 0


class Head(nn.Module):
    def __init__(self, width, vocab):
        super().__init__()
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x, target):
        return F.cross_entropy(self.head(x), target)


def test_the_loss_head_holds_logits_and_their_gradient(graphs):
    """Vocabulary 32000, 64 wide, 512 tokens: the end stage's working set in fp32."""
    inputs = torch.randn(512, 64), torch.zeros(512, dtype=torch.long)
    graph = graphs.to_graph(Head(64, 32000), *inputs)
    specs, numel = graph.specs(), graphs.numel_of(graph)
    storage = trace_storage(graph.nodes, specs)
    differentiable, parameters = graph.differentiable(), graphs.owned(graph)
    found = transient_bytes(
        graph.nodes,
        lambda ref: numel(ref) * DTYPE_BYTES[specs[ref].dtype],
        specs=specs,
        storage=storage,
        saved=saved_refs(graph.nodes, specs, differentiable, storage=storage, exclude=parameters),
        differentiable=differentiable,
        parameters=parameters,
    )
    logits = 512 * 32000 * 4
    assert 2 * logits <= found.peak_bytes <= 2.2 * logits


def test_a_narrow_loss_works_in_float32():
    logits, target = spec(10, 50, dtype="bfloat16"), spec(10, dtype="int64")
    nodes = [
        node("a", "aten.add.Tensor", X, 1, out=logits),
        node("b", "autopar.cross_entropy_sum.default", A, Ref("t"), -100, 0.0, out=spec()),
    ]
    found = walk(nodes, {X: logits, Ref("t"): target}, outputs=(B,), grads={A, B})
    assert found.forward_bytes == 500 * (2 + 4) + 4
    assert found.backward_bytes == 500 * (2 + 4) + 4


@pytest.mark.parametrize(
    ("dtype", "size", "ahead", "back"), [("float32", 4, 0, 4), ("bfloat16", 2, 8, 12)]
)
def test_a_batch_norm_works_in_float32(dtype, size, ahead, back):
    """Its input is saved, not transient; the normed values are made once more in the backward."""
    x = spec(6, 5, 4, dtype=dtype)
    nodes = [
        node("a", "aten.add.Tensor", X, 1, out=x),
        node("b", "autopar.batch_norm.default", A, *(None,) * 5, 0.1, 1e-5, out=x),
    ]
    found = walk(nodes, {X: x}, outputs=(B,), grads={A, B})
    assert found.forward_bytes == 120 * (size + ahead)
    assert found.backward_bytes == 120 * (2 * size + back)
