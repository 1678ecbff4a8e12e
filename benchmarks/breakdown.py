"""Where the seconds of a step of one plan go, predicted and measured, rank by rank.

python benchmarks/breakdown.py gpt [--cluster local:4] [--pins pipeline=4,micro_batches=8] [--json]

Profiled, planned and run as `benchmarks/local.py` does. For every kind of action: how often it ran,
what was predicted, the time that passed, and the time of it that the rank's thread had a core. What
is predicted is for ranks that all compute; the time on a core is to be that over the slowdown.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from local import MODELS, job_of, loaded, prepare

from autopar.compiler import Planned, plan_captured
from autopar.devices import measured_cluster
from autopar.jobs import Job
from autopar.plan.pipeline import rank_groups
from autopar.plan.table import grid_text
from autopar.plan.text import columns
from autopar.runtime.channels import Channels
from autopar.runtime.executor import Run
from autopar.runtime.launch import WorkerPool
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.sync import GradientSync

TERMS = {
    "FORWARD": "forward",
    "BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
    "SEND_FORWARD": "send_forward",
    "SEND_BACKWARD": "send_backward",
    "sums of gradients": "gradient_sync",
    "optimizer": "optimizer",
}
"""The figure of a stage that each part of a step was predicted by."""

ONCE = frozenset(("sums of gradients", "optimizer"))


Spent = tuple[int, float, float]
"""How often one part of a step ran on one rank, and the seconds together: those that passed, and
those that its thread had a core for."""


class Watch(ExitStack):
    """Counts what a rank spends on the parts of a step that runs inside."""

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self._parallel = parallel
        self.spent: dict[str, Spent] = {}

    def __enter__(self) -> Watch:
        optimizer = self._parallel.optimizer
        for owner, name, key in (
            (Run, "perform", lambda run, action: action.kind.name),
            (Channels, "take", lambda *_: "of it waits for messages"),
            (Channels, "finish", lambda *_: "last messages leave"),
            (GradientSync, "finish", lambda *_, **__: "sums of gradients"),
            (optimizer, "step", lambda *_: "optimizer"),
        ):
            self.enter_context(patch.object(owner, name, self._counted(getattr(owner, name), key)))
        return self

    def _counted(self, run: Callable[..., Any], key: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            part, passed_s, core_s = key(*args, **kwargs), time.perf_counter(), time.thread_time()
            try:
                return run(*args, **kwargs)
            finally:
                now = (1, time.perf_counter() - passed_s, time.thread_time() - core_s)
                before = self.spent.get(part, (0, 0.0, 0.0))
                self.spent[part] = (before[0] + now[0], before[1] + now[1], before[2] + now[2])

        return counted


def watch_job(job: Job) -> tuple[float, float, dict[str, Spent]]:
    """Seconds and seconds on cores, threads of collectives included, of the fastest of the job's
    steps on this rank, and its parts."""
    parallel, batch = loaded(job)
    parallel.train_step(batch)
    found = []
    for _ in range(job.steps):
        with Watch(parallel) as watch:
            dist.barrier()
            start_s, core_s = time.perf_counter(), time.process_time()
            parallel.train_step(batch)
            dist.barrier()
            taken_s = time.perf_counter() - start_s
            found.append((taken_s, time.process_time() - core_s, watch.spent))
    parallel.world.close()
    return min(found, key=lambda one: one[0])


def predicted_s(planned: Planned, rank: int) -> Mapping[str, float]:
    """What each part was predicted to take on a rank, together."""
    (own,) = (g for g in rank_groups(planned.plan.stages) if rank in g[0].ranks)
    terms = [dict(stage.time_s) for stage in own]
    for stage in terms:
        stage["backward_input"] = stage["backward"] - stage.get("backward_weight", 0.0)
    often = planned.plan.training.micro_batches
    return {
        part: sum(stage.get(term, 0.0) for stage in terms) * (1 if part in ONCE else often)
        for part, term in TERMS.items()
    }


def rows(
    planned: Planned, measured: list[tuple[float, float, dict[str, Spent]]]
) -> Iterator[tuple[str, ...]]:
    """A line for every part of every rank's step."""
    slowdown = planned.plan.cluster.slowdown
    for rank, (step_s, core_s, parts) in enumerate(measured):
        expected = predicted_s(planned, rank)
        for part, (count, passed_s, thread_s) in sorted(parts.items()):
            seconds = expected.get(part)
            ahead = "" if seconds is None else f"{1e3 * seconds:.1f}"
            alone = "" if seconds is None else f"{1e3 * seconds / slowdown:.1f}"
            figures = (ahead, f"{1e3 * passed_s:.1f}", alone, f"{1e3 * thread_s:.1f}")
            yield (str(rank), part.lower().replace("_", " "), str(count), *figures)
        whole = f"{1e3 * planned.plan.prediction.step_s:.1f}"
        yield (str(rank), "step", "1", whole, f"{1e3 * step_s:.1f}", "", f"{1e3 * core_s:.1f}")


def main() -> None:
    """Profile, plan, run, take apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--cluster", default="local:4")
    parser.add_argument("--pins", default="", help="as in pipeline=4,micro_batches=8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--database", default="build/local.sqlite")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    pins = tuple(tuple(pin.split("=", 1)) for pin in given.pins.split(",") if pin)
    cluster = measured_cluster(given.cluster)
    captured, options = prepare(given.model, cluster, given.database, None)
    options = replace(options, pins=pins)
    planned = plan_captured(captured, cluster, options, name=given.model)
    with tempfile.TemporaryDirectory() as folder, WorkerPool(cluster.num_devices) as pool:
        measured = pool.run(
            watch_job, job_of(given.model, planned, Path(folder) / "program", given.steps)
        )
    if given.json:
        ranks = [
            {
                "step_s": step_s,
                "core_s": core_s,
                "parts": {
                    part: dict(zip(("runs", "passed_s", "core_s"), spent, strict=True))
                    for part, spent in parts.items()
                },
                "predicted_s": dict(predicted_s(planned, rank)),
            }
            for rank, (step_s, core_s, parts) in enumerate(measured)
        ]
        step_s = planned.plan.prediction.step_s
        print(json.dumps({"predicted_step_s": step_s, "ranks": ranks}, indent=1))
        return
    header = ("rank", "part", "runs", "ms predicted", "passed", "on a core: predicted", "measured")
    print(grid_text(planned.plan))
    print(columns(header, list(rows(planned, measured)), left=2))


if __name__ == "__main__":
    main()
