"""A published run priced by the planner's own search, held to the one plan that was run."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from autopar.capture import capture, find_blocks
from autopar.costs.clusters import parse_cluster
from autopar.costs.memory import Training, reserve_bytes
from autopar.errors import AutoparError, InfeasiblePlan
from autopar.ir.blocks import BlockChain
from autopar.ir.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.precision import PRECISIONS, Precision
from autopar.schedules.registry import SCHEDULES
from autopar.search import Setting, parse_pins
from autopar.search.found import Found
from autopar.search.pipelines import Weights
from autopar.search.planner import Planner
from autopar.search.stages import Staged
from replay.lengthen import lengthen, repeated_class
from replay.model import Architecture, build
from replay.rows import Job, Unpriced

_SHALLOW, _SAMPLES = 2, 4


class Deep(NamedTuple):
    """A model's graph and chain, and what is worked out of the graph while rows are priced."""

    graph: OpGraph
    chain: BlockChain
    worked_out: dict[int, dict[str, object]]


@dataclass
class Captures:
    """Graphs of architectures, captured once and kept in `folder` where one is given."""

    folder: Path | None = None
    _known: dict[Architecture, OpGraph] = field(default_factory=dict)
    _long: dict[tuple[Architecture, int], Deep] = field(default_factory=dict)

    def deep(self, architecture: Architecture, layers: int) -> Deep:
        """A model of so many layers. Raises Unpriced if no layer repeats."""
        key = (architecture, layers)
        if key not in self._long:
            graph = self._shallow(architecture, min(layers, _SHALLOW))
            chain = find_blocks(graph)
            if layers > _SHALLOW:
                try:
                    repeated_class(chain)
                except ValueError as error:
                    raise Unpriced(str(error)) from error
                graph, chain = lengthen(graph, chain, layers)
            self._long = {key: Deep(graph, chain, {})}  # rows of a model stand together
        return self._long[key]

    def _shallow(self, architecture: Architecture, layers: int) -> OpGraph:
        if architecture not in self._known:
            self._known[architecture] = self._read(architecture) or self._capture(
                architecture, layers
            )
        return self._known[architecture]

    def _path(self, architecture: Architecture) -> Path | None:
        if self.folder is None:
            return None
        name = hashlib.sha256(repr(architecture).encode()).hexdigest()[:16]
        return self.folder / f"{name}.pickle"

    def _read(self, architecture: Architecture) -> OpGraph | None:
        path = self._path(architecture)
        if path is None or not path.exists():
            return None
        with path.open("rb") as file:
            graph = pickle.load(file)
        assert isinstance(graph, OpGraph)
        return graph

    def _capture(self, architecture: Architecture, layers: int) -> OpGraph:
        graph = capture(*build(architecture, layers, _SAMPLES)).graph
        path = self._path(architecture)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(graph))
            partial.replace(path)
        return graph


def memory_bytes(job: Job) -> int:
    """Memory of a device."""
    return parse_cluster(job.cluster).device(0).memory_bytes


def peak_bytes(job: Job, planner: Planner, predicted_bytes: float) -> float:
    """The peak with what the runtime takes of the device that there is, not of a boundless one."""
    boundless = planner.setting.cluster.device(0)
    real = parse_cluster(job.cluster).device(0)
    return predicted_bytes - reserve_bytes(boundless) + reserve_bytes(real)


def setting_of(
    job: Job, captures: Captures, *, boundless: bool = True, pins: tuple[tuple[str, str], ...] = ()
) -> Setting:
    """The planning request of a row, with more `pins`; `boundless` has memory for free. Raises
    Unpriced."""
    deep = captures.deep(job.architecture, job.layers)
    cuts = tuple(("boundary", path) for path in _even_cuts(job, deep.chain))
    try:
        weights = _split_weights(job, deep.graph)
        parsed = parse_pins((*job.pins, *pins, *cuts, *weights), SCHEDULES)
        cluster = parse_cluster(job.cluster)
        cluster = _boundless(cluster) if boundless else cluster
    except AutoparError as error:
        raise Unpriced(str(error)) from error
    return Setting(
        name=job.key,
        graph=deep.graph,
        chain=deep.chain,
        worked_out=deep.worked_out,
        cluster=cluster,
        global_batch=job.global_batch,
        training=Training(precision=_precision(job)),
        pins=parsed,
        price_pins=False,
        execution=job.execution,
    )


