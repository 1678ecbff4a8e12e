"""Where in the model's own code something happened."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_CAPTURE = str(Path(__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_user_file(filename: str) -> bool:
    """Whether a file is the model's own code: not torch, not autopar's capture, not generated."""
    outside = filename.startswith(("<", _TORCH, _CAPTURE)) or "/importlib/" in filename
    return not outside and not filename.endswith(("/contextlib.py", "/unittest/mock.py"))


def short_location(filename: str, line: int | None) -> str:
    """`model.py:123`: the same on every machine, so no directories."""
    return f"{Path(filename).name}:{line}"


def location_in_stack(stack_trace: str | None) -> str:
    """The innermost user frame of a node's recorded stack, or the empty string."""
    for filename, line in reversed(_FRAME.findall(stack_trace or "")):
        if is_user_file(filename):
            return short_location(filename, int(line))
    return ""


def location_of_error(error: BaseException) -> str:
    """The innermost user frame an exception passed through, or the empty string."""
    found = ""
    trace: TracebackType | None = error.__traceback__
    inside_capture = False
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        inside_capture = inside_capture or filename.startswith(_CAPTURE)
        # frames above capture's own are the caller of autopar, not the model
        if inside_capture and is_user_file(filename):
            found = short_location(filename, trace.tb_lineno)
        trace = trace.tb_next
    return found
