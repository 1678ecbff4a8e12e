"""What blocks may decide on every mesh: their spaces, made once for all on which they are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.blocks import Block
from autopar.ir.graph import OpNode, Ref
from autopar.ir.mesh import TENSOR, MeshAxis
from autopar.ir.placement import Layout, Placement
from autopar.ir.strategy import AxisStrategy
from autopar.plan.flow import block_edges
from autopar.plan.plan import NodeChoice
from autopar.search.block import BlockSpace, Option, block_space
from autopar.search.grid import Grid
from autopar.search.offered import offered
from autopar.search.setting import Setting


@dataclass
class Spaces:
    """The spaces of the blocks of one setting."""

    setting: Setting
    _spaces: dict[object, BlockSpace] = field(default_factory=dict)
    _strategies: dict[object, tuple[AxisStrategy, ...]] = field(default_factory=dict)
    _alike: dict[object, tuple[AxisStrategy, ...]] = field(default_factory=dict)
    _node_options: dict[object, tuple[Option, ...]] = field(default_factory=dict)

    def of(self, block: Block, grid: Grid, fixed: Mapping[str, Layout] | None = None) -> BlockSpace:
        """The decisions of a block on a grid: they depend on the sizes of the axes that split
        samples only where these may split its experts. `fixed` are layouts of parameters shared
        with other blocks."""
        experts = any(name in self.setting.experts for name in block.nodes)
        return self.on(block, grid.mesh if experts else grid.block_mesh, fixed)

    def on(
        self, block: Block, mesh: tuple[MeshAxis, ...], fixed: Mapping[str, Layout] | None = None
    ) -> BlockSpace:
        """The same on a mesh, one object for all on which they are the same."""
        key = (block.index, mesh, tuple(sorted((fixed or {}).items())))
        if key not in self._spaces:
            setting, nodes = self.setting, self.setting.block_nodes(block)
            given, required = block_edges(setting.chain, block, setting.shared(mesh))
            alike = (
                *(block.index, key[2], tuple(axis.name for axis in mesh)),
                *(tuple(id(self.strategies(node, axis)) for node in nodes) for axis in mesh),
                *(tuple(given.items()), tuple(required.items())),
            )
            if alike not in self._spaces:
                self._spaces[alike] = self._made(nodes, block, mesh, fixed or {}, given, required)
            self._spaces[key] = self._spaces[alike]
        return self._spaces[key]

    def strategies(self, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        """The strategies of a node on a mesh axis, one object for all that are equal."""
        key = (node.name, axis)
        if key not in self._strategies:
            found = offered(self.setting, node, axis)
            self._strategies[key] = self._alike.setdefault(found, found)
        return self._strategies[key]

    def option(self, node: OpNode, choice: NodeChoice, mesh: Sequence[MeshAxis]) -> Option:
        """A choice with the strategies that it stands for."""
        strategies = []
        for position, axis in enumerate(mesh):
            inputs = tuple(layout[position] for layout in choice.inputs)
            outputs = tuple(layout[position] for layout in choice.outputs)
            found = self.strategies(node, axis)
            strategies.append(next(s for s in found if s.inputs == inputs and s.outputs == outputs))
        return Option(inputs=choice.inputs, outputs=choice.outputs, strategies=tuple(strategies))

    def _made(
        self,
        nodes: Sequence[OpNode],
        block: Block,
        mesh: tuple[MeshAxis, ...],
        fixed: Mapping[str, Layout],
        given: Mapping[Ref, Layout],
        required: Mapping[Ref, Layout],
    ) -> BlockSpace:
        setting, at = self.setting, [axis.name for axis in mesh].index(TENSOR)
        pinned: dict[str, dict[int, Placement]] = {
            name: {at: placement} for name, placement in setting.pins.weights
        }
        for name, layout in fixed.items():
            pinned[name] = dict(enumerate(layout))
        return block_space(
            nodes,
            mesh,
            self.strategies,
            setting.sequence,
            parameters=[setting.sources[ref.name] for ref in block.parameters],
            given=given,
            required=required,
            loss=setting.graph.loss,
            specs=setting.specs,
            differentiable=setting.differentiable,
            pinned=pinned,
            known=self._node_options,
        )
