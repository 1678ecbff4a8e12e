"""Decisions fixed by the user, as constraints of the search."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.ir.placement import Placement, parse_placement

DEGREES = ("pipeline", "data", "tensor", "micro_batches", "micro_batch")
RECOMPUTE = ("none", "all")
KEYS = (*DEGREES, "schedule", "recompute", "zero", "weight:NAME", "boundary")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """What is fixed; None or empty where the search is free.

    `weights` are (parameter name, placement on the tensor axis), `boundaries` module paths that
    must start a stage.
    """

    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    micro_batches: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    weights: tuple[tuple[str, Placement], ...] = ()
    boundaries: tuple[str, ...] = ()

    def items(self) -> tuple[tuple[str, str], ...]:
        """The pins as (key, value) texts, in a fixed order."""
        simple = [(key, getattr(self, key)) for key in (*DEGREES, "schedule", "recompute")]
        found = [(key, str(value)) for key, value in simple if value is not None]
        found += [(f"weight:{name}", str(placement)) for name, placement in self.weights]
        return (*found, *(("boundary", path) for path in self.boundaries))


def _degree(key: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise InputError(f"pin {key}={value}: expected a whole number of at least 1")
    return int(value)


def _one_of(names: Iterable[str]) -> Callable[[str, str], str]:
    def parse(key: str, value: str) -> str:
        if value not in names:
            raise InputError(f"pin {key}={value}: expected one of {', '.join(names)}")
        return value

    return parse


def parse_pins(pairs: Iterable[tuple[str, str]], schedules: Iterable[str]) -> Pins:
    """Pins from (key, value) texts. Raises InputError naming the pin and what it may be."""
    fields: dict[str, object] = {}
    weights: dict[str, Placement] = {}
    boundaries: list[str] = []
    parsers: dict[str, Callable[[str, str], object]] = {
        **dict.fromkeys(DEGREES, _degree),
        "schedule": _one_of(tuple(schedules)),
        "recompute": _one_of(RECOMPUTE),
    }
    for key, value in pairs:
        if key.startswith("weight:"):
            _add_weight(weights, key.removeprefix("weight:"), value)
        elif key == "boundary":
            boundaries.append(value)
        elif key == "zero":
            if value != "0":
                raise InputError(f"pin zero={value}: only zero=0 (no sharded state) can be run")
        elif key in parsers:
            parsed = parsers[key](key, value)
            if fields.setdefault(key, parsed) != parsed:
                raise InputError(f"pin {key} is given twice: {fields[key]} and {value}")
        else:
            raise InputError(f"unknown pin {key!r}; {_nearest(key, KEYS)}")
    return Pins(weights=tuple(weights.items()), boundaries=tuple(boundaries), **fields)  # type: ignore[arg-type]


def _add_weight(weights: dict[str, Placement], name: str, value: str) -> None:
    try:
        placement = parse_placement(value)
    except ValueError as error:
        raise InputError(f"pin weight:{name}={value}: {error}") from error
    if weights.setdefault(name, placement) != placement:
        raise InputError(f"pin weight:{name} is given twice: {weights[name]} and {value}")


def _nearest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=3)
    return f"did you mean {', '.join(close)}?" if close else f"known pins: {', '.join(known)}"


def check_names(pins: Pins, parameters: Iterable[str], modules: Iterable[str]) -> None:
    """Raise InputError for a pin that names no parameter or no module of the model."""
    known, paths = list(parameters), list(modules)
    for name, _ in pins.weights:
        if name not in known:
            raise InputError(
                f"pin weight:{name}: the model has no such parameter; {_nearest(name, known)}"
            )
    for path in pins.boundaries:
        if not any(p == path or p.startswith(f"{path}.") for p in paths):
            raise InputError(
                f"pin boundary={path}: no block of the model starts at that module; "
                f"{_nearest(path, paths)}"
            )
