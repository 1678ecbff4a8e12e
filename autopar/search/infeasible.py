"""Why no plan fits, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from autopar.errors import InfeasiblePlan
from autopar.ir.mesh import CONTEXT, TENSOR, MeshAxis
from autopar.plan.plan import NOT_AT_ONCE
from autopar.plan.text import amount, spans
from autopar.rules.context import ATTENTION, attention_kind
from autopar.search.assemble import StageHeld, stage_terms
from autopar.search.block import HEAVY_OPS
from autopar.search.grid import Grid
from autopar.search.grids import widest_tensor
from autopar.search.moments import stage_memory
from autopar.search.offered import splits_work
from autopar.search.options import ClassOption
from autopar.search.pricer import Pricer
from autopar.search.setting import Setting
from autopar.search.stages import Staged


class NothingFits(InfeasiblePlan):
    """No grid has a plan that fits; the message has the closest miss."""


def explain_infeasible(pricer: Pricer, unfit: Sequence[Staged], total: int | None = None) -> str:
    """The closest miss: which stage needs how much, for what.

    `unfit` are grids without a plan: too large, or not solved in time; of `total`, by default all.
    """
    setting = pricer.setting
    cluster = setting.cluster
    pinned = "".join(f", {key}={value}" for key, value in setting.pins.items())
    head = (
        f"no plan for {setting.name} fits {cluster.spec or f'{cluster.num_devices} devices'} "
        f"(global batch {setting.global_batch}, {setting.training.precision.name}, "
        f"{setting.training.optimizer}{pinned})"
    )
    if not unfit:
        return f"{head}: some op is left without a placement; {_pins(setting)}"
    missed = [staged for staged in unfit if staged.solution.conflict]
    if not missed:
        return (
            f"{head} that could be found in {setting.time_limit_s:g} s: {len(unfit)} of "
            f"{len(unfit)} grids were not solved; give more time"
        )
    closest = min(missed, key=lambda staged: sum(short for _, short in staged.solution.conflict))
    grid = closest.grid
    count = total or len({staged.grid for staged in missed})
    which = f"The closest of {count} grids" if count > 1 else "The only grid"
    return "\n".join(
        [
            f"{head}. {which} is pipeline {grid.pipeline} x "
            f"{f'{grid.chunks} chunks x ' if grid.chunks > 1 else ''}"
            f"{' x '.join(f'{axis.name} {axis.size}' for axis in grid.mesh)}, "
            f"micro-batch {grid.micro_batch}:",
            *_closest_lines(pricer, closest),
        ]
    )


def _closest_lines(pricer: Pricer, closest: Staged) -> list[str]:
    grid = closest.grid
    capacity = closest.problem.capacity_bytes
    used = {
        stages[0]: sum(closest.solution.stage_bytes[k] for k in stages)
        for stages in closest.problem.rank_stages()
    }
    worst = max(used, key=lambda k: used[k] - capacity[k])
    needs, has = used[worst], capacity[worst]
    together = [k for k in range(grid.pipe.num_stages) if grid.pipe.placement[k] == worst]
    terms = _least_terms(pricer, closest, worst)
    terms.append((NOT_AT_ONCE, needs - sum(value for _, value in terms)))
    where = f"stage {worst}" if len(together) == 1 else f"the rank of stages {spans(together)}"
    shown = ", ".join(f"{name} {amount(value)}" for name, value in terms if round(value))
    return [
        f"  {where} needs {amount(needs)} of {amount(has)}, {ceil(needs - has)} bytes too "
        f"much: {shown}",
    ]


def _pins(setting: Setting) -> str:
    items = setting.pins.items()
    if not items:
        return "nothing is pinned"
    return "pinned: " + ", ".join(f"{key}={value}" for key, value in items) + " (try without)"


def _least_terms(pricer: Pricer, staged: Staged, first: int) -> list[tuple[str, float]]:
    """Memory terms of a rank run with as little as its blocks' options allow; `first` is the first
    of its stages."""
    problem = staged.problem
    terms: dict[str, float] = {}
    for stage, place in enumerate(problem.stage_rank):
        if place != problem.stage_rank[first]:
            continue
        indices = problem.stages(staged.solution.cuts)[stage]
        held = problem.in_flight[stage]
        options = _smallest([staged.options[problem.blocks[b]] for b in indices], held)
        blocks = [pricer.setting.chain.blocks[b] for b in indices]
        own = StageHeld(saved=held, once=stage == first, widest=stage == first)
        memory = stage_memory(pricer, staged.grid.at(place), blocks, options)
        for name, value in stage_terms(pricer, staged.grid, stage, blocks, options, own, memory):
            terms[name] = terms.get(name, 0.0) + value
    return list(terms.items())


def _smallest(offered: Sequence[Sequence[ClassOption]], held: int) -> list[ClassOption]:
    """One option per block for the least sum of what is kept, plus the largest transient."""

    def kept(option: ClassOption) -> int:
        return option.state.held.terms.total_bytes + held * option.saved_bytes

    best: tuple[float, list[ClassOption]] = (inf, [])
    for ceiling in {option.transient_bytes for options in offered for option in options}:
        fitting = [[o for o in options if o.transient_bytes <= ceiling] for options in offered]
        if all(fitting):
            chosen = [min(options, key=kept) for options in fitting]
            needs = sum(map(kept, chosen)) + max(o.transient_bytes for o in chosen)
            best = min(best, (needs, chosen), key=lambda found: found[0])
    return best[1]


def explain_unsplittable(pricer: Pricer, degree: int) -> str | None:
    """Why a pinned tensor degree cannot be honoured, or None if it can.

    A tensor degree is a promise that the matrix products with weights and the attention of every
    repeated block are split; replicating them over the axis would honour it in name only.
    """
    setting = pricer.setting
    for block_class in setting.chain.classes:
        block = setting.chain.representative(block_class.index)
        weights = {ref.name for ref in block.parameters}
        for node in setting.block_nodes(block):
            weighted = node.op in HEAVY_OPS and any(r.name in weights for r in node.inputs())
            if not weighted and node.op != ATTENTION:
                continue
            offered = pricer.spaces.strategies(node, MeshAxis(name=TENSOR, size=degree))
            if any(splits_work(pricer.setting, node, strategy) for strategy in offered):
                continue
            shapes = ", ".join(str(setting.specs[ref]) for ref in node.inputs()[:3])
            heads = setting.specs[node.inputs()[0]].shape[1] if node.op == ATTENTION else None
            why = (
                f"its {heads} heads cannot be split evenly over {degree} ranks"
                if heads is not None
                else f"no dim of it can be split over {degree} ranks"
            )
            fits = [
                str(d)
                for d in range(2, widest_tensor(setting) + 1)
                if heads is not None
                and heads.const % d == 0
                and setting.cluster.num_devices % d == 0
            ]
            remedy = f"; degrees that fit the heads and the cluster: {', '.join(fits) or 'none'}"
            return (
                f"tensor={degree} is pinned, but {node.target} in "
                f"{node.module_path or block.module_path} ({shapes}) is in the way: {why}"
                + (remedy if heads is not None else "")
            )
    return None


def explain_attention(setting: Setting, grids: Sequence[Grid]) -> str | None:
    """Why no attention of the model can meet its keys as pinned on a context axis, or None if some
    can. Attention that cannot, beside some that can, is left to the search."""
    pinned = setting.pins.attention
    nodes = [node for node in setting.graph.nodes if node.op == ATTENTION]
    axes = {a for grid in grids for a in grid.mesh if a.name == CONTEXT and a.size > 1}
    if pinned is None or not nodes or not axes:
        return None
    kinds = {
        attention_kind(node, strategy)
        for axis in axes
        for node in nodes
        for strategy in setting.strategies(node, axis)
    }
    if pinned in kinds:
        return None
    dropout = pinned == "ring" and all(node.arg(4, "dropout_p", 0.0) for node in nodes)
    why = ": a ring does not drop out attention weights" if dropout else ""
    sizes = ", ".join(str(size) for size in sorted({axis.size for axis in axes}))
    return (
        f"attention={pinned} is pinned, but {nodes[0].target} in {nodes[0].module_path} cannot be "
        f"run so over context {sizes}{why}; it offers: {', '.join(sorted(kinds - {''})) or 'none'}"
    )
