"""Times that go into a simulated step, and the timeline that comes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from autopar.schedules.action import Action, ActionKind, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds for one micro-batch, per stage; sends per boundary (b is between b and b + 1).

    `backward_input_s` and `backward_weight_s` are needed by schedules that split the backward.
    `last_backward_s` are added to a stage's last whole backward, `update_s` follow every whole
    backward, once its gradient is on its way. `forward_beside_s` and `backward_beside_s` are taken
    on the links that messages use, by what a stage communicates while it computes. What is left
    empty takes no time.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...] = ()
    backward_weight_s: tuple[float, ...] = ()
    send_forward_s: tuple[float, ...] = ()
    send_backward_s: tuple[float, ...] = ()
    last_backward_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()
    forward_beside_s: tuple[float, ...] = ()
    backward_beside_s: tuple[float, ...] = ()

    @property
    def num_stages(self) -> int:
        """Stages that the times are for."""
        return len(self.forward_s)


class Stream(StrEnum):
    """What an action, or a collective of a stage, occupies. Receiving does not hinder sending:
    links are full duplex."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVES = "collectives"


def stream_of(kind: ActionKind) -> Stream:
    """The stream that actions of a kind are shown on."""
    if kind.is_compute:
        return Stream.COMPUTE
    return Stream.SEND if kind.is_send else Stream.RECEIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action in time. A receive lasts as long as its message is under way."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A simulated step. `start_s[r][i]` and `end_s[r][i]` belong to `schedule.ranks[r][i]`.

    `schedule` has its communication spelled out. `busy_s` is each rank's compute time, `finish_s`
    when each rank is done with its list (where gradient sync may begin). Of a schedule that never
    drains this is a step of the steady state: ranks start their lists one after the other, and
    `finish_s` is the time from step to step.
    """

    schedule: Schedule
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    finish_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """From the first action to the last of all ranks."""
        return max(self.finish_s)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they do not compute; 0 for a step of no length."""
        total_s = self.step_s * len(self.busy_s)
        return max(0.0, 1.0 - sum(self.busy_s) / total_s) if total_s else 0.0

    def events(self) -> Iterator[Event]:
        """Every action with its times, rank by rank in list order."""
        for rank, row in enumerate(self.schedule.ranks):
            spans = zip(row, self.start_s[rank], self.end_s[rank], strict=True)
            for action, start_s, end_s in spans:
                yield Event(rank=rank, action=action, start_s=start_s, end_s=end_s)
