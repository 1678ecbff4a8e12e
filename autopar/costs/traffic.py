"""Bytes one op moves between memory and the compute units, forward and backward.

Kernels are taken as fused the way torch has them: each input is read once, each output written
once. The backward pass reads the gradients of the outputs and what was kept (`saved_table`), and
writes the gradients of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from autopar.costs.attention import DROPOUT, FUSED, attention_kernel
from autopar.costs.flops import CONTRACTIONS, contraction_gradients, scores_shape
from autopar.costs.local_op import LocalOp
from autopar.costs.saved_table import KEEPS_ALL, keep_rule
from autopar.costs.strides import MAY_VIEW_OPS, VIEW_OPS
from autopar.ir.graph import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes moved and kernels started by one op in each pass."""

    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_kernels: int = 1
    backward_kernels: int = 1


FREE = Traffic(forward_kernels=0, backward_kernels=0)


def op_traffic(op: LocalOp, device_kind: str = "cuda") -> Traffic:
    """What `op` moves. Views move nothing forward; a few gather or spread gradients backward.

    What stays in registers is moved in neither pass, and a chain is one kernel: its last op's
    forward, its first op's backward. A CPU takes itself what a host takes to start an op, even one
    that moves nothing.
    """
    whole = _unfused(op, device_kind)
    if device_kind == "cpu" and op.output_shapes:
        whole = replace(
            whole,
            forward_kernels=max(whole.forward_kernels, 1),
            backward_kernels=max(whole.backward_kernels, int(op.requires_grad)),
        )
    if not op.is_fused:
        return whole
    inside = sum(map(op.input_bytes, op.fused_inputs)) + op.output_bytes(0) * op.fused_output
    return Traffic(
        forward_bytes=max(0, whole.forward_bytes - inside),
        backward_bytes=max(0, whole.backward_bytes - inside),
        forward_kernels=0 if op.fused_output else whole.forward_kernels,
        backward_kernels=0 if op.fused_inputs else whole.backward_kernels,
    )


def _unfused(op: LocalOp, device_kind: str) -> Traffic:
    if not op.output_shapes or is_identity(op):
        return FREE
    if op.name in VIEW_OPS and not op.copies:
        return _view(op)
    if op.name == "scaled_dot_product_attention":
        return _attention(op, device_kind)
    forward = op.total_input_bytes + op.total_output_bytes + _unlisted(op)
    if op.name in _ROW_GATHERS:
        forward = 2 * op.total_output_bytes + _index_bytes(op)
    if not op.requires_grad:
        return Traffic(forward_bytes=forward, backward_kernels=0)
    if op.name in _FREE_BACKWARD:
        return Traffic(forward_bytes=forward, backward_kernels=0)
    kernels = contraction_gradients(op) if op.name in CONTRACTIONS else 1
    return Traffic(
        forward_bytes=forward,
        backward_bytes=_gather_backward(op) if op.name in _ROW_GATHERS else _backward(op),
        backward_kernels=max(1, kernels),
    )


def is_identity(op: LocalOp) -> bool:
    """Whether an op that may return its input does so here."""
    if op.name not in MAY_VIEW_OPS:
        return False
    if op.name in ("to", "type_as"):
        return op.input_dtypes[:1] == op.output_dtypes[:1]
    if op.name == "contiguous":
        return not op.copies
    return not op.arg(2, "train", True) or op.arg(1, "p", 0.5) == 0


_FREE_BACKWARD = frozenset({"reshape", "flatten", "contiguous", "clone", "cat", "stack"})
"""Copies whose gradient is a view of the gradient of the result."""

_ROW_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "to_experts"})
"""Ops that read only the rows an index names; the gradient is a zeroed tensor added into."""


def _view(op: LocalOp) -> Traffic:
    rule = _VIEW_BACKWARD.get(op.name)
    nbytes = rule(op) if rule and op.requires_grad else 0
    return Traffic(forward_kernels=0, backward_bytes=nbytes) if nbytes else FREE


def _slice_backward(op: LocalOp) -> int:
    """Zeros of the whole input, then the gradient copied into its part."""
    return op.input_bytes(0) + 2 * op.total_output_bytes


def _split_backward(op: LocalOp) -> int:
    """The gradients of the parts put together."""
    return 2 * op.input_bytes(0)


def _expand_backward(op: LocalOp) -> int:
    """A sum over the repeated dims; nothing where no dim is repeated."""
    same = op.input_bytes(0) == op.output_bytes(0)
    return 0 if same else op.input_bytes(0) + op.output_bytes(0)


_VIEW_BACKWARD: dict[str, Callable[[LocalOp], int]] = {
    **dict.fromkeys(("slice", "select", "narrow", "diagonal", "unfold"), _slice_backward),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split_backward),
    **dict.fromkeys(("unbind", "unsafe_split", "unsafe_chunk"), _split_backward),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand_backward),
}


def _gradient_bytes(op: LocalOp) -> int:
    return sum(op.input_bytes(i) for i in range(len(op.input_shapes)) if op.needs_grad(i))


def _backward(op: LocalOp) -> int:
    needs = tuple(op.needs_grad(i) for i in range(len(op.input_shapes)))
    rule = keep_rule(op.target) or KEEPS_ALL
    kept = sum(map(op.input_bytes, rule.kept_inputs(needs)))
    kept += sum(map(op.output_bytes, rule.kept_outputs(len(op.output_shapes))))
    reads = max(1, contraction_gradients(op)) if op.name in CONTRACTIONS else 1
    return reads * op.total_output_bytes + kept + _gradient_bytes(op) + _unlisted(op)


def _index_bytes(op: LocalOp) -> int:
    integers = (i for i, dtype in enumerate(op.input_dtypes) if dtype.startswith("int"))
    return sum(map(op.input_bytes, integers))


def _gather_backward(op: LocalOp) -> int:
    """Zeros of the whole table, then each row of the gradient read and added to its row."""
    return _gradient_bytes(op) + 3 * op.total_output_bytes + _index_bytes(op)


def _unlisted(op: LocalOp) -> int:
    """Tensors between the passes that are no values of the graph: masks, log-softmax."""
    return _UNLISTED[op.name](op) if op.name in _UNLISTED else 0


_UNLISTED: dict[str, Callable[[LocalOp], int]] = {
    "dropout": lambda op: prod(op.output_shapes[0]),
    "cross_entropy_loss": lambda op: 3 * op.input_bytes(0),
    "cross_entropy_sum": lambda op: 3 * max(4 * prod(op.input_shapes[0]), op.input_bytes(0)),
    "max_pool2d": lambda op: 8 * prod(op.output_shapes[0]),
}

_SCORE_PASSES: dict[str, tuple[int, int]] = {"math": (4, 6), DROPOUT: (7, 9)}
"""Reads and writes of the scores where they are written out: forward scores w, softmax r w,
product r, with dropout r w and r of the product; backward the same and one more each."""


def _attention(op: LocalOp, device_kind: str) -> Traffic:
    kernel = attention_kernel(op, op.input_shapes[:3], op.input_dtypes[0], device_kind)
    ends = op.total_input_bytes + op.total_output_bytes
    forward, backward = ends, 2 * ends + _gradient_bytes(op)
    if kernel != FUSED:
        scores = prod(scores_shape(op)) * DTYPE_BYTES[op.input_dtypes[0]]
        passes = _SCORE_PASSES[kernel]
        forward, backward = forward + passes[0] * scores, backward + passes[1] * scores
    if not op.requires_grad:
        return Traffic(forward_bytes=forward, backward_kernels=0)
    return Traffic(forward_bytes=forward, backward_bytes=backward)
