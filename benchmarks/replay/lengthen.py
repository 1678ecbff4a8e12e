"""A captured graph with more of the blocks that it repeats: depth without capturing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.blocks import Block, BlockChain
from autopar.ir.graph import Arg, OpGraph, OpNode, Ref, Source


def repeated_class(chain: BlockChain) -> int:
    """The class that most blocks are of. ValueError unless they follow one another."""
    members = max((c.members for c in chain.classes), key=len)
    if len(members) < 2 or members != tuple(range(members[0], members[-1] + 1)):
        raise ValueError("the graph has no run of equal blocks")
    return chain.blocks[members[0]].class_index


def lengthen(graph: OpGraph, chain: BlockChain, count: int) -> tuple[OpGraph, BlockChain]:
    """Graph and chain with `count` blocks of the repeated class, `count` no fewer than there are.

    The last of them is copied with parameters of its own, each copy reading what the one before
    makes.
    """
    members = chain.classes[repeated_class(chain)].members
    last, before = chain.blocks[members[-1]], chain.blocks[members[-2]]
    extra = count - len(members)
    if extra < 0:
        raise ValueError(f"the graph has {len(members)} repeated blocks, more than {count}")
    if not extra:
        return graph, chain
    nodes = {node.name: node for node in graph.nodes}
    sources = {source.name: source for source in graph.sources}
    own = [nodes[name] for name in last.nodes]
    held = [ref for ref in last.parameters if ref not in before.parameters]  # else it is shared
    copies, blocks, added = [], [], []
    carried = dict(zip(before.outputs, last.outputs, strict=True))
    made = dict(zip(last.outputs, last.outputs, strict=True))
    for number in range(extra):
        names = {name: f"{name}__{number}" for name in (*last.nodes, *(ref.name for ref in held))}
        given = {old: made[new] for old, new in carried.items()}
        copies += [_node(node, names, given) for node in own]
        added += [_source(sources[ref.name], names, number) for ref in held]
        made = {ref: _ref(ref, names, {}) for ref in last.outputs}
        blocks.append(_block(last, names, given, last.index + 1 + number))
    tail = {ref: made[ref] for ref in last.outputs}
    return _graph(graph, last, copies, added, tail), _chain(chain, last, blocks, tail, extra)


def _ref(ref: Ref, names: Mapping[str, str], given: Mapping[Ref, Ref]) -> Ref:
    if ref in given:
        return given[ref]
    return Ref(names[ref.name], ref.index) if ref.name in names else ref


def _arg(arg: Arg, names: Mapping[str, str], given: Mapping[Ref, Ref]) -> Arg:
    if isinstance(arg, Ref):
        return _ref(arg, names, given)
    return tuple(_arg(item, names, given) for item in arg) if isinstance(arg, tuple) else arg


def _node(node: OpNode, names: Mapping[str, str], given: Mapping[Ref, Ref]) -> OpNode:
    return replace(
        node,
        name=names.get(node.name, node.name),
        args=tuple(_arg(arg, names, given) for arg in node.args),
        kwargs=tuple((key, _arg(arg, names, given)) for key, arg in node.kwargs),
    )


def _source(source: Source, names: Mapping[str, str], number: int) -> Source:
    return replace(source, name=names[source.name], fqn=f"{source.fqn}__{number}", tied=())


def _block(block: Block, names: Mapping[str, str], given: Mapping[Ref, Ref], index: int) -> Block:
    def renamed(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        return tuple(_ref(ref, names, given) for ref in refs)

    return replace(
        block,
        index=index,
        nodes=tuple(names.get(name, name) for name in block.nodes),
        inputs=renamed(block.inputs),
        outputs=renamed(block.outputs),
        parameters=renamed(block.parameters),
        module_path=f"{block.module_path}__{index}",
    )


def _graph(
    graph: OpGraph,
    last: Block,
    copies: list[OpNode],
    added: list[Source],
    tail: Mapping[Ref, Ref],
) -> OpGraph:
    end = max(i for i, node in enumerate(graph.nodes) if node.name in set(last.nodes)) + 1
    after = [_node(node, {}, tail) for node in graph.nodes[end:]]
    return replace(
        graph,
        sources=(*graph.sources, *added),
        nodes=(*graph.nodes[:end], *copies, *after),
        outputs=tuple(tail.get(ref, ref) for ref in graph.outputs),
    )


def _chain(
    chain: BlockChain, last: Block, blocks: list[Block], tail: Mapping[Ref, Ref], extra: int
) -> BlockChain:
    after = [_block(b, {}, tail, b.index + extra) for b in chain.blocks[last.index + 1 :]]
    after = [
        replace(new, module_path=old.module_path)
        for new, old in zip(after, chain.blocks[last.index + 1 :], strict=True)
    ]
    whole = (*chain.blocks[: last.index + 1], *blocks, *after)
    crossing = chain.boundaries[last.index]
    made = [dict(zip(last.outputs, block.outputs, strict=True)) for block in (last, *blocks)]
    between = [tuple(own.get(ref, ref) for ref in crossing) for own in made]
    boundaries = (
        *chain.boundaries[: last.index],
        *between,
        *(tuple(tail.get(r, r) for r in refs) for refs in chain.boundaries[last.index + 1 :]),
    )
    classes = tuple(
        replace(c, members=tuple(b.index for b in whole if b.class_index == c.index))
        for c in chain.classes
    )
    return replace(chain, blocks=whole, classes=classes, boundaries=boundaries)
