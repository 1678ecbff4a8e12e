"""A pipeline stage as a source file: set-up values, then its blocks in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from autopar.codegen.block import (
    HEADER,
    BlockSource,
    BodyPrinter,
    Gather,
    axis_lines,
    block_source,
    forward_name,
)
from autopar.codegen.model import ModelView
from autopar.ir.blocks import Block
from autopar.ir.graph import Ref, SourceKind
from autopar.ir.placement import Layout, Shard
from autopar.plan.flow import BlockFlow, block_flow
from autopar.plan.plan import BlockPlan, StagePlan, Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightKeys:
    """Names by which a variant's source reads its parameters, relative to the block's own path."""

    keys: Mapping[Ref, str]
    own: tuple[bool, ...]


def weight_keys(view: ModelView, variant: Variant) -> WeightKeys:
    """Keys for the parameters of a class: those that differ between blocks lose their prefix."""
    first = view.chain.representative(variant.class_index)
    members = [view.chain.blocks[i] for i in view.chain.classes[variant.class_index].members]
    own = tuple(len({m.parameters[i] for m in members}) > 1 for i in range(len(first.parameters)))
    names = [view.sources[ref.name].fqn for ref in first.parameters]
    prefix = dotted_prefix([name for name, mine in zip(names, own, strict=True) if mine])
    keys = {
        ref: name.removeprefix(prefix) if mine else name
        for ref, name, mine in zip(first.parameters, names, own, strict=True)
    }
    if len(set(keys.values())) < len(keys):
        keys = dict(zip(first.parameters, names, strict=True))
    return WeightKeys(keys=keys, own=own)


def dotted_prefix(names: Sequence[str]) -> str:
    """The longest common module path of some names, with its trailing dot."""
    paths = [name.split(".")[:-1] for name in names]
    levels = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    common = [parts[0] for parts in levels]
    return ".".join([*common, ""]) if common else ""


def variant_source(view: ModelView, variant: Variant) -> str:
    """The source file of a variant."""
    view = view.running(variant)
    block, flow = view.variant_flow(variant)
    members = view.chain.classes[variant.class_index].members
    users = [b for stage in view.plan.stages for b in stage.blocks if b.variant == variant.name]
    mesh = " x ".join(f"{a} {s}" for a, s in zip(view.mesh.axes, view.mesh.sizes, strict=True))
    where = users[0].module_path or f"block {users[0].index}" if users else "no block"
    title = (
        f"Block `{variant.name}`: runs {len(users)} of {len(members)} equal blocks, "
        f"first {where}. Mesh {mesh}."
    )
    choices = {choice.node: choice for choice in variant.choices}
    return block_source(
        BlockSource(
            title=title,
            nodes=view.local_nodes(block.nodes, choices),
            flow=flow,
            weights=weight_keys(view, variant).keys,
            arguments=(*block.inputs, *block.shared),
            results=block_results(view, block, flow),
            specs=view.specs,
            mesh=view.mesh,
            differentiable=view.differentiable,
            gathers=dict(zip(block.parameters, variant_gathers(view, variant), strict=True)),
            forwards=tuple(
                (name, frozenset(variant.steps_again(name)))
                for name in dict.fromkeys(user.recompute for user in users)
            ),
        )
    )


def variant_gathers(view: ModelView, variant: Variant) -> list[Gather | None]:
    """For each parameter of a variant how it is gathered, if it lies in shards."""
    user = view.variant_user(variant)
    found = view.gathers(user)
    gathers: list[Gather | None] = []
    for ref in user.parameters:
        shard = found.get(ref)
        if shard is None:
            gathers.append(None)
        else:
            stored = view.parameter_plans[ref.name].stored
            gathers.append(Gather(axes=shard.axes, dim=shard.dim, stored=stored))
    return gathers


def block_results(view: ModelView, block: Block, flow: BlockFlow) -> tuple[tuple[Ref, Layout], ...]:
    """The values a block returns and the layout of each: as required, or as they were made."""
    crossing = {ref for boundary in view.chain.boundaries for ref in boundary}
    return tuple(
        (ref, view.shared[ref] if ref in crossing else flow.produced[ref]) for ref in block.outputs
    )


def boundary_text(view: ModelView, refs: Sequence[Ref]) -> str:
    """BoundarySpec tuples for values that cross between stages."""
    items = []
    for ref in refs:
        spec = view.specs[ref]
        sizes = ", ".join(f"Size({s.const}, {s.per_sample})" for s in spec.shape)
        shape = f"({sizes},)" if len(spec.shape) == 1 else f"({sizes})"
        grad = ref in view.differentiable
        cut = _boundary_layout(view, ref)
        items.append(
            f'BoundarySpec(name="{ref}", shape={shape}, dtype="{spec.dtype}", '
            f"requires_grad={grad}{cut})"
        )
    return "(" + "".join(f"\n    {item}," for item in items) + ("\n)" if items else ")")


def _boundary_layout(view: ModelView, ref: Ref) -> str:
    """The axes other than those of the samples that split a value, on some stage, as an
    argument."""
    plan = view.plan
    meshes = zip(*map(plan.mesh, plan.stages), strict=True)
    widest = (max(axes, key=lambda axis: axis.size) for axes in meshes)
    split = [
        f'("{axis.name}", {placement!r})'
        for axis, placement in zip(widest, view.shared[ref], strict=True)
        if isinstance(placement, Shard) and not axis.splits_samples and axis.size > 1
    ]
    return f", layout=({', '.join(split)},)" if split else ""


class StagePrinter:
    """Prints the forward function of one stage."""

    def __init__(self, view: ModelView, stage: StagePlan) -> None:
        self.view, self.stage = view.at(stage), stage
        self.blocks = [view.chain.blocks[b.index] for b in stage.blocks]
        self.variants = {variant.name: variant for variant in view.plan.variants}

    def received(self) -> tuple[Ref, ...]:
        """Values from the previous stage."""
        first = self.stage.blocks[0].index
        return self.view.chain.boundaries[first - 1] if first else ()

    def sent(self) -> tuple[Ref, ...]:
        """Values for the next stage."""
        last = self.stage.blocks[-1].index
        return self.view.chain.boundaries[last] if last < len(self.view.chain.blocks) - 1 else ()

    def outputs(self) -> tuple[Ref, ...]:
        """The model's outputs, other than the loss, that this stage makes."""
        made = {ref for block in self.blocks for ref in block.outputs}
        return tuple(ref for ref in self.view.graph.outputs if ref in made)

    def layout_of(self, ref: Ref) -> Layout:
        """Layout in which a block of this stage returns a value."""
        for use, block in zip(self.stage.blocks, self.blocks, strict=True):
            if ref in block.outputs:
                return self._produced(use, block, ref)
        return self.view.shared[ref]

    def _produced(self, use: BlockPlan, block: Block, ref: Ref) -> Layout:
        variant = self.variants[use.variant]
        first, flow = self.view.variant_flow(variant)
        position = block.outputs.index(ref)
        return block_results(self.view, first, flow)[position][1]

    def source(self) -> str:
        """The source file of the stage."""
        body, sums = self._forward(), self._setup_sums()
        used = sorted({use.variant for use in self.stage.blocks})
        imports = "".join(f"from . import {name}\n" for name in used)
        first, last = self.stage.blocks[0].index, self.stage.blocks[-1].index
        title = (
            f'"""Stage {self.stage.index} of {len(self.view.plan.stages)}: blocks {first} to '
            f'{last}, on {len(self.stage.ranks)} ranks."""\n'
        )
        return "\n".join(
            [
                title,
                HEADER.rstrip()
                + f"\nfrom autopar.runtime.program import {self._program_names()}\n",
                imports,
                f"RECEIVES = {boundary_text(self.view, self.received())}",
                f"SENDS = {boundary_text(self.view, self.sent())}",
                f"INPUTS = {self._inputs()!r}",
                "",
                "",
                *sums,
                *body,
                "",
            ]
        )

    def _program_names(self) -> str:
        """What the source takes from the runtime."""
        ends = (*self.received(), *self.sent())
        cut = any(_boundary_layout(self.view, ref) for ref in ends)
        return f"BoundarySpec, {'Shard, ' if cut else ''}Size, pick"

    def _inputs(self) -> tuple[str, ...]:
        """Keys of the batch entries that the stage reads."""
        view = self.view
        read = {ref.name for ref in self._shared()} | {
            ref.name
            for name in view.setup_closure(self._shared())
            for ref in view.nodes[name].inputs()
        }
        return tuple(
            source.fqn
            for source in view.graph.sources
            if source.kind is SourceKind.INPUT and source.name in read
        )

    def _shared(self) -> tuple[Ref, ...]:
        return self.view.stage_shared(self.stage)

    def _printer(self, names: Sequence[str]) -> BodyPrinter:
        """A printer whose inputs, buffers and set-up sums are bound to what the stage is given."""
        view = self.view
        choices = view.setup_choices(names)
        given = dict(view.shared)
        flow = block_flow(
            [view.nodes[name] for name in names], choices, given, {}, view.differentiable
        )
        printer = BodyPrinter(
            BlockSource(
                title="",
                nodes=view.local_nodes(names, choices),
                flow=flow,
                weights={},
                arguments=(),
                results=(),
                specs=view.specs,
                mesh=view.mesh,
                differentiable=view.differentiable,
            )
        )
        for source in view.graph.sources:
            ref = Ref(source.name)
            text = (
                f'inputs["{source.fqn}"]'
                if source.kind is SourceKind.INPUT
                else f'w["{source.fqn}"]'
            )
            printer.names.bind(ref, given[ref], text)
        for name in view.batch.setup_sums:
            printer.names.bind(Ref(name), given[Ref(name)], f'setup["{name}"]')
        return printer

    def _setup_sums(self) -> list[str]:
        """The function that gives this micro-batch's share of the sums over all samples."""
        view = self.view
        wanted = view.stage_sums(self.stage)
        if not wanted:
            return ["SETUP_SUMS = None", "", ""]
        names = view.setup_closure([Ref(name) for name in wanted])
        printer = self._printer(names)
        for local in printer.source.nodes:
            printer.node(local)
        flow = printer.source.flow
        entries = ", ".join(
            f'"{name}": {printer.names[Ref(name), flow.produced[Ref(name)]]}' for name in wanted
        )
        return [
            "def setup_sums(w, ctx, inputs):",
            '    """Summands of values that are summed over all samples before the first step."""',
            *(f"    {line}" for line in axis_lines(printer.lines, view.mesh)),
            *(f"    {line}" for line in printer.lines),
            f"    return {{{entries}}}",
            "",
            "",
            "SETUP_SUMS = setup_sums",
            "",
            "",
        ]

    def _forward(self) -> list[str]:
        view = self.view
        names = view.setup_closure(self._shared(), stop=view.batch.setup_sums)
        printer = self._printer(names)
        for local in printer.source.nodes:
            printer.node(local)
        received = [printer.names.fresh(str(ref)) for ref in self.received()]
        for ref, name in zip(self.received(), received, strict=True):
            printer.names.bind(ref, view.shared[ref], name)
        if received:
            printer.lines.append(
                f"{', '.join(received)}{',' if len(received) == 1 else ''} = received"
            )
        ahead = [self._ahead(use, block) for use, block in self._uses()]
        gathers = any(is_ahead for _, is_ahead in ahead)
        if gathers:
            printer.lines.append(f"w_next = {ahead[0][0]}")
        for i, (use, block) in enumerate(self._uses()):
            printer.lines.append(f"# -- block {block.index}: {block.module_path or 'model'}")
            printer.lines.append(f"w_block = {'w_next' if gathers else ahead[i][0]}")
            if gathers and i + 1 < len(ahead):
                text, is_ahead = ahead[i + 1]
                if is_ahead:
                    printer.lines.append("# the next block's weights come while this block runs")
                printer.lines.append(f"w_next = {text}")
            self._call_block(printer, use, block)
        results = [printer.names[ref, view.shared[ref]] for ref in self.sent()]
        if not self.sent():
            results = [printer.names[ref, self.layout_of(ref)] for ref in self._finals()]
        else:
            results += [printer.names[ref, self.layout_of(ref)] for ref in self.outputs()]
        return [
            "def forward(w, ctx, received, inputs, setup):",
            *(f"    {line}" for line in axis_lines(printer.lines, view.mesh)),
            *(f"    {line}" for line in printer.lines),
            f"    return ({', '.join(results)}{',' if len(results) == 1 else ''})",
        ]

    def _finals(self) -> tuple[Ref, ...]:
        loss = self.view.graph.loss
        return ((loss,) if loss is not None else ()) + self.outputs()

    def _call_block(self, printer: BodyPrinter, use: BlockPlan, block: Block) -> None:
        view, variant = self.view, self.variants[use.variant]
        first, flow = view.variant_flow(variant)
        arguments = [printer.names[ref, view.shared[ref]] for ref in (*block.inputs, *block.shared)]
        results = block_results(view, first, flow)
        names = []
        for ref, (_, layout) in zip(block.outputs, results, strict=True):
            name = printer.names.fresh(str(ref))
            printer.names.bind(ref, layout, name)
            names.append(name)
        random = view.first_random(block.nodes)
        call = ["w_block", "ctx", str(random), *arguments]
        text = f"{use.variant}.{forward_name(use.recompute)}({', '.join(call)})"
        printer.lines.append(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {text}")

    def _uses(self) -> Iterator[tuple[BlockPlan, Block]]:
        return zip(self.stage.blocks, self.blocks, strict=True)

    def _ahead(self, use: BlockPlan, block: Block) -> tuple[str, bool]:
        """The weights of a block, and whether that starts to gather some."""
        text = self._weights(self.variants[use.variant], block)
        if not self.view.gathers(block):
            return text, False
        return f"comm.prefetch({text}, {use.variant}.GATHERS, ctx)", True

    def _weights(self, variant: Variant, block: Block) -> str:
        keys = weight_keys(self.view, variant)
        names = [self.view.sources[ref.name].fqn for ref in block.parameters]
        wanted = list(keys.keys.values())
        own = [(n, k) for n, k, mine in zip(names, wanted, keys.own, strict=True) if mine]
        prefixes = {n[: -len(k)] if n.endswith(k) else None for n, k in own}
        if len(prefixes) <= 1 and None not in prefixes:
            prefix = next(iter(prefixes), "")
            return f'pick(w, {variant.name}.WEIGHTS, "{prefix}")'
        pairs = ", ".join(f'"{k}": w["{n}"]' for n, k in zip(names, wanted, strict=True))
        return f"{{{pairs}}}"
