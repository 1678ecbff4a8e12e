"""What the programs behind published runs did, where it differs from what autopar emits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.costs.execution import EARLY_LEVELS, Execution

_ALL_LEVELS = EARLY_LEVELS | {0, 1}
_MESSAGES: dict[str, Any] = {"hides_messages": False}  # sent and received between two ops
_FUSED: dict[str, Any] = {"fuses": True, **_MESSAGES}
_EARLY = Execution(early_sync=_ALL_LEVELS, **_FUSED)

MEGATRON_STEP_BYTES = 32
"""A parameter's float16 gradient copied to float32 (6 bytes moved), unscaled and checked (8), its
norm taken (4), clipped (8), the weights copied back in a pass of their own (6): Megatron-LM,
megatron/optimizer/optimizer.py."""

NANOTRON_HOST_S = 65e-6
"""Fitted to the fit part's runs of the smallest model on one node, tensor degree 2 and 4, where a
layer takes 4.4 ms whatever its work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """How a framework runs a plan.

    `execution` is what overlaps and what is fused. `wide_gradients`: they are added up, and sent,
    in float32. `even_stages`: every stage has equally many layers. `zero` is the level where a row
    does not say.
    """

    fused_attention: bool
    execution: Execution
    dropout: float = 0.0
    wide_gradients: bool = False
    even_stages: bool = True
    zero: int = 0
    why: str = ""


FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    (
        "Megatron-DeepSpeed",
        Framework(
            fused_attention=False,
            dropout=0.1,
            execution=Execution(step_bytes=MEGATRON_STEP_BYTES, **_FUSED),
            why="Megatron-LM's kernels, DeepSpeed's pipeline: whole messages",
        ),
    ),
    (
        "Megatron-LM",
        Framework(
            fused_attention=False,
            dropout=0.1,
            execution=Execution(scatters_messages=True, step_bytes=MEGATRON_STEP_BYTES, **_FUSED),
            why="Narayanan et al. 2021 and Korthikanti et al. 2022: fused softmax, no fused "
            "attention; gradients all-reduced once after the flush; messages scattered (sect. 4.1)",
        ),
    ),
    ("OneFlow", Framework(fused_attention=False, dropout=0.1, execution=_EARLY)),
    ("DeepSpeed", Framework(fused_attention=False, dropout=0.1, execution=_EARLY)),
    (
        "AA-Scaling",
        Framework(
            fused_attention=False,
            execution=Execution(**_MESSAGES),
            zero=1,
            why="Hagemann et al. 2023: kernels as stated, others unfused; ZeRO-1",
        ),
    ),
    (
        "nanotron",
        Framework(
            fused_attention=True,
            execution=Execution(early_sync=_ALL_LEVELS, host_s=NANOTRON_HOST_S, **_FUSED),
            wide_gradients=True,
            even_stages=False,
            why="Ultra-Scale Playbook: FlashAttention-2, float32 gradient accumulation, all-reduce "
            "of buckets during the last backward, stages of equal cost",
        ),
    ),
    ("InternEvo", Framework(fused_attention=True, execution=_EARLY, zero=1)),
    ("Composer/LLM-Foundry", Framework(fused_attention=True, execution=_EARLY, zero=3)),
    (
        "NeMo",
        Framework(
            fused_attention=True,
            execution=_EARLY,
            zero=1,
            why="recipes set overlap_grad_reduce and overlap_param_gather",
        ),
    ),
    (
        "Megatron",
        Framework(
            fused_attention=True,
            execution=_EARLY,
            zero=1,
            why="Megatron-Core README: data-parallel communication overlapped",
        ),
    ),
    (
        "torchtitan FSDP2",
        Framework(fused_attention=True, execution=_EARLY, zero=3, why="with torch.compile"),
    ),
    (
        "torchtitan",
        Framework(
            fused_attention=True,
            execution=Execution(early_sync=_ALL_LEVELS, **_MESSAGES),
            zero=3,
            why="docs/performance.md of 2024: without torch.compile",
        ),
    ),
    ("PyTorch FSDP", Framework(fused_attention=False, execution=_EARLY, zero=3)),
    ("PaxML", Framework(fused_attention=False, execution=_EARLY, zero=3)),
    ("MaxText", Framework(fused_attention=True, execution=_EARLY, zero=3)),
)
"""How the name of a framework begins, and what it does; the first that fits."""

OTHER = Framework(fused_attention=True, execution=_EARLY)


def framework_of(row: Mapping[str, Any]) -> Framework:
    """What ran a row."""
    name = str(row.get("framework") or "")
    return next((known for start, known in FRAMEWORKS if name.startswith(start)), OTHER)
