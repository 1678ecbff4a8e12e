"""Weights that live in shards (ZeRO level 3): gathered where a block reads them, and let go of.

The forward gathers a weight and autograd does not keep it: what ops save of it is replaced by a
note of where it came from, and the first op of the backward that reads it gathers it again. A
block that is run again in the backward gathers in that run instead. The whole gradient goes to
whoever reduces gradients, not to the leaf, which is a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime import primitives, shards
from autopar.runtime.axes import AxisGroup


class Gathers:
    """What the sharded weights of a rank share.

    `reduce(name, gradient)` is called in the backward with each whole gradient.
    """

    def __init__(self) -> None:
        self.reduce: Callable[[str, Tensor], None] = _nobody
        self._live: dict[int, _Gathered] | None = None

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Run a forward of which autograd keeps no gathered weight."""
        self._live = {}
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._live = None

    def note(self, whole: Tensor, again: Callable[[], Tensor]) -> None:
        """A weight was gathered; `again` does it once more, in the backward."""
        if self._live is None:
            return  # no backward, or one that will run this forward again
        storage = StorageWeakRef(whole.untyped_storage())
        self._live[storage.cdata] = _Gathered(
            storage=storage, dtype=whole.dtype, version=whole._version, again=again
        )

    def _pack(self, saved: Tensor) -> Any:
        """A note instead of a gathered weight, or of a view of one; else the tensor itself."""
        gathered = None
        if self._live is not None and saved.layout == torch.strided:
            gathered = self._live.get(saved.untyped_storage()._cdata)
        if gathered is None or not gathered.gives(saved):
            return saved
        gathered.uses += 1
        return _View(
            gathered=gathered,
            size=tuple(saved.shape),
            stride=saved.stride(),
            offset=int(saved.storage_offset()),
        )


def _nobody(name: str, gradient: Tensor) -> None:
    raise AssertionError(f"nobody takes the gradient of {name}")


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
        again: Callable[[], Tensor],
    ) -> None:
        self._storage, self._dtype, self._version = storage, dtype, version
        self._again = again
        self._whole: Tensor | None = None
        self.uses = 0

    def gives(self, saved: Tensor) -> bool:
        """Whether gathering again gives this saved tensor: not if it was changed or is seen as
        another dtype."""
        plain = saved.dtype == self._dtype and not (saved.is_conj() or saved.is_neg())
        return plain and saved._version == self._version and not self._storage.expired()

    def take(self) -> Tensor:
        """The whole weight: gathered at its first use in the backward, dropped after the last."""
        whole = self._again() if self._whole is None else self._whole
        self.uses -= 1
        self._whole = whole if self.uses > 0 else None
        return whole


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A saved tensor as a window on a gathered weight's memory."""

    gathered: _Gathered
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _View):
        return saved.gathered.take().as_strided(saved.size, saved.stride, saved.offset)
    tensor: Tensor = saved
    return tensor


class ShardedWeight(Tensor):
    """A leaf that is a shard of the weight ops read. A plain tensor otherwise."""

    fqn: str
    gathers: Gathers

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shard: Tensor, fqn: str, gathers: Gathers) -> ShardedWeight:
        """The shard as a leaf; shares memory."""
        leaf: ShardedWeight = Tensor._make_subclass(ShardedWeight, shard)
        leaf.fqn, leaf.gathers = fqn, gathers
        return leaf


class _Gather(torch.autograd.Function):
    """All-gathers a shard; the whole gradient goes to `Gathers.reduce`."""

    @staticmethod
    def forward(ctx: Any, weight: ShardedWeight, axis: AxisGroup, dim: int, size: int) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        shard = weight.detach()
        whole = _all_gather(shard, axis, dim, size)
        weight.gathers.note(whole, lambda: _all_gather(shard, axis, dim, size, backward=True))
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, None, None]:
        if grad is not None:
            ctx.weight.gathers.reduce(ctx.weight.fqn, grad)
        return None, None, None, None


def gather_weight(weight: Tensor, axis: AxisGroup, dim: int, size: int) -> Tensor:
    """The weight as ops read it, from this rank's shard of `dim`, which is `size` long in all."""
    assert isinstance(weight, ShardedWeight), "the plan keeps this weight whole"
    return _Gather.apply(weight, axis, dim, size)


def _all_gather(
    shard: Tensor, axis: AxisGroup, dim: int, size: int, *, backward: bool = False
) -> Tensor:
    sizes = shards.sizes(size, (), axis.size)
    stacked = primitives.all_gather(shard, axis, dim, sizes, backward=backward)
    if dim == 0 and len(set(sizes)) == 1:
        return stacked.flatten(0, 1)
    return shards.join(stacked.unbind(0), dim, size, ())
