"""Building a model without memory while noting how its tensors were to be filled.

Models whose weights are filled by code outside their modules' `reset_parameters` (Hugging Face's
`post_init`, or a loop over `model.modules()`) can be built on the meta device this way and filled
tensor by tensor later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autopar.errors import InputError
from autopar.runtime.counter_random import stream

_SKIP_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")
"""Functions of `torch.nn.init` that read what they fill, and so do nothing to a meta tensor."""

_EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_permuted.default,
    }
)


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a window on a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One recorded op. Meta tensors in `inputs` are views; `outputs` are those of the result."""

    func: Callable[..., Any]
    inputs: tuple[Any, ...]
    structure: Any
    outputs: tuple[_View, ...]
    mutates: bool
    is_random: bool

    def reads(self) -> set[int]:
        """Storages it needs."""
        return {item.storage for item in self.inputs if isinstance(item, _View)}

    def touches(self) -> set[int]:
        """Storages it makes or may write to."""
        made = {view.storage for view in self.outputs}
        return made | self.reads() if self.mutates else made


class InitTape(TorchDispatchMode):
    """The ops on meta tensors of a model under construction, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._real_random = 0

    def knows(self, tensor: Tensor) -> bool:
        """Whether a meta tensor was made while recording."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        has_meta = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        makes = is_random and any(a.name == "device" for a in func._schema.arguments)
        # A model may make its own helpers where its weights are: `arange(n, device=w.device)`.
        on_meta = any(isinstance(x, torch.device) and x.type == "meta" for x in leaves)
        if not (has_meta or on_meta or makes or func in _EMPTY):
            # Small and known: positions, masks, ones. Equal on all ranks, if random ones are.
            with torch.random.fork_rng(devices=[], enabled=is_random):
                if is_random:
                    self._real_random += 1
                    torch.manual_seed(stream(self._real_random) >> 1)
                return func(*args, **(kwargs or {}))
        abstract = [_abstract(leaf) for leaf in leaves]
        meta_args, meta_kwargs = tree_unflatten(abstract, structure)
        if not has_meta:
            meta_kwargs["device"] = torch.device("meta")
        result = func(*meta_args, **meta_kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._calls.append(
            _Call(
                func=func,
                inputs=tuple(self._keep(leaf) for leaf in leaves),
                structure=structure,
                outputs=tuple(self._view(out) for out in made),
                mutates=func._schema.is_mutable,
                is_random=is_random,
            )
        )
        return result

    def fill(self, func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note that a Python function fills a meta tensor in place."""
        leaves, structure = tree_flatten(((tensor, *args), kwargs))
        inputs = tuple(self._keep(leaf) for leaf in leaves)
        self._calls.append(_Call(func, inputs, structure, (), mutates=True, is_random=True))
        return tensor

    def _view(self, tensor: Tensor) -> _View:
        storage = tensor.untyped_storage()
        # Held, so that no later storage gets the same address.
        key = storage._cdata
        self._storages.setdefault(key, storage)
        return _View(
            key,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def _keep(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._view(leaf) if leaf.is_meta else leaf.detach().clone()
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def materialize(self, tensor: Tensor, seed: int) -> Tensor:
        """The value of a meta tensor, on the CPU.

        Runs again only the ops it depends on, each random one under its own seed, so that the
        value does not depend on which other tensors are made.
        """
        goal = self._view(tensor)
        needed, calls = {goal.storage}, []
        for number in reversed(range(len(self._calls))):
            call = self._calls[number]
            if call.touches() & needed:
                needed |= call.reads()
                calls.append(number)
        real: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            for number in reversed(calls):
                self._run(number, seed, real)
        return _window(goal, real).clone()

    def _run(self, number: int, seed: int, real: dict[int, torch.UntypedStorage]) -> None:
        call = self._calls[number]
        leaves = [_window(x, real) if isinstance(x, _View) else x for x in call.inputs]
        args, kwargs = tree_unflatten(leaves, call.structure)
        if call.is_random:
            torch.manual_seed(stream(seed, number) >> 1)
        result = call.func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for view, value in zip(call.outputs, made, strict=False):
            real.setdefault(view.storage, value.untyped_storage())


def _abstract(leaf: Any) -> Any:
    """An argument for running an op on meta tensors."""
    if isinstance(leaf, Tensor):
        return leaf if leaf.is_meta else leaf.detach().to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _window(view: _View, real: dict[int, torch.UntypedStorage]) -> Tensor:
    if view.storage not in real:
        raise InputError(
            f"a tensor of shape {view.size} that the model was filled with under deferred_init was "
            "not made by a torch op under it; make it inside, or build the model on the CPU"
        )
    empty = torch.empty(0, dtype=view.dtype, device="cpu")
    return empty.set_(real[view.storage], view.offset, view.size, view.stride)


@contextmanager
def deferred_init() -> Iterator[InitTape]:
    """Build a model without memory for its weights and note how they are to be filled.

    `with deferred_init() as tape: model = Model()`; then `tape.materialize(tensor, seed)`, or
    `initialize(..., tape=tape)`. Empty and random tensors are on the meta device; others, such as
    positions and masks, are real. The default device stays the CPU: some libraries fill no weights
    under `torch.device("meta")`.
    """
    tape = InitTape()
    originals = {name: getattr(nn.init, name) for name in _SKIP_META if hasattr(nn.init, name)}
    for name, original in originals.items():
        setattr(nn.init, name, _noting(tape, original))
    try:
        with tape:
            yield tape
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def _noting(tape: InitTape, original: Callable[..., Any]) -> Callable[..., Any]:
    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.is_meta:
            return tape.fill(original, tensor, *args, **kwargs)
        return original(tensor, *args, **kwargs)

    return note


__all__ = ["InitTape", "deferred_init"]
