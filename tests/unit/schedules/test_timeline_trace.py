import json

from autopar.report.timeline import chrome_trace, step_trace
from autopar.schedules.action import Schedule
from autopar.schedules.held import StageMemory
from autopar.schedules.registry import build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.step import StageLoad, simulate_step
from autopar.schedules.timeline import StageTimes


def small():
    times = StageTimes(
        forward_s=(1e-3, 1e-3),
        backward_s=(2e-3, 2e-3),
        send_forward_s=(5e-4,),
        send_backward_s=(5e-4,),
    )
    return simulate(build_schedule("1f1b", 2, 1), times)


def test_the_trace_of_one_micro_batch():
    trace = json.loads(chrome_trace(small()))
    assert trace["otherData"] == {
        "schedule": "1f1b",
        "step_us": 7000.0,
        "bubble_fraction": round(1 - 6 / 14, 6),
    }
    slices = [
        (e["pid"], e["tid"], e["name"], e["cat"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    assert slices == [
        (0, 0, "0F0", "forward", 0.0, 1000.0),
        (0, 0, "0B0", "backward", 5000.0, 2000.0),
        (0, 1000, "0SF0", "send activation", 1000.0, 500.0),
        (0, 2000, "0RB0", "receive gradient", 4500.0, 500.0),
        (1, 0, "1F0", "forward", 1500.0, 1000.0),
        (1, 0, "1B0", "backward", 2500.0, 2000.0),
        (1, 1000, "1SB0", "send gradient", 4500.0, 500.0),
        (1, 2000, "1RF0", "receive activation", 1000.0, 500.0),
    ]


def test_rows_are_named_by_rank_and_stream():
    entries = json.loads(chrome_trace(small()))["traceEvents"]
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in entries if e["name"] == "thread_name"]
    assert names == [
        (rank, 1000 * number, stream)
        for rank in (0, 1)
        for number, stream in enumerate(("compute", "send", "receive"))
    ]
    ranks = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert ranks == ["rank 0", "rank 1"]


def test_an_arrow_joins_each_send_to_its_receive():
    entries = json.loads(chrome_trace(small()))["traceEvents"]
    arrows = {(e["id"], e["ph"]): (e["pid"], e["tid"], e["ts"]) for e in entries if "id" in e}
    assert arrows == {
        (0, "s"): (0, 1000, 1000.0),
        (0, "f"): (1, 2000, 1000.0),
        (1, "s"): (1, 1000, 4500.0),
        (1, "f"): (0, 2000, 4500.0),
    }


def test_receives_at_the_same_time_get_rows_of_their_own():
    schedule = Schedule.parse(
        "both", 3, 2, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"]
    )
    times = StageTimes(
        forward_s=(2.0, 1.0, 1.0),
        backward_s=(1.0, 1.0, 1.0),
        send_forward_s=(9.0, 1.0),
        send_backward_s=(1.0, 9.0),
    )
    entries = json.loads(chrome_trace(simulate(schedule, times)))["traceEvents"]
    labels = [e["args"]["name"] for e in entries if e["name"] == "thread_name" and e["pid"] == 1]
    assert labels == ["compute", "send", "receive", "receive 2"]


def test_same_timeline_same_bytes():
    text = chrome_trace(small())
    assert text == chrome_trace(small())
    assert text.endswith("}\n")


def whole():
    load = StageLoad(
        forward_s=1e-3,
        backward_s=2e-3,
        forward_beside_s=5e-4,
        last_backward_s=1e-3,
        sum_beside_s=1e-3,
        sum_left_s=5e-4,
        sync_s=1.5e-3,
        optimizer_s=1e-3,
        gather_s=2e-3,
        memory=StageMemory.alike(static_bytes=2**20, saved_bytes=2**19, working_bytes=2**18),
    )
    return simulate_step(build_schedule("1f1b", 1, 1), [load])


def test_the_trace_of_a_step_has_its_collectives_and_memory():
    trace = json.loads(step_trace(whole(), ["ranks 0-3, stage 0"]))
    entries = trace["traceEvents"]
    assert trace["otherData"]["step_us"] == 8500.0
    assert trace["otherData"]["utilization"] == round(4 / 8.5, 6)
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X"]
    assert slices == [
        (0, "optimizer", 0.0, 1000.0),
        (0, "0F0", 3000.0, 1000.0),
        (0, "0B0", 4000.0, 3000.0),
        (3000, "gather updated weights", 1000.0, 2000.0),
        (3000, "gather weights", 3000.0, 500.0),
        (3000, "sum gradients", 6000.0, 1500.0),
        (3000, "sum gradients", 7500.0, 1000.0),
    ]
    held = [(e["ts"], e["args"]["MiB"]) for e in entries if e["ph"] == "C"]
    assert held == [(0.0, 1.0), (3000.0, 1.75), (7000.0, 1.0)]
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == [
        "ranks 0-3, stage 0"
    ]


def test_updates_of_a_pipeline_that_never_drains_follow_every_backward():
    loads = [StageLoad(forward_s=1.0, backward_s=2.0, optimizer_s=0.5)] * 2
    step = simulate_step(build_schedule("pipedream", 2, 3), loads)
    entries = json.loads(step_trace(step))["traceEvents"]
    updates = [(e["pid"], e["dur"]) for e in entries if e["name"] == "update"]
    assert updates == [(rank, 500000.0) for rank in (0, 1) for _ in range(3)]
