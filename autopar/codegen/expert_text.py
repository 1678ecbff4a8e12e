"""The ops of dropless experts as calls of the runtime's kernels."""

from __future__ import annotations

from collections.abc import Callable

from autopar.codegen.targets import Call

ExpertPrinter = Callable[[Call, str], str]
"""Takes the axis over which experts are exchanged, or an empty text."""


def _called(name: str, arguments: int, exchanged: int = 0) -> ExpertPrinter:
    """A kernel called with the first arguments of the op; with more where it exchanges."""

    def printer(call: Call, axis: str) -> str:
        if axis:
            return f"kernels.{name}_exchange({', '.join([*call.args[:exchanged], axis])})"
        return f"kernels.{name}({', '.join(call.args[:arguments])})"

    return printer


def _to_experts(call: Call, axis: str) -> str:
    """Each row as often as its token has choices."""
    rows, slots = call.input_shapes[0][0], call.node.outputs[0].shape[0]
    times = (slots.const or slots.per_sample) // (rows.const or rows.per_sample)
    repeated = [] if times == 1 else [str(times)]
    if axis:
        return f"kernels.to_experts_exchange({', '.join([*call.args, axis, *repeated])})"
    return f"kernels.to_experts({', '.join([*call.args[:2], *repeated])})"


EXPERT_PRINTERS: dict[str, ExpertPrinter] = {
    "autopar.grouped_mm.default": _called("grouped_mm", 3),
    "transformers.grouped_mm_fallback.default": _called("grouped_mm", 3),
    "autopar.route.default": _called("route", 2, 2),
    "autopar.to_experts.default": _to_experts,
    "autopar.from_experts.default": _called("from_experts", 2, 4),
    "autopar.expert_mm.default": _called("expert_mm", 3),
    "autopar.expert_rows.default": _called("expert_rows", 2),
}

__all__ = ["EXPERT_PRINTERS"]
