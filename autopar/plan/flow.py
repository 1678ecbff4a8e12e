"""Which values move between placements, and where: the one answer that is priced and emitted.

The search prices the moves of a block through `move_bytes`, the code generator prints them, and the
plan lists their collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import NamedTuple

from autopar.ir.blocks import Block, BlockChain
from autopar.ir.collective import CollectiveOp, Transition, transition
from autopar.ir.graph import DTYPE_BYTES, OpGraph, OpNode, Ref, SourceKind, TensorSpec
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import (
    BY_EXPERT,
    Layout,
    Placement,
    R,
    Shard,
    local_shape,
    zigzag,
)
from autopar.ir.size import shape_at
from autopar.ir.strategy import BatchAxis
from autopar.plan.plan import NodeChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One value changes its placement on one axis (an index into the mesh axes)."""

    value: Ref
    axis: int
    before: Layout
    after: Layout
    transition: Transition

    @property
    def name(self) -> str:
        """What a plan calls the move; no other of its block brings the value to this layout."""
        return f"{self.value} as {' '.join(map(str, self.after))}"

    def copies(self, sizes: Sequence[int]) -> bool:
        """Whether the moved value is a new tensor, on mesh axes of these sizes."""
        return sizes[self.axis] > 1 and self.transition.function != "sum_gradient"


def moves_between(
    value: Ref, src: Layout, dst: Layout, *, differentiable: bool
) -> tuple[Move, ...]:
    """The moves from one layout to another, axis by axis, from the outermost where that can be.

    Where two axes split one dim the inner one cuts what the outer one left, so it is joined first
    and cut last. Rows by expert do not move. Raises KeyError where an axis has no such move, or no
    order of moves exists.
    """
    if src != dst and BY_EXPERT in (*src, *dst):
        raise KeyError(f"rows by expert are made and taken by ops only: {src} to {dst}")
    changed = [
        axis
        for axis, (have, want) in enumerate(zip(src, dst, strict=True))
        if transition(have, want, differentiable=differentiable) is not None
    ]
    for order in permutations(changed):
        moves, now = [], src
        for axis in order:
            if _is_cut_inside(now, axis) or _is_cut_inside(now, axis, dst[axis]):
                break
            step = transition(now[axis], dst[axis], differentiable=differentiable)
            if step is not None:
                after = (*now[:axis], dst[axis], *now[axis + 1 :])
                moves.append(Move(value=value, axis=axis, before=now, after=after, transition=step))
                now = after
        else:
            return tuple(moves)
    raise KeyError(f"no order of moves from {src} to {dst}")


def _is_cut_inside(layout: Layout, axis: int, placement: Placement | None = None) -> bool:
    """Whether an axis further in splits the dim that `placement`, or the axis itself, splits."""
    own = layout[axis] if placement is None else placement
    return isinstance(own, Shard) and any(
        isinstance(p, Shard) and p.dim == own.dim for p in layout[axis + 1 :]
    )


