"""Predicted against measured peak memory of the plans of `local.py`, without their times.

python benchmarks/memory.py [--cluster local:4] [--models gpt llama mlp] [--most 24] [--json]

Nothing is profiled, and the machine need not be idle: what tensors hold at the peak of a step does
not depend on how long it takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from local import BELOW, CLOSE, MODELS, job_of, loaded, memory_bytes, peak_bytes, plans

from autopar.capture import capture
from autopar.compiler import Planned, PlanOptions, build_meta, load_source
from autopar.costs.clusters import parse_cluster
from autopar.ir.cluster import Cluster
from autopar.jobs import Job
from autopar.plan.table import grid_text
from autopar.plan.text import columns
from autopar.runtime.launch import WorkerPool

SOURCE = Path(__file__).with_name("local.py").resolve()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan: what was predicted and what was measured of its fullest rank."""

    model: str
    pins: str
    grid: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """Relative; above zero where too much was predicted."""
        return self.predicted_bytes / self.measured_bytes - 1


def peak_job(job: Job) -> float:
    """Bytes at the peak of the second step on this rank: optimizers make their state in the
    first."""
    parallel, batch = loaded(job)
    parallel.train_step(batch)
    held_bytes = peak_bytes(parallel, batch)
    parallel.world.close()
    return held_bytes


def measured(planned: Planned, name: str, pool: WorkerPool) -> float:
    """Bytes at the peak of the fullest rank."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(name, planned, Path(folder) / "program")
        return max(pool.run(peak_job, job))


def rows(name: str, cluster: Cluster, most: int) -> Iterator[Row]:
    """The plans of a model."""
    options = PlanOptions(price_pins=False)
    model, batch, loss_fn = build_meta(load_source(f"{SOURCE}:{name}"), options)
    captured = capture(model, batch, loss_fn=loss_fn)
    with WorkerPool(cluster.num_devices) as pool:
        for text, planned in plans(name, captured, cluster, options, most):
            yield Row(
                model=name,
                pins=text,
                grid=grid_text(planned.plan),
                predicted_bytes=memory_bytes(planned),
                measured_bytes=measured(planned, name, pool),
            )


def distribution(found: Sequence[Row]) -> str:
    """One line for all errors."""
    errors = [row.error for row in found]
    within = sum(-BELOW <= error <= CLOSE for error in errors)
    return (
        f"{len(errors)} plans: {min(errors):+.1%} to {max(errors):+.1%}, median "
        f"{median(errors):+.1%}; {within} within {-BELOW:+.0%} to {CLOSE:+.0%}"
    )


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="local:4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--most", type=int, default=100, help="pin sets of each model to run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: list[Row] = []
    for name in given.models:
        for row in rows(name, parse_cluster(given.cluster), given.most):
            found.append(row)
            print(row.model, row.pins, f"{row.error:+.1%}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps(list(map(asdict, found)), indent=1))
        return
    header = ("model", "grid", "pins", "MiB predicted", "measured", "error")
    table = [
        (
            row.model,
            row.grid,
            row.pins,
            f"{row.predicted_bytes / 2**20:.2f}",
            f"{row.measured_bytes / 2**20:.2f}",
            f"{row.error:+.1%}",
        )
        for row in found
    ]
    print(columns(header, table, left=3))
    print(distribution(found))


if __name__ == "__main__":
    main()
