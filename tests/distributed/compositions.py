"""Compositions of parallelism techniques that train beside one device: the table of rows.

Each row is a model, a number of devices and pins that fix every degree. All techniques stand alone,
and every pair of them that can be had together stands in some row; beyond that there are the grids
of three to five dimensions that large models are trained on, at their smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

SAMPLES, SEQUENCE = 8, 16
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

DEFAULTS = {
    "pipeline": "1",
    "data": "1",
    "context": "1",
    "tensor": "1",
    "expert": "1",
    "sequence": "off",
    "zero": "0",
    "recompute": "none",
    "schedule": "1f1b",
    "micro_batches": "2",
}
SHORT = {"pipeline": "pp", "data": "dp", "shard": "shard", "context": "cp", "tensor": "tp"}
SHORT |= {"expert": "ep", "zero": "zero", "micro_batches": "mb", "chunks": "chunks"}
"""Degrees in names of rows."""

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
SCHEDULES += ("zb-h1", "interleaved-zb", "zbv", "dualpipev")
"""Schedules that flush: others have no single device to compare with."""
EXCLUSIVE = (
    SCHEDULES,
    ("ring", "gather", "heads"),
    ("zero-1", "zero-2", "zero-3"),
    ("selective", "full"),
    ("bf16", "fp16"),
)
"""Techniques of which there is at most one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One composition. `pins` are those that are not `DEFAULTS`."""

    model: str
    devices: int
    pins: Mapping[str, str]
    precision: str = "fp64"

    @property
    def settled(self) -> dict[str, str]:
        """All pins."""
        return DEFAULTS | self.pins

    @property
    def name(self) -> str:
        """Model, what is not the default, precision."""
        parts = [
            f"{SHORT[key]}{value}" if key in SHORT else _word(key, value)
            for key, value in self.pins.items()
        ]
        return "-".join((self.model, *parts, self.precision))

    @property
    def techniques(self) -> frozenset[str]:
        """What the row composes, in short names."""
        return frozenset(_techniques(self))


def _word(key: str, value: str) -> str:
    if key == "recompute":
        return f"recompute_{value}"
    return "sp" if key == "sequence" else value


def _techniques(row: Row) -> Iterator[str]:
    pins = row.settled
    yield from (k for k in ("data", "tensor", "pipeline", "expert") if int(pins[k]) > 1)
    if pins["sequence"] == "on":
        yield "sequence"
    if int(pins["pipeline"]) > 1:
        yield pins["schedule"]
    if "attention" in pins:
        yield pins["attention"]
    if pins["zero"] != "0":
        yield f"zero-{pins['zero']}"
    if int(pins.get("shard", 1)) > 1:
        yield "hsdp"
    if pins["recompute"] != "none":
        yield {"all": "full"}.get(pins["recompute"], pins["recompute"])
    if "dropout" in row.model:
        yield "dropout"
    if row.precision in ("bf16", "fp16"):
        yield row.precision


def row(model: str, devices: int, pins: str = "", precision: str = "fp64") -> Row:
    """A row from pins written as `key=value key=value`."""
    pairs = dict(pair.split("=") for pair in pins.split())
    return Row(model=model, devices=devices, pins=pairs, precision=precision)


ALONE = (
    row("gpt_tiny", 2, "data=2"),
    row("llama_tiny", 2, "tensor=2"),
    row("gpt_tiny", 2, "tensor=2 sequence=on"),
    row("llama_tiny", 2, "context=2 attention=ring"),
    row("gpt_tiny", 2, "context=2 attention=gather"),
    row("llama_tiny", 2, "context=2 attention=heads"),
    row("glam_tiny", 2, "data=2 expert=2"),
    row("gpt_tiny", 2, "data=2 zero=1"),
    row("llama_tiny", 2, "data=2 zero=2"),
    row("gpt_tiny_dropout", 2, "data=2 zero=3"),
    row("llama_tiny", 4, "data=4 shard=2 zero=3"),
    row("gpt_tiny", 2, "data=2 recompute=all"),
    row("llama_tiny", 2, "tensor=2 recompute=selective"),
    row("gpt_tiny", 2, "pipeline=2 schedule=gpipe"),
    row("llama_tiny", 2, "pipeline=2 micro_batches=4"),
    row("gpt_tiny", 2, "pipeline=2 schedule=interleaved-1f1b chunks=2 micro_batches=4"),
    row("llama_tiny", 2, "pipeline=2 schedule=looped-bfs chunks=2 micro_batches=3"),
    row("gpt_tiny", 4, "pipeline=4 schedule=zb-h1 micro_batches=8"),
    row("llama_tiny", 2, "pipeline=2 schedule=interleaved-zb chunks=2 micro_batches=4"),
    row("gpt_tiny", 2, "pipeline=2 schedule=zbv micro_batches=4"),
    row("llama_tiny", 2, "pipeline=2 schedule=dualpipev micro_batches=4"),
)
"""Every technique by itself; those that split state need ranks that split samples."""

GRIDS = (
    # tensor x sequence x data x pipeline
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 tensor=2 sequence=on micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 data=2 tensor=2 sequence=on zero=1 recompute=selective"),
    row("gpt_tiny", 8, "pipeline=2 data=2 tensor=2 zero=2 schedule=gpipe recompute=all"),
    row("llama_tiny", 8, "pipeline=2 data=2 tensor=2 sequence=on zero=3 micro_batches=4"),
    # context x tensor x data
    row("llama_tiny", 8, "data=2 context=2 tensor=2 sequence=on zero=3 attention=ring"),
    row("gpt_tiny", 8, "data=2 context=2 tensor=2 attention=heads recompute=all"),
    row("gpt_tiny_dropout", 8, "data=2 context=2 tensor=2 sequence=on zero=2 attention=gather"),
    row("llama_tiny", 8, "context=4 tensor=2 sequence=on attention=ring recompute=selective"),
    # context x pipeline x ZeRO
    row("llama_tiny", 8, "pipeline=2 data=2 context=2 zero=2 attention=ring micro_batches=4"),
    # hybrid sharding beside another axis
    row("llama_tiny", 8, "data=4 shard=2 tensor=2 sequence=on zero=3"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=4 shard=2 zero=3 recompute=all"),
    row("gpt_tiny", 8, "data=4 shard=2 context=2 zero=2 attention=ring"),
    # experts x tensor x data, experts x pipeline x ZeRO, experts x context
    row("mixtral_tiny", 8, "data=4 tensor=2 expert=4", "fp32"),
    row("glam_tiny", 8, "data=4 tensor=2 expert=2 sequence=on zero=1"),
    row("qwen3_moe_tiny", 8, "pipeline=2 data=4 expert=2 zero=2", "fp32"),
    row("deepseek_tiny", 8, "pipeline=2 data=2 tensor=2 expert=2 zero=1", "fp32"),
    row("switch_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=3 attention=gather"),
    # schedules of several stages a rank and of split backwards x tensor x ZeRO x recompute
    row("gpt_tiny", 8, "pipeline=2 data=2 tensor=2 sequence=on zero=1 recompute=all"
        " schedule=interleaved-1f1b chunks=2 micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 data=2 tensor=2 zero=2 recompute=selective"
        " schedule=zb-h1 micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 tensor=2 zero=3 recompute=all"
        " schedule=zbv micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 data=2 tensor=2 sequence=on zero=3 recompute=all"
        " schedule=dualpipev micro_batches=4"),
    row("mixtral_tiny", 8, "pipeline=2 data=4 zero=3 schedule=interleaved-1f1b chunks=2"
        " expert=4 micro_batches=2", "fp32"),
)  # fmt: skip
"""Three to five dimensions, as large models are trained."""
