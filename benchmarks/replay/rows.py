"""Published runs, as the files of measured runs print them, and what each asks of the planner."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from autopar.costs.execution import Execution
from autopar.costs.hardware import DEVICES as DEVICES_TABLE
from autopar.costs.hardware import NIC_EFFICIENCY
from replay.fields import MALFORMED, lines_of
from replay.frameworks import (
    WRITTEN_OUT,
    Framework,
    attention_kernel,
    attention_share,
    framework_of,
)
from replay.model import Architecture, parameters

Row = Mapping[str, Any]

DEVICES = (
    ("H100-80GB", "h100-sxm"),
    ("H200-141GB", "h200-sxm"),
    ("A100-80GB-SXM", "a100-80gb"),
    ("A100-40GB", "a100-40gb"),
    ("V100-16GB", "v100-16gb"),
    ("V100-32GB-SXM2", "v100-32gb"),
    ("B200-180GB-SXM", "b200"),
    ("GB200", "gb200"),
    ("MI300X", "mi300x"),
    ("MI325X", "mi325x"),
)
"""How a published device begins, and its name in the hardware table."""

LIMITED = ("power limited", "HBM2e")
"""Words for a device that is slower than the one of its name."""

RECOMPUTE = (
    ("selective", "selective"),
    ("core_attn", "selective"),
    ("none", "none"),
    ("full (every layer)", "all"),
    ("full", "all"),
)
SCHEDULES = {"1F1B": "1f1b", "interleaved 1F1B": "interleaved-1f1b", "ZBV": "zbv"}


_A100_NVLINKS = 12
_A100_NODE_GB_S = DEVICES_TABLE["a100-80gb"].links.node_bandwidth_bytes_s / 1e9
"""An A100 has 12 links; BLOOM's nodes joined the devices by 4 of them, as their logs say."""


STATED: Mapping[str, Row] = {
    "SC21 Fig": {"ffn": "4h"},
    "DT-FM NeurIPS22 Case 2": {
        "gpus_per_node": 4,
        "internode_gbps_per_gpu": 2.5,
        "cluster": str(Path(__file__).parents[1] / "data" / "v100-case2.yaml"),
    },
}
"""What sources say of all their rows, by how their name begins. Narayanan et al. 2021, section 2:
the inner width is four times the hidden. DT-FM (github.com/DS3Lab/Decentralized_FM_alpha,
results/NeurIPS2022_submission.md): case 2 has half its devices four to an instance, the others one,
and 10 Gb/s an instance, so that of the first four share what instances send; `cluster` is a file
with the first half before the other."""


SPLIT_MODULES = ("attention", "feed_forward", "token", "head")
"""What tensor ranks share out; norms, dropout and sums they all run whole, but for sequence
parallelism (Korthikanti et al. 2022, figures 4 and 5)."""


class Unpriced(Exception):
    """Why a row cannot be priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One published run as the planner is asked for it."""

    key: str
    source: str
    architecture: Architecture
    layers: int
    cluster: str
    global_batch: int
    precision: str
    wide_gradients: bool
    framework: Framework
    execution: Execution
    pins: tuple[tuple[str, str], ...]


def read_rows(paths: Iterable[Path]) -> Iterator[Row]:
    """All rows of files with one JSON object a line, and what their sources say besides."""
    for path in paths:
        yield from map(_with_stated, lines_of(path))


def _with_stated(row: dict[str, Any]) -> Row:
    for start, stated in STATED.items():
        if str(row["dataset"]).startswith(start) and "hidden" in row and MALFORMED not in row:
            return {**row, **stated, **({"ffn": 4 * row["hidden"]} if "ffn" in stated else {})}
    return row


