"""Digests of values by what they say, equal in every process and in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum

import numpy as np

_SIZE = 20


class Undigestible(TypeError):
    """A value of a kind of which it is not known what it says."""


def digest_of(value: object) -> str:
    """A digest of numbers, texts, arrays and enum members, of sequences, sets and mappings of them,
    and of dataclasses by the fields that they compare by. Raises Undigestible for all else."""
    return _digest(value, {}).hex()


def _digest(value: object, known: dict[int, tuple[object, bytes]]) -> bytes:
    """`known` are the digests of what was met already, by its id, which is kept from reuse."""
    if id(value) in known:
        return known[id(value)][1]
    text = type(value).__qualname__.encode() + b":" + _said(value, known)
    digest = hashlib.blake2b(text, digest_size=_SIZE).digest()
    known[id(value)] = value, digest
    return digest


def _said(value: object, known: dict[int, tuple[object, bytes]]) -> bytes:
    match value:
        case Enum():
            return value.name.encode()
        case None | bool() | int() | float() | str():
            return repr(value).encode()
        case bytes():
            return value
        case np.ndarray() if value.dtype != object:
            return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
        case tuple() | list():
            return b"".join([_digest(item, known) for item in value])
        case AbstractSet():
            return b"".join(sorted(_digest(item, known) for item in value))
        case Mapping():
            return b"".join(
                _digest(key, known) + _digest(item, known) for key, item in value.items()
            )
        case _ if is_dataclass(value) and not isinstance(value, type):
            return b"".join(
                each.name.encode() + _digest(getattr(value, each.name), known)
                for each in fields(value)
                if each.compare
            )
    raise Undigestible(f"{type(value).__qualname__}: no digest for a value of this kind")
