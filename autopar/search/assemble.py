"""From solved stages to a `Plan`: variants, parameters, times and memory by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from autopar.costs.memory import reserve_terms
from autopar.ir.blocks import Block
from autopar.ir.graph import Source, SourceKind
from autopar.ir.placement import Layout, R, Shard, chunk_sizes
from autopar.plan.flow import setup_sources
from autopar.plan.plan import (
    NOT_AT_ONCE,
    RESERVED,
    BlockPlan,
    ParameterPlan,
    Recompute,
    RecomputePlan,
    StagePlan,
    Terms,
    Variant,
)
from autopar.schedules.held import StageMemory, peak_bytes
from autopar.schedules.in_flight import peak_in_flight
from autopar.schedules.memory_curve import peak_moments
from autopar.search.grid import Grid
from autopar.search.moments import earlier_on_rank, read_by, stage_memories
from autopar.search.options import ClassOption
from autopar.search.pipelines import Pipeline
from autopar.search.pricer import Pricer
from autopar.search.recompute import Again
from autopar.search.setting import Setting
from autopar.search.stages import (
    Staged,
    boundary_s,
    chosen_options,
    message_bytes,
    stage_blocks,
    stage_ranks,
    tightest,
)
from autopar.search.state import PREFETCHED, held_bytes
from autopar.search.step_times import stage_seconds, tied_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StageHeld:
    """What a stage holds at its rank's peak: micro-batches between forward and backward, those
    whose weight gradients are left, copies of the weights. `once` tells whether what a rank holds
    once counts here, `widest` whether the largest working set does; `elsewhere` are the sources of
    parameters that count with another stage of the rank."""

    saved: int
    deferred: int = 0
    versions: int = 0
    once: bool = True
    widest: bool = True
    updates: bool = True
    elsewhere: frozenset[str] = frozenset()


def stage_terms(
    pricer: Pricer,
    grid: Grid,
    stage: int,
    blocks: Sequence[Block],
    options: Sequence[ClassOption],
    held: StageHeld,
    memory: StageMemory,
) -> Terms:
    """Memory of a stage by term, in bytes per rank.

    A parameter that several of the stage's blocks read is held once. `gathered` are weights that
    lie in shards, whole for the blocks that need them now; `unreduced` whole gradients that are
    about to become shards; `update` buffers of gradient sums and temporaries of the optimizer. Each
    is the most there is of it; see `apart`.
    """
    states = [0.0, 0.0, 0.0, 0.0]
    seen, place = set(held.elsewhere), grid.pipe.placement[stage]
    for block, option in zip(blocks, options, strict=True):
        for i, part in enumerate(
            held_bytes(pricer, block, option.states, grid.at(place), skip=seen)
        ):
            states[i] += part
        seen |= {ref.name for ref in block.parameters}
    whole = [option for option in options if option.again.kind is Recompute.FULL]
    kept = [option for option in options if option.again.kind is not Recompute.FULL]
    peak = max(options, key=lambda option: option.transient_bytes)
    running = peak.transient_bytes - peak.again.made_bytes - peak.state.transient_bytes
    terms = [
        ("weights", states[0]),
        ("gradients", states[1]),
        ("master", states[2]),
        ("optimizer", states[3]),
        ("activations", float(held.saved * sum(option.saved_bytes for option in kept))),
        ("boundary", float(held.saved * sum(option.saved_bytes for option in whole))),
    ]
    if grid.pipe.splits_backward:
        left = sum(option.cost.deferred_bytes for option in options)
        terms.append(("weight_gradients_due", float(held.deferred * left)))
    if not grid.pipe.flushes:
        terms.append(("weight_versions", held.versions * states[0]))
    once, widest, updates = int(held.once), int(held.widest), int(held.updates)
    device = pricer.setting.cluster.device(tightest(pricer, stage_ranks(grid, stage)))
    reserve = reserve_terms(device, grid.at(place).communicators)
    return (
        *terms,
        ("transient", float(widest * max(0, running))),
        ("recompute", float(widest * peak.again.made_bytes)),
        ("gathered", float(widest * PREFETCHED * peak.state.gathered_bytes)),
        ("unreduced", float(widest * peak.state.unreduced_bytes)),
        ("update", float(updates * memory.update_bytes)),
        (
            "communication",
            float(once * message_bytes(pricer, grid)[place]),
        ),
        *((name, float(once * nbytes)) for name, nbytes in reserve),
    )


def apart(pipe: Pipeline, memory: Sequence[StageMemory], terms: Sequence[Terms]) -> list[Terms]:
    """The terms of every stage with what a rank does not hold at the same time taken off.

    The rest is the peak over the rank's action list. Without a flush there is no end of a step, and
    the terms stand as they are.
    """
    found = list(terms)
    if not pipe.flushes:
        return found
    for row, known in zip(pipe.lowered().ranks, pipe.arrivals(), strict=True):
        stages = sorted({action.stage for action in row})
        if not stages:
            continue
        reserve = sum(f for k in stages for name, f in terms[k] if name in RESERVED)
        peak = peak_bytes(row, {k: memory[k] for k in stages}, known) + reserve
        most = sum(figure for k in stages for _, figure in terms[k])
        found[stages[0]] = (*terms[stages[0]], (NOT_AT_ONCE, float(peak - most)))
    return found


def _held(
    grid: Grid,
    stages: Sequence[tuple[list[Block], list[ClassOption]]],
    memory: Sequence[StageMemory],
) -> list[StageHeld]:
    """What every stage holds at the peak of its rank, by the plan's own action lists."""
    pipe, of_stage = grid.pipe, range(len(stages))
    plain = [  # what is saved at most, whenever gradients come
        StageMemory.alike(
            static_bytes=0.0,
            saved_bytes=stage.saved_bytes,
            deferred_bytes=stage.deferred_bytes,
            working_bytes=stage.backward_bytes - stage.saved_bytes,
        )
        for stage in memory
    ]
    moments = peak_moments(pipe.build(), plain)
    found = []
    for index in of_stage:
        moment = moments[pipe.placement[index]]
        together = [k for k in of_stage if pipe.placement[k] == pipe.placement[index]]
        earlier = read_by(stages[k][0] for k in earlier_on_rank(grid, index))
        copies = moment.saved[index] if moment.saved[index] > 1 else 0
        found.append(
            StageHeld(
                saved=moment.saved[index],
                deferred=moment.deferred[index],
                versions=0 if pipe.flushes else copies,
                once=index == together[0],
                widest=index == moment.stage,
                updates=index == together[0],
                elsewhere=earlier,
            )
        )
    return found


