"""What the programs behind published runs did, where it differs from what autopar emits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """How a framework runs a plan.

    `overlaps_sync`: gradients are summed while the backward runs. `wide_gradients`: they are
    added up, and sent, in float32. `fuses`: chains of pointwise ops are one kernel. `even_stages`:
    every stage has equally many layers. `zero` is the level where a row does not say.
    """

    fused_attention: bool
    dropout: float = 0.0
    overlaps_sync: bool = False
    wide_gradients: bool = False
    fuses: bool = True
    even_stages: bool = True
    zero: int = 0
    why: str = ""


FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    (
        "Megatron-DeepSpeed",
        Framework(
            fused_attention=False,
            dropout=0.1,
            why="Megatron-LM v2: fused softmax, dropout 0.1, all-reduce after the backward",
        ),
    ),
    (
        "Megatron-LM",
        Framework(
            fused_attention=False,
            dropout=0.1,
            why="Narayanan et al. 2021 and Korthikanti et al. 2022: before fused attention; "
            "gradients are all-reduced once after the pipeline flush",
        ),
    ),
    ("OneFlow", Framework(fused_attention=False, dropout=0.1, why="as Megatron-LM")),
    ("DeepSpeed", Framework(fused_attention=False, dropout=0.1, overlaps_sync=True, why="DT-FM")),
    (
        "AA-Scaling",
        Framework(
            fused_attention=False,
            zero=1,
            why="Hagemann et al. 2023, section 3: attention kernels as stated, ZeRO-1, no overlap "
            "stated",
        ),
    ),
    (
        "nanotron",
        Framework(
            fused_attention=True,
            overlaps_sync=True,
            wide_gradients=True,
            even_stages=False,
            why="Ultra-Scale Playbook: FlashAttention-2, float32 gradient accumulation, "
            "all-reduce of buckets during the last backward",
        ),
    ),
    ("InternEvo", Framework(fused_attention=True, overlaps_sync=True, zero=1, why="its README")),
    (
        "Composer/LLM-Foundry",
        Framework(fused_attention=True, overlaps_sync=True, zero=3, why="PyTorch FSDP"),
    ),
    (
        "NeMo",
        Framework(
            fused_attention=True,
            overlaps_sync=True,
            zero=1,
            why="recipes set overlap_grad_reduce and overlap_param_gather",
        ),
    ),
    (
        "Megatron",
        Framework(
            fused_attention=True,
            overlaps_sync=True,
            zero=1,
            why="Megatron-Core README: data-parallel communication overlapped",
        ),
    ),
    ("torchtitan", Framework(fused_attention=True, overlaps_sync=True, zero=3, why="FSDP2")),
    ("PyTorch FSDP", Framework(fused_attention=False, overlaps_sync=True, zero=3, why="FSDP")),
    ("PaxML", Framework(fused_attention=False, overlaps_sync=True, zero=3, why="XLA")),
    ("MaxText", Framework(fused_attention=True, overlaps_sync=True, zero=3, why="XLA")),
)
"""How the name of a framework begins, and what it does; the first that fits."""

OTHER = Framework(fused_attention=True, overlaps_sync=True, why="assumed of recent frameworks")


def framework_of(row: Mapping[str, Any]) -> Framework:
    """What ran a row."""
    name = str(row.get("framework") or "")
    return next((known for start, known in FRAMEWORKS if name.startswith(start)), OTHER)
