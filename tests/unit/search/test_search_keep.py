"""The decisions of a plan as pins; decisions pinned on modules."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import main
from autopar.compiler import PlanOptions, load_source, plan_model, plan_source
from autopar.errors import InputError
from autopar.search.keep import kept_pins

CLUSTER = "2x2:h100-sxm"


def planned(pins, **options):
    asked = PlanOptions(pins=tuple(pins), price_pins=False, global_batch=32, **options)
    return plan_source(load_source("mlp"), CLUSTER, asked).plan


@pytest.fixture(scope="module")
def plan():
    pins = ("pipeline", "2"), ("tensor", "2"), ("micro_batch", "4"), ("recompute", "all")
    return planned(pins)


def test_a_plan_that_is_kept_comes_out_again(plan):
    kept = kept_pins(plan)
    again = planned(kept.pins)
    assert (again.prediction, again.axes, again.schedule) == (
        plan.prediction,
        plan.axes,
        plan.schedule,
    )
    assert {("tensor", "2"), ("micro_batch", "4"), ("recompute", "all")} <= set(kept.pins)
    assert again.certificate.grids == 1


def test_what_is_free_is_searched_again(plan):
    pins = dict(kept_pins(plan, ("micro-batch", "recompute")).pins)
    assert not {"micro_batch", "recompute"} & set(pins) and pins["tensor"] == "2"
    again = planned(pins.items())
    assert again.prediction.step_s < plan.prediction.step_s
    assert (again.pipeline, again.axis("tensor")) == (2, 2)


def test_what_no_pin_can_hold_is_named(plan):
    """Recomputation that differs from block to block."""
    stage = plan.stages[0]
    blocks = (replace(stage.blocks[0], recompute="none"), *stage.blocks[1:])
    mixed = replace(plan, stages=(replace(stage, blocks=blocks), *plan.stages[1:]))
    assert "recompute" in kept_pins(mixed).left
    assert "recompute" not in dict(kept_pins(mixed).pins)
    with pytest.raises(InputError, match="--free colour: expected one of pipeline, data, context"):
        kept_pins(plan, ("colour",))


def test_nothing_is_free_of_a_plan_that_is_not_kept(capsys):
    assert main(["plan", "mlp", "--cluster", CLUSTER, "--free", "tensor"]) == 2
    assert "--free without --keep" in capsys.readouterr().err


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x, y):
        return (self.down(torch.relu(self.up(x))) - y).pow(2).mean()


def test_pins_on_modules_hold():
    model = Net()
    autopar.pin(model.up, weights={"weight": "R"})
    autopar.pin(model.down, start_of_stage=True)
    batch = {"x": torch.zeros(8, 64), "y": torch.zeros(8, 64)}
    options = PlanOptions(pins=(("pipeline", "2"),), price_pins=False)
    found = plan_model(model, batch, "local:4", options).plan
    assert [(pin.key, pin.value) for pin in found.pins] == [
        ("pipeline", "2"),
        ("weight:up.weight", "R"),
        ("boundary", "down"),
    ]
    assert found.stages[1].blocks[0].module_path == "down"


def test_pins_that_say_nothing_are_refused():
    with pytest.raises(InputError, match="Linear has no such parameter; it has weight, bias"):
        autopar.pin(nn.Linear(2, 2), weights={"wieght": "R"})
    with pytest.raises(InputError, match="nothing is pinned; expected start_of_stage=True or"):
        autopar.pin(nn.Linear(2, 2))
