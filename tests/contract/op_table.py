"""Op instances that every rule is checked on. Extents are mixed: 12 divides by 2, 3, 4; 5, 7 do
not, so that whole dims are split unevenly; factors of longer dims show what must divide."""

from __future__ import annotations

from typing import Any

import torch
from spmd import Case, Hints
from torch import Tensor

torch.manual_seed(1)


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def mask(*shape: int) -> Tensor:
    return torch.rand(*shape) > 0.4


def op(
    target: str,
    *args: Any,
    hints: Hints | None = None,
    fixed: tuple[int, ...] = (),
    **kwargs: Any,
) -> Case:
    """A case; the target is an ATen op unless it names another namespace."""
    name = target if target.startswith("autopar.") else f"aten.{target}"
    return Case(name, args, kwargs, hints or {}, frozenset(fixed))


_UNARY = """
abs acos acosh.p1 asin asinh atan atanh ceil celu cos cosh deg2rad elu erf erfc erfinv exp exp2
expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf
isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num
ones_like rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus
softshrink sqrt square tan tanh trunc zeros_like neg clone contiguous detach alias positive real
conj lift_fresh_copy
"""
_BINARY = """
atan2.default copysign.Tensor eq.Tensor ne.Tensor le.Tensor lt.Tensor ge.Tensor gt.Tensor
fmod.Tensor remainder.Tensor logaddexp.default maximum.default minimum.default max.other
min.other pow.Tensor_Tensor xlogy.Tensor add.Tensor sub.Tensor mul.Tensor div.Tensor rsub.Tensor
multiply.Tensor true_divide.Tensor divide.Tensor float_power.Tensor_Tensor
"""
_BITWISE = """
bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__
"""


def _unary() -> list[Case]:
    pairs = (name.partition(".") for name in _UNARY.split())
    # acosh needs values above one
    return [op(f"{name}.default", positive(7, 12) + bool(shift)) for name, _, shift in pairs]


def _binary() -> list[Case]:
    same, broadcast = ((5, 7, 12), (5, 7, 12)), ((5, 12), (12,))
    cases = [
        op(name, positive(*a), positive(*b))
        for name in _BINARY.split()
        for a, b in (same, broadcast)
    ]
    both_ways = [op(f"{name}.Tensor", x(4, 1, 6), x(7, 1)) for name in ("add", "mul", "div")]
    bits = [op(f"{name}.Tensor", ids(5, 4, 7), ids(5, 4, 7)) for name in _BITWISE.split()]
    truth = [op(f"logical_{name}.default", mask(4, 7), mask(7)) for name in ("and", "or", "xor")]
    return cases + both_ways + bits + truth


POINTWISE = [
    *_unary(),
    *_binary(),
    op("bitwise_not.default", ids(5, 4, 7)),
    op("add.Tensor", x(5, 12), 1.5),
    op("sub.Tensor", x(5, 12), 2),
    op("rsub.Scalar", x(5, 12), 2),
    op("mul.Tensor", x(5, 12), 1.5),
    op("add.Tensor", x(5, 12), x(12), alpha=2),
    op("add.Tensor", ids(9, 5, 12), ids(9, 12)),
    op("mul.Tensor", x(6), mask(6)),
    op("div.Tensor", x(5, 12), 1.5),
    op("mul.Tensor", x(5, 12), x()),
    op("div.Tensor_mode", x(5, 12), positive(12), rounding_mode="floor"),
    op("div.Scalar_mode", x(5, 12), 2.0, rounding_mode="trunc"),
    op("floor_divide.default", x(5, 12), positive(12), fixed=(0, 1)),
    op("pow.Tensor_Scalar", x(5, 12), 2),
    op("clamp.default", x(5, 12), -1, 1),
    op("clamp_min.default", x(5, 12), 0.0),
    op("fill.Scalar", x(5, 12), 3.0),
    op("clamp_max.default", x(5, 12), 0.0),
    op("clip.default", x(5, 12), -1, 1),
    op("threshold.default", x(5, 12), 0.1, 0.2),
    op("lerp.Scalar", x(6), x(6), 0.2),
    op("full_like.default", x(5, 12), 3.0),
    op("ne.Scalar", ids(3, 5, 12), 1),
    op("to.dtype", x(5, 12), torch.float64),
    op("to.dtype", ids(9, 7), torch.float64),
    op("to.dtype", mask(7), torch.int64),
    op("to.dtype", x(7), torch.int64),
    op("_to_copy.default", x(5, 12), dtype=torch.float64),
    op("type_as.default", x(5, 12), x(5, 12)),
    op("masked_fill.Scalar", x(5, 12), mask(5, 12), 0),
    op("masked_fill.Scalar", x(5, 12), mask(12), -10000.0),
    op("where.self", mask(5, 1), x(5, 12), x(12)),
    op("where.ScalarOther", mask(5, 12), x(5, 12), 0.0),
    op("where.ScalarSelf", mask(5, 12), 1.0, x(5, 12)),
    op("addcmul.default", x(5, 12), x(5, 12), x(12), value=2),
    op("addcdiv.default", x(5, 12), x(5, 12), positive(12)),
]

