"""A simulated step on ranks that share processor cores.

Where more ranks than cores compute at once, each gets an equal part of the cores (processor
sharing): of `p` pipeline ranks whose compute takes `slowdown` times as long when all of them
compute, `k` that compute at the same time run `min(slowdown, p / k)` times as fast as all would.
A rank that waits leaves its part to the others, so a bubble costs less than on devices that stand
alone, and imbalance nothing while the cores are busy. Collectives take a rank's part of the cores
as well (they move bytes through sockets), but are no faster where more is left: they go from rank
to rank and back. A message takes that of its sender alike, and as much again of the cores for its
receiver, which reads what the other writes, whether it waits for it or computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.schedules.action import Action, ActionKind, matching_recv
from autopar.schedules.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A timeline on shared cores. `begin_s` is when each rank begins its list, `end_s` when it has
    run its tail as well."""

    timeline: Timeline
    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]


def share_cores(
    timeline: Timeline,
    slowdown: float,
    heads_s: Sequence[float],
    tails_s: Sequence[float],
    waits_s: Mapping[tuple[ActionKind, int], float] | None = None,
) -> Shared:
    """The timeline with the cores shared.

    Its times are those of ranks that all compute. `heads_s` is the compute of each rank before its
    list (the optimizer's step), `tails_s` its collectives after it (gradients summed), `waits_s`
    those in an action of a kind and stage; the times that a rank of `timeline` starts and ends at
    do not count, their differences do.
    """
    run = _Run(timeline, heads_s, tails_s, slowdown, waits_s or {})
    run.all()
    shared = replace(
        timeline,
        start_s=tuple(tuple(row.starts_s) for row in run.rows),
        end_s=tuple(tuple(row.ends_s) for row in run.rows),
        busy_s=tuple(row.busy_s for row in run.rows),
        finish_s=tuple(max(row.ends_s, default=0.0) for row in run.rows),
    )
    return Shared(
        timeline=shared,
        begin_s=tuple(row.begin_s for row in run.rows),
        end_s=tuple(row.done_s for row in run.rows),
    )


@dataclass(slots=True)
class _Row:
    """One rank. `left_s` is what its current action has left, of which the last `waits_s` are
    communication; None where it waits for a message, or is done."""

    actions: tuple[Action, ...]
    lengths_s: tuple[float, ...]
    head_s: float
    tail_s: float
    begin_s: float = -1.0
    at: int = 0
    left_s: float | None = None
    waits_s: float = 0.0
    busy_s: float = 0.0
    done_s: float = -1.0
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    @property
    def communicates(self) -> bool:
        """Whether what is left of the current action is communication."""
        return self.left_s is not None and self.left_s <= self.waits_s

    @property
    def sends(self) -> bool:
        """Whether a message is on its way."""
        begun = self.begin_s >= 0.0 and self.at < len(self.actions)
        return begun and self.communicates and self.actions[self.at].kind.is_send

    @property
    def next_s(self) -> float:
        """What is left of the compute, or of the communication after it."""
        assert self.left_s is not None
        return self.left_s if self.communicates else self.left_s - self.waits_s

    def begin(self, seconds: float, waits_s: float) -> None:
        """Start an action."""
        self.left_s, self.waits_s = seconds, min(waits_s, seconds)


class _Run:
    def __init__(
        self,
        timeline: Timeline,
        heads_s: Sequence[float],
        tails_s: Sequence[float],
        slowdown: float,
        waits_s: Mapping[tuple[ActionKind, int], float],
    ) -> None:
        self.slowdown, self.waits_s, self.now_s = slowdown, waits_s, 0.0
        self.sent: dict[Action, tuple[float, float]] = {}
        self.rows = [
            _Row(
                actions=actions,
                lengths_s=tuple(end - start for start, end in zip(starts, ends, strict=True)),
                head_s=head_s,
                tail_s=tail_s,
            )
            for actions, starts, ends, head_s, tail_s in zip(
                timeline.schedule.ranks,
                timeline.start_s,
                timeline.end_s,
                heads_s,
                tails_s,
                strict=True,
            )
        ]

    def all(self) -> None:
        """From the first action to the last tail."""
        while True:
            while any(self._advance(row) for row in self.rows):
                pass
            active = [row for row in self.rows if row.left_s is not None]
            if not active:
                return
            self._pass(active)

    def _pass(self, active: Sequence[_Row]) -> None:
        """Let time pass until something ends."""
        computing = sum(not row.communicates for row in active)
        rate = self._rate(computing, len(active) + sum(row.sends for row in active))
        ends_s = {id(row): row.next_s / (1.0 if row.communicates else rate) for row in active}
        passed_s = min(ends_s.values())
        self.now_s += passed_s
        for row in active:
            assert row.left_s is not None
            pace = 1.0 if row.communicates else rate
            # what ends now ends exactly, whatever rounding says
            done_s = row.next_s if ends_s[id(row)] <= passed_s else passed_s * pace
            row.left_s = max(row.left_s - done_s, 0.0 if row.communicates else row.waits_s)
            if row.begin_s >= 0.0 and row.at < len(row.actions):
                row.busy_s += passed_s * row.actions[row.at].kind.is_compute

    def _rate(self, computing: int, taking: int) -> float:
        """How fast ranks compute, of all `taking` a part of the cores: communication takes what it
        takes of all ranks, and where more is at work than there are ranks, all get less."""
        ranks, moving = len(self.rows), taking - computing
        left = (ranks - moving) / max(computing, 1)
        return min(self.slowdown, max(left, ranks / taking))

    def _advance(self, row: _Row) -> bool:
        """Go on with a rank until it computes or waits; whether anything happened."""
        if row.done_s >= 0.0 or (row.left_s is not None and row.left_s > 0.0):
            return False
        before, started = row.at, row.left_s is not None
        if started and not self._ended(row):
            return True
        if row.begin_s < 0.0 and not started:
            row.begin(row.head_s, 0.0)
            return True
        while row.at < len(row.actions):
            action, length_s = row.actions[row.at], row.lengths_s[row.at]
            if not action.kind.is_recv:
                row.starts_s.append(self.now_s)
                waits_s = self.waits_s.get((action.kind, action.stage), 0.0)
                row.begin(length_s, length_s if action.kind.is_send else waits_s)
                return True
            if not self._received(row, action):
                return started or row.at > before
            row.at += 1
        row.begin(row.tail_s, row.tail_s)
        return True

    def _ended(self, row: _Row) -> bool:
        """Close the action, or the tail, that has nothing left; whether more follows."""
        row.left_s = None
        if row.begin_s < 0.0:
            row.begin_s = self.now_s
            return True
        if row.at == len(row.actions):
            row.done_s = self.now_s
            return False
        row.ends_s.append(self.now_s)
        action = row.actions[row.at]
        if action.kind.is_send:
            self.sent[matching_recv(action)] = row.starts_s[-1], self.now_s
        row.at += 1
        return True

    def _received(self, row: _Row, action: Action) -> bool:
        """Take the message if it is there; whether the rank goes on."""
        span = self.sent.get(action)
        if span is None:
            return False
        row.starts_s.append(span[0])
        row.ends_s.append(span[1])
        return True
