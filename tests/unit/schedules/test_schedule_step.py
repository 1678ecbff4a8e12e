"""Whole steps by events: by hand, and what holds for any schedule and times."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.schedules.closed_form import flush_step_lower_bound_s
from autopar.schedules.held import StageMemory
from autopar.schedules.in_flight import peak_in_flight, peak_weighted
from autopar.schedules.lower import insert_communication
from autopar.schedules.memory_curve import Point, memory_curve, peak_moments
from autopar.schedules.registry import SCHEDULES, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.step import StageLoad, simulate_step, stage_times
from autopar.schedules.timeline import StageTimes

CHUNKS = {"one": 1, "two": 2, "many": 2}
FLUSHING = sorted(name for name, row in SCHEDULES.items() if row.flushes)


def load(**terms):
    return StageLoad(**{"forward_s": 1.0, "backward_s": 2.0} | terms)


def built(name, ranks=3, micro_batches=6):
    return build_schedule(name, ranks, micro_batches, CHUNKS[SCHEDULES[name].chunks])


def test_one_rank_does_one_thing_after_the_other():
    one = load(
        forward_waits_s=0.25,
        backward_waits_s=0.5,
        optimizer_s=3.0,
        gather_s=4.0,
        sync_s=5.0,
    )
    step = simulate_step(build_schedule("1f1b", 1, 2), [one])
    assert step.begin_s == (7.0,)
    assert step.timeline.start_s == ((7.0, 8.0, 10.0, 11.0),)
    assert (step.sync_begin_s, step.sync_end_s, step.step_s) == ((13.0,), (18.0,), 18.0)
    (rank,) = step.ranks
    assert rank.compute_s == 2 * (0.75 + 1.5) + 3
    assert rank.collectives_s == 2 * 0.75 + 4 + 5
    assert (rank.messages_s, rank.idle_s) == (0.0, 0.0)
    assert step.utilization == 7.5 / 18


def test_late_ranks_update_while_the_pipeline_fills():
    """The second rank's optimizer hides behind the first micro-batch, the first rank's does not."""
    schedule = build_schedule("1f1b", 2, 2)
    plain = simulate_step(schedule, [load(), load()]).step_s
    assert plain == 9.0
    assert simulate_step(schedule, [load(), load(optimizer_s=1.0)]).step_s == plain
    assert simulate_step(schedule, [load(), load(optimizer_s=1.5)]).step_s == plain + 0.5
    assert simulate_step(schedule, [load(optimizer_s=1.0), load()]).step_s == plain + 1


def test_each_rank_sums_its_gradients_when_its_list_ends():
    """The last stage ends two seconds before the first, in which it sums for free."""
    schedule = build_schedule("1f1b", 2, 2)
    assert simulate_step(schedule, [load(), load(sync_s=2.0)]).step_s == 9.0
    assert simulate_step(schedule, [load(), load(sync_s=3.0)]).step_s == 10.0
    assert simulate_step(schedule, [load(sync_s=3.0), load()]).step_s == 12.0


def test_a_sum_that_began_in_the_last_backward_goes_on_after_it():
    """Two stages of a rank: that of the later one ends while the earlier one runs back."""
    schedule = build_schedule("looped-bfs", 1, 1, 2)
    early = [load(), load(sync_s=2.0, sum_left_s=2.0)]
    assert simulate_step(schedule, early).step_s == 6.0
    late = [load(), load(sync_s=2.0)]
    assert simulate_step(schedule, late).step_s == 8.0
    longer = [load(), load(sync_s=3.5, sum_left_s=2.5)]
    assert simulate_step(schedule, longer).step_s == 6.5 + 1.0


def test_ranks_that_hold_one_parameter_wait_for_each_other():
    """The last stage of three is done 4 s before the first, for which its sum waits."""
    schedule = build_schedule("1f1b", 3, 3)
    plain = simulate_step(schedule, [load(sync_s=1.0)] * 3)
    assert plain.sync_end_s == (16.0, 14.0, 12.0)
    tied = load(sync_s=1.0, tied_s=2.0, tied_ranks=(0, 2))
    step = simulate_step(schedule, [tied, load(sync_s=1.0), tied])
    assert step.meet_s == (18.0, 14.0, 18.0)
    assert step.step_s == plain.step_s + 2
    assert [rank.collectives_s for rank in step.ranks] == [3.0, 1.0, 3.0]
    assert [rank.idle_s for rank in step.ranks] == [6.0, 8.0, 6.0]


def test_the_last_backward_takes_longer():
    step = simulate_step(build_schedule("gpipe", 1, 3), [load(last_backward_s=0.5)])
    assert step.timeline.end_s == ((1.0, 2.0, 3.0, 5.0, 7.0, 9.5),)
    assert step.ranks[0].collectives_s == 0.5


def test_compute_that_waits_for_a_message_is_exposed_communication():
    """Rank 1 waits 1 s for the forward of rank 0, which is bubble, then 3 s for its message."""
    loads = [load(send_forward_s=3.0), load(send_backward_s=0.5)]
    step = simulate_step(build_schedule("1f1b", 2, 1), loads)
    assert step.step_s == 1 + 3 + 3 + 0.5 + 2
    first, second = step.ranks
    assert (second.messages_s, second.idle_s, second.compute_s) == (3.0, 1.0 + 2.5, 3.0)
    assert (first.messages_s, first.idle_s) == (0.5, 6.0)
    blocking = simulate_step(build_schedule("1f1b", 2, 1), loads, overlap=False)
    assert [rank.messages_s for rank in blocking.ranks] == [3.5, 3.5]


def test_messages_queue_behind_what_runs_beside_compute_on_their_links():
    """4 s beside a forward of 3 s: its message waits 1 s for the link, where both share one."""
    loads = [load(forward_s=3.0, forward_beside_s=4.0, send_forward_s=1.0), load()]
    schedule = build_schedule("gpipe", 2, 1)
    apart = simulate_step(schedule, loads)
    shared = simulate_step(schedule, [replace(one, shares_links=True) for one in loads])
    assert apart.timeline.start_s[1][0] == 3.0
    assert shared.timeline.start_s[1][0] == 4.0
    assert shared.step_s == apart.step_s + 1


def test_a_stale_stage_updates_after_it_sent_its_gradient():
    """The slowest stage's work and update is the period; its message does not wait for them."""
    loads = [load(optimizer_s=0.5, sync_s=0.25), load(optimizer_s=1.0)]
    step = simulate_step(build_schedule("pipedream", 2, 4), loads)
    assert step.step_s == pytest.approx(4 * (3 + 1.0))
    first, second = step.ranks
    assert second.idle_s == pytest.approx(0.0)
    assert first.compute_s == pytest.approx(4 * 3.5)
    assert first.collectives_s == pytest.approx(4 * 0.25)
    row, starts, ends = (part[1] for part in (step.timeline.schedule.ranks, *spans(step)))
    for i, action in enumerate(row):
        if str(action.kind) == "SB":
            assert starts[i] == ends[i - 1]


