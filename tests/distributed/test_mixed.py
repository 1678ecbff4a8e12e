"""Plans for devices of several kinds, run with their shapes on local processes: the numbers of one
device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.compiler import PlanOptions, load_source, plan_source
from autopar.costs.clusters import parse_cluster
from autopar.local import verify_source
from autopar.plan.placing import device_lines

pytestmark = pytest.mark.distributed


def with_a_smaller_last(spec, memory_bytes):
    cluster = parse_cluster(spec)
    *others, last = cluster.groups
    smaller = replace(last.device, memory_bytes=memory_bytes)
    return replace(cluster, groups=(*others, replace(last, device=smaller)))


@pytest.mark.parametrize(
    ("cluster", "pins"),
    [
        pytest.param(
            with_a_smaller_last("7:rtx3090+1:rtx3090", 12 * 2**30), {}, id="seven and one smaller"
        ),
        ("4:h100-sxm+4:a100-80gb", {"pipeline": 2, "tensor": 2}),
        ("4:a100-80gb+4:a100-80gb@network=1", {"pipeline": 2}),
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
