"""Passes of a stage, computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedules.stage_pass import (
    BlockWork,
    Overlap,
    StagePass,
    backward_pass,
    forward_pass,
)

HIDES = Overlap()
WAITS = Overlap(beside=False)


def blocks(*rows):
    names = ("compute_s", "collectives_s", "gather_s", "reduce_s")
    return [BlockWork(**dict(zip(names, row, strict=False))) for row in rows]


def test_a_stage_without_collectives_computes():
    for run in (forward_pass, backward_pass):
        assert run(blocks((2.0,), (3.0,)), HIDES) == StagePass(total_s=5.0, waits_s=0.0)


def test_collectives_of_a_block_hold_up_its_compute():
    found = forward_pass(blocks((2.0, 1.0), (3.0, 0.5)), HIDES)
    assert found == StagePass(total_s=6.5, waits_s=1.5)


def test_a_forward_gathers_one_block_ahead():
    # 4 for the first block's weights; 2 of 3 beside the first, 1 waited for; 1 beside the second
    found = forward_pass(blocks((2.0, 0.0, 4.0), (5.0, 0.0, 3.0), (1.0, 0.0, 1.0)), HIDES)
    assert found == StagePass(total_s=4 + 2 + 1 + 5 + 1, waits_s=5.0, beside_s=3.0)


def test_a_forward_gathers_no_further_ahead_than_one_block():
    found = forward_pass(blocks((5.0,), (1.0,), (1.0, 0.0, 3.0)), HIDES)
    assert found == StagePass(total_s=5 + 1 + 2 + 1, waits_s=2.0, beside_s=1.0)


def test_a_backward_gathers_the_nearest_block_before_that_has_weights():
    # the last block's own weights are waited for, those of the first come beside the others
    found = backward_pass(blocks((1.0, 0.0, 3.0), (5.0,), (1.0, 0.0, 2.0)), HIDES)
    assert found == StagePass(total_s=2 + 1 + 5 + 1, waits_s=2.0, beside_s=3.0)


def test_gathering_does_not_hide_behind_collectives():
    found = forward_pass(blocks((1.0, 9.0), (1.0, 0.0, 3.0)), HIDES)
    assert found == StagePass(total_s=1 + 9 + 2 + 1, waits_s=11.0, beside_s=1.0)


def test_sums_run_beside_the_blocks_before_and_go_on_at_the_end():
    # block 1 sums 3 beside block 0, which takes 2: its own sum waits for the last 1
    found = backward_pass(blocks((2.0, 0.0, 0.0, 4.0), (5.0, 0.0, 0.0, 3.0)), HIDES)
    assert found == StagePass(total_s=5 + 2 + 1, waits_s=1.0, beside_s=2.0, left_s=4.0)


def test_sums_and_gatherings_share_one_stream():
    # 3 to gather block 1, 2 + 2 of block 0's 4 beside blocks; block 1's sum of 6 comes after them
    rows = blocks((5.0, 0.0, 4.0), (2.0, 0.0, 3.0, 6.0))
    found = backward_pass(rows, HIDES)
    assert found == StagePass(total_s=3 + 2 + 2 + 5, waits_s=5.0, beside_s=2 + 5, left_s=1.0)


def test_a_share_of_what_runs_beside_slows_compute():
    found = forward_pass(blocks((4.0,), (1.0, 0.0, 2.0)), Overlap(hidden=0.75))
    assert found == StagePass(total_s=4 + 0.25 * 2 + 1, waits_s=0.5, beside_s=2.0)


def test_nothing_hides_where_communication_takes_the_cores():
    rows = blocks((4.0, 0.0, 1.0, 2.0), (4.0, 0.0, 1.0, 2.0))
    assert forward_pass(rows, WAITS) == StagePass(total_s=10.0, waits_s=2.0)
    # the second sum waits for the first; it is left itself
    assert backward_pass(rows, WAITS) == StagePass(total_s=12.0, waits_s=4.0, left_s=2.0)


seconds = st.floats(0.0, 9.0)
stages = st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=6)


@settings(deadline=None)
@given(stages, st.floats(0.0, 1.0))
def test_a_pass_takes_at_least_its_compute_and_at_most_all_in_a_row(rows, hidden):
    works = blocks(*rows)
    for run in (forward_pass, backward_pass):
        found, waiting = run(works, Overlap(hidden=hidden)), run(works, WAITS)
        compute = sum(row[0] for row in rows)
        held_up = compute + sum(row[1] for row in rows)
        assert found.total_s >= held_up - 1e-9
        assert found.total_s - found.waits_s == pytest.approx(compute)
        # hiding moves communication beside compute and makes none of it longer
        assert found.total_s + found.left_s <= waiting.total_s + waiting.left_s + 1e-9
        communicated = sum(row[2] + (row[3] if run is backward_pass else 0.0) for row in rows)
        moved = found.beside_s + (found.total_s - held_up) + found.left_s
        assert moved == pytest.approx(communicated + (1 - hidden) * found.beside_s, abs=1e-9)
