"""Seconds of each phase of planning, and of capture against plain `torch.export` in the same run.

python benchmarks/planning.py llama3_8b llama3_70b --cluster 8x8:h100-sxm --precision bf16
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import nn

from autopar.compiler import PlanOptions, build_meta, load_source, plan_source
from autopar.plan.text import columns

PHASES = {
    "build": "building the model",
    "capture": "capturing the model",
    "blocks": "finding blocks",
    "bounds": "bounding grids",
    "search": "searching grids",
    "stages": "proving the stages",
}
"""Column of the table, and what planning reports while the phase runs."""


class Clock:
    """A progress report that adds up the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = "", time.perf_counter()

    def __call__(self, phase: str, done: float | None = None) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


def export_s(model: nn.Module, batch: Any) -> float:
    """Seconds of `torch.export` of the model alone, without a loss: what capture has to pay."""
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (batch, {})
    start = time.perf_counter()
    torch.export.export(model, args, kwargs, strict=False)
    return time.perf_counter() - start


def measure(name: str, cluster: str, options: PlanOptions) -> dict[str, Any]:
    """One model planned for one cluster: seconds by phase, and how the search ended."""
    source = load_source(name)
    model, batch, _ = build_meta(source, options)
    reference_s = export_s(model, batch)
    clock = Clock()
    planned = plan_source(source, cluster, options, clock)
    clock("writing the program")
    files = planned.files()
    clock("")
    seconds = {column: clock.seconds.pop(phase, 0.0) for column, phase in PHASES.items()}
    seconds["codegen"] = clock.seconds.pop("writing the program")
    seconds["other"] = sum(clock.seconds.values(), 0.0)
    certificate = planned.plan.certificate
    return {
        "model": name,
        "cluster": cluster,
        "ops": planned.plan.model.num_ops,
        "seconds": seconds,
        "total_s": sum(seconds.values()),
        "export_s": reference_s,
        "capture_per_export": seconds["capture"] / reference_s,
        "grids": certificate.grids,
        "solved": certificate.solved,
        "gap": certificate.gap,
        "program_lines": sum(text.count("\n") for text in files.values()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    names = [*PHASES, "codegen", "other"]
    header = ("model", "cluster", "ops", *names, "total s", "export s", "capture/export", "gap")
    cells = [
        (
            row["model"],
            row["cluster"],
            str(row["ops"]),
            *(f"{row['seconds'][name]:.2f}" for name in names),
            f"{row['total_s']:.2f}",
            f"{row['export_s']:.2f}",
            f"{row['capture_per_export']:.2f}",
            f"{row['gap']:.2%}",
        )
        for row in rows
    ]
    return columns(header, cells)


def main() -> None:
    """Measure each model on each cluster."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["gpt_tiny", "llama3_8b"], metavar="MODEL")
    parser.add_argument("--cluster", action="append", metavar="SPEC", help="may be repeated")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = PlanOptions(precision=given.precision, time_limit_s=given.time_limit)
    clusters = given.cluster or ["8:h100-sxm"]
    rows = [measure(name, spec, options) for name, spec in product(given.models, clusters)]
    print(json.dumps(rows, indent=1) if given.json else table(rows))


if __name__ == "__main__":
    main()
