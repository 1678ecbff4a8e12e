"""Index expressions: which letter runs over which dim, and the ways to split an op along one.

A matrix product is `i k, k j -> i j`; a view that parts heads is `b s (h d) -> b s h d`. Splitting
one letter over an axis splits every dim that letter leads, leaves operands without it whole, and
makes outputs without it partial sums. So one mechanism gives the strategies of all op families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from autopar.ir.graph import Arg, OpNode, Ref, TensorSpec
from autopar.ir.placement import R_STAR, P, Placement, R, Replicate, Shard, chunk_sizes
from autopar.ir.size import Size
from autopar.ir.strategy import AxisStrategy, InnerCollective

Dims = tuple[tuple[str, ...], ...]
"""Per dim its factors as letters, major first. A dim that no rule can split has no letter."""

Hints = Mapping[tuple[Ref, int], tuple[int, ...]]
"""(value, dim) to the piece sizes that the dim is later taken apart into; see `rules.pieces`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """What runs on local parts, and what it communicates."""

    name: str
    collectives: tuple[InnerCollective, ...] = ()


LOCAL = Kernel(name="local")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """A node with the specs of its tensor inputs: all that a rule looks at."""

    node: OpNode
    inputs: tuple[TensorSpec, ...]

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the outputs."""
        return self.node.outputs

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at `position`, or the keyword `name`, or `default`."""
        return self.node.arg(position, name, default)

    def tensor(self, position: int, name: str) -> TensorSpec | None:
        """Spec of the single tensor passed there, or None."""
        arg = self.arg(position, name)
        return self.inputs[self.node.inputs().index(arg)] if isinstance(arg, Ref) else None

    def integer(self, position: int, name: str, default: int) -> int:
        """The integer argument there."""
        arg = self.arg(position, name, default)
        if isinstance(arg, Size):
            return arg.const
        return arg if isinstance(arg, int) else default

    def integers(self, position: int, name: str) -> tuple[int, ...]:
        """The integer or list of integers there; empty when absent."""
        arg = self.arg(position, name, ())
        items = arg if isinstance(arg, tuple) else (arg,)
        sized = (item.const if isinstance(item, Size) else item for item in items)
        return tuple(v for v in sized if isinstance(v, int) and not isinstance(v, bool))

    def dim(self, position: int, name: str, default: int = 0, *, rank: int | None = None) -> int:
        """The dim argument there, counted from the front of a tensor of `rank` (of input 0)."""
        rank = len(self.inputs[0].shape) if rank is None else rank
        value = self.integer(position, name, default)
        return value + rank if value < 0 else value

    def arrange(self, dims: Mapping[tuple[int, str], Dims]) -> tuple[Dims, ...]:
        """Dims by (position, name) of the argument, in the order of `OpNode.inputs()`."""
        by_position = {position: value for (position, _), value in dims.items()}
        by_name = {name: value for (_, name), value in dims.items()}
        given = [by_position[i] for i, arg in enumerate(self.node.args) if isinstance(arg, Ref)]
        return (
            *given,
            *(by_name[name] for name, arg in self.node.kwargs if isinstance(arg, Ref)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexExpr:
    """How the letters of an op run over its tensor inputs and outputs.

    A letter of an input that no output has is summed over. `blocked` letters are never split;
    `even` ones only into equal parts; if `filled`, no rank may be left with nothing. `additive`
    inputs are added to such a sum (a bias), so they must be partial where it is. Each set in
    `linear` names inputs in which, taken together and with the others fixed, the op is linear:
    they may be partial sums. `parted` letters run over an input dim that is cut into pieces, one
    per output. `shared` has, by letter, inputs without it of which each rank holds its own
    summand when the letter is split. `kernels` has the kernel for splitting a letter where it is
    not `kernel`.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, Size]
    blocked: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    filled: bool = False
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    parted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shared: Mapping[str, frozenset[int]] = field(default_factory=dict)
    kernel: Kernel = LOCAL
    kernels: Mapping[str, Kernel] = field(default_factory=dict)

    def letters(self) -> tuple[str, ...]:
        """All letters in order of first use."""
        dims = (dim for tensor in (*self.inputs, *self.outputs) for dim in tensor)
        return tuple(dict.fromkeys(letter for dim in dims for letter in dim))


@dataclass(frozen=True, slots=True)
class _Spot:
    """A letter's place in one tensor: `outer` and `inner` are the extents around it in the dim."""

    dim: int
    outer: int
    inner: int

    def shard(self, unit: tuple[int, ...]) -> Shard:
        """The placement when the letter, cut into `unit` pieces, is split."""
        pieces = tuple(piece * self.inner for piece in unit) * self.outer
        return Shard(self.dim, pieces if len(pieces) > 1 else ())


def derive(
    expr: IndexExpr, op: Op, *, size: int, batch: int, hints: Hints
) -> tuple[AxisStrategy, ...]:
    """The strategies of `op` on an axis of `size` ranks at `batch` samples, all-R first."""
    extents = {letter: extent.at(batch) for letter, extent in expr.sizes.items()}
    found = list(replicated(op, expr.kernel.name))
    for letter in expr.letters():
        split = _Split(expr=expr, op=op, letter=letter, extents=extents, hints=hints)
        if split.is_legal(size):
            for unit in split.units(size):
                found += split.strategies(unit)
    found += [s for group in expr.linear for s in _partial(expr, op, group)]
    return tuple(dict.fromkeys(found))


def whole(spec: TensorSpec) -> Replicate:
    """The replicated placement under which a split op takes an operand: `R*` if it may have a
    gradient, to which each rank then contributes a part."""
    return R_STAR if spec.is_floating else R


def replicated(op: Op, kernel: str = "local") -> Iterator[AxisStrategy]:
    """The strategies every op has: all `R`; and all `R*`, where a gradient may flow."""
    yield AxisStrategy(inputs=(R,) * len(op.inputs), outputs=(R,) * len(op.outputs), kernel=kernel)
    if any(spec.is_floating for spec in op.inputs):
        yield AxisStrategy(
            inputs=tuple(map(whole, op.inputs)),
            outputs=tuple(map(whole, op.outputs)),
            kernel=kernel,
        )


class _Split:
    """Splitting one letter of one op."""

    def __init__(
        self, *, expr: IndexExpr, op: Op, letter: str, extents: Mapping[str, int], hints: Hints
    ) -> None:
        self.expr, self.op, self.letter, self.hints = expr, op, letter, hints
        self.extent = extents[letter]
        self.refs = [*op.node.inputs(), *(Ref(op.node.name, i) for i in range(len(op.outputs)))]
        self.spots = [_spots(dims, letter, extents) for dims in (*expr.inputs, *expr.outputs)]

    def is_legal(self, size: int) -> bool:
        """Whether the extent allows it: a factor of a longer dim must divide, a whole dim need
        not."""
        expr = self.expr
        diagonal = any(len(found) > 1 for found in self.spots)
        if self.letter in expr.blocked or self.extent < size or diagonal:
            return False
        composite = any(spot.outer * spot.inner > 1 for found in self.spots for spot in found)
        if composite or self.letter in expr.even:
            return self.extent % size == 0
        return not expr.filled or chunk_sizes(self.extent, size)[-1] > 0

    def units(self, size: int) -> list[tuple[int, ...]]:
        """Ways to cut the letter before splitting: not at all, or as its dims are hinted."""
        if self.letter in self.expr.parted:
            found = [self.expr.parted[self.letter]]
        else:
            found = [(self.extent,), *self._hinted()]
        # pieces are split evenly; a whole dim is checked by `is_legal`
        return [u for u in found if len(u) == 1 or all(piece % size == 0 for piece in u)]

    def _hinted(self) -> Iterator[tuple[int, ...]]:
        for ref, found in zip(self.refs, self.spots, strict=True):
            for spot in found:
                pieces = self.hints.get((ref, spot.dim), ())
                if spot.outer == 1 and all(piece % spot.inner == 0 for piece in pieces):
                    unit = tuple(piece // spot.inner for piece in pieces)
                    if sum(unit) == self.extent:
                        yield unit

    def strategies(self, unit: tuple[int, ...]) -> Iterator[AxisStrategy]:
        """The strategy that splits the letter cut into `unit`; none if a dim forbids it."""
        if not all(map(self._allowed, self.refs, self.spots, [unit] * len(self.refs))):
            return
        count = len(self.op.inputs)
        summed = not any(self.spots[count:])
        shared = self.expr.shared.get(self.letter, frozenset())
        absent = [
            P if (summed and index in self.expr.additive) or index in shared else whole(spec)
            for index, spec in enumerate(self.op.inputs)
        ]
        inputs = tuple(
            found[0].shard(unit) if found else placement
            for found, placement in zip(self.spots[:count], absent, strict=True)
        )
        out_unit = (self.extent,) if self.letter in self.expr.parted else unit
        outputs = tuple(f[0].shard(out_unit) if f else P for f in self.spots[count:])
        if _summable(self.op.outputs, outputs):
            kernel = self.expr.kernels.get(self.letter, self.expr.kernel)
            yield AxisStrategy(
                inputs=inputs,
                outputs=outputs,
                kernel=kernel.name,
                collectives=kernel.collectives,
            )

    def _allowed(self, ref: Ref, found: list[_Spot], unit: tuple[int, ...]) -> bool:
        """A minor factor needs a share of every outer index: only where the graph parts the dim
        just so."""
        return all(
            spot.outer == 1 or self.hints.get((ref, spot.dim)) == spot.shard(unit).pieces
            for spot in found
        )


def _spots(dims: Dims, letter: str, extents: Mapping[str, int]) -> list[_Spot]:
    """Where `letter` stands in a tensor; more than once on a diagonal."""
    found = []
    for index, factors in enumerate(dims):
        for k, factor in enumerate(factors):
            if factor == letter:
                outer = prod(extents[f] for f in factors[:k])
                inner = prod(extents[f] for f in factors[k + 1 :])
                found.append(_Spot(index, outer, inner))
    return found


def _partial(expr: IndexExpr, op: Op, group: frozenset[int]) -> Iterator[AxisStrategy]:
    """The strategy that keeps partial sums through a linear op."""
    inputs = tuple(P if i in group else whole(spec) for i, spec in enumerate(op.inputs))
    outputs: tuple[Placement, ...] = (P,) * len(op.outputs)
    if _summable(op.inputs, inputs) and _summable(op.outputs, outputs):
        yield AxisStrategy(inputs=inputs, outputs=outputs, kernel=expr.kernel.name)


def _summable(specs: tuple[TensorSpec, ...], placements: tuple[Placement, ...]) -> bool:
    """Whether all partial tensors are numbers, not truth values."""
    return all(
        spec.dtype != "bool" or placement != P
        for spec, placement in zip(specs, placements, strict=True)
    )


__all__ = ["LOCAL", "Dims", "Hints", "IndexExpr", "Kernel", "Op", "derive", "replicated", "whole"]
