"""Plans for devices of several kinds, run with their shapes on local processes: the numbers of one
device."""

from __future__ import annotations

import pytest

from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.local import verify_source
from autopar.plan.placing import device_lines

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("cluster", "pins"),
    [
        ("1:h100-sxm+1:a100-80gb+1:l40s", {"pipeline": 3}),
        ("2:h100-sxm+2:l40s", {"pipeline": 2, "data": 2}),
    ],
)
def test_a_plan_for_mixed_devices_has_the_numbers_of_one(cluster, pins):
    source = load_source("gpt_tiny")
    options = PlanOptions(
        global_batch=8,
        pins=tuple((key, str(value)) for key, value in pins.items()),
        price_pins=False,
        all_devices=True,
    )
    plan = plan_source(source, cluster, options).plan
    assert len(list(device_lines(plan))) == plan.pipeline
    here = f"local:{plan.num_devices}"
    report = verify_source(source, here, options, plan, lambda what, done: None, steps=2)
    assert report.ok, report.text
