"""The schedules a plan may name. Adding one is a builder in its own file and a row here."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import InputError
from autopar.schedules.action import Schedule
from autopar.schedules.gpipe import gpipe
from autopar.schedules.one_f_one_b import one_f_one_b

Builder = Callable[[int, int], Schedule]
"""`(num_stages, num_micro_batches) -> Schedule`, without communication."""

SCHEDULES: dict[str, Builder] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build_schedule(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule called `name`. Raises InputError on an unknown name or a size below one."""
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    for what, size in (("stages", num_stages), ("micro-batches", num_micro_batches)):
        if size < 1:
            raise InputError(f"schedule {name!r} over {size} {what}; expected at least one")
    return SCHEDULES[name](num_stages, num_micro_batches)
