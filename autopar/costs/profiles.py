"""Measured times of ops and collectives, which go before the analytic model.

A `Profile` holds what `autopar.profiler` measured on one kind of machine. It answers for the shapes
that were measured, and between them by `costs.interpolation`; for everything else it has no answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from autopar.costs.families import extents, family, work
from autopar.costs.interpolation import Sample, interpolate
from autopar.costs.local_op import LocalOp
from autopar.errors import InputError
from autopar.ir.collective import CollectiveOp


class TimeSource(StrEnum):
    """Where the time of an op is from; a `free` one moves nothing."""

    FREE = "free"
    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    MODELLED = "modelled"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Machine:
    """What measurements hold for.

    `device` is what the device calls itself, `row` its name in the table of devices, `kind` torch's
    device type. `cores` are those that the processes of a CPU share; 0 for an accelerator.
    """

    device: str
    row: str
    kind: str
    driver: str
    torch: str
    cores: int = 0


def rounded(value: float) -> float:
    """Nine digits, which every form that a profile is kept in holds exactly."""
    return float(f"{value:.9g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The median of `count` runs, and the median distance from it."""

    median_s: float
    spread_s: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRecord:
    """One op on one set of local shapes (`LocalOp.key`): its times, or the `reason` it has none."""

    key: str
    family: str
    extents: tuple[int, ...]
    work: float
    forward: Timing | None = None
    backward: Timing | None = None
    reason: str = ""

    @staticmethod
    def of(
        op: LocalOp,
        forward: Timing | None = None,
        backward: Timing | None = None,
        *,
        reason: str = "",
    ) -> OpRecord:
        """The record of an op."""
        return OpRecord(
            key=op.key,
            family=family(op),
            extents=extents(op),
            work=rounded(work(op)),
            forward=forward,
            backward=backward,
            reason=reason,
        )

    @property
    def times_s(self) -> tuple[float, float]:
        """Median seconds of forward and backward; 0 for a pass that was not measured."""
        passes = (self.forward, self.backward)
        return tuple(0.0 if timing is None else timing.median_s for timing in passes)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class LinkKey:
    """A collective on `nbytes` (as `ir.collective.Collective` counts them) over a group of `ranks`.

    `level` is the slowest level of links the group needs; `packed` of its ranks at a time share the
    next faster one, 1 where each is by itself.
    """

    op: CollectiveOp
    ranks: int
    level: str
    packed: int
    nbytes: int


def wait_key(ranks: int, level: str, packed: int) -> LinkKey:
    """What ranks that come to a collective from compute wait for each other is kept as that of a
    collective of nothing."""
    op = CollectiveOp.ALL_REDUCE
    return LinkKey(op=op, ranks=ranks, level=level, packed=packed, nbytes=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRecord:
    """One collective: its time, or the `reason` it has none."""

    key: LinkKey
    time: Timing | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Times measured on one kind of machine, by `LocalOp.key` and by `LinkKey`.

    `slowdown` multiplies times of ops: where more processes than cores share a CPU, each gets a
    part of the core that it was measured on.
    """

    machine: Machine
    ops: Mapping[str, OpRecord] = field(default_factory=dict)
    links: Mapping[LinkKey, LinkRecord] = field(default_factory=dict)
    slowdown: float = 1.0

    def lookup(self, op: LocalOp) -> tuple[float, float, TimeSource] | None:
        """Forward and backward seconds, measured or interpolated; None where neither can be, nor
        for a part of a fused kernel: ops are measured one by one."""
        if op.fused_inputs or op.fused_output:
            return None
        record = self.ops.get(op.key)
        if record is not None and record.forward is not None:
            found: Sequence[float] = record.times_s
            source = TimeSource.MEASURED
        else:
            between = interpolate(self._families.get(family(op), ()), extents(op), work(op))
            if between is None:
                return None
            found, source = between, TimeSource.INTERPOLATED
        return self.slowdown * found[0], self.slowdown * found[1], source

    def link_s(
        self, op: CollectiveOp, nbytes: float, ranks: int, level: str, packed: int
    ) -> float | None:
        """Seconds of a collective, between the nearest measured sizes of message; None where none
        is near. The smallest message stands for all that are smaller."""
        samples = self._messages.get((op, ranks, level, packed))
        if not samples:
            return None
        size = max(nbytes, samples[0].work)
        found = interpolate(samples, (int(size),), size)
        return None if found is None else found[0]

    def wait_s(self, ranks: int, level: str, packed: int) -> float:
        """Seconds that the ranks of a group wait for each other where they come to a collective
        from compute; 0 where that was not measured."""
        record = self.links.get(wait_key(ranks, level, packed))
        return 0.0 if record is None or record.time is None else record.time.median_s

    def reason(self, op: LocalOp) -> str:
        """Why an op was not measured; empty where nobody tried."""
        record = self.ops.get(op.key)
        return "" if record is None else record.reason

    def merged(self, other: Profile) -> Profile:
        """Both tables. Of two records of one thing a measured one wins, then that of more runs,
        then `other`'s. Raises InputError where they are of different machines."""
        for name in ("device", "driver", "torch", "cores"):
            ours, theirs = getattr(self.machine, name), getattr(other.machine, name)
            if ours != theirs:
                raise InputError(
                    f"profiles of different machines: {name} {ours!r} and {theirs!r}; "
                    "times of one do not hold for the other, so keep them in separate files"
                )
        ops = dict(self.ops)
        for key, record in other.ops.items():
            if key not in ops or _runs(record.forward) >= _runs(ops[key].forward):
                ops[key] = record
        links = dict(self.links)
        for link, found in other.links.items():
            if link not in links or _runs(found.time) >= _runs(links[link].time):
                links[link] = found
        return Profile(machine=self.machine, ops=ops, links=links)

    @cached_property
    def _families(self) -> Mapping[str, tuple[Sample, ...]]:
        """The measured ops of every family."""
        found: dict[str, list[Sample]] = {}
        for _, record in sorted(self.ops.items()):
            if record.forward is not None:
                sample = Sample(extents=record.extents, work=record.work, times_s=record.times_s)
                found.setdefault(record.family, []).append(sample)
        return {name: tuple(samples) for name, samples in found.items()}

    @cached_property
    def _messages(self) -> Mapping[tuple[CollectiveOp, int, str, int], tuple[Sample, ...]]:
        """The measured messages of every kind of group, smallest first."""
        found: dict[tuple[CollectiveOp, int, str, int], list[Sample]] = {}
        for key, record in sorted(self.links.items()):
            if record.time is not None and key.nbytes:
                sample = Sample(
                    extents=(key.nbytes,),
                    work=float(key.nbytes),
                    times_s=(record.time.median_s,),
                )
                found.setdefault((key.op, key.ranks, key.level, key.packed), []).append(sample)
        return {group: tuple(samples) for group, samples in found.items()}


def _runs(timing: Timing | None) -> int:
    return 0 if timing is None else timing.count
