"""In-place ops as ops that make a new value, where nothing else can tell the difference.

An in-place op on a value becomes its functional form, and later readers get the new value. Where
the op writes through `select` and `slice` views, the base is made anew with the scatter of each
view. Writing to an input, a parameter or a buffer is refused, as is a write that other views would
have to see.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture import arguments
from autopar.capture.aliases import Aliases
from autopar.capture.emit import Emitter
from autopar.capture.flatten import Step
from autopar.capture.norms import STATE_REMEDY
from autopar.errors import CaptureError
from autopar.ir.graph import Ref, SourceKind, TensorSpec

RENAMED: dict[str, str] = {
    "aten.zero_.default": "aten.zeros_like.default",
    "aten.fill_.Scalar": "aten.full_like.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
}
"""In-place ops whose functional form has another name."""

SCATTERS: dict[str, str] = {
    "aten.select.int": "aten.select_scatter.default",
    "aten.slice.Tensor": "aten.slice_scatter.default",
}
"""View to the op that puts a changed view back into its base."""


def is_write(op: torch._ops.OpOverload) -> bool:
    """Whether the op changes the data of one of its arguments."""
    return op._schema.is_mutable and str(op) != "aten.detach_.default"


def write(
    emitter: Emitter, aliases: Aliases, step: Step, op: torch._ops.OpOverload, position: int
) -> None:
    """Convert an in-place op. CaptureError where later readers could not see what it wrote."""
    target = emitter.flat.resolve(written_node(op, step.node))
    _refuse_outside(emitter, aliases, op, target)
    old = emitter.ref(target)
    new = _new_value(emitter, step, op, emitter.specs[old])
    written = _replace(emitter, aliases, target, old, new)
    if any(n not in written and aliases.read_after(n, position) for n in aliases.of(target)):
        written |= _scatter_into_bases(emitter, aliases, step, target)
    _refuse_stale_views(aliases, op, target, written, position)
    emitter.values[step.node] = emitter.ref(target)


def written_node(op: torch._ops.OpOverload, node: fx.Node) -> fx.Node:
    """The traced value that an in-place op writes to."""
    written = [i for i, a in enumerate(op._schema.arguments) if a.is_write]
    target = node.args[written[0]] if written[0] < len(node.args) else None
    if len(written) != 1 or not isinstance(target, fx.Node):
        raise CaptureError(f"{op} writes to its arguments in a way that is not supported")
    return target


def _new_value(emitter: Emitter, step: Step, op: torch._ops.OpOverload, spec: TensorSpec) -> Ref:
    bound = emitter.bind(op, step.node)
    if str(op) == "aten.copy_.default":
        source = bound["src"]
        assert isinstance(source, Ref)
        cast = TensorSpec(shape=emitter.specs[source].shape, dtype=spec.dtype)
        return emitter.expand(step, emitter.cast(step, source, cast), spec)
    functional = arguments.op_overload(RENAMED.get(str(op), str(op).replace("_.", ".", 1)))
    if "value" in bound and str(op) in RENAMED:
        bound["fill_value"] = bound["value"]
    for a in op._schema.arguments:
        # a default of the in-place op may be required in its functional form
        if not a.kwarg_only and a.has_default_value():
            bound.setdefault(a.name, arguments.arg(a.default_value, emitter.sizes, emitter.lookup))
    names = {a.name for a in functional._schema.arguments} - set(arguments.DROPPED)
    kept = {name: value for name, value in bound.items() if name in names}
    kept = arguments.canonical(functional, kept, emitter.specs, spec)
    return emitter.emit(step, functional, kept, (spec,))[0]


def _replace(
    emitter: Emitter, aliases: Aliases, target: fx.Node, old: Ref, new: Ref
) -> set[fx.Node]:
    """Every node that stood for the old value now stands for the new one."""
    same = {node for node in aliases.of(target) if emitter.values.get(node) == old}
    emitter.values.update(dict.fromkeys(same, new))
    return same


def _scatter_into_bases(
    emitter: Emitter, aliases: Aliases, step: Step, view: fx.Node
) -> set[fx.Node]:
    """Put a changed view back into its base, that into its own base, and so on."""
    written: set[fx.Node] = set()
    new, group = emitter.ref(view), set(aliases.of(view))
    while view.args:
        base = emitter.flat.resolve(view.args[0])  # type: ignore[arg-type]
        if not isinstance(base, fx.Node) or base not in group:
            break
        old = emitter.ref(base)
        if old != new:
            if str(view.target) not in SCATTERS:
                break
            scatter = arguments.op_overload(SCATTERS[str(view.target)])
            bound = {**_view_arguments(emitter, view, old, new), "src": new}
            new = emitter.emit(step, scatter, bound, (emitter.specs[old],))[0]
            written |= _replace(emitter, aliases, base, old, new)
        view = base
    return written


def _view_arguments(emitter: Emitter, view: fx.Node, base: Ref, new: Ref) -> arguments.Bound:
    op = view.target
    assert isinstance(op, torch._ops.OpOverload)
    bound = {**emitter.bind(op, view), "self": base}
    return arguments.canonical(op, bound, emitter.specs, emitter.specs[new])


def _refuse_outside(
    emitter: Emitter, aliases: Aliases, op: torch._ops.OpOverload, target: fx.Node
) -> None:
    for node in aliases.of(target):
        value = emitter.values.get(node)
        source = emitter.sources.get(value.name) if isinstance(value, Ref) else None
        # a literal tensor is lifted and copied anew in every call, so writing to it is harmless
        if source is not None and source.kind is not SourceKind.CONSTANT:
            raise CaptureError(f"{op} writes to {source.kind} {source.fqn}; {STATE_REMEDY}")


def _refuse_stale_views(
    aliases: Aliases,
    op: torch._ops.OpOverload,
    target: fx.Node,
    written: set[fx.Node],
    position: int,
) -> None:
    for node in aliases.of(target):
        if node not in written and aliases.read_after(node, position):
            raise CaptureError(
                f"{op} writes to a tensor that {node.name} also views and that is read later; "
                "write to a clone, or make a new tensor"
            )