def measured_s(row: Row) -> float | None:
    """Seconds of a step as measured: printed, or from tokens per second, or from TFLOP/s by the
    formula that the source itself states; None where the row has none."""
    if row.get("status") != "ok":
        return None
    if "iteration_s" in row:
        return float(row["iteration_s"])
    rate = row.get("measured_tokens_per_s_per_gpu")
    if rate and {"global_batch_seqs", "seq_len", "n_gpus"} <= set(row):
        return row["global_batch_seqs"] * row["seq_len"] / (rate * row["n_gpus"])
    if str(row["dataset"]).startswith(("Megatron-LM SC21", "SC21")):
        return _sc21_s(row)
    found = row.get("derived_iteration_s")
    return None if found is None else float(found)


def _sc21_s(row: Row) -> float | None:
    """Narayanan et al. 2021, equation 3, which counts full recomputation:
    F = 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    names = ("global_batch_seqs", "seq_len", "layers", "hidden", "vocab", "n_gpus")
    rate = row.get("measured_tflops_per_gpu")
    if rate is None or any(name not in row for name in names) or row.get("recompute") != "full":
        return None
    batch, seq, layers, hidden, vocab, gpus = (row[name] for name in names)
    share = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * batch * seq * layers * hidden**2 * share / (rate * 1e12 * gpus)


def is_oom(row: Row) -> bool:
    """Whether the run was published as out of memory."""
    return bool(row.get("status") == "oom")


def left_out(row: Row) -> str | None:
    """Why a row says nothing that a prediction could be held to; None if it does."""
    if (why := unmeasured(row)) is None and _moves_too_much(row):
        return "its plan moves more over the network than its time allows"
    return why


def unmeasured(row: Row) -> str | None:
    """Why a row has no figure that can be taken as it stands; None if it has."""
    if MALFORMED in row:
        return f"malformed: {row[MALFORMED]}"
    if "checks" in row:
        return "its own numbers disagree"
    if not is_oom(row) and measured_s(row) is None:
        status = str(row.get("status"))
        return "no step time" if status.startswith("ok") else f"status {status.partition(',')[0]}"
    return None


def _moves_too_much(row: Row) -> bool:
    """Whether a run at ZeRO level 3 had no time for what its plan moves over the network at least.

    Every node takes in the weights once in a micro-batch, and where gradients are reduced then too,
    as much again, two bytes each and but for what it holds itself. Such a run took more samples at
    a time than it says, or ran otherwise.
    """
    seconds, rate = measured_s(row), row.get("internode_gbps_per_gpu")
    node, gpus = int(row.get("gpus_per_node") or 8), int(row.get("n_gpus") or 0)
    asked = ("params_b", "global_batch_seqs", "micro_batch_seqs")
    if row.get("zero_stage") != 3 or not seconds or not rate or gpus <= node:
        return False
    if any(name not in row for name in asked) or "group" in str(row.get("fsdp")):
        return False
    split = prod(int(row.get(name) or 1) for name in ("tp", "pp", "cp"))
    micro_batches = row["global_batch_seqs"] * split / (row["micro_batch_seqs"] * gpus)
    passes = 1 + (3 in framework_of(row).execution.reduces_each)
    moved_bytes = 2 * passes * 1e9 * row["params_b"] / split * (1 - node / gpus) * micro_batches
    return bool(moved_bytes > seconds * node * rate * 1e9 / 8)


def thinned(rows: Iterable[Row], most: int) -> list[Row]:
    """At most so many rows of every source, evenly spaced in the order of their names."""
    by_source: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["id"])):
        by_source.setdefault(str(row["dataset"]), []).append(row)
    return [
        own[i * len(own) // min(len(own), most)]
        for own in by_source.values()
        for i in range(min(len(own), most))
    ]


def job(row: Row) -> Job:
    """What a row asks of the planner. Raises Unpriced with the reason."""
    if row.get("task", "pretrain") != "pretrain":
        raise Unpriced(f"task {row['task']}")
    if MALFORMED in row:
        raise Unpriced(f"malformed: {row[MALFORMED]}")
    names = "layers hidden heads ffn vocab seq_len gpu n_gpus global_batch_seqs micro_batch_seqs"
    experts = ("moe_ffn", "moe_top_k") if row.get("moe_experts") else ()
    missing = [name for name in (*names.split(), "tp", "pp", *experts) if row.get(name) is None]
    if missing:
        raise Unpriced(f"not published: {', '.join(missing)}")
    if row.get("offload", "none") not in ("none", None):
        raise Unpriced("offloads to the host")
    precision, framework, cluster = _precision(row), framework_of(row), _cluster(row)
    share = attention_share(attention_kernel(row, framework), _device(row))
    return Job(
        key=str(row["id"]),
        source=str(row["dataset"]),
        architecture=_architecture(row, precision, framework),
        layers=int(row["layers"]),
        cluster=cluster,
        global_batch=int(row["global_batch_seqs"]),
        precision=precision,
        wide_gradients=framework.wide_gradients or _is_wide(row),
        framework=framework,
        execution=_execution(row, framework, share),
        pins=tuple(_pins(row, framework)),
    )


def _execution(row: Row, framework: Framework, attention: float) -> Execution:
    """How the framework ran a row: messages go beside compute where stages are interleaved, and
    what tensor ranks do not split by weights they split only with sequence parallelism."""
    ours, interleaved = framework.execution, int(row.get("vpp") or 1) > 1
    return replace(
        ours,
        attention=attention,
        hides_messages=ours.hides_messages and interleaved,
        whole_outside=() if row.get("sequence_parallel") else SPLIT_MODULES,
    )


def _is_wide(row: Row) -> bool:
    """Whether a row says that gradients are added up in float32; FSDP's DEFAULT of Composer does
    so (composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision)."""
    text = str(row.get("precision"))
    return "fp32 grad" in text or "mixed_precision=DEFAULT" in text


def _precision(row: Row) -> str:
    text = str(row.get("precision") or "bf16").lower()
    if "fp4" in text:
        raise Unpriced("precision narrower than fp8")
    if "fp8" in text or "float8" in text:
        return "fp8"
    return "fp16" if text.startswith("fp16") and "bf16" not in text else "bf16"


MOST_COUNT_ERROR = 0.1
"""Of a model's parameters, above which its layers are not all of the one kind that a row prints."""


