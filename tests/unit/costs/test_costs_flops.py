"""Operation counts against torch's FlopCounterMode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autopar.costs.flops import contraction, op_flops
from autopar.costs.local_op import SLOT, LocalOp
from autopar.ir.graph import Ref


class Weighted(nn.Module):
    """`function(x + a, b)` with two parameters, so that both operands carry gradients."""

    def __init__(self, function, shape, other):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(other))

    def forward(self, x):
        return self.function(x + self.a, self.b)


CASES = {
    "linear": (F.linear, (3, 5, 8), (7, 8)),
    "mm": (torch.mm, (5, 8), (8, 7)),
    "bmm": (torch.bmm, (3, 5, 8), (3, 8, 7)),
    "matmul folded": (torch.matmul, (3, 5, 8), (8, 7)),
    "matmul batched": (torch.matmul, (2, 3, 5, 8), (2, 3, 8, 7)),
    "addmm": (lambda a, b: torch.addmm(a[0, :1], a, b), (5, 8), (8, 7)),
    "baddbmm": (lambda a, b: torch.baddbmm(a[:, :, :1], a, b), (3, 5, 8), (3, 8, 7)),
    "einsum": (lambda a, b: torch.einsum("bsi,oi->bso", a, b), (3, 5, 8), (7, 8)),
    "einsum batch": (
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        (2, 3, 5, 8),
        (2, 3, 6, 8),
    ),
    "einsum dots": (lambda a, b: torch.einsum("...i,io->...o", a, b), (2, 3, 8), (8, 7)),
    "conv2d": (lambda a, b: F.conv2d(a, b, padding=1), (2, 4, 6, 6), (8, 4, 3, 3)),
    "conv1d groups": (lambda a, b: F.conv1d(a, b, groups=2), (2, 4, 9), (6, 2, 3)),
}

BATCHES = {"bmm": 3, "matmul batched": 6, "baddbmm": 3, "einsum batch": 6, "conv1d groups": 2}


@pytest.mark.parametrize("name", CASES)
def test_products_count_as_torch_counts_them(graphs, name):
    function, shape, other = CASES[name]
    module, x = Weighted(function, shape, other), torch.randn(shape)
    products = [op for op in graphs.local_ops(graphs.to_graph(module, x)) if contraction(op)]
    assert len(products) == 1
    counted = op_flops(products[0])
    with FlopCounterMode(display=False) as counter:
        result = module(x)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    assert counted.forward_flops == forward
    assert contraction(products[0]).batch == BATCHES.get(name, 1)
    if name != "conv1d groups":  # torch's count of the backward of a grouped convolution is off
        assert counted.backward_flops == counter.get_total_flops()


def product(grads, target="aten.linear.default", shapes=((6, 8), (7, 8))):
    return LocalOp(
        target=target,
        input_shapes=shapes,
        input_dtypes=("float32",) * len(shapes),
        output_shapes=((6, 7),),
        output_dtypes=("float32",),
        args=tuple(Ref(SLOT, i) for i in range(len(shapes))),
        requires_grad=any(grads),
        grad_inputs=grads,
    )


@pytest.mark.parametrize(
    ("grads", "count"), [((True, True), 2), ((True, False), 1), ((False, True), 1)]
)
def test_backward_is_one_product_per_operand_with_gradient(grads, count):
    flops = op_flops(product(grads))
    assert flops.backward_flops == count * flops.forward_flops == count * 2 * 6 * 7 * 8


def test_bias_gradient_is_no_product():
    op = product((False, False, True), shapes=((6, 8), (7, 8), (7,)))
    assert op_flops(op).backward_flops == 0


def attention(causal):
    shape = (2, 4, 16, 8)
    return LocalOp(
        target="aten.scaled_dot_product_attention.default",
        input_shapes=(shape,) * 3,
        input_dtypes=("bfloat16",) * 3,
        output_shapes=(shape,),
        output_dtypes=("bfloat16",),
        args=(*(Ref(SLOT, i) for i in range(3)), None, 0.0, causal),
        requires_grad=True,
        grad_inputs=(True,) * 3,
    )


def test_attention_is_4bhqkd_and_half_of_it_when_causal():
    full, causal = op_flops(attention(False)), op_flops(attention(True))
    assert full.forward_flops == 4 * 2 * 4 * 16 * 16 * 8
    assert causal.forward_flops == full.forward_flops / 2
    assert full.backward_flops == 2.5 * full.forward_flops


def test_grouped_products_share_the_rows_among_the_experts():
    op = product((True, True), "aten._grouped_mm.default", ((6, 8), (4, 8, 7)))
    assert op_flops(op).forward_flops == 2 * 6 * 8 * 7


def test_transposed_convolution(graphs):
    module = nn.ConvTranspose2d(4, 8, 3, stride=2)
    x = torch.randn(2, 4, 5, 5)
    (op,) = [o for o in graphs.local_ops(graphs.to_graph(module, x)) if contraction(o)]
    assert op_flops(op).forward_flops == 2 * (2 * 25) * 4 * (8 * 9)


def test_views_count_nothing():
    assert op_flops(product((True, False), "aten.view.default")).forward_flops == 0
