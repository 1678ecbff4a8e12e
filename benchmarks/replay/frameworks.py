"""What the programs behind published runs did, where it differs from what autopar emits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.costs.calibration import PATH
from autopar.costs.execution import EARLY_LEVELS, Execution

_ALL_LEVELS = EARLY_LEVELS | {0, 1}
_EAGER: dict[str, Any] = {"hides_messages": False}  # sent and received between two ops
_FUSED: dict[str, Any] = {"fuses": True, **_EAGER}
_EARLY: dict[str, Any] = {"early_sync": _ALL_LEVELS, "flat": True}
_FSDP: dict[str, Any] = {"reduces_each": EARLY_LEVELS, **_EARLY}
_MEGATRON_CORE: dict[str, Any] = {
    "fuses": True,
    "fuses_accumulation": True,
    "scatters": True,
    **_EARLY,
}

MEGATRON_STEP_BYTES = 32
"""A parameter's float16 gradient copied to float32 (6 bytes moved), unscaled and checked (8), its
norm taken (4), clipped (8), the weights copied back in a pass of their own (6): Megatron-LM,
megatron/optimizer/optimizer.py."""

NANOTRON_HOST_S = float(
    json.loads(PATH.read_text(encoding="utf-8"))["hosts"][
        "HF Ultra-Scale Playbook benchmarks_interactive"
    ]
)
"""Seconds of the host to start a kernel, fitted to runs on one node: `benchmarks/calibrate.py`."""

DEEPSPEED_REUSE = 1e9
"""stage3_max_reuse_distance of DeepSpeed, as it is by default (DeepSpeed configuration JSON): a
weight is released after a module unless modules ahead in the same micro-batch use it before so many
parameters (deepspeed/runtime/zero/partitioned_param_coordinator.py)."""

WRITTEN_OUT, FLASH_1, FLASH_2, BEST = "written out", "flash 1", "flash 2", "best"

ATTENTION: Mapping[tuple[str, str], float] = {
    (FLASH_1, "a100"): 0.5,
    (FLASH_1, "h100"): 0.29,
    (FLASH_2, "h100"): 0.58,
    (FLASH_2, "h200"): 0.58,
}
"""How fast fused attention is by kernel and how a device's name begins, next to the device's best:
FlashAttention-2 is twice as fast as the first (Dao 2023, abstract), and on Hopper the third and
cuDNN's are 1.5 to 2 times as fast as the second (Shah et al. 2024, abstract and figure 5). Triton's
first kernel for it is taken for the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """How a framework runs a plan.

    `execution` is what overlaps and what is fused; `attention` the kernel where a row does not say.
    `fused_norm` and `fused_rotary`: these are one kernel each. `wide_gradients`: they are added up,
    and sent, in float32. `even_stages`: every stage has equally many layers. `zero` is the level
    where a row does not say. `interleaves`: its recipes give a rank several stages, how many for
    every model.
    """

    execution: Execution
    attention: str = WRITTEN_OUT
    fused_norm: bool = True
    fused_rotary: bool = True
    dropout: float = 0.0
    wide_gradients: bool = False
    even_stages: bool = True
    zero: int = 0
    interleaves: bool = False
    why: str = ""


EARLY_MEGATRON = Framework(
    dropout=0.1,
    execution=Execution(flat=True, scatters=True, step_bytes=MEGATRON_STEP_BYTES, **_FUSED),
    why="Narayanan et al. 2021: fused softmax, no fused attention; a micro-batch's gradients are "
    "added to the sum in passes of their own; all-reduced once after the flush; messages "
    "scattered (sect. 4.1)",
)
"""Megatron-LM before 2022."""

EARLY_NEMO = Framework(
    attention=FLASH_2,
    execution=Execution(**_MEGATRON_CORE),
    zero=1,
    interleaves=True,
    why="2023: FlashAttention of Transformer Engine 0.x and 1.0; tp_comm_overlap off by default",
)
"""NeMo before 2024."""

BY_SOURCE: tuple[tuple[str, str, Framework], ...] = (
    *(
        (source, "Megatron-LM", EARLY_MEGATRON)
        for source in (
            "Megatron-LM SC21",
            "SC21",
            "Megatron-LM README Sept-2020",
            "Megatron-LM README Jan-2021",
            "Megatron-LM v1",
            "DLPerf",
            "DT-FM",
        )
    ),
    ("NVIDIA NeMo Launcher", "NeMo", EARLY_NEMO),
)
"""How the names of a source and of a framework begin, where the source tells the version."""

