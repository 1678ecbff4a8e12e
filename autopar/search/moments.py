"""What a stage holds around its actions, from the blocks it runs: see `schedules.held`.

Within a backward the activations of a block go as its gradients come, and what the blocks before it
saved is still there. So the peak is at one block: with one micro-batch a rank never holds all
activations and all gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from autopar.costs.memory import StateBytes, total_bytes
from autopar.costs.optimizer_state import step_temporaries
from autopar.costs.transient import BlockPeaks
from autopar.ir.blocks import Block
from autopar.ir.graph import DTYPE_BYTES, Ref
from autopar.ir.placement import R_STAR, Shard
from autopar.ir.precision import grad_dtype, stored_dtype
from autopar.plan.buckets import Bucket, GradientEntry, buckets
from autopar.schedules.held import StageMemory
from autopar.search.grid import Grid
from autopar.search.options import ClassOption
from autopar.search.pipelines import in_flight
from autopar.search.pricer import Pricer
from autopar.search.state import ParameterState, held_bytes, split_axes

_EXCHANGED = 4
"""Copies of a gradient in an exchange (`runtime.ties`): what is cut to be sent, what comes in
parts, what these are put together to, and the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weight:
    """One trained parameter of a block: what is summed of its gradient, and what is updated."""

    entry: GradientEntry
    level: int
    stored_bytes: int
    read_bytes: int

    @property
    def kept_bytes(self) -> int:
        """Its gradient once it is reduced."""
        return self.entry.shard_nbytes if self.entry.scatter else self.entry.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One block of a stage: its option, its state, its trained parameters, and the whole weights
    that its forward and its backward gather, with what joining them takes."""

    option: ClassOption
    held: StateBytes
    weights: tuple[_Weight, ...]
    gathered: tuple[int, int]
    joined: int


def stage_memory(
    pricer: Pricer,
    grid: Grid,
    blocks: Sequence[Block],
    options: Sequence[ClassOption],
    *,
    elsewhere: Collection[str] = (),
    receive_bytes: int = 0,
    send_bytes: int = 0,
    stashes: bool = False,
    exchanges: bool = False,
) -> StageMemory:
    """What a stage of `blocks` run as `options` holds. Sources in `elsewhere` count with another
    stage of the rank. Where it `stashes`, every micro-batch in flight keeps the weights of its
    forward; where it `exchanges`, gradients of parameters of several stages are sent to meshes that
    differ."""
    runs = tuple(_runs(pricer, grid, blocks, options, elsewhere))
    before = [0, *accumulate(run.option.saved_bytes for run in runs)]
    state = total_bytes(run.held for run in runs)
    weight, first_weight = _weight_part(runs)
    first = _alone if grid.micro_batches == 1 else _first
    stashed, split = state.weights * stashes, grid.pipe.splits_backward
    return StageMemory(
        static_bytes=state.weights + state.master + state.optimizer,
        gradient_bytes=state.gradients,
        saved_bytes=before[-1] + stashed,
        deferred_bytes=sum(run.option.cost.deferred_bytes for run in runs),
        forward_bytes=_forward(runs, before) + stashed,
        backward_bytes=_backward(runs, before, send_bytes, split) + stashed,
        first_backward_bytes=first(runs, before, send_bytes),
        last_backward_bytes=_backward(runs, before, send_bytes, split, last=True) + stashed,
        weight_bytes=weight,
        first_weight_bytes=first_weight,
        update_bytes=_update(pricer, runs, state.gradients, exchanges=exchanges),
        receive_bytes=receive_bytes,
        send_bytes=send_bytes,
    )


Stages = Sequence[tuple[Sequence[Block], Sequence[ClassOption]]]
"""The blocks of every stage, and their options."""


def stage_memories(pricer: Pricer, grid: Grid, stages: Stages) -> list[StageMemory]:
    """Of all stages. What a rank holds once, whatever its stages, counts with the first of them,
    and so does a parameter that several read."""
    return [memory_among(pricer, grid, stages, index) for index in range(len(stages))]


def memory_among(pricer: Pricer, grid: Grid, stages: Stages, index: int) -> StageMemory:
    """The same of one of the stages."""
    blocks, options = stages[index]
    earlier, own = earlier_on_rank(grid, index), grid.at(grid.pipe.placement[index])
    return stage_memory(
        pricer,
        own,
        blocks,
        options,
        elsewhere=read_by(stages[k][0] for k in earlier),
        receive_bytes=boundary_bytes(pricer, own, _crossing(pricer, blocks[0].index - 1)),
        send_bytes=boundary_bytes(pricer, own, _crossing(pricer, blocks[-1].index)),
        exchanges=bool(grid.own),
        stashes=not grid.pipe.flushes and in_flight(grid.pipe)[index] > 1,
    )


def boundary_bytes(pricer: Pricer, grid: Grid, refs: Sequence[Ref]) -> int:
    """Bytes one rank sends for one micro-batch where the chain is cut so that `refs` cross."""
    prices, shared = pricer.prices(grid), pricer.setting.shared(grid.mesh)
    return sum(prices.local_bytes(ref, shared[ref]) for ref in refs)


def _crossing(pricer: Pricer, block: int) -> Sequence[Ref]:
    """What crosses behind a block, by its index: nothing at the ends of the chain."""
    boundaries = pricer.setting.chain.boundaries
    return boundaries[block] if 0 <= block < len(boundaries) else ()


def earlier_on_rank(grid: Grid, stage: int) -> list[int]:
    """The stages before this one on the same rank."""
    place = grid.pipe.placement
    return [k for k in range(stage) if place[k] == place[stage]]


def read_by(stages: Iterable[Sequence[Block]]) -> frozenset[str]:
    """The sources of the parameters that stages read."""
    return frozenset(ref.name for blocks in stages for block in blocks for ref in block.parameters)


def _runs(
    pricer: Pricer,
    grid: Grid,
    blocks: Sequence[Block],
    options: Sequence[ClassOption],
    elsewhere: Collection[str],
) -> Iterator[_Run]:
    """What every block holds, once where blocks of a class that share nothing run alike. Their
    weights are told apart only where it counts which are there already: in the one backward that
    reduces gradients as it makes them."""
    seen, known = set(elsewhere), dict[tuple[int, int], _Run]()
    named = grid.micro_batches == 1
    for block, option in zip(blocks, options, strict=True):
        alike, names = (block.class_index, id(option)), {ref.name for ref in block.parameters}
        alone = seen.isdisjoint(names)
        if alone and alike in known:
            yield _renamed(pricer, known[alike], block) if named else known[alike]
        else:
            run = _run(pricer, grid, block, option, seen)
            if alone:
                known[alike] = run
            yield run
        seen |= names


def _renamed(pricer: Pricer, run: _Run, block: Block) -> _Run:
    """The same for another block of the class."""
    trainable = [ref.name for ref in block.parameters if pricer.setting.sources[ref.name].trainable]
    weights = tuple(
        replace(weight, entry=replace(weight.entry, name=name))
        for weight, name in zip(run.weights, trainable, strict=True)
    )
    return replace(run, weights=weights)


def _run(
    pricer: Pricer, grid: Grid, block: Block, option: ClassOption, seen: Collection[str]
) -> _Run:
    """What one block holds, parameters that were `seen` before left out."""
    prices, first = pricer.prices(grid), pricer.setting.chain.representative(block.class_index)
    states = dict(option.states)
    weights, gathered, joined = list[_Weight](), [0, 0], 0
    for ref, model in zip(block.parameters, first.parameters, strict=True):
        source = pricer.setting.sources[ref.name]
        state = states[pricer.setting.sources[model.name].fqn]
        if state.level == 3:
            whole = prices.local_bytes(ref, state.layout)
            again = model in option.again.weights
            gathered[0] += whole
            gathered[1] += whole * (model in pricer.backwards.parameters(first) or again)
            dims = [p.dim for p in state.stored if isinstance(p, Shard)]
            joined = max(joined, whole if any(dims) else 0)
        if source.trainable and ref.name not in seen:
            weights.append(_weight(pricer, grid, ref, state))
    return _Run(
        option=option,
        held=held_bytes(pricer, block, option.states, grid, skip=seen),
        weights=tuple(weights),
        gathered=(gathered[0], gathered[1]),
        joined=joined,
    )


def _weight(pricer: Pricer, grid: Grid, ref: Ref, state: ParameterState) -> _Weight:
    prices, precision = pricer.prices(grid), pricer.setting.training.precision
    dtype = pricer.setting.sources[ref.name].spec.dtype
    summed = DTYPE_BYTES[grad_dtype(precision, dtype)]
    updated = DTYPE_BYTES[stored_dtype(precision, dtype, trainable=True)]
    whole, stored = (
        prod(prices.local_shape(ref, layout))
        for layout in (state.layout, state.stored or state.layout)
    )
    axes = tuple(
        name
        for name, size, p in zip(prices.names, prices.sizes, state.layout, strict=True)
        if p == R_STAR and size > 1
    )
    return _Weight(
        entry=GradientEntry(
            name=ref.name,
            nbytes=whole * summed,
            dtype=dtype,
            axes=axes,
            scatter=split_axes(state, prices),
            shard_nbytes=stored * summed,
            early=state.level >= 2,
        ),
        level=state.level,
        stored_bytes=stored * updated,
        read_bytes=prices.local_bytes(ref, state.layout),
    )


def _forward(runs: Sequence[_Run], before: Sequence[int]) -> int:
    """Weights of the next block are on their way."""
    ahead = [*(run.gathered[0] for run in runs[1:]), 0]
    return max(
        before[k] + _joining(run, run.option.again.peaks.forward_bytes) + run.gathered[0] + ahead[k]
        for k, run in enumerate(runs)
    )


def _gathered_back(runs: Sequence[_Run], k: int) -> int:
    """Weights that the backward of a block holds: its own, and those of the block before it."""
    return runs[k].gathered[1] + (runs[k - 1].gathered[1] if k else 0)


def _joining(run: _Run, running: int) -> int:
    """What a block holds while it runs, or while a weight that it is about to read is joined from
    its parts, which are then let go of."""
    return max(running, run.option.saved_bytes + run.joined)


def _backward(
    runs: Sequence[_Run],
    before: Sequence[int],
    returned: int,
    split: bool,
    *,
    last: bool = False,
) -> int:
    """The gradients are there already. What was `returned` for the outputs of the last block stays
    to the end. In the `last` backward weights at level 3 have their gradients reduced at once."""
    behind, reduced, peak = _behind(runs, returned), 0, 0
    left = 0  # by the blocks behind, for the weight part
    for k in reversed(range(len(runs))):
        peaks = _peaks(runs, k)
        own = _joining(runs[k], peaks.split_bytes if split else peaks.backward_bytes)
        own += _gathered_back(runs, k) + behind[k] + _on_its_way(runs, k) * last
        peak = max(peak, before[k] + own - reduced + left)
        left += runs[k].option.cost.deferred_bytes * split
        alone = [w for w in runs[k].weights if w.level == 3]
        reduced += sum(w.entry.nbytes - w.kept_bytes for w in alone) * last * (not split)
    return peak


def _peaks(runs: Sequence[_Run], k: int) -> BlockPeaks:
    return runs[k].option.again.peaks.at(end=k == len(runs) - 1)


def _behind(runs: Sequence[_Run], returned: int) -> list[int]:
    """Returned gradients that are no longer among those of a block's own outputs."""
    return [*[returned] * (len(runs) - 1), 0]


