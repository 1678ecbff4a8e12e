"""Floating-point operations of one op, forward and backward.

A multiply-add counts as two. Ops that are matrix products at heart are described by their
`Contraction`s, which the time model also reads the sizes from. The backward pass of a product
is one product of the same sizes per operand that needs a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from autopar.costs.attention import is_attention
from autopar.costs.local_op import LocalOp, LocalShape
from autopar.costs.strides import VIEW_OPS

ATTENTION_BACKWARD_FACTOR = 2.5
"""Five products in the backward of fused attention (scores are recomputed) to two in the forward;
Dao, FlashAttention-2, 2023, section 4.1 counts the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """`batch` independent products of an `m x k` with a `k x n` matrix.

    The `m` rows may be dealt to `groups`, each with a right matrix of its own.
    """

    batch: int = 1
    groups: int = 1
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """2 batch m n k."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFlops:
    """Operations of one op in each pass."""

    forward_flops: float
    backward_flops: float


def _linear(op: LocalOp) -> Contraction:
    *rows, k = op.input_shapes[0]
    return Contraction(m=prod(rows), n=prod(op.input_shapes[1][:-1]), k=k)


def _matmul_of(first: int) -> Callable[[LocalOp], Contraction]:
    def contraction(op: LocalOp) -> Contraction:
        left, right = op.input_shapes[first], op.input_shapes[first + 1]
        k = left[-1] if left else 1
        n = right[-1] if len(right) > 1 else 1
        if len(right) <= 2:
            return Contraction(m=prod(left[:-1]), n=n, k=k)
        m = left[-2] if len(left) > 1 else 1
        return Contraction(batch=prod(op.output_shapes[0]) // max(1, m * n), m=m, n=n, k=k)

    return contraction


def _einsum(op: LocalOp) -> Contraction:
    """Sizes by index: in both operands and the output, in one of them, or summed.

    More than two operands are contracted one after the other; the first pair stands for all.
    """
    terms, output = einsum_terms(op)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, op.input_shapes, strict=True):
        sizes.update(zip(term, shape, strict=True))
    left, right = set(terms[0]), set().union(*terms[1:]) if len(terms) > 1 else set()

    def size(indices: set[str]) -> int:
        return prod(sizes[index] for index in indices)

    kept = set(output)
    return Contraction(
        batch=size(left & right & kept),
        m=size((left - right) & kept),
        n=size((right - left) & kept),
        k=size((left | right) - kept),
    )


def einsum_terms(op: LocalOp) -> tuple[list[list[str]], list[str]]:
    """Index names of each operand and of the output; `...` becomes the indices `.0`, `.1`, ...

    An ellipsis is numbered from the right, so that operands broadcast as in torch.
    """
    equation = str(op.arg(0, "equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = [
        _expand_ellipsis(term, len(shape))
        for term, shape in zip(left.split(","), op.input_shapes, strict=True)
    ]
    if arrow:
        rank = len(op.output_shapes[0])
        return terms, _expand_ellipsis(right, rank)
    letters = [index for term in terms for index in term]
    return terms, sorted(index for index in set(letters) if letters.count(index) == 1)


def _expand_ellipsis(term: str, rank: int) -> list[str]:
    head, dots, tail = term.partition("...")
    missing = rank - len(head) - len(tail) if dots else 0
    return [*head, *(f".{i}" for i in reversed(range(missing))), *tail]


def _conv(op: LocalOp) -> Contraction:
    """`weight` is (out, in / groups, *kernel)."""
    weight, output = op.input_shapes[1], op.output_shapes[0]
    groups = max(1, op.input_shapes[0][1] // max(1, weight[1]))
    positions = output[0] * prod(output[2:])
    return Contraction(batch=groups, m=positions, n=weight[0] // groups, k=prod(weight[1:]))


def _conv_transpose(op: LocalOp) -> Contraction:
    """`weight` is (in, out / groups, *kernel)."""
    data, weight = op.input_shapes[0], op.input_shapes[1]
    groups = max(1, op.output_shapes[0][1] // max(1, weight[1]))
    positions = data[0] * prod(data[2:])
    return Contraction(batch=groups, m=positions, n=prod(weight[1:]), k=data[1] // groups)


def _grouped_mm(op: LocalOp) -> Contraction:
    """Rows of the first operand are dealt to the experts of the second, (experts, k, n)."""
    rows, experts = op.input_shapes[0], op.input_shapes[1]
    if len(rows) != 2 or len(experts) != 3:
        return _matmul_of(0)(op)
    return Contraction(groups=max(1, experts[0]), m=rows[0], n=experts[2], k=rows[1])


CONTRACTIONS: dict[str, tuple[Callable[[LocalOp], Contraction], int]] = {
    "linear": (_linear, 0),
    "mm": (_matmul_of(0), 0),
    "bmm": (_matmul_of(0), 0),
    "matmul": (_matmul_of(0), 0),
    "mv": (_matmul_of(0), 0),
    "dot": (_matmul_of(0), 0),
    "addmm": (_matmul_of(1), 1),
    "addmv": (_matmul_of(1), 1),
    "baddbmm": (_matmul_of(1), 1),
    "einsum": (_einsum, 0),
    "convolution": (_conv, 0),
    "_convolution": (_conv, 0),
    "conv1d": (_conv, 0),
    "conv2d": (_conv, 0),
    "conv3d": (_conv, 0),
    "conv_transpose1d": (_conv_transpose, 0),
    "conv_transpose2d": (_conv_transpose, 0),
    "conv_transpose3d": (_conv_transpose, 0),
    "_grouped_mm": (_grouped_mm, 0),
    "grouped_mm": (_grouped_mm, 0),
    "expert_mm": (_grouped_mm, 0),
    "grouped_mm_fallback": (_grouped_mm, 0),
}
"""Op name to its contraction and the position of the first operand among the tensor inputs."""

ELEMENTWISE_FLOPS: dict[str, int] = {
    "gelu": 15,
    "silu": 8,
    "sigmoid": 8,
    "tanh": 8,
    "exp": 6,
    "log": 6,
    "sin": 8,
    "cos": 8,
    "erf": 10,
    "pow": 4,
    "softmax": 10,
    "_softmax": 10,
    "log_softmax": 10,
    "layer_norm": 8,
    "group_norm": 8,
    "batch_norm": 8,
    "rms_norm": 6,
    "cross_entropy_loss": 12,
    "cross_entropy_sum": 12,
}
"""Operations per element of ops that are no plain sum or product; all others count 1. Rough: these
ops are bound by memory on every device in the table."""


def contraction(op: LocalOp) -> Contraction | None:
    """The matrix product an op is at heart, or None."""
    entry = CONTRACTIONS.get(op.name)
    return entry[0](op) if entry else None


def contraction_gradients(op: LocalOp) -> int:
    """How many operands of a contraction need a gradient."""
    first = CONTRACTIONS[op.name][1]
    last = len(op.input_shapes) if op.name == "einsum" else first + 2
    return sum(op.needs_grad(i) for i in range(first, last))


def attention_contractions(op: LocalOp) -> tuple[Contraction, Contraction]:
    """Scores and weighted values. Query (..., q, d), value (..., kv, dv)."""
    query, value = op.input_shapes[0], op.input_shapes[2]
    rows, keys, heads = query[-2], value[-2], prod(query[:-2])
    return (
        Contraction(batch=heads, m=rows, n=keys, k=query[-1]),
        Contraction(batch=heads, m=rows, n=value[-1], k=keys),
    )


def scores_shape(op: LocalOp) -> LocalShape:
    """Shape of the attention scores, (..., q, kv)."""
    return (*op.input_shapes[0][:-1], op.input_shapes[1][-2])


def is_causal(op: LocalOp) -> bool:
    """Whether an attention op skips the upper triangle."""
    return bool(op.arg(5, "is_causal", default=False))


def op_flops(op: LocalOp) -> OpFlops:
    """Forward and backward operations of `op`; views count none."""
    if op.name in VIEW_OPS:
        return OpFlops(forward_flops=0.0, backward_flops=0.0)
    if is_attention(op.name):
        forward = float(sum(part.flops for part in attention_contractions(op)))
        forward *= 0.5 if is_causal(op) else 1.0
        needed = any(op.needs_grad(i) for i in range(3))
        return OpFlops(
            forward_flops=forward, backward_flops=ATTENTION_BACKWARD_FACTOR * forward * needed
        )
    if product := contraction(op):
        return OpFlops(
            forward_flops=float(product.flops),
            backward_flops=float(product.flops * contraction_gradients(op)),
        )
    forward = float(op.numel * ELEMENTWISE_FLOPS.get(op.name, 1))
    return OpFlops(forward_flops=forward, backward_flops=2 * forward * op.requires_grad)