FRAMEWORKS: tuple[tuple[str, Framework], ...] = (
    (
        "Megatron-DeepSpeed",
        Framework(
            dropout=0.1,
            wide_gradients=True,
            zero=1,
            execution=Execution(flat=True, step_bytes=MEGATRON_STEP_BYTES, **_FUSED),
            why="Megatron-LM's kernels, DeepSpeed's pipeline: whole messages; gradients added up "
            "in float32 (deepspeed/runtime/bf16_optimizer.py)",
        ),
    ),
    (
        "Megatron-LM",
        Framework(
            dropout=0.1,
            execution=Execution(
                flat=True,
                scatters=True,
                step_bytes=MEGATRON_STEP_BYTES,
                fuses_accumulation=True,
                **_FUSED,
            ),
            why="Korthikanti et al. 2022: as before 2022, but that the product which makes a "
            "weight's gradient adds it up (fused_weight_gradient_dense)",
        ),
    ),
    ("OneFlow", Framework(dropout=0.1, execution=Execution(**_EARLY, **_FUSED))),
    (
        "DeepSpeed",
        Framework(
            dropout=0.1,
            execution=Execution(reuse_parameters=DEEPSPEED_REUSE, **_FSDP, **_FUSED),
            why="ZeRO levels 2 and 3 reduce the gradients of every micro-batch",
        ),
    ),
    (
        "AA-Scaling",
        Framework(
            fused_norm=False,
            fused_rotary=False,
            execution=Execution(flat=True, whole_loss=True, **_EAGER),
            zero=1,
            why="Hagemann et al. 2023: kernels as stated, others unfused; ZeRO-1; the head gathers "
            "its logits and the loss is PyTorch's (scaling, lm_head.py, losses/cross_entropy.py)",
        ),
    ),
    (
        "nanotron",
        Framework(
            attention=FLASH_2,
            execution=Execution(host_s=NANOTRON_HOST_S, **_EARLY, **_FUSED),
            wide_gradients=True,
            even_stages=False,
            why="Ultra-Scale Playbook: FlashAttention-2, float32 gradient accumulation, all-reduce "
            "of buckets during the last backward, stages of equal cost",
        ),
    ),
    (
        "InternEvo",
        Framework(
            attention=FLASH_2,
            execution=Execution(**_EARLY, **_EAGER),
            zero=1,
            why="doc/en/train_performance.md: FlashAttention, Apex norms, overlapped "
            "communication; PyTorch runs the rest op by op",
        ),
    ),
    (
        "Composer/LLM-Foundry",
        Framework(
            attention=FLASH_1,
            execution=Execution(fuses_loss=True, **_FSDP, **_EAGER),
            zero=3,
            why="Triton attention, PyTorch op by op, FSDP that reduces the gradients of every "
            "micro-batch; loss_fn fused_crossentropy is MPT's default "
            "(llmfoundry/models/mpt/modeling_mpt.py)",
        ),
    ),
    (
        "NeMo Automodel",
        Framework(
            attention=BEST,
            execution=Execution(**_FSDP, **_EAGER),
            wide_gradients=True,
            zero=3,
            why="PyTorch FSDP2 with kernels of Transformer Engine; gradients reduced in float32",
        ),
    ),
    (
        "NeMo",
        Framework(
            attention=BEST,
            execution=Execution(hides_tensor=True, **_MEGATRON_CORE),
            zero=1,
            interleaves=True,
            why="Megatron-Core with Transformer Engine; recipes set overlap_grad_reduce, "
            "overlap_param_gather, tp_comm_overlap, and with interleaving overlap_p2p_comm",
        ),
    ),
    (
        "Megatron",
        Framework(
            attention=BEST,
            execution=Execution(**_MEGATRON_CORE),
            zero=1,
            why="Megatron-Core README: data-parallel communication overlapped",
        ),
    ),
    (
        "torchtitan FSDP2",
        Framework(
            attention=FLASH_2,
            execution=Execution(**_FSDP, **_FUSED),
            wide_gradients=True,
            zero=3,
            why="with torch.compile; mixed_precision_reduce is float32",
        ),
    ),
    (
        "torchtitan",
        Framework(
            attention=FLASH_2,
            fused_norm=False,
            fused_rotary=False,
            execution=Execution(**_FSDP, **_EAGER),
            wide_gradients=True,
            zero=3,
            why="docs/performance.md of 2024: without torch.compile; mixed_precision_reduce is "
            "float32",
        ),
    ),
    (
        "PyTorch FSDP",
        Framework(
            attention=FLASH_2,
            fused_norm=False,
            fused_rotary=False,
            execution=Execution(**_FSDP, **_EAGER),
            zero=3,
        ),
    ),
    ("PaxML", Framework(execution=Execution(**_EARLY, **_FUSED), zero=3)),
    ("MaxText", Framework(attention=BEST, execution=Execution(**_EARLY, **_FUSED), zero=3)),
)
"""How the name of a framework begins, and what it does; the first that fits."""

OTHER = Framework(attention=BEST, execution=Execution(**_EARLY, **_FUSED))


def framework_of(row: Mapping[str, Any]) -> Framework:
    """What ran a row."""
    name, source = (str(row.get(key) or "") for key in ("framework", "dataset"))
    for start, framework, known in BY_SOURCE:
        if source.startswith(start) and name.startswith(framework):
            return known
    return next((known for start, known in FRAMEWORKS if name.startswith(start)), OTHER)


def attention_kernel(row: Mapping[str, Any], framework: Framework) -> str:
    """The attention kernel of a row, by what it says or else what its framework has."""
    text = row.get("attention_kernel")
    if text is None:
        return framework.attention
    if "flash" in text:
        return FLASH_1 if "triton" in text or "v1" in text else FLASH_2
    return BEST if "TE" in text else WRITTEN_OUT


def attention_share(kernel: str, device: str) -> float:
    """How fast a kernel is next to the best of a device."""
    for (known, start), share in ATTENTION.items():
        if known == kernel and device.startswith(start):
            return share
    return 1.0
