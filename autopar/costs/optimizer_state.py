"""Bytes an optimizer keeps per parameter, and moves in one step.

`OPTIMIZERS` is a table from the lower-case class name to the number of full-size states, which may
depend on options. Scalars such as Adam's step count are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.costs.local_op import SLOT, LocalOp
from autopar.ir.graph import DTYPE_BYTES, Ref

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRow:
    """`states(options)` tensors as large as the parameter, in the dtype of what is updated.

    A step makes temporaries as large as a parameter: `single` of them where it goes from parameter
    to parameter, `together` where it updates all at once; `fused` tells whether torch has a step
    that makes none.
    """

    states: Callable[[Options], int]
    single: int = 2
    together: int = 1
    fused: bool = False


def _always(count: int, *, fused: bool = False) -> OptimizerRow:
    return OptimizerRow(states=lambda _: count, fused=fused)


def _plus_flags(count: int, *flags: str, fused: bool = False) -> OptimizerRow:
    """One more state for every option of `flags` that is set (not False and not 0)."""
    return OptimizerRow(
        states=lambda options: count + sum(bool(options.get(f)) for f in flags), fused=fused
    )


OPTIMIZERS: dict[str, OptimizerRow] = {
    "adam": _plus_flags(2, "amsgrad", fused=True),
    "adamw": _plus_flags(2, "amsgrad", fused=True),
    "sparseadam": _always(2),
    "nadam": _always(2),
    "radam": _always(2),
    "adamax": _always(2),
    "lamb": _always(2),
    "adadelta": _always(2),
    "rprop": _always(2),
    "sgd": _plus_flags(0, "momentum", fused=True),
    "adagrad": _always(1),
    "rmsprop": _plus_flags(1, "momentum", "centered"),
    "asgd": _always(1),
    "lion": _always(1),
    "muon": _always(1),
}

ASSUMED_STATES = 2
"""States, in float32, of an optimizer that is not in the table."""


def optimizer_row(name: str) -> OptimizerRow | None:
    """The row of an optimizer by class name, with or without its module; None if there is none."""
    return OPTIMIZERS.get(name.rsplit(".", 1)[-1].lower())


def optimizer_note(name: str) -> str | None:
    """What a plan should say where the state of an optimizer is a guess; None where it is known."""
    if optimizer_row(name):
        return None
    return f"optimizer {name} is not known: {ASSUMED_STATES} float32 states a parameter assumed"


def optimizer_state_bytes(
    name: str, kwargs: Options, numel: int, dtype: str, *, master: bool = False
) -> int:
    """Bytes of state for `numel` elements of a parameter of `dtype`.

    With `master` weights the optimizer updates those, and its states are float32 too.
    """
    row = optimizer_row(name)
    if row is None:
        return ASSUMED_STATES * numel * DTYPE_BYTES["float32"]
    return row.states(kwargs) * numel * DTYPE_BYTES["float32" if master else dtype]


def optimizer_step_bytes(
    name: str, kwargs: Options, numel: int, dtype: str, grad_dtype: str, *, master: bool = False
) -> int:
    """Bytes one fused step moves: gradients read; weights and states read and written; with
    master weights those read and written, and the weights written.
    """
    state = 2 * optimizer_state_bytes(name, kwargs, numel, dtype, master=master)
    weights = numel * DTYPE_BYTES[dtype]
    updated = 2 * numel * DTYPE_BYTES["float32"] + weights if master else 2 * weights
    return numel * DTYPE_BYTES[grad_dtype] + updated + state


def optimizer_op(name: str, kwargs: Options, numel: int, dtype: str) -> LocalOp:
    """The step of an optimizer on one parameter, as an op that a profile can hold a time of."""
    plain = {key: value for key, value in kwargs.items() if isinstance(value, bool | float | int)}
    return LocalOp(
        target=f"optimizer.{name.rsplit('.', 1)[-1].lower()}.default",
        input_shapes=((numel,),),
        input_dtypes=(dtype,),
        output_shapes=((numel,),),
        output_dtypes=(dtype,),
        args=(Ref(SLOT, 0),),
        kwargs=tuple(sorted((key, value) for key, value in plain.items() if key in _FLAGS)),
    )


_FLAGS = frozenset({"momentum", "nesterov", "amsgrad", "centered", "weight_decay", "maximize"})
"""Options that a step's time depends on."""


def step_temporaries(
    name: str, kwargs: Options, sizes: Sequence[int], *, device_kind: str
) -> tuple[int, int]:
    """The most that temporaries of a step hold, for parameters of `sizes` bytes as updated: for
    each of them, summed, and once for all.

    A fused step has none. Where there is no fused step torch updates all parameters of a group at
    once on `TOGETHER` devices, which takes about as much as they do (torch.optim, "foreach"), and
    one after the other elsewhere.
    """
    row = optimizer_row(name) or OptimizerRow(states=lambda _: ASSUMED_STATES)
    if not sizes or steps_fused(name, kwargs, device_kind):
        return 0, 0
    together = kwargs.get("foreach")
    if device_kind in TOGETHER if together is None else together:
        return row.together * sum(sizes), 0
    return 0, row.single * max(sizes)


def steps_fused(name: str, kwargs: Options, device_kind: str) -> bool:
    """Whether a program steps an optimizer in one kernel: where it has one, unless told not to."""
    if kwargs.get("fused") is not None or kwargs.get("foreach") is not None:
        return bool(kwargs.get("fused"))
    row = optimizer_row(name)
    return row is not None and row.fused and device_kind in TOGETHER


TOGETHER = frozenset({"cuda"})
"""Kinds of devices on which torch's optimizers update all parameters at once by default."""
