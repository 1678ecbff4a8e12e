"""What the backwards of blocks need, on whatever mesh: values that are kept for them, parameters
that they read, and the products whose weight gradients may come later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costs.saved import SavedSet, kept_parameters, saved_refs
from autopar.ir.blocks import Block
from autopar.ir.graph import Ref
from autopar.plan.split import Product, split_products
from autopar.search.setting import Setting


@dataclass
class Backwards:
    """The backwards of the blocks of one setting, on devices of one kind."""

    setting: Setting
    device_kind: str
    _saved: dict[int, SavedSet] = field(default_factory=dict)
    _parameters: dict[int, frozenset[Ref]] = field(default_factory=dict)
    _products: dict[int, Mapping[str, Product]] = field(default_factory=dict)

    def saved(self, block: Block) -> SavedSet:
        """Storages that a block keeps for its backward pass; parameters are not counted."""
        if block.index not in self._saved:
            setting = self.setting
            self._saved[block.index] = saved_refs(
                setting.block_nodes(block),
                setting.specs,
                setting.differentiable,
                storage=setting.storage,
                exclude=setting.source_refs,
                device_kind=self.device_kind,
                fuses_loss=setting.execution.fuses_loss,
            )
        return self._saved[block.index]

    def made(self, block: Block) -> tuple[Ref, ...]:
        """The values of a block that it makes and keeps for its backward pass."""
        return tuple(value.ref for value in self.saved(block).values if value.kind == "made")

    def parameters(self, block: Block) -> frozenset[Ref]:
        """The parameters whose values a block's backward reads."""
        if block.index not in self._parameters:
            setting = self.setting
            self._parameters[block.index] = kept_parameters(
                setting.block_nodes(block),
                setting.specs,
                setting.differentiable,
                block.parameters,
                storage=setting.storage,
                device_kind=self.device_kind,
            )
        return self._parameters[block.index]

    def products(self, block: Block) -> Mapping[str, Product]:
        """The ops of a block whose weight gradients a split backward computes apart."""
        if block.index not in self._products:
            self._products[block.index] = split_products(
                self.setting.block_nodes(block), block.parameters, self.setting.specs
            )
        return self._products[block.index]
