"""ATen ops as readable PyTorch: a table from target to a printer.

A printer gets the node, its arguments as source text, and the local shape of every output as text;
ops that are not in the table print as `torch.ops.aten.<op>.<overload>(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import OpNode
from autopar.ir.size import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A node ready to print: argument texts by position and keyword, local output shapes as text,
    whole input shapes."""

    node: OpNode
    args: tuple[str, ...]
    kwargs: Mapping[str, str]
    input_shapes: tuple[Shape, ...]
    shapes: tuple[tuple[str, ...], ...]

    def arg(self, position: int, name: str, default: str = "None") -> str:
        """Text of an argument given by position or keyword."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def input_ranks(self) -> tuple[int, ...]:
        """Number of dims of each input."""
        return tuple(map(len, self.input_shapes))

    def shape(self, index: int = 0) -> str:
        """Local shape of an output, as call arguments."""
        return ", ".join(self.shapes[index])


Printer = Callable[[Call], str]


def _default(call: Call) -> str:
    namespace, op, overload = call.node.target.split(".")
    arguments = [*call.args, *(f"{key}={value}" for key, value in call.kwargs.items())]
    return f"torch.ops.{namespace}.{op}.{overload}({', '.join(arguments)})"


def _call(function: str, *names: str) -> Printer:
    """A function called with the op's arguments; `names` are its parameter names in order.

    Arguments of the op beyond those (a hint such as `cudnn_enable`) are left out.
    """

    def printer(call: Call) -> str:
        arguments = list(call.args[: len(names)] if names else call.args)
        for position, name in enumerate(names):
            if position >= len(arguments) and name in call.kwargs:
                arguments.append(f"{name}={call.kwargs[name]}")
        return f"{function}({', '.join(arguments)})"

    return printer


def _method(name: str) -> Printer:
    return lambda call: f"{call.args[0]}.{name}({', '.join(call.args[1:])})"


def _infix(symbol: str) -> Printer:
    def printer(call: Call) -> str:
        left, right = call.args[0], call.args[1]
        alpha = call.arg(2, "alpha", "1")
        if alpha != "1":
            right = f"{alpha} * {right}"
        return f"{left} {symbol} {right}"

    return printer


def _shape_method(name: str) -> Printer:
    return lambda call: f"{call.args[0]}.{name}({call.shape()})"


def _slice(call: Call) -> str:
    dim = int(call.arg(1, "dim", "0")) % call.input_ranks[0]
    start = call.arg(2, "start", "0")
    end, step = call.arg(3, "end"), call.arg(4, "step", "1")
    bounds = f"{'' if start in ('0', 'None') else start}:{'' if end == 'None' else end}"
    if step != "1":
        bounds += f":{step}"
    return f"{call.args[0]}[{', '.join([':'] * dim + [bounds])}]"


def _cast(call: Call) -> str:
    return f"{call.args[0]}.to({call.arg(1, 'dtype')})"


def _cast_to_output(call: Call) -> str:
    return f"{call.args[0]}.to(torch.{call.node.outputs[0].dtype})"


def _reduce(name: str) -> Printer:
    def printer(call: Call) -> str:
        dims, keep = call.arg(1, "dim", ""), call.arg(2, "keepdim", "False")
        arguments = [f"dim={dims}"] if dims not in ("", "None") else []
        arguments += ["keepdim=True"] if keep == "True" else []
        arguments += [f"dtype={call.kwargs['dtype']}"] if "dtype" in call.kwargs else []
        return f"{call.args[0]}.{name}({', '.join(arguments)})"

    return printer


def _split(call: Call) -> str:
    dim = call.arg(2, "dim", "0")
    extents = ", ".join(shape[int(dim)] for shape in call.shapes)
    return f"torch.split({call.args[0]}, [{extents}], dim={dim})"


def _embedding(call: Call) -> str:
    padding = call.arg(2, "padding_idx", "-1")
    extra = "" if padding == "-1" else f", padding_idx={padding}"
    return f"F.embedding({call.args[1]}, {call.args[0]}{extra})"


def _attention(call: Call) -> str:
    names = ("attn_mask", "dropout_p", "is_causal")
    plain = {"attn_mask": "None", "dropout_p": ("0.0"), "is_causal": "False", "scale": "None"}
    options = {name: call.arg(3 + i, name, plain[name]) for i, name in enumerate(names)}
    options |= {name: value for name, value in call.kwargs.items() if name not in names}
    shown = [f"{k}={v}" for k, v in options.items() if v != plain.get(k, "False")]
    return f"F.scaled_dot_product_attention({', '.join([*call.args[:3], *shown])})"


def _creation(name: str, *, fill: bool = False) -> Printer:
    def printer(call: Call) -> str:
        value = f", {call.arg(1, 'fill_value')}" if fill else ""
        dtype = f"dtype=torch.{call.node.outputs[0].dtype}"
        return (
            f"torch.{name}(({call.shape()}{',' if call.shapes[0] else ''}){value}, {dtype}, "
            "device=ctx.device)"
        )

    return printer


def _like(name: str, *, fill: bool = False) -> Printer:
    """Creation from another tensor's device: `new_*` and `*_like`."""

    def printer(call: Call) -> str:
        position = 2 if call.node.op.startswith("aten.new_") else 1
        value = f", {call.arg(position, 'fill_value')}" if fill else ""
        dtype = f"dtype=torch.{call.node.outputs[0].dtype}"
        shape = f"({call.shape()}{',' if call.shapes[0] else ''})"
        return f"torch.{name}({shape}{value}, {dtype}, device=ctx.device)"

    return printer