WALKS = [
    op("slice_scatter.default", x(5, 12), x(5, 4), 1, 2, 6),
    op("slice_scatter.default", x(5, 12), x(5, 12), 0, 0, 2**63 - 1),
    op("select_scatter.default", x(5, 7, 12), x(5, 12), 1, 2),
    op("softmax.int", x(5, 7, 12), -1),
    op("log_softmax.int", x(5, 12), 0),
    op("_softmax.default", x(5, 12), 1, False),
    op("_log_softmax.default", x(5, 12), -1, False),
    op("cumsum.default", x(5, 12), -1),
    op("cumprod.default", x(5, 12), 0),
    op("logcumsumexp.default", x(5, 12), 0),
    op("argsort.default", x(5, 12)),
    op("argsort.stable", x(5, 12), stable=True, dim=0),
    op("glu.default", x(5, 12)),
    op("cummax.default", x(5, 12), 1),
    op("cummin.default", x(5, 12), 0),
    op("topk.default", x(5, 7, 12), 3),
    op("topk.default", x(5, 7, 12), 3, 1),
    op("sort.default", x(5, 12)),
    op("sort.stable", x(5, 12), stable=True, dim=0),
    op("diff.default", x(5, 12), 1, -1, x(5, 1)),
    op("diff.default", x(5, 12), 2, 0),
    op("flip.default", x(5, 7, 12), [-1, 0]),
    op("roll.default", x(5, 12), [2], [1]),
    op("roll.default", x(5, 12), [2]),
    op("tril.default", x(4, 7, 7)),
    op("triu.default", x(7, 7), 1),
    op("pad.default", x(5, 12), [0, 1], "constant", -1.0),
    op("pad.default", x(5, 12), [0, 1]),
    op("constant_pad_nd.default", x(5, 6, 12), [0, 0, 1, 2]),
    op("pad.default", x(3, 5, 12), [1, 1], "reflect"),
    op("cat.default", [x(5, 12), x(5, 3)], -1),
    op("concat.default", [x(5, 12), x(2, 12)]),
    op("slice.Tensor", x(5, 12), 1, 2, 9, 3),
    op("slice.Tensor", x(5, 12), 0, 0, 2**63 - 1),
    op("slice.Tensor", x(5, 12), 1, -3, 2**63 - 1),
    op("narrow.default", x(5, 12), 0, 1, 3),
    op("one_hot.default", ids(5, 4, 6), 5),
]

REDUCTIONS = [
    op("sum.default", x(5, 12)),
    op("sum.dim_IntList", x(5, 7, 12), [-1]),
    op("sum.dim_IntList", x(5, 7, 12), [0, 2], True),
    op("sum.default", mask(5, 12)),
    op("nansum.default", x(5, 12), [1]),
    op("mean.default", x(5, 12)),
    op("mean.dim", x(5, 7, 12), [-1], True),
    op("mean.dim", x(5, 7, 12), [0, 1]),
    op("count_nonzero.default", ids(2, 5, 12)),
    op("amax.default", x(5, 12), [-1]),
    op("amin.default", x(5, 12), [0], True),
    op("max.dim", x(5, 12), 1),
    op("min.dim", x(5, 12), 0),
    op("max.default", x(5, 12)),
    op("argmax.default", x(5, 12), 0),
    op("argmax.default", x(5, 12)),
    op("argmin.default", x(5, 12), -1, True),
    op("median.dim", x(5, 7), 1),
    op("logsumexp.default", x(5, 12), [1]),
    op("prod.dim_int", x(5, 12), 1),
    op("var.correction", x(5, 12), [-1], correction=1),
    op("var.default", x(5, 12), True),
    op("std.correction", x(5, 12), [0], correction=0),
    op("var_mean.correction", x(5, 12), [1], correction=0, keepdim=True),
    op("std_mean.correction", x(5, 12), [1]),
    op("linalg_vector_norm.default", x(5, 12), 2, [1]),
    op("norm.ScalarOpt_dim", x(5, 12), 2, [0]),
    op("all.dim", mask(5, 12), 1),
    op("any.default", mask(5, 12)),
]