def _boundless(cluster: Cluster) -> Cluster:
    """The cluster with more memory than anything needs: that a plan was run fixes its choices."""
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=1000 * g.device.memory_bytes))
        for g in cluster.groups
    )
    return replace(cluster, groups=groups)


ROWS, COLUMNS = "S(1)", "S(0)"
SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("q.weight", "k.weight", "v.weight", "up.weight", "gate.weight"), COLUMNS),
    **dict.fromkeys(("q.bias", "k.bias", "v.bias", "up.bias"), COLUMNS),
    **dict.fromkeys(("token.weight", "head.weight"), COLUMNS),
    **dict.fromkeys(("attention.out.weight", "feed_forward.down.weight"), ROWS),
}
"""How tensor parallelism splits weights (out, in), by how their names end: Shoeybi et al. 2019,
section 3. Without it the search might split the sequence and hold weights whole, as memory is
taken to be there."""


def _split_weights(job: Job, graph: OpGraph) -> Iterator[tuple[str, str]]:
    """Pins of the weights that the tensor ranks of a published run split."""
    degree = int(dict(job.pins)["tensor"])
    if degree == 1:
        return
    whole = () if job.architecture.kv_heads % degree == 0 else ("k.", "v.")
    for source in graph.sources:
        name = source.fqn.partition("__")[0]
        end = next((e for e in SPLITS if name.endswith(f".{e}") or name == e), None)
        expert = len(source.spec.shape) == 3
        if end and not expert and not end.startswith(whole or ("-",)):
            yield f"weight:{source.fqn}", SPLITS[end]


def _even_cuts(job: Job, chain: BlockChain) -> Iterator[str]:
    """The modules that start a stage where all stages have equally many layers."""
    stages = prod(int(dict(job.pins).get(key, 1)) for key in ("pipeline", "chunks"))
    if stages == 1 or job.layers % stages or not job.framework.even_stages:
        return
    first = chain.classes[repeated_class(chain)].members[0]
    each = job.layers // stages
    yield from (chain.blocks[first + i * each].module_path for i in range(1, stages))


def _precision(job: Job) -> Precision:
    known = PRECISIONS[job.precision]
    return replace(known, grad_dtype="float32") if job.wide_gradients else known


def search(job: Job, captures: Captures) -> tuple[Planner, Found]:
    """The search of the one grid that a row's plan leaves.

    Memory is taken to be there; `memory_bytes` tells what there is. Where a row does not say what
    is run again, it is what the search has run again to fit, or everything if that is not enough.
    Raises Unpriced where the plan cannot be expressed.
    """
    if "recompute" in dict(job.pins):
        planner = Planner(setting=setting_of(job, captures))
        return planner, planner.search()
    planner = Planner(setting=setting_of(job, captures, boundless=False))
    try:
        return planner, planner.search()
    except InfeasiblePlan:
        planner = Planner(setting=setting_of(job, captures, pins=(("recompute", "all"),)))
        return planner, planner.search()


def grid_step_s(staged: Staged, weights: Weights) -> float:
    """Seconds of a step from the options that were chosen for each class: options to stages to the
    objective of the schedule. What pricing one more grid costs once its classes are priced."""
    blocks, chosen = staged.problem.blocks, staged.solution.options
    views: dict[tuple[int, int], tuple[float, float]] = {}
    for key in zip(blocks, chosen, strict=True):
        if key not in views:
            option = staged.options[key[0]][key[1]]
            views[key] = option.forward_s + option.backward_s, option.update_s
    total = longest = tail = 0.0
    stages = staged.problem.stages(staged.solution.cuts)
    for on_rank in staged.problem.rank_stages():
        counted = Counter((blocks[b], chosen[b]) for k in on_rank for b in stages[k])
        work = sum(count * views[key][0] for key, count in counted.items())
        total, longest = total + work, max(longest, work)
        tail = max(tail, sum(count * views[key][1] for key, count in counted.items()))
    return weights.sum * total + weights.longest * longest + tail
