"""What a model that does not fit is told: a conflict of which every part is needed, and changes of
one requirement that were seen to do."""

import re
from itertools import permutations

import pytest
import torch

from autopar.capture import capture
from autopar.compiler import PlanOptions, plan_captured, planning_setting
from autopar.errors import InfeasiblePlan
from autopar.search.conflict import find_conflict
from model_zoo.mlp import MLP

BATCH, HIDDEN, LAYERS = 64, 64, 4
STATE = LAYERS * HIDDEN * (HIDDEN + 1) * 16


def quiet(what, done):
    pass


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        return capture(MLP(LAYERS, HIDDEN), {k: torch.empty(BATCH, HIDDEN) for k in ("x", "y")})


def asked(limit, pins=(), **options):
    pairs = tuple(tuple(pin.split("=")) for pin in pins)
    return PlanOptions(memory_limit_bytes=int(limit), pins=pairs, price_pins=False, **options)


@pytest.fixture(scope="module")
def plan(captured):
    return lambda *given, cluster="local:2", **options: (
        plan_captured(captured, cluster, asked(*given, **options)).plan
    )


@pytest.fixture(scope="module")
def conflict(captured):
    def find(*given, cluster="local:2", **options):
        found = find_conflict(planning_setting(captured, cluster, asked(*given, **options)), quiet)
        return None if found is None else [one.name for one in found.requirements]

    return find


def message(plan, *given, **options):
    with pytest.raises(InfeasiblePlan) as caught:
        plan(*given, **options)
    return str(caught.value)


PINS = ("data=2", "zero=0", "micro_batch=1", "recompute=all")


def test_only_what_conflicts_is_named(conflict, plan):
    """State that is not split does not fit; how samples are split is not to blame."""
    found = conflict(0.9 * STATE, PINS)
    assert [name for name in found if "=" in name] == ["data=2", "zero=0"]
    assert found[-1].endswith(" a device")
    assert plan(0.9 * STATE, [pin for pin in PINS if pin != "zero=0"])


def test_every_part_of_a_conflict_has_a_plan(conflict, plan):
    pins = [name for name in conflict(0.9 * STATE, PINS) if "=" in name]
    assert message(plan, 0.9 * STATE, pins)
    for one in pins:
        assert plan(0.9 * STATE, [pin for pin in pins if pin != one])


def test_the_order_of_pins_does_not_matter(plan):
    messages = {message(plan, 0.9 * STATE, order) for order in permutations(PINS[:3])}
    assert len(messages) == 1


def test_changes_that_help_were_tried(plan):
    text = message(plan, 0.9 * STATE, PINS)
    assert "\n  one of these would make it fit: without data=2; without zero=0; " in text
    short = int(re.search(r"(\d+) bytes too much", text)[1])
    assert plan(0.9 * STATE + short, PINS)
    assert message(plan, 0.9 * STATE + short - 8, PINS)


def test_a_model_that_is_too_large_is_told_how_many_devices_do(plan, conflict):
    limit = 0.3 * STATE
    assert conflict(limit) == ["2 devices", "78 KiB a device"]
    text = message(plan, limit)
    count = int(re.search(r"(\d+) devices \(local:\1\)", text)[1])
    assert plan(limit, cluster=f"local:{count}")
    assert message(plan, limit, cluster=f"local:{count - 1}")


def test_a_pin_that_alone_does_not_help_says_what_is_left(plan, conflict):
    """Without it the state is still on two stages alone, which lack less than before."""
    pins = ("zero=0", "recompute=none", "tensor=1", "pipeline=2")
    text = message(plan, 0.3 * STATE, pins, cluster="local:4")
    left = int(re.search(r"without tensor=1: still (\d+) bytes too much on a device", text)[1])
    others = [pin for pin in pins if pin != "tensor=1"]
    assert conflict(0.3 * STATE + left, others, cluster="local:4") is None
    assert conflict(0.3 * STATE + left - 8, others, cluster="local:4")


def test_what_fits_has_no_conflict(conflict):
    assert conflict(2 * STATE) is None
