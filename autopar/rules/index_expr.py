"""Index expressions: which letter runs over which dim, and the ways to split an op along one.

A matrix product is `i k, k j -> i j`; a view that parts heads is `b s (h d) -> b s h d`. Splitting
one letter over an axis splits every dim that letter leads, leaves operands without it whole, and
makes outputs without it partial sums. So one mechanism gives the strategies of all op families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from autopar.ir.graph import Arg, OpNode, Ref, TensorSpec, refs_in
from autopar.ir.placement import R_STAR, P, Placement, R, Replicate, Shard
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
        return tuple(item for item in sized if isinstance(item, int))

    def dim(self, position: int, name: str, default: int = 0, *, rank: int | None = None) -> int:
        """The dim argument there, counted from the front of a tensor of `rank` (of input 0)."""
        rank = len(self.inputs[0].shape) if rank is None else rank
        value = self.integer(position, name, default)
        return value + rank if value < 0 else value

    def arrange(self, dims: Mapping[tuple[int, str], Dims | tuple[Dims, ...]]) -> tuple[Dims, ...]:
        """Dims by (position, name) put in the order of `OpNode.inputs()`.

        An argument that holds several tensors is given a tuple of Dims; a tensor that is not named
        is left whole.
        """
        by_position = {position: value for (position, _), value in dims.items()}
        by_name = {name: value for (_, name), value in dims.items()}
        slots = [(arg, by_position.get(i)) for i, arg in enumerate(self.node.args)]
        slots += [(arg, by_name.get(name)) for name, arg in self.node.kwargs]
        specs, result = iter(self.inputs), []
        for arg, given in slots:
            for index, _ in enumerate(refs_in(arg)):
                whole: Dims = ((),) * len(next(specs).shape)
                if given is None:
                    result.append(whole)
                else:
                    result.append(given if isinstance(arg, Ref) else given[index])
        return tuple(result)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexExpr:
    """How the letters of an op run over its tensor inputs and outputs.

    A letter of an input that no output has is summed over. `blocked` letters are never split;
    `even` ones only into equal parts. `additive` inputs are added to such a sum (a bias), so they
    must be partial where it is. Each set in `linear` names inputs in which, taken together and
    with the others fixed, the op is linear: they may be partial sums. `parted` letters run over an
    input dim that is cut into pieces, one per output. `kernels` has the kernel for splitting a
    letter where it is not `kernel`.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, Size]
    blocked: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    parted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
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
        spots = [_spots(tensor, letter, extents) for tensor in (*expr.inputs, *expr.outputs)]
        if _may_split(expr, letter, extents[letter], spots, size):
            for unit in _units(expr, op, letter, extents[letter], spots, hints):
                if all(piece % size == 0 for piece in unit) or len(unit) == 1:
                    found += _split(expr, op, letter, unit, spots, hints)
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


def _spots(tensor: Dims, letter: str, extents: Mapping[str, int]) -> list[_Spot]:
    """Where `letter` stands in `tensor`; more than once on a diagonal."""
    found = []
    for index, factors in enumerate(tensor):
        for k, factor in enumerate(factors):
            if factor == letter:
                outer = prod(extents[f] for f in factors[:k])
                inner = prod(extents[f] for f in factors[k + 1 :])
                found.append(_Spot(index, outer, inner))
    return found


def _may_split(
    expr: IndexExpr, letter: str, extent: int, spots: list[list[_Spot]], size: int
) -> bool:
    """Whether the extent allows it: a factor of a longer dim must divide, a whole dim need not."""
    if letter in expr.blocked or extent < size or any(len(found) > 1 for found in spots):
        return False
    composite = any(spot.outer * spot.inner > 1 for found in spots for spot in found)
    return extent % size == 0 if composite or letter in expr.even else True


def _units(
    expr: IndexExpr, op: Op, letter: str, extent: int, spots: list[list[_Spot]], hints: Hints
) -> list[tuple[int, ...]]:
    """Ways to cut the letter before splitting: whole, and the pieces its dims are hinted with."""
    if letter in expr.parted:
        return [expr.parted[letter]]
    units: list[tuple[int, ...]] = [(extent,)]
    for ref, found in zip(_refs(op), spots, strict=True):
        for spot in found:
            pieces = hints.get((ref, spot.dim), ())
            if spot.outer == 1 and all(piece % spot.inner == 0 for piece in pieces):
                unit = tuple(piece // spot.inner for piece in pieces)
                if sum(unit) == extent and unit not in units:
                    units.append(unit)
    return units


def _refs(op: Op) -> list[Ref]:
    """Inputs, then outputs."""
    return [*op.node.inputs(), *(Ref(op.node.name, i) for i in range(len(op.outputs)))]


def _split(
    expr: IndexExpr,
    op: Op,
    letter: str,
    unit: tuple[int, ...],
    spots: list[list[_Spot]],
    hints: Hints,
) -> Iterator[AxisStrategy]:
    """The strategy that splits `letter`, if its dims can be split so."""
    count = len(op.inputs)
    for ref, found in zip(_refs(op), spots, strict=True):
        # a minor factor needs a share of every outer index: only where the graph parts the dim so
        for spot in found:
            if spot.outer > 1 and hints.get((ref, spot.dim)) != spot.shard(unit).pieces:
                return
    summed = not any(spots[count:])
    inputs: list[Placement] = []
    for index, (spec, found) in enumerate(zip(op.inputs, spots[:count], strict=True)):
        if found:
            inputs.append(found[0].shard(unit))
        else:
            inputs.append(P if summed and index in expr.additive else whole(spec))
    out_unit = (1,) if letter in expr.parted else unit
    outputs: list[Placement] = [
        found[0].shard(out_unit) if found else P for found in spots[count:]
    ]
    if _summable(op.outputs, outputs):
        kernel = expr.kernels.get(letter, expr.kernel)
        yield AxisStrategy(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            kernel=kernel.name,
            collectives=kernel.collectives,
        )


def _partial(expr: IndexExpr, op: Op, group: frozenset[int]) -> Iterator[AxisStrategy]:
    """The strategy that keeps partial sums through a linear op."""
    inputs = tuple(P if i in group else whole(spec) for i, spec in enumerate(op.inputs))
    outputs: tuple[Placement, ...] = (P,) * len(op.outputs)
    if _summable(op.inputs, inputs) and _summable(op.outputs, outputs):
        yield AxisStrategy(inputs=inputs, outputs=outputs, kernel=expr.kernel.name)


def _summable(
    specs: tuple[TensorSpec, ...], placements: list[Placement] | tuple[Placement, ...]
) -> bool:
    """Whether all partial tensors are numbers, not truth values."""
    return all(
        spec.dtype != "bool" or placement != P
        for spec, placement in zip(specs, placements, strict=True)
    )


__all__ = ["LOCAL", "Dims", "Hints", "IndexExpr", "Kernel", "Op", "derive", "replicated", "whole"]
