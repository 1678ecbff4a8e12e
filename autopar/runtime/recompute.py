"""Running ops again in the backward instead of keeping what they made.

A block's forward runs under a `Recomputation`, called `again` in generated source. What
`again(function, *args)` makes is not kept for the backward: wherever an op would save it, or the
function's own ops save something, a `_Remade` is saved in its place. The first of them that the
backward asks for runs the function once more, and every other one gets its tensor from that run.

Only `args` are kept. The function must give the same results each time: masks are drawn by
position, and no op of a program writes to what it reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import RuntimeFailure

Argument = Tensor | Mapping[str, Tensor]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Recomputation:
    """One run of a block's forward, of which parts are run again in the backward.

    Entering it changes what autograd saves; without gradients it does nothing. Saved tensors that
    are kept go to the hooks that were in force before, if any.
    """

    def __init__(self) -> None:
        self._hooks: saved_tensors_hooks | None = None
        self._outer: Hooks | None = None
        self._made: dict[int, list[_Result]] = {}

    def __enter__(self) -> Recomputation:
        if torch.is_grad_enabled():
            # The hooks in force; torch has no public name for them.
            self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
            self._made.clear()

    def __call__(self, function: Callable[..., Any], *args: Argument) -> Any:
        """`function(*args)`, a tensor or a tuple of them, made again when the backward needs it."""
        if self._hooks is None:
            return function(*args)
        segment = _Segment(function, [self._keep(arg) for arg in args])
        with saved_tensors_hooks(segment.pack, _unpack):
            results = function(*args)
        given = {_storage(t) for arg in args for t in _tensors(arg)}
        for index, result in enumerate(_tuple(results)):
            if (storage := _storage(result)) not in given:
                made = _Result(segment, index, weakref.ref(result), result.dtype)
                self._made.setdefault(storage, []).append(made)
        return results

    def _keep(self, arg: Argument) -> _Kept | dict[str, _Kept]:
        if isinstance(arg, Tensor):
            return _Kept(self._pack(arg.detach()), arg.requires_grad)
        return {key: _Kept(self._pack(t.detach()), t.requires_grad) for key, t in arg.items()}

    def _pack(self, tensor: Tensor) -> Any:
        """What is kept for a tensor: a promise to make it again, or the tensor."""
        made = self._find(tensor)
        if made is not None:
            window = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            return made.segment.promise(made.index, window)
        if self._outer is None:
            return tensor
        pack, unpack = self._outer
        return _Elsewhere(pack(tensor), unpack)

    def _find(self, tensor: Tensor) -> _Result | None:
        """The result that lies in the same storage; a result that is gone has no storage."""
        if tensor.is_conj() or tensor.is_neg():
            return None
        for made in self._made.get(_storage(tensor), ()):
            if made.alive() is not None and made.dtype == tensor.dtype:
                return made
        return None


class _Result:
    """A result of a segment, known by its storage for as long as it lives."""

    __slots__ = ("alive", "dtype", "index", "segment")

    def __init__(
        self, segment: _Segment, index: int, alive: weakref.ref[Tensor], dtype: torch.dtype
    ) -> None:
        self.segment, self.index, self.alive, self.dtype = segment, index, alive, dtype


class _Elsewhere:
    """A tensor kept by the hooks around a block."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed, self.unpack = packed, unpack


class _Kept:
    """An argument of a segment, kept to run it again."""

    __slots__ = ("packed", "requires_grad")

    def __init__(self, packed: Any, requires_grad: bool) -> None:
        self.packed, self.requires_grad = packed, requires_grad

    def tensor(self) -> Tensor:
        """The argument as a leaf of its own, so that the segment's ops save what they saved."""
        return _unpack(self.packed).detach().requires_grad_(self.requires_grad)


Window = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset in a storage."""


class _Remade:
    """A tensor that is made again: one saved in a segment, or a window on a result of it."""

    __slots__ = ("__weakref__", "segment", "value", "window")

    def __init__(self, segment: _Segment, window: Window | None = None) -> None:
        self.segment, self.window = segment, window
        self.value: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.value is None:
            self.segment.run()
        if self.value is None:
            raise RuntimeFailure("a value that should be made again was not; keep it instead")
        return self.value if self.window is None else self.value.as_strided(*self.window)


class _Segment:
    """One call of `again`: what to run, and who waits for what it makes."""

    def __init__(self, function: Callable[..., Any], args: list[_Kept | dict[str, _Kept]]) -> None:
        self._function: Callable[..., Any] | None = function
        self._args = args
        self._saved: list[weakref.ref[_Remade]] = []
        self._results: list[tuple[int, weakref.ref[_Remade]]] = []

    def pack(self, tensor: Tensor) -> _Remade:
        """In place of a tensor that an op of the function saves: they are told apart by order."""
        promise = _Remade(self)
        self._saved.append(weakref.ref(promise))
        return promise

    def promise(self, index: int, window: Window) -> _Remade:
        """In place of a tensor that lies in result `index`."""
        promise = _Remade(self, window)
        self._results.append((index, weakref.ref(promise)))
        return promise

    def run(self) -> None:
        """Run the function again and hand out what it makes; nothing of it stays here."""
        function, args = self._function, self._args
        if function is None:
            return
        self._function, self._args = None, []
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            saved.append(tensor.detach())

        with torch.enable_grad(), saved_tensors_hooks(pack, _never):
            results = _tuple(function(*map(_argument, args)))
        if len(saved) != len(self._saved):
            raise RuntimeFailure(
                f"{function.__name__} saved {len(self._saved)} tensors in the forward and "
                f"{len(saved)} when it ran again: its ops must not depend on when they run"
            )
        waiting = [*zip(saved, self._saved, strict=True)]
        waiting += [(results[index].detach(), promise) for index, promise in self._results]
        for tensor, reference in waiting:
            promise = reference()
            if promise is not None:
                promise.value = tensor


def _storage(tensor: Tensor) -> int:
    """Which storage a tensor lies in, for as long as it lives. Not by the address of its memory:
    a rank without samples has none, and must still run again what the others do."""
    return tensor.untyped_storage()._cdata


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Remade):
        return packed.tensor()
    if isinstance(packed, _Elsewhere):
        return packed.unpack(packed.packed)
    tensor: Tensor = packed
    return tensor


def _never(packed: Any) -> Tensor:
    raise RuntimeFailure("the run of a segment for its values has no backward")


def _argument(kept: _Kept | dict[str, _Kept]) -> Argument:
    if isinstance(kept, _Kept):
        return kept.tensor()
    return {key: value.tensor() for key, value in kept.items()}


def _tensors(arg: Argument) -> tuple[Tensor, ...]:
    return (arg,) if isinstance(arg, Tensor) else tuple(arg.values())


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


__all__ = ["Recomputation"]
