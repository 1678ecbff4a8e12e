"""Values of the plan's types as JSON data, back, and as JSON Schema.

One walk over dataclass fields and their type hints serves all three, so that a new field needs no
second list. A codec exists for each kind of type hint:

| type hint                       | JSON                                              |
|---------------------------------|---------------------------------------------------|
| `bool`, `int`, `str`            | the same; an `int` is never written `1.0`         |
| `float`                         | a finite number of at most `DIGITS` digits        |
| `Placement`, `Size`             | their text: `"S(0)"`, `"64*batch"`                |
| a `StrEnum`                     | its value                                         |
| `T or None`                     | `null`, or as `T`                                 |
| `Terms`                         | an object of numbers, in order                    |
| `tuple[T, ...]`                 | an array                                          |
| a dataclass                     | an object, keys in the order of the fields        |

A field whose default is empty (no items, no text, null, 0) or a flag is left out where it has it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from inspect import getdoc
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from autopar.errors import PlanMismatch
from autopar.ir.placement import Placement, parse_placement
from autopar.ir.size import Size
from autopar.plan.plan import Terms

DIGITS = 9
"""Significant digits a float is written with: a prediction is never better than that."""

Schemas = dict[str, dict[str, Any]]
"""The `$defs` of a JSON Schema by name."""


class Codec(Protocol):
    """One kind of type hint.

    `encode` gives JSON data; `decode` is its inverse; `path` is the JSON path of the value, for the
    message of the PlanMismatch that both raise. `schema` describes the data, and adds to `defs`
    what it refers to.
    """

    def encode(self, value: Any, path: str) -> Any: ...  # noqa: D102
    def decode(self, data: Any, path: str) -> Any: ...  # noqa: D102
    def schema(self, defs: Schemas) -> dict[str, Any]: ...  # noqa: D102


def mismatch(path: str, expected: str, found: Any) -> PlanMismatch:
    """The error for data of the wrong kind at a JSON path."""
    return PlanMismatch(f"{path or 'plan'}: expected {expected}, found {show(found)}")


def show(data: Any) -> str:
    """JSON data in a message: short, on one line, without control characters."""
    if isinstance(data, dict):
        return f"an object of {len(data)} fields"
    if isinstance(data, list) and len(data) > 8:
        return f"an array of {len(data)} items"
    text = json.dumps(data)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class _Plain:
    """`bool`, `int` or `str`. A bool is no int."""

    kind: type
    convert: Callable[[Any], Any]
    name: str

    def encode(self, value: Any, path: str) -> Any:
        return self.convert(value)

    def decode(self, data: Any, path: str) -> Any:
        if type(data) is not self.kind:
            article = "an" if self.name[0] in "aeiou" else "a"
            raise mismatch(path, f"{article} {self.name}", data)
        return data

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"type": self.name}


@dataclass(frozen=True, slots=True)
class _Float:
    def encode(self, value: Any, path: str) -> float:
        if not isfinite(value):
            raise PlanMismatch(f"{path}: a plan holds finite numbers only, found {value}")
        return float(f"{value:.{DIGITS}g}")

    def decode(self, data: Any, path: str) -> float:
        if type(data) not in (int, float):
            raise mismatch(path, "a number", data)
        try:
            value = float(data)
        except OverflowError:
            raise mismatch(path, "a number a float can hold", data) from None
        if not isfinite(value):
            raise PlanMismatch(f"{path}: expected a finite number, found {value}")
        return value

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"type": "number"}


@dataclass(frozen=True, slots=True)
class _Text:
    """A type with a text form. Only the form that `str` gives is read."""

    parse: Callable[[str], Any]
    expected: str
    pattern: str

    def encode(self, value: Any, path: str) -> str:
        return str(value)

    def decode(self, data: Any, path: str) -> Any:
        try:
            value = self.parse(data) if isinstance(data, str) else None
        except ValueError:
            value = None
        if value is None or str(value) != data:
            raise mismatch(path, self.expected, data)
        return value

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"type": "string", "pattern": self.pattern}


@dataclass(frozen=True, slots=True)
class _Enum:
    kind: type[StrEnum]

    def encode(self, value: Any, path: str) -> str:
        return self.kind(value).value

    def decode(self, data: Any, path: str) -> StrEnum:
        values = [member.value for member in self.kind]
        if data not in values:
            raise mismatch(path, f"one of {', '.join(values)}", data)
        return self.kind(data)

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"enum": [member.value for member in self.kind]}


@dataclass(frozen=True, slots=True)
class _Optional:
    inner: Codec

    def encode(self, value: Any, path: str) -> Any:
        return None if value is None else self.inner.encode(value, path)

    def decode(self, data: Any, path: str) -> Any:
        return None if data is None else self.inner.decode(data, path)

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"anyOf": [self.inner.schema(defs), {"type": "null"}]}


@dataclass(frozen=True, slots=True)
class _Array:
    item: Codec

    def encode(self, value: Any, path: str) -> list[Any]:
        return [self.item.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def decode(self, data: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise mismatch(path, "an array", data)
        return tuple(self.item.decode(item, f"{path}[{i}]") for i, item in enumerate(data))

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(defs)}


@dataclass(frozen=True, slots=True)
class _Terms:
    """Named figures."""

    number: Codec

    def encode(self, value: Any, path: str) -> dict[str, Any]:
        names = [name for name, _ in value]
        if len(set(names)) != len(names):
            raise PlanMismatch(f"{path}: a term is named twice: {', '.join(names)}")
        return {name: self.number.encode(figure, f"{path}.{name}") for name, figure in value}

    def decode(self, data: Any, path: str) -> tuple[tuple[str, Any], ...]:
        if not isinstance(data, dict):
            raise mismatch(path, "an object of numbers", data)
        return tuple(
            (name, self.number.decode(figure, f"{path}.{name}")) for name, figure in data.items()
        )

    def schema(self, defs: Schemas) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.number.schema(defs)}


@dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass."""

    kind: Any

    def encode(self, value: Any, path: str) -> dict[str, Any]:
        result = {}
        for field, codec in _members(self.kind):
            member = getattr(value, field.name)
            if not (_left_out(field.default) and member == field.default):
                result[field.name] = codec.encode(member, _join(path, field.name))
        return result

    def decode(self, data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            raise mismatch(path, f"an object ({self.kind.__name__})", data)
        members = _members(self.kind)
        names = [field.name for field, _ in members]
        for key in data:
            if key not in names:
                raise PlanMismatch(f"{_join(path, key)}: unknown field; {_near(key, names)}")
        values = {}
        for field, codec in members:
            where = _join(path, field.name)
            if field.name in data:
                values[field.name] = codec.decode(data[field.name], where)
            elif field.default is MISSING:
                raise PlanMismatch(f"{where}: missing field of {self.kind.__name__}")
        return self.kind(**values)

    def schema(self, defs: Schemas) -> dict[str, Any]:
        name = self.kind.__name__
        if name not in defs:
            members = _members(self.kind)
            defs[name] = {
                "type": "object",
                "description": " ".join((getdoc(self.kind) or "").split()),
                "properties": {field.name: codec.schema(defs) for field, codec in members},
                "required": [field.name for field, _ in members if field.default is MISSING],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}


_LEAVES: dict[Any, Codec] = {
    bool: _Plain(bool, bool, "boolean"),
    int: _Plain(int, operator.index, "integer"),
    str: _Plain(str, str, "string"),
    float: _Float(),
    Size: _Text(
        Size.parse,
        "a size such as 64, batch or 64*batch",
        r"^(\d+|(\d+\*)?batch(\+\d+)?)$",
    ),
    Placement: _Text(
        parse_placement,
        "a placement: S(dim), R, R*, P(sum) or E",
        r"^(E|R\*?|P\(sum\)|S\(\d+(:\d+(\|\d+)*)?\))$",
    ),
    Terms: _Terms(_Float()),
}


@cache
def codec_of(hint: Any) -> Codec:
    """The codec of a type hint. Raises TypeError where the table above has no row for it."""
    if hint in _LEAVES:
        return _LEAVES[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Enum(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _Record(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple and args[1:] == (...,):
        return _Array(codec_of(args[0]))
    if origin in (Union, UnionType) and args[1:] == (NoneType,):
        return _Optional(codec_of(args[0]))
    raise TypeError(f"no JSON form for {hint!r}; add a row to _LEAVES in autopar/plan/codec.py")


@cache
def _members(kind: Any) -> tuple[tuple[Field[Any], Codec], ...]:
    """The fields of a dataclass in order, each with its codec."""
    hints = get_type_hints(kind)
    return tuple((field, codec_of(hints[field.name])) for field in fields(kind))


def _left_out(default: Any) -> bool:
    return default is None or isinstance(default, bool) or default in ((), "", 0)


def _join(path: str, name: str) -> str:
    text = name if name.isidentifier() else show(name)
    return f"{path}.{text}" if path else text


def _near(key: str, names: list[str]) -> str:
    near = get_close_matches(key, names, n=1)
    return f"did you mean {near[0]}?" if near else f"expected {', '.join(names)}"
