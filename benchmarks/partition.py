"""Stage partitions of another planner's tables: the proven best, beside what it found itself.

python benchmarks/partition.py [FILE] [--json] [--time-limit S]

FILE (`.json` or `.json.gz`; without one, `data/galvatron_llama2_7b.json.gz`) has `budgets` and
`instances`, and says in `how` what an answer scores. For every budget the best answer over all
instances is found by `solvers.layers` and scored again from the file, layer by layer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.plan.text import columns
from solvers.layers import solve_layers
from solvers.layers_problem import Counts, LayersProblem

DATA = Path(__file__).parent / "data" / "galvatron_llama2_7b.json.gz"
_TOLERANCE = 1e-9


def read(path: Path) -> dict[str, Any]:
    """The file as it is, compressed or not. Raises InputError for one that is no such table, with
    the place that is not as it has to be."""
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    place = ""
    try:
        layers = data["layers"]
        for i, instance in enumerate(data["instances"]):
            place = f"instances[{i}]: "
            found = problem(instance, layers, 0.0)
            if (found.num_stages, len(found.time_s)) != (
                instance["stages"],
                len(instance["options"]),
            ):
                raise ValueError("as many stages and options as it names are not there")
        for i, budget in enumerate(data["budgets"]):
            place = f"budgets[{i}]: "
            float(budget["budget_mb"])
    except KeyError as error:
        raise InputError(f"{path}: {place}no field {error}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {place}{error}") from None
    return data


def problem(instance: dict[str, Any], layers: int, budget_mb: float) -> LayersProblem:
    """An instance under a budget, in the file's units: seconds and MB."""
    transient = int(instance["transient_memory_mb"])
    return LayersProblem(
        num_layers=layers,
        num_micro_batches=instance["micro_batches"],
        time_s=tuple(instance["option_time_s"]),
        synced_s=tuple(instance["option_time_with_sync_s"]),
        end_s=tuple(instance["end_time_s"]),
        option_bytes=tuple(map(tuple, instance["option_memory_mb"])),
        free_bytes=tuple(
            float(budget_mb - math.ceil(end) - transient) for end in instance["end_memory_mb"]
        ),
    )


def score(instance: dict[str, Any], layers: int, budget_mb: float, counts: Counts) -> float:
    """What an answer scores by the file's own words; ValueError where it is none."""
    dealt = [[o for o, n in enumerate(row) for _ in range(n)] for row in counts]
    if len(dealt) != instance["stages"] or sum(map(len, dealt)) != layers or not all(dealt):
        raise ValueError(f"stages: {list(map(len, dealt))} layers are not {layers} on all stages")
    times, tail = [], 0.0
    for stage, options in enumerate(dealt):
        held = sum(instance["option_memory_mb"][stage][o] for o in options)
        held += math.ceil(instance["end_memory_mb"][stage]) + int(instance["transient_memory_mb"])
        if held > budget_mb * (1 + _TOLERANCE):
            raise ValueError(f"stage {stage}: {held} MB of {budget_mb}")
        own = sum(instance["option_time_s"][o] for o in options)
        times.append(own + instance["end_time_s"][stage])
        synced = sum(instance["option_time_with_sync_s"][o] for o in options)
        tail = max(tail, synced - sum(times))
    return sum(times) + (instance["micro_batches"] - 1) * max(times) + tail


def solve(data: dict[str, Any], budget: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
    """The best answer under one budget, as a row of the report."""
    layers, budget_mb = data["layers"], budget["budget_mb"]
    start = time.perf_counter()
    problems = [problem(instance, layers, budget_mb) for instance in data["instances"]]
    solution = solve_layers(problems, time_limit_s=time_limit_s)
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {
        "memory_gb": budget.get("memory_gb", round(budget_mb / 1024, 1)),
        "budget_mb": budget_mb,
        "instances": len(problems),
        "status": str(solution.status),
        "score_s": None,
        "bound_s": solution.bound if math.isfinite(solution.bound) else None,
        "search_s": seconds,
        "galvatron": budget.get("galvatron"),
        "best_known": budget.get("best_known"),
    }
    if solution.counts:
        instance = data["instances"][solution.problem]
        row["score_s"] = score(instance, layers, budget_mb, solution.counts)
        names = instance["options"]
        row["answer"] = {
            "instance": solution.problem,
            "micro_batches": instance["micro_batches"],
            "stages": [
                {names[o]: n for o, n in enumerate(counts) if n} for counts in solution.counts
            ],
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text: our answer, then what the file says of others."""
    header = ("GB", "status", "score s", "bound s", "search s", "best known s")
    header += ("Galvatron s", "its own score s", "its search s", "micro-batches", "stages")
    cells = []
    for row in rows:
        peer, known = row["galvatron"] or {}, row["best_known"] or {}
        answer = row.get("answer", {})
        cells.append(
            (
                str(row["memory_gb"]),
                row["status"],
                _figure(row["score_s"], 5),
                _figure(row["bound_s"], 5),
                _figure(row["search_s"], 2),
                _figure(known.get("sum_plus_bottleneck_s"), 5),
                _figure(peer.get("sum_plus_bottleneck_s"), 5),
                _figure(peer.get("own_score_s"), 5),
                _figure(peer.get("search_wall_s"), 0),
                str(answer.get("micro_batches", "-")),
                " | ".join(
                    " + ".join(f"{n} {name}" for name, n in stage.items())
                    for stage in answer.get("stages", ())
                ),
            )
        )
    return columns(header, cells)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Solve every budget of a file; status 2 for one that is no table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=DATA, metavar="FILE")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="per budget")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        data = read(given.file)
    except InputError as error:
        print(f"partition.py: {error}", file=sys.stderr)
        sys.exit(2)
    rows = [solve(data, budget, given.time_limit) for budget in data["budgets"]]
    if given.json:
        print(json.dumps({"about": data.get("about"), "rows": rows}, indent=1))
        return
    print(table(rows))
    total = math.fsum(row["search_s"] for row in rows)
    print(f"{len(data['instances'])} instances, {len(rows)} budgets: {total:.2f} s together")


if __name__ == "__main__":
    main()
