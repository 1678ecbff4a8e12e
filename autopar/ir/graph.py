"""The captured model: sources (parameters, buffers, inputs, constants), op nodes, outputs.

An `OpGraph` is torch-free and frozen. Every value has one producer, a `Source` or an `OpNode`, and
is named by a `Ref`. Nodes stand in execution order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Union

from autopar.ir.size import Shape, Size, shape_at

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor. `dtype` is torch's name without the `torch.` prefix."""

    shape: Shape
    dtype: str

    def numel(self, batch: int) -> int:
        """Number of elements for `batch` samples."""
        return prod(shape_at(self.shape, batch))

    def nbytes(self, batch: int) -> int:
        """Size in bytes for `batch` samples."""
        return self.numel(batch) * DTYPE_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether gradients may flow through the tensor."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """One value: output `index` of the source or node called `name`."""

    name: str
    index: int = 0

    def __str__(self) -> str:
        return self.name if self.index == 0 else f"{self.name}.{self.index}"


Arg = Union[Ref, Size, int, float, bool, str, None, tuple["Arg", ...]]
"""An op argument. Integers that depend on the batch are `Size`; a dtype, device, layout or memory
format is a string such as `dtype:float32`, `device:cpu`, `memory_format:contiguous_format`."""


UPDATED: dict[str, tuple[int, ...]] = {"autopar.batch_norm": (3, 4, 5)}
"""Op to the positions of the arguments that it updates in place."""


def refs_in(arg: Arg) -> Iterator[Ref]:
    """The values an argument reads, left to right."""
    return iter(_collected((arg,), []))


def _collected(args: tuple[Arg, ...], found: list[Ref]) -> list[Ref]:
    """Appends the refs among the arguments; a plain loop, for every node is asked many times."""
    for arg in args:
        if isinstance(arg, Ref):
            found.append(arg)
        elif isinstance(arg, tuple):
            _collected(arg, found)
    return found


class SourceKind(StrEnum):
    """Where a graph input comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A value that exists before the first op.

    `fqn` is the original dotted name of a parameter or buffer, or the key of an input (a batch
    entry: `input_ids`, or `0` for a positional one). `tied` lists further names of the same
    parameter. `trainable` tells whether the optimizer updates it, `persistent` whether it is in the
    model's state dict.
    """

    name: str
    kind: SourceKind
    fqn: str
    spec: TensorSpec
    trainable: bool = False
    persistent: bool = True
    tied: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpNode:
    """One op. `target` is the ATen name with overload, such as `aten.linear.default`.

    `requires_grad` tells whether autograd runs through the node. `module_path` and `source` (file
    and line) are for people; no decision may depend on them.
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorSpec, ...]
    requires_grad: bool = False
    module_path: str = ""
    source: str = ""

    @property
    def op(self) -> str:
        """The op without its overload: `aten.linear`."""
        return self.target.rsplit(".", 1)[0]

    def inputs(self) -> tuple[Ref, ...]:
        """The tensors read, in argument order, then keyword order; a tensor read twice is twice."""
        found = _collected(self.args, [])
        for _, value in self.kwargs:
            _collected((value,), found)
        return tuple(found)

    def updates(self) -> tuple[Ref, ...]:
        """The values that the op updates in place: buffers, where they lie."""
        return tuple(refs_in(tuple(self.args[i] for i in UPDATED.get(self.op, ()))))

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at `position`, or the keyword `name`, or `default`."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpGraph:
    """A captured model. `loss` is a scalar, `outputs` what the model returns besides.

    `output_tree` is the model's return value with tensors replaced by `{"$output": i}`, so that the
    original structure (dicts, None, numbers) can be rebuilt; it is JSON. `example_batch` is the
    number of samples of the example the graph was captured with.
    """

    sources: tuple[Source, ...]
    nodes: tuple[OpNode, ...]
    loss: Ref | None
    outputs: tuple[Ref, ...] = ()
    output_tree: str = "null"
    example_batch: int = 1
    notes: tuple[str, ...] = ()

    def producers(self) -> dict[str, Source | OpNode]:
        """Name to producer of every value."""
        found: dict[str, Source | OpNode] = {source.name: source for source in self.sources}
        found.update({node.name: node for node in self.nodes})
        return found

    def specs(self) -> dict[Ref, TensorSpec]:
        """Spec of every value in the graph."""
        specs = {Ref(source.name): source.spec for source in self.sources}
        for node in self.nodes:
            specs.update({Ref(node.name, i): spec for i, spec in enumerate(node.outputs)})
        return specs

    def updated(self) -> frozenset[Ref]:
        """The buffers that a forward updates. They are never moved: a copy would be updated."""
        return frozenset(ref for node in self.nodes for ref in node.updates())

    def differentiable(self) -> frozenset[Ref]:
        """Values that autograd carries a gradient for."""
        grads = {Ref(s.name) for s in self.sources if s.trainable}
        for node in self.nodes:
            if node.requires_grad:
                grads |= {
                    Ref(node.name, i) for i, spec in enumerate(node.outputs) if spec.is_floating
                }
        return frozenset(grads)


__all__ = [
    "DTYPE_BYTES",
    "Arg",
    "OpGraph",
    "OpNode",
    "Ref",
    "Size",
    "Source",
    "SourceKind",
    "TensorSpec",
    "refs_in",
]
