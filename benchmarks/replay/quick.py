"""Step times of many runs for any constants, all at once.

The plans are fixed, so every op and collective of every run is listed once; new constants give new
seconds for the list, and the runs add them up. What a schedule makes of the stages is kept as the
ratio that the simulation gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.costs.attention import FUSED, attention_kernel, is_attention
from autopar.costs.calibration import EfficiencyCurve
from autopar.costs.collectives import Route
from autopar.costs.compute import REFERENCE_DIM, VECTOR_EFFICIENCY
from autopar.costs.execution import HOST_COLLECTIVE
from autopar.costs.flops import attention_contractions, contraction, op_flops
from autopar.costs.local_op import LocalOp
from autopar.costs.traffic import op_traffic
from autopar.ir.cluster import DeviceSpec, LinkLevel
from replay.terms import BlockTerms, Collective, PlanTerms

Array = NDArray[np.float64]
PASSES = ("forward", "backward", "again", "gather", "gather_again", "sync", "early")
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
    host_s: float
    terms: PlanTerms
    weights: tuple[float, float]


@dataclass
class Quick:
    """The step times of runs on one kind of device."""

    runs: Sequence[Run]
    _ops: dict[tuple[LocalOp, int], int] = field(default_factory=dict)
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
                    self._tables[name].add(index, *self._index(item), count)
        for own, send, back in zip(
            run.terms.stages, run.terms.send, run.terms.send_back, strict=True
        ):
            stage = self._num_stages
            self._num_stages += 1
            self._of_run.append(number)
            for block_index, count in own:
                self._stages.append((stage, first + block_index, number, count))
            for item, count in (*send, *back):
                self._messages.add(stage, *self._index(item), count)

    def _index(self, item: Any) -> tuple[int, int]:
        if isinstance(item, Collective):
            return 1, self._moves.setdefault(item, len(self._moves))
        return 0, self._ops.setdefault(item, len(self._ops))

    def step_s(self, constants: Constants) -> Array:
        """Seconds of a step of every run."""
        return self._raw(constants) * self._ratio

    def _raw(self, c: Constants) -> Array:
        ops = _op_seconds(self._op_arrays, c)
        moves = np.array([_seconds(move, c) for move in self._moves])
        kernels, ones = self._op_arrays["kernels"], np.full(len(moves), float(HOST_COLLECTIVE))
        host_s = np.array([self.runs[number].host_s for number, _ in self._blocks])
        count = len(self._blocks)
        total, compute, floor = {}, {}, {}
        for name, table in self._tables.items():
            compute[name] = table.sum(count, 0, ops)
            total[name] = compute[name] + table.sum(count, 1, moves)
            floor[name] = host_s * (table.sum(count, 0, kernels) + table.sum(count, 1, ones))
        cold = np.array([block.cold for _, block in self._blocks])
        hides = (1 - cold) * c.hidden
        forward = np.maximum(total["forward"], floor["forward"])
        work = compute["backward"] + compute["again"]
        backward = np.maximum(total["backward"], floor["backward"]) + total["again"]
        forward += total["gather"] - hides * np.minimum(total["gather"], compute["forward"])
        again = total["gather_again"]
        backward += again - hides * np.minimum(again, work)
        early = total["early"]
        left = np.maximum(0.0, work - again)
        tail = total["sync"] + early - hides * np.minimum(early, left)
        device = self.runs[0].device
        moved = np.array([block.optimizer_bytes for _, block in self._blocks])
        bandwidth = device.memory_bandwidth_bytes_s * c.memory
        tail += moved / bandwidth
        backward += np.array([block.sum_bytes for _, block in self._blocks]) / bandwidth
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
            ranks = run.terms.grid.pipeline
            at_end = max(ends[k::ranks].sum() for k in range(min(ranks, len(ends))))
            found[number] = share * (times.sum() + sends.sum()) + longest * times.max() + at_end
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


def _op_arrays(ops: Sequence[tuple[LocalOp, int]], device: DeviceSpec) -> Mapping[str, Array]:
    rows = [_op_row(op, direction, device) for op, direction in ops]
    names = ("kind", "work", "nbytes", "kernels", "single", "m", "n", "k", "peak")
    found = {
        name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    found["bandwidth"] = np.array(device.memory_bandwidth_bytes_s)
    found["launch"] = np.array(device.kernel_launch_s)
    found["best"] = np.array(device.matmul_efficiency)
    return found


def _op_row(op: LocalOp, direction: int, device: DeviceSpec) -> tuple[float, ...]:
    flops, traffic = op_flops(op), op_traffic(op, device.kind)
    work = (flops.forward_flops, flops.backward_flops)[direction]
    nbytes = (traffic.forward_bytes, traffic.backward_bytes)[direction]
    kernels = (traffic.forward_kernels, traffic.backward_kernels)[direction]
    if direction and not op.requires_grad:
        work = nbytes = kernels = 0
    if not kernels and not nbytes:
        work = 0
    if is_attention(op.name):
        kernel = attention_kernel(op, op.input_shapes[:3], op.input_dtypes[0], device.kind)
        peak = device.flops(op.input_dtypes[0])
        if kernel == FUSED:
            return (_ATTENTION, work, nbytes, kernels, flops.forward_flops, 1, 1, 1, peak)
        part = attention_contractions(op)[0]
        return (_MATMUL, work, nbytes, kernels, part.flops, part.m, part.n, part.k, peak)
    if product := contraction(op):
        peak = device.flops(op.output_dtypes[0])
        m = product.m / product.groups
        return (_MATMUL, work, nbytes, kernels, product.flops, m, product.n, product.k, peak)
    peak = device.flops("float32") * VECTOR_EFFICIENCY
    return (_OTHER, work, nbytes, kernels, 1, 1, 1, 1, peak)


def _op_seconds(a: Mapping[str, Array], c: Constants) -> Array:
    h = c.half_dim
    cube = (REFERENCE_DIM / (REFERENCE_DIM + h)) ** 3
    shape = a["m"] / (a["m"] + h) * a["n"] / (a["n"] + h) * a["k"] / (a["k"] + h) / cube
    best = np.minimum(1.0, a["best"] * c.sustained * shape)
    best = np.where(a["kind"] == _ATTENTION, c.attention, best)
    best = np.where(a["kind"] == _OTHER, 1.0, best)
    ramp = np.where(a["kind"] == _OTHER, 0.0, c.ramp_s * a["work"] / np.maximum(a["single"], 1))
    compute = a["work"] / (a["peak"] * best) + ramp
    memory = a["nbytes"] / (a["bandwidth"] * c.memory)
    return np.maximum(compute, memory) + a["kernels"] * a["launch"]


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
