"""The user's optimizer on the parallel parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.runtime.parameters import ParameterStore

OptimizerSpec = (
    Optimizer
    | type[Optimizer]
    | tuple[type[Optimizer], Mapping[str, Any]]
    | Callable[[list[nn.Parameter]], Optimizer]
)
"""A class, a class with keyword arguments, a function of the parameters, or an optimizer that was
built on the original model and has not stepped yet."""

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam")
}
"""Optimizers that can be named on the command line."""


FUSED: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that torch can step in one kernel on a GPU."""


def bind_optimizer(
    optimizer: OptimizerSpec, store: ParameterStore, model: nn.Module | None = None
) -> Optimizer:
    """The optimizer of this rank's parameters, after whose steps the program reads new weights.

    An optimizer that exists is bound anew, in place: its groups keep their options and hold this
    rank's part of the parameters they held of `model`, so that it, and schedulers built on it, go
    on to work and the original weights can be freed. Raises InputError if it has stepped already,
    or holds tensors that are no parameters of `model`.
    """
    bound = _bind(optimizer, store, model)
    bound.register_step_post_hook(lambda *_: store.update.refresh())
    store.update.is_hooked = True
    return bound


def _bind(optimizer: OptimizerSpec, store: ParameterStore, model: nn.Module | None) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        if model is None:
            raise InputError("an optimizer that exists can only be bound with its model")
        return _rebind(optimizer, store, model)
    parameters = [p for p in store.tree.parameters() if p.requires_grad]
    # A rank may hold nothing to train (a frozen stage); torch refuses an empty list.
    given = parameters or [nn.Parameter(torch.empty(0, device=store.world.device))]
    if isinstance(optimizer, tuple):
        cls, options = optimizer
        return cls(given, **_fused(cls, options, store.world.device))
    if isinstance(optimizer, type):
        return optimizer(given, **_fused(optimizer, {}, store.world.device))
    build: Callable[[list[nn.Parameter]], Optimizer] = optimizer  # type: ignore[assignment]
    return build(given)


def _fused(
    cls: type[Optimizer], options: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """The options, with a fused step where there is one and they do not say how to step: torch's
    own choice on GPUs takes temporaries as large as the parameters."""
    chosen = dict(options)
    if cls in FUSED and device.type == "cuda" and not {"fused", "foreach"} & chosen.keys():
        chosen["fused"] = True
    return chosen


def _rebind(optimizer: Optimizer, store: ParameterStore, model: nn.Module) -> Optimizer:
    if optimizer.state:
        raise InputError(
            f"{type(optimizer).__name__} has stepped already: its state belongs to the original "
            f"weights; give a new optimizer, and load a checkpoint to go on from"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    ours = dict(store.tree.named_parameters(remove_duplicate=False))
    groups: list[list[nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        bound = []
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise InputError(
                    f"parameter {position} of group {number} of {type(optimizer).__name__} (shape "
                    f"{tuple(parameter.shape)}) is not a parameter of the model; build the "
                    f"optimizer on the parameters of the model that is parallelized"
                )
            if name in ours:
                bound.append(ours[name])
        groups.append(bound)
    for group, bound in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = bound
    return optimizer
