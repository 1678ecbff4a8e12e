"""Working set of a block beyond what it saves: a liveness walk, forward and backward.

A value is live from the node that makes it to its last reader: generated code drops its locals so.
What is saved for backward, parameters, and values from outside the block are held anyway, and are
other terms of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from autopar.costs.local_op import op_name
from autopar.costs.saved import SavedSet
from autopar.costs.strides import StorageMap, is_view
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec

Bytes = Callable[[Ref], int]
"""Local bytes of a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transients:
    """Largest working set of a block in each pass."""

    forward_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The larger of both."""
        return max(self.forward_bytes, self.backward_bytes)


def transient_bytes(
    nodes: Sequence[OpNode],
    nbytes: Bytes,
    *,
    specs: Mapping[Ref, TensorSpec],
    storage: StorageMap,
    saved: SavedSet,
    differentiable: Set[Ref],
    outputs: Collection[Ref] = (),
    parameters: Collection[Ref] = (),
) -> Transients:
    """Working set of `nodes` at local sizes.

    `outputs` are live to the end of the forward pass, and their gradients from the start of the
    backward pass. The gradient of one of `parameters` is live only while it is added to the
    accumulated one; those of other inputs to the end.
    """
    block = _Block(nodes=nodes, nbytes=nbytes, specs=specs, outputs=outputs)
    held = {value.ref for value in saved.values}
    return Transients(
        forward_bytes=_forward(block, storage, held),
        backward_bytes=_backward(block, storage, differentiable, parameters),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    nodes: Sequence[OpNode]
    nbytes: Bytes
    specs: Mapping[Ref, TensorSpec]
    outputs: Collection[Ref]

    def numel(self, ref: Ref) -> int:
        return self.nbytes(ref) // self.itemsize(ref)

    def itemsize(self, ref: Ref) -> int:
        return DTYPE_BYTES[self.specs[ref].dtype]

    def workspace(self, node: OpNode, table: Mapping[str, _Workspace]) -> int:
        rule = table.get(op_name(node.target))
        return rule(self, node.inputs()[0]) if rule else 0


def _forward(block: _Block, storage: StorageMap, held: Set[Ref]) -> int:
    nodes = block.nodes
    last_use: dict[Ref, int] = {}
    for step, node in enumerate(nodes):
        refs = (*node.inputs(), *_outputs(node))
        last_use.update((storage.base(ref), step) for ref in refs)
    last_use.update((storage.base(ref), len(nodes)) for ref in block.outputs)
    live: dict[Ref, int] = {}
    peak = 0
    for step, node in enumerate(nodes):
        for ref in _outputs(node):
            if storage.base(ref) == ref and ref not in held:
                live[ref] = block.nbytes(ref)
        peak = max(peak, sum(live.values()) + block.workspace(node, FORWARD_WORKSPACE))
        live = {ref: size for ref, size in live.items() if last_use[ref] > step}
    return peak


def _backward(
    block: _Block, storage: StorageMap, differentiable: Set[Ref], parameters: Collection[Ref]
) -> int:
    nbytes, root = block.nbytes, _gradient_roots(block, storage)
    live = {root.get(ref, ref) for ref in block.outputs if ref in differentiable}
    dropped = frozenset(parameters)
    peak = 0
    for node in reversed(block.nodes):
        if not node.requires_grad:
            continue
        made = {root.get(ref, ref) for ref in _outputs(node) if ref in differentiable}
        read = {root.get(ref, ref) for ref in node.inputs() if ref in differentiable}
        added = sum(map(nbytes, (read & live) - made))  # a second gradient, before it is added
        work = block.workspace(node, BACKWARD_WORKSPACE)
        peak = max(peak, sum(map(nbytes, live | made | read)) + added + work)
        live = ((live - made) | read) - dropped
    return peak


def _outputs(node: OpNode) -> tuple[Ref, ...]:
    return tuple(Ref(node.name, index) for index in range(len(node.outputs)))


def _gradient_roots(block: _Block, storage: StorageMap) -> dict[Ref, Ref]:
    """Views of a whole value: their gradient is a view of the value's gradient."""
    root: dict[Ref, Ref] = {}
    for node in block.nodes:
        inputs, output = node.inputs(), Ref(node.name)
        view = is_view(node.target) and storage.base(output) != output
        if view and block.nbytes(inputs[0]) == block.nbytes(output):
            root[output] = root.get(inputs[0], inputs[0])
    return root


def _wide_copy(block: _Block, logits: Ref) -> int:
    """Logits narrower than float32 are widened first."""
    return 0 if block.itemsize(logits) >= 4 else 4 * block.numel(logits)


def _softmax_copy(block: _Block, logits: Ref) -> int:
    """The softmax that the gradient of the logits is made from, float32 at least."""
    return max(4, block.itemsize(logits)) * block.numel(logits)


def _query_accumulator(block: _Block, query: Ref) -> int:
    """Fused attention adds up the gradient of the query in float32."""
    return 4 * block.numel(query)


def _wide_copies(block: _Block, x: Ref) -> int:
    """Batch norm of narrow values: they and their result, in float32."""
    return 2 * _wide_copy(block, x)


def _normed_again(block: _Block, x: Ref) -> int:
    """Batch norm: the normed values once more; of narrow ones also both gradients, in float32."""
    wide = max(4, block.itemsize(x)) * block.numel(x)
    return wide + 2 * _wide_copy(block, x)


_Workspace = Callable[[_Block, Ref], int]

FORWARD_WORKSPACE: dict[str, _Workspace] = {
    "cross_entropy_sum": _wide_copy,
    "batch_norm": _wide_copies,
}
BACKWARD_WORKSPACE: dict[str, _Workspace] = {
    "batch_norm": _normed_again,
    "cross_entropy_sum": _softmax_copy,
    "cross_entropy_loss": _softmax_copy,
    "scaled_dot_product_attention": _query_accumulator,
}
"""Temporaries inside kernels that are as large as the first input."""
