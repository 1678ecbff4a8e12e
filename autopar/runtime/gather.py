"""Weights that live in shards (ZeRO level 3): gathered where a block reads them, and let go of.

The forward gathers a weight and autograd does not keep it: what ops save of it is replaced by a
note of where it came from, and the backward gathers it again. The whole gradient goes to whoever
reduces gradients, not to the leaf, which is a shard.

Gathering runs one block ahead. A stage starts the messages of the next block before it runs a block
(`prefetch`); in the backward the first op of a block that reads a weight starts those of the block
before. So the weights of two blocks exist at once, and every rank starts the same messages at the
same places of its program. The first block of a forward, or of a backward, waits for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime import primitives, shards
from autopar.runtime.axes import AxisGroup
from autopar.runtime.context import StepContext


class Gathers:
    """What the sharded weights of a rank share.

    `reduce(name, gradient)` is called in the backward with each whole gradient.
    """

    def __init__(self) -> None:
        self.reduce: Callable[[str, Tensor], None] = _nobody
        self._live: dict[int, tuple[_Block, int]] | None = None
        self._last: _Block | None = None

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Run a forward of which autograd keeps no gathered weight."""
        self._live = {}
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._live = self._last = None

    def note(self, whole: Tensor, again: Callable[[], Waiting], block: _Block) -> None:
        """A weight was gathered for a block; `again` starts it once more, in the backward."""
        if self._live is None:
            return  # no backward, or one that will run this forward again
        if block is not self._last:
            block.before, self._last = self._last, block
        storage = StorageWeakRef(whole.untyped_storage())
        self._live[storage.cdata] = block, len(block.weights)
        block.weights.append(
            _Gathered(storage=storage, dtype=whole.dtype, version=whole._version, again=again)
        )

    def _pack(self, saved: Tensor) -> Any:
        """A note instead of a gathered weight, or of a view of one; else the tensor itself."""
        found = None
        if self._live is not None and saved.layout == torch.strided:
            found = self._live.get(saved.untyped_storage()._cdata)
        if found is None or not found[0].weights[found[1]].gives(saved):
            return saved
        block, index = found
        block.weights[index].uses += 1
        return _View(
            block=block,
            index=index,
            size=tuple(saved.shape),
            stride=saved.stride(),
            offset=int(saved.storage_offset()),
        )


def _nobody(name: str, gradient: Tensor) -> None:
    raise AssertionError(f"nobody takes the gradient of {name}")


Waiting = Callable[[], Tensor]
"""Waits for a message under way and gives what arrived."""


class _Block:
    """The weights that a block gathered in one forward, of which the backward reads some.

    `before` is the block that ran before it, whose backward comes next.
    """

    def __init__(self) -> None:
        self.weights: list[_Gathered] = []
        self.before: _Block | None = None

    def start(self) -> bool:
        """Start to gather what the backward reads; whether there is any."""
        started = [weight.start() for weight in self.weights]  # all of them, not up to the first
        return any(started)

    def take(self, index: int) -> Tensor:
        """A whole weight, in the backward, which at first starts the block before on its way."""
        self.start()
        before, self.before = self.before, None
        while before is not None and not before.start():
            before = before.before
        return self.weights[index].take()


