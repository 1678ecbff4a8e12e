"""The steps of a block as its memory sees them: ops and moves, on storages and on gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from autopar.costs.saved import SavedExtra, SavedSet
from autopar.costs.strides import is_view
from autopar.costs.transient import RunBlock, RunStep, workspaces
from autopar.ir.collective import CollectiveOp
from autopar.ir.graph import OpNode, Ref
from autopar.ir.placement import Layout, Shard
from autopar.plan.flow import BlockFlow, Move
from autopar.plan.plan import NodeChoice
from autopar.search.copies import BlockStorages, Storage
from autopar.search.prices import Prices


@dataclass(frozen=True, kw_only=True)
class Running:
    """One block as decided: its nodes, where their values lie and move, and what is saved.

    `held` are values that lie there anyway, `split` nodes whose weight gradients may come later.
    """

    nodes: Sequence[OpNode]
    choices: Mapping[str, NodeChoice]
    flow: BlockFlow
    storages: BlockStorages
    prices: Prices
    saved: SavedSet
    held: Collection[Ref]
    split: Collection[str] = ()
    _roots: dict[Storage, Storage] = field(default_factory=dict)
    _kept: dict[str, list[Ref]] = field(default_factory=dict)
    _extras: dict[str, list[SavedExtra]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, ref in self.saved.kept:
            self._kept.setdefault(name, []).append(ref)
        for extra in self.saved.extras:
            self._extras.setdefault(extra.node, []).append(extra)

    def block(
        self, inputs: Collection[Ref], outputs: Collection[Ref], returned: Collection[Ref]
    ) -> RunBlock:
        """The block; `inputs` and `outputs` cross its edges, gradients of `returned` come back.
        They are named by the value and the layout they belong to."""
        steps: list[RunStep] = []
        for node in self.nodes:
            steps += filter(None, map(self._move, self.flow.before[node.name]))
            steps.append(self._node(node))
        steps += filter(None, map(self._move, self.flow.at_end))
        produced, differentiable = self.flow.produced, self.prices.differentiable
        given = [(ref, produced[ref]) for ref in inputs if ref in produced]
        params = [(ref, layout) for ref, layout in produced.items() if ref in self.held]
        at_edge = [(ref, self._layout_at_end(ref)) for ref in outputs]
        back = [key for key in at_edge if key[0] in returned and key[0] in differentiable]
        return RunBlock(
            steps=tuple(steps),
            nbytes=self.storages.nbytes,  # type: ignore[arg-type]  # keys here are storages
            inputs=frozenset(self._values(given)),
            outputs=frozenset(self._values(at_edge)),
            output_gradients=frozenset(map(self._root, back)),
            parameters=frozenset(key for key in params if key[0] in differentiable),
        )

    def _layout_at_end(self, ref: Ref) -> Layout:
        moved = [move.after for move in self.flow.at_end if move.value == ref]
        return moved[-1] if moved else self.flow.produced[ref]

    def _values(self, keys: Collection[Storage]) -> tuple[Storage, ...]:
        """The storages of values, without those that are held anyway."""
        lies = (self.storages.lies(*key) for key in keys)
        return tuple(dict.fromkeys(key for key in lies if key[0] not in self.held))

    def _root(self, key: Storage) -> Storage:
        return self._roots.get(key, key)

    def _node(self, node: OpNode) -> RunStep:
        choice, differentiable = self.choices[node.name], self.prices.differentiable
        reads = list(zip(node.inputs(), choice.inputs, strict=True))
        makes = [(Ref(node.name, i), layout) for i, layout in enumerate(choice.outputs)]
        kept = [self.storages.read(node.name, ref) for ref in self._kept.get(node.name, ())]
        viewed = is_view(node.target) and self.storages.lies(*makes[0]) != makes[0]
        if viewed and self.storages.nbytes(reads[0]) == self.storages.nbytes(makes[0]):
            self._roots[makes[0]] = self._root(reads[0])
        flows = node.requires_grad
        return RunStep(
            name=node.name,
            reads=self._values(reads),
            makes=() if viewed else tuple(makes),
            keeps=tuple(dict.fromkeys(key for key in kept if key[0] not in self.held)),
            kept_bytes=sum(self.storages.extra_bytes(e) for e in self._extras.get(node.name, ())),
            takes=self._gradients(makes, differentiable) if flows else (),
            gives=self._gradients(reads, differentiable) if flows else (),
            defers=node.name in self.split,
            works_bytes=workspaces(
                node,
                lambda ref: prod(self.prices.local_shape(ref, dict(reads)[ref])),
                self.prices.specs,
                fuses_loss=self.prices.fuses_loss,
            ),
        )

    def _gradients(
        self, keys: Collection[Storage], differentiable: Collection[Ref]
    ) -> tuple[Storage, ...]:
        return tuple(dict.fromkeys(self._root(key) for key in keys if key[0] in differentiable))

    def _move(self, move: Move) -> RunStep | None:
        before, after = (move.value, move.before), (move.value, move.after)
        flows = move.value in self.prices.differentiable
        alone = self.prices.sizes[move.axis] == 1
        if alone or (move.transition.backward is None and self._alike(before, after)):
            self._roots[after] = self._root(before)
        if alone:
            return None
        copied = move.copies(self.prices.sizes)
        whole = max(self.storages.nbytes(before), self.storages.nbytes(after))
        return RunStep(
            name=move.name,
            reads=self._values([before]),
            makes=(after,) if copied else (),
            takes=(self._root(after),) if flows else (),
            gives=(self._root(before),) if flows else (),
            works_bytes=(
                _staged(move, move.transition.forward, whole),
                _staged(move, move.transition.backward, whole),
            ),
        )

    def _alike(self, before: Storage, after: Storage) -> bool:
        return self.storages.nbytes(before) == self.storages.nbytes(after)


def _staged(move: Move, op: CollectiveOp | None, whole_bytes: int) -> int:
    """Buffers of a collective beside what it reads and gives: parts are stacked before they are
    scattered, and joined after they are gathered where they do not lie one behind the other."""
    if op is CollectiveOp.REDUCE_SCATTER:
        return whole_bytes
    if op is CollectiveOp.ALL_TO_ALL:
        return 2 * whole_bytes
    if op is CollectiveOp.ALL_GATHER:
        placements = (move.before[move.axis], move.after[move.axis])
        joined = any(isinstance(p, Shard) and (p.dim or p.pieces) for p in placements)
        return whole_bytes if joined else 0
    return 0