def _sent_alone(run: _Run) -> int:
    """A weight at level 3 has its gradient reduced at once: the buffer that is sent."""
    return max((w.entry.nbytes for w in run.weights if w.level == 3), default=0)


def _on_its_way(runs: Sequence[_Run], k: int) -> int:
    """What is there of level 3's reductions while the backward of a block runs: what the block
    behind sent last, and where there is none, the share that stays of what the block sends itself,
    in place of a weight that it has read."""
    if k + 1 < len(runs):
        return _sent_alone(runs[k + 1])
    return max((w.kept_bytes for w in runs[k].weights if w.level == 3), default=0)


def _first(runs: Sequence[_Run], before: Sequence[int], returned: int) -> int:
    """The gradients are made: those of the blocks behind are there."""
    made = peak = 0
    behind = _behind(runs, returned)
    for k in reversed(range(len(runs))):
        own = _peaks(runs, k).first_backward_bytes + behind[k]
        peak = max(peak, before[k] + own + made + _gathered_back(runs, k))
        made += runs[k].held.gradients
    return peak


def _alone(runs: Sequence[_Run], before: Sequence[int], returned: int) -> int:
    """The gradients are made, and from level 2 on reduced as soon as their bucket is whole."""
    entries = [w.entry for run in runs for w in run.weights if w.level < 3]
    early = [bucket for bucket in reversed(buckets(entries)) if bucket.early]
    levels = {w.entry.name: w.level for run in runs for w in run.weights}
    kept = whole = peak = 0
    done: set[str] = set()
    for k in reversed(range(len(runs))):
        run, peaks = runs[k], _peaks(runs, k)
        apart = any(w.level == 3 for w in run.weights)
        own = peaks.backward_bytes + _sent_alone(run) if apart else peaks.first_backward_bytes
        own += returned if k < len(runs) - 1 else 0
        peak = max(peak, before[k] + own + kept + whole + _gathered_back(runs, k))
        for weight in run.weights:
            done.add(weight.entry.name)
            waits = weight.level == 2 and weight.entry.scatter
            whole += weight.entry.nbytes if waits else 0
            kept += 0 if waits else weight.kept_bytes if weight.level == 3 else weight.entry.nbytes
        while early and done.issuperset(early[0].names):
            bucket = early.pop(0)
            peak = max(peak, before[k] + kept + whole + bucket.nbytes)
            if all(levels[name] == 2 for name in bucket.names) and bucket.scatter:
                whole -= bucket.nbytes
                kept += bucket.shard_nbytes
    return peak