def move_bytes(
    spec: TensorSpec,
    move: Move,
    op: CollectiveOp,
    sizes: Sequence[int],
    batch: int,
    at: Sequence[int] | None = None,
) -> int:
    """Bytes of the collective of a move, in the convention of `ir.collective.Collective`.

    `batch` counts the samples over all data-parallel ranks; `at` is the rank's place on every axis,
    by default that of the rank with the largest shares.
    """
    place = list(at or (0,) * len(sizes))
    spread = list(sizes)
    layout, after = move.before, move.after[move.axis]
    if (
        op is CollectiveOp.ALL_TO_ALL
        and isinstance(after, Shard)
        and spec.shape[after.dim].is_batch
    ):
        layout = move.after  # samples may be dealt unevenly; a rank's own are what it counts
    if op is not CollectiveOp.ALL_TO_ALL:
        spread[move.axis], place[move.axis] = 1, 0
    shape = local_shape(shape_at(spec.shape, batch), layout, tuple(spread), tuple(place))
    return prod(shape) * DTYPE_BYTES[spec.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFlow:
    """The moves of a block: before each node, in order, and at its end for its outputs."""

    before: Mapping[str, tuple[Move, ...]]
    at_end: tuple[Move, ...]
    produced: Mapping[Ref, Layout]

    def moves(self) -> Iterable[Move]:
        """All moves in the order they are emitted."""
        for moves in self.before.values():
            yield from moves
        yield from self.at_end


def block_flow(
    nodes: Sequence[OpNode],
    choices: Mapping[str, NodeChoice],
    given: Mapping[Ref, Layout],
    required: Mapping[Ref, Layout],
    differentiable: frozenset[Ref],
) -> BlockFlow:
    """The moves that make every node's inputs lie as its choice asks.

    `given` has the layouts of values from outside the block, `required` those that leave it must
    have. A value moved once to a layout is used again from there.
    """
    produced: dict[Ref, Layout] = dict(given)
    moved: set[tuple[Ref, Layout]] = set()

    def lies(ref: Ref, layout: Layout) -> bool:
        return produced[ref] == layout or (ref, layout) in moved

    def bring(ref: Ref, layout: Layout) -> list[Move]:
        if lies(ref, layout):
            return []
        path = moves_between(ref, produced[ref], layout, differentiable=ref in differentiable)
        done = [i for i, move in enumerate(path, 1) if lies(ref, move.after)]
        fresh = list(path[max(done, default=0) :])
        moved.update((ref, move.after) for move in fresh)
        return fresh

    before: dict[str, tuple[Move, ...]] = {}
    for node in nodes:
        choice = choices[node.name]
        wanted = zip(node.inputs(), choice.inputs, strict=True)
        before[node.name] = tuple(move for ref, layout in wanted for move in bring(ref, layout))
        for index, layout in enumerate(choice.outputs):
            produced[Ref(node.name, index)] = layout
    at_end = tuple(move for ref, layout in required.items() for move in bring(ref, layout))
    return BlockFlow(before=before, at_end=at_end, produced=produced)


class Split(NamedTuple):
    """How a value between blocks is split by samples, and along a sequence of an extent where it
    has a dim of it."""

    samples: Placement
    dim: int | None = None
    extent: int | None = None


def value_splits(graph: OpGraph, batch: BatchAxis, sequence: Mapping[Ref, int]) -> dict[Ref, Split]:
    """How the values of a graph are split wherever axes do: by samples all that grow with the
    batch, but those that are summed at set-up, and along the dims of `sequence` those that carry a
    gradient."""
    splits: dict[Ref, Split] = {}
    for source in graph.sources:
        grown = [dim for dim, size in enumerate(source.spec.shape) if size.is_batch]
        split = source.kind is SourceKind.INPUT and grown and not batch.coupled
        splits[Ref(source.name)] = Split(Shard(grown[0]) if split else R)
    summed, differentiable = set(batch.setup_sums), graph.differentiable()
    for node in graph.nodes:
        for index, placement in enumerate(batch.strategies[node.name].outputs):
            ref = Ref(node.name, index)
            dim = sequence.get(ref) if ref in differentiable else None
            extent = None if dim is None else node.outputs[index].shape[dim].const
            splits[ref] = Split(R if node.name in summed else placement, dim, extent)
    return splits


def shared_layouts(splits: Mapping[Ref, Split], axes: Sequence[MeshAxis]) -> dict[Ref, Layout]:
    """Layouts of the values that pass between blocks and stages.

    Axes that split samples split values by these, axes that split the sequence along it. On all
    other axes values are whole.
    """
    made = {
        split: tuple(_shared_placement(axis, *split) for axis in axes)
        for split in set(splits.values())
    }
    return {ref: made[split] for ref, split in splits.items()}


def _shared_placement(
    axis: MeshAxis, samples: Placement, dim: int | None, extent: int | None
) -> Placement:
    """How an axis splits a value by `samples`, and by the sequence of an `extent` along a dim."""
    if axis.splits_samples:
        return samples
    return (
        R
        if dim is None or extent is None or not axis.sequence
        else sequence_shard(dim, extent, axis)
    )


def sequence_shard(dim: int, extent: int, axis: MeshAxis) -> Shard:
    """How an axis that splits the sequence cuts a dim that runs over it."""
    return Shard(dim, zigzag(extent, axis.size) if axis.zigzag else ())


def block_edges(
    chain: BlockChain, block: Block, shared: Mapping[Ref, Layout]
) -> tuple[dict[Ref, Layout], dict[Ref, Layout]]:
    """Layouts of the values a block is given, and of those it must hand on."""
    crossing = chain.boundaries[block.index] if block.index < len(chain.boundaries) else ()
    given = {ref: shared[ref] for ref in (*block.inputs, *block.shared)}
    required = {ref: shared[ref] for ref in block.outputs if ref in crossing}
    return given, required


def setup_closure(
    nodes: Mapping[str, OpNode],
    setup: Sequence[str],
    wanted: Iterable[Ref],
    *,
    stop: Iterable[str] = (),
) -> tuple[str, ...]:
    """The set-up nodes needed for `wanted`, in order; nodes in `stop` are taken as given."""
    known, stopped = set(setup), set(stop)
    needed: set[str] = set()
    stack = [ref.name for ref in wanted]
    while stack:
        name = stack.pop()
        if name in known and name not in needed and name not in stopped:
            needed.add(name)
            stack.extend(ref.name for ref in nodes[name].inputs())
    return tuple(name for name in setup if name in needed)


def setup_sources(
    nodes: Mapping[str, OpNode], setup: Sequence[str], wanted: Sequence[Ref]
) -> tuple[str, ...]:
    """Names of the sources that `wanted` set-up values are computed from, or are themselves."""
    closure = setup_closure(nodes, setup, wanted)
    read = dict.fromkeys(ref.name for ref in wanted)
    read |= dict.fromkeys(ref.name for name in closure for ref in nodes[name].inputs())
    return tuple(name for name in read if name not in nodes)
