"""Plans for clusters as they are against the best that treating all devices alike gives.

python benchmarks/heterogeneous.py [NAME ...] [--time-limit S] [--json]

Three treatments make a cluster alike: every device as slow and as small as the slowest and the
smallest, with the slowest link between all; the same with the fastest link; and one of its groups
alone. A plan made so is priced on the devices
as they are, its decisions kept: faster devices may wait for it, none is taken to be slower. All
steps are simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from autopar.compiler import PlanOptions, capture_source, load_source, plan_captured
from autopar.costs.clusters import alone, named, parse_cluster
from autopar.costs.hardware import GIB
from autopar.errors import InfeasiblePlan, InputError
from autopar.ir.cluster import Cluster, DeviceGroup, LinkLevel
from autopar.plan.placing import device_lines
from autopar.plan.plan import Plan
from autopar.plan.table import grid_text
from autopar.plan.text import columns, duration
from autopar.search.keep import kept_pins


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on a cluster; `smaller_gib` is the memory of the cluster's last device, if less."""

    name: str
    model: str
    cluster: str
    global_batch: int
    precision: str = "bf16"
    smaller_gib: float | None = None

    def parsed(self) -> Cluster:
        """The cluster."""
        cluster = parse_cluster(self.cluster)
        if self.smaller_gib is None:
            return cluster
        *others, last = cluster.groups
        device = replace(last.device, memory_bytes=int(self.smaller_gib * GIB))
        return replace(cluster, groups=(*others, replace(last, device=device)))


CASES = (
    Case(
        name="memory",
        model="gpt3_2_7b",
        cluster="7:rtx3090+1:rtx3090",
        global_batch=32,
        smaller_gib=12,
    ),
    Case(
        name="speed",
        model="gpt3_6_7b",
        cluster="4:h100-sxm+4:a100-80gb",
        global_batch=64,
    ),
    Case(
        name="islands",
        model="gpt3_2_7b",
        cluster="4:a100-80gb+4:a100-80gb@network=1",
        global_batch=64,
    ),
)


ALIKE = (("meshes", "alike"),)
"""What treating all devices alike has: one mesh for all stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One way to treat a cluster: the simulated step of its plan, None where none fits."""

    treatment: str
    step_s: float | None
    grid: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Ours, the homogeneous treatments, and how many times as long the best of these takes."""

    name: str
    model: str
    cluster: str
    ours: Outcome
    alike: tuple[Outcome, ...]

    @property
    def ratio(self) -> float | None:
        """The best homogeneous treatment's step over ours; None without either."""
        steps = [each.step_s for each in self.alike if each.step_s is not None]
        return min(steps) / self.ours.step_s if steps and self.ours.step_s else None


def all_alike(cluster: Cluster, link: LinkLevel) -> Cluster:
    """The cluster with every device as the slowest and the smallest, one link between all."""
    devices = [group.device for group in cluster.groups]
    slowest = min(devices, key=lambda device: device.flops("bfloat16"))
    memory = min(device.memory_bytes for device in devices)
    worst = replace(
        slowest,
        memory_bytes=memory,
        memory_bandwidth_bytes_s=min(d.memory_bandwidth_bytes_s for d in devices),
    )
    groups = tuple(replace(group, device=worst, links=()) for group in cluster.groups)
    one = replace(link, span=cluster.num_devices)
    return named(replace(cluster, groups=groups, links=(one,)))


def measure(case: Case, time_limit_s: float) -> Result:
    """Plan a case in every treatment."""
    cluster, source = case.parsed(), load_source(case.model)
    options = PlanOptions(
        global_batch=case.global_batch,
        precision=case.precision,
        price_pins=False,
        time_limit_s=time_limit_s,
    )
    captured, options = capture_source(source, cluster, options, lambda what, done: None)

    def plan(where: Cluster, pins: tuple[tuple[str, str], ...] = ALIKE, whole: bool = True) -> Plan:
        asked = replace(options, pins=pins, all_devices=whole)
        return plan_captured(captured, where, asked, name=case.model).plan

    def alike(link: LinkLevel) -> Plan:
        return plan(cluster, kept_pins(plan(all_alike(cluster, link))).pins)

    return Result(
        name=case.name,
        model=case.model,
        cluster=cluster.spec,
        ours=outcome("as they are", lambda: plan(cluster, (), whole=False)),
        alike=(
            outcome("all as the worst", lambda: alike(cluster.levels[-1])),
            outcome("the same, near", lambda: alike(cluster.levels[0])),
            *(
                outcome(f"{group.num_devices} x {group.device.name} alone", group_plan)
                for group, group_plan in _groups(cluster, plan)
            ),
        ),
    )


def _groups(
    cluster: Cluster, plan: Callable[[Cluster], Plan]
) -> Iterator[tuple[DeviceGroup, Callable[[], Plan]]]:
    for group in dict.fromkeys(cluster.groups):
        yield group, partial(plan, named(alone(group, cluster)))


def outcome(treatment: str, make: Callable[[], Plan]) -> Outcome:
    """The plan of a treatment, if there is one."""
    try:
        plan = make()
    except (InfeasiblePlan, InputError):
        return Outcome(treatment=treatment, step_s=None)
    return Outcome(
        treatment=treatment,
        step_s=plan.prediction.step_s,
        grid=grid_text(plan),
        devices=tuple(device_lines(plan)),
    )


def report(results: list[Result]) -> str:
    """A table, and which devices run what in our plans."""
    rows, lines = [], list[str]()
    for result in results:
        for each in (result.ours, *result.alike):
            step = "does not fit" if each.step_s is None else duration(each.step_s)
            over = (
                f"{each.step_s / result.ours.step_s:.3f}"
                if each.step_s is not None and result.ours.step_s
                else ""
            )
            rows.append((result.name, result.cluster, each.treatment, step, over, each.grid))
        lines += ["", f"{result.name}: {result.model} on {result.cluster}", *result.ours.devices]
    header = ("case", "cluster", "devices taken", "step", "over ours", "grid")
    return "\n".join([columns(header, rows, left=3), *lines])


def main() -> None:
    """Print the table, or everything as JSON; status 1 where a plan of ours is no better."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; default: all")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.names or case.name in given.names]
    results = [measure(case, given.time_limit) for case in cases]
    if given.json:
        print(json.dumps([{**asdict(r), "ratio": r.ratio} for r in results], indent=1))
    else:
        print(report(results))
    sys.exit(any(result.ratio is not None and result.ratio < 1 for result in results))


if __name__ == "__main__":
    main()
