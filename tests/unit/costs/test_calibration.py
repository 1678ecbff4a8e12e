"""The table of fitted constants."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from autopar.costs.calibration import (
    CALIBRATED,
    CURVES,
    PATH,
    EfficiencyCurve,
    curve_of,
    parse_calibration,
)
from autopar.costs.hardware import DEVICES
from autopar.errors import InputError

CURVE = EfficiencyCurve(half_dim=64.0, ramp_s=1e-6, memory=0.9, sustained=0.8, attention=0.4)


def text(constants: object) -> str:
    return json.dumps({"devices": {"some": {"constants": constants}}})


def test_the_table_that_ships_is_of_known_devices_with_what_it_was_fitted_on():
    devices = json.loads(PATH.read_text(encoding="utf-8"))["devices"]
    assert set(devices) == set(CALIBRATED) <= set(DEVICES)
    assert "a100-80gb" in devices
    for row in devices.values():
        assert row["fit"]["runs"] == sum(row["sources"].values()) >= 20
        assert 0 < row["fit"]["median_error"] < row["fit"]["p90_error"]
        assert not any("SC21" in name or "Korthikanti" in name for name in row["sources"])


def test_shares_are_shares():
    for curve in CALIBRATED.values():
        for share in (curve.memory, curve.sustained, curve.attention, curve.hidden):
            assert 0 < share <= 1


def test_constants_are_those_of_the_device_else_of_its_kind():
    device = DEVICES["a100-80gb"].device
    assert curve_of(device) == CALIBRATED["a100-80gb"]
    assert curve_of(replace(device, name="other")) == CURVES["cuda"]
    assert curve_of(replace(device, name="other", kind="cpu")) == CURVES["cpu"]
    assert curve_of(replace(device, name="other", kind="xpu")) == CURVES["cuda"]


def test_a_table_is_read_back():
    assert parse_calibration(text(asdict(CURVE))) == {"some": CURVE}


@pytest.mark.parametrize(
    "wrong",
    ["{", "[]", '{"devices": {"some": {}}}', text({"memory": 1}), text(asdict(CURVE) | {"x": 1})],
)
def test_a_wrong_table_says_what_to_do(wrong):
    with pytest.raises(InputError, match="calibrate"):
        parse_calibration(wrong, where="here")
