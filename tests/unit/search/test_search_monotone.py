"""More to choose from never gives a worse plan: memory, techniques, schedules, links, devices."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, planning_setting
from autopar.costs.clusters import parse_cluster
from autopar.errors import InfeasiblePlan
from autopar.search import grids as grids_module
from autopar.search.pipelines import FREE
from autopar.search.planner import Planner
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.mlp import MLP

pytestmark = pytest.mark.slow

TIE = 1 + 1e-9


def gpt(layers, hidden, heads, vocab, seq_len):
    config = GPTConfig(
        layers=layers, hidden=hidden, heads=heads, vocab=vocab, seq_len=seq_len, tied=False
    )
    tokens = torch.zeros(8, seq_len, dtype=torch.long)
    return GPT(config), {"input_ids": tokens, "labels": tokens}


MODELS = {
    "mlp": lambda: (MLP(3, 64), {name: torch.empty(8, 64) for name in ("x", "y")}),
    "gpt": lambda: gpt(1, 16, 2, 32, 8),
    "wider gpt": lambda: gpt(2, 512, 8, 1024, 128),
}


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        return {name: capture(*build()) for name, build in MODELS.items()}


@pytest.fixture
def setting(captured):
    def build(name, cluster, pins=(), limit=None):
        options = PlanOptions(price_pins=False, pins=pins, memory_limit_bytes=limit)
        return planning_setting(captured[name], cluster, options)

    return build


def best(setting):
    """The objective of the best plan; inf where none fits."""
    try:
        return Planner(setting=setting).search().best.solution.objective
    except InfeasiblePlan:
        return math.inf


def most_bytes(setting):
    """What the best plan is held to, with all the memory that there is."""
    return max(Planner(setting=setting).search().best.solution.stage_bytes)


@pytest.mark.parametrize(
    ("name", "cluster"), [("mlp", "local:3"), ("mlp", "local:4"), ("gpt", "local:2")]
)
def test_more_memory(setting, name, cluster):
    free = setting(name, cluster)
    most = most_bytes(free)
    limits = [int(most * 0.2 * 5 ** (step / 9)) for step in range(10)]
    found = [best(replace(free, memory_limit_bytes=limit)) for limit in limits]
    for less, more in itertools.pairwise(found):
        assert more <= less * TIE
    assert found[0] > found[-1]
    assert len(set(found)) >= 4
    assert best(replace(free, memory_limit_bytes=int(most))) == pytest.approx(best(free), rel=1e-9)


DATA = (("data", "2"), ("zero", "1"), ("micro_batch", "1"), ("recompute", "all"))
PIPELINE = (("pipeline", "2"), ("schedule", "gpipe"), ("micro_batches", "4"), ("recompute", "none"))


@pytest.mark.parametrize(
    ("name", "cluster", "pins"), [("gpt", "local:2", DATA), ("mlp", "local:4", PIPELINE)]
)
def test_a_pin_less(setting, name, cluster, pins):
    """Over all sets of four pins, where memory is scarce."""
    limit = int(0.6 * most_bytes(setting(name, cluster)))
    found = {
        chosen: best(setting(name, cluster, chosen, limit))
        for count in range(len(pins) + 1)
        for chosen in itertools.combinations(pins, count)
    }
    for chosen, objective in found.items():
        for pin in chosen:
            assert found[tuple(p for p in chosen if p != pin)] <= objective * TIE, (chosen, pin)
    assert len(set(found.values())) >= 4


def test_a_schedule_more(setting, monkeypatch):
    found = []
    for count in range(1, len(FREE) + 1):
        monkeypatch.setattr(grids_module, "FREE", FREE[:count])
        found.append(best(setting("mlp", "local:4", (("pipeline", "2"), ("micro_batches", "4")))))
    for fewer, more in itertools.pairwise(found):
        assert more <= fewer * TIE
    assert found[-1] < found[0]


def faster(cluster, **factors):
    """The cluster with quantities of its links multiplied."""
    links = tuple(
        replace(link, **{name: getattr(link, name) * factor for name, factor in factors.items()})
        for link in cluster.links
    )
    return replace(cluster, links=links)


@pytest.mark.parametrize(
    ("name", "spec", "share"),
    [("mlp", "local:2", 0.6), ("mlp", "local:4", 0.6), ("wider gpt", "2x2:h100-sxm", None)],
)
def test_a_faster_link(setting, name, spec, share):
    cluster = parse_cluster(spec)
    limit = None if share is None else int(share * most_bytes(setting(name, cluster)))
    before = best(setting(name, cluster, limit=limit))
    steps = [{"bandwidth_bytes_s": 1.1}, {"bandwidth_bytes_s": 8.0}]
    steps += [{"latency_s": 0.9}, {"latency_s": 0.0}, {"bandwidth_bytes_s": 8.0, "latency_s": 0.1}]
    found = [best(setting(name, faster(cluster, **step), limit=limit)) for step in steps]
    assert max(found) <= before * TIE
    assert min(found) < before < math.inf


@pytest.mark.parametrize(
    ("name", "clusters"),
    [
        ("mlp", [f"{count}:h100-sxm" for count in (1, 2, 4, 8)]),
        ("wider gpt", [f"{count}:h100-sxm" for count in (1, 2, 4, 8)]),
        ("wider gpt", [f"{nodes}x2:h100-sxm" for nodes in (1, 2, 4)]),
    ],
)
def test_twice_the_devices(setting, name, clusters):
    """In a node a rank may do what another does, so that nothing is lost; over nodes, where the
    work is worth it."""
    found = [best(setting(name, cluster)) for cluster in clusters]
    for fewer, more in itertools.pairwise(found):
        assert more <= fewer * TIE
    assert found[-1] < found[0]


PLANNING = """
import torch
from autopar.compiler import PlanOptions, plan_model
from autopar.plan.serialize import to_json
from model_zoo.mlp import MLP
with torch.device("meta"):
    model, batch = MLP(3, 64), {name: torch.empty(8, 64) for name in ("x", "y")}
    options = PlanOptions(memory_limit_bytes=150_000)
    print(to_json(plan_model(model, batch, "local:4", options).plan), end="")
"""


def test_the_same_bytes_whatever_the_order_of_sets():
    plans = [
        subprocess.run(
            [sys.executable, "-c", PLANNING],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert plans[0] == plans[1] and b'"stages"' in plans[0]
