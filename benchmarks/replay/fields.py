"""The lines of a file of measured runs, each with the fields that can be taken as they stand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from autopar.errors import InputError

MALFORMED = "malformed"
"""The field that says what is wrong with a line, where something is."""


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one JSON object a line; a field that is null is one left out.

    A line without a name is named by its number, one without a data set by its file. Raises
    InputError for a file that is not there, and for a line that is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield {"id": f"line {number}", "dataset": path.stem} | _object(line, path, number)


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: expected one JSON object a line: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}:{number}: expected a JSON object, found a {type(found).__name__}")
    known = {name: value for name, value in found.items() if value is not None}
    wrong = [
        f"{name}: expected {what}, found {known[name]!r:.40}"
        for what, (names, is_one) in FIELDS.items()
        for name in names
        if name in known and not is_one(known[name])
    ]
    return known | ({MALFORMED: wrong[0]} if wrong else {})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_above(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_above(value) and value == int(value)


def _is_level(value: Any) -> bool:
    return value in (0, 1, 2, 3) and not isinstance(value, bool)


FIELDS: Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "a whole number from 1": (
        (
            *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"),
            *("moe_experts", "moe_ffn", "moe_top_k"),
            *("n_gpus", "gpus_per_node", "global_batch_seqs", "micro_batch_seqs"),
            *("tp", "pp", "vpp", "dp", "cp", "ep", "etp"),
        ),
        _is_count,
    ),
    "a number above 0": (
        (
            *("params_b", "internode_gbps_per_gpu", "iteration_s", "derived_iteration_s"),
            *("measured_tokens_per_s_per_gpu", "measured_tflops_per_gpu", "peak_memory_gib"),
        ),
        _is_above,
    ),
    "a ZeRO level, 0 to 3": (("zero_stage",), _is_level),
    "a text": (
        (
            *("id", "dataset", "task", "status", "gpu", "precision", "framework", "fsdp"),
            *("recompute", "pipeline_schedule", "attention_kernel", "offload", "plan_group"),
        ),
        lambda value: isinstance(value, str),
    ),
}
"""What the fields that are read have to be."""
