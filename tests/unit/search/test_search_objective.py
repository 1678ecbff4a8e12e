"""What a plan may have the least of: memory is held to what does not fit below it, cost to plans
for every part of the cluster."""

import re
from dataclasses import replace

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, plan_captured, planning_setting
from autopar.costs.clusters import parse_cluster, parts, priced
from autopar.errors import InfeasiblePlan, InputError
from autopar.plan.price import hourly_price, sample_price
from autopar.plan.table import plan_summary, plan_table
from autopar.search.grids import grids
from autopar.search.least import least_excess_bytes, least_peak_bytes
from autopar.search.planner import Planner
from model_zoo.mlp import MLP

BATCH, HIDDEN = 64, 64
GPU = "2x2:h100-sxm"


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        return capture(MLP(4, HIDDEN), {k: torch.empty(BATCH, HIDDEN) for k in ("x", "y")})


@pytest.fixture(scope="module")
def plan(captured):
    return lambda cluster="local:2", **options: (
        plan_captured(captured, cluster, PlanOptions(**options)).plan
    )


@pytest.fixture(scope="module")
def planner(captured):
    return lambda **options: Planner(
        setting=planning_setting(captured, "local:2", PlanOptions(**options))
    )


@pytest.fixture(scope="module")
def leanest(plan):
    return plan(objective="memory")


@pytest.fixture(scope="module")
def least_bytes(planner):
    """What stages are held to, as a sum of what their blocks need; the peak is a little below."""
    return least_peak_bytes(planner()).excess_bytes


def test_no_plan_needs_less_than_the_leanest(plan, leanest, least_bytes):
    fastest, peak = plan(), leanest.prediction.peak_bytes
    assert peak <= least_bytes <= 1.01 * peak
    assert peak < 0.7 * fastest.prediction.peak_bytes
    assert leanest.prediction.step_s > fastest.prediction.step_s
    assert (leanest.objective, fastest.objective) == ("memory", "time")
    with pytest.raises(InfeasiblePlan):
        plan(memory_limit_bytes=int(least_bytes) - 8)
    again = plan(memory_limit_bytes=int(least_bytes))
    assert again.prediction.step_s == leanest.prediction.step_s


def test_the_leanest_plan_says_what_is_least(leanest):
    assert leanest.notes[-1].startswith("objective memory: a plan needs ")
    assert "proven over all grids with a stage a rank" in leanest.notes[-1]
    assert {stage.memory_limit_bytes for stage in leanest.stages} == {2 * 2**30}
    assert "\nleast     memory\n" in plan_table(leanest)


def test_what_fits_is_found_without_planning(planner, least_bytes):
    assert least_peak_bytes(planner()).bound_bytes == least_bytes
    fits = least_excess_bytes(planner(memory_limit_bytes=int(least_bytes)))
    assert fits.fits and fits.proven and fits.solved < len(grids(planner().setting))
    short = least_excess_bytes(planner(memory_limit_bytes=int(least_bytes) - 64))
    assert not short.fits and short.excess_bytes == pytest.approx(64, abs=1)


def test_a_limit_that_state_alone_exceeds_is_ruled_out_by_its_bound(planner):
    """16 bytes of state a parameter: 4 x 64 x 65 of them on two devices need 133 KB each."""
    found = least_excess_bytes(planner(memory_limit_bytes=100_000))
    assert found.bound_bytes == pytest.approx(4 * 64 * 65 * 16 / 2 - 100_000, rel=0.01)
    assert not found.fits and found.proven and found.excess_bytes >= found.bound_bytes
    assert found.solved <= 8


PRICES = {"h100-sxm": 3.0}


@pytest.fixture(scope="module")
def cheapest(plan):
    return plan(GPU, objective="cost", prices=PRICES)


def test_the_cheapest_plan_beats_every_part_of_the_cluster(plan, cheapest):
    """A small model gains nothing from a second device, which costs as much as the first."""
    whole = priced(parse_cluster(GPU), PRICES)
    prices = {part.spec: sample_price(plan(part)) for part in parts(whole)}
    assert list(prices) == ["1:h100-sxm", "2:h100-sxm", "2x2:h100-sxm"]
    assert sample_price(cheapest) == min(prices.values()) == prices["1:h100-sxm"]
    assert cheapest.cluster.spec == "1:h100-sxm"
    step_s = cheapest.prediction.step_s
    assert sample_price(cheapest) == pytest.approx(3.0 / 3600 * step_s / BATCH)
    assert f"planned for: 1:h100-sxm {prices['1:h100-sxm'] * 1e6:.4g}" in cheapest.notes[-1]


def test_a_part_that_does_not_fit_is_not_the_cheapest(plan, leanest):
    """Two devices, where one has too little memory."""
    limit = int(leanest.prediction.peak_bytes) + 4096
    found = plan(objective="cost", prices={"cpu": 1.0}, memory_limit_bytes=limit)
    assert found.cluster.spec == "local:2"


def test_a_cost_needs_prices(plan):
    with pytest.raises(InputError, match=r"no price is known of h100-sxm; .* --price h100-sxm="):
        plan(GPU, objective="cost")
    with pytest.raises(InputError, match="price a100: cluster 2x2:h100-sxm has no such device"):
        plan(GPU, objective="cost", prices={"a100": 1.0})
    with pytest.raises(InputError, match="unknown objective 'speed'; choose one of time, memory"):
        plan(objective="speed")


def test_a_plan_with_prices_says_what_it_costs(plan):
    found = plan(GPU, prices=PRICES)
    assert hourly_price(found.cluster) == 12.0
    assert re.search(r"\ncost +12 an hour, [\d.e-]+ a million samples\n", plan_table(found))
    assert plan_summary(found)["price_per_sample"] == sample_price(found)
    unpriced = plan(GPU)
    assert "\ncost " not in plan_table(unpriced) and sample_price(unpriced) is None
    assert replace(found, cluster=unpriced.cluster).prediction == unpriced.prediction


def test_a_cluster_file_has_prices(tmp_path):
    path = tmp_path / "c.yaml"
    group = "{device: h100-sxm, nodes: 1, devices_per_node: 2, price_per_hour: %s}"
    path.write_text(f"groups: [{group % 2.5}]")
    assert hourly_price(parse_cluster(str(path))) == 5.0
    path.write_text(f"groups: [{group % 'free'}]")
    with pytest.raises(InputError, match="price_per_hour: expected a number above 0"):
        parse_cluster(str(path))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("local:3", ["local:1", "local:2", "local:3"]),
        ("3x2:a10g", ["1:a10g", "2:a10g", "2x2:a10g", "3x2:a10g"]),
        ("2:h100-sxm+2:a10g", ["1:h100-sxm", "1:a10g", "2:h100-sxm", "2:a10g"]),
    ],
)
def test_parts_of_a_cluster(spec, expected):
    found = [part.spec for part in parts(parse_cluster(spec))]
    assert found == (expected if "+" not in spec else [*expected, spec])
    for part in parts(parse_cluster(spec)):
        assert part == parse_cluster(part.spec)
