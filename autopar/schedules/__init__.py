"""Pipeline schedules as action lists: built, validated, simulated, lowered, executed.

>>> print(build_schedule("1f1b", 2, 2))
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""

from __future__ import annotations

from autopar.schedules.action import Action, ActionKind, Schedule, matching_recv
from autopar.schedules.closed_form import flush_step_lower_bound_s, flush_step_s
from autopar.schedules.grid import render_grid
from autopar.schedules.in_flight import peak_in_flight, peak_weighted
from autopar.schedules.lower import insert_communication
from autopar.schedules.registry import SCHEDULES, ScheduleRow, build_schedule
from autopar.schedules.simulate import simulate
from autopar.schedules.timeline import Event, StageTimes, Stream, Timeline
from autopar.schedules.validate import validate

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Event",
    "Schedule",
    "ScheduleRow",
    "StageTimes",
    "Stream",
    "Timeline",
    "build_schedule",
    "flush_step_lower_bound_s",
    "flush_step_s",
    "insert_communication",
    "matching_recv",
    "peak_in_flight",
    "peak_weighted",
    "render_grid",
    "simulate",
    "validate",
]
