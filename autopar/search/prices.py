"""What a decision costs: compute and collectives on local shapes, for one micro-batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.placement import R_STAR, Layout, R, Shard, largest_shape
from autopar.ir.size import shape_at
from autopar.plan.flow import Move, move_bytes, moves_between
from autopar.search.block import Option

ComputeTime = Callable[[OpNode, Option, "Prices"], tuple[float, float]]
CollectiveTime = Callable[[CollectiveOp, float, str], float]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices on one mesh for one micro-batch size.

    `batch` counts the samples of a micro-batch over all data-parallel ranks. `micro_batches` is how
    many share the cost of one gradient synchronisation. `compute(node, option, prices)` gives
    forward and backward seconds; `collective(op, nbytes, axis)` seconds. `moves` remembers the
    price of moves, which depends on mesh and batch alone. `updated` values cannot be moved.
    Gradients are summed in buckets of `bucket_bytes`, a larger one by itself.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    batch: int
    micro_batches: int
    specs: Mapping[Ref, TensorSpec]
    differentiable: frozenset[Ref]
    compute: ComputeTime
    collective: CollectiveTime
    moves: dict[object, float] = field(default_factory=dict, repr=False)
    updated: frozenset[Ref] = frozenset()
    bucket_bytes: float = 0.0

    def local_shape(self, ref: Ref, layout: Layout) -> tuple[int, ...]:
        """Shape of a value's largest local part."""
        return largest_shape(shape_at(self.specs[ref].shape, self.batch), layout, self.sizes)

    def local_bytes(self, ref: Ref, layout: Layout) -> int:
        """Bytes of a value's largest local part."""
        count = DTYPE_BYTES[self.specs[ref].dtype]
        for extent in self.local_shape(ref, layout):
            count *= extent
        return count

    def move_s(self, move: Move) -> tuple[float, float]:
        """Forward and backward seconds of one move."""
        spec, axis = self.specs[move.value], self.names[move.axis]

        def seconds(op: CollectiveOp | None) -> float:
            if op is None:
                return 0.0
            return self.collective(op, move_bytes(spec, move, op, self.sizes, self.batch), axis)

        return seconds(move.transition.forward), seconds(move.transition.backward)

    def reshard_s(self, ref: Ref, src: Layout, dst: Layout) -> float:
        """Seconds, both passes, to bring a value from one layout to another; inf if impossible."""
        if src == dst:
            return 0.0
        if ref in self.updated:
            return 0.0 if _held(src) == _held(dst) else inf
        key = (self.specs[ref], ref in self.differentiable, src, dst)
        if key not in self.moves:
            try:
                path = moves_between(ref, src, dst, differentiable=ref in self.differentiable)
                allowed = all(self._holds_samples(move) for move in path)
                self.moves[key] = sum(sum(self.move_s(m)) for m in path) if allowed else inf
            except KeyError:
                self.moves[key] = inf
        return self.moves[key]

    def _holds_samples(self, move: Move) -> bool:
        """Whether a value that grows with the batch holds this rank's samples while it moves on an
        axis that does not split them; else its size would be that of other ranks' samples."""
        grown = [dim for dim, size in enumerate(self.specs[move.value].shape) if size.is_batch]
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
                ref = node.inputs()[inner.like_input]
                shape = self.local_shape(ref, option.inputs[inner.like_input])
                nbytes = inner.nbytes(shape)
                seconds = self.collective(inner.op, nbytes, axis)
                totals[inner.phase] += inner.count(size) * seconds
        return totals["forward"], totals["backward"]

    def bucket_parts(self, nbytes: int) -> float:
        """How many parameters of `nbytes` a bucket holds.

        Buckets are taken to be as full as the parameters of an even stage fill them: a parameter by
        itself would pay the latency that all of its bucket pay once.
        """
        return max(1.0, self.bucket_bytes / nbytes) if nbytes else 1.0

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
