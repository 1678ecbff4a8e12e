"""Values of Python as keys that are equal for equal values, and what a function reads besides them.

A key covers everything a value holds, so that equal keys mean that code cannot tell the values
apart (but for their identity). What has no such key raises `Unprovable`.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import logging
import random
import re
import sys
import threading
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

_TRUSTED = sys.stdlib_module_names | {"builtins", "torch", "numpy", "einops", "typing_extensions"}
"""Top-level packages whose functions keep no state of their own that a forward could depend on."""

_IMPURE = frozenset(["random", "secrets", "time", "datetime", "uuid", "numpy.random"])
"""Modules of these whose functions give another answer at every call."""

_REFLECTION = frozenset(["globals", "exec", "eval", "__import__"])
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPAQUE = (
    *(logging.Logger, logging.LoggerAdapter, logging.Handler, re.Pattern, types.ModuleType),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""Objects that are only ever compared by identity: what is in them is no business of a forward."""

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


class Unprovable(Exception):
    """Something whose equality or constancy cannot be shown."""


class Keys:
    """Makes keys. `positions` gives the place of each module that may occur in a value.

    `functions` collects the functions that values hold, for what they read counts too.
    """

    def __init__(self, positions: Mapping[int, int] | None = None) -> None:
        self.functions: dict[int, types.FunctionType] = {}
        self.classes: dict[int, type] = {}
        self._positions = positions or {}
        self._open: dict[int, int] = {}
        self._done: dict[int, Hashable] = {}
        self._kept: list[object] = []

    def key(self, value: object) -> Hashable:
        """Raises Unprovable."""
        if isinstance(value, _ATOMS) and type(value).__module__ == "builtins":
            return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
        if isinstance(value, _TORCH_ATOMS):
            return value
        if isinstance(value, torch.SymInt):
            return ("sym", value.node.expr)
        if id(value) in self._done:
            return self._done[id(value)]
        if id(value) in self._open:
            return ("again", self._open[id(value)])
        self._open[id(value)] = len(self._open)
        try:
            found = self._compound(value)
        finally:
            del self._open[id(value)]
        self._done[id(value)] = found
        self._kept.append(value)  # so that its id stays its own
        return found

    def _compound(self, value: Any) -> Hashable:
        if isinstance(value, enum.Enum):
            return ("enum", id(type(value)), value.name)
        if isinstance(value, type):
            self.classes[id(value)] = value
            return ("class", id(value))
        if id(value) in self._positions:
            return ("module", self._positions[id(value)])
        if isinstance(value, _OPAQUE) or type(value) is object:
            return ("same", id(value))
        if isinstance(value, (torch.Tensor, torch.Generator)):
            raise Unprovable(f"a {type(value).__name__} that is no parameter or buffer")
        if (function := self._function(value)) is not None:
            return function
        if isinstance(value, (list, tuple, types.SimpleNamespace, dict, types.MappingProxyType)):
            return (id(type(value)), self._items(value), self._attributes(value))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(map(self.key, value)), self._attributes(value))
        if type(value).__module__ in _TRUSTED_DATA or _is_plain(type(value)):
            self.classes[id(type(value))] = type(value)
            return ("object", id(type(value)), self._attributes(value))
        raise Unprovable(f"an object of class {type(value).__qualname__}")

    def _items(self, value: Any) -> Hashable:
        if isinstance(value, types.SimpleNamespace):
            return ()
        if isinstance(value, (list, tuple)):
            return tuple(map(self.key, value))
        return tuple((self.key(k), self.key(v)) for k, v in value.items())

    def _attributes(self, value: object) -> Hashable:
        found = dict(getattr(value, "__dict__", {}))
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    found[name] = getattr(value, name)
        return tuple((name, self.key(item)) for name, item in found.items())

    def _function(self, value: Any) -> Hashable | None:
        if isinstance(value, functools.partial):
            return ("partial", self.key(value.func), self.key(value.args), self.key(value.keywords))
        if isinstance(value, types.MethodType):
            return ("method", self.key(value.__func__), self.key(value.__self__))
        if isinstance(value, (staticmethod, classmethod)):
            return (type(value), self.key(value.__func__))
        if isinstance(value, property):
            return ("property", *(self.key(f) for f in (value.fget, value.fset, value.fdel)))
        if hasattr(value, "__wrapped__") and type(value).__module__ == "functools":
            return ("cached", self.key(value.__wrapped__))
        if isinstance(value, types.FunctionType):
            self.functions[id(value)] = value
            return ("function", id(value))
        if isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType)):
            _refuse_impure(value)
            return ("builtin", id(value.__self__), value.__name__)
        if isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return ("builtin", id(value))
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return ("op", str(value))
        return None


_TRUSTED_DATA = frozenset(["pathlib", "types"])


def _is_plain(cls: type) -> bool:
    """Whether instances hold nothing but their attributes and slots."""
    slots = sum(
        1
        if isinstance(vars(base).get("__slots__", ()), str)
        else len(vars(base).get("__slots__", ()))
        for base in cls.__mro__
    )
    spare = 2 + slots  # a dict, weak references
    return (
        isinstance(getattr(cls, "__module__", None), str)
        and bool(cls.__flags__ & (1 << 9))  # made by a class statement or as a heap type
        and cls.__itemsize__ == 0
        and cls.__basicsize__ <= object.__basicsize__ + 8 * spare
    )


