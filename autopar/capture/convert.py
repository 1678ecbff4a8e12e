"""The flat exported graph as op nodes: canonical, functional, without bookkeeping ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, fx

from autopar.capture import arguments, norms, writes
from autopar.capture.aliases import Aliases
from autopar.capture.emit import Emitter, Value, module_path
from autopar.capture.expand import Expander, is_repeated
from autopar.capture.flatten import FlatGraph, Step
from autopar.capture.locations import location_in_stack
from autopar.capture.sizes import SizeReader
from autopar.capture.templates import Template
from autopar.errors import CaptureError
from autopar.ir.graph import OpNode, Ref, Source, TensorSpec, refs_in

CASTS = frozenset(["aten.to", "aten._to_copy", "aten.type_as"])
IDENTITIES = frozenset(
    ["aten.alias", "aten.lift", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.requires_grad_"]
)
SAME_SHAPE_IDENTITIES = frozenset(["aten.expand", "aten.view", "aten.reshape", "aten._unsafe_view"])


def convert(
    flat: FlatGraph,
    outputs: tuple[fx.Node, ...],
    sources: Mapping[fx.Node, Source],
    sizes: SizeReader,
    templates: Sequence[Template] = (),
) -> tuple[list[OpNode], list[Ref]]:
    """Op nodes and the values of `outputs`; calls of `templates` are written out.

    Raises CaptureError naming op, line and module for what cannot be kept, FixedBatch where the
    graph holds for one batch size only.
    """
    emitter = Emitter(flat, sources, sizes)
    expander = Expander(templates, lambda *inner: _Converter(inner[0], inner[1], expander).run())
    _Converter(emitter, outputs, expander).run()
    return emitter.nodes, [emitter.ref(node) for node in outputs]


class _Converter:
    def __init__(self, emitter: Emitter, outputs: Sequence[fx.Node], expander: Expander) -> None:
        self.emitter = emitter
        self._expander = expander
        flat = emitter.flat
        self._aliases = Aliases(flat, [flat.resolve(node) for node in outputs])
        self._counters = norms.Counters()

    def run(self) -> None:
        for position, step in enumerate(self.emitter.flat.steps):
            try:
                self._convert(step, position)
            except CaptureError as error:
                _fail(step.node, str(error))
            if not is_repeated(step.node):  # its results are: each is a value of its own
                self._aliases.add(step.node)
        if (left := self._counters.unused()) is not None:
            _fail(left, f"{left.target} writes to a buffer; {norms.STATE_REMEDY}")

    def _convert(self, step: Step, position: int) -> None:
        node, op = step.node, step.node.target
        if getattr(op, "__name__", "") == "getitem":
            self._pick(node)
        elif not _has_tensor(node.meta.get("val")):
            return  # sizes, kept as Size where they are used, and assertions about them
        elif not isinstance(op, torch._ops.OpOverload):
            raise CaptureError(f"{op} is not an op that can be planned")
        elif is_repeated(node):
            self.emitter.values[node] = self._expander.expand(self.emitter, step, module_path(node))
        elif writes.is_write(op):
            if self._counts(op, node, position):
                return
            writes.write(self.emitter, self._aliases, step, op, position)
        else:
            bound = self.emitter.bind(op, node)
            norms.refuse_running_statistics(op, bound)
            if norms.is_batch_norm(op, bound):
                (output,) = self._output_specs(node)
                self.emitter.values[node] = norms.batch_norm(
                    self.emitter, self._counters, step, bound, output
                )
                return
            self.emitter.values[node] = self._simplified(step, op, bound)

    def _counts(self, op: torch._ops.OpOverload, node: fx.Node, position: int) -> bool:
        """Whether an in-place op counts a norm's batches: the norm does that then."""
        flat = self.emitter.flat
        counter = flat.resolve(writes.written_node(op, node))
        same = {*self._aliases.of(counter), node}
        later = [step.node for step in flat.steps[position + 1 :]]
        reads = [other for other in later if same & set(flat.inputs(other))]
        read = any(self._aliases.read_after(other, len(flat.steps) - 1) for other in same) or any(
            other.target is not op or flat.resolve(writes.written_node(op, other)) not in same
            for other in reads
        )
        if counted := self._counters.add(self.emitter, op, node, read_later=read):
            self.emitter.values[node] = self.emitter.ref(counter)
        return counted

    def _pick(self, node: fx.Node) -> None:
        source, index = node.args
        value = self.emitter.values.get(self.emitter.flat.resolve(source))  # type: ignore[arg-type]
        if isinstance(value, tuple):
            assert isinstance(index, int)
            self.emitter.values[node] = value[index]

    def _simplified(self, step: Step, op: torch._ops.OpOverload, bound: arguments.Bound) -> Value:
        """The value of an op that changes nothing, or of the node made for it."""
        op, bound = arguments.without_aliases(op, bound)
        family = str(op).rsplit(".", 1)[0]
        outputs = self._output_specs(step.node)
        constant = family == "aten.detach" and not self.emitter.is_differentiable(_first_ref(bound))
        if family in IDENTITIES or constant:
            return _first_ref(bound)
        if family in CASTS:
            return self._cast(step, bound, outputs[0])
        if str(op) == "aten.broadcast_tensors.default":
            pairs = zip(refs_in(bound["tensors"]), outputs, strict=True)
            return tuple(self.emitter.expand(step, ref, spec) for ref, spec in pairs)
        if str(op) == "aten.cat.default":
            bound = arguments.without_empty(bound, self.emitter.specs)
        bound = arguments.canonical(op, bound, self.emitter.specs, outputs[0])
        if self._changes_nothing(op, family, bound, outputs[0]):
            return _first_ref(bound)
        refs = self.emitter.emit(step, op, bound, outputs)
        return refs if isinstance(step.node.meta["val"], (tuple, list)) else refs[0]

    def _cast(self, step: Step, bound: arguments.Bound, output: TensorSpec) -> Ref:
        source = _first_ref(bound)
        if bound.get("copy") and self.emitter.specs[source] == output:
            clone: arguments.Bound = {"self": source}
            return self.emitter.emit(step, torch.ops.aten.clone.default, clone, (output,))[0]
        return self.emitter.cast(step, source, output)

    def _changes_nothing(
        self, op: torch._ops.OpOverload, family: str, bound: arguments.Bound, output: TensorSpec
    ) -> bool:
        if family in SAME_SHAPE_IDENTITIES:
            return self.emitter.specs[_first_ref(bound)] == output
        if str(op) == "aten.cat.default":
            return len(tuple(refs_in(bound["tensors"]))) == 1
        if str(op) == "aten.slice.Tensor":
            extent = output.shape[int(bound["dim"])]  # type: ignore[arg-type]
            unchanged = self.emitter.specs[_first_ref(bound)] == output
            return unchanged and bound["end"] == arguments.size_arg(extent)
        return False

    def _output_specs(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        traced = node.meta["val"]
        tensors = traced if isinstance(traced, (tuple, list)) else (traced,)
        if not all(isinstance(t, Tensor) for t in tensors):
            raise CaptureError(f"{node.target} returns values that are not tensors")
        return tuple(self.emitter.sizes.spec(t) for t in tensors)


def _fail(node: fx.Node, message: str) -> NoReturn:
    where, path = location_in_stack(node.meta.get("stack_trace")), module_path(node)
    place = ", ".join(part for part in (where, path and f"module {path}") if part)
    raise CaptureError(f"{place}: {message}" if place else message) from None


def _has_tensor(traced: object) -> bool:
    if isinstance(traced, (tuple, list)):
        return any(isinstance(item, Tensor) for item in traced)
    return isinstance(traced, Tensor)


def _first_ref(bound: arguments.Bound) -> Ref:
    return next(refs_in(tuple(bound.values())))