class _Gathered:
    """One gathering of a weight, in one micro-batch.

    `storage` is a weak reference: while it is held, no other storage can have the same address.
    """

    def __init__(
        self,
        *,
        storage: StorageWeakRef,
        dtype: torch.dtype,
        version: int,
        again: Callable[[], Waiting],
    ) -> None:
        self._storage, self._dtype, self._version = storage, dtype, version
        self._again, self._started = again, False
        self._waiting: Waiting | None = None
        self._whole: Tensor | None = None
        self.uses = 0

    def gives(self, saved: Tensor) -> bool:
        """Whether gathering again gives this saved tensor: not if it was changed or is seen as
        another dtype."""
        plain = saved.dtype == self._dtype and not (saved.is_conj() or saved.is_neg())
        return plain and saved._version == self._version and not self._storage.expired()

    def start(self) -> bool:
        """Start to gather it again, once, if the backward reads it; whether it does."""
        if self.uses > 0 and not self._started:
            self._started, self._waiting = True, self._again()
        return self._started

    def take(self) -> Tensor:
        """The whole weight: waited for at its first use in the backward, dropped after the last."""
        whole, waiting, self._waiting = self._whole, self._waiting, None
        if whole is None:
            whole = (waiting or self._again())()
        self.uses -= 1
        self._whole = whole if self.uses > 0 else None
        return whole


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A saved tensor as a window on the memory of a block's gathered weight."""

    block: _Block
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _View):
        whole = saved.block.take(saved.index)
        return whole.as_strided(saved.size, saved.stride, saved.offset)
    tensor: Tensor = saved
    return tensor


class ShardedWeight(Tensor):
    """A leaf that is a shard of the weight ops read. A plain tensor otherwise.

    `block` it belongs to, and the message under way that gathers it, where a stage started one.
    """

    fqn: str
    gathers: Gathers
    block: _Block | None
    waiting: Waiting | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shard: Tensor, fqn: str, gathers: Gathers) -> ShardedWeight:
        """The shard as a leaf; shares memory."""
        leaf: ShardedWeight = Tensor._make_subclass(ShardedWeight, shard)
        leaf.fqn, leaf.gathers, leaf.block, leaf.waiting = fqn, gathers, None, None
        return leaf

    def on_its_way(self, block: _Block, waiting: Waiting) -> ShardedWeight:
        """The same shard, with a message under way that gathers it."""
        leaf = ShardedWeight.of(self.detach(), self.fqn, self.gathers)
        leaf.requires_grad_(self.requires_grad)
        leaf.block, leaf.waiting = block, waiting
        return leaf


class _Gather(torch.autograd.Function):
    """All-gathers a shard; the whole gradient goes to `Gathers.reduce`."""

    @staticmethod
    def forward(ctx: Any, weight: ShardedWeight, axis: AxisGroup, dim: int, size: int) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        shard = weight.detach()
        waiting, weight.waiting = weight.waiting or _start(shard, axis, dim, size), None
        whole = waiting()
        again = partial(_start, shard, axis, dim, size, backward=True)
        weight.gathers.note(whole, again, weight.block or _Block())
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None, None]:
        if grad is not None:
            ctx.weight.gathers.reduce(ctx.weight.fqn, grad)
        return None, None, None, None


def gather_weight(weight: Tensor, axis: AxisGroup, dim: int, size: int) -> Tensor:
    """The weight as ops read it, from this rank's shard of `dim`, which is `size` long in all.

    Waits for the message under way, if a stage started one; gathers at once if not.
    """
    assert isinstance(weight, ShardedWeight), "the plan keeps this weight whole"
    return _Gather.apply(weight, axis, dim, size)


def prefetch(
    w: Mapping[str, Tensor],
    gathers: Mapping[str, tuple[tuple[str, ...], int, int]],
    ctx: StepContext,
) -> dict[str, Tensor]:
    """A block's weights, with the gathering of those that lie in shards under way.

    `gathers` has the axes, dim and whole extent of each, as the block's `gather_weight` has them.
    """
    block, found = _Block(), dict(w)
    for key, (axes, dim, size) in gathers.items():
        weight = w[key]
        assert isinstance(weight, ShardedWeight), "the plan keeps this weight whole"
        axis = ctx.axes[axes[0]] if len(axes) == 1 else ctx.along(*axes)
        found[key] = weight.on_its_way(block, _start(weight.detach(), axis, dim, size))
    return found


def _start(
    shard: Tensor, axis: AxisGroup, dim: int, size: int, *, backward: bool = False
) -> Waiting:
    """Begin to gather a weight from its shards."""
    sizes = shards.sizes(size, (), axis.size)
    waiting = primitives.start_all_gather(shard, axis, dim, sizes, backward=backward)

    return lambda: shards.join_stacked(waiting(), dim, size, ())
