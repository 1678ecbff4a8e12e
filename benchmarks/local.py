"""Predicted against measured step time and peak memory of many plans, on local processes.

python benchmarks/local.py --cluster local:4 [--models gpt llama mlp] [--most 24] [--json]
                           [--keep FILE]

Ops, collectives and the optimizer of every model are profiled first, into `--database`. Then all
plans of a model run one after the other, `--rounds` times, so that drift of the machine hits all
alike. The step time of a plan is the fastest of all its steps, since whatever else runs on the
machine only adds to it; memory is what tensors hold at the peak of one more step. Processes may be
more than cores: what they take from each other is a part of what is predicted.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import inf, sqrt
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import profiling
from autopar.capture import Captured, capture
from autopar.compiler import (
    Planned,
    PlanOptions,
    build_meta,
    load_source,
    plan_captured,
    write_program,
)
from autopar.devices import measured_cluster
from autopar.errors import AutoparError
from autopar.ir.cluster import Cluster
from autopar.jobs import Job, build, optimizer_class
from autopar.plan.pipeline import rank_groups
from autopar.plan.plan import RESERVED
from autopar.plan.serialize import write_text
from autopar.plan.table import grid_text
from autopar.plan.text import columns
from autopar.profiler.files import profile_for, read_profiles
from autopar.runtime.launch import WorkerPool
from autopar.runtime.load import load_program
from autopar.runtime.measure import PeakBytes, state_bytes
from autopar.runtime.parallel import ParallelModel
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.llama import Llama, LlamaConfig
from model_zoo.mlp import MLP

SAMPLES, TOKENS, VOCAB = 8, 128, 512
TAU, CLOSE, BELOW = 0.85, 0.05, 0.02
"""Bars: Kendall's tau of step times; how far the chosen plan may be from the best measured one, and
predicted memory from measured; how far predicted memory may be under it."""

CHOSEN = "chosen"
"""What stands for the pins of the plan that is chosen without any."""

Pins = tuple[tuple[str, str], ...]


def _tokens() -> dict[str, Tensor]:
    return {key: torch.randint(0, VOCAB, (SAMPLES, TOKENS)) for key in ("input_ids", "labels")}


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    """A GPT of 4 layers of 384."""
    return GPT(GPTConfig(layers=4, hidden=384, heads=8, vocab=VOCAB, seq_len=TOKENS)), _tokens()


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama of 4 layers of 384, with grouped queries."""
    config = LlamaConfig(layers=4, hidden=384, heads=8, kv_heads=4, ffn=1024, vocab=VOCAB)
    return Llama(config), _tokens()


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    """8 layers of 1024, and 512 samples."""
    return MLP(8, 1024), {key: torch.randn(512, 1024) for key in ("x", "y")}


MODELS = {"gpt": gpt, "llama": llama, "mlp": mlp}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One plan: what was predicted and what was measured."""

    model: str
    pins: str
    grid: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float


def loaded(job: Job) -> tuple[ParallelModel, Any]:
    """The program of a job on this rank, and a batch."""
    model, batch, _ = build(job)
    parallel = ParallelModel(
        load_program(job.folder),
        model,
        optimizer=(optimizer_class(job.optimizer), dict(job.optimizer_kwargs)),
        constants=job.constants,
    )
    return parallel, batch


def peak_bytes(parallel: ParallelModel, batch: Any) -> float:
    """Bytes at the peak of a step on this rank, not its first: optimizers make their state in
    that."""
    gc.collect()
    with PeakBytes() as peak:
        parallel.train_step(batch)
    held = state_bytes(parallel.store, parallel.engine.sync, parallel.optimizer)
    held.pop("gradients")  # made inside the step
    return float(sum(held.values()) + peak.peak_bytes)


def measure_job(job: Job, weighs: bool) -> tuple[float, float]:
    """Seconds of the fastest step, and bytes at the peak of one more if it `weighs`, on this
    rank."""
    parallel, batch = loaded(job)
    seconds = []
    for _ in range(1 + job.steps):
        dist.barrier()
        start = time.perf_counter()
        parallel.train_step(batch)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    held_bytes = peak_bytes(parallel, batch) if weighs else 0.0
    parallel.world.close()
    return min(seconds[1:]), held_bytes


def pin_sets(devices: int) -> Iterator[Pins]:
    """Degrees over all devices, each with few and many micro-batches, and with one thing more."""
    degrees = [2**k for k in range(devices.bit_length())]
    for pipeline, data in ((p, d) for p in degrees for d in degrees if devices % (p * d) == 0):
        tensor = devices // (pipeline * data)
        shape = {"pipeline": pipeline, "data": data, "tensor": tensor}
        fixed = tuple((key, str(value)) for key, value in shape.items())
        many = 8 // data
        plain = (("recompute", "none"),)
        yield (*fixed, *plain, ("micro_batches", "1" if pipeline == 1 else "2"))
        if many > 2:
            yield (*fixed, *plain, ("micro_batches", str(many)))
        yield (*fixed, ("recompute", "all"), ("micro_batches", str(min(2, many))))
        if data > 1:
            yield (*fixed, *plain, ("zero", "3"), ("micro_batches", "2"))
        if pipeline > 1:
            yield (*fixed, *plain, ("schedule", "gpipe"), ("micro_batches", str(many)))
        if tensor > 1:
            yield (*fixed, *plain, ("sequence", "on"), ("micro_batches", "2"))


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b: how alike two rankings are, 1 for the same; ties count for neither side."""
    agree = ties_a = ties_b = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        first, second = (a > c) - (a < c), (b > d) - (b < d)
        agree += first * second
        ties_a += first == 0
        ties_b += second == 0
    total = len(pairs) * (len(pairs) - 1) // 2
    spread = sqrt((total - ties_a) * (total - ties_b))
    return agree / spread if spread else 1.0


