"""What a decision costs: compute and collectives on local shapes, for one micro-batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.mesh import BATCH_AXES, TENSOR
from autopar.ir.placement import R_STAR, Layout, R, Shard, largest_shape
from autopar.ir.size import shape_at
from autopar.plan.flow import Move, move_bytes
from autopar.search.block import Option
from autopar.search.node_costs import NodeCosts, Times
from autopar.search.paths import Paths

ComputeTime = Callable[[OpNode, Option, "Prices"], tuple[float, float]]
CollectiveTime = Callable[[CollectiveOp, float, str], float]
WaitTime = Callable[[str], float]


def no_wait(axis: str) -> float:
    """What ranks wait for each other where all come to a collective at once."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices on one mesh for one micro-batch size.

    `batch` counts the samples of a micro-batch over all data-parallel ranks.
    `compute(node, option, prices)` gives forward and backward seconds, the same for options that
    split alike; `collective(op, nbytes, axis)` seconds, `wait(axis)` those that ranks wait for each
    other where they come to one from compute. `updated` values cannot be moved. `paths` may be
    shared with other prices, and `costs` with those on devices that compute alike. Gradients are
    summed in buckets of `bucket_bytes`, a larger one by itself.
    `scatters` and `fuses_loss` are those of `Execution`.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    batch: int
    specs: Mapping[Ref, TensorSpec]
    differentiable: frozenset[Ref]
    compute: ComputeTime
    collective: CollectiveTime
    wait: WaitTime = no_wait
    updated: frozenset[Ref] = frozenset()
    bucket_bytes: float = 0.0
    paths: Paths = field(default_factory=Paths, repr=False)
    costs: NodeCosts = field(default_factory=NodeCosts, repr=False)
    scatters: bool = False
    fuses_loss: bool = False
    _numel: dict[tuple[Ref, Layout], int] = field(default_factory=dict, init=False, repr=False)
    _seconds: dict[TensorSpec, NDArray[np.float64]] = field(
        default_factory=dict, init=False, repr=False
    )

    def option_s(self, node: OpNode, options: Sequence[Option]) -> Times:
        """Forward and backward seconds of every option, with the collectives inside its kernel."""
        times = self.costs.compute(node, options, self)
        inner = self.costs.inner(node, options, self)
        return times if inner is None else times + inner

    def local_shape(self, ref: Ref, layout: Layout) -> tuple[int, ...]:
        """Shape of a value's largest local part."""
        return largest_shape(shape_at(self.specs[ref].shape, self.batch), layout, self.sizes)

    def local_numel(self, ref: Ref, layout: Layout) -> int:
        """Elements of a value's largest local part."""
        key = (ref, layout)
        numel = self._numel.get(key)
        if numel is None:
            numel = self._numel[key] = prod(self.local_shape(ref, layout))
        return numel

    def local_bytes(self, ref: Ref, layout: Layout) -> int:
        """Bytes of a value's largest local part."""
        return DTYPE_BYTES[self.specs[ref].dtype] * self.local_numel(ref, layout)

    def waited_s(self, op: CollectiveOp, nbytes: float, axis: str) -> float:
        """Seconds of a collective that compute waits for, until the last rank comes to it
        included."""
        return self.collective(op, nbytes, axis) + self.wait(axis)

    def move_s(self, move: Move) -> tuple[float, float]:
        """Forward and backward seconds of one move."""
        return self._move_s(move, self.specs[move.value])

    def _move_s(self, move: Move, spec: TensorSpec) -> tuple[float, float]:
        axis = self.names[move.axis]

        def seconds(op: CollectiveOp | None) -> float:
            if op is None:
                return 0.0
            return self.waited_s(op, move_bytes(spec, move, op, self.sizes, self.batch), axis)

        return seconds(move.transition.forward), seconds(move.transition.backward)

    def reshard_s(
        self, ref: Ref, have: Sequence[Layout], want: Sequence[Layout]
    ) -> NDArray[np.float64]:
        """Seconds, both passes, to bring a value from every layout of `have` to every one of
        `want`; inf where that is impossible."""
        if ref in self.updated:
            same = [[_held(src) == _held(dst) for dst in want] for src in have]
            return np.where(same, 0.0, inf)
        table = self.paths.table(have, want, differentiable=ref in self.differentiable)
        seconds: NDArray[np.float64] = self._moves_s(self.specs[ref], table)[table].sum(axis=2)
        return seconds

    def moves(self, ref: Ref, have: Sequence[Layout], want: Sequence[Layout]) -> set[int]:
        """Which `paths.moves` bring a value from some layout of `have` to some of `want`."""
        if ref in self.updated:
            return set()
        table = self.paths.table(have, want, differentiable=ref in self.differentiable)
        return set(table.ravel().tolist())

    def _moves_s(self, spec: TensorSpec, used: NDArray[np.intp]) -> NDArray[np.float64]:
        """Seconds of the moves of all paths, for values like this one; of those not `used` yet
        NaN."""
        known = self._seconds.get(spec, np.array([0.0, inf]))
        if unknown := len(self.paths.moves) - len(known):
            known = self._seconds[spec] = np.concatenate([known, np.full(unknown, np.nan)])
        for index in set(used[np.isnan(known[used])].tolist()):
            move = self.paths.moves[index]
            if move is not None:
                allowed = self._holds_samples(move, spec)
                known[index] = sum(self._move_s(move, spec)) if allowed else inf
        return known

    def _holds_samples(self, move: Move, spec: TensorSpec) -> bool:
        """Whether a value that grows with the batch holds this rank's samples while it moves on an
        axis that does not split them; else its size would be that of other ranks' samples."""
        grown = [dim for dim, size in enumerate(spec.shape) if size.is_batch]
        if not grown or self.names[move.axis] in BATCH_AXES:
            return True
        return all(
            placement == Shard(grown[0]) or not isinstance(placement, Shard)
            for name, placement in zip(self.names, move.before, strict=True)
            if name in BATCH_AXES
        )

    def inner_s(self, node: OpNode, option: Option) -> tuple[float, float]:
        """Forward and backward seconds of the collectives inside a node's kernel."""
        totals = {"forward": 0.0, "backward": 0.0}
        for axis, size, strategy in zip(self.names, self.sizes, option.strategies, strict=True):
            for inner in strategy.collectives:
                if inner.phase == "backward" and not node.requires_grad:
                    continue
                layout = option.inputs[inner.like_input]
                nbytes = inner.nbytes(self.local_shape(node.inputs()[inner.like_input], layout))
                seconds = sum(
                    self.waited_s(*each)
                    for each in self.inner_collectives(inner.op, nbytes, axis, layout)
                )
                totals[inner.phase] += inner.count(size) * seconds
        return totals["forward"], totals["backward"]

    def bucket_parts(self, nbytes: int) -> float:
        """How many parameters of `nbytes` a bucket holds.

        Buckets are taken to be as full as the parameters of an even stage fill them: a parameter by
        itself would pay the latency that all of its bucket pay once.
        """
        return max(1.0, self.bucket_bytes / nbytes) if nbytes else 1.0

    def inner_collectives(
        self, op: CollectiveOp, nbytes: float, axis: str, layout: Layout
    ) -> Iterator[tuple[CollectiveOp, float, str]]:
        """What a collective inside a kernel is run as: an exchange of a value that tensor ranks
        hold alike may be one of parts, gathered on the other side."""
        if not self.scatters or op is not CollectiveOp.ALL_TO_ALL or axis == TENSOR:
            yield op, nbytes, axis
            return
        tensor = self.names.index(TENSOR)
        parts = 1 if isinstance(layout[tensor], Shard) else self.sizes[tensor]
        yield op, nbytes / parts, axis
        if parts > 1:
            yield CollectiveOp.ALL_GATHER, nbytes, TENSOR

    def sync_s(self, ref: Ref, layout: Layout) -> float:
        """Seconds of a parameter's gradient in the sum over the axes it is partial on, once per
        step."""
        parts = self.bucket_parts(self.local_bytes(ref, layout))
        nbytes = parts * self.local_bytes(ref, layout)
        return sum(
            self.collective(CollectiveOp.ALL_REDUCE, nbytes, name) / parts
            for name, placement in zip(self.names, layout, strict=True)
            if str(placement) == "R*"
        )


def _held(layout: Layout) -> Layout:
    """The layout without what it says of gradients."""
    return tuple(R if placement == R_STAR else placement for placement in layout)
