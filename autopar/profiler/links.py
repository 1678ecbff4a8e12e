"""Times of collectives and sends over the groups that a cluster's meshes can have."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.costs.collectives import RING_PASSES, axis_route
from autopar.costs.profiles import LinkKey, LinkRecord, Timing, wait_key
from autopar.ir.cluster import Axis, Cluster
from autopar.ir.collective import CollectiveOp
from autopar.profiler.between import OtherOps
from autopar.profiler.timing import timing_of
from autopar.runtime import primitives
from autopar.runtime.axes import AxisGroup
from autopar.runtime.groups import end_groups
from autopar.runtime.recorder import Recorder

Run = Callable[[], object]

MESSAGES_BYTES: dict[str, tuple[int, ...]] = {
    "cpu": tuple(4**k for k in range(5, 14)),
    "cuda": tuple(4**k for k in range(5, 16)),
}
"""Sizes of message to measure by device type: 1 KiB to 64 MiB, or to 1 GiB."""

_SAMPLES, _MOST_LOOPS, _ENOUGH_S = 12, 50, 0.02
_ENOUGH_BETWEEN_S = 0.05
"""Seconds of a sample between computing, in which ranks get hold of cores as luck has it."""
_SEGMENTS = 2
"""Runs of other ops before a collective that ranks come to from compute: about 2 ms of a core."""
_DISTURBED = 3
"""Of this many samples on a CPU one counts, the fastest: others use its cores too, and a wait is
not known from what they take."""
_WIDTH = 4
"""Bytes of a float32, the elements of every message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """Collectives to measure over the groups of `size` ranks that are `stride` apart, all groups
    at once, as in a step."""

    size: int
    stride: int
    keys: tuple[LinkKey, ...]


