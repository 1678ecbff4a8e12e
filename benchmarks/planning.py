"""Seconds of each phase of planning, and of capture against plain `torch.export` in the same run.

python benchmarks/planning.py llama3_8b llama3_70b --cluster 8x8:h100-sxm --precision bf16

With --scaling, seconds against layers, devices and mesh axes instead, with the exponents fitted to
them: a series ends with the first plan after which it has taken --budget seconds.

python benchmarks/planning.py --scaling --budget 120
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture import Captured, capture
from autopar.collecting import seldom_collecting
from autopar.compiler import PlanOptions, build_meta, load_source, plan_captured, plan_source
from autopar.plan.plan import Plan
from autopar.plan.text import columns
from model_zoo.gpt import GPT, GPTConfig

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
    made = plan_source(source, cluster, options, clock)
    clock("writing the program")
    files = made.files()
    clock("")
    seconds = {column: clock.seconds.pop(phase, 0.0) for column, phase in PHASES.items()}
    seconds["codegen"] = clock.seconds.pop("writing the program")
    seconds["other"] = sum(clock.seconds.values(), 0.0)
    certificate = made.plan.certificate
    return {
        "model": name,
        "cluster": cluster,
        "ops": made.plan.model.num_ops,
        "seconds": seconds,
        "total_s": sum(seconds.values()),
        "export_s": reference_s,
        "capture_per_export": seconds["capture"] / reference_s,
        "grids": certificate.grids,
        "solved": certificate.solved,
        "gap": certificate.gap,
        "program_lines": sum(text.count("\n") for text in files.values()),
    }


LAYERS = tuple(2**k for k in range(3, 11))
NODES = tuple(2**k for k in range(15))
"""Of eight devices each: 8 to 131,072 devices."""
ONE = dict.fromkeys(("pipeline", "context", "tensor"), "1")
FREE_AXES: tuple[dict[str, str], ...] = (
    ONE,
    {"pipeline": "1", "context": "1"},
    {"context": "1"},
    {},
    {"shard": "2"},
)
"""Pins that leave data alone to be searched, and then tensor, pipeline, context and a second data
axis too."""


def gpt(layers: int) -> Captured:
    """A GPT of so many layers, captured without memory for it."""
    with torch.device("meta"):
        config = GPTConfig(layers=layers, hidden=2048, heads=16, seq_len=2048, tied=False)
        tokens = torch.zeros(4, 2048, dtype=torch.long)
        model = GPT(config).to(torch.bfloat16)
    return capture(model, {"input_ids": tokens, "labels": tokens})


def planned(captured: Captured, nodes: int, pins: Mapping[str, str], limit_s: float) -> Plan:
    """A plan for nodes of eight devices, with at least one sample for each device."""
    options = PlanOptions(
        precision="bf16",
        global_batch=max(512, 8 * nodes),
        pins=tuple(pins.items()),
        price_pins=False,
        time_limit_s=limit_s,
    )
    return plan_captured(captured, f"{nodes}x8:h100-sxm", options).plan


def series(
    name: str, sizes: Sequence[int], plan: Callable[[int], Plan], budget_s: float
) -> dict[str, Any]:
    """Seconds for every size until the budget is spent, and the exponent fitted to them: the slope
    of the line through their logarithms."""
    points: list[dict[str, Any]] = []
    for size in sizes:
        if sum(point["cpu_s"] for point in points) > budget_s:
            break
        wall, cpu = time.perf_counter(), time.process_time()
        certificate = plan(size).certificate
        points.append(
            {
                "size": size,
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "grids": certificate.grids,
                "solved": certificate.solved,
                "gap": certificate.gap,
            }
        )
    exponent = None
    if len(points) > 1:
        logs = np.log([[point["size"], point["cpu_s"]] for point in points])
        exponent = float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])
    return {"against": name, "points": points, "exponent": exponent}


def scaling(budget_s: float, limit_s: float) -> list[dict[str, Any]]:
    """Planning, capture included where its size changes, against what makes it take longer."""
    small = gpt(24)
    return [
        series("layers", LAYERS, lambda n: planned(gpt(n), 8, {}, limit_s), budget_s),
        series(
            "devices",
            [8 * n for n in NODES],
            lambda n: planned(small, n // 8, {}, limit_s),
            budget_s,
        ),
        series(
            "mesh axes",
            range(1, len(FREE_AXES) + 1),
            lambda n: planned(small, 8, FREE_AXES[n - 1], limit_s),
            budget_s,
        ),
    ]


def scaling_table(found: list[dict[str, Any]]) -> str:
    """The series as text."""
    header = ("against", "size", "wall s", "cpu s", "grids", "solved", "gap", "exponent")
    cells = []
    for each in found:
        for index, point in enumerate(each["points"]):
            last = index == len(each["points"]) - 1 and each["exponent"] is not None
            cells.append(
                (
                    each["against"],
                    str(point["size"]),
                    f"{point['wall_s']:.2f}",
                    f"{point['cpu_s']:.2f}",
                    str(point["grids"]),
                    str(point["solved"]),
                    f"{point['gap']:.2%}",
                    f"{each['exponent']:.2f}" if last else "",
                )
            )
    return columns(header, cells)


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


@seldom_collecting()
def main() -> None:
    """Measure each model on each cluster."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["gpt_tiny", "llama3_8b"], metavar="MODEL")
    parser.add_argument("--cluster", action="append", metavar="SPEC", help="may be repeated")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scaling", action="store_true", help="seconds against sizes instead")
    parser.add_argument("--budget", type=float, default=120.0, metavar="S", help="of a series")
    given = parser.parse_args()
    if given.scaling:
        found = scaling(given.budget, given.time_limit)
        print(json.dumps(found, indent=1) if given.json else scaling_table(found))
        return
    options = PlanOptions(precision=given.precision, time_limit_s=given.time_limit)
    clusters = given.cluster or ["8:h100-sxm"]
    rows = [measure(name, spec, options) for name, spec in product(given.models, clusters)]
    print(json.dumps(rows, indent=1) if given.json else table(rows))


if __name__ == "__main__":
    main()
