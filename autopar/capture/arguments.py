"""Op arguments in one canonical form, whatever way the model wrote the call.

Positional arguments stand in schema order with defaults filled in up to the last one given, keyword
arguments are those the schema has as keyword-only. Device, layout and pinning are dropped: the
runtime decides them. Dims are counted from the front, `-1` sizes are filled in, an op that creates
a tensor names its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.capture.sizes import SizeReader
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Ref, TensorSpec, refs_in
from autopar.ir.size import Shape, Size

Bound = dict[str, Arg]
"""Arguments by schema name."""

DROPPED = ("device", "layout", "pin_memory", "non_blocking")
_DIM_NAMES = """
    dim dims dim0 dim1 dim2 axis axes axis0 axis1 start_dim end_dim source destination
"""
DIM_NAMES = frozenset(_DIM_NAMES.split())
NEW_DIM_OPS = frozenset(["aten.unsqueeze.default", "aten.stack.default"])
"""Ops whose `dim` counts the dims of the result."""

SIZE_ARG: dict[str, str] = {
    "aten.view.default": "size",
    "aten.reshape.default": "shape",
    "aten._unsafe_view.default": "size",
    "aten.expand.default": "size",
}
"""Ops whose argument of that name is the shape of the result."""

SIZE_FROM_RESULT: dict[str, tuple[str, str]] = {
    "aten.view_as.default": ("aten.view.default", "size"),
    "aten.reshape_as.default": ("aten.reshape.default", "shape"),
    "aten.expand_as.default": ("aten.expand.default", "size"),
    "aten.broadcast_to.default": ("aten.expand.default", "size"),
}
"""Ops that are another op with the shape of the result as its size argument."""

OTHER_NAMES: dict[str, str] = {
    "aten.__and__": "aten.bitwise_and",
    "aten.__or__": "aten.bitwise_or",
    "aten.__xor__": "aten.bitwise_xor",
    "aten.absolute": "aten.abs",
    "aten.clip": "aten.clamp",
    "aten.concat": "aten.cat",
    "aten.concatenate": "aten.cat",
    "aten.divide": "aten.div",
    "aten.multiply": "aten.mul",
    "aten.negative": "aten.neg",
    "aten.subtract": "aten.sub",
}
"""Second names of an op, with the same overloads and arguments."""


def arg(value: Any, sizes: SizeReader, lookup: Callable[[Any], Arg]) -> Arg:
    """A traced argument as an `Arg`. `lookup` gives the value of an fx node."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.fx.Node():
            return lookup(value)
        case torch.SymInt():
            return size_arg(sizes.size(value))
        case torch.dtype():
            return f"dtype:{str(value).removeprefix('torch.')}"
        case torch.memory_format():
            return f"memory_format:{str(value).removeprefix('torch.')}"
        case torch.device() | torch.layout():
            return None
        case list() | tuple():
            return tuple(arg(item, sizes, lookup) for item in value)
    raise CaptureError(f"an argument of type {type(value).__name__} ({value!r}) is not supported")


def size_arg(size: Size) -> Arg:
    """A plain integer unless the size grows with the batch."""
    return size if size.is_batch else size.const


def bind(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in before the last one given by position."""
    schema = op._schema.arguments
    given = {schema[i].name: value for i, value in enumerate(args)} | dict(kwargs)
    positional = [a for a in schema if not a.kwarg_only]
    last = max((i for i, a in enumerate(positional) if a.name in given), default=-1)
    bound = {a.name: given.get(a.name, a.default_value) for a in positional[: last + 1]}
    bound |= {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given}
    return {name: value for name, value in bound.items() if name not in DROPPED}


def unbind(
    op: torch._ops.OpOverload, bound: Bound
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Positional and keyword arguments in canonical form."""
    schema = op._schema.arguments
    args = tuple(bound[a.name] for a in schema if not a.kwarg_only and a.name in bound)
    kwargs = tuple((a.name, bound[a.name]) for a in schema if a.kwarg_only and a.name in bound)
    return args, kwargs


def op_overload(name: str) -> torch._ops.OpOverload:
    """The op called `namespace.op.overload`. CaptureError if torch has none."""
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part, None)
    if not isinstance(op, torch._ops.OpOverload):
        raise CaptureError(f"torch has no op {name}, which stands for an in-place op")
    return op


