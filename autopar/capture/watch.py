"""What torch.export leaves out without a word, caught while it traces.

A custom `autograd.Function` keeps its forward and loses its backward, a gradient hook is dropped,
activation checkpointing is undone. The first two change gradients, so they are refused; the last
does not, so it is noted.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.locations import is_user_file, short_location
from autopar.errors import CaptureError

CHECKPOINT_NOTE = (
    "activation checkpointing or offload inside the model was ignored: "
    "the plan decides what is recomputed"
)

_CUSTOM_OP_MODULE = "torch._library.autograd"
"""Where torch.library makes the Function of a custom op; the op itself is what gets traced."""


@contextlib.contextmanager
def watch_silent_drops(notes: list[str]) -> Iterator[None]:
    """Refuse (CaptureError) or note what would be dropped; torch is as before on exit."""
    # mock.patch.object restores the three attributes whatever happens inside.
    function, hooks = torch.autograd.Function, saved_tensors_hooks
    with (
        mock.patch.object(function, "apply", classmethod(_watched_apply(function.apply, notes))),
        mock.patch.object(hooks, "__enter__", _watched_enter(hooks.__enter__, notes)),
        mock.patch.object(Tensor, "register_hook", _refuse_hook),
    ):
        yield


def _watched_apply(apply: Any, notes: list[str]) -> Callable[..., Any]:
    original = apply.__func__

    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            _add_once(notes, CHECKPOINT_NOTE)
            # its own forward runs the function under no_grad, for the backward to run it again
            function, _preserve_rng_state, *inputs = args
            return function(*inputs)
        if cls.__module__ == CheckpointFunction.__module__:
            _add_once(notes, CHECKPOINT_NOTE)
        elif cls.__module__ != _CUSTOM_OP_MODULE and torch.is_grad_enabled():
            raise CaptureError(
                f"{_caller()}: autograd.Function {cls.__qualname__} would lose its backward in "
                "capture; make it an op with torch.library.custom_op and register_autograd"
            )
        return original(cls, *args, **kwargs)

    return watched


def _watched_enter(enter: Callable[..., Any], notes: list[str]) -> Callable[..., Any]:
    def watched(self: saved_tensors_hooks) -> Any:
        _add_once(notes, CHECKPOINT_NOTE)
        return enter(self)

    return watched


def _refuse_hook(_self: Tensor, _hook: object) -> None:
    raise CaptureError(
        f"{_caller()}: a gradient hook (Tensor.register_hook) would be dropped in capture; "
        "write its effect as an op, with torch.library.custom_op and register_autograd"
    )


def refuse_cumulative_averages(model: nn.Module) -> None:
    """CaptureError for a batch norm in training whose momentum follows from its counter."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.training and module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"module {path}: {type(module).__name__} has momentum None, so that its running "
                "statistics are a cumulative average; expected a number"
            )


def refuse_module_hooks(model: nn.Module) -> None:
    """CaptureError if a module has a backward hook, which a graph of ops cannot run."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {name or type(module).__name__} has a backward hook, which would be "
                "dropped in capture; remove it before planning"
            )


def _add_once(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _caller() -> str:
    """File and line of the innermost frame of the model's own code."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return short_location(frame.filename, frame.lineno)
    return "in the model"
