"""One legal way to run an op over one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES
from autopar.ir.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerCollective:
    """Communication inside a kernel: a tensor shaped like the local part of input `like_input`.

    `phase` is `forward` or `backward`; `dtype` that of the message. The message has `times` as many
    elements as the input (or as these `dims` of it alone), or just `numel` where that is given.
    `turns` tells how often it runs on an axis of `n` ranks: once (0), or `n - 1` (1) or `n` (2)
    times, as messages that go round.
    """

    op: CollectiveOp
    phase: str
    like_input: int
    dtype: str
    times: int = 1
    dims: tuple[int, ...] | None = None
    numel: int | None = None
    turns: int = 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of the message, given the local shape of the input."""
        kept = shape if self.dims is None else [shape[dim] for dim in self.dims]
        count = prod(kept) * self.times if self.numel is None else self.numel
        return count * DTYPE_BYTES[self.dtype]

    def count(self, size: int) -> int:
        """How often it runs on an axis of `size` ranks."""
        return 1 if self.turns == 0 else size - 2 + self.turns


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisStrategy:
    """Placements of an op's tensor inputs (in the order of `OpNode.inputs()`) and outputs.

    With inputs so placed, running the op on local parts gives outputs so placed, and autograd on
    the local ops gives gradients placed as `ir.placement` says. `kernel` names what runs on the
    local parts: `local` is the op itself with its size arguments cut to local sizes; any other
    name is a function of the runtime that knows the axis.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    kernel: str = "local"
    collectives: tuple[InnerCollective, ...] = ()

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        outputs = ", ".join(map(str, self.outputs))
        return f"{inputs} -> {outputs}" + ("" if self.kernel == "local" else f" [{self.kernel}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAxis:
    """How the graph runs when the samples are split, over data-parallel ranks or micro-batches.

    `strategies` has the one strategy of every node by name. `setup_sums` are values that are summed
    over all samples before the first micro-batch (a count of valid labels): they depend on the
    batch alone, never on a parameter. `at_once` names nodes whose ranks communicate over the
    samples while they run, each with the reason: all samples must be in one micro-batch. `coupled`
    names nodes that mix samples in a way that has no such split, each with the reason; if it is not
    empty the batch may not be split at all.
    """

    strategies: dict[str, AxisStrategy]
    setup_sums: tuple[str, ...] = ()
    at_once: tuple[tuple[str, str], ...] = ()
    coupled: tuple[tuple[str, str], ...] = ()