def deciles(values: Sequence[float]) -> tuple[float, float, float]:
    """The value that a tenth, half and nine tenths of them are below."""
    if len(values) < 2:
        return (values[0],) * 3
    found = quantiles(values, n=10, method="inclusive")
    return found[0], found[4], found[8]


def memory_bytes(planned: Planned) -> float:
    """The predicted peak of tensors of the fullest rank."""
    return max(
        sum(f for stage in stages for name, f in stage.memory_bytes if name not in RESERVED)
        for stages in rank_groups(planned.plan.stages)
    )


def prepare(
    name: str, cluster: Cluster, database: str, budget_s: float | None
) -> tuple[Captured, PlanOptions]:
    """A model, captured, and options with the measured times of all that its plans can need."""
    spec, options = f"{Path(__file__).resolve()}:{name}", PlanOptions(price_pins=False)
    report = profiling.profile_model(
        spec,
        None,
        cluster,
        options,
        output=database,
        limits=profiling.limits_for(cluster, budget_s=budget_s),
        links=True,
        progress=lambda what, done: None,
    )
    print(f"{name}: {report.text}", file=sys.stderr)
    profile = profile_for(read_profiles(database), cluster, database)
    model, batch, loss_fn = build_meta(load_source(spec), options)
    return capture(model, batch, loss_fn=loss_fn), replace(options, profile=profile)


def plans(
    name: str, captured: Captured, cluster: Cluster, options: PlanOptions, most: int
) -> Iterator[tuple[str, Planned]]:
    """The plan that is chosen with nothing pinned, and those of the pin sets, each plan once."""
    seen = set[str]()
    for pins in [(), *list(pin_sets(cluster.num_devices))[:most]]:
        text = ",".join("=".join(pin) for pin in pins) or CHOSEN
        try:
            planned = plan_captured(captured, cluster, replace(options, pins=pins), name=name)
        except AutoparError as error:
            print(f"{name} {text}: {str(error)[:100]}", file=sys.stderr)
            continue
        plan = planned.plan
        key = repr((plan.axes, plan.schedule, plan.training, plan.variants, plan.stages))
        if key not in seen:
            seen.add(key)
            yield text, planned


