"""The graph as a chain of blocks between narrow cuts, grouped into classes of equal blocks."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Ref


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A run of consecutive main nodes.

    `inputs` are values of earlier blocks it reads, `outputs` values it makes that later blocks (or
    the graph's outputs) read, `shared` setup values and graph inputs it reads, `parameters` the
    parameter and buffer sources it reads. All are in order of first use, so equal positions in two
    blocks of a class correspond, as do the entries of `nodes`.
    """

    index: int
    class_index: int
    nodes: tuple[str, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    shared: tuple[Ref, ...]
    parameters: tuple[Ref, ...]
    module_path: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockClass:
    """Blocks with the same ops, shapes, dtypes, arguments and wiring; the first stands for all."""

    index: int
    name: str
    digest: str
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockChain:
    """The whole graph: setup nodes and a chain of blocks.

    `setup` nodes depend on inputs, buffers and constants only (masks, rotary tables, label counts);
    every stage computes those it needs. All other nodes are in exactly one block.
    `boundaries[i]` are the values that cross from block `i` to block `i + 1`, whether block `i`
    made them or passes them on.
    """

    setup: tuple[str, ...]
    blocks: tuple[Block, ...]
    classes: tuple[BlockClass, ...]
    boundaries: tuple[tuple[Ref, ...], ...]

    def representative(self, class_index: int) -> Block:
        """The first block of a class."""
        return self.blocks[self.classes[class_index].members[0]]
