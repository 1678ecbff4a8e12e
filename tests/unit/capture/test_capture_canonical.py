"""The canonical form of op arguments, and losses with their reduction written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture, verify_capture
from autopar.ir.graph import OpNode, Ref
from autopar.ir.size import Size

X = torch.arange(48, dtype=torch.float32).reshape(2, 3, 8).sin()


class Model(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x, *rest):
        return self.function(self.linear(x), *rest)


def ops_after_linear(function, *rest) -> list[OpNode]:
    model = Model(function)
    captured = capture(model, (X, *rest))
    verify_capture(model, (X, *rest), captured)
    return list(captured.graph.nodes[1:])


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda h: h.transpose(-1, -2), (1, 2)[::-1]),
        (lambda h: h.unsqueeze(-1), (3,)),
        (lambda h: torch.stack([h, h], -1), (3,)),
        (lambda h: torch.cat([h, h], -1), (2,)),
        (lambda h: h.softmax(-1), (2,)),
        (lambda h: h.sum(-1), ((2,),)),
        (lambda h: h.mean((-1, -2), keepdim=True), ((2, 1), True)),
        (F.glu, (2,)),
        (lambda h: h.flatten(-2), (1, 2)),
        (lambda h: h[..., -1], (2, 7)),
        (lambda h: h[:, 1:-1], (1, 1, 2, 1)),
        (lambda h: h[:, -2:], (1, 1, 3, 1)),
        (lambda h: h.view(-1, 8), ((Size(0, 3), 8),)),
        (lambda h: h.view(h.shape[0], 3, 2, -1), ((Size(0, 1), 3, 2, 4),)),
        (lambda h: h.reshape(-1), ((Size(0, 24),),)),
        (lambda h: h.unflatten(-1, (2, -1)), (2, (2, 4))),
        (lambda h: h[:, :, None].expand(-1, -1, 5, -1), ((Size(0, 1), 3, 5, 8),)),
        (lambda h: h.double(), ("dtype:float64",)),
    ],
)
def test_dims_count_from_the_front_and_sizes_are_explicit(function, args):
    nodes = ops_after_linear(lambda h: function(h).pow(2).sum())
    op = nodes[-3]  # before pow and sum
    assert op.args[1:] == args


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.to(torch.float32),
        lambda h: h.to("cpu"),
        lambda h: h[:],
        lambda h: h.view(-1, 3, 8),
        lambda h: h.expand(-1, 3, 8),
        lambda h: torch.cat([h], -1),
        lambda h: torch.cat([torch.tensor([]), h], -2),
        lambda h: torch.broadcast_tensors(h, h)[0],
        lambda h: h.type_as(h),
    ],
)
def test_ops_that_change_nothing_are_left_out(function):
    nodes = ops_after_linear(lambda h: function(h).pow(2).sum())
    assert [node.op for node in nodes] == ["aten.pow", "aten.sum"]


def test_outputs_of_a_split_are_indices_of_one_node():
    def function(h):
        a, b, c, d = h.split(2, dim=-1)
        return (a * c + b * d).sum()

    split, *products, _, _ = ops_after_linear(function)
    assert len(split.outputs) == 4
    assert [node.inputs() for node in products] == [
        (Ref("split", 0), Ref("split", 2)),
        (Ref("split", 1), Ref("split", 3)),
    ]


def test_created_tensors_name_their_dtype_and_no_device():
    nodes = ops_after_linear(lambda h: (h + torch.arange(8, device=h.device)).sum())
    assert nodes[0].target == "aten.arange.default"
    assert nodes[0].kwargs == (("dtype", "dtype:int64"),)


def test_second_names_of_ops_are_replaced():
    nodes = ops_after_linear(lambda h: torch.multiply(h, h).view_as(h).sum())
    assert [node.target for node in nodes] == ["aten.mul.Tensor", "aten.sum.default"]


LABELS = torch.tensor([[1, -100, 3], [-100, 0, 7]])


def targets(function, *rest) -> list[str]:
    nodes = ops_after_linear(function, *rest)
    return [node.target.removeprefix("aten.").removesuffix(".default") for node in nodes]


def test_mean_cross_entropy_is_a_sum_over_a_count():
    def loss(h, labels):
        return F.cross_entropy(h.view(-1, 8), labels.view(-1), label_smoothing=0.1)

    nodes = ops_after_linear(loss, LABELS)
    total, count, quotient = nodes[-3:]
    assert total.target == "autopar.cross_entropy_sum.default"
    assert total.args[2:] == (-100, 0.1)
    assert (count.target, count.args[1]) == ("autopar.count_valid.default", -100)
    assert (count.outputs[0].dtype, count.requires_grad) == ("float32", False)
    assert quotient.target == "aten.div.Tensor"
    assert quotient.args == (Ref(total.name), Ref(count.name))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            lambda h, y: F.cross_entropy(h.mT, y, reduction="sum"),
            ["mT", "autopar.cross_entropy_sum"],
        ),
        (
            lambda h, y: F.cross_entropy(h.mT, y, weight=h.new_ones(8)),
            ["mT", "new_ones", "cross_entropy_loss"],
        ),
        (
            lambda h, y: F.cross_entropy(h.mT, y, reduction="none").sum(),
            ["mT", "cross_entropy_loss", "sum"],
        ),
        (
            lambda h, y: F.nll_loss(h.mT.log_softmax(1), y),
            ["mT", "log_softmax.int", "nll_loss_nd", "sum", "autopar.count_valid", "div.Tensor"],
        ),
        (
            lambda h, y: F.nll_loss(h.mT.log_softmax(1), y, reduction="sum"),
            ["mT", "log_softmax.int", "nll_loss_nd", "sum"],
        ),
    ],
)
def test_class_losses(loss, expected):
    assert targets(loss, LABELS) == expected


def test_low_precision_logits_are_widened_before_they_are_summed():
    model = Model(lambda h, y: F.cross_entropy(h.view(-1, 8), y.view(-1))).bfloat16()
    batch = (X.bfloat16(), LABELS)
    captured = capture(model, batch)
    dtypes = [node.outputs[0].dtype for node in captured.graph.nodes[-4:]]
    assert dtypes == ["float32", "float32", "float32", "bfloat16"]
    verify_capture(model, batch, captured)


ELEMENTWISE = {
    "mse_loss": {},
    "l1_loss": {},
    "smooth_l1_loss": {"beta": 0.5},
    "huber_loss": {"delta": 0.3},
    "binary_cross_entropy_with_logits": {},
    "kl_div": {"log_target": True},
    "soft_margin_loss": {},
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses_are_reduced_by_an_op_of_its_own(name, reduction):
    def loss(h, y):
        return getattr(F, name)(h, y, reduction=reduction, **ELEMENTWISE[name])

    nodes = ops_after_linear(loss, X.sigmoid())
    each, reduced = nodes[-2:]
    assert each.op == f"aten.{name}"
    assert each.outputs[0].shape == (Size(0, 1), Size(3), Size(8))
    assert reduced.target == f"aten.{reduction}.default"
    assert reduced.outputs[0].shape == ()
