"""The weight part of a block's backward: its time, and what is held until it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costs.compute import op_time
from autopar.costs.local_op import LocalOp
from autopar.ir.cluster import DeviceSpec
from autopar.ir.graph import OpNode, Ref
from autopar.ir.placement import Layout
from autopar.plan.plan import NodeChoice
from autopar.plan.split import Product
from autopar.search.prices import Prices


@dataclass
class WeightPart:
    """Adds up the products of one block whose weight gradients are computed apart.

    A product holds its input, which others may hold too, and the gradient of its output.
    """

    products: Mapping[str, Product]
    prices: Prices
    device: DeviceSpec
    seconds: float = 0.0
    gradient_bytes: int = 0

    def __post_init__(self) -> None:
        self._inputs: dict[tuple[Ref, Layout], int] = {}

    @property
    def apart_s(self) -> float:
        """What the backward takes more in two parts than in one, in which a product finds its input
        and its gradient in the core's cache: the gradient is written to memory, and both are read
        from there. On accelerators they come from memory either way."""
        if self.device.kind != "cpu":
            return 0.0
        return (self.held_bytes + self.gradient_bytes) / self.device.memory_bandwidth_bytes_s

    @property
    def held_bytes(self) -> int:
        """Bytes per micro-batch between the input and the weight part."""
        return self.gradient_bytes + sum(self._inputs.values())

    def add(self, node: OpNode, choice: NodeChoice, op: LocalOp, backward_s: float) -> None:
        """Count a node; `op` is what it is on this rank, with its backward time."""
        product = self.products.get(node.name)
        if product is None:
            return
        self.seconds += backward_s * weight_share(op, product, self.device)
        for index in product.held:
            ref, layout = node.inputs()[index], choice.inputs[index]
            self._inputs[ref, layout] = self.prices.local_bytes(ref, layout)
        self.gradient_bytes += self.prices.local_bytes(Ref(node.name), choice.outputs[0])


def weight_share(op: LocalOp, product: Product, device: DeviceSpec) -> float:
    """The part of an op's backward time that its weight gradients take, by the cost model."""
    marks = tuple(grad and i not in product.weights for i, grad in enumerate(op.grad_inputs))
    whole_s = op_time(op, device).backward_s
    if not whole_s or not any(op.grad_inputs):
        return 0.0
    rest_s = op_time(replace(op, grad_inputs=marks), device).backward_s if any(marks) else 0.0
    return max(0.0, 1.0 - rest_s / whole_s)
