"""Decisions pinned on modules of a model, beside those that are given by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from autopar.errors import InputError

_PINS = "_autopar_pins"


def pin(
    module: nn.Module, *, start_of_stage: bool = False, weights: Mapping[str, str] | None = None
) -> None:
    """Fix decisions about a module wherever its model is planned.

    `start_of_stage` has it start a pipeline stage; `weights` say how its parameters lie on the
    tensor axis, by their names in it: `{"up.weight": "S(0)"}`, `"R"` for whole. Raises InputError
    for a parameter that it does not have, and where nothing is said.
    """
    known = dict(module.named_parameters())
    for name in weights or {}:
        if name not in known:
            raise InputError(
                f"pin of {name!r}: {type(module).__name__} has no such parameter; it has "
                f"{', '.join(list(known)[:8]) or 'none'}"
            )
    found = [("boundary", "")] if start_of_stage else []
    found += [(f"weight:{name}", value) for name, value in (weights or {}).items()]
    if not found:
        raise InputError("pin: nothing is pinned; expected start_of_stage=True or weights={...}")
    # past nn.Module, whose own attributes are parameters and modules
    object.__setattr__(module, _PINS, (*getattr(module, _PINS, ()), *found))


def pins_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The pins on a model's modules, as (key, value) with names of the whole model."""
    for path, module in model.named_modules():
        for key, value in getattr(module, _PINS, ()):
            if key == "boundary":
                yield key, path
            else:
                name = key.removeprefix("weight:")
                yield f"weight:{path}.{name}" if path else key, value


def with_pins_of(model: nn.Module, pins: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Given pins, and those on modules that are not given otherwise."""
    given = tuple(pins)
    keys = {key for key, _ in given if key != "boundary"}
    own = [each for each in pins_of(model) if each[0] not in keys and each not in given]
    return (*given, *own)