def spans(step):
    return step.timeline.start_s, step.timeline.end_s


def test_memory_follows_the_actions():
    memory = {0: StageMemory.alike(static_bytes=100.0, saved_bytes=10.0, working_bytes=3.0)}
    row = insert_communication(build_schedule("gpipe", 1, 2)).ranks[0]
    found = memory_curve(row, (1.0, 2.0, 3.0, 5.0), (2.0, 3.0, 5.0, 7.0), memory)
    expected = [(0, 100), (1, 113), (2, 123), (5, 113), (7, 100)]
    assert found == tuple(Point(float(t), float(held)) for t, held in expected)


def test_memory_between_the_parts_of_a_backward():
    memory = [StageMemory.alike(static_bytes=0.0, saved_bytes=10.0, deferred_bytes=4.0)] * 2
    step = simulate_step(
        build_schedule("zb-h1", 2, 4), [load(backward_weight_s=1.0, memory=m) for m in memory]
    )
    held = peak_weighted(build_schedule("zb-h1", 2, 4), (10, 10), (4, 4))
    assert step.peak_bytes == tuple(map(float, held))
    assert step.memory[0][-1].held_bytes == 0.0


@pytest.mark.parametrize("name", FLUSHING)
def test_a_rank_holds_what_is_in_flight(name):
    schedule = built(name)
    peaks, one_stage = peak_in_flight(schedule), []
    for stage in range(schedule.num_stages):
        loads = [
            load(
                backward_weight_s=0.5,
                memory=StageMemory.alike(
                    static_bytes=0.0,
                    saved_bytes=float(stage == other),
                    deferred_bytes=float(stage == other),
                ),
            )
            for other in range(schedule.num_stages)
        ]
        one_stage.append(max(simulate_step(schedule, loads).peak_bytes))
    assert tuple(one_stage) == peaks


seconds = st.floats(0.01, 9.0)
shares = st.floats(0.0, 1.0)


