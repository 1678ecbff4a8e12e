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

SHOWN = {
    "data": "data parallelism over",
    "tensor": "tensor parallelism over",
    "sequence": "sequence parallelism (Megatron)",
    "pipeline": "pipeline parallelism over",
    "expert": "expert parallelism over",
    "ring": "ring attention",
    "gather": "attention with gathered keys and values",
    "heads": "all-to-all between sequence and heads (Ulysses)",
    "zero-1": "ZeRO-1",
    "zero-2": "ZeRO-2",
    "zero-3": "ZeRO-3",
    "hsdp": "hybrid sharding (HSDP)",
    "selective": "selective activation recomputation",
    "full": "full activation recomputation",
}
"""How a plan's list of techniques tells that it has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One composition. `pins` are those that are not `DEFAULTS`; `fails` says why it does not run
    yet."""

    model: str
    devices: int
    pins: Mapping[str, str]
    precision: str = "fp64"
    fails: str = ""

    @property
    def settled(self) -> dict[str, str]:
        """All pins; one without a value is left free."""
        return {key: value for key, value in (DEFAULTS | self.pins).items() if value}

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
    yield from (k for k in ("data", "tensor", "pipeline", "expert") if int(pins.get(k, 1)) > 1)
    if pins["sequence"] == "on":
        yield "sequence"
    if int(pins["pipeline"]) > 1:
        yield pins["schedule"]
    if "attention" in pins:
        yield pins["attention"]
    if pins["zero"] != "0":
        yield f"zero-{pins['zero']}"
    if int(pins.get("shard", 1)) > 1 and pins["zero"] == "3":
        yield "hsdp"
    if pins["recompute"] != "none":
        yield {"all": "full"}.get(pins["recompute"], pins["recompute"])
    if "dropout" in row.model:
        yield "dropout"
    if row.precision in ("bf16", "fp16"):
        yield row.precision


def row(model: str, devices: int, pins: str = "", precision: str = "fp64", fails: str = "") -> Row:
    """A row from pins written as `key=value key=value`."""
    pairs = dict(pair.split("=") for pair in pins.split())
    return Row(model=model, devices=devices, pins=pairs, precision=precision, fails=fails)


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
    row("gpt_tiny", 8, "data=4 context=2 attention=heads recompute=all"),
    row("gpt_tiny_dropout", 8, "data=2 context=2 tensor=2 sequence=on zero=2 attention=gather"),
    row("llama_tiny", 8, "context=4 tensor=2 sequence=on attention=ring recompute=selective"),
    # context x pipeline x ZeRO
    row("llama_tiny", 8, "pipeline=2 data=2 context=2 zero=2 attention=ring micro_batches=4"),
    # hybrid sharding beside another axis
    row("llama_tiny", 8, "data=4 shard=2 tensor=2 sequence=on zero=3"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=4 shard=2 zero=3 recompute=all"),
    row("gpt_tiny", 8, "data=4 shard=2 context=2 zero=3 attention=ring"),
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

PAIRS = (
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=3 attention=heads"
        " recompute=selective schedule=interleaved-zb chunks=2 micro_batches=4"),
    row("glam_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=1 attention=ring"
        " recompute=all schedule=looped-bfs chunks=2 micro_batches=4"),
    row("switch_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=1 attention=heads"
        " recompute=selective schedule=gpipe micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=1 attention=gather"
        " recompute=all schedule=zb-h1 micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 context=2 tensor=2 sequence=on attention=gather"
        " recompute=selective schedule=looped-bfs chunks=2 micro_batches=4"),
    row("qwen3_moe_tiny", 8, "pipeline=2 data=4 shard=2 expert=2 zero=3 recompute=selective"
        " schedule=zb-h1 micro_batches=4", "fp32"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=2 attention=heads"
        " recompute=selective schedule=dualpipev micro_batches=4"),
    row("switch_tiny", 8, "pipeline=2 data=2 tensor=2 expert=2 sequence=on zero=1"
        " recompute=all schedule=interleaved-zb chunks=2 micro_batches=4"),
    row("glam_tiny", 8, "pipeline=2 data=2 tensor=2 expert=2 sequence=on zero=1"
        " recompute=selective schedule=zbv micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=2 attention=gather"
        " recompute=selective schedule=interleaved-1f1b chunks=2 micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=4 shard=2 zero=3 recompute=all"
        " schedule=gpipe micro_batches=4"),
    row("qwen3_moe_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=1 attention=ring"
        " recompute=all schedule=dualpipev micro_batches=4", "fp32"),
    row("gpt_tiny", 8, "pipeline=2 context=2 tensor=2 sequence=on attention=gather"
        " recompute=all schedule=gpipe micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=3 attention=heads"
        " schedule=looped-bfs chunks=2 micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=2 attention=gather"
        " recompute=selective schedule=zbv micro_batches=4"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=2 context=2 zero=2 attention=gather"
        " schedule=interleaved-zb chunks=2 micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 context=2 tensor=2 sequence=on attention=ring"
        " schedule=zb-h1 micro_batches=4"),
    row("gpt_tiny", 8, "pipeline=2 data=2 tensor=2 zero=2 schedule=looped-bfs chunks=2"
        " micro_batches=4"),
    row("gpt_tiny", 8, "pipeline=2 data=4 shard=2 zero=3 recompute=all schedule=zbv"
        " micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 context=2 tensor=2 sequence=on attention=gather"
        " schedule=dualpipev micro_batches=4"),
    row("mixtral_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=1 attention=heads"
        " recompute=all schedule=zbv micro_batches=4", "fp32"),
    row("glam_tiny", 8, "pipeline=2 data=2 context=2 expert=2 attention=heads"
        " recompute=selective schedule=interleaved-1f1b chunks=2 micro_batches=4"),
    row("gpt_tiny_dropout", 8, "data=4 shard=2 context=2 zero=3 attention=heads recompute=all"),
    row("deepseek_tiny", 8, "data=4 shard=2 context=2 expert=2 zero=3 attention=gather"
        " recompute=all", "fp32"),
    row("gpt_tiny_dropout", 8, "pipeline=2 data=4 shard=2 zero=3 recompute=selective"
        " schedule=looped-bfs chunks=2 micro_batches=4"),
    row("gpt_tiny", 8, "pipeline=2 context=2 tensor=2 sequence=on attention=ring"
        " recompute=all schedule=interleaved-1f1b chunks=2 micro_batches=4"),
    row("glam_tiny", 8, "pipeline=2 data=4 shard=2 expert=2 zero=3 recompute=all"
        " schedule=dualpipev micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 context=2 tensor=2 sequence=on attention=ring"
        " recompute=all schedule=zbv micro_batches=4"),
    row("gpt_tiny", 8, "pipeline=2 data=2 context=2 attention=ring recompute=all"
        " schedule=gpipe micro_batches=4"),
    row("llama_tiny", 8, "pipeline=2 data=4 shard=2 zero=3 schedule=interleaved-zb chunks=2"
        " micro_batches=4"),
    row("glam_tiny", 8, "pipeline=2 data=4 shard=2 expert=2 zero=3"
        " schedule=interleaved-1f1b chunks=2 micro_batches=4"),
    row("qwen3_moe_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=3 attention=ring"
        " recompute=all schedule=interleaved-zb chunks=2 micro_batches=4", "fp32"),
    row("gpt_tiny", 8, "pipeline=2 data=2 context=2 zero=1 attention=heads"
        " recompute=selective schedule=zb-h1 micro_batches=4"),
    row("switch_tiny", 8, "pipeline=2 data=2 context=2 expert=2 zero=1 attention=heads"
        " recompute=all micro_batches=4"),
)  # fmt: skip
"""What is left of the pairs, found greedily: of many random rows always the one with most of them.
"""

