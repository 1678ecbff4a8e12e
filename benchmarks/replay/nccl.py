"""Published times of collectives, on clusters of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import RING_PASSES, axis_collective_time_s
from autopar.costs.hardware import NIC_EFFICIENCY
from autopar.ir.cluster import Axis, Cluster
from autopar.ir.collective import CollectiveOp
from replay.figures import error_figures
from replay.rows import DEVICES, Row, read_rows

DATA = Path(__file__).parents[1] / "data" / "collectives.jsonl"

OPS = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "all_to_all": CollectiveOp.ALL_TO_ALL,
    "sendrecv": CollectiveOp.SEND_RECV,
}

NAMES = (*DEVICES, ("H200", "h200-sxm"), ("B200", "b200"))
"""How a device's name begins, and ours."""

LARGE_BYTES = 2**30
"""What a row without a size is taken to have measured: bandwidth of large messages."""

CONGESTED = "HF cluster"
"""A cluster whose network falls from 436 to 33 GB/s between 1 and 64 nodes: shown, not fitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One measured collective on a cluster of ours; `setup` is the machine and tool."""

    key: str
    setup: str
    device: str
    cluster: Cluster
    op: CollectiveOp
    ranks: int
    nbytes: float
    measured_s: float
    network_given: bool

    def seconds(self, cluster: Cluster | None = None) -> float:
        """What the cost model says."""
        axis = Axis(name="all", size=self.ranks, stride=1)
        return axis_collective_time_s(self.op, self.nbytes, axis, cluster or self.cluster)


def timing(row: Row) -> Timing | None:
    """A row on our clusters; None where it names no device of ours, or no time."""
    gpu, op = str(row.get("gpu")), OPS.get(str(row["collective"]))
    device = next((ours for theirs, ours in NAMES if gpu.startswith(theirs)), None)
    nodes, ranks = row.get("n_nodes"), int(row["n_gpus"])
    if op is None or device is None or not isinstance(nodes, int) or ranks % nodes:
        return None
    nbytes = float(row.get("size_bytes") or LARGE_BYTES)
    seconds = row["time_us"] * 1e-6 if "time_us" in row else _from_bandwidth(row, op, nbytes)
    if not seconds:
        return None
    spec = f"{nodes}x{ranks // nodes}:{device}" if nodes > 1 else f"{ranks}:{device}"
    rate = row.get("internode_gbit_s_per_gpu")
    given = nodes > 1 and bool(rate)
    return Timing(
        key=str(row["id"]),
        setup=f"{gpu}, {ranks} on {nodes}, {row.get('tool', '')}",
        device=device,
        cluster=parse_cluster(spec + (f"@network={rate / 8 * NIC_EFFICIENCY:g}" if given else "")),
        op=op,
        ranks=ranks,
        nbytes=nbytes,
        measured_s=seconds,
        network_given=given,
    )


def _from_bandwidth(row: Row, op: CollectiveOp, nbytes: float) -> float:
    """Seconds from the bus bandwidth, as nccl-tests defines it."""
    rate, n = row.get("busbw_gb_s"), row["n_gpus"]
    if not rate:
        return 0.0
    return RING_PASSES.get(op, 1) * (n - 1) / n * nbytes / (rate * 1e9)


def split(timings: Iterable[Timing]) -> Mapping[str, str]:
    """Setup to `fit` or `test`: of every device's node, and of its network, the setup with the most
    rows first, in turn; where there is one setup only there is nothing to hold back."""
    sizes: dict[tuple[tuple[str, bool], str], int] = {}
    for item in timings:
        link = (item.device, len(item.cluster.links) > 1)
        sizes[link, item.setup] = sizes.get((link, item.setup), 0) + 1
    found: dict[str, str] = {}
    seen: dict[tuple[str, bool], int] = {}
    for (link, setup), _ in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        if CONGESTED in setup:
            found[setup] = "test"
            continue
        found[setup] = ("fit", "test")[seen.get(link, 0) % 2]
        seen[link] = seen.get(link, 0) + 1
    return found


def errors(timings: Sequence[Timing]) -> dict[str, float | int]:
    """Number of rows, median and 90th percentile of |error|, and the median signed one."""
    found = [item.seconds() / item.measured_s - 1 for item in timings]
    return {"rows": len(found), **error_figures(found)}


def read_timings(paths: Iterable[Path] = (DATA,)) -> list[Timing]:
    """The rows of files that can be priced."""
    return [found for row in read_rows(paths) if (found := timing(row)) is not None]


def errors_by_part() -> dict[str, dict[str, float | int]]:
    """The errors of the fit part, of the test part, and of it without the congested cluster."""
    timings = read_timings()
    parts = split(timings)
    found = {name: [t for t in timings if parts[t.setup] == name] for name in ("fit", "test")}
    quiet = [t for t in found["test"] if CONGESTED not in t.setup]
    sets = {**found, f"test without the {CONGESTED}": quiet}
    return {name: errors(own) for name, own in sets.items() if own}
