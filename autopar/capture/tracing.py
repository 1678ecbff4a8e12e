"""Model and batch to an exported program that returns the loss and the other outputs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from autopar.capture.entries import Entries, example_tensors, model_device
from autopar.capture.grouped import traceable_grouped_mm
from autopar.capture.locations import location_of_error
from autopar.capture.outputs import OutputTree, check_loss, find_loss
from autopar.capture.proxies import lean_nodes
from autopar.capture.repeated import RepeatedCalls
from autopar.capture.sizes import FIXED_SIZES
from autopar.capture.templates import Template
from autopar.capture.watch import (
    refuse_cumulative_averages,
    refuse_module_hooks,
    watch_silent_drops,
)
from autopar.errors import CaptureError

LossFn = Callable[[Any, Any], Tensor]
PREFIX = "model"
"""The name under which the wrapper holds the user's model."""

_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "UserError", "DataDependentOutputException")


class TraceFailed(CaptureError):
    """The model's code or torch failed while it was traced, perhaps over a symbolic size."""


class ModelWithLoss(nn.Module):
    """Calls the model on a batch; returns the loss, then the other tensors of its output.

    The structure of the output goes to `record`, for the trace returns tensors only.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Entries,
        loss_fn: LossFn | None,
        record: Callable[[OutputTree], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._entries = entries
        self._loss_fn = loss_fn
        self._record = record

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Loss and other output tensors."""
        batch = self._entries.batch(tensors)
        output = self.model(**batch) if isinstance(batch, Mapping) else self.model(*batch)
        if self._loss_fn is None:
            loss = find_loss(output)
        else:
            loss = check_loss(self._loss_fn(output, batch))
        tree = OutputTree(output, loss)
        self._record(tree)
        return loss, *tree.tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """An exported program, the JSON structure of the model's output, and notes.

    The program has calls of `templates` for modules that repeat.
    """

    program: ExportedProgram
    templates: tuple[Template, ...]
    output_tree: str
    notes: tuple[str, ...]


def trace(
    model: nn.Module,
    entries: Entries,
    loss_fn: LossFn | None,
    *,
    samples: int,
    symbolic: bool,
    every_call: bool = False,
) -> Trace:
    """Export the model with an example of `samples` samples, their number symbolic or fixed.

    With `every_call` equal calls of modules are all traced.

    Raises CaptureError naming the cause and the line of the model, TraceFailed where the cause may
    be that sizes are symbolic or the number of samples is not the user's.
    """
    _refuse_outer_autocast()
    refuse_module_hooks(model)
    refuse_cumulative_averages(model)
    trees: list[OutputTree] = []
    wrapper = ModelWithLoss(model, entries, loss_fn, trees.append)
    tensors = example_tensors(entries, samples, model_device(model))
    dims = {key: {0: Dim.AUTO} if symbolic and key in entries.sampled else None for key in tensors}
    notes: list[str] = []
    repeated = RepeatedCalls(model)
    sharing = contextlib.nullcontext() if every_call else repeated.active()
    try:
        with (
            watch_silent_drops(notes),
            traceable_grouped_mm(),
            sharing,
            lean_nodes(),
            _alone(),
            _quiet(),
        ):
            program = torch.export.export(
                wrapper, (tensors,), dynamic_shapes={"tensors": dims}, strict=False
            )
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(error) from error
    tree = trees[-1]
    return Trace(
        program=program,
        templates=tuple(repeated.templates),
        output_tree=json.dumps(tree.tree),
        notes=(*notes, *tree.notes),
    )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A model that asks finds itself on one device: `nn.SyncBatchNorm` is then a batch norm, which
    is synchronised anyway."""
    with mock.patch.object(torch.distributed, "is_initialized", return_value=False):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what torch writes of a failed export; the error raised says it in one line."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
        sys.stderr.write(text.getvalue())
    finally:
        logging.disable(disabled)


def _refuse_outer_autocast() -> None:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            raise CaptureError(
                f"capture runs under torch.autocast({kind!r}), which the graph cannot keep; "
                "capture outside of it and give the precision to the plan"
            )


def capture_error(error: Exception) -> CaptureError:
    """The cause in one line, with the model's source line and, for known causes, the remedy."""
    where = location_of_error(error)
    prefix = f"{where}: " if where else ""
    if type(error).__name__ in _DATA_DEPENDENT or "data-dependent" in str(error).lower():
        return CaptureError(
            f"{prefix}control flow or a size depends on the values of a tensor ({_cause(error)}); "
            f"{FIXED_SIZES}"
        )
    return TraceFailed(f"{prefix}the model cannot be traced: {_cause(error)}")


def _cause(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