NARROW = (
    row("gpt_tiny", 8, "pipeline=2 data=2 tensor=2 sequence=on zero=1", "bf16"),
    row("llama_tiny", 8, "data=4 shard=2 tensor=2 zero=3 recompute=all", "bf16"),
    row("gpt_tiny_dropout", 8, "data=2 context=2 tensor=2 zero=2 attention=gather", "bf16"),
    row(
        "llama_tiny", 4, "pipeline=2 context=2 attention=ring schedule=zbv micro_batches=4", "bf16"
    ),
    row("mixtral_tiny", 4, "data=2 tensor=2 expert=2 zero=1", "bf16"),
    row("gpt_tiny", 8, "pipeline=2 data=2 tensor=2 sequence=on zero=2", "fp16"),
    row("gpt_tiny", 4, "data=2 context=2 zero=3 attention=ring recompute=selective", "fp16"),
    row("gpt_tiny", 4, "pipeline=2 tensor=2 schedule=zb-h1 micro_batches=4", "fp16"),
)
"""Narrow precisions, beside a single device that trains in the same one with float32 weights."""

WIDE = (
    row("gpt_tiny", 16, "pipeline=2 data=4 shard=2 tensor=2 sequence=on zero=3"),
    row("gpt_tiny", 16, "data=2 context=2 tensor=4 attention=ring"),
    row("llama_tiny", 32, "pipeline=2 data=4 shard=2 context=2 tensor=2 zero=3 attention=ring"),
    row("gpt_tiny", 64, "pipeline=2 data=8 shard=2 tensor=4 sequence=on zero=3"),
)
"""More ranks than processes fit on a small machine: threads of one process (`many_ranks`)."""

HEADS_TWICE = (
    "no plan: heads would be split over context and tensor at once, and no dim but samples and "
    "sequence is split over two axes"
)
NO_RING = "no plan: a ring does not drop out attention weights"
WANTED = (
    row("gpt_tiny", 8, "data=2 context=2 tensor=2 attention=heads", fails=HEADS_TWICE),
    row("gpt_tiny_dropout", 2, "context=2 attention=ring", fails=NO_RING),
)
"""What should run and does not yet."""

ROWS = (*ALONE, *GRIDS, *PAIRS, *NARROW, *WIDE, *WANTED)

IMPOSSIBLE = {
    frozenset({"heads", "tensor"}): "no dim is split over two axes but samples and sequence",
    frozenset({"heads", "sequence"}): "the sequence is split on a tensor axis beside heads",
    frozenset({"ring", "dropout"}): "a ring is not offered where attention drops out",
    frozenset({"hsdp", "zero-1"}): "state without weights is split over all ranks of the samples",
    frozenset({"hsdp", "zero-2"}): "state without weights is split over all ranks of the samples",
    frozenset({"expert", "dropout"}): "no model here has both",
}
"""Pairs that no plan has, and why."""

TECHNIQUES = (*SHOWN, *SCHEDULES, "dropout")


def pairs() -> frozenset[frozenset[str]]:
    """All pairs of techniques that a plan can have."""
    return frozenset(
        frozenset(pair)
        for pair in combinations(TECHNIQUES, 2)
        if frozenset(pair) not in IMPOSSIBLE and not any(set(pair) <= set(g) for g in EXCLUSIVE)
    )