VIEWS = [
    op("view.default", x(2, 6, 96), [12, 96]),
    op("view.default", x(12, 96), [2, 6, -1]),
    op("view.default", x(4, 5, 96), [4, 5, -1, 8]),
    op("reshape.default", x(4, 5, 12, 8), [4, 5, 96]),
    op("view.default", x(2, 8, 4), [16, 4]),
    op("view.default", x(4, 4, 4), [8, 8]),
    op("view.default", x(6, 256), [-1]),
    op("view.default", x(6, 4), [4, 6]),
    op("reshape.default", x(144), [8, 18]),
    op("_unsafe_view.default", x(12, 4), [3, 16]),
    op("view.default", x(4, 12), [1, 4, 1, 12, 1]),
    op("view_copy.default", x(6, 4), [24]),
    op("view.default", x(4, 5, 36), [4, 5, 3, 12], hints={("t0", 2): (12, 12, 12)}),
    op("view.default", x(4, 5, 96), [4, 5, 12, 8], hints={("t0", 2): (32, 32, 32)}),
    op("view.default", x(4, 48), [2, 2, 48], hints={("op", 2): (24, 12, 12)}),
    op("flatten.using_ints", x(4, 5, 6), 1),
    op("flatten.using_ints", x(4, 6, 7), 0, 1),
    op("unflatten.int", x(4, 12), -1, [3, 4]),
    op("squeeze.dim", x(4, 1, 6), 1),
    op("squeeze.default", x(4, 1, 6, 1)),
    op("unsqueeze.default", x(4, 7), -1),
    op("permute.default", x(4, 5, 7), [2, 0, -2]),
    op("transpose.int", x(4, 5, 7), 1, -1),
    op("swapaxes.default", x(4, 5, 7), 0, 1),
    op("swapdims.default", x(4, 5, 7), 0, 1),
    op("t.default", x(5, 7)),
    op("mT.default", x(3, 5, 7)),
    op("numpy_T.default", x(3, 5, 7)),
    op("matrix_H.default", x(5, 7)),
    op("movedim.int", x(4, 5, 7), 0, -1),
    op("expand.default", x(5, 1, 7), [4, 5, 6, 7]),
    op("expand.default", x(5, 1), [-1, 12]),
    op("broadcast_to.default", x(7), [4, 7]),
    op("repeat.default", x(1, 5), [12, 1]),
    op("repeat.default", x(6, 5), [2, 4, 1]),
    op("tile.default", x(6, 5), [4, 1]),
    op("repeat_interleave.self_int", x(4, 12, 5), 3, 1),
    op("repeat_interleave.self_int", x(4, 5), 3),
    op("select.int", x(4, 3, 7), 1, -1),
    op("unbind.int", x(4, 3, 7), 1),
    op("stack.default", [x(4, 7), x(4, 7)], -1),
    op("stack.default", [x(4, 7), x(4, 7)]),
    op("split.Tensor", x(5, 36), 12, 1),
    op("split.Tensor", x(5, 7), 7, 1),
    op("split_with_sizes.default", x(5, 48), [24, 12, 12], 1),
    op("chunk.default", x(7, 24), 2, 1),
    op("unsafe_chunk.default", x(24, 7), 2),
    op("split.Tensor", x(4, 7), 2),
    op("view_as_real.default", torch.complex(x(4, 7), x(4, 7))),
    op("view_as_complex.default", x(4, 7, 2)),
]

