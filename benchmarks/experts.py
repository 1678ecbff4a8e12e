"""What the planner chooses with nothing pinned, beside what people who trained such models chose.

python benchmarks/experts.py [NAME ...] [--time-limit S] [--json] [--document docs/experts.md]

Each row has the published choice and its source, and what the plan must have to agree with it. A
plan that disagrees is shown with the price of the published choice: the same with that pinned.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.errors import AutoparError
from autopar.plan.plan import Plan
from autopar.plan.table import grid_text
from autopar.plan.techniques import techniques

Agrees = Callable[[Plan], bool]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published training setup: what is asked, what was chosen, and how to tell."""

    model: str
    cluster: str
    seq_len: int
    global_batch: int
    choice: str
    source: str
    agrees: Agrees
    pins: tuple[tuple[str, str], ...] = ()


def _has(plan: Plan, *words: str) -> bool:
    lines = techniques(plan)
    return all(any(word in line for line in lines) for word in words)


def _tensor_inside_nodes(plan: Plan) -> bool:
    return plan.axis("tensor") * plan.axis("context") <= plan.cluster.links[0].span


CASES = {
    "llama_7b_zero": Case(
        model="llama2_7b",
        cluster="8:a100-80gb",
        seq_len=4096,
        global_batch=64,
        choice="FSDP (ZeRO-3) over 8 GPUs, no tensor parallelism",
        source="PyTorch FSDP (Zhao et al. 2023, arXiv:2304.11277) and llama-recipes",
        agrees=lambda plan: plan.axis("tensor") == 1 and _has(plan, "ZeRO"),
        pins=(("tensor", "1"), ("zero", "3")),
    ),
    "llama_8b_128k": Case(
        model="llama3_8b",
        cluster="8:h100-sxm",
        seq_len=131072,
        global_batch=8,
        choice="context or sequence parallelism over the 8 GPUs of a node",
        source="Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2 (context parallelism)",
        agrees=lambda plan: _has(plan, "context parallelism") or _has(plan, "sequence parallelism"),
        pins=(("context", "8"),),
    ),
    "slow_network": Case(
        model="gpt3_1_3b",
        cluster="8x1:a100-80gb@network=1.25",
        seq_len=2048,
        global_batch=64,
        choice="pipeline across hosts joined by 10 Gb/s, never tensor parallelism",
        source="Huang et al. 2019 (GPipe, arXiv:1811.06965); Narayanan et al. 2021, section 5.9",
        agrees=lambda plan: plan.pipeline > 1 and plan.axis("tensor") == 1,
        pins=(("pipeline", "8"),),
    ),
    "gpt3_175b": Case(
        model="gpt3_175b",
        cluster="128x8:a100-80gb",
        seq_len=2048,
        global_batch=1536,
        choice="recompute only where memory asks for it",
        source="Korthikanti et al. 2022, arXiv:2205.05198",
        agrees=lambda plan: (
            _tensor_inside_nodes(plan) and not _has(plan, "full activation recomputation (98")
        ),
    ),
    "megatron_turing_530b": Case(
        model="megatron_turing_530b",
        cluster="560x8:a100-80gb",
        seq_len=2048,
        global_batch=1920,
        choice="tensor 8 inside nodes, pipeline 35 across them, data 8 to 16",
        source="Smith et al. 2022, arXiv:2201.11990, section 3.2",
        agrees=lambda plan: plan.pipeline > 1 and _tensor_inside_nodes(plan),
        pins=(("tensor", "8"), ("pipeline", "35")),
    ),
    "mixtral_8x7b": Case(
        model="mixtral_8x7b",
        cluster="8x8:h100-sxm",
        seq_len=4096,
        global_batch=512,
        choice="expert parallelism, no tensor parallelism across nodes",
        source="Megatron Core MoE (Yan et al. 2025, arXiv:2504.14960)",
        agrees=lambda plan: _has(plan, "expert parallelism") and _tensor_inside_nodes(plan),
        pins=(("expert", "8"), ("tensor", "1")),
    ),
    "deepseek_v3": Case(
        model="deepseek_v3",
        cluster="256x8:h800-sxm",
        seq_len=4096,
        global_batch=15360,
        choice="expert parallelism 64, pipeline 16, ZeRO-1, no tensor parallelism",
        source="DeepSeek-AI 2024, arXiv:2412.19437, section 3.2",
        agrees=lambda plan: _has(plan, "expert parallelism") and _tensor_inside_nodes(plan),
        pins=(("expert", "64"), ("pipeline", "16"), ("tensor", "1")),
    ),
}


