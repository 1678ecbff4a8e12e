"""Pointwise chains that run as one kernel, where what runs a plan fuses them.

The programs that autopar emits run op by op. Frameworks with kernels of their own for such chains
(bias and GELU; dropout and residual; the two halves of a gated unit; rotary positions), and
compilers, keep a value between two pointwise ops in registers: it is neither written nor read, and
its maker starts no kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costs.local_op import op_name
from autopar.ir.graph import OpNode, Ref

FUSIBLE = frozenset(
    {"add", "sub", "mul", "div", "neg", "pow", "rsqrt", "silu", "gelu", "relu", "dropout", "tanh"}
)
"""Ops by name that work element by element."""


def fused_values(nodes: Sequence[OpNode]) -> frozenset[Ref]:
    """Values that pointwise ops make for one reader alone, which is pointwise too."""
    readers: dict[Ref, list[OpNode]] = {}
    for node in nodes:
        for ref in node.inputs():
            readers.setdefault(ref, []).append(node)
    return frozenset(
        ref
        for node in nodes
        for ref in (Ref(node.name),)
        if op_name(node.target) in FUSIBLE
        and len(readers.get(ref, ())) == 1
        and op_name(readers[ref][0].target) in FUSIBLE
    )
