"""The sharding problem of one block: options per op, from the rules of each mesh axis.

An option of an op is a product of one strategy per axis. `BlockSpace` holds them with everything
that does not depend on the micro-batch size; `search.sharding` prices them and builds the ILP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from autopar.ir.graph import OpNode, Ref, Source, TensorSpec
from autopar.ir.mesh import MeshAxis
from autopar.ir.placement import BY_EXPERT, R_STAR, Layout, P, Placement, R, Shard
from autopar.ir.strategy import AxisStrategy

Strategies = Callable[[OpNode, MeshAxis], tuple[AxisStrategy, ...]]
"""(node, mesh axis) to the strategies offered on that axis."""


HEAVY_OPS = frozenset(
    {
        "aten.linear",
        "aten.addmm",
        "aten.matmul",
        "aten.mm",
        "aten.bmm",
        "aten.scaled_dot_product_attention",
        "autopar.expert_mm",
    }
)
"""Ops whose work a tensor degree is asked for."""


def is_split(strategy: AxisStrategy) -> bool:
    """Whether a strategy splits any tensor, so that the ranks share the op's work."""
    return any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to run a node: layouts of its inputs and outputs, and the strategy per axis."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    strategies: tuple[AxisStrategy, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpace:
    """All decisions of one block.

    `options` per node; `parameters` with their candidate layouts; `given` and `required` are the
    fixed layouts of values that come in and go out; `consumers` lists, per value, the (node index,
    input position) pairs that read it.
    """

    nodes: tuple[OpNode, ...]
    options: tuple[tuple[Option, ...], ...]
    parameters: tuple[tuple[Source, tuple[Layout, ...]], ...]
    given: Mapping[Ref, Layout]
    required: Mapping[Ref, Layout]
    consumers: Mapping[Ref, tuple[tuple[int, int], ...]]
    specs: Mapping[Ref, TensorSpec]
    differentiable: frozenset[Ref]


def is_consistent(layout: Layout, samples: int = 0, sequence: int | None = None) -> bool:
    """Whether no dim is split on two axes, but for samples and sequence.

    The first `samples` axes all split the samples; `sequence` is the value's sequence dim.
    """
    whole = [p.dim for p in layout[:samples] if isinstance(p, Shard)]
    rest = [p for p in layout[samples:] if isinstance(p, Shard)]
    along = [p for p in rest if p.dim == sequence]
    if layout.count(BY_EXPERT) > 1:
        return False
    if any(p.pieces for p in along[1:]):
        return False
    dims = [p.dim for p in rest if p.dim != sequence]
    return len(dims) == len(set(dims)) and not set(whole) & {p.dim for p in rest}


def node_options(
    node: OpNode,
    mesh: Sequence[MeshAxis],
    strategies: Strategies,
    sequence: Mapping[Ref, int] | None = None,
) -> tuple[Option, ...]:
    """Every combination of one strategy per axis that is consistent."""
    per_axis = [strategies(node, axis) for axis in mesh]
    samples = sum(axis.splits_samples for axis in mesh)
    refs = [*node.inputs(), *(Ref(node.name, index) for index in range(len(node.outputs)))]
    dims = [(sequence or {}).get(ref) for ref in refs]
    options = []
    for combination in product(*per_axis):
        inputs = tuple(zip(*(s.inputs for s in combination), strict=True))
        outputs = tuple(zip(*(s.outputs for s in combination), strict=True))
        layouts = zip((*inputs, *outputs), dims, strict=True)
        if all(is_consistent(layout, samples, dim) for layout, dim in layouts):
            options.append(Option(inputs=inputs, outputs=outputs, strategies=combination))
    return tuple(options)


