"""What a model returns: its loss, its other tensors, and the structure around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopar.errors import CaptureError

_GIVE_A_LOSS = (
    "return a scalar tensor or an output with a `loss` entry, "
    "or pass loss_fn=lambda output, batch: ..."
)


def find_loss(output: Any) -> Tensor:
    """The output itself when it is a scalar, else its `loss` entry; else CaptureError."""
    if isinstance(output, Tensor) and output.ndim == 0:
        return check_loss(output)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise CaptureError(f"the model returns {_describe(output)} without a loss; {_GIVE_A_LOSS}")
    return check_loss(loss)


def check_loss(loss: object) -> Tensor:
    """The loss, if it is a floating scalar tensor; else CaptureError."""
    if not isinstance(loss, Tensor):
        raise CaptureError(f"the loss is a {type(loss).__name__}, not a tensor; {_GIVE_A_LOSS}")
    if loss.ndim != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"the loss is a {loss.dtype} tensor of shape {tuple(loss.shape)}, expected a floating "
            "scalar; reduce it, for example with .mean()"
        )
    return loss


def _describe(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with keys {', '.join(map(str, output)) or '(none)'}"
    return f"a {type(output).__name__}"


class OutputTree:
    """The structure of a model's output as JSON, and the tensors taken out of it, in order.

    The loss becomes `{"$loss": true}`, tensor `i` of `tensors` becomes `{"$output": i}`, a tuple
    `{"$tuple": [...]}`. An object that is none of these (a key-value cache, say) is left out as
    `{"$dropped": class}` with a note.
    """

    def __init__(self, output: Any, loss: Tensor) -> None:
        self._loss = loss
        self.tensors: list[Tensor] = []
        self.notes: list[str] = []
        self.tree = self._describe(output, "output")

    def _describe(self, value: Any, path: str) -> Any:
        if value is self._loss:
            return {"$loss": True}
        if isinstance(value, Tensor):
            return {"$output": self._index(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            if type(value) is not dict:
                self.notes.append(f"{path} is returned as a dict, not as {type(value).__name__}")
            return {str(key): self._describe(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [self._describe(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, tuple):
            items = [self._describe(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return {"$tuple": items}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            self.notes.append(f"{path} is returned as a dict, not as {type(value).__name__}")
            return self._describe(fields, path)
        self.notes.append(f"{path} ({type(value).__name__}) is not returned")
        return {"$dropped": type(value).__name__}

    def _index(self, tensor: Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return i
        self.tensors.append(tensor)
        return len(self.tensors) - 1