@st.composite
def steps(draw):
    """A schedule, and the loads of its stages."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    chunks = CHUNKS[SCHEDULES[name].chunks]
    if SCHEDULES[name].why_not(ranks, chunks, micro_batches):
        micro_batches = 4 * ranks * chunks
    schedule = build_schedule(name, ranks, micro_batches, chunks)
    return schedule, [draw(stage_load()) for _ in range(schedule.num_stages)]


@st.composite
def stage_load(draw):
    forward, backward, sync = draw(seconds), draw(seconds), draw(shares)
    return StageLoad(
        forward_s=forward,
        backward_s=backward,
        backward_weight_s=backward * draw(st.floats(0.0, 0.5)),
        send_forward_s=draw(shares),
        send_backward_s=draw(shares),
        forward_waits_s=forward * draw(st.floats(0.0, 0.5)),
        backward_waits_s=backward * draw(st.floats(0.0, 0.5)),
        forward_beside_s=draw(shares),
        backward_beside_s=draw(shares),
        last_backward_s=draw(shares),
        sync_s=sync,
        sum_left_s=sync * draw(shares),
        optimizer_s=draw(shares),
        gather_s=draw(shares),
        shares_links=draw(st.booleans()),
        memory=StageMemory.alike(
            static_bytes=draw(st.integers(0, 9)),
            saved_bytes=draw(st.integers(0, 9)),
            deferred_bytes=draw(st.integers(0, 9)),
            working_bytes=draw(st.integers(0, 9)),
        ),
    )


@settings(deadline=None, max_examples=150)
@given(steps(), st.booleans())
def test_the_step_holds_the_work_of_every_rank_and_the_longest_way(case, overlap):
    schedule, loads = case
    step = simulate_step(schedule, loads, overlap)
    for rank in step.ranks:
        assert min(rank.compute_s, rank.collectives_s, rank.messages_s, rank.idle_s) >= -1e-9
        assert rank.step_s == pytest.approx(step.step_s)
    whole = step.utilization + step.exposed_fraction + step.bubble_fraction
    assert whole == pytest.approx(1.0)
    if schedule.flushes:
        least = flush_step_lower_bound_s(
            stage_times(loads), schedule.num_micro_batches, schedule.stage_rank
        )
        assert step.step_s >= least * (1 - 1e-9)
        assert step.step_s >= max(step.begin_s) and min(step.sync_begin_s) >= 0


@settings(deadline=None, max_examples=100)
@given(steps())
def test_less_to_do_is_never_slower(case):
    """Neither overlap, nor links apart, nor less of anything makes a step longer."""
    schedule, loads = case
    step_s = simulate_step(schedule, loads).step_s * (1 + 1e-9)
    assert simulate_step(schedule, [replace(o, shares_links=False) for o in loads]).step_s <= step_s
    assert step_s <= simulate_step(schedule, loads, overlap=False).step_s * (1 + 1e-6) or (
        any(o.shares_links for o in loads)  # without overlap messages queue behind nothing
    )
    for term in ("sync_s", "optimizer_s", "gather_s", "last_backward_s", "send_forward_s"):
        less = [replace(o, **{term: o.sum_left_s if term == "sync_s" else 0.0}) for o in loads]
        assert simulate_step(schedule, less).step_s <= step_s


@settings(deadline=None, max_examples=150)
@given(steps())
def test_the_peak_of_the_curve_is_that_of_the_order(case):
    schedule, loads = case
    memory = [one.memory for one in loads]
    step = simulate_step(schedule, loads)
    if not schedule.flushes:
        return
    owners = schedule.stage_rank
    for rank, moment in enumerate(peak_moments(schedule, memory)):
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        one = memory[moment.stage]
        expected = (
            one.forward_bytes
            - one.saved_bytes
            + sum(
                memory[s].static_bytes
                + moment.saved[s] * memory[s].saved_bytes
                + moment.deferred[s] * memory[s].deferred_bytes
                for s in own
            )
        )
        assert step.peak_bytes[rank] == expected
        assert step.memory[rank][-1].held_bytes == sum(memory[s].static_bytes for s in own)


def test_updates_delay_the_next_action_and_no_message():
    times = StageTimes(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0), update_s=(5.0, 0.0))
    slow = simulate(build_schedule("pipedream", 2, 4), times)
    assert slow.step_s == pytest.approx(4 * 8.0)
    assert slow.busy_s == (4 * 8.0, 4 * 3.0)
