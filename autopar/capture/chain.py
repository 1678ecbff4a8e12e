"""Spans of main nodes as a `BlockChain`, and the check that a chain holds the whole graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autopar.capture.digest import digest, leaving
from autopar.capture.flow import Flow
from autopar.errors import CaptureError
from autopar.ir.blocks import Block, BlockChain, BlockClass
from autopar.ir.graph import OpGraph, Ref


def build_chain(flow: Flow, spans: Sequence[tuple[int, int]]) -> BlockChain:
    """The chain whose blocks are the given consecutive spans of main nodes."""
    digests = [digest(flow, start, end) for start, end in spans]
    order = {own: i for i, own in enumerate(dict.fromkeys(digests))}
    blocks = tuple(
        _block(flow, span, index, order[own])
        for index, (span, own) in enumerate(zip(spans, digests, strict=True))
    )
    chain = BlockChain(
        setup=flow.setup,
        blocks=blocks,
        classes=_classes(flow, blocks, list(order)),
        boundaries=tuple(flow.crossings([start for start, _ in spans[1:]])),
    )
    check_chain(flow.graph, chain)
    return chain


def _block(flow: Flow, span: tuple[int, int], index: int, class_index: int) -> Block:
    start, end = span
    nodes = flow.main[start:end]
    own = {node.name for node in nodes}
    outside = dict.fromkeys(ref for node in nodes for ref in node.inputs() if ref.name not in own)
    return Block(
        index=index,
        class_index=class_index,
        nodes=tuple(node.name for node in nodes),
        inputs=tuple(ref for ref in outside if ref.name in flow.position),
        outputs=leaving(flow, start, end),
        shared=tuple(
            ref for ref in outside if ref.name not in flow.position and ref.name not in flow.state
        ),
        parameters=tuple(ref for ref in outside if ref.name in flow.state),
        module_path=_common_path([node.module_path for node in nodes]),
    )


def _common_path(paths: Iterable[str]) -> str:
    """The innermost module that holds all; nodes outside of any module do not count."""
    split = [path.split(".") for path in paths if path]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _classes(flow: Flow, blocks: Sequence[Block], digests: Sequence[str]) -> tuple[BlockClass, ...]:
    classes: list[BlockClass] = []
    for index, own in enumerate(digests):
        members = tuple(block.index for block in blocks if block.class_index == index)
        taken = {other.name for other in classes}
        wanted = _readable_name(flow, blocks[members[0]])
        name = next(
            n for n in (wanted, *(f"{wanted}_{i}" for i in range(2, 99999))) if n not in taken
        )
        classes.append(BlockClass(index=index, name=name, digest=own, members=members))
    return tuple(classes)


def _readable_name(flow: Flow, block: Block) -> str:
    """For people: the last word of the path of the block, or of its last weight matmul, or of its
    first op with a parameter."""
    start = flow.position[block.nodes[0]]
    positions = range(start, start + len(block.nodes))
    matmuls = [i for i in positions if flow.matmuls(i, i + 1)]
    readers = [i for i in positions if flow.has_parameters(i, i + 1)]
    paths = [flow.main[i].module_path for i in (*matmuls[-1:], *readers[:1])]
    for path in (block.module_path, *paths):
        words = [word for word in path.split(".") if word.isidentifier()]
        if words:
            return words[-1]
    return "block"


def check_chain(graph: OpGraph, chain: BlockChain) -> None:
    """Every node is in the setup or in exactly one block, in order, and reads only what its block
    lists; CaptureError names what is missing, doubled or out of place."""
    placed = Counter([*chain.setup, *(name for block in chain.blocks for name in block.nodes)])
    names = {node.name for node in graph.nodes}
    for problem, found in (
        ("missing from the chain", names - set(placed)),
        ("not in the graph", set(placed) - names),
        ("in the chain more than once", {name for name, count in placed.items() if count > 1}),
    ):
        if found:
            raise CaptureError(f"nodes {problem}: {', '.join(sorted(found))}")
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    sequence = [order[name] for block in chain.blocks for name in block.nodes]
    if sequence != sorted(sequence):
        raise CaptureError("the blocks are not in the order of the graph")
    _check_reads(graph, chain)


def _check_reads(graph: OpGraph, chain: BlockChain) -> None:
    nodes = {node.name: node for node in graph.nodes}
    available: set[Ref] = set()
    for block in chain.blocks:
        own = set(block.nodes)
        listed = {*block.inputs, *block.shared, *block.parameters}
        for name in block.nodes:
            unlisted = {r for r in nodes[name].inputs() if r.name not in own} - listed
            if unlisted:
                missing = ", ".join(map(str, sorted(unlisted)))
                raise CaptureError(f"block {block.index} reads {missing} without listing it")
        if not set(block.inputs) <= available:
            missing = ", ".join(map(str, sorted(set(block.inputs) - available)))
            raise CaptureError(f"block {block.index} reads {missing}, which no earlier block gives")
        available |= set(block.outputs)