def _count_error(row: Row, architecture: Architecture) -> float:
    """How many more parameters a model has than the row says, as a share; 0 if it does not say."""
    if "params_b" not in row:
        return 0.0
    return parameters(architecture, row["layers"]) / (1e9 * float(row["params_b"])) - 1


def _architecture(row: Row, precision: str, framework: Framework) -> Architecture:
    """The model. Raises Unpriced if its sizes do not give the parameters that the row prints."""
    found = _kind(row, precision, framework)
    if abs(error := _count_error(row, found)) > MOST_COUNT_ERROR:
        raise Unpriced(f"sizes give another parameter count than published: {error:+.0%}")
    return found


def _kind(row: Row, precision: str, framework: Framework) -> Architecture:
    """The model; whether it is gated, and its head tied, is what gives its parameter count best."""
    experts = int(row.get("moe_experts") or 0)
    if row["hidden"] % row["heads"]:
        raise Unpriced("heads do not divide the hidden width")

    def with_kind(gated: bool, tied: bool) -> Architecture:
        return Architecture(
            hidden=row["hidden"],
            heads=row["heads"],
            kv_heads=row.get("kv_heads") or row["heads"],
            ffn=row["moe_ffn"] if experts else row["ffn"],
            vocab=row["vocab"],
            seq_len=row["seq_len"],
            gated=gated,
            tied=tied,
            dropout=0.0 if gated else framework.dropout,
            fused_attention=attention_kernel(row, framework) != WRITTEN_OUT,
            fused_rotary=framework.fused_rotary,
            fused_norm=framework.fused_norm or "RMS" in str(row.get("attention_kernel")),
            experts=experts,
            top_k=int(row.get("moe_top_k") or 0),
            dtype="float16" if precision == "fp16" else "bfloat16",
        )

    if experts:
        return with_kind(gated=True, tied=False)
    classic = row["ffn"] == 4 * row["hidden"] and "params_b" not in row
    if classic:
        return with_kind(gated=False, tied=True)
    kinds = [with_kind(gated, tied) for gated in (False, True) for tied in (True, False)]
    if "params_b" not in row:
        return kinds[3]
    return min(kinds, key=lambda a: abs(_count_error(row, a)))


