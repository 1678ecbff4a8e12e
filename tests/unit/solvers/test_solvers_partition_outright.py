"""All ways to run a few blocks on the stages of a rank, of which the useful ones are told."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest

from solvers import partition_outright, partition_splits
from solvers.partition import BlockOption, PartitionProblem, solve_partition
from solvers.partition_counting import Counting
from solvers.partition_outright import Choice, outright

COUNTING = Counting(share=0.6, cuts_in_max=True)


def choice(rng, stage, count, options=3):
    time, sync, used, transient = rng.integers(1, 9, (4, options)).astype(float)
    return Choice(stage=stage, count=count, time=time, sync=sync, used=used, transient=transient)


def every_way(choices, stages):
    """(time, sync, count, bytes) of every assignment of options to blocks."""
    blocks = [each for each in choices for _ in range(each.count)]
    for options in product(*(range(len(each.time)) for each in blocks)):
        chosen = list(zip(blocks, options, strict=True))
        work_s = np.zeros(stages)
        for each, option in chosen:
            work_s[each.stage] += each.time[option]
        yield (
            work_s.sum(),
            sum(each.sync[o] for each, o in chosen),
            float(COUNTING(work_s, np.zeros(stages))),
            sum(each.used[o] for each, o in chosen) + max(each.transient[o] for each, o in chosen),
        )


@pytest.mark.parametrize("seed", range(12))
def test_no_way_beats_those_that_are_told(seed):
    rng = np.random.default_rng(seed)
    choices = [choice(rng, 0, 2), choice(rng, 1, int(rng.integers(1, 3))), choice(rng, 1, 1)]
    free = float(rng.integers(12, 40))
    found = outright(choices, 2, free, lambda work_s: COUNTING(work_s, np.zeros(2)))
    fitting = [way for way in every_way(choices, 2) if way[3] <= free]
    assert bool(found) == bool(fitting)
    for long, much, once in rng.random((20, 3)) if fitting else []:
        least = min((1 + long) * way[0] + much * way[2] + once * way[1] for way in fitting)
        told = min(
            (1 + long) * way.time_s + much * way.count_s + once * way.sync_s for way in found
        )
        assert told == pytest.approx(least)
    for way in found:
        taken = sum(choices[number].time[option] for number, option in way.options)
        assert taken == way.time_s and len(way.options) == sum(each.count for each in choices)


def test_too_many_ways_are_not_gone_through(monkeypatch):
    choices = [choice(np.random.default_rng(0), 0, 2)]
    monkeypatch.setattr(partition_outright, "_MOST_WAYS", 5)
    assert outright(choices, 1, 99.0, lambda work_s: work_s.sum(axis=-1)) is None


def test_ranks_of_few_blocks_leave_no_gap(monkeypatch):
    """What is left of a rank's room suits no block, which no mean of coarse options tells."""
    problem = PartitionProblem(
        blocks=(0,) * 40,
        classes=(
            tuple(
                BlockOption(time_s=t, static_bytes=s, saved_bytes=k, sync_s=y)
                for t, s, k, y in ((4.0, 3.0, 2.0, 9.0), (5.0, 3.0, 1.0, 9.0), (7.0, 1.0, 1.0, 2.0))
            ),
        ),
        num_stages=16,
        in_flight=(*range(16, 8, -1), *range(8, 0, -1)),
        capacity_bytes=(47.0,) * 16,
        num_micro_batches=20,
        stage_rank=(*range(8), *range(8)),
        stage_share=0.7,
    )
    assert solve_partition(problem, method="dp").gap < 2e-3
    monkeypatch.setattr(partition_splits, "outright", lambda *given: None)
    assert solve_partition(dataclasses.replace(problem), method="dp").gap > 5e-3
