"""Which ops of a block compute the gradients of their weights apart, where a schedule splits the
backward: the one answer that is priced and emitted.

The weight of such a product is a parameter, or made from one by views and casts alone. Every use of
it must be such a product too: a gradient that reached it in the input part of the backward would
find the way to the parameter gone in the weight part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import OpNode, Ref, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """The runtime's function for an op, and the positions of its tensors among the op's inputs.

    `x` is None where all of the backward is the weight's (an embedding).
    """

    function: str
    x: int | None
    weight: int
    bias: int | None = None
    weight_dims: int | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """The inputs that computing the weight's gradient needs."""
        return (1 - self.weight,) if self.x is None else (self.x,)

    @property
    def weights(self) -> tuple[int, ...]:
        """The inputs whose gradients are computed in the weight part."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


PRODUCTS: dict[str, Product] = {
    "aten.linear.default": Product(function="linear", x=0, weight=1, bias=2, weight_dims=2),
    "aten.matmul.default": Product(function="matmul", x=0, weight=1, weight_dims=2),
    "aten.mm.default": Product(function="matmul", x=0, weight=1, weight_dims=2),
    "aten.bmm.default": Product(function="bmm", x=0, weight=1, weight_dims=3),
    "aten.addmm.default": Product(function="addmm", bias=0, x=1, weight=2, weight_dims=2),
    "aten.embedding.default": Product(function="embedding", weight=0, x=None, weight_dims=2),
}
"""By op. Batched weights are those of `bmm`; `matmul` with a weight of two dims alone."""

VIEWS = frozenset(
    (
        "aten.t.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.view.default",
        "aten.reshape.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.to.dtype",
        "aten._to_copy.default",
    )
)
"""Ops whose gradient needs nothing that was saved, so that it can be taken at any time."""


def split_products(
    nodes: Sequence[OpNode], parameters: Collection[Ref], specs: Mapping[Ref, TensorSpec]
) -> Mapping[str, Product]:
    """The products of a block whose weight gradients are computed apart, by node.

    `parameters` are those the block reads, trained or not.
    """
    roots = _roots(nodes, parameters)
    candidates = {
        node.name: product
        for node in nodes
        if (product := PRODUCTS.get(node.target)) is not None and _fits(node, product, roots, specs)
    }
    elsewhere = set[Ref]()
    for node in nodes:
        weights = candidates[node.name].weights if node.name in candidates else ()
        if node.target not in VIEWS or Ref(node.name) not in roots:
            used = enumerate(node.inputs())
            elsewhere |= {roots[ref] for i, ref in used if ref in roots and i not in weights}
    return {
        name: product
        for node in nodes
        if (name := node.name) in candidates
        and (product := candidates[name])
        and not elsewhere.intersection(roots[ref] for ref in _weights(node, product))
    }


def _weights(node: OpNode, product: Product) -> tuple[Ref, ...]:
    inputs = node.inputs()
    return tuple(inputs[i] for i in product.weights if i < len(inputs))


def _roots(nodes: Sequence[OpNode], parameters: Collection[Ref]) -> dict[Ref, Ref]:
    """The parameter of every value that is one, or that views and casts make of one."""
    roots = {ref: ref for ref in parameters}
    for node in nodes:
        source = node.inputs()[:1]
        if node.target in VIEWS and source and source[0] in roots and len(node.inputs()) == 1:
            roots[Ref(node.name)] = roots[source[0]]
    return roots


def _fits(
    node: OpNode, product: Product, roots: Mapping[Ref, Ref], specs: Mapping[Ref, TensorSpec]
) -> bool:
    inputs = node.inputs()
    if not node.requires_grad or not all(ref in roots for ref in _weights(node, product)):
        return False
    if product.function == "addmm":
        scaled = any(node.arg(3 + i, name, 1) != 1 for i, name in enumerate(("beta", "alpha")))
        if scaled or len(specs[inputs[0]].shape) != 1:
            return False
    dims = len(specs[inputs[product.weight]].shape)
    wide = product.x is None or len(specs[inputs[product.x]].shape) > 1
    return wide and dims == product.weight_dims
