"""Small graphs written by hand. A size is an int, or text such as `batch` or `16*batch`."""

from __future__ import annotations

from typing import Any

from autopar.ir.graph import OpGraph, OpNode, Ref, Source, SourceKind, TensorSpec
from autopar.ir.size import Size
from autopar.rules import axis_strategies


def spec(*shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(
        shape=tuple(Size(s) if isinstance(s, int) else Size.parse(s) for s in shape), dtype=dtype
    )


class Builder:
    """Collects sources and nodes; every method gives the Ref of what it adds."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.nodes: list[OpNode] = []

    def _source(self, name: str, kind: SourceKind, value: TensorSpec, trainable: bool) -> Ref:
        source = Source(name=name, kind=kind, fqn=name, spec=value, trainable=trainable)
        self.sources.append(source)
        return Ref(name)

    def input(self, name: str, *shape: int | str, dtype: str = "float32") -> Ref:
        return self._source(name, SourceKind.INPUT, spec(*shape, dtype=dtype), False)

    def parameter(self, name: str, *shape: int | str) -> Ref:
        return self._source(name, SourceKind.PARAMETER, spec(*shape), True)

    def buffer(self, name: str, *shape: int | str) -> Ref:
        return self._source(name, SourceKind.BUFFER, spec(*shape), False)

    def op(self, name: str, target: str, *args: Any, out: Any, **kwargs: Any) -> Ref:
        """A node; `out` is the shape of its output, a spec, or a list of specs."""
        specs = (
            out if isinstance(out, list) else [out if isinstance(out, TensorSpec) else spec(*out)]
        )
        node = OpNode(
            name=name,
            target=target,
            args=args,
            kwargs=tuple(kwargs.items()),
            outputs=tuple(specs),
            requires_grad=True,
        )
        self.nodes.append(node)
        return Ref(name)

    def build(self, loss: Ref | None = None, *outputs: Ref) -> OpGraph:
        return OpGraph(
            sources=tuple(self.sources), nodes=tuple(self.nodes), loss=loss, outputs=outputs
        )


def strategies(
    target: str, inputs: list[TensorSpec], out: Any, *args: Any, size: int = 4, **options: Any
) -> list[str]:
    """The strategies of one op on `inputs` followed by `args`, as text."""
    builder = Builder()
    refs = [builder.input(f"t{i}", dtype=s.dtype) for i, s in enumerate(inputs)]
    specs = dict(zip(refs, inputs, strict=True))
    builder.op("op", target, *refs, *args, out=out)
    batch, hints = options.get("batch", 8), options.get("hints", {})
    found = axis_strategies(builder.nodes[0], specs, size=size, batch=batch, hints=hints)
    return [str(strategy) for strategy in found]
