"""Where a model comes from: a zoo name, or a function in a module or file."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError

Batch = Mapping[str, Any] | tuple[Any, ...]
LossFn = Callable[[Any, Any], Tensor]
Built = tuple[nn.Module, Batch, LossFn | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model that can be built again in any process. `spec` is the text it was named by.

    `make(samples)` builds model, batch and loss; `make_batch`, where the source has it, the batch
    alone.
    """

    name: str
    spec: str
    seq_len: int | None
    make: Callable[[int | None], Built]
    default_batch: int | None = None
    make_batch: Callable[[int | None], Batch] | None = None

    def build(self, *, device: str, dtype: torch.dtype | None, samples: int | None) -> Built:
        """The model, a batch and the loss function, on `device` (`meta` allocates nothing).

        `samples` asks for a batch of that many samples where the source can make one. Floating
        parameters and inputs are cast to `dtype`.
        """
        try:
            with torch.device(device):
                model, batch, loss_fn = self.make(samples)
        except (RuntimeError, NotImplementedError, TypeError):
            if device != "meta":
                raise
            # Code that reads values while it builds cannot run without them.
            model, batch, loss_fn = self.make(samples)
        if dtype is not None:
            model = model.to(dtype)
            batch = cast_batch(batch, dtype)
        return model, batch, loss_fn


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating tensors in `dtype`."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    if isinstance(batch, Mapping):
        return {key: cast(value) for key, value in batch.items()}
    return tuple(cast(value) for value in batch)


def needs_cast(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a model is not in `dtype` yet; one in a narrow dtype may keep others in float32."""
    floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
    is_mixed = dtype in floating and dtype.itemsize < 4
    return bool(floating) and floating != {dtype} and not is_mixed


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model.to(dtype)` as a copy; of the weights only casts are made."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        value = p.detach().to(dtype if p.is_floating_point() else p.dtype)
        memo[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    return twin


def load_source(spec: str, *, seq_len: int | None = None, layers: int | None = None) -> ModelSource:
    """The model named by `spec`: a zoo name, `package.module:function`, or `path.py:function`.

    The function returns `(model, batch)` or `(model, batch, loss_fn)`. `seq_len` and `layers`, of
    zoo models alone, replace the model's own. Raises InputError saying what was expected.
    """
    if ":" not in spec:
        return _from_zoo(spec, seq_len, layers)
    if seq_len is not None:
        raise InputError(
            f"--seq-len applies to zoo models; {spec} makes its own batch: give it the length there"
        )
    if layers is not None:
        raise InputError(f"layers of {spec}: only zoo models are built with another number of them")
    where, _, name = spec.rpartition(":")
    function = getattr(_module(where, spec), name, None)
    if not callable(function):
        raise InputError(f"{spec}: no function {name!r} in {where}")
    return ModelSource(
        name=name, spec=spec, seq_len=None, make=lambda samples: _checked(function(), spec)
    )


def zoo_sizes(spec: str) -> tuple[int | None, int | None, int]:
    """A zoo model's tokens of a sample, the most that it has positions for, and its layers.

    Raises InputError for a model of one's own, whose sizes are not autopar's to choose.
    """
    if ":" in spec:
        raise InputError(
            f"sizes of {spec}: a function builds it as it is; expected a zoo model (see 'autopar "
            "zoo'), or ask for devices or micro-batch"
        )
    _from_zoo(spec, None, None)
    from model_zoo.registry import ZOO

    entry = ZOO[spec]
    return entry.default_seq_len, entry.max_seq_len, entry.layers


def _from_zoo(name: str, seq_len: int | None, layers: int | None) -> ModelSource:
    from model_zoo.registry import ZOO

    if name not in ZOO:
        near = difflib.get_close_matches(name, ZOO, n=3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise InputError(
            f"unknown model {name!r}; {hint}`autopar zoo` lists the models; a model of your own is "
            "package.module:function or path/file.py:function"
        )
    entry = ZOO[name]
    if seq_len is not None and entry.max_seq_len is not None and seq_len > entry.max_seq_len:
        raise InputError(
            f"--seq-len {seq_len}: {name} has positions for {entry.max_seq_len} tokens; give at "
            "most as many"
        )

    def make(samples: int | None) -> Built:
        model = entry.build() if layers is None else entry.build_layers(layers)
        return model, entry.example(samples or entry.default_batch, seq_len), None

    return ModelSource(
        name=name,
        spec=name,
        seq_len=seq_len,
        make=make,
        default_batch=entry.default_batch,
        make_batch=lambda samples: entry.example(samples or entry.default_batch, seq_len),
    )


def _module(where: str, spec: str) -> Any:
    try:
        if where.endswith(".py"):
            path = Path(where)
            if not path.is_file():
                raise InputError(f"{spec}: no file {where}")
            loader = importlib.util.spec_from_file_location(path.stem, path)
            if loader is None or loader.loader is None:
                raise InputError(f"{spec}: {where} is no Python file")
            module = importlib.util.module_from_spec(loader)
            sys.modules.setdefault(path.stem, module)
            loader.loader.exec_module(module)
            return module
        return importlib.import_module(where)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{spec}: cannot import {where}: {type(error).__name__}: {error}"
        ) from error


def _checked(made: Any, spec: str) -> Built:
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise InputError(
            f"{spec} must return (model, batch) or (model, batch, loss_fn), "
            f"found {type(made).__name__}"
        )
    model, batch, *rest = made
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, (Mapping, tuple)):
        raise InputError(
            f"{spec}: the batch must be a dict of keyword tensors or a tuple of positional ones, "
            f"found {type(batch).__name__}"
        )
    return model, batch, rest[0] if rest else None
