"""The graph as a line of main nodes: what each reads, and which values cross each point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from autopar.ir.graph import OpGraph, OpNode, Ref, SourceKind, TensorSpec

_MATMUL_NAMES = """
    linear matmul mm bmm addmm addbmm baddbmm einsum bilinear _grouped_mm convolution conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d lstm gru rnn_tanh rnn_relu
"""
_RANDOM_NAMES = """
    rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial
    dropout feature_dropout alpha_dropout poisson
"""
MATMULS = frozenset(f"aten.{name}" for name in _MATMUL_NAMES.split())
MATMULS |= {"autopar.grouped_mm", "autopar.expert_mm"}
RANDOM = frozenset(f"aten.{name}" for name in _RANDOM_NAMES.split())
"""Ops that draw random numbers: computed once, in one block, never again in each stage."""

ONCE = RANDOM | {"autopar.batch_norm"}
"""These, and ops that update state."""

STATE = (SourceKind.PARAMETER, SourceKind.BUFFER)


class Flow:
    """Main nodes in order: those that depend on a parameter or draw random numbers.

    Point `i` of the line lies before main node `i`. A value crosses the points between its node
    and its last main reader; the loss crosses all after it. Other outputs of the graph leave from
    the block that makes them and cross nothing.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.specs: dict[Ref, TensorSpec] = graph.specs()
        self.sources = {source.name: source for source in graph.sources}
        self.state = {source.name for source in graph.sources if source.kind in STATE}
        self.differentiable = graph.differentiable()
        parameters = [s.name for s in graph.sources if s.kind is SourceKind.PARAMETER]
        mains = _reached(graph, set(parameters), seeds=ONCE)
        self.main = tuple(node for node in graph.nodes if node.name in mains)
        self.setup = tuple(node.name for node in graph.nodes if node.name not in mains)
        self.position = {node.name: i for i, node in enumerate(self.main)}
        self.last_read = self._last_reads()
        inputs = {s.name for s in graph.sources if s.kind is SourceKind.INPUT}
        with_data = _reached(graph, inputs, seeds=RANDOM) | inputs
        self._weights = (set(parameters) | set(mains)) - with_data
        self._matmuls = _prefix_sums(self._is_weight_matmul(node) for node in self.main)
        self._parametric = _prefix_sums(self._reads_weight(node) for node in self.main)
        self._widths, self._bytes = self._profile()
        self._texts: dict[int, str] = {}
        self.digests: dict[tuple[int, int], str] = {}

    def outputs_text(self, node: OpNode) -> str:
        """The specs of a node's outputs; equal blocks often have them in common."""
        key = id(node.outputs)
        if key not in self._texts:
            self._texts[key] = ", ".join(map(str, node.outputs))
        return self._texts[key]

    def __len__(self) -> int:
        return len(self.main)

    def width(self, point: int) -> int:
        """How many values cross a point."""
        return self._widths[point]

    def crossing_bytes(self, point: int) -> int:
        """How many bytes cross a point, for the example batch."""
        return self._bytes[point]

    def crossings(self, points: Sequence[int]) -> list[tuple[Ref, ...]]:
        """The values that cross each of some ascending points, in the order they were made."""
        ends: dict[int, list[Ref]] = {}
        for ref, last in self.last_read.items():
            ends.setdefault(last + 1, []).append(ref)
        alive: dict[Ref, None] = {}
        found, at = [], 0
        for point in points:
            while at < point:
                made = (Ref(self.main[at].name, i) for i in range(len(self.main[at].outputs)))
                alive.update(dict.fromkeys(ref for ref in made if ref in self.last_read))
                at += 1
                for ref in ends.get(at, ()):
                    alive.pop(ref, None)
            found.append(tuple(alive))
        return found

    def matmuls(self, start: int, end: int) -> int:
        """Matrix products with a weight among main nodes `start` to `end - 1`."""
        return self._matmuls[end] - self._matmuls[start]

    def has_parameters(self, start: int, end: int) -> bool:
        """Whether any of these main nodes reads a parameter."""
        return self._parametric[end] > self._parametric[start]

    def shared_path(self, point: int) -> int:
        """How many components the module paths on both sides of a point have in common."""
        before = self.main[point - 1].module_path.split(".")
        after = self.main[point].module_path.split(".")
        count = 0
        for ours, theirs in zip(before, after, strict=False):
            if ours != theirs:
                break
            count += 1
        return count

    def _last_reads(self) -> dict[Ref, int]:
        last: dict[Ref, int] = {}
        for i, node in enumerate(self.main):
            last.update({ref: i for ref in node.inputs() if ref.name in self.position})
        if self.graph.loss is not None and self.graph.loss.name in self.position:
            last[self.graph.loss] = len(self.main)
        return last

    def _profile(self) -> tuple[list[int], list[int]]:
        """Number and bytes of the values that cross each point."""
        batch = self.graph.example_batch
        widths, nbytes = [0] * (len(self.main) + 2), [0] * (len(self.main) + 2)
        for ref, last in self.last_read.items():
            first, size = self.position[ref.name] + 1, self.specs[ref].nbytes(batch)
            widths[first] += 1
            widths[last + 1] -= 1
            nbytes[first] += size
            nbytes[last + 1] -= size
        return list(accumulate(widths)), list(accumulate(nbytes))

    def _reads_weight(self, node: OpNode) -> bool:
        return any(ref.name in self._weights for ref in node.inputs())

    def _is_weight_matmul(self, node: OpNode) -> bool:
        if node.op not in MATMULS and node.op.startswith(("aten.", "autopar.")):
            return False
        weights = (ref for ref in node.inputs() if ref.name in self._weights)
        return any(len(self.specs[ref].shape) >= 2 for ref in weights)


def _reached(graph: OpGraph, names: set[str], seeds: frozenset[str]) -> set[str]:
    """The nodes that depend on one of `names`, or on a node whose op is in `seeds`."""
    found: set[str] = set()
    for node in graph.nodes:
        inputs = {ref.name for ref in node.inputs()}
        if node.op in seeds or inputs & names or inputs & found:
            found.add(node.name)
    return found


def _prefix_sums(flags: Iterable[bool]) -> list[int]:
    return [0, *accumulate(map(int, flags))]
