"""What a verification answers."""

from dataclasses import replace

from autopar.local import VerifyReport

REPORT = VerifyReport(
    grid="data 2",
    steps=3,
    tolerance=5e-3,
    worst={"loss": 0.0},
    first_difference=None,
    unplanned=(),
)


def test_equal_numbers_and_collectives_are_what_is_asked():
    assert REPORT.ok
    assert REPORT.text.endswith("same numbers as one device (tolerance 5e-03)")
    assert not replace(REPORT, first_difference="loss").ok
    assert not replace(REPORT, unplanned=("rank 0 ran an all_reduce",)).ok


def test_steps_that_overflow_are_told_and_prove_nothing():
    some, all_of_them = replace(REPORT, skipped=2), replace(REPORT, skipped=3)
    assert some.ok
    assert "skipped 2 of 3 steps" in some.text
    assert not all_of_them.ok
    assert "NOTHING compared: every step overflowed" in all_of_them.text
    assert all_of_them.as_dict()["skipped_steps"] == 3
