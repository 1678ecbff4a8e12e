"""What fits: the fewest devices for a model, the most of a model for the devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from autopar.capture import Captured
from autopar.compiler import PlanOptions, Progress, capture_source, planning_setting
from autopar.costs.clusters import resized
from autopar.costs.memory import reserve_bytes
from autopar.errors import InfeasiblePlan, InputError
from autopar.ir.cluster import Cluster
from autopar.plan.text import amount
from autopar.search.grid import Grid
from autopar.search.least import Least, least_devices, least_excess_bytes
from autopar.search.planner import Planner
from autopar.search.setting import Setting
from autopar.sources import ModelSource, load_source, zoo_sizes

SIZES = ("devices", "micro-batch", "sequence", "layers")

_FARTHEST = 64
"""Nodes that are tried beyond those that the state alone needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One size, whether a plan fits, and what on the fullest device is spare or short.

    Without `proven` none was found, which is not to say that there is none.
    """

    size: int
    what: str
    fits: bool
    proven: bool
    excess_bytes: float | None = None
    grid: Grid | None = None
    why_not: str = ""

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "size": self.size,
            "what": self.what,
            "fits": self.fits,
            "proven": self.proven,
            "excess_bytes": self.excess_bytes,
            "grid": _grid_text(self.grid),
            "why_not": self.why_not or None,
        }

    @property
    def text(self) -> str:
        """`24 layers: fits, ...`."""
        if self.fits:
            spare = amount(-(self.excess_bytes or 0.0))
            return f"{self.what}: fits, as {_grid_text(self.grid)}, {spare} of a device to spare"
        if self.why_not:
            return f"{self.what}: {self.why_not}"
        lacking = amount(ceil(self.excess_bytes or 0.0))
        sure = "does not fit" if self.proven else "no plan was found that fits"
        return f"{self.what}: {sure}, the fullest device lacks {lacking}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The best size that fits, and the next one, which does not; None where there is none such."""

    model: str
    size: str
    best: Tried | None
    next: Tried | None
    tried: tuple[Tried, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "model": self.model,
            "size": self.size,
            "best": self.best and self.best.as_dict(),
            "next": self.next and self.next.as_dict(),
            "tried": [tried.as_dict() for tried in self.tried],
        }

    @property
    def text(self) -> str:
        """The answer, and what shows that it is one."""
        which = "fewest" if self.size == "devices" else "most"
        lines = [f"{self.model}, {which} {self.size}"]
        lines += [f"  {tried.text}" for tried in (self.best, self.next) if tried]
        if self.best is None:
            lines.append("  nothing that was tried fits")
        elif self.next is None:
            lines.append(f"  there is no {'smaller' if self.size == 'devices' else 'larger'} size")
        return "\n".join(lines)


