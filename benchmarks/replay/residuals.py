"""What is left of the errors, by source and by what its runs have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from replay.rows import Row

LEAST_RUNS, LARGE = 3, 0.1
"""Runs with a trait that make a line, and the median error from which on they do."""

MISSING: Mapping[str, str] = {
    "experts": "exchanges that send a token once to a node with several of its experts (DeepEP, "
    "HybridEP), and beside the products of shared layers",
    "DT-FM NeurIPS22 Case 2": "instances of which only some share a network card, in an order of "
    "ranks that is not published, and cards that exceed their rate for a while",
    "DT-FM NeurIPS22 Case 1": "links between the devices of a node that are no switch (DGX-1V's "
    "cube mesh)",
    "8 bits": "saved tensors of one byte, and what scales cost in small products",
    "PaxML": "what XLA runs again, and when it starts its collectives: neither is published",
    "MaxText": "what XLA runs again, and when it starts its collectives: neither is published",
    "ZeRO 3": "collectives that take multiprocessors and bandwidth from the compute beside them, "
    "and a host that does not keep ahead",
    "HF Ultra-Scale": "a network that slows down as nodes are added, of several code versions",
    "DLPerf": "tensor ranks of several nodes on a slow network; kernels of OneFlow's own",
    "SC21 Fig 15": "all-reduces of a few megabytes on many nodes",
    "Composer": "kernels of 2023 on a device of 2023 (H100): products and Triton's attention",
    "NeMo": "which options a recipe had (overlap of tensor ranks, interleaving) where rows leave "
    "them out",
    "runs again: not published": "what was run again is not published: the least that fits is "
    "taken",
}
"""What would close a gap, by a trait or by how a source or framework begins; the first that
fits."""


def traits(row: Row) -> Iterator[str]:
    """What a row has in common with others of its source."""
    yield "all"
    precision = str(row.get("precision")).lower()
    if row.get("moe_experts"):
        yield "experts"
    if "fp8" in precision or "float8" in precision:
        yield "8 bits"
    for name, key in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp")):
        if int(row.get(key) or 1) > 1:
            yield name
    if row.get("zero_stage") == 3:
        yield "ZeRO 3"
    text = str(row.get("recompute") or "not published")
    yield f"runs again: {text.partition(' ')[0] if row.get('recompute') else text}"
    yield f"of {str(row.get('framework')).partition(' ')[0]}"


def residuals(results: Sequence[Any]) -> Iterator[tuple[str, str, int, float, float, str]]:
    """Source, trait, runs, median signed and median absolute error, and what is missing, of the
    traits whose runs are off."""
    for source in dict.fromkeys(r.source for r in results):
        own = [r for r in results if r.source == source and r.error is not None]
        seen: set[frozenset[str]] = set()
        for trait in dict.fromkeys(t for r in own for t in r.traits):
            having = [r for r in own if trait in r.traits]
            keys = frozenset(r.key for r in having)
            size = median(abs(r.error) for r in having)
            if len(having) < LEAST_RUNS or size < LARGE or keys in seen:
                continue
            seen.add(keys)
            signed = median(r.error for r in having)
            yield source, trait, len(having), signed, size, _missing(source, trait, having)


def _missing(source: str, trait: str, having: Sequence[Any]) -> str:
    common = set.intersection(*(set(r.traits) for r in having))
    for key, text in MISSING.items():
        if key == trait or source.startswith(key) or key in common or f"of {key}" in common:
            return text
    return ""
