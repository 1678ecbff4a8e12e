"""Gradients between the backward and the optimizer: added up over micro-batches, then over ranks.

What the backward leaves lies as the leaves do, in the dtype that gradients are reduced in; what the
optimizer sees lies as the stored parameters do, in theirs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from autopar.plan.buckets import DEFAULT_CAP_BYTES, Bucket, GradientEntry, buckets
from autopar.runtime.axes import World
from autopar.runtime.layouts import label_like, local_part
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.parameters import Entry, ParameterStore
from autopar.runtime.primitives import all_reduce, all_reduce_
from autopar.runtime.reduction import Reduction
from autopar.runtime.ties import sum_between


class GradientSync:
    """Adds up gradients and hands them to the parameters.

    A step adds to the `.grad` that a parameter has, as in plain PyTorch. With `accumulate` a step
    leaves its sums on the ranks; the next step without it communicates once for all of them. ZeRO
    levels 2 and 3 are reduced during the backward of the last micro-batch: level 2 bucket by bucket
    in one fixed order, so that no two ranks wait for each other, level 3 weight by weight, in the
    order of the backward.

    With a `loss_scale` gradients are divided by it, and a step in which any rank has one that is
    not finite leaves no gradients on any rank, so that every optimizer skips it.
    """

    def __init__(
        self,
        store: ParameterStore,
        cap_bytes: int = DEFAULT_CAP_BYTES,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._store, self._scale = store, loss_scale
        entries = list(store.trainable())
        found = gradient_buckets(entries, cap_bytes)
        # The backward comes to the last weights first.
        self._early = [bucket for bucket in reversed(found) if bucket.early]
        self._late = [bucket for bucket in found if not bucket.early]
        self._gathered = {e.spec.fqn: _bucket_of(e) for e in entries if _is_gathered(e)}
        self._pending = False
        self._earlier: dict[str, Tensor] = {}
        self.peak_bytes = 0
        """The most that gradients took in a backward, without what waits to be sent."""
        self._reset()
        store.gathers.reduce = self._gathered_gradient
        for entry in entries:
            if not _is_gathered(entry) and (entry.spec.zero == 2 or _is_wide(entry)):
                hook = partial(_on_gradient, weakref.ref(self), entry.spec.fqn)
                entry.local.register_post_accumulate_grad_hook(hook)

    def _reset(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._running: list[Reduction] = []
        self._reduced: dict[str, Tensor] = {}
        self._begin_count(0, early=False)
        for entry in self._store.trainable():
            entry.local.grad = None

    def _begin_count(self, micro_batches: int, *, early: bool) -> None:
        self._seen: Counter[str] = Counter()
        self._micro_batches, self._is_early, self._next = micro_batches, early, 0

    def begin(self, micro_batches: int = 1, *, early: bool = True) -> None:
        """Before the first forward of a step of so many micro-batches: set aside gradients of
        earlier steps that are complete.

        `early` gradients are reduced once each micro-batch has added to them: in one backward, and
        not where sums are left for a later step.
        """
        if not self._pending:
            self._earlier = {
                entry.spec.fqn: local_part(entry.shared.grad)
                for entry in self._store.trainable()
                if entry.shared.grad is not None
            }
            self._reset()
        self._begin_count(micro_batches, early=early)

    def discard(self) -> None:
        """Forget a step that failed, and what was accumulated before it."""
        self._pending, self._earlier = False, {}
        self._reset()

    def finish(self, *, accumulate: bool = False) -> None:
        """After the last backward: sum over ranks and set `.grad` of every parameter."""
        self._pending = accumulate
        self._note_peak()
        if accumulate:
            return
        for bucket in (*self._early[self._next :], *self._early[: self._next], *self._late):
            self._start(bucket)
        for bucket in self._gathered.values():
            self._start(bucket)
        while self._running:
            for entry, grad in self._running.pop(0).finish():
                self._add(entry, grad)
        for entry in self._store.trainable():
            left = self._take(entry)  # partial on no axis
            if left is not None:
                self._add(entry, left)
        self._sum_tied()
        self._hand_out()

    def leaf_gradient(self, name: str) -> None:
        """A backward has added to the gradient of a leaf."""
        entry = self._store.entries[name]
        if _is_wide(entry):
            self._widen(entry)
        self._seen[name] += 1
        if entry.spec.zero != 2 or not self._is_early:
            return
        while self._next < len(self._early):
            bucket = self._early[self._next]
            if any(self._seen[name] < self._micro_batches for name in bucket.names):
                return
            self._next += 1
            self._start(bucket)

    def _gathered_gradient(self, name: str, grad: Tensor) -> None:
        """A backward has made the whole gradient of a weight that lives in shards."""
        entry = self._store.entries[name]
        self._seen[name] += 1
        is_last = self._is_early and self._seen[name] >= self._micro_batches
        before = self._sums.get(name)
        if before is not None:
            before.add_(grad)
        else:
            wide = grad.to(entry.grad_dtype)
            # Autograd may use the memory of `grad` again, unless it is ours.
            self._sums[name] = wide.clone() if wide is grad and not is_last else wide
        if is_last:
            self._start(self._gathered[name])

    def _widen(self, entry: Entry) -> None:
        """Move a leaf's gradient to a buffer of a wider dtype."""
        grad, name = entry.local.grad, entry.spec.fqn
        if grad is None:
            return
        entry.local.grad = None
        if name in self._sums:
            self._sums[name].add_(grad)
        else:
            self._sums[name] = grad.to(entry.grad_dtype)

    def _take(self, entry: Entry) -> Tensor | None:
        """What this rank has added up, which is forgotten here."""
        if _is_wide(entry):
            self._widen(entry)
        if entry.spec.fqn in self._sums:
            return self._sums.pop(entry.spec.fqn)
        left = entry.local.grad
        entry.local.grad = None
        return left

    def _note_peak(self) -> None:
        leaves = (e.local.grad for e in self._store.trainable() if e.local.grad is not None)
        held = sum(grad.nbytes for grad in (*leaves, *self._sums.values()))
        held += sum(reduction.shard_nbytes for reduction in self._running)
        self.peak_bytes = max(self.peak_bytes, held)

    def _start(self, bucket: Bucket) -> None:
        """Begin to reduce a bucket; members without a gradient are left out."""
        self._note_peak()
        entries, grads = [], []
        for name in bucket.names:
            entry = self._store.entries[name]
            grad = self._take(entry)
            if grad is not None:
                entries.append(entry)
                grads.append(grad)
        if entries:
            if self._running:
                self._running[-1].wait()
            self._running.append(Reduction(bucket, entries, grads))

    def _add(self, entry: Entry, grad: Tensor) -> None:
        before = self._reduced.get(entry.spec.fqn)
        self._reduced[entry.spec.fqn] = grad if before is None else before.add_(grad)

    def _sum_tied(self) -> None:
        for name in sorted(self._reduced):
            stages, world = self._store.entries[name].stages, self._store.world
            tie = world.ties.get(stages)
            if len(stages) == 1 or tie is None:
                continue
            grad = self._reduced[name].contiguous()
            if world.is_alike(stages):
                self._reduced[name] = all_reduce_(grad, tie)
            else:
                layouts = self._store.layouts_of(name)
                self._reduced[name] = sum_between(grad, layouts, world, tie)

    def _hand_out(self) -> None:
        """Set `.grad`, which is complete and unscaled from here on."""
        factor = 1.0 if self._scale is None else 1.0 / self._scale.value
        if self._scale is not None:
            overflowed = any_overflow(self._reduced.values(), self._store.world)
            self._scale.update(overflowed=overflowed)
            if overflowed:
                self._reduced.clear()
                self._earlier.clear()
                for entry in self._store.trainable():
                    entry.shared.grad = None
        for name in list(self._reduced):
            entry = self._store.entries[name]
            grad = self._reduced.pop(name).to(entry.stored.dtype)
            if factor != 1.0:
                grad.mul_(factor)
            earlier = self._earlier.pop(name, None)
            if earlier is not None:
                grad.add_(earlier)
            entry.shared.grad = label_like(grad, entry.shared)
        self._store.update.hand_out()