MATMULS = [
    op("mm.default", x(5, 12), x(12, 7)),
    op("bmm.default", x(4, 5, 12), x(4, 12, 7)),
    op("mm.default", x(5, 10), x(10, 6)),
    op("mv.default", x(12, 7), x(7)),
    op("dot.default", x(7), x(7)),
    op("vdot.default", x(7), x(7)),
    op("outer.default", x(5), x(7)),
    op("ger.default", x(5), x(7)),
    op("linear.default", x(4, 5, 12), x(7, 12), x(7)),
    op("linear.default", x(4, 12), x(6, 12)),
    op("linear.default", x(12), x(7, 12), x(7)),
    op("linear.default", x(4, 6, 8), x(48, 8), x(48), hints={("t1", 0): (24, 12, 12)}),
    op("addmm.default", x(7), x(5, 12), x(12, 7)),
    op("addmm.default", x(5, 1), x(5, 12), x(12, 7)),
    op(
        "addmm.default",
        x(48),
        x(5, 12),
        x(12, 48),
        hints={("op", 1): (16, 16, 16), ("t2", 1): (24, 24)},
    ),
    op("baddbmm.default", x(4, 5, 7), x(4, 5, 12), x(4, 12, 7), alpha=2, beta=0.5),
    op("matmul.default", x(4, 6, 5, 12), x(6, 12, 7)),
    op("matmul.default", x(4, 5, 12), x(12, 7)),
    op("matmul.default", x(12), x(4, 12, 7)),
    op("matmul.default", x(4, 5, 12), x(12)),
    op("matmul.default", x(12), x(12)),
    op("matmul.default", x(4, 1, 5, 12), x(1, 6, 12, 7)),
    op("einsum.default", "bhqd,bhkd->bhqk", [x(4, 6, 5, 8), x(4, 6, 7, 8)]),
    op("einsum.default", "bi,io,o->b", [x(5, 7), x(7, 6), x(6)]),
    op("einsum.default", "ij,jk", [x(4, 5), x(5, 6)]),
    op("einsum.default", "...i, oi -> ...o", [x(4, 5, 6), x(7, 6)]),
    op("einsum.default", "ii->i", [x(6, 6)]),
    op("einsum.default", "bij->b", [x(4, 5, 6)]),
]

NORMS = [
    op("layer_norm.default", x(5, 7, 12), [12], x(12), x(12)),
    op("layer_norm.default", x(5, 7, 12), [7, 12]),
    op("rms_norm.default", x(5, 7, 12), [12], x(12)),
    op("rms_norm.default", x(5, 12), [12]),
    op("native_layer_norm.default", x(5, 7, 12), [12], x(12), x(12), 1e-05),
    op("_fused_rms_norm.default", x(5, 7, 12), [12], x(12), 1e-05),
    op("group_norm.default", x(5, 24, 6), 12, x(24), x(24)),
    op("group_norm.default", x(4, 16, 3, 3), 4),
    op("batch_norm.default", x(4, 7, 5), x(7), x(7), None, None, True, 0.1, 1e-05, False),
    op(
        "autopar.batch_norm.default",
        x(5, 7, 6),
        x(7),
        x(7),
        x(7),
        positive(7),
        torch.tensor(3),
        0.1,
        1e-05,
        fixed=(3, 4),
    ),
    op("autopar.batch_norm.default", x(5, 7), None, None, None, None, None, 0.1, 1e-05),
    op(
        "batch_norm.default",
        x(4, 7, 5),
        x(7),
        x(7),
        x(7),
        positive(7),
        False,
        0.1,
        1e-05,
        False,
        fixed=(3, 4),
    ),
    op("instance_norm.default", x(4, 7, 5), x(7), x(7), None, None, True, 0.1, 1e-05, False),
]

