"""A few published runs, priced with their own plans, stay as close as docs/validation.md says."""

from __future__ import annotations

import pytest
from published import DATA, price
from replay.price import Captures
from replay.rows import measured_s, read_rows


@pytest.fixture(scope="module")
def rows():
    return {row["id"]: row for row in read_rows([DATA])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "measured", "within"),
    [
        ("pr-05488", 16.058, 0.08),  # 76B of Narayanan et al. 2021, 1,024 A100, interleaved
        ("pr-05578", 1.42, 0.04),  # 22B of Korthikanti et al. 2022, 8 A100, all run again
        ("pr-05841", 5.10, 0.11),  # InternLM-7B, 256 A100, ZeRO-1
    ],
)
def test_step_times_are_as_close_as_stated(rows, key, measured, within):
    row = rows[key]
    assert measured_s(row) == pytest.approx(measured, abs=0.01)
    result = price(row, Captures(), "test")
    assert result.fits
    assert abs(result.error) < within


@pytest.mark.slow
def test_a_run_that_ran_out_of_memory_is_predicted_not_to_fit(rows):
    result = price(rows["pr-03520"], Captures(), "fit")  # 13B of Hagemann et al., micro-batch 8
    assert result.oom and result.fits is False and result.error is None
