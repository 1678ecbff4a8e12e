"""Which traced values share storage, and when each is last read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, fx

from autopar.capture.flatten import FlatGraph


class Aliases:
    """Groups traced nodes by the storage of their fake tensors, which views share."""

    def __init__(self, flat: FlatGraph, outputs: Iterable[object]) -> None:
        self._groups: dict[int, list[fx.Node]] = defaultdict(list)
        self._storages: dict[fx.Node, frozenset[int]] = {}
        self._last_read: dict[fx.Node, int] = {}
        for node in flat.placeholders:
            self.add(node)
        for position, step in enumerate(flat.steps):
            self._last_read.update(dict.fromkeys(flat.inputs(step.node), position))
        for output in outputs:
            if isinstance(output, fx.Node):
                self._last_read[output] = len(flat.steps)

    def add(self, node: fx.Node) -> None:
        """Take up a node once it has been computed."""
        self._storages[node] = _storages(node.meta.get("val"))
        for storage in self._storages[node]:
            self._groups[storage].append(node)

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes so far that share storage with `node`, itself among them, in order."""
        return list({n: None for s in self._storages[node] for n in self._groups[s]})

    def read_after(self, node: fx.Node, position: int) -> bool:
        """Whether a step after number `position`, or the output, reads the node."""
        return self._last_read.get(node, -1) > position


def _storages(value: object) -> frozenset[int]:
    if isinstance(value, Tensor):
        return frozenset([value.untyped_storage()._cdata])
    if isinstance(value, (tuple, list)):
        return frozenset(s for item in value for s in _storages(item))
    return frozenset()
