"""A hash of a run of nodes that is equal for runs that compute the same.

It covers ops, arguments, shapes, dtypes, wiring, the shapes of parameters and whether they train,
and which values leave. Names, module paths and the identity of parameters and shared values do not
count: equal runs may read other weights, or another mask of the same shape.
"""

from __future__ import annotations

import hashlib

from autopar.capture.flow import STATE, Flow
from autopar.ir.graph import Arg, OpNode, Ref


class _Numbering:
    """Gives each outside value a role and a number in order of first use."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._local: dict[str, int] = {}
        self._roles: dict[Ref, str] = {}
        self._counts = {"input": 0, "shared": 0, "state": 0}

    def define(self, node: OpNode) -> None:
        self._local[node.name] = len(self._local)

    def ref(self, ref: Ref) -> str:
        if ref.name in self._local:
            return f"%{self._local[ref.name]}.{ref.index}"
        if ref not in self._roles:
            self._roles[ref] = self._role(ref)
        return self._roles[ref]

    def _role(self, ref: Ref) -> str:
        source = self._flow.sources.get(ref.name)
        if source is not None and source.kind in STATE:
            kind, detail = "state", f"{source.kind}:{source.trainable}"
        else:
            kind = "input" if ref.name in self._flow.position else "shared"
            detail = str(ref in self._flow.differentiable)
        number = self._counts[kind]
        self._counts[kind] += 1
        return f"{kind}{number}:{detail}:{self._flow.specs[ref]}"


def digest(flow: Flow, start: int, end: int) -> str:
    """The hash of main nodes `start` to `end - 1`."""
    if (start, end) not in flow.digests:
        flow.digests[start, end] = _digest(flow, start, end)
    return flow.digests[start, end]


def _digest(flow: Flow, start: int, end: int) -> str:
    numbering = _Numbering(flow)
    lines = []
    for node in flow.main[start:end]:
        args = [_text(value, numbering) for value in node.args]
        kwargs = [f"{key}={_text(value, numbering)}" for key, value in node.kwargs]
        outputs = flow.outputs_text(node)
        lines.append(f"{node.target}({args}, {kwargs}) -> {outputs} {node.requires_grad}")
        numbering.define(node)
    lines.append(str([numbering.ref(ref) for ref in leaving(flow, start, end)]))
    lines.append(str(flow.graph.loss is not None and _makes(flow, flow.graph.loss, start, end)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def leaving(flow: Flow, start: int, end: int) -> tuple[Ref, ...]:
    """The values made by main nodes `start` to `end - 1` that later ones or the outputs read."""
    outputs = set(flow.graph.outputs)
    return tuple(
        ref
        for node in flow.main[start:end]
        for ref in (Ref(node.name, i) for i in range(len(node.outputs)))
        if ref in outputs or flow.last_read.get(ref, -1) >= end
    )


def _makes(flow: Flow, ref: Ref, start: int, end: int) -> bool:
    return start <= flow.position.get(ref.name, -1) < end


def _text(value: Arg, numbering: _Numbering) -> str:
    if isinstance(value, Ref):
        return numbering.ref(value)
    if isinstance(value, tuple):
        return f"({', '.join(_text(item, numbering) for item in value)})"
    return repr(value)
