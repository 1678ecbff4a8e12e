"""Writing out repeated calls: a template converted once, then copied under other names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.emit import Emitter, own_path
from autopar.capture.flatten import FlatGraph, Step
from autopar.capture.proxies import REPEATED
from autopar.capture.templates import Template
from autopar.ir.graph import Arg, OpNode, Ref, TensorSpec

Convert = Callable[[Emitter, Sequence[fx.Node]], None]
"""Fills an emitter with the nodes of its graph, whose outputs are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Converted:
    """A template as op nodes that read `_input(i)`; what it returns, with specs."""

    nodes: tuple[OpNode, ...]
    results: tuple[Ref, ...]
    specs: tuple[TensorSpec, ...]
    differentiable: tuple[bool, ...]


class Expander:
    """Writes out calls of the templates."""

    def __init__(self, templates: Sequence[Template], convert: Convert) -> None:
        self._templates = templates
        self._convert = convert
        self._known: dict[Hashable, _Converted] = {}

    def expand(self, emitter: Emitter, step: Step, path: str) -> tuple[Ref, ...]:
        """Add the nodes of one call, made by the module at `path`; what it returns."""
        given, number = step.node.args
        assert isinstance(given, (list, tuple))
        assert isinstance(number, int)
        inputs = [emitter.ref(node) for node in given]
        gradients = tuple(map(emitter.is_differentiable, inputs))
        same = tuple(inputs.index(ref) for ref in inputs)
        key = (number, step.grad, gradients, same)
        template = self._templates[number]
        if key not in self._known:
            self._known[key] = self._converted(emitter, template, inputs, step.grad)
        return _written_out(emitter, self._known[key], inputs, own_path(template.path) or "", path)

    def _converted(
        self, emitter: Emitter, template: Template, inputs: Sequence[Ref], grad: bool
    ) -> _Converted:
        flat = FlatGraph()
        for node in template.graph.nodes:
            if node.op == "placeholder":
                flat.placeholders.append(node)
            else:
                flat.steps.append(Step(node=node, grad=grad))
        inner = emitter.within(flat, [(_input(inputs.index(ref)), ref) for ref in inputs])
        self._convert(inner, template.made_nodes)
        results = tuple(map(inner.ref, template.made_nodes))
        return _Converted(
            nodes=tuple(inner.nodes),
            results=results,
            specs=tuple(inner.specs[ref] for ref in results),
            differentiable=tuple(map(inner.is_differentiable, results)),
        )


def is_repeated(node: fx.Node) -> bool:
    """Whether a node stands for the nodes of a template."""
    return node.target is REPEATED


def _input(index: int) -> Ref:
    return Ref(f"%{index}")


def _written_out(
    emitter: Emitter, converted: _Converted, inputs: Sequence[Ref], old: str, new: str
) -> tuple[Ref, ...]:
    refs: dict[str, Ref | str] = {_input(i).name: ref for i, ref in enumerate(inputs)}

    def ref(value: Ref) -> Ref:
        found = refs[value.name]
        return found if isinstance(found, Ref) else Ref(found, value.index)

    def arg(value: Arg) -> Arg:
        if isinstance(value, Ref):
            return ref(value)
        return tuple(map(arg, value)) if isinstance(value, tuple) else value

    for node in converted.nodes:
        name = refs[node.name] = emitter.unique_name(node.name)
        path = node.module_path
        emitter.nodes.append(
            OpNode(
                name=name,
                target=node.target,
                args=tuple(map(arg, node.args)),
                kwargs=tuple((key, arg(value)) for key, value in node.kwargs)
                if node.kwargs
                else (),
                outputs=node.outputs,
                requires_grad=node.requires_grad,
                module_path=new + path[len(old) :] if path.startswith(old) else path,
                source=node.source,
            )
        )
    results = tuple(map(ref, converted.results))
    emitter.know(results, converted.specs, converted.differentiable)
    return results
