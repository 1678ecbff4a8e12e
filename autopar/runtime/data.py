"""Checking a batch against what was captured, and cutting it into micro-batches.

Every rank is given the whole batch and takes its own samples. All checks follow from the batch and
the plan alone, so that every rank refuses a wrong batch, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.ir.graph import OpGraph, SourceKind
from autopar.ir.placement import chunk_offsets, chunk_sizes, nested_chunk
from autopar.ir.size import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """One tensor of the batch as captured: its key, shape in samples, and dtype."""

    key: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The samples that one data rank holds of one micro-batch; `of` counts the whole micro-batch's.

    `start` is the position of the first in the step's batch.
    """

    start: int
    count: int
    of: int


def input_specs(graph: OpGraph) -> tuple[InputSpec, ...]:
    """The inputs of a captured graph."""
    return tuple(
        InputSpec(key=source.fqn, shape=source.spec.shape, dtype=source.spec.dtype)
        for source in graph.sources
        if source.kind is SourceKind.INPUT
    )


def as_mapping(batch: Any) -> dict[str, Any]:
    """A batch by key: a mapping as it is, a sequence by position (`"0"`, `"1"`), a tensor as `"0"`.

    Entries that are None are left out. Raises InputError on anything else.
    """
    if isinstance(batch, Tensor):
        batch = (batch,)
    if isinstance(batch, Mapping):
        entries = {str(key): value for key, value in batch.items()}
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        entries = {str(i): value for i, value in enumerate(batch)}
    else:
        raise InputError(
            f"a batch is a dict of keyword tensors or a tuple of positional ones, "
            f"got {type(batch).__name__}"
        )
    return {key: value for key, value in entries.items() if value is not None}


def check_batch(
    batch: Any, specs: Sequence[InputSpec], constants: Mapping[str, object] | None = None
) -> tuple[dict[str, Tensor], int]:
    """The tensors of a batch by key, and its number of samples.

    `constants` are the arguments that are no tensors, as captured. Raises InputError naming the
    entry that is missing, unknown, or differs from the capture in dtype or in a dim other than that
    of the samples, or that disagrees with the others in the number of samples.
    """
    entries, known = as_mapping(batch), {spec.key: spec for spec in specs}
    constants = constants or {}
    for key, value in constants.items():
        if key not in entries:
            raise InputError(
                f"batch entry {key!r} was captured with {value!r}, and is missing; capture the "
                "model again with a batch like this one"
            )
    for key in known:
        if key not in entries:
            raise InputError(
                f"batch entry {key!r} is missing; captured with {sorted(known)}, "
                f"got {sorted(entries)}"
            )
    samples: dict[str, int] = {}
    for key, value in entries.items():
        if key in known:
            _check_entry(known[key], value, samples)
        elif key not in constants or constants[key] != value:
            was = f"with {constants[key]!r}" if key in constants else "without it"
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise InputError(
                f"batch entry {key!r} was captured {was}, got {shown}; capture the model again "
                f"with a batch like this one"
            )
    if len(set(samples.values())) > 1:
        raise InputError(f"batch entries differ in their number of samples: {samples}")
    return {key: entries[key] for key in known}, next(iter(samples.values()), 1)


def _check_entry(spec: InputSpec, value: object, samples: dict[str, int]) -> None:
    """Check one entry; note its number of samples where it has any."""
    where = f"batch entry {spec.key!r}"
    if not isinstance(value, Tensor):
        raise InputError(f"{where} was captured as a tensor, got {type(value).__name__}")
    if value.dtype != getattr(torch, spec.dtype):
        dtype = str(value.dtype).removeprefix("torch.")
        raise InputError(f"{where} was captured with dtype {spec.dtype}, got {dtype}")
    if value.dim() != len(spec.shape):
        raise InputError(
            f"{where} was captured with {len(spec.shape)} dims, got {value.dim()}: "
            f"{tuple(value.shape)}"
        )
    for dim, (size, extent) in enumerate(zip(spec.shape, value.shape, strict=True)):
        count, odd = divmod(extent - size.const, size.per_sample or 1)
        if size.is_batch and (odd or count < 0):
            raise InputError(f"{where}, dim {dim}: {extent} is not {size} for any batch")
        if not size.is_batch and count:
            name = "sequence, " if dim == 1 and value.dim() >= 2 else ""
            raise InputError(
                f"{where} was captured with {size} in dim {dim} ({name}not samples), got {extent}; "
                f"pad or cut it to {size}, or capture the model again"
            )
        if size.is_batch and samples.setdefault(spec.key, count) != count:
            raise InputError(f"{where} has {samples[spec.key]} and {count} samples in two dims")


def micro_batch_spans(
    samples: int, micro_batches: int, sizes: Sequence[int], at: Sequence[int]
) -> tuple[Span, ...]:
    """This rank's samples of each micro-batch.

    Samples are cut into micro-batches, then each over the axes that split samples (their `sizes`,
    and the rank's place `at` on each), all as `torch.chunk` does: 8 in 3 are 3, 3, 2. The last ones
    may be empty.
    """
    spans, offsets = [], chunk_offsets(samples, micro_batches)
    for start, count in zip(offsets, chunk_sizes(samples, micro_batches), strict=True):
        first, own = nested_chunk(count, sizes, at)
        spans.append(Span(start=start + first, count=own, of=count))
    return tuple(spans)


def slice_batch(
    batch: Mapping[str, Tensor], specs: Sequence[InputSpec], span: Span, device: torch.device
) -> dict[str, Tensor]:
    """The samples of a span, on the device; entries without a dim of samples are whole."""
    result = {}
    for spec in specs:
        value = batch[spec.key]
        for dim, size in enumerate(spec.shape):
            if size.is_batch:
                step = size.per_sample
                value = value.narrow(dim, span.start * step, span.count * step)
        result[spec.key] = value.to(device, non_blocking=True)
    return result