def make_plan(case: Case, time_limit_s: float, pins: tuple[tuple[str, str], ...] = ()) -> Plan:
    """The plan of a case."""
    options = PlanOptions(
        global_batch=case.global_batch, precision="bf16", time_limit_s=time_limit_s, pins=pins
    )
    source = load_source(case.model, seq_len=case.seq_len)
    return plan_source(source, case.cluster, options).plan


def report(name: str, case: Case, time_limit_s: float) -> dict[str, Any]:
    """What was chosen, and whether it is what was published."""
    plan = make_plan(case, time_limit_s)
    found: dict[str, Any] = {
        "name": name,
        "published": case.choice,
        "source": case.source,
        "grid": grid_text(plan),
        "step_s": plan.prediction.step_s,
        "certificate": f"{plan.certificate.status}, gap {plan.certificate.gap:.1%}",
        "techniques": list(techniques(plan)),
        "agrees": case.agrees(plan),
    }
    if not found["agrees"] and case.pins:
        try:
            pinned = make_plan(case, time_limit_s, case.pins)
            found["published_grid"] = grid_text(pinned)
            found["published_step_s"] = pinned.prediction.step_s
        except AutoparError as error:
            found["published_grid"] = str(error)
    return found


def shown(found: dict[str, Any]) -> str:
    """A report as text."""
    lines = [
        f"{found['name']}: {'agrees' if found['agrees'] else 'DISAGREES'}",
        f"  published  {found['published']} ({found['source']})",
        f"  chosen     {found['grid']}, step {found['step_s']:.3f} s, {found['certificate']}",
        *(f"             {line}" for line in found["techniques"]),
    ]
    if "published_step_s" in found:
        ratio = found["published_step_s"] / found["step_s"]
        lines.append(f"  the published choice takes {ratio:.3f} of that: {found['published_grid']}")
    elif "published_grid" in found:
        lines.append(f"  the published choice: {found['published_grid']}")
    return "\n".join(lines)


HEADER = """# What experts chose, and what the planner chooses

Written by `python benchmarks/experts.py --document docs/experts.md`: each job as it was published,
planned with nothing pinned. Where the two differ in more than degrees, the published choice is
planned too, pinned, and its predicted step stands beside ours.

| job | published choice | chosen | step | certificate |
|---|---|---|---|---|
"""


def document(rows: list[dict[str, Any]]) -> str:
    """The reports as a page."""
    lines = []
    for row in rows:
        case = CASES[row["name"]]
        job = (
            f"{case.model} on `{case.cluster}`, sequence {case.seq_len}, batch {case.global_batch}"
        )
        chosen = f"{'agrees' if row['agrees'] else 'disagrees'}: {row['grid']}"
        if "published_step_s" in row:
            step_s, grid = row["published_step_s"], row["published_grid"]
            chosen += f"; the published choice takes {step_s:.3f} s ({grid})"
        cells = [
            job,
            f"{row['published']} ({row['source']})",
            chosen,
            f"{row['step_s']:.3f} s",
            row["certificate"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    parts = ["\n## The techniques of each\n"]
    for row in rows:
        parts += [f"\n{row['name']}:\n", *(f"- {line}" for line in row["techniques"])]
    return HEADER + "\n".join(lines) + "\n" + "\n".join(parts) + "\n"


def main() -> None:
    """Print every case asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--document", metavar="FILE", type=Path, help="write a page of the cases")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; choose of {', '.join(CASES)}")
    rows = []
    for name in options.names or CASES:
        rows.append(report(name, CASES[name], options.time_limit))
        if not options.json:
            print(shown(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    if options.document is not None:
        options.document.write_text(document(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