def variants(
    pricer: Pricer, staged: Staged
) -> tuple[tuple[Variant, ...], list[ClassOption], list[str]]:
    """The distinct sources that the blocks run; the option of every block, and its variant."""
    chain, spots = pricer.setting.chain, pricer.places.spots(staged.grid)
    chosen = chosen_options(chain, staged.options, staged.solution)
    found: dict[tuple[int, object, object], Variant] = {}
    keys: dict[int, tuple[int, object, object]] = {}
    names = []
    for block, option in zip(chain.blocks, chosen, strict=True):
        if id(option) not in keys:
            sizes = spots[option.home].grid.sizes
            keys[id(option)] = block.class_index, sizes, _source_key(option)
        key = keys[id(option)]
        if key not in found:
            of_class = sum(1 for class_index, _, _ in found if class_index == block.class_index)
            block_class = chain.classes[block.class_index]
            suffix = chr(ord("a") + of_class) if of_class else ""
            found[key] = Variant(
                name=f"block_{block.class_index}{suffix}",
                class_index=block.class_index,
                digest=block_class.digest,
                choices=option.choices,
            )
        found[key] = _with_recompute(found[key], option.again)
        names.append(found[key].name)
    return tuple(found.values()), chosen, names


def _source_key(option: ClassOption) -> object:
    """What the source of a block depends on: blocks that agree on it run the same file."""
    gathered = tuple((name, s.stored) for name, s in option.states if s.level == 3)
    return option.choices, gathered


def _with_recompute(variant: Variant, again: Again) -> Variant:
    """A variant that has a name for what is run again."""
    if not again.steps or recompute_name(variant, again):
        return variant
    others = sum(plan.name.startswith(again.kind) for plan in variant.recompute)
    suffix = f"_{chr(ord('a') + others)}" if others else ""
    plan = RecomputePlan(name=f"{again.kind}{suffix}", steps=again.steps)
    return replace(variant, recompute=(*variant.recompute, plan))


def recompute_name(variant: Variant, again: Again) -> str:
    """What a variant calls a set of steps that run again; `none` if there are none."""
    if not again.steps:
        return Recompute.NONE.value
    return next((plan.name for plan in variant.recompute if plan.steps == again.steps), "")