def fit(
    size: str, source: ModelSource, cluster: Cluster, options: PlanOptions, progress: Progress
) -> Fit:
    """The fewest devices of a kind that train a model, or the most of it that a cluster trains.

    `size` is one of `SIZES`. Devices are counted up from what state alone needs, in nodes like the
    cluster's; the other sizes are searched by halves, for a larger one never needs less. Sequences
    and micro-batches go by eighths of a power of two. Raises InputError where autopar cannot choose
    the size.
    """
    asked = _Question(size=size, source=source, options=options, progress=progress, tried=[])
    if size == "devices":
        return asked.fewest_devices(cluster)
    if size == "micro-batch":
        return asked.largest_micro_batch(cluster)
    tokens, most, layers = zoo_sizes(source.spec)
    if size == "layers":
        return asked.largest(_by_ones, layers, None, lambda n: asked.resized_model(cluster, n))
    if tokens is None:
        raise InputError(
            f"sequence of {source.name}: the model has no tokens; expected one that has"
        )
    return asked.largest(_by_eighths, tokens, most, lambda n: asked.resized_model(cluster, n))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    size: str
    source: ModelSource
    options: PlanOptions
    progress: Progress
    tried: list[Tried]

    def fewest_devices(self, cluster: Cluster) -> Fit:
        captured, options = capture_source(self.source, cluster, self.options, self.progress)
        per_node = cluster.groups[0].devices_per_node
        counts = [d for d in range(1, per_node) if per_node % d == 0]
        least = _least_devices(self._planner(captured, cluster, options).setting)
        first = max(1, least // per_node)
        sizes = [resized(cluster, nodes=1, devices_per_node=d) for d in counts]
        sizes += [resized(cluster, nodes=n) for n in range(1, first + _FARTHEST)]
        best = None
        beyond = [part for part in sizes if part.num_devices >= least]
        below = [part for part in sizes if part.num_devices < least]
        for part in below[-1:] + beyond:
            count = part.num_devices
            what = f"{count} device{'s' * (count > 1)} ({part.spec})"
            found = self._try(count, what, partial(_asked, captured, part, options))
            if found.fits:
                best = found
                break
        smaller = [t for t in self.tried if best is None or t.size < best.size]
        return self._answer(best, smaller[-1] if smaller else None)

    def largest_micro_batch(self, cluster: Cluster) -> Fit:
        """With a global batch that grows along unless it is given."""
        captured, options = capture_source(self.source, cluster, self.options, self.progress)
        given = self.options.global_batch

        def sized(count: int) -> _Asked:
            batch = given or count * cluster.num_devices
            pins = (*options.pins, ("micro_batch", str(count)))
            return captured, cluster, replace(options, global_batch=batch, pins=pins)

        return self.largest(_by_eighths, 1, given, sized)

    def resized_model(self, cluster: Cluster, count: int) -> _Asked:
        """The model with so many tokens or layers, captured."""
        sizes = {"seq_len": self.source.seq_len, "layers": None}
        sizes["layers" if self.size == "layers" else "seq_len"] = count
        source = load_source(self.source.spec, **sizes)
        captured, options = capture_source(source, cluster, self.options, self.progress)
        return captured, cluster, options

    def largest(
        self,
        ladder: Callable[[int], int],
        start: int,
        most: int | None,
        make: Callable[[int], _Asked],
    ) -> Fit:
        """The largest size on a ladder that fits: doubled from the start, or halved, then by halves
        between what fits and what does not."""
        step = 0
        while ladder(step) < start:
            step += 1

        def fits(at: int) -> bool:
            count = ladder(at)
            return (most is None or count <= most) and self._try(
                count, f"{count} {_UNITS[self.size]}", lambda: make(count)
            ).fits

        low = high = step
        if fits(step):
            high = _doubled(ladder, low)
            while fits(high):
                low, high = high, _doubled(ladder, high)
        else:
            low = _halved(ladder, high)
            while low < high and not fits(low):
                low, high = _halved(ladder, low), low
            if low == high:
                return self._answer(None, self._at(ladder(high)))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return self._answer(self._at(ladder(low)), self._at(ladder(high)))

    def _at(self, size: int) -> Tried | None:
        return next((tried for tried in self.tried if tried.size == size), None)

    def _answer(self, best: Tried | None, beyond: Tried | None) -> Fit:
        tried = tuple(sorted(self.tried, key=lambda tried: tried.size))
        return Fit(model=self.source.name, size=self.size, best=best, next=beyond, tried=tried)

    def _try(self, size: int, what: str, make: Callable[[], _Asked]) -> Tried:
        self.progress(f"trying {what}", None)
        try:
            least = least_excess_bytes(self._planner(*make()))
            found = _tried(size, what, least)
        except (InputError, InfeasiblePlan) as error:
            if not self.tried and self.size != "devices":
                raise
            found = Tried(size=size, what=what, fits=False, proven=True, why_not=str(error))
        self.tried.append(found)
        return found

    def _planner(self, captured: Captured, cluster: Cluster, options: PlanOptions) -> Planner:
        setting = planning_setting(captured, cluster, options, name=self.source.name)
        return Planner(setting=setting)


_Asked = tuple[Captured, Cluster, PlanOptions]
"""A model, a cluster and options, of one size."""


def _asked(captured: Captured, cluster: Cluster, options: PlanOptions) -> _Asked:
    return captured, cluster, options


_UNITS = {"micro-batch": "samples a micro-batch", "sequence": "tokens", "layers": "layers"}


def _tried(size: int, what: str, least: Least) -> Tried:
    return Tried(
        size=size,
        what=what,
        fits=least.fits,
        proven=least.proven,
        excess_bytes=least.excess_bytes,
        grid=least.grid,
    )


def _least_devices(setting: Setting) -> int:
    """Devices that hold the state of all parameters between them; fewer cannot."""
    least = least_devices(setting)
    if least is None:
        device = setting.cluster.device(0)
        raise InfeasiblePlan(
            f"{device.name}: {amount(setting.memory_bytes(0))} of memory is less than the reserve "
            f"of {amount(reserve_bytes(device))} that every process needs"
        )
    return least


def _by_ones(step: int) -> int:
    return step + 1


def _by_eighths(step: int) -> int:
    """1, 2, .. 16, 18, .. 32, 36, ..: eight sizes from each power of two to the next."""
    if step < 8:
        return step + 1
    power, eighth = divmod(step - 7, 8)
    return (8 + eighth) * 2**power


def _doubled(ladder: Callable[[int], int], step: int) -> int:
    """The first step of a ladder with twice the size."""
    ahead = step + 1
    while ladder(ahead) < 2 * ladder(step):
        ahead += 1
    return ahead


def _halved(ladder: Callable[[int], int], step: int) -> int:
    """The last step of a ladder with half the size; the first step where there is none."""
    behind = step
    while behind > 0 and 2 * ladder(behind) > ladder(step):
        behind -= 1
    return behind


def _grid_text(grid: Grid | None) -> str | None:
    if grid is None:
        return None
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in grid.mesh)
    chunks = f" x chunks {grid.chunks}" if grid.chunks > 1 else ""
    return (
        f"pipeline {grid.pipeline}{chunks} x {mesh}, micro-batch {grid.micro_batch}, "
        f"schedule {grid.schedule}"
    )
