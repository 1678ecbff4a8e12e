"""Blocks that a pin sets apart from the others of their class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.blocks import BlockChain, BlockClass
from autopar.ir.graph import Source
from autopar.ir.placement import Placement


def split_classes(
    chain: BlockChain, sources: Iterable[Source], weights: Iterable[tuple[str, Placement]]
) -> BlockChain:
    """The chain with blocks whose parameters are pinned otherwise in classes of their own.

    All blocks of a class are decided alike, so a pin on one layer's weight parts it from the rest.
    `weights` are (parameter name, placement); the same pins give the same chain. Classes stand in
    the order of their first block.
    """
    pinned = dict(weights)
    pin_of = {
        source.name: pinned[name]
        for source in sources
        for name in (source.fqn, *source.tied)
        if name in pinned
    }
    alike: dict[tuple[int, tuple[Placement | None, ...]], list[int]] = {}
    for block in chain.blocks:
        placements = tuple(pin_of.get(ref.name) for ref in block.parameters)
        alike.setdefault((block.class_index, placements), []).append(block.index)
    if len(alike) == len(chain.classes):
        return chain
    classes: list[BlockClass] = []
    for index, ((old, _), members) in enumerate(alike.items()):
        first = chain.classes[old]
        parts = sum(c.name.startswith(f"{first.name}_pinned_") for c in classes)
        parts += any(c.name == first.name for c in classes)
        name = f"{first.name}_pinned_{parts}" if parts else first.name
        found = BlockClass(index=index, name=name, digest=first.digest, members=tuple(members))
        classes.append(found)
    class_of = {member: c.index for c in classes for member in c.members}
    blocks = tuple(replace(block, class_index=class_of[block.index]) for block in chain.blocks)
    return replace(chain, blocks=blocks, classes=tuple(classes))