def _device(row: Row) -> str:
    gpu = str(row["gpu"])
    name = next((ours for theirs, ours in DEVICES if gpu.startswith(theirs)), None)
    if name is None or any(word in gpu for word in LIMITED):
        raise Unpriced(f"device {gpu}: no such row")
    return name


def _cluster(row: Row) -> str:
    if "cluster" in row:
        return str(row["cluster"])
    name = _device(row)
    gpus, node = int(row["n_gpus"]), int(row.get("gpus_per_node") or 8)
    few = re.search(r"NVLink (\d+) inter-gpu", str(row.get("intranode_link")))
    links = f"@node={_A100_NODE_GB_S * int(few[1]) / _A100_NVLINKS:.4g}" if few else ""
    if gpus <= node:
        return f"{gpus}:{name}{links}"
    if gpus % node:
        raise Unpriced(f"{gpus} devices do not fill nodes of {node}")
    rate = row.get("internode_gbps_per_gpu")
    return f"{gpus // node}x{node}:{name}{links}" + (
        f"@network={rate / 8 * NIC_EFFICIENCY:g}" if rate else ""
    )


def _pins(row: Row, framework: Framework) -> Iterator[tuple[str, str]]:
    gpus, tp, pp = (int(row[name]) for name in ("n_gpus", "tp", "pp"))
    cp, ep, vpp = (int(row.get(name) or 1) for name in ("cp", "ep", "vpp"))
    if gpus % (tp * pp * cp):
        raise Unpriced(f"tp x pp x cp = {tp * pp * cp} does not divide {gpus} devices")
    data = gpus // (tp * pp * cp)
    micro = int(row["micro_batch_seqs"])
    if int(row["global_batch_seqs"]) % (micro * data):
        raise Unpriced("the micro-batches do not make up the global batch")
    if row.get("moe_experts") and cp > 1:
        raise Unpriced("context ranks keep tokens split through experts, where ours run them all")
    if pp > 1 and row.get("vpp") is None and framework.interleaves:
        raise Unpriced("not published: stages of a rank")
    if int(row.get("etp") or tp) != tp:
        raise Unpriced("experts have a tensor degree of their own")
    yield from (("pipeline", str(pp)), ("tensor", str(tp)), ("context", str(cp)))
    yield from (("data", str(data)), ("micro_batch", str(micro)))
    if row.get("moe_experts"):
        yield "expert", str(ep)
    if tp > 1:
        yield "sequence", "on" if row.get("sequence_parallel") else "off"
    yield from _schedule(row, pp, vpp)
    if row.get("recompute") is not None:
        yield "recompute", _recompute(row)
    level = row.get("zero_stage")
    level = framework.zero if level is None else int(level)
    group = re.search(r"group (\d+)", str(row.get("fsdp") or ""))
    if group and data > 1 and int(group[1]) < data:
        raise Unpriced(f"shards over groups of {group[1]} ranks")
    yield "zero", str(level if data > 1 else 0)


def _schedule(row: Row, pp: int, vpp: int) -> Iterator[tuple[str, str]]:
    text = row.get("pipeline_schedule") or ("interleaved 1F1B" if vpp > 1 else "1F1B")
    if pp > 1 and text not in SCHEDULES:
        raise Unpriced(f"schedule {text}")
    if pp == 1 or vpp == 1:
        yield "schedule", SCHEDULES[text] if pp > 1 and text != "interleaved 1F1B" else "1f1b"
        return
    yield from (("schedule", "interleaved-1f1b"), ("chunks", str(vpp)))


def _recompute(row: Row) -> str:
    text = str(row["recompute"])
    found = next((ours for theirs, ours in RECOMPUTE if text == theirs), None)
    found = found or ("selective" if text.startswith("selective") else None)
    if found is None:
        raise Unpriced(f"recompute {text}")
    return found