def _arange(call: Call) -> str:
    dtype = f"dtype=torch.{call.node.outputs[0].dtype}"
    return f"torch.arange({', '.join([*call.args, dtype])}, device=ctx.device)"


def _grouped(position: int, name: str) -> Printer:
    """An op with a number of channel groups, of which a rank holds those of its channels."""

    def printer(call: Call) -> str:
        groups, channels = call.arg(position, name, "1"), call.node.outputs[0].shape[1].const
        own = call.shapes[0][1]
        if groups == "1" or own == str(channels):
            return _default(call)
        cut = f"{groups} * {own} // {channels}"
        if position < len(call.args):
            args = (*call.args[:position], cut, *call.args[position + 1 :])
            return _default(replace(call, args=args))
        return _default(replace(call, kwargs={**call.kwargs, name: cut}))

    return printer


def _repeat(call: Call) -> str:
    """A repeat count that follows the batch is local already; those of split dims are one."""
    return f"{call.args[0]}.repeat({call.args[1].strip('[]')})"


def _unary(name: str) -> Printer:
    return lambda call: f"torch.{name}({call.args[0]})"


_UNARY: tuple[str, ...] = ("abs", "cos", "erf", "exp", "log", "log1p", "neg", "reciprocal")
_UNARY += ("rsqrt", "sigmoid")
_UNARY += ("sign", "sin", "sqrt", "square", "tanh", "relu", "logical_not", "isnan", "isinf")


