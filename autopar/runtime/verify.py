"""Comparing a parallel program with the eager single-device model, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.collective import Collective
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.reference import MasterWeights, reference_random

LossFn = Callable[[Any, Any], Tensor]
_LEAST = 1e-12
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Relative error by dtype of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Relative error of one quantity: largest difference over the largest reference magnitude."""

    what: str
    name: str
    step: int
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank compared: every deviation, in the order met, and what it communicated.

    `skipped` counts the steps that overflowed on one device, in which nothing was trained.
    """

    rank: int
    deviations: tuple[Deviation, ...]
    losses: tuple[float, ...]
    collectives: tuple[Collective, ...]
    skipped: int = 0


def call_model(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Tensor:
    """The loss of the eager model on a batch."""
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    if loss_fn is not None:
        return loss_fn(output, batch)
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss  # type: ignore[no-any-return]


def relative_error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """max |value - reference| / max(max |reference|, floor); NaN counts as infinite.

    `floor` is the size below which a tensor is nothing but the rounding of others.
    """
    value, reference = value.detach().double().cpu(), reference.detach().double().cpu()
    if value.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    difference = (value - reference).abs().max()
    error = float(difference / reference.abs().max().clamp_min(max(floor, _LEAST)))
    return float("inf") if isnan(error) else error


def compare(
    parallel: ParallelModel,
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    seed: int,
) -> RankReport:
    """Train both side by side; all ranks call. `parallel` must have an optimizer of the same kind.

    Compared are the initial weights, every step's loss and gradient norm, the first step's
    gradients, and the weights at the end. A model in bfloat16 or float16 is trained with float32
    copies of its weights on either side, which are what is compared.
    """
    reference = copy.deepcopy(model)
    reference.train()
    masters = MasterWeights(reference, make_optimizer, _small_scale(parallel))
    found: list[Deviation] = []
    losses: list[float] = []

    def note(
        what: str, name: str, step: int, value: Tensor, expected: Tensor, floor: float = 0.0
    ) -> None:
        error = relative_error(value, expected, floor)
        found.append(Deviation(what=what, name=name, step=step, error=error))

    known = {**dict(reference.named_parameters(remove_duplicate=False)), **masters.names}
    _compare_weights(parallel, known, 0, note, floor=0.0)
    start = [p.detach().clone() for p in masters.parameters]
    collectives: tuple[Collective, ...] = ()
    skipped = 0
    for step in range(steps):
        recorder = parallel.world.recorder
        recorder.start()
        loss = parallel.backward_step(batch)
        collectives = recorder.stop()
        with reference_random(seed, step):
            expected = call_model(reference, batch, loss_fn)
        masters.backward(expected)
        skipped += masters.overflowed
        losses.append(float(loss))
        note("loss", "loss", step, loss, expected)
        if step == 0:
            _compare_gradients(parallel, masters, step, note)
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in masters.parameters if p.grad is not None]
        )
        note("gradient norm", "all", step, parallel.grad_norm(), norm)
        masters.step()
        if parallel.optimizer is not None:
            recorder.start()
            parallel.optimizer.step()
            collectives += recorder.stop()
            parallel.optimizer.zero_grad(set_to_none=True)
    # A bias whose gradient is zero but for rounding moves by rounding: next to what training moves
    # elsewhere, that is nothing.
    moved = [(p - old).abs().max() for p, old in zip(masters.parameters, start, strict=True)]
    largest = max((float(m.detach()) for m in moved), default=0.0)
    _compare_weights(parallel, known, steps, note, floor=largest)
    return RankReport(
        rank=parallel.world.rank,
        deviations=tuple(found),
        losses=tuple(losses),
        collectives=collectives,
        skipped=skipped,
    )


def _small_scale(parallel: ParallelModel) -> LossScale | None:
    """A loss scale for both sides whose first step does not overflow: the gradient of a float16
    loss, which one device starts with, is the scale itself."""
    if parallel.loss_scaler is None:
        return None
    scale = LossScale(init=2.0**8)
    parallel.loss_scaler.load_state_dict(scale.state_dict())
    return scale


_Note = Callable[..., None]


def _compare_weights(
    parallel: ParallelModel, known: Mapping[str, Tensor], step: int, note: _Note, *, floor: float
) -> None:
    what = "initial weights" if step == 0 else f"weights after {step} steps"
    for fqn in parallel.store.entries:
        whole = parallel.store.gather_full(fqn)
        if fqn in known:
            note(what, fqn, step, whole, known[fqn], floor)


def _compare_gradients(
    parallel: ParallelModel, masters: MasterWeights, step: int, note: _Note
) -> None:
    grads = [p.grad for p in masters.parameters if p.grad is not None]
    largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
    for fqn, entry in parallel.store.entries.items():
        if not entry.spec.trainable:
            continue
        master = masters.names[fqn]
        whole, expected = parallel.store.gather_gradient(fqn), master.grad
        zeros = torch.zeros_like(master)
        note(
            "gradient",
            fqn,
            step,
            zeros if whole is None else whole,
            zeros if expected is None else expected,
            largest * rounding(entry.local.dtype),
        )


def rounding(dtype: torch.dtype) -> float:
    """A gradient this much smaller than the largest one is within the rounding of the tolerance."""
    return torch.finfo(dtype).eps / TOLERANCE[str(dtype).removeprefix("torch.")]
