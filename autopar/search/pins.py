"""Decisions fixed by the user, as constraints of the search."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InputError
from autopar.ir.graph import Source, SourceKind
from autopar.ir.placement import Placement, R, Shard, parse_placement

MESH_DEGREES = ("pipeline", "data", "context", "tensor")
DEGREES = (*MESH_DEGREES, "shard", "expert", "chunks", "micro_batches", "micro_batch")
RECOMPUTE = ("none", "selective", "all")
"""`selective`: some ops of a block, never whole blocks."""
ZERO = ("0", "1", "2", "3")
SEQUENCE = ("on", "off")
ATTENTION = ("gather", "ring", "heads")
MESHES = ("alike", "own")
CHOICES = ("schedule", "sequence", "attention", "recompute", "zero", "meshes")
STAGE_DEGREES = ("devices", "data", "tensor")
"""What may be another on one rank of the pipeline: `stage1.tensor`."""
KEYS = (*DEGREES, *CHOICES, "weight:NAME", "boundary", *(f"stageK.{n}" for n in STAGE_DEGREES))
_STAGE = re.compile(rf"^stage(\d+)\.({'|'.join(STAGE_DEGREES)})$")
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """What is fixed; None or empty where the search is free.

    `data` is the data-parallel degree in all, `shard` the part of it on the inner axis; `expert`
    is the degree by which experts are split over ranks that split samples, 1 for none; `chunks`
    the number of stages of a pipeline rank. `sequence` tells whether the tensor axis splits the
    sequence between blocks, `attention` how queries meet keys on the context axis: keys gathered,
    sent round a ring, or heads exchanged for sequence. `zero` is the ZeRO level of all blocks;
    parameters of several blocks are at most level 1. `meshes` tells whether all stages have one
    mesh, as they have unless pinned, or `own` ones that are not all alike.

    `weights` are (parameter name, placement on the tensor axis, `R` or a shard), `boundaries`
    module paths that must start a stage. `stages` are (rank of the pipeline, degree or `devices`,
    value): what its stages have for a mesh, where that is not the others'.
    """

    pipeline: int | None = None
    chunks: int | None = None
    data: int | None = None
    shard: int | None = None
    expert: int | None = None
    context: int | None = None
    tensor: int | None = None
    sequence: str | None = None
    attention: str | None = None
    micro_batches: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    zero: int | None = None
    meshes: str | None = None
    weights: tuple[tuple[str, Placement], ...] = ()
    boundaries: tuple[str, ...] = ()
    stages: tuple[tuple[int, str, int], ...] = ()

    def of_stage(self, place: int) -> dict[str, int]:
        """The pins on the mesh of a rank of the pipeline, by name."""
        return {name: value for stage, name, value in self.stages if stage == place}

    @property
    def tensors(self) -> frozenset[int]:
        """All tensor degrees that are pinned."""
        own = {value for _, name, value in self.stages if name == "tensor"}
        return frozenset(own | ({self.tensor} if self.tensor else set()))

    def items(self) -> tuple[tuple[str, str], ...]:
        """The pins as (key, value) texts, in a fixed order."""
        simple = [(key, getattr(self, key)) for key in (*DEGREES, *CHOICES)]
        found = [(key, str(value)) for key, value in simple if value is not None]
        found += [(f"weight:{name}", str(placement)) for name, placement in self.weights]
        found += [(f"stage{stage}.{name}", str(value)) for stage, name, value in self.stages]
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
    stages: dict[tuple[int, str], int] = {}
    boundaries: list[str] = []
    parsers: dict[str, Callable[[str, str], object]] = {
        **dict.fromkeys(DEGREES, _degree),
        "schedule": _one_of(tuple(schedules)),
        "recompute": _one_of(RECOMPUTE),
        "sequence": _one_of(SEQUENCE),
        "meshes": _one_of(MESHES),
        "attention": _one_of(ATTENTION),
        "zero": lambda key, value: int(_one_of(ZERO)(key, value)),
    }
    for key, value in pairs:
        if key.startswith("weight:"):
            _add_weight(weights, key.removeprefix("weight:"), value)
        elif key == "boundary":
            boundaries.append(value)
        elif found := _STAGE.match(key):
            where, degree = (int(found[1]), found[2]), _degree(key, value)
            if stages.setdefault(where, degree) != degree:
                raise InputError(f"pin {key} is given twice: {stages[where]} and {value}")
        elif key in parsers:
            parsed = parsers[key](key, value)
            if fields.setdefault(key, parsed) != parsed:
                raise InputError(f"pin {key} is given twice: {fields[key]} and {value}")
        else:
            raise InputError(f"unknown pin {key!r}; {_nearest(key, KEYS)}")
    return Pins(
        weights=tuple(weights.items()),
        boundaries=tuple(boundaries),
        stages=tuple((*place, value) for place, value in sorted(stages.items())),
        **fields,  # type: ignore[arg-type]
    )


def _add_weight(weights: dict[str, Placement], name: str, value: str) -> None:
    try:
        placement = parse_placement(value)
    except ValueError as error:
        raise InputError(f"pin weight:{name}={value}: {error}") from error
    if placement != R and not isinstance(placement, Shard):
        raise InputError(f"pin weight:{name}={value}: a parameter is stored as R or S(dim)")
    if weights.setdefault(name, placement) != placement:
        raise InputError(f"pin weight:{name} is given twice: {weights[name]} and {value}")


def _nearest(key: str, known: Sequence[str], what: str = "pins") -> str:
    close = difflib.get_close_matches(key, known, n=3)
    if close:
        return f"did you mean {', '.join(close)}?"
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"known {what}: {', '.join(known[:_SHOWN])}{more}"


def settle_pins(pins: Pins, sources: Iterable[Source], block_paths: Iterable[str]) -> Pins:
    """The pins with every parameter under its first name, checked against the model.

    `block_paths` are the modules at which a stage may start. Raises InputError for a pin that names
    no parameter or no such module, and for a placement that the parameter's shape does not allow.
    """
    state = [s for s in sources if s.kind in (SourceKind.PARAMETER, SourceKind.BUFFER)]
    known = {name: source for source in state for name in (source.fqn, *source.tied)}
    weights: dict[str, Placement] = {}
    for name, placement in pins.weights:
        if name not in known:
            near = _nearest(name, list(known), "parameters")
            raise InputError(f"pin weight:{name}: the model has no such parameter; {near}")
        _check_placement(name, placement, known[name])
        _add_weight(weights, known[name].fqn, str(placement))
    paths = list(dict.fromkeys(filter(None, block_paths)))
    for path in pins.boundaries:
        if not any(within(p, path) for p in paths):
            near = _nearest(path, paths, "blocks")
            raise InputError(
                f"pin boundary={path}: no block of the model starts at that module; {near}"
            )
    return replace(pins, weights=tuple(weights.items()))


def _check_placement(name: str, placement: Placement, source: Source) -> None:
    if not isinstance(placement, Shard):
        return
    shape = tuple(size.const for size in source.spec.shape)
    if placement.dim >= len(shape):
        dims = f"dims 0 to {len(shape) - 1}" if shape else "no dims"
        raise InputError(f"pin weight:{name}={placement}: it has {dims}, its shape is {shape}")
    total = sum(map(abs, placement.pieces))
    if placement.pieces and total != shape[placement.dim]:
        raise InputError(
            f"pin weight:{name}={placement}: the pieces add up to {total}, dim "
            f"{placement.dim} of its shape {shape} is {shape[placement.dim]}"
        )


def within(path: str, module: str) -> bool:
    """Whether a module path is `module` or inside it."""
    return path == module or path.startswith(f"{module}.")
