"""Jobs that other planners were measured on, and the page of their seconds beside ours."""

import json

import planners


def test_every_job_has_another_planners_time_with_how_it_was_obtained():
    theirs = json.loads(planners.PEERS.read_text())
    assert theirs.keys() == planners.JOBS.keys()
    assert all(row["seconds"] > 0 and row["how"] for row in theirs.values())
    assert all(hasattr(planners, job.model) for job in planners.JOBS.values())


def test_the_page_says_how_many_times_as_long_the_other_takes():
    row = {
        "job": "a",
        "model": "m",
        "cluster": "8:x",
        "memory_gib": 20,
        "planner": "P",
        "their_s": 400,
        "how": "published",
        "our_s": 8.0,
        "our_cpu_s": 7.0,
        "gap": 0.01,
        "plan": "data 8",
    }
    assert "| m | 8:x of 20 GiB | P | 400 | 8.0 | 50 | 1.00% | published | data 8 |" in (
        planners.document([row])
    )
