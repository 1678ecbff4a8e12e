"""Making op nodes: what each traced value stands for, and the nodes so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture import arguments
from autopar.capture.flatten import FlatGraph, Step
from autopar.capture.locations import location_in_stack
from autopar.capture.names import Names
from autopar.capture.sizes import FixedBatch, SizeReader
from autopar.capture.tracing import PREFIX
from autopar.ir.graph import Arg, OpNode, Ref, Source, TensorSpec, refs_in

NO_GRADIENT = ("aten.detach.", "aten.new_", "aten.one_hot.")
"""Beginnings of ops through which no gradient flows; neither does one through the `_like` ops."""

EXPORT_ROOT = "_export_root."
"""What torch puts before the paths of modules while it traces."""

Value = Ref | tuple[Ref, ...]


class Emitter:
    """Collects op nodes. `values` maps each traced node to what it stands for at this point."""

    def __init__(
        self, flat: FlatGraph, sources: Mapping[fx.Node, Source], sizes: SizeReader
    ) -> None:
        self.flat = flat
        self.sizes = sizes
        self.values: dict[fx.Node, Value] = {n: Ref(s.name) for n, s in sources.items()}
        self.sources = {s.name: s for s in sources.values()}
        self.specs = {Ref(s.name): s.spec for s in sources.values()}
        self.nodes: list[OpNode] = []
        self._differentiable = {Ref(s.name) for s in sources.values() if s.trainable}
        self._names = Names(self.sources)

    def within(self, flat: FlatGraph, inputs: Sequence[tuple[Ref, Ref]]) -> Emitter:
        """An emitter for a graph of its own: its first placeholders stand for values of this one.

        `inputs` has the ref there with the ref here.
        """
        inner = Emitter(flat, {}, self.sizes)
        refs = [ref for ref, _ in inputs]
        inner.values.update(zip(flat.placeholders, refs, strict=False))
        inner.know(
            refs,
            [self.specs[outer] for _, outer in inputs],
            [self.is_differentiable(outer) for _, outer in inputs],
        )
        return inner

    def know(
        self, refs: Sequence[Ref], specs: Sequence[TensorSpec], differentiable: Sequence[bool]
    ) -> None:
        """Values that were made elsewhere."""
        self.specs.update(zip(refs, specs, strict=True))
        self._differentiable |= {r for r, flows in zip(refs, differentiable, strict=True) if flows}

    def ref(self, node: Any) -> Ref:
        """The single tensor a traced node stands for."""
        value = self.values[self.flat.resolve(node)]
        assert isinstance(value, Ref)
        return value

    def bind(self, op: torch._ops.OpOverload, node: fx.Node) -> arguments.Bound:
        """The arguments of a traced call by schema name."""
        raw = arguments.bind(op, node.args, node.kwargs)
        return {name: arguments.arg(v, self.sizes, self.lookup) for name, v in raw.items()}

    def emit(
        self,
        step: Step,
        op: torch._ops.OpOverload,
        bound: arguments.Bound,
        outputs: tuple[TensorSpec, ...],
    ) -> tuple[Ref, ...]:
        """Add a node made for `step`; returns its outputs."""
        args, kwargs = arguments.unbind(op, bound)
        return self.add(step, str(op), args, kwargs, outputs)

    def add(
        self,
        step: Step,
        target: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        outputs: tuple[TensorSpec, ...],
    ) -> tuple[Ref, ...]:
        """Add a node by the name of its op; returns its outputs."""
        inputs = refs_in((*args, *(value for _, value in kwargs)))
        node = OpNode(
            name=self.unique_name(step.node.name),
            target=target,
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            requires_grad=step.grad
            and _passes_gradient(target)
            and any(spec.is_floating for spec in outputs)
            and any(ref in self._differentiable for ref in inputs),
            module_path=module_path(step.node),
            source=location_in_stack(step.node.meta.get("stack_trace")),
        )
        self.nodes.append(node)
        refs = tuple(Ref(node.name, i) for i in range(len(outputs)))
        self.specs.update(zip(refs, outputs, strict=True))
        if node.requires_grad:
            self._differentiable |= {r for r in refs if self.specs[r].is_floating}
        return refs

    def is_differentiable(self, ref: Ref) -> bool:
        """Whether a gradient flows back through a value."""
        return ref in self._differentiable

    def cast(self, step: Step, ref: Ref, output: TensorSpec) -> Ref:
        """The value in the dtype of `output`."""
        if self.specs[ref].dtype == output.dtype:
            return ref
        bound: arguments.Bound = {"self": ref, "dtype": f"dtype:{output.dtype}"}
        return self.emit(step, torch.ops.aten.to.dtype, bound, (output,))[0]

    def expand(self, step: Step, ref: Ref, output: TensorSpec) -> Ref:
        """The value broadcast to the shape of `output`."""
        if self.specs[ref].shape == output.shape:
            return ref
        bound: arguments.Bound = {"self": ref, "size": arguments.shape_arg(output.shape)}
        return self.emit(step, torch.ops.aten.expand.default, bound, (output,))[0]

    def lookup(self, node: fx.Node) -> Arg:
        """A traced node as an argument: a value, or a size."""
        resolved = self.flat.resolve(node)
        if not isinstance(resolved, fx.Node):
            return arguments.arg(resolved, self.sizes, self.lookup)
        traced = resolved.meta.get("val")
        if isinstance(traced, torch.SymInt):
            return arguments.size_arg(self.sizes.size(traced))
        if isinstance(traced, (torch.SymFloat, torch.SymBool)):
            raise FixedBatch("the model calculates a number from its batch size")
        return self.values[resolved]

    def unique_name(self, name: str) -> str:
        """The name, or one like it that no value has yet."""
        return self._names.new(name.rstrip("_") or "op")


def module_path(node: fx.Node) -> str:
    """The innermost module that made the node, in the model's own names."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        if (own := own_path(str(path))) is not None:
            return own
    return ""


def own_path(path: str) -> str | None:
    """A path within the module that is exported as one within the model; None outside of it."""
    path = path.removeprefix(EXPORT_ROOT)
    if path != PREFIX and not path.startswith(f"{PREFIX}."):
        return None
    own = path.removeprefix(PREFIX).removeprefix(".")
    # a module called again is traced as `name@1`
    return ".".join(part.split("@")[0] for part in own.split("."))


def _passes_gradient(op: str) -> bool:
    return not op.startswith(NO_GRADIENT) and not op.rsplit(".", 1)[0].endswith("_like")
