"""What a block holds while it runs: a liveness walk over its steps, forward and backward.

A value is live from the step that makes it to its last reader: generated code drops its locals so.
What is saved for backward stays until the backward of the first step that saved it. Parameters are
held anyway, and are other terms of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add

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


class BlockWalk:
    """The walks over a block, for whatever it keeps from its forward to its backward.

    A backward does the same whatever was kept beside what it reads, and a forward differs in how
    long storages stay: both are walked once.
    """

    def __init__(self, block: RunBlock) -> None:
        self._given = block
        self._number, self._block = _numbered(block)
        block, self._saved = self._block, self._block.saved
        self._start_bytes = float(block.sizes(self._saved) + block.sizes(block.output_gradients))
        self._start_bytes += sum(step.kept_bytes for step in block.steps)
        self._backward = [
            _backward(block, self._start_bytes, way) for way in ("held", "first", "split")
        ]
        self._last_use: dict[Key, int] = {}
        for index, step in enumerate(block.steps):
            self._last_use.update(dict.fromkeys((*step.reads, *step.makes), index))
        self._made = frozenset(key for step in block.steps for key in step.makes) - block.inputs
        self._moments = self._forward_moments()

    def peaks(self, kept: Set[Key] | None = None, again: Collection[str] = ()) -> BlockPeaks:
        """The peaks where the block keeps `kept` (default: what its backward reads) and runs the
        steps `again` once more before its backward begins."""
        kept = self._given.saved if kept is None else kept
        own = {self._number[key] for key in kept if key in self._number}
        more = self._given.sizes([key for key in kept if key not in self._number])
        rerun = 0
        if again:
            rerun = self._forward(self._saved | own, more, ())
            rerun += self._block.sizes(self._block.output_gradients)
        start = self._start_bytes + self._block.sizes(own - self._saved) + more
        # What is kept only to run steps again is gone by then, but counted at the start.
        ways = zip(*([max(start, each) for each in way] for way in self._backward), strict=True)
        forward = self._forward(own, more, again)
        within, ending = (
            BlockPeaks(
                forward_bytes=forward,
                backward_bytes=max(round(held), rerun),
                first_backward_bytes=max(round(first), rerun),
                split_bytes=max(round(split), rerun),
            )
            for held, first, split in ways
        )
        return replace(within, ending=ending)

    def _forward_moments(self) -> list[float]:
        """What every step of a forward holds beside inputs where nothing is kept but `kept_bytes`
        of the steps."""
        block = self._block
        first: dict[Key, int] = {}
        for index, step in enumerate(block.steps):
            for key in step.makes:
                first.setdefault(key, index)
        grown, freed = [0.0] * len(block.steps), [0.0] * len(block.steps)
        for key in self._made:
            grown[first[key]] += block.nbytes(key)
            if key not in block.outputs:
                freed[self._last_use[key]] += block.nbytes(key)
        moments, held = [], 0.0
        for step, more, less in zip(block.steps, grown, freed, strict=True):
            held += more + step.kept_bytes
            moments.append(held + step.works_bytes[0])
            held -= less
        return moments

    def _forward(self, kept: Set[Key], more_bytes: int, again: Collection[str]) -> int:
        """The peak of a forward that keeps storages to its end, and `more_bytes` that were there
        before, but nothing beside them of steps that run `again`."""
        block = self._block
        given = block.sizes(block.inputs | (kept - self._made)) + more_bytes
        later = [0.0] * (len(block.steps) + 1)
        for key in kept & self._made - block.outputs:
            later[self._last_use[key] + 1] += block.nbytes(key)
        for index, step in enumerate(block.steps):
            if step.kept_bytes and step.name in again:
                later[index + 1] -= step.kept_bytes
        stays = accumulate(later[:-1])
        return round(given + max(map(add, self._moments, stays), default=0.0))


def _numbered(block: RunBlock) -> tuple[dict[Key, int], RunBlock]:
    """The number of each key of a block, and the same block with numbers for keys: those of
    storages are dear to look up."""
    number: dict[Key, int] = {}

    def numbers(keys: Iterable[Key]) -> tuple[int, ...]:
        return tuple(number.setdefault(key, len(number)) for key in keys)

    steps = tuple(
        replace(
            step,
            reads=numbers(step.reads),
            makes=numbers(step.makes),
            keeps=numbers(step.keeps),
            takes=numbers(step.takes),
            gives=numbers(step.gives),
        )
        for step in block.steps
    )
    inputs, outputs, gradients, parameters = (
        frozenset(numbers(keys))
        for keys in (block.inputs, block.outputs, block.output_gradients, block.parameters)
    )
    return number, RunBlock(
        steps=steps,
        nbytes=list(map(block.nbytes, number)).__getitem__,  # type: ignore[arg-type]
        inputs=inputs,
        outputs=outputs,
        output_gradients=gradients,
        parameters=parameters,
    )


def _backward(block: RunBlock, start_bytes: float, way: str) -> tuple[float, float]:
    """The peak of the walk back from all that is saved, and the same where the gradients of outputs
    stay."""
    held = peak = ending = start_bytes
    live = {key: block.nbytes(key) for key in block.output_gradients}
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
    return peak, ending


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
