"""One op on the concrete local shapes of one rank: what every cost function here is given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import DTYPE_BYTES, Arg, OpNode, Ref
from autopar.ir.size import Size

LocalShape = tuple[int, ...]

SLOT = "$"
"""Name of the refs that stand for a `LocalOp`'s tensors: `Ref(SLOT, i)` is its input `i`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDim:
    """A dim of a tensor as it lies in memory: repeated there (stride 0), or a part of a longer
    one."""

    dim: int
    broadcast: bool = False
    cut: bool = False

    def __str__(self) -> str:
        return f"{self.dim}{'b' * self.broadcast}{'c' * self.cut}"


Order = tuple[StoredDim, ...]
"""The dims of a tensor from the outermost in memory; empty where it lies row by row."""


def op_name(target: str) -> str:
    """The op without namespace, overload and in-place mark: `aten.div_.Tensor` gives `div`."""
    name = target.rsplit(".", 1)[0].rsplit(".", 1)[-1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOp:
    """An op as one rank runs it.

    `args` and `kwargs` are those of the node with sizes made numbers and tensor `i` (in the order
    of `OpNode.inputs()`) written `Ref("$", i)`. `grad_inputs[i]` tells whether input `i` needs a
    gradient, `orders[i]` how it lies in memory. `copies` tells whether an op that may return a view
    (`reshape`, `contiguous`) has to copy here, as `strides.trace_storage` finds. `fused_inputs` are
    the inputs, and `fused_output` tells of the first output, that stay in registers
    (`fusion.fused_values`). A `wide` product keeps its dtype where others are narrower.
    """

    target: str
    input_shapes: tuple[LocalShape, ...]
    input_dtypes: tuple[str, ...]
    output_shapes: tuple[LocalShape, ...]
    output_dtypes: tuple[str, ...]
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    requires_grad: bool = False
    grad_inputs: tuple[bool, ...] = ()
    orders: tuple[Order, ...] = ()
    copies: bool = False
    fused_inputs: tuple[int, ...] = ()
    fused_output: bool = False
    wide: bool = False

    @property
    def name(self) -> str:
        """The op without namespace and overload."""
        return op_name(self.target)

    @property
    def is_fused(self) -> bool:
        """Whether it is part of a longer kernel."""
        return bool(self.fused_inputs) or self.fused_output

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at `position`, or the keyword `name`, or `default`."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)

    def needs_grad(self, index: int) -> bool:
        """Whether autograd computes a gradient for input `index`."""
        return self.requires_grad and index < len(self.grad_inputs) and self.grad_inputs[index]

    def input_bytes(self, index: int) -> int:
        """Size of input `index`; 0 where the op has fewer inputs."""
        if index >= len(self.input_shapes):
            return 0
        return prod(self.input_shapes[index]) * DTYPE_BYTES[self.input_dtypes[index]]

    def output_bytes(self, index: int) -> int:
        """Size of output `index`; 0 where the op has fewer outputs."""
        if index >= len(self.output_shapes):
            return 0
        return prod(self.output_shapes[index]) * DTYPE_BYTES[self.output_dtypes[index]]

    @property
    def total_input_bytes(self) -> int:
        """Size of all inputs."""
        return sum(self.input_bytes(i) for i in range(len(self.input_shapes)))

    @property
    def total_output_bytes(self) -> int:
        """Size of all outputs."""
        return sum(self.output_bytes(i) for i in range(len(self.output_shapes)))

    @property
    def numel(self) -> int:
        """Elements of the largest tensor the op touches."""
        return max(map(prod, (*self.output_shapes, *self.input_shapes)), default=0)

    @property
    def key(self) -> str:
        """Text that two ops share only if they run the same kernel on equal shapes and layouts."""
        tensors = (
            f"{dtype}{list(shape)}{'g' if self.needs_grad(i) else ''}{self._order_text(i)}"
            for i, (shape, dtype) in enumerate(
                zip(self.input_shapes, self.input_dtypes, strict=True)
            )
        )
        attributes = [_arg_text(arg) for arg in self.args]
        attributes += [f"{name}={_arg_text(arg)}" for name, arg in self.kwargs]
        outputs = "; ".join(map(str, map(list, self.output_shapes)))
        text = f"{self.target}({', '.join(attributes)}) on {'; '.join(tensors)} -> {outputs}"
        return f"{text} copied" if self.copies else text

    def order(self, index: int) -> Order:
        """How input `index` lies in memory."""
        return self.orders[index] if index < len(self.orders) else ()

    def _order_text(self, index: int) -> str:
        order = self.order(index)
        return f" in order {'.'.join(map(str, order))}" if order else ""


def local_op(
    node: OpNode,
    *,
    input_shapes: tuple[LocalShape, ...],
    input_dtypes: tuple[str, ...],
    output_shapes: tuple[LocalShape, ...],
    batch: int,
    grad_inputs: tuple[bool, ...] = (),
    orders: tuple[Order, ...] = (),
    copying: Collection[str] = (),
    fused: Collection[Ref] = (),
    wide: Collection[str] = (),
) -> LocalOp:
    """`node` on local shapes, for a micro-batch of `batch` samples.

    `copying` names the nodes whose view has to be copied (`StorageMap.copying`), `fused` the values
    that stay in registers, `wide` the products that keep their dtype.
    """
    slots = iter(range(len(input_shapes)))

    def bind(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(SLOT, next(slots))
        if isinstance(arg, tuple):
            return tuple(bind(item) for item in arg)
        return arg.at(batch) if isinstance(arg, Size) else arg

    return LocalOp(
        target=node.target,
        input_shapes=input_shapes,
        input_dtypes=input_dtypes,
        output_shapes=output_shapes,
        output_dtypes=tuple(spec.dtype for spec in node.outputs),
        args=tuple(bind(arg) for arg in node.args),
        kwargs=tuple((name, bind(arg)) for name, arg in node.kwargs),
        requires_grad=node.requires_grad,
        grad_inputs=grad_inputs,
        orders=orders,
        copies=node.name in copying,
        fused_inputs=tuple(i for i, ref in enumerate(node.inputs()) if ref in fused),
        fused_output=Ref(node.name) in fused,
        wide=node.name in wide,
    )


def _arg_text(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"{SLOT}{arg.index}"
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_arg_text, arg))}]"
    return str(arg)