def without_aliases(op: torch._ops.OpOverload, bound: Bound) -> tuple[torch._ops.OpOverload, Bound]:
    """The op under its first name; ops that take a shape from another tensor take it directly."""
    name = str(op)
    if name in SIZE_FROM_RESULT:
        name, size = SIZE_FROM_RESULT[name]
        return op_overload(name), {"self": next(refs_in(tuple(bound.values()))), size: ()}
    if name == "aten.detach_.default":
        return op_overload("aten.detach.default"), bound
    family, overload = name.rsplit(".", 1)
    if family in OTHER_NAMES:
        return op_overload(f"{OTHER_NAMES[family]}.{overload}"), bound
    return op, bound


def canonical(
    op: torch._ops.OpOverload, bound: Bound, specs: Mapping[Ref, TensorSpec], output: TensorSpec
) -> Bound:
    """The canonical form of `bound`.

    `specs` has the specs of its inputs, `output` is the spec of the op's first result.
    """
    name = str(op)
    refs = list(refs_in(tuple(bound.values())))
    if refs:
        bound = _dims_from_front(op, bound, _rank(bound, specs) + (name in NEW_DIM_OPS))
    elif any(a.name == "dtype" for a in op._schema.arguments) and bound.get("dtype") is None:
        bound = {**bound, "dtype": f"dtype:{output.dtype}"}
    if name in SIZE_ARG:
        bound = {**bound, SIZE_ARG[name]: shape_arg(output.shape)}
    if name == "aten.unflatten.int":
        bound = _explicit_unflatten(bound, output.shape)
    if name == "aten.slice.Tensor":
        bound = _explicit_slice(bound, specs[refs[0]].shape)
    if name == "aten.select.int":
        dim = specs[refs[0]].shape[_int(bound["dim"])]
        bound = {**bound, "index": _from_front(bound["index"], dim)}
    return bound


def shape_arg(shape: Shape) -> tuple[Arg, ...]:
    """A shape as a size argument."""
    return tuple(size_arg(size) for size in shape)


def _rank(bound: Bound, specs: Mapping[Ref, TensorSpec]) -> int:
    """The rank that dims refer to: that of the first tensor, or of the largest of a list."""
    first = next(value for value in bound.values() if any(refs_in(value)))
    return max(1, *(len(specs[ref].shape) for ref in refs_in(first)))


def without_empty(bound: Bound, specs: Mapping[Ref, TensorSpec]) -> Bound:
    """The arguments of a `cat` without the empty vectors that it skips whatever their rank."""
    kept = tuple(ref for ref in refs_in(bound["tensors"]) if specs[ref].shape != (Size(0),))
    return {**bound, "tensors": kept} if kept else bound


def _dims_from_front(op: torch._ops.OpOverload, bound: Bound, rank: int) -> Bound:
    result = dict(bound)
    for a in op._schema.arguments:
        if a.name not in DIM_NAMES:
            continue
        value = result.get(a.name, a.default_value)
        if isinstance(value, int) and value < 0:
            _fill_before(op, result, a.name)
            result[a.name] = value + rank
        elif isinstance(value, tuple) and a.name in result:
            result[a.name] = tuple(
                item + rank if isinstance(item, int) and item < 0 else item for item in value
            )
    return result


def _fill_before(op: torch._ops.OpOverload, bound: Bound, name: str) -> None:
    """Give the defaults of the positional arguments before `name`, so that it can be given."""
    for a in op._schema.arguments:
        if a.name == name or a.kwarg_only:
            return
        if a.name not in DROPPED:
            bound.setdefault(a.name, a.default_value)


def _explicit_unflatten(bound: Bound, output: Shape) -> Bound:
    dim, sizes = _int(bound["dim"]), bound["sizes"]
    assert isinstance(sizes, tuple)
    return {**bound, "sizes": shape_arg(output[dim : dim + len(sizes)])}


def _explicit_slice(bound: Bound, shape: Shape) -> Bound:
    """`dim, start, end, step` all given, start and end inside the dim where that is known."""
    dim = _int(bound.get("dim", 0))
    extent = shape[dim]
    start = bound.get("start")
    end = bound.get("end")
    return {
        "self": bound["self"],
        "dim": dim,
        "start": 0 if start is None else _clamped(start, extent),
        "end": size_arg(extent) if end is None else _clamped(end, extent),
        "step": bound.get("step", 1),
    }


def _clamped(value: Arg, extent: Size) -> Arg:
    value = _from_front(value, extent)
    if not isinstance(value, int):
        return value
    if value >= 2**62:
        return size_arg(extent)
    return value if extent.is_batch else max(0, min(value, extent.const))


def _from_front(value: Arg, extent: Size) -> Arg:
    """A negative index counted from the front."""
    if isinstance(value, int) and value < 0:
        return size_arg(Size(extent.const + value, extent.per_sample))
    return value


def _int(value: Arg) -> int:
    assert isinstance(value, int)
    return value