PRINTERS: dict[str, Printer] = {
    **{f"aten.{name}.default": _unary(name) for name in _UNARY},
    "aten.add.Tensor": _infix("+"),
    "aten.sub.Tensor": _infix("-"),
    "aten.mul.Tensor": _infix("*"),
    "aten.div.Tensor": _infix("/"),
    "aten.add.Scalar": _infix("+"),
    "aten.sub.Scalar": _infix("-"),
    "aten.mul.Scalar": _infix("*"),
    "aten.div.Scalar": _infix("/"),
    "aten.pow.Tensor_Scalar": _infix("**"),
    "aten.pow.Tensor_Tensor": _infix("**"),
    "aten.eq.Tensor": _infix("=="),
    "aten.eq.Scalar": _infix("=="),
    "aten.ne.Tensor": _infix("!="),
    "aten.ne.Scalar": _infix("!="),
    "aten.le.Tensor": _infix("<="),
    "aten.lt.Tensor": _infix("<"),
    "aten.ge.Tensor": _infix(">="),
    "aten.gt.Tensor": _infix(">"),
    "aten.le.Scalar": _infix("<="),
    "aten.lt.Scalar": _infix("<"),
    "aten.ge.Scalar": _infix(">="),
    "aten.gt.Scalar": _infix(">"),
    "aten.__and__.Tensor": _infix("&"),
    "aten.__or__.Tensor": _infix("|"),
    "aten.bitwise_and.Tensor": _infix("&"),
    "aten.bitwise_or.Tensor": _infix("|"),
    "aten.linear.default": _call("F.linear", "input", "weight", "bias"),
    "aten.matmul.default": _call("torch.matmul"),
    "aten.mm.default": _call("torch.mm"),
    "aten.bmm.default": _call("torch.bmm"),
    "aten.addmm.default": _call("torch.addmm", "input", "mat1", "mat2", "beta", "alpha"),
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _call(
        "F.layer_norm", "input", "normalized_shape", "weight", "bias", "eps"
    ),
    "aten.gelu.default": _call("F.gelu", "input", "approximate"),
    "aten.silu.default": _call("F.silu"),
    "aten.softmax.int": _call("torch.softmax", "input", "dim", "dtype"),
    "aten.log_softmax.int": _call("torch.log_softmax", "input", "dim", "dtype"),
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.cat.default": _call("torch.cat", "tensors", "dim"),
    "aten.stack.default": _call("torch.stack", "tensors", "dim"),
    "aten.where.self": _call("torch.where"),
    "aten.masked_fill.Scalar": _method("masked_fill"),
    "aten.transpose.int": _method("transpose"),
    "aten.permute.default": _method("permute"),
    "aten.unsqueeze.default": _method("unsqueeze"),
    "aten.squeeze.dim": _method("squeeze"),
    "aten.contiguous.default": lambda call: f"{call.args[0]}.contiguous()",
    "aten.clone.default": lambda call: f"{call.args[0]}.clone()",
    "aten.detach.default": lambda call: f"{call.args[0]}.detach()",
    "aten.t.default": lambda call: f"{call.args[0]}.t()",
    "aten.select.int": _method("select"),
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.view.default": _shape_method("view"),
    "aten._unsafe_view.default": _shape_method("view"),
    "aten.reshape.default": _shape_method("reshape"),
    "aten.flatten.using_ints": _shape_method("reshape"),
    "aten.unflatten.int": _shape_method("reshape"),
    "aten.expand.default": _shape_method("expand"),
    "aten.to.dtype": _cast,
    "aten.to.dtype_layout": _cast_to_output,
    "aten.to.device": _cast_to_output,
    "aten.to.other": _cast_to_output,
    "aten._to_copy.default": _cast_to_output,
    "aten.type_as.default": _cast_to_output,
    "aten.mean.dim": _reduce("mean"),
    "aten.mean.default": _reduce("mean"),
    "aten.sum.dim_IntList": _reduce("sum"),
    "aten.sum.default": _reduce("sum"),
    "aten.zeros.default": _creation("zeros"),
    "aten.ones.default": _creation("ones"),
    "aten.full.default": _creation("full", fill=True),
    "aten.new_zeros.default": _like("zeros"),
    "aten.new_ones.default": _like("ones"),
    "aten.new_full.default": _like("full", fill=True),
    "aten.zeros_like.default": _like("zeros"),
    "aten.ones_like.default": _like("ones"),
    "aten.full_like.default": _like("full", fill=True),
    "aten.empty.memory_format": _creation("empty"),
    "aten.new_empty.default": _like("empty"),
    "aten.repeat.default": _repeat,
    "aten.squeeze.default": _shape_method("reshape"),
    "aten.group_norm.default": _grouped(1, "num_groups"),
    "aten.conv1d.default": _grouped(6, "groups"),
    "aten.conv2d.default": _grouped(6, "groups"),
    "aten.conv3d.default": _grouped(6, "groups"),
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
}


def print_call(call: Call) -> str:
    """The node as a Python expression."""
    return PRINTERS.get(call.node.target, _default)(call)
