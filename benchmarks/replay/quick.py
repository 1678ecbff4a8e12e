"""Step times of many runs for any constants, all at once.

The plans are fixed, so every op and collective of every run is listed once; new constants give new
seconds for the list, and the runs add them up. What a schedule makes of the stages is kept as the
ratio that the simulation gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.costs.attention import FUSED, attention_kernel, is_attention
from autopar.costs.calibration import EfficiencyCurve
from autopar.costs.collectives import Route
from autopar.costs.compute import REFERENCE_DIM, VECTOR_EFFICIENCY
from autopar.costs.execution import HOST_COLLECTIVE, Execution
from autopar.costs.flops import attention_contractions, contraction, op_flops
from autopar.costs.local_op import LocalOp
from autopar.costs.narrow import cast_traffic, is_linear
from autopar.costs.traffic import FREE, Traffic, op_traffic
from autopar.ir.cluster import DeviceSpec, LinkLevel
from replay.terms import BlockTerms, Collective, PlanTerms

Array = NDArray[np.float64]
PASSES = (
    "forward",
    "backward",
    "again",
    "beside",
    "beside_back",
    "gather",
    "gather_again",
    "reduce",
    "sync",
    "early",
)
_MATMUL, _ATTENTION, _OTHER = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What is fitted for one device: `EfficiencyCurve`, and shares of what links reach."""

    half_dim: float
    ramp_s: float
    memory: float
    sustained: float
    attention: float
    hidden: float
    narrow: float
    node: float = 1.0
    network: float = 1.0

    @staticmethod
    def of(curve: EfficiencyCurve) -> Constants:
        """Those that a device has now."""
        return Constants(**{f.name: getattr(curve, f.name) for f in fields(EfficiencyCurve)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of known plan: what it was measured at, and what the planner predicts with `base`."""

    key: str
    source: str
    measured_s: float
    predicted_s: float
    base: Constants
    device: DeviceSpec
    execution: Execution
    product_dtype: str
    terms: PlanTerms
    weights: tuple[float, float]


class _Op(NamedTuple):
    """An op in one pass, as a run runs it."""

    op: LocalOp
    direction: int
    attention: float
    product_dtype: str


@dataclass
class Quick:
    """The step times of runs on one kind of device."""

    runs: Sequence[Run]
    _ops: dict[_Op, int] = field(default_factory=dict)
    _moves: dict[Collective, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tables = {name: _Table() for name in PASSES}
        self._messages = _Table()
        self._blocks: list[tuple[int, BlockTerms]] = []
        self._stages: list[tuple[int, int, int, float]] = []
        self._num_stages = 0
        self._of_run: list[int] = []
        for number, run in enumerate(self.runs):
            self._add(number, run)
        self._op_arrays = _op_arrays(list(self._ops), self.runs[0].device)
        bases = {run.base for run in self.runs}
        raw = {base: self._raw(base) for base in bases}
        self._ratio = np.array(
            [run.predicted_s / raw[run.base][i] for i, run in enumerate(self.runs)]
        )

    def _add(self, number: int, run: Run) -> None:
        first = len(self._blocks)
        for block in run.terms.blocks:
            index = len(self._blocks)
            self._blocks.append((number, block))
            for name in PASSES:
                for item, count in getattr(block, name):
                    self._tables[name].add(index, *self._index(item, run), count)
        for own, send, back in zip(
            run.terms.stages, run.terms.send, run.terms.send_back, strict=True
        ):
            stage = self._num_stages
            self._num_stages += 1
            self._of_run.append(number)
            for block_index, count in own:
                self._stages.append((stage, first + block_index, number, count))
            for item, count in (*send, *back):
                self._messages.add(stage, *self._index(item, run), count)

    def _index(self, item: Any, run: Run) -> tuple[int, int]:
        if isinstance(item, Collective):
            return 1, self._moves.setdefault(item, len(self._moves))
        op, direction = item
        fused = run.execution.attention if is_attention(op.name) else 1.0
        key = _Op(op, direction, fused, run.product_dtype if is_linear(op) else "")
        return 0, self._ops.setdefault(key, len(self._ops))

    def step_s(self, constants: Constants) -> Array:
        """Seconds of a step of every run."""
        return self._raw(constants) * self._ratio

    def _raw(self, c: Constants) -> Array:
        ops = _op_seconds(self._op_arrays, c)
        moves = np.array([_seconds(move, c) for move in self._moves])
        kernels, ones = self._op_arrays["kernels"], np.full(len(moves), float(HOST_COLLECTIVE))
        host_s = np.array([self.runs[number].execution.host_s for number, _ in self._blocks])
        count = len(self._blocks)
        total, compute, floor = {}, {}, {}
        for name, table in self._tables.items():
            compute[name] = table.sum(count, 0, ops)
            total[name] = compute[name] + table.sum(count, 1, moves)
            floor[name] = host_s * (table.sum(count, 0, kernels) + table.sum(count, 1, ones))
        cold = np.array([block.cold for _, block in self._blocks])
        hides = (1 - cold) * c.hidden
        tensor = np.array(
            [
                run.execution.hides_tensor * (1 - 1 / run.terms.grid.tensor)
                for run in (self.runs[number] for number, _ in self._blocks)
            ]
        )
        for name, other in (("beside", "forward"), ("beside_back", "backward")):
            total[other] -= c.hidden * tensor * np.minimum(total[name], compute[other])
        forward = np.maximum(total["forward"], floor["forward"])
        work = compute["backward"] + compute["again"]
        backward = np.maximum(total["backward"], floor["backward"]) + total["again"]
        forward += total["gather"] - hides * np.minimum(total["gather"], compute["forward"])
        beside = total["gather_again"] + total["reduce"]
        backward += beside - hides * np.minimum(beside, work)
        early = total["early"]
        left = np.maximum(0.0, work - total["gather_again"])
        tail = total["sync"] + early - hides * np.minimum(early, left)
        rate = self.runs[0].device.memory_bandwidth_bytes_s * c.memory
        backward += np.array([block.sum_bytes for _, block in self._blocks]) / rate
        tail += np.array([block.optimizer_bytes for _, block in self._blocks]) / rate
        return self._together(
            forward + backward, tail, self._messages.sum(self._num_stages, 1, moves)
        )

    def _together(self, work: Array, tail: Array, messages: Array) -> Array:
        stage, block, _, counts = (np.array(x) for x in zip(*self._stages, strict=True))
        busy = np.bincount(stage, work[block] * counts, self._num_stages)
        late = np.bincount(stage, tail[block] * counts, self._num_stages)
        found = np.zeros(len(self.runs))
        of_run = np.array(self._of_run)
        for number, run in enumerate(self.runs):
            own = of_run == number
            times, ends, sends = busy[own], late[own], messages[own]
            share, longest = run.weights
            # a rank runs one stage of every chunk, and is done with all of them before it ends
            rank = np.array(run.terms.grid.pipe.placement)
            slowest, at_end = (np.bincount(rank, seconds).max() for seconds in (times, ends))
            found[number] = share * (times.sum() + sends.sum()) + longest * slowest + at_end
        return found


class _Table:
    """Counts of items by owner, of ops and of collectives apart."""

    def __init__(self) -> None:
        self._rows: tuple[list[tuple[int, int, float]], ...] = ([], [])

    def add(self, owner: int, kind: int, item: int, count: float) -> None:
        self._rows[kind].append((owner, item, count))

    def sum(self, owners: int, kind: int, seconds: Array) -> Array:
        if not self._rows[kind]:
            return np.zeros(owners)
        owner, item, count = (np.array(x) for x in zip(*self._rows[kind], strict=True))
        return np.bincount(owner, seconds[item] * count, owners).astype(np.float64)


_COLUMNS = (
    "kind",
    "work",
    "nbytes",
    "kernels",
    "single",
    "m",
    "n",
    "k",
    "peak",
    "attention",
    "narrow",
    "extra_bytes",
)


def _op_arrays(ops: Sequence[_Op], device: DeviceSpec) -> Mapping[str, Array]:
    rows = [_op_row(op, device) for op in ops]
    found = {
        name: np.array(column)
        for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
    }
    found["bandwidth"] = np.array(device.memory_bandwidth_bytes_s)
    found["launch"] = np.array(device.kernel_launch_s)
    found["best"] = np.array(device.matmul_efficiency)
    return found


def _op_row(item: _Op, device: DeviceSpec) -> tuple[float, ...]:
    op, direction = item.op, item.direction
    flops, traffic = op_flops(op), op_traffic(op, device.kind)
    casts = cast_traffic(op) if item.product_dtype else FREE
    work = (flops.forward_flops, flops.backward_flops)[direction]
    nbytes, kernels = _moved(traffic, direction)
    extra_bytes, extra_kernels = _moved(casts, direction)
    if direction and not op.requires_grad:
        work = nbytes = kernels = extra_bytes = extra_kernels = 0
    if not kernels and not nbytes:
        work = 0
    kind, single, dims = _OTHER, 1.0, (1.0, 1.0, 1.0)
    peak = device.flops("float32") * VECTOR_EFFICIENCY
    if is_attention(op.name):
        peak = device.flops(op.input_dtypes[0])
        kernel = attention_kernel(op, op.input_shapes[:3], op.input_dtypes[0], device.kind)
        part = attention_contractions(op)[0]
        kind, single, dims = _MATMUL, part.flops, (part.m, part.n, part.k)
        if kernel == FUSED:
            kind, single, dims = _ATTENTION, flops.forward_flops, (1.0, 1.0, 1.0)
    elif product := contraction(op):
        peak = device.flops(item.product_dtype or op.output_dtypes[0])
        kind, single = _MATMUL, product.flops
        dims = (product.m / product.groups, product.n, product.k)
    total = kernels + extra_kernels
    return (
        kind,
        work,
        nbytes,
        total,
        single,
        *dims,
        peak,
        item.attention,
        bool(item.product_dtype),
        extra_bytes,
    )


def _moved(traffic: Traffic, direction: int) -> tuple[int, int]:
    if direction:
        return traffic.backward_bytes, traffic.backward_kernels
    return traffic.forward_bytes, traffic.forward_kernels


def _op_seconds(a: Mapping[str, Array], c: Constants) -> Array:
    h = c.half_dim
    cube = (REFERENCE_DIM / (REFERENCE_DIM + h)) ** 3
    shape = a["m"] / (a["m"] + h) * a["n"] / (a["n"] + h) * a["k"] / (a["k"] + h) / cube
    best = np.minimum(1.0, a["best"] * c.sustained * shape)
    best = best * np.where(a["narrow"], c.narrow, 1.0)
    best = np.where(a["kind"] == _ATTENTION, a["attention"] * c.attention, best)
    best = np.where(a["kind"] == _OTHER, 1.0, best)
    ramp = np.where(a["kind"] == _OTHER, 0.0, c.ramp_s * a["work"] / np.maximum(a["single"], 1))
    compute = a["work"] / (a["peak"] * best) + ramp
    rate = a["bandwidth"] * c.memory
    launches = a["kernels"] * a["launch"]
    return np.maximum(compute, a["nbytes"] / rate) + a["extra_bytes"] / rate + launches


def _seconds(move: Collective, c: Constants) -> float:
    return max(_route(r, c).time_s(move.op, move.nbytes) for r in move.routes)


def _route(route: Route, c: Constants) -> Route:
    def changed(link: LinkLevel) -> LinkLevel:
        node = link.name == "node"
        return replace(
            link,
            bandwidth_bytes_s=link.bandwidth_bytes_s * (c.node if node else c.network),
        )

    return Route(
        flat=replace(route.flat, link=changed(route.flat.link)),
        levels=tuple(replace(hop, link=changed(hop.link)) for hop in route.levels),
        neighbour=changed(route.neighbour),
    )
