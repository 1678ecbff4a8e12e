"""A block variant as a source file: explicit local ops and collectives, in execution order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.codegen.lifetimes import SECTION
from autopar.codegen.local import LocalNode, Mesh, move_text, node_text
from autopar.codegen.segments import SEGMENT_IMPORT, Segments, within
from autopar.codegen.sizes import shape_text
from autopar.codegen.values import ValueNames
from autopar.ir.graph import OpNode, Ref, TensorSpec
from autopar.ir.placement import Layout, R
from autopar.plan.flow import BlockFlow, Move
from autopar.plan.plan import Recompute

HEADER = """import torch
import torch.nn.functional as F

from autopar.runtime import comm, kernels
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """A weight that lies as `stored`, its `dim` split over `axes` together (ZeRO level 3)."""

    axes: tuple[str, ...]
    dim: int
    stored: Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSource:
    """Everything a block's source is printed from.

    `weights` maps parameter and buffer values to their key in `w`; `arguments` are the values the
    function takes, `results` those it returns. `gathers` has the weights that lie in shards.
    """

    title: str
    nodes: tuple[LocalNode, ...]
    flow: BlockFlow
    weights: Mapping[Ref, str]
    arguments: tuple[Ref, ...]
    results: tuple[tuple[Ref, Layout], ...]
    specs: Mapping[Ref, TensorSpec]
    mesh: Mesh
    differentiable: Collection[Ref]
    gathers: Mapping[Ref, Gather | None] = field(default_factory=dict)
    forwards: tuple[tuple[str, frozenset[str]], ...] = (("none", frozenset()),)
    """Names of recompute, each with the ops and moves that then run again in the backward."""


def describe(spec: TensorSpec, layout: Layout, mesh: Mesh) -> str:
    """Local shape and the placements other than plain replication, for a comment."""
    shape = ", ".join(shape_text(spec, layout, mesh.axes, mesh.sizes))
    placed = [
        f"{placement} on {axis}"
        for axis, size, placement in zip(mesh.axes, mesh.sizes, layout, strict=True)
        if size > 1 and placement != R
    ]
    return f"[{shape}]" + (f" {', '.join(placed)}" if placed else "")


class BodyPrinter:
    """Prints nodes and moves as statements, naming values as it goes."""

    def __init__(self, source: BlockSource, again: frozenset[str] = frozenset()) -> None:
        self.source, self._again = source, again
        self.names = ValueNames(source.mesh.axes, source.differentiable)
        self.lines: list[str] = []
        self.segments = Segments()
        self._path: str | None = None

    def bind_arguments(self) -> list[str]:
        """Name the values that come in; the parameters' expressions read `w`, or what is gathered
        from it."""
        given = self.source.flow.produced
        arguments = []
        for ref in self.source.arguments:
            name = self.names.fresh(str(ref))
            self.names.bind(ref, given[ref], name)
            arguments.append(name)
        for ref, key in self.source.weights.items():
            gather = self.source.gathers.get(ref)
            text = f'w["{key}"]' if gather is None else self.gather(ref, key, gather)
            self.names.bind(ref, given[ref], text)
        return arguments

    def gather(self, ref: Ref, key: str, gather: Gather) -> str:
        """Print the gathering of a weight, with a comment saying what moves and why; its name."""
        source, spec = self.source, self.source.specs[ref]
        names = ", ".join(f'"{name}"' for name in gather.axes)
        axis = gather.axes[0] if len(gather.axes) == 1 else f"ctx.along({names})"
        layout = source.flow.produced[ref]
        name = self.names.fresh(key.replace(".", "_"))
        self.lines.append(
            f"# S({gather.dim}) -> whole on {' x '.join(gather.axes)}: kept in shards, gathered "
            "for this block and where its backward reads it"
        )
        self.lines.append(
            f'{name} = comm.gather_weight(w["{key}"], {axis}, {gather.dim}, '
            f"{spec.shape[gather.dim].const})  # {describe(spec, layout, source.mesh)}"
        )
        return name

    def move(self, move: Move) -> None:
        """Print one move with a comment saying what moves and why."""
        source, spec = self.source, self.source.specs[move.value]
        have = self.names[move.value, move.before]
        axis = source.mesh.axes[move.axis]
        if source.mesh.sizes[move.axis] == 1:
            self.names.bind(move.value, move.after, have)
            return
        self._enter(move.name)
        before, after = move.before[move.axis], move.after[move.axis]
        hint = source.weights.get(move.value, str(move.value)).replace(".", "_")
        name = self.names.fresh(f"{hint}_{axis}")
        self.lines.append(f"# {before} -> {after} on {axis}: {move.transition.why}")
        self.lines.append(f"{name} = {move_text(move, have, spec, source.mesh)}")
        self.names.bind(move.value, move.after, name)

    def node(self, local: LocalNode) -> None:
        """Print one node, with the moves its inputs need before it."""
        node = local.node
        for move in self.source.flow.before[node.name]:
            self.move(move)
        self._enter(node.name)
        if node.module_path != self._path:
            self._path = node.module_path
            self.lines.append(f"{SECTION}{node.module_path or 'model'}")

        def read(ref: Ref, position: int) -> str:
            return self.names[ref, local.choice.inputs[position]]

        text = node_text(local, read)
        targets = self._targets(node, local)
        note = describe(node.outputs[0], local.choice.outputs[0], local.mesh)
        self.lines.append(f"{', '.join(targets)} = {text}  # {note}")

    def _enter(self, step: str) -> None:
        """Begin or end a segment where `step` is, or is not, one of those that run again."""
        if self.segments.enter(len(self.lines), again=step in self._again):
            self._path = None  # each part says whose ops it has

    def _targets(self, node: OpNode, local: LocalNode) -> list[str]:
        targets = []
        for index, layout in enumerate(local.choice.outputs):
            hint = node.name if len(local.choice.outputs) == 1 else f"{node.name}_{index}"
            name = self.names.fresh(hint)
            self.names.bind(Ref(node.name, index), layout, name)
            targets.append(name)
        return targets

    def results(self) -> str:
        """The returned tuple."""
        self.segments.enter(len(self.lines), again=False)
        for move in self.source.flow.at_end:
            self.move(move)
        names = [self.names[ref, layout] for ref, layout in self.source.results]
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def axis_lines(lines: Sequence[str], mesh: Mesh) -> list[str]:
    """Definitions of the locals that the body reads: `batch` and the mesh axes."""
    text = "\n".join(lines)
    found = ["batch = ctx.batch"] if "batch" in text else []
    return found + [f'{axis} = ctx.axes["{axis}"]' for axis in mesh.axes if axis in text]


