"""What a rank knows of its messages from those that come back."""

from __future__ import annotations

import pytest

from autopar.schedules.action import Action, matching_recv
from autopar.schedules.arrivals import arrivals, most_under_way
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import SCHEDULES, build_schedule

FLUSHING = [
    (name, ranks, chunks, micro_batches)
    for name, row in SCHEDULES.items()
    if row.flushes
    for ranks, chunks, micro_batches in [(2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 2, 8)]
    if row.why_not(ranks, chunks, micro_batches) is None
]


def known(name, rank, *sizes):
    found = arrivals(build_schedule(name, *sizes))[rank]
    return {str(receive): tuple(map(str, sends)) for receive, sends in found.items() if sends}


def test_a_gradient_tells_of_the_values_taken_before_it():
    """1F1B on two ranks: the second takes one micro-batch after another."""
    assert known("1f1b", 0, 2, 3) == {"0RB0": ("0SF0",), "0RB1": ("0SF1",), "0RB2": ("0SF2",)}
    assert known("1f1b", 1, 2, 3) == {"1RF2": ("1SB0",)}
    # GPipe: the second rank takes all values before its first gradient.
    assert known("gpipe", 0, 2, 3) == {"0RB0": ("0SF0", "0SF1", "0SF2")}


def test_the_most_buffers_of_a_rank():
    def most(name, *sizes):
        lowered = insert_communication(build_schedule(name, *sizes))
        return most_under_way(lowered, arrivals(lowered))

    assert most("1f1b", 1, 4) == (0,)
    assert most("1f1b", 2, 3) == (3, 3)
    assert most("gpipe", 2, 5)[0] == 6


@pytest.mark.parametrize(("name", "ranks", "chunks", "micro_batches"), FLUSHING)
def test_what_has_arrived_was_taken(name, ranks, chunks, micro_batches):
    """In whatever order ranks run: the peer took it before it sent what tells of it."""
    schedule = insert_communication(build_schedule(name, ranks, micro_batches, chunks))
    sender = {a: rank for rank, row in enumerate(schedule.ranks) for a in row if a.kind.is_send}
    came_from = {matching_recv(send): send for send in sender}
    for rank, told in enumerate(arrivals(schedule)):
        sent = [a for a in schedule.ranks[rank] if a.kind.is_send]
        for receive, sends in told.items():
            answer = came_from[receive]
            row = schedule.ranks[sender[answer]]
            for send in sends:
                assert sender[send] == rank
                taken = matching_recv(send)
                assert row.index(taken) < row.index(answer)
                assert schedule.ranks[rank].index(send) < schedule.ranks[rank].index(receive)
        listed = [send for sends in told.values() for send in sends]
        assert len(listed) == len(set(listed)) <= len(sent)
        assert all(isinstance(send, Action) for send in listed)
