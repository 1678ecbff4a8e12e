"""Symbolic sizes of the exported program as `Size`, affine in the number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.utils._sympy.numbers import int_oo

from autopar.capture.entries import Entries
from autopar.errors import CaptureError
from autopar.ir.graph import DTYPE_BYTES, TensorSpec
from autopar.ir.size import Size

FIXED_SIZES = (
    "keep sizes fixed: torch.where, or a one-hot product; for experts the tokens sorted by expert "
    "and torch.nn.functional.grouped_mm, experts with a capacity, or all experts on all tokens "
    'under a mask (a Hugging Face model does so with experts_implementation="grouped_mm"); else '
    "make the part a torch.library.custom_op"
)
"""What to do where a size depends on data."""

_BATCH = sympy.Symbol("batch", integer=True, positive=True)


class FixedBatch(Exception):
    """The program holds for one number of samples only; the message says why.

    `specialised` tells that the example's size was taken for a constant, which another example
    size may avoid.
    """

    def __init__(self, reason: str, *, specialised: bool = False) -> None:
        super().__init__(reason)
        self.specialised = specialised


class SizeReader:
    """Reads the sizes of one exported program. `symbols` are those that stand for the batch."""

    def __init__(self, symbols: frozenset[sympy.Symbol]) -> None:
        self._symbols = symbols
        self._known: dict[sympy.Expr, Size] = {}

    def size(self, value: int | torch.SymInt) -> Size:
        """Raises FixedBatch on a size that is not affine in the batch, CaptureError on one that
        depends on data."""
        if isinstance(value, int):
            return Size(value)
        expr = value.node.expr
        if expr not in self._known:
            self._known[expr] = self._affine(expr)
        return self._known[expr]

    def spec(self, tensor: Tensor) -> TensorSpec:
        """Shape and dtype of a traced tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise CaptureError(f"dtype {dtype} is not supported")
        return TensorSpec(shape=tuple(self.size(dim) for dim in tensor.shape), dtype=dtype)

    def _affine(self, expr: sympy.Expr) -> Size:
        unknown = expr.free_symbols - self._symbols
        if unknown:
            raise CaptureError(
                "a tensor's size depends on the values of a tensor (nonzero, masked selection, "
                f".item()); {FIXED_SIZES}"
            )
        expr = sympy.expand(expr.xreplace(dict.fromkeys(self._symbols, _BATCH)))
        slope = expr.coeff(_BATCH, 1)
        const = sympy.expand(expr - slope * _BATCH)
        if not (slope.is_Integer and const.is_Integer):
            raise FixedBatch(f"the size {expr} is not proportional to the batch")
        return Size(int(const), int(slope))


def size_reader(
    entries: Entries, inputs: Mapping[str, Tensor], ranges: Mapping[Any, Any]
) -> SizeReader:
    """The reader for a program traced with symbolic samples.

    `inputs` are the traced batch entries, `ranges` the program's range constraints. Raises
    FixedBatch where the trace holds for some batch sizes only.
    """
    symbols: set[sympy.Symbol] = set()
    for key in sorted(entries.sampled):
        samples = inputs[key].shape[0]
        if isinstance(samples, int) or not samples.node.expr.is_Symbol:
            raise FixedBatch("the model fixes its batch size", specialised=True)
        symbols.add(samples.node.expr)
    for symbol in symbols:
        bounds = ranges.get(symbol)
        if bounds is not None and (bounds.lower > 2 or bounds.upper != int_oo):
            raise FixedBatch(
                f"the model branches on its batch size ({bounds.lower} to {bounds.upper})"
            )
    return SizeReader(frozenset(symbols))