def is_trusted(value: object) -> bool:
    """Whether a function, class or module is of a package that keeps no state."""
    module = value.__name__ if isinstance(value, types.ModuleType) else _module_of(value)
    return module.partition(".")[0] in _TRUSTED


def _module_of(value: object) -> str:
    return getattr(value, "__module__", None) or ""


def _refuse_impure(value: object) -> None:
    module = value.__name__ if isinstance(value, types.ModuleType) else _module_of(value)
    owner = getattr(value, "__self__", None)
    if module in _IMPURE or isinstance(owner, random.Random):
        raise Unprovable(f"{getattr(value, '__name__', value)} of {module}")


Entry = tuple[Mapping[Any, Any], Any, object, Hashable]
"""A namespace, a name in it, the value it had, and its key (None: compared by identity)."""


_MISSING = object()


class Surroundings:
    """What a set of functions can read besides arguments: globals, closures, defaults.

    The functions are found from classes (their methods, as far as their names occur) and values.
    Over all of them, not only what one call happens to read. Raises Unprovable.
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[types.FunctionType]) -> None:
        self._entries: list[Entry] = []
        self._names: set[str] = {"forward", "__call__"}
        self._functions: dict[int, types.FunctionType] = {}
        self._seen: dict[int, type] = {}
        self._taken: set[tuple[int, str]] = set()
        self._todo: list[types.FunctionType] = list(functions)
        for cls in classes:
            self._add_class(cls)
        self._explore()

    def changed(self) -> bool:
        """Whether anything is not as it was."""
        keys = Keys()
        for namespace, name, value, key in self._entries:
            now = namespace.get(name, _MISSING)
            if now is not value and (key is None or now is _MISSING):
                return True
            if key is not None:
                try:
                    if keys.key(now) != key:
                        return True
                except Unprovable:
                    return True
        return False

    def _explore(self) -> None:
        before = -1
        while before != len(self._functions) or self._todo:
            before = len(self._functions)
            while self._todo:
                self._visit(self._todo.pop())
            for cls in list(self._seen.values()):
                self._add_methods(cls)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._seen and not is_trusted(base):
                self._seen[id(base)] = base

    def _add_methods(self, cls: type) -> None:
        for name, value in list(vars(cls).items()):
            special = name.startswith("__") and not issubclass(cls, nn.Module)
            if name in self._names or (special and isinstance(value, types.FunctionType)):
                self._watch(vars(cls), name, cls)

    def _visit(self, function: types.FunctionType) -> None:
        if id(function) in self._functions or is_trusted(function):
            return
        self._functions[id(function)] = function
        codes = list(_codes(function.__code__))
        names = {name for code in codes for name in code.co_names}
        self._names |= names
        for name in {name for code in codes for name in _set_globals(code)}:
            if name not in function.__globals__:
                self._entries.append((function.__globals__, name, _MISSING, None))
        for name in sorted(names):
            if name in function.__globals__:
                self._watch(function.__globals__, name, function.__globals__, names)
            elif name in _REFLECTION and hasattr(builtins, name):
                raise Unprovable(f"{function.__qualname__} calls {name}")
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in closure.items():
            self._watch(_Cell(cell), name, cell, names)
        defaults = {"positional": function.__defaults__, "keyword": function.__kwdefaults__}
        for name in defaults:
            self._watch(defaults, name, function, names)

    def _watch(
        self, namespace: Mapping[Any, Any], name: str, owner: object, names: Set[str] = frozenset()
    ) -> None:
        """Take up a value that may be read, and what it leads to."""
        token = (id(owner), name)
        if token in self._taken and not isinstance(namespace.get(name), types.ModuleType):
            return
        self._taken.add(token)
        value = namespace.get(name)
        if isinstance(value, types.ModuleType):
            self._entries.append((namespace, name, value, None))
            self._watch_module(value, names)
            return
        if is_descriptor_of_instances(value):
            return
        keys = Keys()
        key = None if isinstance(value, _FUNCTIONS) else keys.key(value)
        if isinstance(value, types.BuiltinFunctionType):
            _refuse_impure(value)
        if isinstance(value, types.FunctionType):
            self._todo.append(value)
        self._todo += keys.functions.values()
        for cls in keys.classes.values():
            _refuse_impure(cls)
            self._add_class(cls)
        constant = isinstance(value, (*_ATOMS, *_TORCH_ATOMS, type, *_FUNCTIONS))
        self._entries.append((namespace, name, value, None if constant else key))

    def _watch_module(self, module: types.ModuleType, names: Set[str]) -> None:
        _refuse_impure(module)
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if not is_trusted(module):
                self._watch(vars(module), name, module, names)
            elif isinstance(value, types.ModuleType):
                _refuse_impure(value)


class _Cell(Mapping[str, Any]):
    """A closure's cell as a namespace."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def get(self, _name: str, default: object = None) -> object:
        try:
            return self.cell.cell_contents
        except ValueError:
            return default

    def __getitem__(self, _name: str) -> object:
        return self.cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def is_descriptor_of_instances(value: object) -> bool:
    """Slots and the like, which stand for state of an instance."""
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


_STORES = frozenset(["STORE_GLOBAL", "DELETE_GLOBAL"])
_STORE_CODES = {dis.opmap[name] for name in _STORES}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _set_globals(code: types.CodeType) -> Iterator[str]:
    """The globals that a function sets."""
    if _STORE_CODES & set(code.co_code[::2]):
        yield from (i.argval for i in dis.get_instructions(code) if i.opname in _STORES)


__all__ = ["Keys", "Surroundings", "Unprovable", "is_trusted"]