SDPA = "scaled_dot_product_attention.default"
_Q = (4, 12, 6, 8)
ATTENTION = [
    op(SDPA, x(*_Q), x(4, 12, 7, 8), x(4, 12, 7, 5)),
    op(SDPA, x(*_Q), x(*_Q), x(*_Q), None, 0.0, True),
    op(SDPA, x(*_Q), x(*_Q), x(*_Q), mask(4, 1, 6, 6) | torch.eye(6).bool()),
    op(SDPA, x(*_Q), x(*_Q), x(*_Q), x(12, 6, 6)),
    op(SDPA, x(*_Q), x(*_Q), x(*_Q), attn_mask=x(1, 6), scale=0.3),
    op(SDPA, x(4, 24, 6, 8), x(4, 12, 6, 8), x(4, 12, 6, 8), enable_gqa=True),
    op(
        SDPA,
        x(2, 4, 6, 8),
        x(2, 2, 6, 8),
        x(2, 2, 6, 8),
        mask(2, 4, 6, 6) | torch.eye(6).bool(),
        enable_gqa=True,
    ),
    op(SDPA, x(12, 6, 8), x(12, 6, 8), x(12, 6, 8)),
    op(SDPA, x(*_Q), x(*_Q), x(*_Q), x(12, 6, 6), 0.3),
]

GATHERS = [
    op("embedding.default", x(10, 7), ids(10, 4, 5)),
    op("embedding.default", x(5, 12), ids(5, 6)),
    op("embedding.default", x(10, 7), ids(10, 4, 5), -1, True),
    op("gather.default", x(5, 7, 12), 2, ids(12, 5, 7, 4)),
    op("gather.default", x(5, 12), 1, ids(12, 3, 4)),
    op("gather.default", x(5, 12), 0, ids(5, 6, 12)),
    op("gather.default", x(5, 12), 1, ids(12, 5, 1)),
    op("take_along_dim.default", x(5, 12), ids(12, 5, 4), 1),
    op("scatter.src", x(5, 12), 1, torch.arange(12).repeat(5, 1)[:, :4], x(5, 4)),
    op("scatter.value", x(5, 12), 1, ids(12, 5, 4), 2.0),
    op("scatter_add.default", x(5, 12), 1, ids(12, 5, 4), x(5, 4)),
    op("scatter_add.default", x(5, 12), 0, ids(5, 6, 12), x(6, 12)),
    op("scatter_add.default", x(5, 12), 1, ids(12, 3, 4), x(3, 4)),
    op("scatter_reduce.two", x(5, 12), 1, ids(12, 5, 4), x(5, 4), "sum"),
    op("index_select.default", x(5, 7, 12), 1, ids(7, 6)),
    op("index_add.default", x(5, 7), 0, ids(5, 6), x(6, 7)),
    op("index_add.default", x(7, 5), 1, ids(5, 6), x(7, 6), alpha=2),
    op("index.Tensor", x(5, 7, 12), [None, ids(7, 6)]),
    op("index.Tensor", x(5, 7, 12), [ids(5, 4, 1), ids(7, 6)]),
    op("index.Tensor", x(5, 7, 12), [ids(5, 6), None, ids(12, 6)]),
    op("index.Tensor", x(5, 7), [torch.tensor([True, False, True, True, False])]),
    op("index_put.default", x(5, 7, 12), [torch.arange(4)], x(4, 7, 12)),
    op("index_put.default", x(5, 7, 12), [None, torch.tensor([1, 1, 3, 5])], x(4, 12), True),
    op("index_put.default", x(5, 7), [torch.arange(4), torch.arange(4)], x()),
]

_TARGET = torch.tensor([9, 0, -100, 3, 5, -100, 1])
LOSSES = [
    op("autopar.cross_entropy_sum.default", x(7, 10), _TARGET, -100, 0.0),
    op("autopar.cross_entropy_sum.default", x(7, 12), ids(12, 7), 3, 0.0),
    op("autopar.cross_entropy_sum.default", x(7, 12, 5), ids(12, 7, 5), 3, 0.0),
    op("autopar.grouped_mm.default", x(7, 4), x(3, 4, 12), torch.tensor([2, 2, 6])),
    op("autopar.count_valid.default", _TARGET, -100),
    op("cross_entropy_loss.default", x(7, 10), _TARGET),
    op("cross_entropy_loss.default", x(7, 10), _TARGET, None, 0, -100, 0.1),
    op("cross_entropy_loss.default", x(3, 4, 5), ids(4, 3, 5), positive(4), 0, fixed=(2,)),
    op("nll_loss_nd.default", x(3, 4, 5), ids(4, 3, 5), None, 0),
    op("nll_loss.default", x(7, 10), ids(10, 7)),
    op("nll_loss_nd.default", x(7, 10), ids(10, 7)),
    op("mse_loss.default", x(5, 7), x(5, 7), 1),
    op("mse_loss.default", x(5, 7), x(5, 7), 2),
    op("mse_loss.default", x(5, 7), x(5, 7), 0),
    op("l1_loss.default", x(5, 7), x(5, 7), 2),
    op("smooth_l1_loss.default", x(5, 7), x(5, 7), 0),
    op("huber_loss.default", x(5, 7), x(5, 7), 2, 1.5),
    op("kl_div.default", x(5, 7), positive(5, 7), 2),
    op("soft_margin_loss.default", x(5, 7), x(5, 7).sign(), 2, fixed=(1,)),
    op("binary_cross_entropy.default", positive(5, 7), positive(5, 7), None, 0),
    op(
        "binary_cross_entropy_with_logits.default",
        x(5, 7),
        positive(5, 7),
        None,
        positive(7),
        2,
        fixed=(2,),
    ),
]

