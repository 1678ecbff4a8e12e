"""Times of collectives held to published nccl-tests and the like, by cluster.

python benchmarks/collectives.py [FILE ...] [--fit] [--json]

Without files, the rows in `benchmarks/data/collectives.jsonl`. `--fit` searches for the links of
every device, and for the filling time that all share, with the least error on the fit part, and
prints them: they are kept in `costs.hardware` and `costs.collectives`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from published import quantile
from replay.rows import DEVICES, Row, read_rows

from autopar.costs import collectives
from autopar.costs.clusters import parse_cluster
from autopar.costs.collectives import RING_PASSES, axis_collective_time_s
from autopar.costs.hardware import NIC_EFFICIENCY
from autopar.ir.cluster import Axis, Cluster
from autopar.ir.collective import CollectiveOp
from autopar.plan.text import columns

DATA = Path(__file__).parent / "data" / "collectives.jsonl"

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
    nodes, ranks = row.get("n_nodes"), row.get("n_gpus")
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
    sizes = [abs(e) for e in found]
    return {
        "rows": len(found),
        "median": median(sizes),
        "p90": quantile(sizes, 0.9),
        "bias": median(found),
    }


def report(timings: Sequence[Timing]) -> str:
    """By part and by setup."""
    parts = split(timings)
    sets: list[tuple[str, list[Timing]]] = []
    for name in ("fit", "test"):
        own = [t for t in timings if parts[t.setup] == name]
        sets.append((f"{name} part", own))
        quiet = [t for t in own if CONGESTED not in t.setup]
        if len(quiet) < len(own):
            sets.append((f"{name} part without the {CONGESTED}", quiet))
    sets += [(setup, [t for t in timings if t.setup == setup]) for setup in parts]
    rows = []
    for name, own in sets:
        if own:
            s = errors(own)
            figures = (f"{s['median']:.0%}", f"{s['p90']:.0%}", f"{s['bias']:+.0%}")
            rows.append((name, parts.get(name, ""), str(s["rows"]), *figures))
    return columns(("cluster", "part", "rows", "median", "p90", "bias"), rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Links of one device (bytes/s and seconds), the network as a share of the line rate."""

    node_bandwidth: float
    node_latency: float
    network_share: float
    network_latency: float

    def on(self, item: Timing) -> Cluster:
        """The cluster of a timing with these links."""
        links = []
        for link in item.cluster.links:
            if link.name == "node":
                rate, latency = self.node_bandwidth, self.node_latency
            else:
                rate, latency = link.bandwidth_bytes_s * self.network_share, self.network_latency
            links.append(replace(link, bandwidth_bytes_s=rate, latency_s=latency))
        return replace(item.cluster, links=tuple(links))


def fit(timings: Sequence[Timing]) -> dict[str, dict[str, float]]:
    """Links by device, with the filling time as it is now."""
    parts = split(timings)
    found = {}
    for device in sorted({t.device for t in timings}):
        own = [t for t in timings if t.device == device and parts[t.setup] == "fit"]
        if len(own) < 10:
            continue
        node, network = own[0].cluster.links[0], own[0].cluster.links[-1]
        start = Fitted(
            node_bandwidth=node.bandwidth_bytes_s,
            node_latency=node.latency_s,
            network_share=1.0,
            network_latency=max(network.latency_s, 20e-6),
        )

        def loss(tried: Fitted, own: Sequence[Timing] = own) -> float:
            logs = [abs(np.log(t.seconds(tried.on(t)) / t.measured_s)) for t in own]
            return float(np.mean(np.minimum(logs, 0.7)))

        best = _descend(loss, start)
        found[device] = {k: float(f"{v:.3g}") for k, v in asdict(best).items()}
        found[device]["error"] = round(loss(best), 3)
    return found


def _descend(loss: Callable[[Fitted], float], start: Fitted) -> Fitted:
    best, least, step = start, loss(start), 1.5
    for _ in range(6):
        for name in asdict(start):
            for factor in (step, 1 / step):
                while (
                    found := loss(t := replace(best, **{name: getattr(best, name) * factor}))
                ) < (least * (1 - 1e-4)):
                    best, least = t, found
        step = 1 + (step - 1) * 0.6
    return best


def main() -> None:
    """Print how far off the times are, or the links that fit best."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, default=[DATA], metavar="FILE")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    timings = [t for row in read_rows(given.files) if (t := timing(row)) is not None]
    if given.fit:
        shared = {"FILL": collectives.FILL, "FILL_BYTES": collectives.FILL_BYTES}
        found: Any = {"shared": shared, "devices": fit(timings)}
        print(json.dumps(found, indent=1))
    elif given.json:
        parts = split(timings)
        sets = {name: [t for t in timings if parts[t.setup] == name] for name in ("fit", "test")}
        print(json.dumps({name: errors(own) for name, own in sets.items()}))
    else:
        print(report(timings))


if __name__ == "__main__":
    main()
