"""Errors a user can meet.

Each says what went wrong, where, what was expected against what was found, and what to do. The
command line turns them into one message and an exit status; nothing else is caught there.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error autopar raises on purpose. `exit_status` is the command line's."""

    exit_status = 2


class InputError(AutoparError):
    """The request is malformed: an unknown model, cluster, pin, file or option."""


class CaptureError(AutoparError):
    """The model cannot be captured faithfully as a graph."""


class UnsupportedOp(AutoparError):
    """An op cannot be priced or emitted."""


class InfeasiblePlan(AutoparError):
    """No plan satisfies the memory limits and pins; the message carries the numbers."""

    exit_status = 1


class PlanMismatch(AutoparError):
    """A plan is broken, stale, or belongs to another model or cluster; names the field."""


class VerificationError(AutoparError):
    """The parallel program and the single-device model disagree; names the first tensor."""

    exit_status = 1


class RuntimeFailure(AutoparError):
    """A rank failed while a program ran; names rank, stage, micro-batch and action."""

    exit_status = 1