def group_requests(cluster: Cluster, messages: Sequence[int]) -> tuple[GroupRequest, ...]:
    """Every kind of group that an axis of a mesh on the cluster can have, once.

    Groups are of a kind if they have the same size and the same route: the slowest level of links,
    and how many ranks at a time share faster ones. Sends are between two ranks.
    """
    devices, found = cluster.num_devices, dict[tuple[object, ...], GroupRequest]()
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    waits = any(group.device.kind == "cpu" for group in cluster.groups)
    for size, stride in ((s, t) for s in sizes for t in range(1, devices // s + 1)):
        if devices // size % stride:
            continue
        group = axis_route(Axis(name="", size=size, stride=stride), cluster).group
        keys = [wait_key(*group)] if waits else []
        keys += _keys(RING_PASSES, group, messages)
        request = GroupRequest(size=size, stride=stride, keys=tuple(keys))
        found.setdefault(("group", *group), request)
    for stride in range(1, devices):
        name = cluster.link((0, stride)).name
        keys = _keys([CollectiveOp.SEND_RECV], (2, name, 1), messages)
        found.setdefault(("send", name), GroupRequest(size=2, stride=stride, keys=tuple(keys)))
    return tuple(found.values())


def _keys(
    ops: Iterable[CollectiveOp], group: tuple[int, str, int], messages: Sequence[int]
) -> list[LinkKey]:
    ranks, level, packed = group
    return [
        LinkKey(op=op, ranks=ranks, level=level, packed=packed, nbytes=nbytes)
        for op in ops
        for nbytes in messages
    ]


def measure_group(request: GroupRequest, device: torch.device, limit_s: float) -> list[LinkRecord]:
    """The records of a request. Every rank calls it alike; all get the same.

    A time is that of the slowest rank. After a message that takes longer than `limit_s`, larger
    ones of the same collective are not sent. A send is timed as it is met, between computing; so is
    what ranks wait for each other, of which the time of a smallest collective is no part.
    """
    groups = list(_groups(request, dist.get_world_size()))
    made = [dist.new_group(list(ranks)) for ranks in groups]
    me = dist.get_rank()
    own = next((i for i, ranks in enumerate(groups) if me in ranks), None)
    axis = None
    if own is not None:
        ranks = groups[own]
        axis = AxisGroup(
            axes=("profiled",),
            ranks=ranks,
            rank=ranks.index(me),
            recorder=Recorder(),
            group=made[own],
        )
    records = list(_measured(request, axis, device, limit_s))
    end_groups(made)
    return records


def _groups(request: GroupRequest, world: int) -> Iterator[tuple[int, ...]]:
    """The ranks of every group; each rank is in one at most."""
    span = request.size * request.stride
    for start in range(0, world - span + 1, span):
        for offset in range(request.stride):
            yield tuple(start + offset + i * request.stride for i in range(request.size))
    if span > world:  # a send farther than half of the ranks
        yield (0, request.stride)


def _measured(
    request: GroupRequest, axis: AxisGroup | None, device: torch.device, limit_s: float
) -> Iterator[LinkRecord]:
    slow: set[CollectiveOp] = set()
    for key in request.keys:
        if key.op in slow:
            yield LinkRecord(key=key, reason=f"a smaller message takes over {limit_s:g} s")
            continue
        run = _RUNS[key.op](key.nbytes, axis, device) if axis is not None else _nothing
        time = _timing(key, run, device, limit_s)
        yield LinkRecord(key=key, time=time)
        if time.median_s > limit_s:
            slow.add(key.op)


def _timing(key: LinkKey, run: Run, device: torch.device, limit_s: float) -> Timing:
    """What a collective takes; a send goes there and back."""
    alone_s, sends = _seconds(run, device, limit_s), key.op is CollectiveOp.SEND_RECV
    if not key.nbytes:
        return timing_of(_between_s(run, device), median(alone_s))
    seconds = _between_s(run, device) if sends and device.type == "cpu" else alone_s
    return timing_of([sample_s / (2 if sends else 1) for sample_s in seconds])


def _seconds(run: Run, device: torch.device, limit_s: float = inf) -> list[float]:
    """Seconds of a run on the slowest rank: those samples that count."""
    first_s, loops = _warmed(run, device, _ENOUGH_S)
    samples = _SAMPLES if first_s < limit_s else 1
    seconds = [_slowest(run, loops, device) for _ in range(samples)]
    return sorted(seconds)[: ceil(samples / _DISTURBED)] if device.type == "cpu" else seconds


def _warmed(run: Run, device: torch.device, enough_s: float) -> tuple[float, int]:
    """Seconds of a run once it has run before, and how many of them make up a sample."""
    for _ in range(2):
        first_s = _slowest(run, 1, device)
    return first_s, max(1, min(_MOST_LOOPS, ceil(enough_s / max(first_s, 1e-7))))


def _between_s(run: Run, device: torch.device) -> list[float]:
    """The same of every sample after computing, of which the time is no part.

    The ranks of a CPU come to it one after the other, as they get hold of a core. Computing is
    timed anew beside each sample: a machine is not as fast from one second to the next.
    """
    others = OtherOps()

    def compute() -> None:
        for _ in range(_SEGMENTS):
            others()

    def both() -> None:
        compute()
        run()

    _, loops = _warmed(both, device, _ENOUGH_BETWEEN_S)
    pairs = [
        (_slowest(compute, loops, device), _slowest(both, loops, device)) for _ in range(_SAMPLES)
    ]
    return [both_s - compute_s for compute_s, both_s in pairs]


def _slowest(run: Run, loops: int, device: torch.device) -> float:
    """Seconds of a run on the slowest rank, the mean of `loops` one after the other."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(loops):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.tensor((time.perf_counter() - started) / loops, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _nothing() -> None:
    """What a rank does that is in no group."""


def _all_reduce(nbytes: int, axis: AxisGroup, device: torch.device) -> Run:
    x = torch.zeros(max(1, nbytes // _WIDTH), device=device)
    return lambda: primitives.all_reduce(x, axis)


def _shard(nbytes: int, axis: AxisGroup, device: torch.device) -> Tensor:
    return torch.zeros(ceil(nbytes // _WIDTH / axis.size), device=device)


def _all_gather(nbytes: int, axis: AxisGroup, device: torch.device) -> Run:
    x = _shard(nbytes, axis, device)
    return lambda: primitives.all_gather(x, axis, 0, [len(x)] * axis.size)


def _reduce_scatter(nbytes: int, axis: AxisGroup, device: torch.device) -> Run:
    parts = [_shard(nbytes, axis, device) for _ in range(axis.size)]
    return lambda: primitives.reduce_scatter(parts, axis, 0)


def _all_to_all(nbytes: int, axis: AxisGroup, device: torch.device) -> Run:
    parts = [_shard(nbytes, axis, device) for _ in range(axis.size)]
    shapes = [tuple(part.shape) for part in parts]
    return lambda: primitives.all_to_all(parts, axis, shapes, nbytes=nbytes)


def _there_and_back(nbytes: int, axis: AxisGroup, device: torch.device) -> Run:
    x, other = torch.zeros(nbytes // _WIDTH, device=device), axis.ranks[1 - axis.rank]

    def run() -> None:
        steps = (dist.isend, dist.irecv) if axis.rank == 0 else (dist.irecv, dist.isend)
        for step in steps:
            work = step(x, other, group=axis.group)
            assert work is not None
            work.wait()

    return run


_RUNS: dict[CollectiveOp, Callable[[int, AxisGroup, torch.device], Run]] = {
    CollectiveOp.ALL_REDUCE: _all_reduce,
    CollectiveOp.ALL_GATHER: _all_gather,
    CollectiveOp.REDUCE_SCATTER: _reduce_scatter,
    CollectiveOp.ALL_TO_ALL: _all_to_all,
    CollectiveOp.SEND_RECV: _there_and_back,
}
"""What runs for each collective: the runtime's own functions, on buffers of the bytes counted."""
