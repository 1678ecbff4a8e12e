"""Prices blocks of one setting: spaces per tensor degree, compute times, costs of a decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from autopar.costs.collectives import ClusterCollectives
from autopar.costs.compute import op_time
from autopar.costs.local_op import LocalOp, local_op
from autopar.costs.memory import StateBytes, state_bytes
from autopar.costs.optimizer_state import optimizer_step_bytes
from autopar.costs.saved import SavedSet, saved_refs
from autopar.costs.transient import transient_bytes
from autopar.ir.blocks import Block
from autopar.ir.cluster import Axis, DeviceSpec
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, Source
from autopar.ir.placement import Layout, Placement, R, Shard
from autopar.ir.strategy import AxisStrategy
from autopar.plan.flow import DATA, STRATEGY_BATCH, TENSOR, BlockFlow, block_edges, block_flow
from autopar.plan.plan import NodeChoice
from autopar.rules import axis_strategies
from autopar.search.block import HEAVY_OPS, BlockSpace, Option, block_space
from autopar.search.copies import BlockStorages
from autopar.search.prices import CollectiveTime, Prices
from autopar.search.setting import AXES, Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """One point of the outer search: degrees, micro-batch per data rank, schedule."""

    pipeline: int
    data: int
    tensor: int
    micro_batch: int
    micro_batches: int
    schedule: str

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the mesh axes of a stage."""
        return (self.data, self.tensor)

    def axes(self) -> tuple[Axis, ...]:
        """Mesh axes of a stage on the devices: tensor innermost, pipeline outermost."""
        return (
            Axis(name=DATA, size=self.data, stride=self.tensor),
            Axis(name=TENSOR, size=self.tensor, stride=1),
        )

    def pipeline_axis(self) -> Axis:
        """The axis along the stages."""
        return Axis(name="pipeline", size=self.pipeline, stride=self.data * self.tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """What one way to run a block costs, without and with running its forward again.

    Seconds are per micro-batch, but for `sync_s` and `optimizer_s`, which are per step. Bytes are
    per rank: `state` (weights, gradients, master weights, optimizer state), `saved_bytes` and
    `input_bytes` per micro-batch in flight, `transient_bytes` while the block runs.
    """

    forward_s: float
    backward_s: float
    sync_s: float
    optimizer_s: float
    state: StateBytes
    saved_bytes: int
    input_bytes: int
    transient_bytes: int
    priced_ops: int
    measured_ops: int


@dataclass
class Pricer:
    """Answers what decisions cost, remembering what it has priced."""

    setting: Setting
    _spaces: dict[object, BlockSpace] = field(default_factory=dict)
    _strategies: dict[tuple[str, int], tuple[AxisStrategy, ...]] = field(default_factory=dict)
    _times: dict[LocalOp, tuple[float, float, bool]] = field(default_factory=dict)
    _options: dict[object, tuple[float, float]] = field(default_factory=dict)
    _saved: dict[int, SavedSet] = field(default_factory=dict)
    _prices: dict[object, Prices] = field(default_factory=dict)
    _links: dict[tuple[int, int], CollectiveTime] = field(default_factory=dict)
    _moves: dict[object, dict[object, float]] = field(default_factory=dict)

    @property
    def device(self) -> DeviceSpec:
        """The slowest device; every stage is priced on it where kinds differ."""
        devices = [group.device for group in self.setting.cluster.groups]
        return min(devices, key=lambda d: d.flops(self.setting.training.precision.param_dtype))

    def strategies(self, node: OpNode, axis: int, size: int) -> tuple[AxisStrategy, ...]:
        """The strategies of a node on a mesh axis of `size` ranks."""
        if axis == 0:
            return (self.setting.batch.strategies[node.name],)
        key = (node.name, size)
        if key not in self._strategies:
            specs = self.setting.specs
            found = axis_strategies(
                node, specs, size=size, batch=STRATEGY_BATCH, hints=self.setting.hints
            )
            self._strategies[key] = found[:1] if size == 1 else self._honour_pin(node, size, found)
        return self._strategies[key]

    def _honour_pin(
        self, node: OpNode, size: int, found: tuple[AxisStrategy, ...]
    ) -> tuple[AxisStrategy, ...]:
        """A pinned tensor degree splits every heavy op that can be split off the batch dim."""
        if self.setting.pins.tensor != size or node.op not in HEAVY_OPS:
            return found
        return tuple(s for s in found if self.splits_work(node, s)) or found

    def splits_work(self, node: OpNode, strategy: AxisStrategy) -> bool:
        """Whether a strategy of the tensor axis shares out the op, other than by samples."""
        placed = zip(node.inputs(), strategy.inputs, strict=True)
        return any(
            isinstance(p, Shard) and not self.setting.specs[ref].shape[p.dim].is_batch
            for ref, p in placed
        )

    def space(
        self, block: Block, sizes: Sequence[int], fixed: Mapping[str, Layout] | None = None
    ) -> BlockSpace:
        """The decisions of a block on a mesh; `fixed` are layouts of parameters shared with other
        blocks."""
        tensor = sizes[1]
        key = (block.index, tensor, tuple(sorted((fixed or {}).items())))
        if key not in self._spaces:
            setting = self.setting
            given, required = block_edges(setting.chain, block, setting.shared)
            pinned: dict[str, dict[int, Placement]] = {
                name: {1: placement} for name, placement in setting.pins.weights
            }
            for name, layout in (fixed or {}).items():
                pinned[name] = dict(enumerate(layout))
            self._spaces[key] = block_space(
                setting.block_nodes(block),
                AXES,
                lambda node, axis: self.strategies(node, axis, sizes[axis]),
                parameters=[setting.sources[ref.name] for ref in block.parameters],
                given=given,
                required=required,
                loss=setting.graph.loss,
                specs=setting.specs,
                differentiable=setting.differentiable,
                pinned=pinned,
            )
        return self._spaces[key]

    def prices(self, grid: Grid, *, with_sync: bool = True) -> Prices:
        """Prices on the mesh of a grid. Without sync gradients cost nothing to sum."""
        shares = grid.micro_batches if with_sync else 0
        key = (grid.sizes, grid.micro_batch, shares)
        if key not in self._prices:
            if grid.sizes not in self._links:
                links = ClusterCollectives(self.setting.cluster, grid.axes())
                self._links[grid.sizes] = links.time_s
            batch = grid.micro_batch * grid.data
            self._prices[key] = Prices(
                names=AXES,
                sizes=grid.sizes,
                batch=batch,
                micro_batches=shares,
                specs=self.setting.specs,
                differentiable=self.setting.differentiable,
                compute=self.compute,
                collective=self._links[grid.sizes],
                moves=self._moves.setdefault((grid.sizes, batch), {}),
            )
        return self._prices[key]

    def local(self, node: OpNode, option: Option | NodeChoice, prices: Prices) -> LocalOp:
        """A node on the local shapes of an option."""
        inputs = node.inputs()
        specs = self.setting.specs
        return local_op(
            node,
            input_shapes=tuple(
                prices.local_shape(ref, layout)
                for ref, layout in zip(inputs, option.inputs, strict=True)
            ),
            input_dtypes=tuple(specs[ref].dtype for ref in inputs),
            output_shapes=tuple(
                prices.local_shape(Ref(node.name, i), layout)
                for i, layout in enumerate(option.outputs)
            ),
            batch=prices.batch // prices.sizes[0],
            grad_inputs=tuple(ref in self.setting.differentiable for ref in inputs),
            copying=self.setting.storage.copying,
        )

    def op_seconds(self, op: LocalOp) -> tuple[float, float, bool]:
        """Forward and backward seconds of a local op, and whether they were measured."""
        if op not in self._times:
            time = op_time(op, self.device, self.setting.profile)
            self._times[op] = (time.forward_s, time.backward_s, time.measured)
        return self._times[op]

    def compute(
        self, node: OpNode, option: Option | NodeChoice, prices: Prices
    ) -> tuple[float, float]:
        """Forward and backward seconds of a node under an option."""
        key = (node.name, option.inputs, option.outputs, prices.batch, prices.sizes)
        if key not in self._options:
            forward, backward, _ = self.op_seconds(self.local(node, option, prices))
            self._options[key] = (forward, backward)
        return self._options[key]

    def saved(self, block: Block) -> SavedSet:
        """Storages that a block keeps for its backward pass; parameters are not counted."""
        if block.index not in self._saved:
            held = {Ref(s.name) for s in self.setting.graph.sources}
            self._saved[block.index] = saved_refs(
                self.setting.block_nodes(block),
                self.setting.specs,
                self.setting.differentiable,
                storage=self.setting.storage,
                exclude=held,
                device_kind=self.device.kind,
            )
        return self._saved[block.index]

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
        prices, setting = self.prices(grid), self.setting
        nodes = setting.block_nodes(block)
        flow = self._flow(block, nodes, choices, layouts)
        forward = backward = 0.0
        measured = 0
        for node, choice in zip(nodes, choices, strict=True):
            op_forward, op_backward, known = self.op_seconds(self.local(node, choice, prices))
            inner = prices.inner_s(node, self._option(node, choice, grid))
            forward, backward = forward + op_forward + inner[0], backward + op_backward + inner[1]
            measured += known
        for move in flow.moves():
            moved = prices.move_s(move)
            forward, backward = forward + moved[0], backward + moved[1]
        saved, inputs, transient = self._activations(block, choices, flow, prices)
        sync, optimizer = self._updates(block, layouts, prices)
        return BlockCost(
            forward_s=forward,
            backward_s=backward,
            sync_s=sync,
            optimizer_s=optimizer,
            state=self.parameter_state(block, tuple(layouts.items()), grid),
            saved_bytes=saved,
            input_bytes=inputs,
            transient_bytes=transient,
            priced_ops=len(nodes),
            measured_ops=measured,
        )

    def _flow(
        self,
        block: Block,
        nodes: Sequence[OpNode],
        choices: Sequence[NodeChoice],
        layouts: Mapping[str, Layout],
    ) -> BlockFlow:
        setting = self.setting
        given, required = block_edges(setting.chain, block, setting.shared)
        given |= {ref: layouts[setting.sources[ref.name].fqn] for ref in block.parameters}
        by_node = {choice.node: choice for choice in choices}
        return block_flow(nodes, by_node, given, required, setting.differentiable)

    def _option(self, node: OpNode, choice: NodeChoice, grid: Grid) -> Option:
        strategies = []
        for axis, size in enumerate(grid.sizes):
            inputs = tuple(layout[axis] for layout in choice.inputs)
            outputs = tuple(layout[axis] for layout in choice.outputs)
            offered = self.strategies(node, axis, size)
            strategies.append(
                next(s for s in offered if s.inputs == inputs and s.outputs == outputs)
            )
        return Option(inputs=choice.inputs, outputs=choice.outputs, strategies=tuple(strategies))

    def _activations(
        self, block: Block, choices: Sequence[NodeChoice], flow: BlockFlow, prices: Prices
    ) -> tuple[int, int, int]:
        saved, nodes = self.saved(block), self.setting.block_nodes(block)
        whole = (R,) * len(AXES)
        by_node = {choice.node: choice for choice in choices}
        storages = BlockStorages(nodes, by_node, flow, prices, self.setting.storage)
        kept = storages.kept_bytes(saved, [Ref(name) for name in self.setting.sources])
        inputs = sum(prices.local_bytes(ref, flow.produced[ref]) for ref in block.inputs)
        transient = transient_bytes(
            nodes,
            lambda ref: prices.local_bytes(ref, flow.produced.get(ref, whole)),
            storage=self.setting.storage,
            saved=saved,
            differentiable=self.setting.differentiable,
            outputs=block.outputs,
            parameters=block.parameters,
            specs=self.setting.specs,
        )
        return kept, inputs, transient.peak_bytes + storages.copied_bytes

    def parameter_state(
        self,
        block: Block,
        layouts: Sequence[tuple[str, Layout]],
        grid: Grid,
        *,
        skip: Collection[str] = (),
    ) -> StateBytes:
        """State held for a block's parameters; those whose source is in `skip` are not counted.

        `layouts` name the parameters of the first block of the class.
        """
        first = self.setting.chain.representative(block.class_index)
        by_name = dict(layouts)
        prices, terms = self.prices(grid), StateBytes(weights=0).terms
        for ref, model in zip(block.parameters, first.parameters, strict=True):
            if ref.name not in skip:
                layout = by_name[self.setting.sources[model.name].fqn]
                terms += self._state(ref, layout, prices).terms
        return StateBytes(
            weights=terms.weights_bytes,
            gradients=terms.gradients_bytes,
            master=terms.master_bytes,
            optimizer=terms.optimizer_bytes,
        )

    def _state(self, ref: Ref, layout: Layout, prices: Prices) -> StateBytes:
        source = self.setting.sources[ref.name]
        numel = prod(prices.local_shape(ref, layout))
        return state_bytes(numel, source.trainable, source.spec.dtype, self.setting.training)

    def _updates(
        self, block: Block, layouts: Mapping[str, Layout], prices: Prices
    ) -> tuple[float, float]:
        """Seconds to sum the gradients of a block's parameters and to step them."""
        setting, sync, moved = self.setting, 0.0, 0
        training, precision = setting.training, setting.training.precision
        for ref in block.parameters:
            source = setting.sources[ref.name]
            layout = layouts[source.fqn]
            if source.trainable:
                sync += prices.sync_s(ref, layout)
                moved += optimizer_step_bytes(
                    training.optimizer,
                    training.optimizer_kwargs,
                    prod(prices.local_shape(ref, layout)),
                    precision.param_dtype,
                    precision.grad_dtype,
                    master=precision.master,
                )
        return sync, moved / self.device.memory_bandwidth_bytes_s
