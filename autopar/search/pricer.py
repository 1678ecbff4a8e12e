"""Prices blocks of one setting: spaces per tensor degree, compute times, costs of a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.costs.calibration import curve_of
from autopar.costs.collectives import ClusterCollectives
from autopar.costs.compute import OpTime, memory_s, op_time
from autopar.costs.local_op import LocalOp, Order, local_op
from autopar.costs.memory import state_bytes
from autopar.costs.profiles import Profile, TimeSource
from autopar.costs.saved import SavedSet, kept_parameters, saved_refs
from autopar.costs.transient import RunBlock
from autopar.ir.blocks import Block
from autopar.ir.cluster import Axis, DeviceSpec
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, Source
from autopar.ir.mesh import TENSOR, MeshAxis, batch_size
from autopar.ir.placement import Layout, Placement
from autopar.ir.strategy import AxisStrategy
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.plan.flow import BlockFlow, block_edges, block_flow
from autopar.plan.plan import NodeChoice
from autopar.plan.split import Product, split_products
from autopar.rules.context import whole_keys
from autopar.rules.index_expr import LOCAL
from autopar.search.beside import host_floor_s, is_beside
from autopar.search.block import BlockSpace, Option, block_space
from autopar.search.block_cost import BlockCost
from autopar.search.copies import BlockStorages
from autopar.search.grid import Grid
from autopar.search.home import Home, Places, whole_home
from autopar.search.node_costs import NodeCosts
from autopar.search.offered import offered
from autopar.search.paths import Paths
from autopar.search.prices import CollectiveTime, Prices
from autopar.search.recompute import RecomputeProblem, StepSeconds
from autopar.search.running import Running
from autopar.search.setting import Setting
from autopar.search.split_costs import WeightPart


@dataclass
class Pricer:
    """Answers what decisions cost on one kind of home, by default anywhere in the cluster,
    remembering what it has priced."""

    setting: Setting
    home: Home = None  # type: ignore[assignment]  # __post_init__ knows the cluster
    places: Places = None  # type: ignore[assignment]  # as above
    _spaces: dict[object, BlockSpace] = field(default_factory=dict)
    _strategies: dict[object, tuple[AxisStrategy, ...]] = field(default_factory=dict)
    _alike: dict[object, tuple[AxisStrategy, ...]] = field(default_factory=dict)
    _node_options: dict[object, tuple[Option, ...]] = field(default_factory=dict)
    _times: dict[LocalOp, OpTime] = field(default_factory=dict)
    _orders: dict[str, tuple[Order, ...]] = field(default_factory=dict)
    _costs: NodeCosts = field(default_factory=NodeCosts)
    _saved: dict[int, SavedSet] = field(default_factory=dict)
    _kept_parameters: dict[int, frozenset[Ref]] = field(default_factory=dict)
    _prices: dict[object, Prices] = field(default_factory=dict)
    _links: dict[object, ClusterCollectives] = field(default_factory=dict)
    _joined: dict[object, CollectiveTime] = field(default_factory=dict)
    _paths: Paths = field(default_factory=Paths)
    _products: dict[int, Mapping[str, Product]] = field(default_factory=dict)
    _at: dict[Home, Pricer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.home or whole_home(self.setting.cluster)
        self.places = self.places or Places(cluster=self.setting.cluster)
        self._at.setdefault(self.home, self)

    def at(self, home: Home) -> Pricer:
        """What prices the same on a home: all that does not depend on it is shared."""
        if home not in self._at:
            self._at[home] = replace(
                self, home=home, _times={}, _costs=NodeCosts(), _prices={}, _links={}, _joined={}
            )
        return self._at[home]

    def of_stage(self, grid: Grid, stage: int) -> Pricer:
        """What prices a stage, where the grid puts it."""
        return self.at(self.places.homes(grid)[grid.pipe.placement[stage]])

    @cached_property
    def device(self) -> DeviceSpec:
        """The device that has the least FLOP/s, where several share a stage's work."""
        dtype = self.setting.training.precision.param_dtype
        return min(self.home.devices, key=lambda device: device.flops(dtype))

    def memory_s(self, nbytes: float) -> float:
        """Seconds to move bytes through memory, kernels started beside, on the slowest device."""
        return max(memory_s(nbytes, device, kernels=0) for device in self.home.devices)

    @property
    def profile(self) -> Profile | None:
        """The measured times, unless they are of another kind of device of the cluster."""
        found = self.setting.profile
        return found if found is not None and found.machine.row == self.device.name else None

    def block_mesh(self, grid: Grid, block: Block) -> tuple[MeshAxis, ...]:
        """The mesh that the options of a block depend on: not on the sizes of the axes that split
        samples, unless they may split its experts."""
        return grid.mesh if self.splits_experts(block) else grid.block_mesh

    def splits_experts(self, block: Block) -> bool:
        """Whether axes that split samples may split a block's experts."""
        return any(name in self.setting.experts for name in block.nodes)

    def strategies(self, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
        """The strategies of a node on a mesh axis, one object for all that are equal."""
        key = (node.name, axis)
        if key not in self._strategies:
            found = offered(self.setting, node, axis)
            self._strategies[key] = self._alike.setdefault(found, found)
        return self._strategies[key]

    def space(
        self,
        block: Block,
        mesh: tuple[MeshAxis, ...],
        fixed: Mapping[str, Layout] | None = None,
    ) -> BlockSpace:
        """The decisions of a block on a mesh (`block_mesh`), one object for all on which they are
        the same; `fixed` are layouts of parameters shared with other blocks."""
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
                self._spaces[alike] = self._space(nodes, block, mesh, fixed or {}, given, required)
            self._spaces[key] = self._spaces[alike]
        return self._spaces[key]

    def _space(
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

    def prices(self, grid: Grid) -> Prices:
        """Prices on the mesh of a grid."""
        key = (grid.names, grid.sizes, grid.micro_batch, grid.pipeline)
        if key not in self._prices:
            self._prices[key] = Prices(
                names=grid.names,
                sizes=grid.sizes,
                batch=grid.micro_batch * grid.batch_ranks,
                specs=self.setting.specs,
                differentiable=self.setting.differentiable,
                compute=self.compute,
                collective=self.links(grid).time_s,
                wait=self.links(grid).wait_s,
                updated=self.setting.updated,
                bucket_bytes=min(
                    DEFAULT_CAP_BYTES,
                    self.setting.whole_state.weights / grid.pipeline / grid.tensor,
                ),
                paths=self._paths,
                costs=self._costs,
                scatters=self.setting.execution.scatters,
                fuses_loss=self.setting.execution.fuses_loss,
            )
        return self._prices[key]

    def links(self, grid: Grid) -> ClusterCollectives:
        """The collectives along the mesh axes of a grid."""
        key = (grid.names, grid.sizes)
        if key not in self._links:
            self._links[key] = self._collectives(grid.axes())
        return self._links[key]

    def joined_s(self, grid: Grid, op: CollectiveOp, nbytes: float, axes: tuple[str, ...]) -> float:
        """Seconds of a collective over mesh axes together; several must be neighbours."""
        if len(axes) <= 1:
            return self.prices(grid).collective(op, nbytes, axes[0]) if axes else 0.0
        key = (grid.sizes, axes)
        if key not in self._joined:
            self._joined[key] = self._collectives(grid.joined_axes(axes)).time_s
        return self._joined[key](op, nbytes, "+".join(axes))

    def _collectives(self, axes: Sequence[Axis]) -> ClusterCollectives:
        home = self.home
        return ClusterCollectives(home.links, axes, home.first, measured=self.setting.profile)

    def local(self, node: OpNode, option: Option | NodeChoice, prices: Prices) -> LocalOp:
        """A node on the local shapes of an option."""
        inputs, specs = node.inputs(), self.setting.specs
        if node.name not in self._orders:
            self._orders[node.name] = self.setting.storage.orders(node, specs)
        return local_op(
            node,
            input_shapes=tuple(
                prices.local_shape(ref, layout)
                for ref, layout in zip(inputs, whole_keys(node, option.inputs, specs), strict=True)
            ),
            input_dtypes=tuple(specs[ref].dtype for ref in inputs),
            output_shapes=tuple(
                prices.local_shape(Ref(node.name, i), layout)
                for i, layout in enumerate(option.outputs)
            ),
            batch=prices.batch // batch_size(prices.names, prices.sizes),
            grad_inputs=tuple(ref in self.setting.differentiable for ref in inputs),
            orders=self._orders[node.name],
            copying=self.setting.storage.copying,
            fused=self.setting.fused,
            wide=self.setting.wide,
        )

    def op_time(self, op: LocalOp) -> OpTime:
        """Forward and backward seconds of a local op, and where they are from: those of the device
        that takes the longest."""
        if op not in self._times:
            narrow = self.setting.training.precision.product_dtype
            times = [
                op_time(
                    op,
                    device,
                    self.profile if device == self.device else None,
                    product_dtype=narrow,
                    attention=self.setting.execution.attention,
                )
                for device in self.home.devices
            ]
            self._times[op] = max(times, key=lambda time: time.forward_s + time.backward_s)
        return self._times[op]

    def compute(
        self, node: OpNode, option: Option | NodeChoice, prices: Prices
    ) -> tuple[float, float]:
        """Forward and backward seconds of a node under an option."""
        time = self.op_time(self.local(node, option, prices))
        return time.forward_s, time.backward_s

    def saved(self, block: Block) -> SavedSet:
        """Storages that a block keeps for its backward pass; parameters are not counted."""
        if block.index not in self._saved:
            self._saved[block.index] = saved_refs(
                self.setting.block_nodes(block),
                self.setting.specs,
                self.setting.differentiable,
                storage=self.setting.storage,
                exclude=self.setting.source_refs,
                device_kind=self.device.kind,
                fuses_loss=self.setting.execution.fuses_loss,
            )
        return self._saved[block.index]

    def made(self, block: Block) -> tuple[Ref, ...]:
        """The values of a block that it makes and keeps for its backward pass."""
        return tuple(value.ref for value in self.saved(block).values if value.kind == "made")

    def kept_parameters(self, block: Block) -> frozenset[Ref]:
        """The parameters whose values a block's backward reads."""
        if block.index not in self._kept_parameters:
            setting = self.setting
            self._kept_parameters[block.index] = kept_parameters(
                setting.block_nodes(block),
                setting.specs,
                setting.differentiable,
                block.parameters,
                storage=setting.storage,
                device_kind=self.device.kind,
            )
        return self._kept_parameters[block.index]

    def state_factor(self, source: Source) -> float:
        """Bytes held for a parameter per byte of its value: gradient and optimizer state too."""
        state = state_bytes(1024, source.trainable, source.spec.dtype, self.setting.training)
        return state.terms.total_bytes / (1024 * DTYPE_BYTES[source.spec.dtype])

    def cost(
        self,
        block: Block,
        choices: Sequence[NodeChoice],
        layouts: Mapping[str, Layout],
        grid: Grid,
    ) -> BlockCost:
        """The cost of running a block as decided. `layouts` are those of its parameters."""
        passes, flow, again = self._passes(block, choices, layouts, grid)
        held = self.setting.source_refs
        storages, running = self._activations(block, choices, flow, self.prices(grid), held)
        recompute = RecomputeProblem(storages, self.saved(block), held, again, running)
        return replace(passes, ways=recompute.ways())

    def passes(
        self,
        block: Block,
        choices: Sequence[NodeChoice],
        layouts: Mapping[str, Layout],
        grid: Grid,
    ) -> BlockCost:
        """The same without `ways`, which take longer to find than the rest."""
        return self._passes(block, choices, layouts, grid)[0]

    def _passes(
        self,
        block: Block,
        choices: Sequence[NodeChoice],
        layouts: Mapping[str, Layout],
        grid: Grid,
    ) -> tuple[BlockCost, BlockFlow, dict[str, StepSeconds]]:
        """What both passes cost, what moves, and the forward seconds of every step."""
        prices, setting = self.prices(grid), self.setting
        nodes = setting.block_nodes(block)
        flow = self.flow(block, nodes, choices, layouts, grid)
        forward = backward = 0.0
        compute = (0.0, 0.0)
        sources: Counter[TimeSource] = Counter()
        unmeasured: set[LocalOp] = set()
        again: dict[str, StepSeconds] = {}
        apart = WeightPart(products=self.products(block), prices=prices, device=self.device)
        for node, choice in zip(nodes, choices, strict=True):
            op, option = self.local(node, choice, prices), self.option(node, choice, grid)
            time = self.op_time(op)
            op_forward, op_backward = time.forward_s, time.backward_s
            inner = prices.inner_s(node, option)
            compute = (compute[0] + op_forward, compute[1] + op_backward)
            if all(strategy.kernel == LOCAL.name for strategy in option.strategies):
                apart.add(node, choice, op, op_backward)
            again[node.name] = StepSeconds(op_forward + inner[0], op_forward)
            forward, backward = forward + again[node.name].total, backward + op_backward + inner[1]
            sources[time.source] += 1
            if setting.profile is not None and setting.profile.reason(op):
                unmeasured.add(op)
        beside = [0.0, 0.0]
        for move in flow.moves():
            moved = prices.move_s(move)
            again[move.name] = StepSeconds(moved[0], 0.0)
            forward, backward = forward + moved[0], backward + moved[1]
            for direction, made in enumerate((move.transition.forward, move.transition.backward)):
                beside[direction] += moved[direction] * is_beside(prices.names[move.axis], made)
        forward -= self._hidden_s(beside[0], compute[0], grid)
        backward -= self._hidden_s(beside[1], compute[1], grid)
        if setting.execution.host_s:
            floor = host_floor_s(self, nodes, choices, flow, grid)
            forward, backward = max(forward, floor[0]), max(backward, floor[1])
        passes = BlockCost(
            forward_s=forward,
            backward_s=backward,
            forward_compute_s=compute[0],
            backward_compute_s=compute[1],
            priced_ops=len(nodes) - sources[TimeSource.FREE],
            measured_ops=sources[TimeSource.MEASURED],
            interpolated_ops=sources[TimeSource.INTERPOLATED],
            unmeasured=frozenset(unmeasured),
            weight_s=apart.seconds,
            apart_s=apart.apart_s,
            deferred_bytes=apart.held_bytes,
        )
        return passes, flow, again

    def _hidden_s(self, tensor_s: float, compute_s: float, grid: Grid) -> float:
        """What of the collectives of the tensor axis that go beside products costs no time."""
        hidden = curve_of(self.device).hidden
        return self.setting.execution.hidden_tensor_s(tensor_s, compute_s, grid.tensor, hidden)

    def products(self, block: Block) -> Mapping[str, Product]:
        """The ops of a block whose weight gradients a split backward computes apart."""
        if block.index not in self._products:
            self._products[block.index] = split_products(
                self.setting.block_nodes(block), block.parameters, self.setting.specs
            )
        return self._products[block.index]

    def flow(
        self,
        block: Block,
        nodes: Sequence[OpNode],
        choices: Sequence[NodeChoice],
        layouts: Mapping[str, Layout],
        grid: Grid,
    ) -> BlockFlow:
        """Where the values of a block as decided move. `layouts` are those of its parameters."""
        setting = self.setting
        given, required = block_edges(setting.chain, block, setting.shared(grid.mesh))
        given |= {ref: layouts[setting.sources[ref.name].fqn] for ref in block.parameters}
        by_node = {choice.node: choice for choice in choices}
        return block_flow(nodes, by_node, given, required, setting.differentiable)

    def option(self, node: OpNode, choice: NodeChoice, grid: Grid) -> Option:
        """A choice with the strategies that it stands for."""
        strategies = []
        for position, axis in enumerate(grid.mesh):
            inputs = tuple(layout[position] for layout in choice.inputs)
            outputs = tuple(layout[position] for layout in choice.outputs)
            offered = self.strategies(node, axis)
            strategies.append(
                next(s for s in offered if s.inputs == inputs and s.outputs == outputs)
            )
        return Option(inputs=choice.inputs, outputs=choice.outputs, strategies=tuple(strategies))

    def _activations(
        self,
        block: Block,
        choices: Sequence[NodeChoice],
        flow: BlockFlow,
        prices: Prices,
        held: frozenset[Ref],
    ) -> tuple[BlockStorages, RunBlock]:
        """Where the block's values lie, and its steps as memory sees them."""
        nodes, by_node = self.setting.block_nodes(block), {c.node: c for c in choices}
        storages = BlockStorages(nodes, by_node, flow, prices, self.setting.storage)
        running = Running(
            nodes=nodes,
            choices=by_node,
            flow=flow,
            storages=storages,
            prices=prices,
            saved=self.saved(block),
            held=held,
            split=frozenset(self.products(block)),
        )
        boundaries = self.setting.chain.boundaries
        after = boundaries[block.index] if block.index < len(boundaries) else ()
        loss = self.setting.graph.loss
        returned = {*after, *(() if loss is None else (loss,))}
        return storages, running.block(block.inputs, block.outputs, returned)
