"""Every schedule against the eager single-device model, with several stages a rank.

As in `test_parity`: loss, gradients, gradient norm and weights after three steps, and what the
ranks communicated, which must be the plan's list.
"""

import pytest
from test_parity import check

from autopar.schedules.registry import SCHEDULES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TWO, FOUR = {"pipeline": 2}, {"pipeline": 4}
CASES = [
    ("interleaved-1f1b", 2, "gpt_tiny", {**TWO, "data": 2}, 4, "none"),
    ("interleaved-1f1b", 2, "eight_blocks", FOUR, 5, "all"),
    ("interleaved-1f1b", 4, "eight_blocks", {**TWO, "tensor": 2}, 3, "none"),
    ("looped-bfs", 2, "eight_blocks", FOUR, 3, "none"),
    ("zb-h1", 1, "gpt_tiny", {**TWO, "tensor": 2}, 4, "none"),
    ("zb-h1", 1, "hf_gpt2", FOUR, 8, "all"),
    ("interleaved-zb", 2, "llama_tiny", {**TWO, "data": 2}, 3, "none"),
    ("zbv", 2, "gpt_tiny_dropout", {**TWO, "data": 2}, 4, "all"),
    ("zbv", 2, "eight_blocks", FOUR, 8, "none"),
    ("dualpipev", 2, "hf_llama", {**TWO, "tensor": 2}, 4, "none"),
    ("dualpipev", 2, "eight_blocks", FOUR, 7, "none"),
]
"""Not every combination: every schedule, most on four ranks and beside another axis, with whole and
uneven micro-batches, ties on one rank and on two, recompute with whole and with split backwards."""


def ident(case):
    schedule, chunks, model, degrees, micro_batches, recompute = case
    grid = "-".join(f"{name}{size}" for name, size in degrees.items())
    return f"{schedule}-{chunks}-{model}-{grid}-{micro_batches}x-{recompute}"


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_numbers_and_collectives_equal(pool4, case, tmp_path):
    schedule, chunks, model, degrees, micro_batches, recompute = case
    pins = {
        "data": 1,
        "tensor": 1,
        **degrees,
        "schedule": schedule,
        "chunks": chunks,
        "micro_batches": micro_batches,
        "recompute": recompute,
    }
    pairs = tuple((key, str(value)) for key, value in pins.items())
    plan = check(pool4, model, pairs, "fp64", tmp_path).plan
    assert (plan.schedule, plan.chunks) == (schedule, chunks)
    assert len(plan.stages) == plan.pipeline * chunks
    assert len({stage.ranks for stage in plan.stages}) == plan.pipeline


def test_every_schedule_that_flushes_is_run():
    assert {case[0] for case in CASES} | {"gpipe", "1f1b"} >= {
        name for name, row in SCHEDULES.items() if row.flushes
    }
