"""Prices what runs and moves on the meshes of one setting: ops, collectives, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.costs.collectives import ClusterCollectives
from autopar.costs.compute import OpTime, memory_s, op_time
from autopar.costs.local_op import LocalOp, Order, local_op
from autopar.costs.profiles import Profile
from autopar.ir.cluster import Axis, DeviceSpec
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import OpNode, Ref
from autopar.ir.mesh import batch_size
from autopar.plan.buckets import DEFAULT_CAP_BYTES
from autopar.plan.plan import NodeChoice
from autopar.rules.context import whole_keys
from autopar.search.backwards import Backwards
from autopar.search.block import Option
from autopar.search.grid import Grid
from autopar.search.home import Home, Places, whole_home
from autopar.search.node_costs import NodeCosts
from autopar.search.paths import Paths
from autopar.search.prices import CollectiveTime, Prices
from autopar.search.setting import Setting
from autopar.search.spaces import Spaces


@dataclass
class Pricer:
    """Answers what things cost on one kind of home, by default anywhere in the cluster, remembering
    what it has priced; `spaces` and `backwards` are what there is to price of a block."""

    setting: Setting
    home: Home = None  # type: ignore[assignment]  # __post_init__ knows the cluster
    places: Places = None  # type: ignore[assignment]  # as above
    spaces: Spaces = None  # type: ignore[assignment]  # as above
    backwards: Backwards = None  # type: ignore[assignment]  # as above
    _times: dict[LocalOp, OpTime] = field(default_factory=dict)
    _orders: dict[str, tuple[Order, ...]] = field(default_factory=dict)
    _costs: NodeCosts = field(default_factory=NodeCosts)
    _prices: dict[object, Prices] = field(default_factory=dict)
    _links: dict[object, ClusterCollectives] = field(default_factory=dict)
    _joined: dict[object, CollectiveTime] = field(default_factory=dict)
    _paths: Paths = field(default_factory=Paths)
    _at: dict[Home, Pricer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.home or whole_home(self.setting.cluster)
        self.places = self.places or Places(cluster=self.setting.cluster)
        self.spaces = self.spaces or Spaces(self.setting)
        self.backwards = self.backwards or Backwards(self.setting, self.device.kind)
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