def stage_plans(
    pricer: Pricer, staged: Staged
) -> tuple[tuple[Variant, ...], tuple[StagePlan, ...]]:
    """All stages of the plan. Their collectives are listed later, from the same decisions."""
    found, chosen, names = variants(pricer, staged)
    grid, chain = staged.grid, pricer.setting.chain
    own = stage_blocks(chain, chosen, staged.problem, staged.solution)
    memory = stage_memories(pricer, grid, own)
    held, most = _held(grid, own, memory), peak_in_flight(grid.pipe.build())
    terms = apart(
        grid.pipe,
        memory,
        [
            stage_terms(pricer, grid, index, blocks, options, held[index], memory[index])
            for index, (blocks, options) in enumerate(own)
        ],
    )
    by_name = {variant.name: variant for variant in found}
    tied_s = tied_seconds(pricer, grid, own)
    stages = []
    for index, (blocks, options) in enumerate(own):
        ranks, here = stage_ranks(grid, index), grid.at(grid.pipe.placement[index])
        sends_s = _sends_s(pricer, grid, index, blocks)
        own_prices = pricer.of_stage(grid, index)
        seconds = stage_seconds(
            own_prices, here, blocks, options, sends_s, tied_s[index], held[index].elsewhere
        )
        stages.append(
            StagePlan(
                index=index,
                ranks=tuple(ranks),
                blocks=tuple(
                    BlockPlan(
                        index=block.index,
                        variant=names[block.index],
                        recompute=recompute_name(by_name[names[block.index]], option.again),
                        module_path=block.module_path,
                        zero=option.zero,
                    )
                    for block, option in zip(blocks, options, strict=True)
                ),
                parameters=_parameters(pricer, here, blocks, options),
                time_s=seconds.time_s,
                communication_s=seconds.communication_s,
                held_bytes=tuple(asdict(memory[index]).items()),
                memory_bytes=terms[index],
                memory_limit_bytes=pricer.setting.least_memory_bytes(ranks),
                in_flight=most[index],
                collectives=(),
                sizes=() if here.sizes == grid.sizes else here.sizes,
            )
        )
    return found, tuple(stages)


def _sends_s(
    pricer: Pricer, grid: Grid, stage: int, blocks: Sequence[Block]
) -> tuple[float, float]:
    """Seconds of a message to the next stage, and of one to the stage before."""
    boundaries, place = pricer.setting.chain.boundaries, grid.pipe.placement
    first, last = blocks[0].index, blocks[-1].index
    forward_s = backward_s = 0.0
    if last < len(boundaries):
        hop = (place[stage], place[stage + 1])
        forward_s = boundary_s(pricer, grid, boundaries[last], hop)[0]
    if first:
        hop = (place[stage - 1], place[stage])
        backward_s = boundary_s(pricer, grid, boundaries[first - 1], hop)[1]
    return forward_s, backward_s


def _parameters(
    pricer: Pricer, grid: Grid, blocks: Sequence[Block], options: Sequence[ClassOption]
) -> tuple[ParameterPlan, ...]:
    """Parameters and buffers of a stage, each once, in order of first use."""
    setting = pricer.setting
    found: dict[str, ParameterPlan] = {}
    for block, option in zip(blocks, options, strict=True):
        first = setting.chain.representative(block.class_index)
        states = dict(option.states)
        for own, model in zip(block.parameters, first.parameters, strict=True):
            source = setting.sources[own.name]
            state = states[setting.sources[model.name].fqn]
            shape = tuple(size.const for size in source.spec.shape)
            found.setdefault(
                source.fqn,
                ParameterPlan(
                    fqn=source.fqn,
                    shape=shape,
                    dtype=source.spec.dtype,
                    layout=state.layout,
                    trainable=source.trainable,
                    buffer=source.kind is not SourceKind.PARAMETER,
                    persistent=source.persistent,
                    tied=source.tied,
                    shard_sizes=_uneven(shape, state.layout, grid),
                    zero=state.level,
                    stored=state.stored,
                ),
            )
    shared = list(dict.fromkeys(ref for block in blocks for ref in block.shared))
    names = setup_sources(setting.nodes, setting.chain.setup, shared)
    if blocks[0].index == 0:
        names += unread_state(setting)
    for source in (setting.sources[name] for name in names):
        if source.kind is not SourceKind.INPUT:
            found.setdefault(source.fqn, _whole(source, len(grid.mesh)))
    return tuple(found.values())


def _whole(source: Source, num_axes: int) -> ParameterPlan:
    """A tensor that every rank of the stage holds whole; no gradient reaches it."""
    return ParameterPlan(
        fqn=source.fqn,
        shape=tuple(size.const for size in source.spec.shape),
        dtype=source.spec.dtype,
        layout=(R,) * num_axes,
        trainable=source.trainable,
        buffer=source.kind is not SourceKind.PARAMETER,
        persistent=source.persistent,
        tied=source.tied,
    )


def unread_state(setting: Setting) -> tuple[str, ...]:
    """Parameters and buffers that no op reads; the first stage keeps them for the state dict."""
    read = {ref.name for node in setting.graph.nodes for ref in node.inputs()}
    state = (SourceKind.PARAMETER, SourceKind.BUFFER)
    return tuple(s.name for s in setting.graph.sources if s.kind in state and s.name not in read)


def _uneven(shape: tuple[int, ...], layout: Layout, grid: Grid) -> tuple[int, ...]:
    for placement, size in zip(layout, grid.sizes, strict=True):
        if isinstance(placement, Shard) and not placement.pieces and shape[placement.dim] % size:
            return chunk_sizes(shape[placement.dim], size)
    return ()
