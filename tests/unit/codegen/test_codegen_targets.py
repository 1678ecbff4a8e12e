"""Every printed op, evaluated, gives what the ATen op gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from autopar.codegen.local import LocalNode, Mesh, argument_text, node_text
from autopar.codegen.targets import PRINTERS
from autopar.ir.graph import OpNode, Ref, Size, TensorSpec
from autopar.ir.placement import R
from autopar.plan.plan import NodeChoice

MESH = Mesh(axes=("data",), sizes=(1,))


def real(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.25


def whole(*shape):
    return torch.arange(int(torch.Size(shape).numel())).reshape(shape) % 5


A, B, V = real(4, 6), real(6, 4).t(), real(6)
CUBE, IDS, MASK = real(2, 4, 6), whole(3, 4), whole(4, 6) > 2
HEADS = [real(2, 3, 4, 5), real(2, 3, 4, 5) * 2, real(2, 3, 4, 5) * 3]
FLOAT32 = {"dtype": torch.float32}

Calls = list[tuple[tuple[object, ...], dict[str, object]]]


def calls(*arguments, **keywords):
    """One call with these arguments."""
    return [(arguments, keywords)]


EXAMPLES: dict[str, Calls] = {
    **{f"aten.{name}.default": calls(A) for name in ("abs", "cos", "erf", "exp", "log", "log1p")},
    **{
        f"aten.{name}.default": calls(A - 0.5) for name in ("neg", "sigmoid", "sign", "sin", "tanh")
    },
    **{f"aten.{name}.default": calls(A) for name in ("reciprocal", "rsqrt", "sqrt", "square")},
    "aten.relu.default": calls(A - 0.5),
    "aten.logical_not.default": calls(MASK),
    "aten.isnan.default": calls(torch.tensor([1.0, float("nan")])),
    "aten.isinf.default": calls(torch.tensor([1.0, float("inf")])),
    "aten.add.Tensor": [((A, B), {}), ((A, B), {"alpha": 3}), ((A, 2.5), {})],
    "aten.sub.Tensor": [((A, B), {}), ((A, B), {"alpha": 0.5}), ((A, 2), {})],
    "aten.mul.Tensor": [((A, B), {}), ((A, -2.0), {})],
    "aten.div.Tensor": [((A, B), {}), ((A, 4), {})],
    "aten.add.Scalar": [((A, 2), {}), ((A, 2, 3), {}), ((A, float("inf")), {})],
    "aten.sub.Scalar": [((A, 2), {}), ((A, 2, 3), {})],
    "aten.mul.Scalar": calls(A, -0.5),
    "aten.div.Scalar": calls(A, 8),
    "aten.pow.Tensor_Scalar": [((A, 2), {}), ((A, -1.5), {})],
    "aten.pow.Tensor_Tensor": calls(A, B),
    **{f"aten.{name}.Tensor": calls(A, B) for name in ("eq", "ne", "le", "lt", "ge", "gt")},
    **{f"aten.{name}.Scalar": calls(IDS, 2) for name in ("eq", "ne", "le", "lt", "ge", "gt")},
    "aten.__and__.Tensor": calls(MASK, ~MASK | MASK),
    "aten.__or__.Tensor": calls(MASK, ~MASK),
    "aten.bitwise_and.Tensor": calls(IDS, IDS + 1),
    "aten.bitwise_or.Tensor": calls(IDS, IDS + 1),
    "aten.linear.default": [((A, real(3, 6)), {}), ((CUBE, real(3, 6), real(3)), {})],
    "aten.matmul.default": [((A, real(6, 2)), {}), ((CUBE, real(6, 2)), {})],
    "aten.mm.default": calls(A, real(6, 2)),
    "aten.bmm.default": calls(CUBE, real(2, 6, 3)),
    "aten.addmm.default": [
        ((real(2), A, real(6, 2)), {}),
        ((real(2), A, real(6, 2)), {"beta": 0.5, "alpha": 2}),
    ],
    "aten.embedding.default": [((real(5, 3), IDS), {}), ((real(5, 3), IDS, 2), {})],
    "aten.layer_norm.default": [
        ((A, [6]), {}),
        ((A, [6], V, V * 2, 1e-3), {}),
        ((CUBE, [4, 6], None, None, 1e-2, False), {}),
    ],
    "aten.gelu.default": [((A,), {}), ((A - 0.5,), {"approximate": "tanh"})],
    "aten.silu.default": calls(A - 0.5),
    "aten.softmax.int": [((A, -1), {}), ((A, 0, torch.float32), {})],
    "aten.log_softmax.int": [((A, 1), {}), ((A, -1), {"dtype": torch.float32})],
    "aten.scaled_dot_product_attention.default": [
        (tuple(HEADS), {}),
        ((*HEADS, None, 0.0, True), {}),
        ((*HEADS, real(4, 4)), {"scale": 0.3}),
        ((HEADS[0], HEADS[1][:, :1], HEADS[2][:, :1]), {"enable_gqa": True}),
        (tuple(HEADS), {"is_causal": True}),
    ],
    "aten.cat.default": [(([A, B],), {}), (([A, B], 1), {})],
    "aten.stack.default": [(([A, B],), {}), (([A, B], -1), {})],
    "aten.where.self": calls(MASK, A, B),
    "aten.masked_fill.Scalar": [((A, MASK, -1.0), {}), ((A, MASK, float("-inf")), {})],
    "aten.transpose.int": calls(CUBE, 1, 2),
    "aten.permute.default": calls(CUBE, [2, 0, 1]),
    "aten.unsqueeze.default": calls(A, -1),
    "aten.squeeze.dim": calls(real(3, 1, 2), 1),
    "aten.contiguous.default": calls(B),
    "aten.clone.default": calls(A),
    "aten.detach.default": calls(A),
    "aten.t.default": calls(A),
    "aten.select.int": [((CUBE, 1, 2), {}), ((CUBE, -1, -1), {})],
    "aten.slice.Tensor": [
        ((A,), {}),
        ((CUBE, 1, 1, 3), {}),
        ((CUBE, 2, 0, 9223372036854775807, 2), {}),
        ((CUBE, 1, -2), {}),
        ((CUBE, 1, None, -1), {}),
        ((CUBE, -1, 1, 3), {}),
        ((CUBE, -2, 0, 2), {}),
    ],
    "aten.split.Tensor": [((A, 2), {}), ((A, 4, 1), {}), ((A, 4, -1), {})],
    "aten.split_with_sizes.default": calls(A, [1, 2, 3], 1),
    "aten.chunk.default": [((A, 2), {}), ((A, 3, -1), {}), ((A, 4, 1), {})],
    "aten.view.default": [((A, [2, 12]), {}), ((A, [-1]), {})],
    "aten._unsafe_view.default": calls(A, [2, 12]),
    "aten.reshape.default": calls(B, [3, -1]),
    "aten.flatten.using_ints": [((CUBE,), {}), ((CUBE, 1), {}), ((CUBE, 0, 1), {})],
    "aten.unflatten.int": calls(CUBE, -1, [2, 3]),
    "aten.expand.default": [((real(1, 3), [4, 3]), {}), ((real(3), [2, -1]), {})],
    "aten.to.dtype": calls(A, torch.float32),
    "aten.to.dtype_layout": calls(A, dtype=torch.float32),
    "aten.to.device": calls(A, torch.device("cpu"), torch.float32),
    "aten.to.other": calls(A, real(1).float()),
    "aten._to_copy.default": calls(A, dtype=torch.float16),
    "aten.type_as.default": calls(A, real(1).float()),
    "aten.mean.dim": [((CUBE, [-1]), {}), ((CUBE, [0, 2], True), {}), ((A, [1]), FLOAT32)],
    "aten.mean.default": [((CUBE,), {}), ((CUBE,), FLOAT32)],
    "aten.sum.dim_IntList": [((CUBE, [1]), {}), ((CUBE, [0, -1], True), {}), ((A, None), {})],
    "aten.sum.default": [((CUBE,), {}), ((IDS,), FLOAT32)],
    "aten.zeros.default": [(([2, 3],), FLOAT32), (([],), {})],
    "aten.ones.default": calls([2, 3], dtype=torch.int64),
    "aten.full.default": [(([2, 3], 1.5), {}), (([2], float("-inf")), FLOAT32), (([], 7), {})],
    "aten.new_zeros.default": [((A, [2, 3]), {}), ((A, [3]), {"dtype": torch.bool})],
    "aten.new_ones.default": calls(A, [2, 3]),
    "aten.new_full.default": calls(A, [2, 3], 0.5),
    "aten.zeros_like.default": calls(A),
    "aten.ones_like.default": calls(A, dtype=torch.int32),
    "aten.full_like.default": calls(A, 3.0),
    "aten.arange.default": [((5,), {}), ((5,), FLOAT32)],
    "aten.arange.start": calls(2, 7),
    "aten.arange.start_step": calls(1, 9, 3),
    "aten.squeeze.default": calls(real(3, 1, 2)),
    "aten.repeat.default": [((A, [2, 1]), {}), ((A, [3, 1, 2]), {})],
    "aten.group_norm.default": calls(real(2, 4, 3), 2, real(4), real(4), 1e-3),
    "aten.conv1d.default": [((real(2, 4, 5), real(6, 2, 3), None, [1], [1], [1], 2), {})],
    "aten.conv2d.default": calls(real(2, 4, 5, 5), real(6, 4, 3, 3), real(6), [2, 2]),
    "aten.conv3d.default": calls(real(1, 2, 3, 3, 3), real(2, 2, 2, 2, 2)),
    # not in the table: printed as the op itself
    "aten.cumsum.default": calls(A, 1),
    "aten.eye.default": calls(3, dtype=torch.float32, device=torch.device("cpu")),
    "aten.linspace.default": calls(0.0, 1.0, 5, layout=torch.strided, pin_memory=False),
    "aten.nan_to_num.default": calls(A, float("nan"), None, None),
    "aten.roll.default": calls(A, [2], [1]),
    "aten.clamp.default": [((A,), {"min": 0.4}), ((A, None, 0.9), {})],
}


class Printed:
    """A node for a call of an op, and what its text gives."""

    def __init__(self, target, args, kwargs):
        self.tensors = {}
        overload = torch.ops
        for part in target.split("."):
            overload = getattr(overload, part)
        made = overload(*args, **kwargs)
        self.expected = made if isinstance(made, (tuple, list)) else (made,)
        node = OpNode(
            name="node",
            target=target,
            args=tuple(map(self._arg, args)),
            kwargs=tuple((key, self._arg(value)) for key, value in kwargs.items()),
            outputs=tuple(map(spec, self.expected)),
        )
        inputs = node.inputs()
        self.text = node_text(
            LocalNode(
                node=node,
                choice=NodeChoice(
                    node="node",
                    inputs=((R,),) * len(inputs),
                    outputs=((R,),) * len(self.expected),
                ),
                kernels=("local",),
                random_index=None,
                specs={Ref(name): spec(tensor) for name, tensor in self.tensors.items()},
                mesh=MESH,
            ),
            lambda ref, position: ref.name,
        )

    def _arg(self, value):
        if isinstance(value, torch.Tensor):
            self.tensors[f"t{len(self.tensors)}"] = value
            return Ref(f"t{len(self.tensors) - 1}")
        if isinstance(value, (list, tuple)):
            return tuple(map(self._arg, value))
        if isinstance(value, (torch.dtype, torch.layout)):
            kind = "dtype" if isinstance(value, torch.dtype) else "layout"
            return f"{kind}:{str(value).removeprefix('torch.')}"
        if isinstance(value, torch.device):
            return f"device:{value}"
        return value

    def evaluate(self):
        ctx = SimpleNamespace(device=torch.device("cpu"))
        made = eval(self.text, {"torch": torch, "F": F, "ctx": ctx, **self.tensors})
        return made if isinstance(made, (tuple, list)) else (made,)


def spec(tensor):
    shape = tuple(Size(extent) for extent in tensor.shape)
    return TensorSpec(shape=shape, dtype=str(tensor.dtype).removeprefix("torch."))


UNINITIALISED = {"aten.empty.memory_format", "aten.new_empty.default"}


def test_every_printer_has_an_example():
    assert set(PRINTERS) - UNINITIALISED <= set(EXAMPLES)


@pytest.mark.parametrize(
    ("target", "args"),
    [("aten.empty.memory_format", ([2, 3],)), ("aten.new_empty.default", (A, [2, 3]))],
)
def test_uninitialised_tensors_have_the_shape_and_dtype(target, args):
    printed = Printed(target, args, {"dtype": torch.float32})
    (mine,), (theirs,) = printed.evaluate(), printed.expected
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [(target, *call) for target, examples in EXAMPLES.items() for call in examples],
    ids=[f"{target}-{i}" for target, examples in EXAMPLES.items() for i in range(len(examples))],
)
def test_the_text_evaluates_to_what_the_op_gives(target, args, kwargs):
    printed = Printed(target, args, kwargs)
    found = printed.evaluate()
    assert len(found) == len(printed.expected)
    for mine, theirs in zip(found, printed.expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        ("aten.linear.default", (A, real(3, 6), real(3)), "F.linear(t0, t1, t2)"),
        ("aten.add.Tensor", (A, B), "t0 + t1"),
        ("aten.view.default", (A, [2, -1]), "t0.view(2, 12)"),
        ("aten.slice.Tensor", (CUBE, 1, 1, 3), "t0[:, 1:3]"),
        ("aten.mean.dim", (A, [1], True), "t0.mean(dim=[1], keepdim=True)"),
        ("aten.cumsum.default", (A, 1), "torch.ops.aten.cumsum.default(t0, 1)"),
    ],
)
def test_common_ops_read_as_a_person_writes_them(target, args, text):
    assert Printed(target, args, {}).text == text


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        (Ref("a", 1), "a.1"),
        (Size(3, 2), "2 * batch + 3"),
        ((1, Ref("b"), None), "[1, b, None]"),
        ("dtype:bfloat16", "torch.bfloat16"),
        ("memory_format:channels_last", "torch.channels_last"),
        (float("inf"), 'float("inf")'),
        (float("nan"), 'float("nan")'),
        ("device:cuda:0", "ctx.device"),
        ("layout:strided", "torch.strided"),
        (-1e-5, "-1e-05"),
        (True, "True"),
        ("tanh", "'tanh'"),
    ],
)
def test_arguments(arg, text):
    assert argument_text(arg, str) == text
