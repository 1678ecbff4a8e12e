"""Seconds to plan, next to what other planners take for the same models and devices.

python benchmarks/planners.py [NAME ...] [--json] [--document FILE]

Theirs are in `data/planners.json`, each with how it was obtained: published, or measured on two
processor cores. Ours are from the call to the plan, capture included, on this machine, with the
whole space searched: stages, axes, micro-batch, schedule, ZeRO, recompute; but where theirs is
given the mesh, so is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.plan.serialize import write_text
from autopar.plan.table import grid_text
from autopar.plan.text import columns
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.llama import Llama, LlamaConfig

PEERS = Path(__file__).parent / "data" / "planners.json"
_GIB, _SAMPLES = 2**30, 4

Model = tuple[nn.Module, dict[str, Tensor]]


def _gpt(layers: int, hidden: int, heads: int, length: int) -> Model:
    config = GPTConfig(layers=layers, hidden=hidden, heads=heads, vocab=51200, seq_len=length)
    return GPT(config), _tokens(length)


def _tokens(length: int) -> dict[str, Tensor]:
    return {key: torch.zeros(_SAMPLES, length, dtype=torch.long) for key in ("input_ids", "labels")}


def gpt_39b() -> Model:
    """GPT-39B (Zheng et al. 2022, table 5)."""
    return _gpt(layers=48, hidden=8192, heads=64, length=1024)


def gpt_1_3b() -> Model:
    """GPT-1.3B (Liu et al. 2024)."""
    return _gpt(layers=24, hidden=2048, heads=32, length=1024)


def llama2_7b() -> Model:
    """Llama-2-7B (Touvron et al. 2023)."""
    config = LlamaConfig(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000)
    return Llama(config), _tokens(2048)


def _llama3(layers: int) -> Model:
    config = LlamaConfig(
        layers=layers, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, rope_theta=5e5
    )
    return Llama(config), _tokens(8192)


def llama3_1_layer() -> Model:
    """One layer as wide as Llama-3-8B's."""
    return _llama3(1)


def llama3_8_layers() -> Model:
    """Eight layers as wide as Llama-3-8B's."""
    return _llama3(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is planned: a function of this file, devices, samples a step, memory of a device."""

    model: str
    cluster: str
    batch: int
    memory_gib: float | None = None
    pins: tuple[tuple[str, str], ...] = ()


_GIVEN = (("pipeline", "1"), ("data", "32"), ("tensor", "8"))

JOBS = {
    "alpa": Asked(model="gpt_39b", cluster="8x8:v100-16gb", batch=1024),
    **{
        f"galvatron_{gib}": Asked(
            model="llama2_7b", cluster="8:a100-80gb", batch=64, memory_gib=gib
        )
        for gib in (20, 24, 38, 60)
    },
    "nnscaler": Asked(model="gpt_1_3b", cluster="8:a100-80gb", batch=64),
    "aceso": Asked(model="gpt_1_3b", cluster="4:v100-16gb", batch=1024, memory_gib=12),
    "autoparallel_1": Asked(
        model="llama3_1_layer", cluster="32x8:h100-sxm", batch=256, pins=_GIVEN
    ),
    "autoparallel_8": Asked(
        model="llama3_8_layers", cluster="32x8:h100-sxm", batch=256, pins=_GIVEN
    ),
}
"""By the names of `data/planners.json`."""


def measure(name: str) -> dict[str, Any]:
    """One job planned, next to the other planner's time."""
    asked, theirs = JOBS[name], json.loads(PEERS.read_text(encoding="utf-8"))[name]
    precision = "fp16" if "v100" in asked.cluster else "bf16"
    limit = None if asked.memory_gib is None else int(asked.memory_gib * _GIB)
    options = PlanOptions(
        precision=precision,
        global_batch=asked.batch,
        memory_limit_bytes=limit,
        pins=asked.pins,
        price_pins=False,
    )
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    source = load_source(f"{Path(__file__).resolve()}:{asked.model}")
    planned = plan_source(source, asked.cluster, options)
    spent_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {
        "job": name,
        "model": asked.model,
        "cluster": asked.cluster,
        "memory_gib": asked.memory_gib,
        "planner": theirs["planner"],
        "their_s": theirs["seconds"],
        "how": theirs["how"],
        "our_s": spent_s,
        "our_cpu_s": cpu_s,
        "gap": planned.plan.certificate.gap,
        "plan": grid_text(planned.plan),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    limit = "" if row["memory_gib"] is None else f" of {row['memory_gib']} GiB"
    return (
        row["model"],
        f"{row['cluster']}{limit}",
        row["planner"],
        f"{row['their_s']:,}",
        f"{row['our_s']:.1f}",
        f"{row['their_s'] / row['our_s']:.0f}",
        f"{row['gap']:.2%}",
        row["how"],
        row["plan"],
    )


HEADER = ("model", "devices", "planner", "its s", "ours s", "ratio", "gap", "its time is", "plan")


def document(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a page."""
    lines = [
        "# Seconds to plan, beside other planners",
        "",
        "Written by `python benchmarks/planners.py --document docs/planners.md`; do not edit.",
        "",
        f"Measured here on {os.cpu_count()} processor cores, capture included; where another "
        "planner was measured, it was on two. The gap is the proven one of our plan. Kernels of "
        "theirs are profiled beforehand, ours priced by the cost model.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (HEADER, ("---",) * len(HEADER))),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plan every job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*JOBS, []], metavar="NAME")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--document", metavar="FILE")
    given = parser.parse_args()
    rows = [measure(name) for name in given.names or JOBS]
    if given.document:
        write_text(document(rows), given.document)
    print(json.dumps(rows, indent=1) if given.json else columns(HEADER, list(map(_cells, rows))))


if __name__ == "__main__":
    main()