def _weight_part(runs: Sequence[_Run]) -> tuple[int, int]:
    """The most that computing what was left holds, from the last block to the first: with gradients
    that are there already, and with those that it makes."""
    due = [run.option.cost.deferred_bytes for run in runs]
    left, made = sum(due), 0
    most = first = left
    for run, own in zip(reversed(runs), reversed(due), strict=True):
        largest = max((w.entry.nbytes for w in run.weights), default=0)
        most = max(most, left + largest)
        left -= own
        first = max(first, left + max(own, run.held.gradients) + made + largest)
        made += run.held.gradients
    return most, first


def _update(
    pricer: Pricer, runs: Sequence[_Run], gradients: int, *, exchanges: bool = False
) -> int:
    """What summing gradients, stepping and gathering weights hold beyond weights, state and
    gradients. A gradient that is exchanged is cut, received in parts and put together."""
    weights = [w for run in runs for w in run.weights]
    held = peak = gradients
    for bucket in buckets(w.entry for w in weights if w.level < 2):
        copied = bucket.nbytes if len(bucket.names) > 1 or bucket.scatter else 0
        peak = max(peak, held + copied)
        held -= bucket.nbytes - bucket.shard_nbytes if bucket.scatter else 0
    if exchanges:
        shared = {ref.name for ref in pricer.setting.shared_parameters}
        most = max((w.kept_bytes for w in weights if w.entry.name in shared), default=0)
        peak = max(peak, gradients + _EXCHANGED * most)
    left = sum(w.stored_bytes for w in weights)
    training = pricer.setting.training
    every, once = step_temporaries(
        training.optimizer,
        training.optimizer_kwargs,
        [w.stored_bytes for w in weights],
        device_kind=pricer.device.kind,
    )
    peak = max(peak, left + every + once)
    for bucket in _gathered_weights(weights):
        peak = max(peak, left + bucket.nbytes + bucket.shard_nbytes)
    return max(0, peak - gradients)


def _gathered_weights(weights: Sequence[_Weight]) -> tuple[Bucket, ...]:
    """The buckets in which levels 1 and 2 gather what was updated."""
    return buckets(
        GradientEntry(
            name=w.entry.name,
            nbytes=w.read_bytes,
            dtype=w.entry.dtype,
            axes=w.entry.scatter,
            shard_nbytes=w.entry.shard_nbytes * w.read_bytes // max(w.entry.nbytes, 1),
        )
        for w in weights
        if w.level in (1, 2)
    )
