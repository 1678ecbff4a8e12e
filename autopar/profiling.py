"""Profiling a model's plans for the command line: on this machine, into a database."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from autopar.compiler import PlanOptions, load_source, source_setting
from autopar.costs.measure import threads
from autopar.costs.profiles import Machine
from autopar.devices import profile_path, this_machine
from autopar.errors import InputError
from autopar.ir.cluster import Cluster
from autopar.plan.text import plural
from autopar.profiler.database import Database
from autopar.profiler.links import MESSAGES_BYTES, group_requests
from autopar.profiler.ops import needed_ops
from autopar.profiler.optimizers import optimizer_ops
from autopar.profiler.ranks import Torchrun
from autopar.profiler.run import Limits, Outcome, Profiler, Ranks
from autopar.profiler.summary import machine_text
from autopar.runtime.launch import WorkerPool, started_by_torchrun
from autopar.search import Setting

Progress = Callable[[str, float | None], None]

_GIB = 2**30
_SHOWN = 5
_LINK_TIMEOUT_S = 300.0
_START = "not measured; start autopar with torchrun on {} ranks, one for each GPU"


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """What a run of the profiler did. `links` is empty where none were asked for, `note` says why
    none could be measured."""

    machine: Machine
    path: str
    ops: Outcome
    links: Outcome = field(default_factory=Outcome)
    note: str = ""

    @property
    def text(self) -> str:
        """The report for people."""
        lines = [machine_text(self.machine), _line("op", self.ops)]
        lines += [f"  {reason}: {key}" for key, reason in self.ops.reasons[:_SHOWN]]
        if len(self.ops.reasons) > _SHOWN:
            lines.append(f"  and {len(self.ops.reasons) - _SHOWN} more; 'autopar profiles' counts")
        if self.links.wanted:
            lines.append(_line("collective", self.links))
        if self.note:
            lines.append(self.note)
        if self.ops.left or self.links.left:
            lines.append("the budget is spent: run the same command again for the rest")
        return "\n".join([*lines, f"kept in {self.path}"])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "device": self.machine.device,
            "torch": self.machine.torch,
            "output": self.path,
            "ops": _counts(self.ops),
            "links": _counts(self.links),
            "note": self.note,
        }


def _line(noun: str, outcome: Outcome) -> str:
    return (
        f"{plural(outcome.wanted, noun)}: {outcome.measured} measured now, {outcome.known} known "
        f"before, {len(outcome.reasons)} without a time, {outcome.left} left"
    )


def _counts(outcome: Outcome) -> dict[str, Any]:
    return {
        "wanted": outcome.wanted,
        "known": outcome.known,
        "measured": outcome.measured,
        "left": outcome.left,
        "without_time": dict(outcome.reasons),
    }


def limits_for(
    cluster: Cluster,
    size_gib: float | None = None,
    op_s: float = 10.0,
    budget_s: float | None = None,
) -> Limits:
    """The limits asked for; by default ops may take half of a device's memory."""
    half_gib = min(group.device.memory_bytes for group in cluster.groups) / 2 / _GIB
    nbytes = int((half_gib if size_gib is None else size_gib) * _GIB)
    return Limits(nbytes=nbytes, op_s=op_s, budget_s=budget_s)


def profile_model(
    model: str,
    seq_len: int | None,
    cluster: Cluster,
    options: PlanOptions,
    *,
    output: Path | str | None,
    limits: Limits,
    links: bool,
    progress: Progress,
) -> ProfileReport:
    """Measure what plans of a model on a cluster can need and the database does not hold yet.

    Collectives are measured on the local processes of a `local:N` cluster, or by the ranks that
    torchrun started. Raises InputError where the cluster has another device than this machine, and
    KeyboardInterrupt that says how to go on when interrupted (SIGINT or SIGTERM).
    """
    machine = this_machine()
    _check_device(machine, cluster)
    path = Path(output) if output else profile_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot make its folder: {error.strerror}") from None
    setting = source_setting(load_source(model, seq_len=seq_len), cluster, options, progress)
    device = torch.device(machine.kind)
    # ops of a CPU are measured as its workers run them: on one thread each
    with threads(1), _interruptible(path), _ranks(cluster, machine, links) as ranks:
        if isinstance(ranks, Torchrun) and not ranks.leads:
            ranks.follow()
            return ProfileReport(machine=machine, path=str(path), ops=Outcome())
        with Database(path, machine) as database:
            profiler = Profiler(database=database, limits=limits, progress=progress)
            ops = _ops(profiler, setting, device)
            _optimizer(profiler, ranks, setting, device)
            found = _links(profiler, ranks, cluster, device)
    unasked = not links or ranks is not None or cluster.num_devices == 1
    note = "" if unasked else f"collectives: {_START.format(cluster.num_devices)}"
    return ProfileReport(machine=machine, path=str(path), ops=ops, links=found, note=note)


def _ops(profiler: Profiler, setting: Setting, device: torch.device) -> Outcome:
    spec = setting.cluster.device(0)
    return profiler.ops(needed_ops(setting, profiler.progress), spec, device)


def _optimizer(
    profiler: Profiler, ranks: Ranks | None, setting: Setting, device: torch.device
) -> None:
    if ranks is not None and device.type == "cpu":
        profiler.optimizer(optimizer_ops(setting), ranks, device)


def _links(
    profiler: Profiler, ranks: Ranks | None, cluster: Cluster, device: torch.device
) -> Outcome:
    if ranks is None or cluster.num_devices == 1:
        return Outcome()
    return profiler.links(group_requests(cluster, MESSAGES_BYTES[device.type]), ranks, device)


def _check_device(machine: Machine, cluster: Cluster) -> None:
    names = {group.device.name for group in cluster.groups}
    if machine.row not in names:
        raise InputError(
            f"--cluster {cluster.spec}: has {', '.join(sorted(names))}, this machine has "
            f"{machine.row} ({machine.device}); run autopar profile on one of the cluster's devices"
        )


@contextmanager
def _ranks(cluster: Cluster, machine: Machine, wanted: bool) -> Iterator[Ranks | None]:
    """The processes that measure collectives; None where there are none."""
    if not wanted:
        yield None
    elif started_by_torchrun():
        with Torchrun(cluster.num_devices) as ranks:
            yield ranks
    elif machine.kind == "cpu":
        with WorkerPool(cluster.num_devices, timeout_s=_LINK_TIMEOUT_S) as pool:
            yield pool
    else:
        yield None


@contextmanager
def _interruptible(path: Path) -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does; either way the message says how to go on."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; what was measured is kept in {path}: run the same command again to go on"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