def _known_options(
    node: OpNode,
    mesh: Sequence[MeshAxis],
    strategies: Strategies,
    sequence: Mapping[Ref, int] | None,
    known: dict[object, tuple[Option, ...]] | None,
) -> tuple[Option, ...]:
    if known is None:
        return node_options(node, mesh, strategies, sequence)
    refs = [*node.inputs(), *(Ref(node.name, index) for index in range(len(node.outputs)))]
    key = (
        tuple(id(strategies(node, axis)) for axis in mesh),
        sum(axis.splits_samples for axis in mesh),
        tuple((sequence or {}).get(ref) for ref in refs),
    )
    if key not in known:
        known[key] = node_options(node, mesh, strategies, sequence)
    return known[key]


def parameter_layouts(
    source: Source,
    wanted: Sequence[Layout],
    pinned: Mapping[str, Mapping[int, Placement]],
    num_axes: int,
) -> tuple[Layout, ...]:
    """Layouts to store a parameter in: those its readers ask for, partial forms replaced by `R`.

    `pinned` fixes placements by parameter name and axis index, whether a reader asks for them or
    not; `R` there allows `R*`, which holds the same value. A layout that is fixed on every axis is
    that of other blocks, which all have to agree on.
    """
    layouts = {tuple(R if p == P else p for p in layout) for layout in wanted}
    if not source.trainable:
        layouts = {tuple(R if p == R_STAR else p for p in layout) for layout in layouts}
    fixed = pinned.get(source.fqn, {})

    def allowed(layout: Layout) -> bool:
        shared = len(fixed) == num_axes
        return all(
            layout[axis] == want or (want == R and layout[axis] == R_STAR and not shared)
            for axis, want in fixed.items()
        )

    if not wanted:
        layouts = {(R,) * num_axes}
    layouts |= {tuple(fixed.get(axis, p) for axis, p in enumerate(layout)) for layout in layouts}
    layouts = set(filter(is_consistent, layouts))
    return tuple(sorted(filter(allowed, layouts), key=_summed_late_first))


def _summed_late_first(layout: Layout) -> tuple[str, ...]:
    """Ties go to `R*`: one gradient sum per step rather than one per micro-batch."""
    return tuple("" if p == R_STAR else str(p) for p in layout)


def block_space(
    nodes: Sequence[OpNode],
    mesh: Sequence[MeshAxis],
    strategies: Strategies,
    sequence: Mapping[Ref, int] | None = None,
    *,
    parameters: Sequence[Source],
    given: Mapping[Ref, Layout],
    required: Mapping[Ref, Layout],
    specs: Mapping[Ref, TensorSpec],
    differentiable: frozenset[Ref],
    loss: Ref | None = None,
    pinned: Mapping[str, Mapping[int, Placement]] | None = None,
    known: dict[object, tuple[Option, ...]] | None = None,
) -> BlockSpace:
    """Collect the options of every node and parameter of a block.

    Options are `known` of nodes with the same strategies, each one object, that were seen before.

    The node that makes `loss` keeps the options that leave it whole or a partial sum, for which
    the gradient that backward starts from is 1 on every rank.
    """
    options = tuple(
        tuple(
            option
            for option in found
            if loss is None or all(p in (R, P) for p in option.outputs[loss.index])
        )
        if loss is not None and loss.name == node.name
        else found
        for node in nodes
        for found in (_known_options(node, mesh, strategies, sequence, known),)
    )
    consumers: dict[Ref, list[tuple[int, int]]] = {}
    for index, node in enumerate(nodes):
        for position, ref in enumerate(node.inputs()):
            consumers.setdefault(ref, []).append((index, position))

    def asked(source: Source) -> list[Layout]:
        readers = consumers.get(Ref(source.name), [])
        return [o.inputs[position] for index, position in readers for o in options[index]]

    return BlockSpace(
        nodes=tuple(nodes),
        options=options,
        parameters=tuple(
            (source, parameter_layouts(source, asked(source), pinned or {}, len(mesh)))
            for source in parameters
        ),
        given=given,
        required=required,
        consumers={ref: tuple(readers) for ref, readers in consumers.items()},
        specs=specs,
        differentiable=differentiable,
    )
