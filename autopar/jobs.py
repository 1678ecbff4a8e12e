"""What local worker processes run for the command line: verify and train."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputError
from autopar.runtime.deferred import InitTape, deferred_init
from autopar.runtime.load import load_program
from autopar.runtime.optim import OPTIMIZERS
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.verify import RankReport, compare
from autopar.sources import Batch, LossFn, cast_batch, load_source


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A program to run on every rank, by names that any process can load again."""

    source: str
    seq_len: int | None
    folder: str
    dtype: str
    samples: int | None
    optimizer: str = "adamw"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    steps: int = 3
    seed: int = 0
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The torch.optim class of a lower-case name. Raises InputError listing the names."""
    if name not in OPTIMIZERS:
        raise InputError(f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def build(job: Job) -> tuple[nn.Module, Batch, LossFn | None]:
    """The job's model with real weights, the same in every process, and its batch."""
    torch.manual_seed(job.seed)
    source = load_source(job.source, seq_len=job.seq_len)
    dtype = getattr(torch, job.dtype)
    model, batch, loss_fn = source.build(device="cpu", dtype=dtype, samples=job.samples)
    return model.train(), batch, loss_fn


def verify_job(job: Job) -> RankReport:
    """Train the program and the eager model side by side on this rank."""
    model, batch, loss_fn = build(job)
    cls = optimizer_class(job.optimizer)
    parallel = ParallelModel(
        load_program(job.folder),
        model,
        optimizer=(cls, dict(job.optimizer_kwargs)),
        seed=job.seed,
        constants=job.constants,
    )
    report = compare(
        parallel,
        model,
        batch,
        loss_fn=loss_fn,
        make_optimizer=lambda parameters: cls(parameters, **job.optimizer_kwargs),
        steps=job.steps,
        seed=job.seed,
    )
    parallel.world.close()
    return report


def build_empty(job: Job) -> tuple[nn.Module, Batch, InitTape | None]:
    """The job's model without its weights where the source can make a batch alone, and the batch.

    Each rank then makes only the weights it holds, one at a time, from the recorded initialisation.
    """
    source = load_source(job.source, seq_len=job.seq_len)
    dtype = getattr(torch, job.dtype)
    if source.make_batch is None:
        model, batch, _ = build(job)
        return model, batch, None
    with deferred_init() as tape:
        model, _, _ = source.build(device="cpu", dtype=dtype, samples=1)
    return model.train(), cast_batch(source.make_batch(job.samples), dtype), tape


def train_job(job: Job) -> list[tuple[float, float]]:
    """(loss, seconds) of every step of the program on the job's batch."""
    model, batch, tape = build_empty(job)
    parallel = ParallelModel(
        load_program(job.folder),
        model,
        optimizer=(optimizer_class(job.optimizer), dict(job.optimizer_kwargs)),
        seed=job.seed,
        tape=tape,
        constants=job.constants,
    )
    results = []
    for _ in range(job.steps):
        dist.barrier()
        start = time.perf_counter()
        loss = float(parallel.train_step(batch))
        dist.barrier()
        results.append((loss, time.perf_counter() - start))
    parallel.world.close()
    return results
