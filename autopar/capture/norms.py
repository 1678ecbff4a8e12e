"""Batch norms in training, with the state that they update: one op, `autopar.batch_norm`.

    autopar.batch_norm(x, weight, bias, running_mean, running_var, counter, momentum, eps)

normalises over all dims but 1 and moves the running statistics towards the batch's, once a pass;
`counter`, torch's `num_batches_tracked`, goes up by one. Any of the tensors but `x` may be None.
The module counts with an in-place add to an integer buffer that nothing else reads. The counter is
taken for that of the next norm over buffers of the same module.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.arguments import Bound
from autopar.capture.emit import Emitter
from autopar.capture.flatten import Step
from autopar.errors import CaptureError
from autopar.ir.graph import Ref, Source, SourceKind, TensorSpec

BATCH_NORM = "autopar.batch_norm.default"

STATE_REMEDY = (
    "state that changes in forward is not supported, but for the running statistics of batch norms "
    "with a fixed momentum: write to a clone"
)

_OTHER_NORMS = {"aten.instance_norm.default": ("running_mean", "use_input_stats")}
"""Op to its running mean and the flag that makes it update it."""


class Counters:
    """Integer buffers that were counted up and wait for their norm."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Ref, fx.Node]] = {}

    def take(self, buffer: Source | None) -> Ref | None:
        """The counter in the module of another buffer, if there is one."""
        if buffer is None:
            return None
        found = self._waiting.pop(_module(buffer), None)
        return found[0] if found else None

    def add(
        self, emitter: Emitter, op: torch._ops.OpOverload, node: fx.Node, *, read_later: bool
    ) -> bool:
        """Take up an in-place op if it adds one to an integer buffer; whether it does."""
        if str(op) != "aten.add_.Tensor" or read_later:
            return False
        bound = emitter.bind(op, node)
        source = _buffer(emitter, bound["self"])
        if source is None or source.spec.shape or source.spec.is_floating:
            return False
        if (bound["other"], bound.get("alpha", 1)) != (1, 1) or _module(source) in self._waiting:
            return False
        self._waiting[_module(source)] = (Ref(source.name), node)
        return True

    def unused(self) -> fx.Node | None:
        """An add to a counter that no norm took."""
        return next((node for _, node in self._waiting.values()), None)


def is_batch_norm(op: torch._ops.OpOverload, bound: Bound) -> bool:
    """Whether it is a batch norm that normalises with the statistics of its batch."""
    return str(op) == "aten.batch_norm.default" and bool(bound["training"])


def refuse_running_statistics(op: torch._ops.OpOverload, bound: Bound) -> None:
    """CaptureError for another norm that updates its running statistics."""
    if str(op) in _OTHER_NORMS:
        mean, flag = _OTHER_NORMS[str(op)]
        if bound[flag] and bound[mean] is not None:
            raise CaptureError(f"{op} updates its running statistics; {STATE_REMEDY}")


def batch_norm(
    emitter: Emitter, counters: Counters, step: Step, bound: Bound, output: TensorSpec
) -> Ref:
    """Add the op. CaptureError where the running statistics are no buffers of the model."""
    mean, var = bound["running_mean"], bound["running_var"]
    state = _buffer(emitter, mean)
    if (mean, var) != (None, None) and (
        state is None or _buffer(emitter, var) is None or mean == var
    ):
        raise CaptureError(
            "aten.batch_norm.default updates its running statistics, which are not two buffers of "
            f"the model; {STATE_REMEDY}"
        )
    args = (
        *(bound[name] for name in ("input", "weight", "bias")),
        *(mean, var, counters.take(state), bound["momentum"], bound["eps"]),
    )
    return emitter.add(step, BATCH_NORM, args, (), (output,))[0]


def _buffer(emitter: Emitter, value: object) -> Source | None:
    source = emitter.sources.get(value.name) if isinstance(value, Ref) else None
    return source if source is not None and source.kind is SourceKind.BUFFER else None


def _module(source: Source) -> str:
    return source.fqn.rpartition(".")[0]
