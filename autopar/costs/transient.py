"""What a block holds while it runs: a liveness walk over its steps, forward and backward.

A value is live from the step that makes it to its last reader: generated code drops its locals so.
What is saved for backward stays until the backward of the first step that saved it. Parameters are
held anyway, and are other terms of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopar.costs.local_op import op_name
from autopar.ir.graph import DTYPE_BYTES, OpNode, Ref, TensorSpec

Key = Hashable
"""A storage of a value, and the gradient of that value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """One op or move of a block as memory sees it.

    It reads storages and makes new ones; its backward reads those in `keeps`, and `kept_bytes` that
    are no value of the graph. The backward takes gradients and gives others; `defers` leaves those
    of weights to a later part, which reads what this step keeps and takes. `works_bytes` are
    temporaries inside its forward and its backward.
    """

    name: str
    reads: tuple[Key, ...] = ()
    makes: tuple[Key, ...] = ()
    keeps: tuple[Key, ...] = ()
    kept_bytes: float = 0.0
    takes: tuple[Key, ...] = ()
    gives: tuple[Key, ...] = ()
    defers: bool = False
    works_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPeaks:
    """The most that a block holds in each pass of one micro-batch, what it saves included.

    In `first_backward_bytes` the gradients of its parameters count as they are made; in the others
    they are held elsewhere and here only while they are added. `split_bytes` is that of a backward
    that leaves weight gradients to a later part. `ending` are those of the last block of a stage,
    where the gradients of its outputs came with a message and stay to the end.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    first_backward_bytes: int = 0
    split_bytes: int = 0
    ending: BlockPeaks | None = None

    def at(self, *, end: bool) -> BlockPeaks:
        """Those of a block within a stage, or at its `end`."""
        return self.ending if end and self.ending is not None else self


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBlock:
    """The steps of a block in order, and what crosses its edges.

    `inputs` are live through the forward, `outputs` from where they are made to its end; gradients
    of `outputs` from the start of the backward. The gradient of one of `parameters` is live only
    while it is added to the accumulated one; those of inputs to the end.
    """

    steps: tuple[RunStep, ...]
    nbytes: Callable[[Key], int]
    inputs: frozenset[Key] = frozenset()
    outputs: frozenset[Key] = frozenset()
    output_gradients: frozenset[Key] = frozenset()
    parameters: frozenset[Key] = frozenset()

    @property
    def saved(self) -> frozenset[Key]:
        """Storages that the backward reads."""
        return frozenset(key for step in self.steps for key in step.keeps)

    def sizes(self, keys: Collection[Key]) -> int:
        """Bytes of several storages or gradients."""
        return sum(map(self.nbytes, keys))


def block_peaks(
    block: RunBlock, kept: Set[Key] | None = None, again: Collection[str] = ()
) -> BlockPeaks:
    """The peaks of a block that keeps `kept` (default: what its backward reads) from its forward to
    its backward, which runs the steps `again` once more before it begins."""
    saved = block.saved
    kept = saved if kept is None else kept
    rerun = 0
    if again:
        rerun = _forward(block, saved | kept, ()) + block.sizes(block.output_gradients)
    ways = zip(*(_backward(block, kept, way) for way in ("held", "first", "split")), strict=True)
    forward = _forward(block, kept, again)
    within, ending = (
        BlockPeaks(
            forward_bytes=forward,
            backward_bytes=max(held, rerun),
            first_backward_bytes=max(first, rerun),
            split_bytes=max(split, rerun),
        )
        for held, first, split in ways
    )
    return replace(within, ending=ending)


def _forward(block: RunBlock, kept: Set[Key], again: Collection[str]) -> int:
    steps = block.steps
    last_use: dict[Key, int] = {}
    for index, step in enumerate(steps):
        last_use.update(dict.fromkeys((*step.reads, *step.makes), index))
    stays = block.inputs | block.outputs | kept
    live = {key: block.nbytes(key) for key in block.inputs | (kept - _made(steps))}
    held = float(sum(live.values()))
    peak = held
    for index, step in enumerate(steps):
        for key in step.makes:
            if key not in live:
                live[key] = block.nbytes(key)
                held += live[key]
        peak = max(peak, held + step.kept_bytes + step.works_bytes[0])
        held += 0.0 if step.name in again else step.kept_bytes
        for key in {*step.reads, *step.makes}:
            if key in live and key not in stays and last_use[key] <= index:
                held -= live.pop(key)
    return round(peak)


def _made(steps: Sequence[RunStep]) -> frozenset[Key]:
    return frozenset(key for step in steps for key in step.makes)


def _backward(block: RunBlock, kept: Set[Key], way: str) -> tuple[int, int]:
    """The walk back from all that is saved, and the same where the gradients of outputs stay. What
    is `kept` only to run steps again is gone by then, but counted at the start."""
    saved = block.saved
    held = float(block.sizes(saved) + sum(step.kept_bytes for step in block.steps))
    live = {key: block.nbytes(key) for key in block.output_gradients}
    held += sum(live.values())
    peak = ending = held + block.sizes(kept - saved)
    stays, freed_by = set[Key](), _freed_by(block.steps)
    done: set[Key] = set()
    for index in reversed(range(len(block.steps))):
        step = block.steps[index]
        late = way == "split" and step.defers
        if step.takes:
            gives = [key for key in step.gives if not (late and key in block.parameters)]
            second = [key for key in gives if key in live and key not in step.takes]
            fresh = [key for key in (*step.takes, *gives) if key not in live]
            live |= {key: block.nbytes(key) for key in fresh}
            held += sum(live[key] for key in dict.fromkeys(fresh))
            now = held + block.sizes(second) + step.works_bytes[1]
            peak, ending = max(peak, now), max(ending, now + block.sizes(stays))
            ended = {*step.takes} - {*gives} if not late else set[Key]()
            stays |= block.output_gradients & {*ended, *second}
            held -= sum(live.pop(key, 0) for key in ended)
            for key in block.parameters.intersection(gives):
                size = live.pop(key)
                held -= 0 if way == "first" and key not in done else size
                done.add(key)
        if not late:
            held -= block.sizes(freed_by.get(index, ())) + step.kept_bytes
    return round(peak), round(ending)


def _freed_by(steps: Sequence[RunStep]) -> dict[int, list[Key]]:
    """The storages that are let go of after the backward of each step."""
    first: dict[Key, int] = {}
    for index, step in enumerate(steps):
        for key in step.keeps:
            first.setdefault(key, index)
    found: dict[int, list[Key]] = {}
    for key, index in first.items():
        found.setdefault(index, []).append(key)
    return found


def workspaces(
    node: OpNode,
    numel: Callable[[Ref], int],
    specs: Mapping[Ref, TensorSpec],
    *,
    fuses_loss: bool = False,
) -> tuple[int, int]:
    """Bytes of temporaries inside the kernels of a node's forward and backward, `numel` being the
    local elements of its inputs; of a loss none where `fuses_loss`."""
    name = op_name(node.target)
    inputs = node.inputs()
    if not inputs or (fuses_loss and name in LOSSES):
        return 0, 0
    first = _First(numel=numel(inputs[0]), itemsize=DTYPE_BYTES[specs[inputs[0]].dtype])
    forward, backward = FORWARD_WORKSPACE.get(name), BACKWARD_WORKSPACE.get(name)
    return forward(first) if forward else 0, backward(first) if backward else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _First:
    """The first input of an op."""

    numel: int
    itemsize: int


def _wide_copy(logits: _First) -> int:
    """Logits narrower than float32 are widened first."""
    return 0 if logits.itemsize >= 4 else 4 * logits.numel


def _softmax_copy(logits: _First) -> int:
    """The softmax that the gradient of the logits is made from, float32 at least."""
    return max(4, logits.itemsize) * logits.numel


def _query_accumulator(query: _First) -> int:
    """Fused attention adds up the gradient of the query in float32."""
    return 4 * query.numel


def _wide_copies(x: _First) -> int:
    """Batch norm of narrow values: they and their result, in float32."""
    return 2 * _wide_copy(x)


def _normed_again(x: _First) -> int:
    """Batch norm: the normed values once more; of narrow ones also both gradients, in float32."""
    return max(4, x.itemsize) * x.numel + 2 * _wide_copy(x)


_Workspace = Callable[[_First], int]

LOSSES = frozenset(("cross_entropy_sum", "cross_entropy_loss"))

FORWARD_WORKSPACE: dict[str, _Workspace] = {
    "cross_entropy_sum": _wide_copy,
    "batch_norm": _wide_copies,
}
BACKWARD_WORKSPACE: dict[str, _Workspace] = {
    "batch_norm": _normed_again,
    "cross_entropy_sum": _softmax_copy,
    "cross_entropy_loss": _softmax_copy,
    "scaled_dot_product_attention": _query_accumulator,
}
"""Temporaries inside kernels that are as large as the first input."""
