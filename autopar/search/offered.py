"""The strategies of an op that the pins leave, and what runs the plan."""

from __future__ import annotations

from autopar.costs.local_op import op_name
from autopar.costs.transient import LOSSES
from autopar.ir.graph import OpNode
from autopar.ir.mesh import CONTEXT, SHARD, TENSOR, MeshAxis
from autopar.ir.placement import Shard
from autopar.ir.strategy import AxisStrategy
from autopar.rules.context import ATTENTION, attention_kind
from autopar.search.block import HEAVY_OPS, is_split
from autopar.search.setting import Setting


def offered(setting: Setting, node: OpNode, axis: MeshAxis) -> tuple[AxisStrategy, ...]:
    """The strategies of a node on a mesh axis. A pinned tensor or context degree splits every heavy
    op that can be split off the batch dim."""
    found, pins = setting.strategies(node, axis), setting.pins
    if axis.splits_samples:
        return _with_expert_pin(setting, axis, found)
    if axis.name == TENSOR and _runs_whole(setting, node):
        return tuple(s for s in found if not is_split(s)) or found
    degrees = {TENSOR: pins.tensors, CONTEXT: {pins.context}}.get(axis.name, ())
    if axis.name == CONTEXT and pins.attention and node.op == ATTENTION:
        return tuple(s for s in found if attention_kind(node, s) == pins.attention) or found
    if axis.size not in degrees or node.op not in HEAVY_OPS:
        return found
    return tuple(s for s in found if splits_work(setting, node, s)) or found


def _with_expert_pin(
    setting: Setting, axis: MeshAxis, found: tuple[AxisStrategy, ...]
) -> tuple[AxisStrategy, ...]:
    """A pinned expert degree splits all experts on the axis of that size, and no others."""
    degree = setting.pins.expert
    if degree is None or len(found) == 1:
        return found
    if axis.size != degree:
        return found[:1]
    alone = (setting.pins.data, setting.cluster.num_devices)
    inner = axis.name == SHARD or degree in alone
    return found[1:] if inner else found


def _runs_whole(setting: Setting, node: OpNode) -> bool:
    """Whether what runs the plan splits no value of `node` over tensor ranks; the root module is
    free but for the loss."""
    if op_name(node.target) in LOSSES:
        return setting.execution.whole_loss
    outside, path = setting.execution.whole_outside, node.module_path
    return bool(outside and path) and set(outside).isdisjoint(path.split("."))


def splits_work(setting: Setting, node: OpNode, strategy: AxisStrategy) -> bool:
    """Whether a strategy of the tensor axis shares out the op, other than by samples."""
    placed = zip(node.inputs(), strategy.inputs, strict=True)
    return any(
        isinstance(p, Shard) and not setting.specs[ref].shape[p.dim].is_batch for ref, p in placed
    )
