"""Which attributes of which modules a call reads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from autopar.capture.state import Keys, Unprovable

_TORCH, _CAPTURE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
STRUCTURE = frozenset(vars(nn.Module())) - {"training"} | {"__class__"}
"""Attributes that are compared whether they are read or not."""

_WHOLE = frozenset(["__dict__", "__deepcopy__", "__reduce_ex__", "__getstate__", "__dir__"])
"""Reading one of these may read all."""


class Reads:
    """The attributes that a call read, by place of the module and name, with the key each had."""

    def __init__(self, modules: Sequence[nn.Module], keys: Keys) -> None:
        self.attributes: dict[tuple[int, str], Hashable] = {}
        self._modules = modules
        self._positions = {id(vars(module)): i for i, module in enumerate(modules)}
        self._keys = keys
        self._problem = ""

    def note(self, own: dict[str, object], name: str) -> None:
        """An attribute of the module whose own attributes these are is about to be read."""
        position = self._positions.get(id(own))
        if position is None or (position, name) in self.attributes:
            return
        if name in _WHOLE:
            self._problem = self._problem or f"{name} was read"
            return
        try:
            key = attribute_key(self._keys, self._modules[position], name)
        except Unprovable as unprovable:
            key, self._problem = None, self._problem or str(unprovable)
        self.attributes[position, name] = key

    def add(self, others: Reads, modules: Sequence[nn.Module]) -> None:
        """Take over what a shared call of `modules` would have read."""
        for position, name in others.attributes:
            self.note(vars(modules[position]), name)

    def check(self, keys: Keys) -> None:
        """Raises Unprovable where a value has no key, or another one by now."""
        if self._problem:
            raise Unprovable(self._problem)
        for (position, name), key in self.attributes.items():
            if attribute_key(keys, self._modules[position], name) != key:
                raise Unprovable(f"{name} changes while it is called")


def attribute_key(keys: Keys, module: nn.Module, name: str) -> Hashable:
    """The key of what reading an attribute gives, apart from methods of the class."""
    own = vars(module)
    if name in own:
        return ("own", keys.key(own[name]))
    for base in type(module).__mro__:
        if name in vars(base):
            value = vars(base)[name]
            method = callable(value) or hasattr(type(value), "__get__")
            return ("class", id(value) if method else keys.key(value))
    return ("missing",)


@contextlib.contextmanager
def observed(active: Sequence[Reads]) -> Iterator[None]:
    """Within, reads of modules' attributes are noted in all of `active`."""
    plain = object.__getattribute__

    def reading(module: nn.Module, name: str) -> object:
        if name not in STRUCTURE and (name != "__dict__" or not _asked_by_torch()):
            own = plain(module, "__dict__")
            for reads in active:
                reads.note(own, name)
        return plain(module, name)

    nested = nn.Module.__getattribute__ is not plain
    with (
        contextlib.nullcontext()
        if nested
        else mock.patch.object(nn.Module, "__getattribute__", reading, create=True)
    ):
        yield


def _asked_by_torch() -> bool:
    """Whether the code that reads an attribute is torch's, which looks up parameters so."""
    return sys._getframe(2).f_code.co_filename.startswith((_TORCH, _CAPTURE))
