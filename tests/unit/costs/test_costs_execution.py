"""What frameworks do otherwise than the emitted program, in seconds and bytes."""

from __future__ import annotations

import pytest

from autopar.costs.execution import Execution


def test_a_gradient_is_read_the_sum_read_and_written_but_for_the_first():
    ours = Execution()
    assert ours.accumulation_bytes(2, 2, 1) == 0
    assert ours.accumulation_bytes(2, 2, 4) == pytest.approx(6 * 3 / 4)
    assert ours.accumulation_bytes(2, 4, 4) == pytest.approx(10 * 3 / 4)
    assert Execution(fuses_accumulation=True).accumulation_bytes(2, 4, 4) == 0


def test_all_but_one_part_of_what_tensor_ranks_move_hides():
    assert Execution().hidden_tensor_s(1.0, 2.0, 4, 1.0) == 0
    beside = Execution(hides_tensor=True)
    assert beside.hidden_tensor_s(1.0, 2.0, 4, 0.9) == pytest.approx(0.9 * 0.75)
    assert beside.hidden_tensor_s(3.0, 2.0, 4, 1.0) == pytest.approx(2 * 0.75)


def test_what_stays_whole_until_its_next_use_is_not_gathered_again():
    assert Execution().regathered_share(1e9, 2) == 1
    kept = Execution(reuse_parameters=1e9)
    assert kept.regathered_share(2e9, 2) == 0.75
    assert kept.regathered_share(2e9, 3) == pytest.approx(5 / 6)
    assert kept.regathered_share(3e8, 3) == 0