def any_overflow(grads: Iterable[Tensor], world: World) -> bool:
    """Whether any rank has a gradient that is not finite; the same answer on every rank."""
    found = torch.zeros((), dtype=torch.float32, device=world.device)
    for grad in grads:
        found = torch.maximum(found, (~torch.isfinite(grad)).any().float())
    return bool(all_reduce(found, world.everyone, reduction="max"))


def gradient_buckets(entries: Sequence[Entry], cap_bytes: int) -> tuple[Bucket, ...]:
    """The buckets that a step sums over axes, without the weights that blocks gather; those of a
    rank's stages are apart."""
    homes: dict[int, list[GradientEntry]] = {}
    for entry in entries:
        if not _is_gathered(entry):
            homes.setdefault(entry.home, []).append(gradient_entry(entry))
    return tuple(bucket for home in sorted(homes) for bucket in buckets(homes[home], cap_bytes))


def gradient_entry(entry: Entry) -> GradientEntry:
    """What is to be summed of one parameter's gradient."""
    size = entry.grad_dtype.itemsize
    return GradientEntry(
        name=entry.spec.fqn,
        nbytes=torch.Size(entry.read_shape).numel() * size,
        dtype=entry.spec.grad_dtype or entry.spec.dtype,
        axes=entry.partial_axes,
        scatter=() if entry.split is None else entry.split.axis.axes,
        shard_nbytes=0 if entry.split is None else entry.stored.numel() * size,
        early=entry.spec.zero >= 2,
    )


def _bucket_of(entry: Entry) -> Bucket:
    (bucket,) = buckets([gradient_entry(entry)])
    return bucket


def _is_gathered(entry: Entry) -> bool:
    return entry.spec.zero == 3 and entry.split is not None


def _is_wide(entry: Entry) -> bool:
    """Whether gradients are added up in another dtype than the leaf's."""
    return entry.grad_dtype != entry.local.dtype


def _on_gradient(sync: weakref.ref[GradientSync], name: str, leaf: Tensor) -> None:
    """A leaf's hook. What it held would live on with the leaf: collecting cycles of Python objects
    does not see through tensors."""
    alive = sync()
    if alive is not None:
        alive.leaf_gradient(name)
