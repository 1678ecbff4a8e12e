"""What a pipeline rank does, as data: actions, and a schedule of them.

One action list is validated (`validate`), priced (`simulate`), given its messages (`lower`) and run
by the executor. A schedule may hold several stages per rank (interleaving, V shapes) and may split
a backward into its input and weight parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from autopar.errors import InputError


class ActionKind(StrEnum):
    """What one action does for one stage and one micro-batch.

    A send stands on the stage that produced the value, a receive on the stage that needs it: `1SF0`
    is matched by `2RF0`, and `2SB0` by `1RB0`.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"

    __hash__ = str.__hash__  # an Enum's own runs in Python, and actions are looked up by kind

    @property
    def is_send(self) -> bool:
        """Whether the action hands a value to another rank."""
        return self in _SENDS

    @property
    def is_recv(self) -> bool:
        """Whether the action takes a value from another rank."""
        return self in _RECVS

    @property
    def is_compute(self) -> bool:
        """Whether the action runs ops of the stage."""
        return self not in _MESSAGES


_SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
_RECVS = frozenset({ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD})
_MESSAGES = _SENDS | _RECVS
_TEXT = re.compile(rf"^(\d+)({'|'.join(sorted(ActionKind, key=len, reverse=True))})(\d+)$")


class Action(NamedTuple):
    """One step of one rank. The text form is stage, kind, micro-batch: `2F0`."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Inverse of `str`. Raises InputError on anything else."""
        match = _TEXT.match(text)
        if match is None:
            kinds = ", ".join(ActionKind)
            raise InputError(
                f"not a schedule action: {text!r}; expected STAGE KIND MICRO_BATCH without spaces, "
                f"such as 2F0, with KIND one of {kinds}"
            )
        return Action(ActionKind(match.group(2)), int(match.group(1)), int(match.group(3)))


MATCHING_RECV: dict[ActionKind, tuple[ActionKind, int]] = {
    ActionKind.SEND_FORWARD: (ActionKind.RECV_FORWARD, 1),
    ActionKind.SEND_BACKWARD: (ActionKind.RECV_BACKWARD, -1),
}
"""Send to (receive, offset): a send on stage s is taken by that receive on stage s + offset."""


SENT_AS: dict[ActionKind, ActionKind] = {
    ActionKind.FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.BACKWARD: ActionKind.SEND_BACKWARD,
    ActionKind.BACKWARD_INPUT: ActionKind.SEND_BACKWARD,
}
"""Kinds that make a value for the next stage and need one from the last, and how it is sent."""


def matching_recv(send: Action) -> Action:
    """The receive that takes what `send` sends."""
    kind, offset = MATCHING_RECV[send.kind]
    return Action(kind, send.stage + offset, send.micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The action list of every pipeline rank for one training step.

    Without `flushes` the list is a window of an endless stream (see `endless`).
    """

    name: str
    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]
    flushes: bool = True

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks; fewer than `num_stages` where ranks hold several stages."""
        return len(self.ranks)

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are spelled out (see `lower.insert_communication`)."""
        return any(not _MESSAGES.isdisjoint({a.kind for a in row}) for row in self.ranks)

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The pipeline rank that runs each stage.

        Raises InputError where a stage is on no rank or on two.
        """
        owners: dict[int, int] = {}
        for rank, row in enumerate(self.ranks):
            for stage in {action.stage for action in row}:
                if owners.setdefault(stage, rank) != rank:
                    raise InputError(
                        f"schedule {self.name!r}: stage {stage} is on rank {owners[stage]} and on "
                        f"rank {rank}; a stage belongs to one rank"
                    )
        expected = set(range(self.num_stages))
        if owners.keys() != expected:
            odd = min(owners.keys() ^ expected)
            raise InputError(
                f"schedule {self.name!r}: stage {odd} is "
                f"{'on no rank' if odd in expected else f'on rank {owners[odd]}'}; expected every "
                f"stage from 0 to {self.num_stages - 1} on one rank"
            )
        return tuple(owners[stage] for stage in range(self.num_stages))

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(self.rows()))

    def rows(self) -> Iterator[str]:
        """The actions of each rank as text, `0F0 0F1 0B0 0B1`: the form that a plan stores."""
        return (" ".join(map(str, row)) for row in self.ranks)

    @staticmethod
    def parse(
        name: str,
        num_stages: int,
        num_micro_batches: int,
        rows: Iterable[str],
        *,
        flushes: bool = True,
    ) -> Schedule:
        """Inverse of `rows`. Raises InputError on text that is no action; does not validate."""
        return Schedule(
            name=name,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            ranks=tuple(tuple(map(Action.parse, row.split())) for row in rows),
            flushes=flushes,
        )
