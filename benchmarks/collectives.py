"""Times of collectives held to published nccl-tests and the like, by cluster.

python benchmarks/collectives.py [FILE ...] [--fit] [--json]

Without files, the rows in `benchmarks/data/collectives.jsonl`. `--fit` searches for the links of
every device, and for the filling time that all share, with the least error on the fit part, and
prints them: they are kept in `costs.hardware` and `costs.collectives`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from replay.nccl import CONGESTED, DATA, Timing, errors, errors_by_part, read_timings, split

from autopar.costs import collectives
from autopar.ir.cluster import Cluster
from autopar.plan.text import columns


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
    timings = read_timings(given.files)
    if given.fit:
        shared = {"FILL": collectives.FILL, "FILL_BYTES": collectives.FILL_BYTES}
        found: Any = {"shared": shared, "devices": fit(timings)}
        print(json.dumps(found, indent=1))
    elif given.json:
        print(json.dumps(errors_by_part()))
    else:
        print(report(timings))


if __name__ == "__main__":
    main()
