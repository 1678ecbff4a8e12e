"""Whether a captured graph says what its model does: same loss, same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from autopar.capture.entries import Batch, example_tensors, model_device, read_entries
from autopar.capture.interpret import run_graph
from autopar.capture.outputs import check_loss, find_loss
from autopar.capture.program import Captured
from autopar.capture.tracing import LossFn
from autopar.errors import CaptureError
from autopar.ir.graph import OpGraph, SourceKind

TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 1e-2,
}
"""Largest relative difference, in the norm, that rounding alone is taken for."""

_SEED = 0


def verify_capture(
    model: nn.Module, batch: Batch, captured: Captured, loss_fn: LossFn | None = None
) -> None:
    """Run graph and model on `batch` with the same random numbers; compare loss and gradients.

    `batch` may have another number of samples than the capture. Needs real weights. The model's
    gradients are left untouched. Raises CaptureError naming the loss or the parameter that differs.
    """
    entries = read_entries(batch)
    device = model_device(model)
    if device.type == "meta":
        raise CaptureError("the model has no weights (meta device), so its capture cannot be run")
    tensors = example_tensors(entries, entries.samples, device)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def model_loss() -> Tensor:
        inputs = entries.batch(tensors)
        output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
        return find_loss(output) if loss_fn is None else check_loss(loss_fn(output, inputs))

    def graph_loss() -> Tensor:
        values = source_values(captured.graph, model, tensors, captured.constants)
        loss, _ = run_graph(captured.graph, values, entries.samples)
        assert loss is not None
        return loss

    expected, expected_grads = _loss_and_gradients(model_loss, parameters, device)
    found, found_grads = _loss_and_gradients(graph_loss, parameters, device)
    _compare("the loss", expected, found)
    for name in parameters:
        _compare(f"the gradient of {name}", expected_grads[name], found_grads[name])


def source_values(
    graph: OpGraph,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The tensor of every source by the source's name."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    device = model_device(model)
    values = {}
    for source in graph.sources:
        if source.kind is SourceKind.INPUT:
            values[source.name] = tensors[source.fqn]
        elif source.kind is SourceKind.CONSTANT:
            values[source.name] = constants[source.fqn].to(device)
        else:
            values[source.name] = state[source.fqn]
    return values


def _loss_and_gradients(
    compute: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], device: torch.device
) -> tuple[Tensor, dict[str, Tensor | None]]:
    devices = [device] if device.type == "cuda" else []
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(_SEED)
            loss = compute()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), {name: p.grad for name, p in parameters.items()}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = kept[name]


def _compare(what: str, expected: Tensor | None, found: Tensor | None) -> None:
    if expected is None or found is None:
        if expected is not found:
            one = "the model" if found is None else "the captured graph"
            raise CaptureError(f"capture is not faithful: only {one} has {what}")
        return
    scale = max(expected.double().norm().item(), 1e-12)
    error = (expected.double() - found.double()).norm().item() / scale
    if not error <= TOLERANCE.get(expected.dtype, 1e-4):
        raise CaptureError(
            f"capture is not faithful: {what} differs by {error:.1e} of its norm "
            f"(model {expected.double().norm():.6g}, captured graph {found.double().norm():.6g})"
        )
