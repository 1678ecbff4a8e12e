"""Initial weights that do not depend on the plan.

A whole tensor is computed under a seed of its own on every rank that holds a part of it, then cut.
No rank draws numbers for a shard, so layouts, stages and the order of modules change nothing.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.counter_random import stream
from autopar.runtime.deferred import InitTape
from autopar.runtime.parameters import ParameterStore

_RESETS = ("reset_parameters", "_reset_parameters")
"""Methods by which torch's own modules fill their parameters and buffers, first match used."""


def initialize(
    store: ParameterStore,
    model: nn.Module,
    *,
    seed: int = 0,
    tape: InitTape | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Fill this rank's parameters and buffers with the values that `initial_values` gives.

    `extra` has values of names that the model does not know, such as constants of its graph.
    """
    extra = extra or {}
    wanted = [fqn for fqn in store.entries if fqn not in extra]
    for fqn, value in initial_values(model, wanted, seed=seed, tape=tape):
        store.load_full(fqn, value)
    for fqn in store.entries:
        if fqn in extra:
            store.load_full(fqn, extra[fqn])


def initial_values(
    model: nn.Module, names: Iterable[str], *, seed: int = 0, tape: InitTape | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole values of parameters and buffers of a model, one module at a time.

    Tensors with data are taken as they are. Those on the meta device are made on the CPU: from the
    tape where they were built under `deferred_init`, else by their module's `reset_parameters`
    under a seed of its own. Raises InputError naming the tensor where neither fills it, or where
    the model has no such name.
    """
    known: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    known.update(model.named_buffers(remove_duplicate=False))
    by_module: dict[str, list[str]] = {}
    for name in names:
        if name not in known:
            raise InputError(f"the model has no parameter or buffer {name!r}")
        value = known[name]
        if not value.is_meta:
            yield name, value.detach()
        elif tape is not None and tape.knows(value):
            yield name, tape.materialize(value, seed)
        else:
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
    for path, group in by_module.items():
        filled = _reset(model.get_submodule(path), path, seed)
        for name in group:
            yield name, filled[name.rpartition(".")[2]]


def _reset(module: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """The own tensors of a module on meta, filled by its reset method."""
    first = _filled(module, path, seed, fill=0)
    second = _filled(module, path, seed, fill=1)
    for name, value in first.items():
        if not value.equal(second[name]):
            raise InputError(
                f"{_join(path, name)} is on the meta device, and {type(module).__name__}."
                f"{_method(module)} does not fill it; build the model on the CPU, or under "
                f"autopar.deferred_init()"
            )
    return first


def _filled(module: nn.Module, path: str, seed: int, *, fill: int) -> dict[str, Tensor]:
    """Reset a copy of the module whose own tensors first hold `fill` everywhere."""
    method = _method(module)
    if not method:
        own = [*module._parameters, *module._buffers]
        raise InputError(
            f"{_join(path, own[0])} is on the meta device, and {type(module).__name__} has no "
            f"reset_parameters to fill it; build the model on the CPU, or under "
            f"autopar.deferred_init()"
        )
    twin = copy.copy(module)
    own_parameters: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        value = None if parameter is None else _fresh(parameter, fill)
        own_parameters[name] = None if value is None else nn.Parameter(value, False)
    own_buffers = {
        name: None if buffer is None else _fresh(buffer, fill)
        for name, buffer in module._buffers.items()
    }
    twin.__dict__["_parameters"] = own_parameters
    twin.__dict__["_buffers"] = own_buffers
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(name_seed(seed, path))
        getattr(twin, method)()
    tensors = {**twin._parameters, **twin._buffers}
    return {name: value.detach() for name, value in tensors.items() if value is not None}


def _fresh(value: Tensor, fill: int) -> Tensor:
    if not value.is_meta:
        return value.detach().clone()
    return torch.full(value.shape, fill, dtype=value.dtype, device="cpu")


def _method(module: nn.Module) -> str:
    return next((name for name in _RESETS if callable(getattr(module, name, None))), "")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def name_seed(seed: int, name: str) -> int:
    """A seed for torch's generator that belongs to a name."""
    digest = hashlib.sha256(name.encode()).digest()
    return stream(seed, int.from_bytes(digest[:8], "big")) >> 1
