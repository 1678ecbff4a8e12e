"""Moving a value from one placement to another on one mesh axis.

`TRANSITIONS` is the single list of moves. The cost model prices the collectives it names, the code
generator prints the function of that name, and the runtime implements it, so that what is priced is
what is emitted is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autopar.ir.placement import ByExpert, Partial, Placement, Replicate, Shard


class CollectiveOp(StrEnum):
    """A communication primitive. Its `bytes` are those of the whole (unsharded) tensor moved."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One legal move on one axis.

    `function` is the runtime's name for it; `forward` and `backward` are the collectives that run
    in each pass, None where the move is local; `why` is the comment printed beside it.
    """

    function: str
    forward: CollectiveOp | None = None
    backward: CollectiveOp | None = None
    why: str


_AR, _AG = CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_GATHER
_RS, _A2A = CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_TO_ALL

TRANSITIONS: dict[tuple[str, str], Transition] = {
    ("R", "R*"): Transition(
        function="sum_gradient", backward=_AR, why="gradients of the shards are summed in backward"
    ),
    ("R", "S"): Transition(function="take_shard", backward=_AG, why="each rank keeps its shard"),
    ("R", "P"): Transition(function="keep_on_first", why="counted once: other ranks add zero"),
    ("R*", "S"): Transition(function="take_shard_of_partial", why="each rank keeps its shard"),
    ("S", "R"): Transition(function="gather", forward=_AG, why="shards are gathered"),
    ("S", "R*"): Transition(
        function="gather_sum_gradient",
        forward=_AG,
        backward=_RS,
        why="shards are gathered; their gradients are summed and scattered in backward",
    ),
    ("S", "S"): Transition(
        function="exchange", forward=_A2A, backward=_A2A, why="shards move to another dim"
    ),
    ("P", "R"): Transition(function="sum_partial", forward=_AR, why="partial sums are added"),
    ("P", "R*"): Transition(
        function="sum_partial_and_gradient",
        forward=_AR,
        backward=_AR,
        why="partial sums are added; gradients likewise in backward",
    ),
    ("P", "S"): Transition(
        function="sum_and_scatter",
        forward=_RS,
        backward=_AG,
        why="partial sums are added and scattered",
    ),
}
"""(from, to) in the kinds `S`, `R`, `R*`, `P`. A pair that is absent is not offered; rows by expert
(`E`) come and go through ops, which know the routing."""


def kind(placement: Placement) -> str:
    """The key of a placement in `TRANSITIONS`."""
    match placement:
        case Shard():
            return "S"
        case Partial():
            return "P"
        case ByExpert():
            return "E"
        case Replicate(grad_partial=True):
            return "R*"
        case _:
            return "R"


def transition(src: Placement, dst: Placement, *, differentiable: bool) -> Transition | None:
    """The move from `src` to `dst`, or None where nothing has to be done.

    A value without gradient has one replicated form, so `R` and `R*` are the same for it. Raises
    KeyError where no such move exists; `can_move` tells beforehand.
    """
    if src == dst:
        return None
    key = (kind(src), kind(dst))
    if not differentiable:
        key = (key[0].rstrip("*"), key[1].rstrip("*"))
        if key == ("R", "R"):
            return None
        move = TRANSITIONS[key]
        return Transition(function=move.function, forward=move.forward, why=move.why)
    return TRANSITIONS[key]


def can_move(src: Placement, dst: Placement, *, differentiable: bool) -> bool:
    """Whether `transition` exists (or nothing has to be done)."""
    try:
        transition(src, dst, differentiable=differentiable)
    except KeyError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Collective:
    """One communication of a plan, as priced, emitted and counted.

    `nbytes` is the size of the whole tensor over the group (the input of an all-reduce or
    reduce-scatter, the result of an all-gather, one rank's buffer of an all-to-all, the message of
    a send). `axes` are the mesh axes of the group. `phase` is `forward`, `backward`, `recompute`,
    `setup` (once, before the micro-batches), `sync` (once, gradients after their last micro-batch)
    or `update` (once, weights after the optimizer). `count` is per step and per rank of the group.
    """

    op: CollectiveOp
    nbytes: int
    axes: tuple[str, ...]
    phase: str
    value: str = ""
    count: int = 1
