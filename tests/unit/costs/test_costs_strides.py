"""Strides and storages against torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from autopar.costs import strides
from autopar.costs.strides import (
    elementwise_strides,
    memory_order,
    trace_storage,
    view_strides,
)
from autopar.ir.graph import Ref


@given(st.data())
def test_view_strides_is_torchs(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in order])
    if data.draw(st.booleans()) and len(shape) > 1:
        tensor = tensor[:, :1].expand(-1, 3, *[-1] * (len(shape) - 2))
    target = data.draw(st.permutations([*tensor.shape, 1]))
    if data.draw(st.booleans()):
        target = [target[0] * target[1], *target[2:]]
    found = view_strides(tuple(tensor.shape), tensor.stride(), tuple(target))
    try:
        expected = tensor.view(target)
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert_same(expected.shape, found, expected.stride())


@given(st.data())
def test_elementwise_strides_is_torchs(data):
    shape = data.draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4))

    def permuted():
        order = data.draw(st.permutations(range(len(shape))))
        inverse = [order.index(d) for d in range(len(shape))]
        return torch.empty([shape[d] for d in order]).permute(inverse)

    left, right = permuted(), permuted()
    found = elementwise_strides(tuple(shape), [left.stride(), right.stride()])
    assert found == (left + right).stride()


def assert_same(shape, found, expected):
    """Strides of dims of size 1 mean nothing."""
    pairs = zip(shape, found, expected, strict=True)
    assert [(n, s) for n, s, _ in pairs if n > 1] == [
        (n, s) for n, s in zip(shape, expected, strict=True) if n > 1
    ]


class Views(nn.Module):
    def forward(self, x):
        q, k, v = x.chunk(3, -1)
        q, k, v = (t.view(3, 5, 4, 2).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        scores = (q @ k.mT).softmax(-1)
        z = (scores @ v).transpose(1, 2).reshape(3, 5, 8)
        w = y.transpose(1, 2).reshape(3, 5, 8)
        a = (x[:, 1:, ::2].permute(2, 0, 1) * 2).flatten(0, 1)
        b = x.unsqueeze(1).expand(3, 2, 5, 24).reshape(6, 5, 24)
        c = x.select(1, 0).t().contiguous().to(torch.float64).squeeze()
        d = torch.stack(x.unbind(1)).movedim(0, 2) + 1
        e = x.transpose(0, 1).contiguous().clone().mul(q.mT.reshape(3, 8, 5)[:1, 0, 0]).to(x.dtype)
        g = x.narrow(1, 0, 2).flip(0).split([1, 1], 1)[1].swapaxes(0, 1)
        return z, w, a, b, c, d, e, g


class Recorder(torch.fx.Interpreter):
    """Runs a graph and notes the strides and storage of every value."""

    def __init__(self, module):
        super().__init__(module)
        self.seen = {}

    def run_node(self, n):
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.seen[n.name] = result
        return result


def test_every_value_of_a_graph_lies_where_torch_puts_it(graphs):
    x = torch.randn(3, 5, 24)
    graph = graphs.to_graph(Views(), x)
    storage = trace_storage(graph.nodes, graph.specs(), device_kind="cpu")
    recorder = Recorder(torch.export.export(Views(), (x,), strict=False).module())
    recorder.run(x)
    owners = {}
    for node in graph.nodes:
        if len(node.outputs) > 1:
            continue
        real, traced = recorder.seen[node.name], storage.stored[Ref(node.name)]
        assert_same(real.shape, traced.strides, real.stride())
        pointer = real.untyped_storage().data_ptr()
        assert owners.setdefault(traced.base, pointer) == pointer, node
    assert len(set(owners.values())) == len(owners)
    names = {op.name: op.target for op in graph.nodes}
    copying = [names[name] for name in storage.copying]
    assert copying.count("aten.reshape.default") == 2


@pytest.mark.parametrize("name", [*strides.VIEW_OPS, *strides.MAY_VIEW_OPS])
def test_every_view_op_exists(name):
    assert hasattr(torch.ops.aten, name) or name == "getitem"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x, ""),
        (lambda x: x.transpose(1, 2), "0.2.1.3"),
        (lambda x: x[:, :-1], "0.1c.2.3"),
        (lambda x: x[:, :, :1].transpose(1, 2), "1.0.2.3c"),
        (lambda x: x[..., :2], "0.1.2.3c"),
        (lambda x: x[:, :, None].expand(3, 4, 6, 5, 8), "2b.0.1.3.4"),
        (lambda x: x.reshape(3, 1, 20, 8), ""),
    ],
)
def test_order_in_memory(make, text):
    x = make(torch.zeros(3, 4, 5, 8))
    assert ".".join(map(str, memory_order(tuple(x.shape), x.stride()))) == text