CONVOLUTIONS = [
    op("conv2d.default", x(4, 3, 9, 9), x(4, 3, 7, 7), None, [2, 2], [3, 3]),
    op("conv2d.default", x(4, 6, 5, 5), x(7, 6, 3, 3), x(7)),
    op("conv2d.default", x(6, 5, 5), x(7, 6, 3, 3), x(7)),
    op("conv1d.default", x(4, 12, 9), x(12, 1, 3), x(12), [1], [1], [1], 12),
    op("conv1d.default", x(4, 12, 9), x(8, 3, 3), x(8), [1], [1], [1], 4),
    op("conv3d.default", x(2, 4, 4, 4, 4), x(4, 4, 3, 3, 3)),
    op(
        "convolution.default",
        x(4, 6, 5, 5),
        x(7, 6, 3, 3),
        x(7),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    op("convolution.default", x(4, 8, 5), x(8, 2, 3), None, [1], [0], [1], False, [0], 4),
    op("convolution.default", x(4, 6, 5), x(6, 7, 3), x(7), [1], [0], [1], True, [0], 1),
    op("max_pool2d.default", x(4, 6, 6, 6), [2, 2]),
    op("max_pool1d.default", x(4, 6, 6), [2]),
    op("max_pool3d.default", x(4, 6, 4, 4, 4), [2, 2, 2]),
    op("max_pool2d_with_indices.default", x(4, 6, 6, 6), [2, 2]),
    op("adaptive_max_pool2d.default", x(4, 6, 6, 6), [2, 2]),
    op("avg_pool1d.default", x(4, 6, 6), [2]),
    op("avg_pool2d.default", x(4, 6, 6, 6), [2, 2]),
    op("avg_pool3d.default", x(4, 6, 4, 4, 4), [2, 2, 2]),
    op("adaptive_avg_pool1d.default", x(4, 6, 6), [2]),
    op("adaptive_avg_pool2d.default", x(4, 6, 6, 6), [1, 1]),
    op("adaptive_avg_pool3d.default", x(4, 6, 4, 4, 4), [2, 2, 2]),
    op("upsample_nearest2d.default", x(4, 6, 3, 3), [6, 6]),
    op("upsample_bilinear2d.default", x(4, 6, 3, 3), [6, 6], False),
]

CREATIONS = [
    op("new_zeros.default", x(5, 3), [5, 12]),
    op("zeros.default", [5, 12], dtype=torch.float64),
    op("ones.default", [5, 12]),
    op("full.default", [5, 12], 2.0),
    op("new_zeros.default", x(3), [5, 12]),
    op("new_ones.default", x(3), [5, 12]),
    op("new_full.default", x(3), [5, 12], 2.0),
    op("arange.default", 12),
    op("linspace.default", 0, 1, 12),
    op("eye.default", 6),
    op("scalar_tensor.default", 2.0),
]

RANDOM = [
    op("dropout.default", x(5, 12), 0.5, True),
    op("dropout.default", x(5, 12), 0.5, False),
    op("dropout.default", x(5, 12), 0.0, True),
]

CASES = [
    *POINTWISE,
    *WALKS,
    *REDUCTIONS,
    *VIEWS,
    *MATMULS,
    *NORMS,
    *ATTENTION,
    *GATHERS,
    *LOSSES,
    *CONVOLUTIONS,
    *CREATIONS,
    *RANDOM,
]
