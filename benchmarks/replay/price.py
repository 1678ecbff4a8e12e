"""A published run priced by the planner's own search, held to the one plan that was run."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.capture import capture, find_blocks
from autopar.compiler import PRECISIONS
from autopar.costs.clusters import parse_cluster
from autopar.costs.memory import Training
from autopar.errors import AutoparError
from autopar.ir.blocks import BlockChain
from autopar.ir.graph import OpGraph
from autopar.ir.precision import Precision
from autopar.schedules.registry import SCHEDULES
from autopar.search import Setting, parse_pins
from autopar.search.setting import EARLY_LEVELS
from autopar.search.planner import Found, Planner
from replay.lengthen import lengthen, repeated_class
from replay.model import Architecture, build
from replay.rows import Job, Unpriced

_SHALLOW, _SAMPLES = 2, 4


@dataclass
class Captures:
    """Graphs of architectures, captured once and kept in `folder` where one is given."""

    folder: Path | None = None
    _known: dict[Architecture, OpGraph] = field(default_factory=dict)
    _long: dict[tuple[Architecture, int], tuple[OpGraph, BlockChain]] = field(default_factory=dict)

    def deep(self, architecture: Architecture, layers: int) -> tuple[OpGraph, BlockChain]:
        """Graph and chain of a model of so many layers. Raises Unpriced if no layer repeats."""
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
            self._long = {key: (graph, chain)}  # rows of a model stand together
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


def setting_of(job: Job, captures: Captures) -> Setting:
    """The planning request of a row. Raises Unpriced."""
    graph, chain = captures.deep(job.architecture, job.layers)
    try:
        pins = parse_pins(job.pins, SCHEDULES)
        cluster = parse_cluster(job.cluster)
    except AutoparError as error:
        raise Unpriced(str(error)) from error
    return Setting(
        name=job.key,
        graph=graph,
        chain=chain,
        cluster=cluster,
        global_batch=job.global_batch,
        training=Training(precision=_precision(job)),
        pins=pins,
        price_pins=False,
        early_sync=EARLY_LEVELS | ({0, 1} if job.framework.overlaps_sync else set()),
    )


def _precision(job: Job) -> Precision:
    known = PRECISIONS[job.precision]
    return replace(known, grad_dtype="float32") if job.framework.wide_gradients else known


def search(job: Job, captures: Captures) -> tuple[Planner, Found]:
    """The search of the one grid that a row's plan leaves.

    Raises Unpriced where the plan cannot be expressed, InfeasiblePlan where it does not fit.
    """
    planner = Planner(setting=setting_of(job, captures))
    return planner, planner.search()