def forward_name(recompute: str) -> str:
    """The function of a block's source that runs it with this recompute."""
    return "forward" if recompute == Recompute.NONE else f"forward_{recompute}"


def block_source(source: BlockSource) -> str:
    """The source file of one block variant: a function for each way to recompute that is used."""
    given = source.flow.produced
    stored = {ref: gather.stored for ref, gather in source.gathers.items() if gather}
    table = [
        f"    {key}: {describe(source.specs[ref], stored.get(ref, given[ref]), source.mesh)}"
        for ref, key in source.weights.items()
    ]
    keys = "".join(f'    "{key}",\n' for key in source.weights.values())
    again = any(steps for _, steps in source.forwards)
    parts = [
        f'"""{source.title}\n\nParameters on this rank:\n' + "\n".join(table) + '\n"""\n'
        if table
        else f'"""{source.title}"""\n',
        HEADER + SEGMENT_IMPORT if again else HEADER,
        f"WEIGHTS = (\n{keys})\n" if keys else "WEIGHTS = ()\n",
        "",
    ]
    gathers = [
        f'    "{source.weights[ref]}": ({gather.axes!r}, {gather.dim}, '
        f"{source.specs[ref].shape[gather.dim].const}),\n"
        for ref, gather in source.gathers.items()
        if gather
    ]
    if gathers:
        note = "# Weights that lie in shards: the axes and the dim they are split on, its extent."
        parts.insert(-1, f"{note}\nGATHERS = {{\n{''.join(gathers)}}}\n")
    functions = ["\n".join(_forward(source, *forward)) for forward in source.forwards]
    return "\n".join([*parts, "\n\n\n".join(functions), ""])


def _forward(source: BlockSource, recompute: str, steps: frozenset[str]) -> list[str]:
    """One forward function, of which `steps` run again in the backward."""
    printer = BodyPrinter(source, steps)
    arguments = printer.bind_arguments()
    for local in source.nodes:
        printer.node(local)
    returned = printer.results()
    results = returned.strip("(,)").split(", ")
    lines = printer.segments.body(printer.lines, arguments, results, printer.names.fresh)
    return [
        f"def {forward_name(recompute)}({', '.join(['w', 'ctx', 'random', *arguments])}):",
        *(f"    {line}" for line in axis_lines(lines, source.mesh)),
        *(f"    {line}" for line in within(lines, f"return {returned}")),
    ]