def runs(name: str, found: Sequence[tuple[str, Planned]], rounds: int, steps: int) -> Iterator[Run]:
    """The plans of a model, run `rounds` times in turn."""
    size = found[0][1].plan.num_devices
    fastest_s, most_bytes = [inf] * len(found), [0.0] * len(found)
    with tempfile.TemporaryDirectory() as folder, WorkerPool(size) as pool:
        jobs = [
            job_of(name, planned, Path(folder) / str(i), steps)
            for i, (_, planned) in enumerate(found)
        ]
        for turn in range(rounds):
            for index, job in enumerate(jobs):
                measured = pool.run(measure_job, job, turn == 0)
                fastest_s[index] = min(fastest_s[index], max(seconds for seconds, _ in measured))
                most_bytes[index] = max(most_bytes[index], *(nbytes for _, nbytes in measured))
            print(f"{name}: round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    for (text, planned), step_s, peak_bytes in zip(found, fastest_s, most_bytes, strict=True):
        yield Run(
            model=name,
            pins=text,
            grid=grid_text(planned.plan),
            predicted_s=planned.plan.prediction.step_s,
            measured_s=step_s,
            predicted_bytes=memory_bytes(planned),
            measured_bytes=peak_bytes,
        )


def job_of(name: str, planned: Planned, folder: Path, steps: int = 1) -> Job:
    """What ranks run a plan of a model as; its program is written to the folder."""
    write_program(planned, folder)
    return Job(
        source=f"{Path(__file__).resolve()}:{name}",
        seq_len=None,
        folder=str(folder),
        dtype="float32",
        samples=planned.plan.training.global_batch,
        steps=steps,
        constants=planned.captured.constants,
    )


def summary(found: Sequence[Run]) -> dict[str, Any]:
    """The figures that the bars are for."""
    steps = [(r.predicted_s, r.measured_s) for r in found]
    models = sorted({r.model for r in found})
    memory = [r.predicted_bytes / r.measured_bytes - 1 for r in found]
    regret = {}
    for name in models:
        own = [r for r in found if r.model == name]
        chosen = [r.measured_s for r in own if r.pins == CHOSEN]
        if chosen:
            regret[name] = chosen[0] / min(r.measured_s for r in own) - 1
    return {
        "plans": len(found),
        "tau": kendall_tau(steps),
        "tau_by_model": {
            name: kendall_tau([(r.predicted_s, r.measured_s) for r in found if r.model == name])
            for name in models
        },
        "step_ratio_deciles": deciles([predicted / measured for predicted, measured in steps]),
        "chosen_over_best": regret,
        "memory_error_deciles": deciles(memory),
        "memory_error_most": max(memory),
        "memory_error_least": min(memory),
        "memory_within": sum(-BELOW <= error <= CLOSE for error in memory) / len(memory),
    }


def text(found: Sequence[Run], figures: Mapping[str, Any]) -> str:
    """A line per plan, then the figures beside their bars."""
    rows = [
        (
            r.model,
            r.grid,
            r.pins if r.pins == CHOSEN else r.pins.partition("tensor=")[2].partition(",")[2],
            f"{1e3 * r.predicted_s:.1f}",
            f"{1e3 * r.measured_s:.1f}",
            f"{r.predicted_s / r.measured_s:.2f}",
            f"{r.predicted_bytes / 2**20:.1f}",
            f"{r.measured_bytes / 2**20:.1f}",
            f"{r.predicted_bytes / r.measured_bytes:.2f}",
        )
        for r in found
    ]
    header = ("model", "grid", "pins", "ms predicted", "measured", "ratio")
    header = (*header, "MiB predicted", "measured ", "ratio ")
    by_model = ", ".join(f"{name} {tau:.2f}" for name, tau in figures["tau_by_model"].items())
    chosen = ", ".join(f"{name} {over:+.1%}" for name, over in figures["chosen_over_best"].items())
    least, largest = figures["memory_error_least"], figures["memory_error_most"]
    return "\n".join(
        [
            columns(header, rows, left=3),
            "",
            f"Kendall's tau of step times over {figures['plans']} plans: {figures['tau']:.3f} "
            f"(bar {TAU}); {by_model}",
            "predicted over measured step time: a tenth, half, nine tenths of the plans are below "
            + ", ".join(f"{ratio:.2f}" for ratio in figures["step_ratio_deciles"]),
            f"chosen plan against the best measured: {chosen} (bar {CLOSE:+.0%})",
            f"peak memory predicted against measured: {least:+.1%} to {largest:+.1%} (bars "
            f"{-BELOW:+.0%} to {CLOSE:+.0%}), {figures['memory_within']:.0%} of plans within",
        ]
    )


def kept(path: Path | None) -> list[Run]:
    """What a run of this before measured."""
    if path is None or not path.exists():
        return []
    return [Run(**run) for run in json.loads(path.read_text(encoding="utf-8"))]


def keep(path: Path | None, found: Sequence[Run]) -> None:
    """Keep what is measured, in case the next model's measurement is cut off."""
    if path is not None:
        write_text(json.dumps(list(map(asdict, found)), indent=1), path)


def main() -> None:
    """Profile, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="local:4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--most", type=int, default=100, help="pin sets of each model to run")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="steps of a plan in each round")
    parser.add_argument("--database", default="build/local.sqlite")
    parser.add_argument("--budget", type=float, help="seconds of profiling for each model")
    parser.add_argument("--keep", type=Path, help="file of the models that were measured before")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cluster, found = measured_cluster(given.cluster), kept(given.keep)
    for name in given.models:
        if any(run.model == name for run in found):
            continue
        captured, options = prepare(name, cluster, given.database, given.budget)
        planned = list(plans(name, captured, cluster, options, given.most))
        found += runs(name, planned, given.rounds, given.steps)
        keep(given.keep, found)
    result = summary(found)
    data = {"runs": list(map(asdict, found)), **result}
    print(json.dumps(data, indent=1) if given.json else text(found, result))


if __name__ == "__main__":
    main()
