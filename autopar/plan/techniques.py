"""What the layouts of a plan amount to, in the names the field uses.

Nothing here decides anything: data, tensor, sequence and pipeline parallelism are placements that
the search chose, and this module recognises them. An op is known by the stem of its node's name
(`linear_3` is a `linear`), a weight by its place in the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.ir.collective import CollectiveOp
from autopar.ir.mesh import BATCH_AXES, CONTEXT
from autopar.ir.placement import Layout, Partial, Placement, Replicate, Shard
from autopar.plan.check import shared_parameters
from autopar.plan.pipeline import pipeline_text
from autopar.plan.plan import NodeChoice, ParameterPlan, Plan, Recompute, StagePlan, Variant
from autopar.plan.text import plural, spans
from autopar.plan.zero import zero_shard

_MATMULS = frozenset({"linear", "addmm", "mm", "matmul", "bmm", "einsum"})
_EMBEDDINGS = frozenset({"embedding"})
_ATTENTION = frozenset({"scaled_dot_product_attention"})
_HEADS = 1
_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "unsqueeze", "expand", "slice", "chunk", "split"}
    | {"getitem", "select", "contiguous", "to", "alias", "flatten", "unflatten", "squeeze", "t"}
)
"""Ops that say nothing of what is run again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantParameter:
    """A parameter of all blocks that a variant runs, by its name inside the block's module.

    `count` is of parameters; the only one of its kind has its full name. `variant` is empty for a
    parameter that lies in no block's module.
    """

    variant: str
    name: str
    parameter: ParameterPlan
    count: int


def techniques(plan: Plan) -> tuple[str, ...]:
    """One line per technique the plan uses, from the outermost degree to the innermost."""
    return tuple(_techniques(plan))


def variant_parameters(plan: Plan) -> tuple[VariantParameter, ...]:
    """Parameters of the plan, those of equal blocks (same place, shape and layout) as one."""
    rows: Counter[tuple[str, str, tuple[int, ...], Layout]] = Counter()
    first: dict[tuple[str, str, tuple[int, ...], Layout], ParameterPlan] = {}
    seen: set[str] = set()
    for stage in plan.stages:
        variants = {block.module_path: block.variant for block in stage.blocks}
        for parameter in stage.parameters:
            if parameter.fqn not in seen:
                seen.add(parameter.fqn)
                variant, name = _place(parameter.fqn, variants)
                key = (variant, name, parameter.shape, parameter.layout)
                rows[key] += 1
                first.setdefault(key, parameter)
    return tuple(
        VariantParameter(
            variant=key[0],
            name=key[1] if count > 1 else first[key].fqn,
            parameter=first[key],
            count=count,
        )
        for key, count in rows.items()
    )


def op_stem(node: str) -> str:
    """The op a node's name is made from: `linear` of `linear_3`."""
    return re.sub(r"(_\d+)+$", "", node)


def _place(fqn: str, variants: dict[str, str]) -> tuple[str, str]:
    """The variant of the innermost block module around a parameter, and the rest of its name."""
    path = fqn
    while "." in path:
        path = path.rsplit(".", 1)[0]
        if path in variants:
            return variants[path], fqn[len(path) + 1 :]
    return "", fqn


def _techniques(plan: Plan) -> Iterator[str]:
    training = plan.training
    if plan.pipeline > 1:
        yield f"pipeline parallelism over {pipeline_text(plan)}"
    elif training.micro_batches > 1:
        yield f"gradient accumulation over {training.micro_batches} micro-batches"
    for index in range(len(plan.axes)):
        for own, where in _by_size(plan, index):
            if own.axes[index].size > 1:
                yield from (f"{line}{where}" for line in _axis_techniques(own, index))
    yield from _sharded_state(plan)
    yield from _recomputation(plan)
    for fqn, stages in shared_parameters(plan).items():
        parameter = next(p for stage in plan.stages for p in stage.parameters if p.fqn == fqn)
        if parameter.trainable:
            yield (
                f"{fqn} on stages {', '.join(map(str, stages))}, its gradients summed between them"
            )


def _by_size(plan: Plan, index: int) -> list[tuple[Plan, str]]:
    """The plan as it is on the stages that have as many ranks along an axis, and which those are;
    on all, where they do not differ."""
    found: dict[int, list[StagePlan]] = {}
    for stage in plan.stages:
        found.setdefault(plan.mesh(stage)[index].size, []).append(stage)
    if len(found) == 1:
        return [(plan, "")]
    parts = []
    for stages in found.values():
        used = {block.variant for stage in stages for block in stage.blocks}
        variants = tuple(variant for variant in plan.variants if variant.name in used)
        own = replace(plan.on(stages[0]), stages=tuple(stages), variants=variants)
        which = f"stage{'s' * (len(stages) > 1)} {spans(stage.index for stage in stages)}"
        parts.append((own, f", on {which}"))
    return parts


def _recomputation(plan: Plan) -> Iterator[str]:
    """Activation recomputation, whole blocks first; selective by the ops that run again."""
    blocks = [block for stage in plan.stages for block in stage.blocks]
    total = plural(len(blocks), "block")
    if full := sum(block.recompute_kind is Recompute.FULL for block in blocks):
        yield f"full activation recomputation ({full} of {total})"
    variants = {variant.name: variant for variant in plan.variants}
    chosen = Counter(
        _steps_again(variants[block.variant], block.recompute)
        for block in blocks
        if block.recompute_kind is Recompute.SELECTIVE
    )
    for steps, count in chosen.items():
        yield f"selective activation recomputation ({steps} of {count} of {total})"


def _steps_again(variant: Variant, name: str) -> str:
    """What a variant runs again, in a few words: ops other than views, then moves."""
    ops = {choice.node for choice in variant.choices}
    stems = dict.fromkeys(op_stem(step) for step in variant.steps_again(name) if step in ops)
    named = [stem for stem in stems if stem not in _VIEWS]
    moves = any(step not in ops for step in variant.steps_again(name))
    return ", ".join([*named, *(["moves between placements"] if moves else [])]) or "views"


def _axis_techniques(plan: Plan, index: int) -> Iterator[str]:
    axis = plan.axes[index]
    if axis.splits_samples:
        yield from _data_parallelism(plan, index)
        yield from _expert_parallelism(plan, index)
    elif axis.name == CONTEXT:
        yield f"context parallelism over {axis.name} {axis.size}: {_meeting_keys(plan, index)}"
    else:
        yield from _tensor_axis(plan, index)


def _data_parallelism(plan: Plan, index: int) -> Iterator[str]:
    axis = plan.axes[index]
    weights = _weights(plan, index)
    sharded = any(p.zero == 3 and isinstance(p.stored[index], Shard) for p in weights)
    what = "samples split" if sharded else "parameters replicated"
    yield f"data parallelism over {axis.name} {axis.size}: {what}, gradients summed"


def _tensor_axis(plan: Plan, index: int) -> Iterator[str]:
    axis = plan.axes[index]
    if any(isinstance(p.layout[index], Shard) for p in _weights(plan, index)):
        yield from _tensor_parallelism(plan, index)
        yield from _activations(plan, index)
        names = _replicated_weights(plan, index)
        if names:
            yield f"replicated over {axis.name}: {', '.join(names)}"
        return
    outputs = {layout[index] for c in _choices(plan) for layout in c.outputs}
    if any(isinstance(placement, Shard) for placement in outputs):
        yield (
            f"sequence parallelism over {axis.name} {axis.size}, weights replicated: "
            f"{_meeting_keys(plan, index)}"
        )
    else:
        yield f"replication over {axis.name} {axis.size}: every rank does the same"


def _weights(plan: Plan, index: int) -> list[ParameterPlan]:
    return [p for stage in plan.stages for p in stage.parameters if len(p.layout) > index]


def _meeting_keys(plan: Plan, index: int) -> str:
    """How the queries of an axis that splits the sequence meet all keys."""
    listed = _listed_ops(plan, index, _attention_kind)
    order = ", sequence dealt out in zig-zag" if plan.axes[index].zigzag else ""
    return (listed or "activations split along the sequence") + order


def _attention_kind(choice: NodeChoice, index: int) -> str:
    """Attention on one axis, by what of `[batch, heads, sequence, head dim]` is split."""
    if op_stem(choice.node) not in _ATTENTION or len(choice.inputs) < 3:
        return ""
    query, key = (layout[index] for layout in choice.inputs[:2])
    if not isinstance(query, Shard):
        return ""
    if query.dim == _HEADS:
        return "all-to-all between sequence and heads (Ulysses)"
    return "ring attention" if isinstance(key, Shard) else "attention with gathered keys and values"


def _expert_parallelism(plan: Plan, index: int) -> Iterator[str]:
    """Weights split on an axis that splits the samples: those of experts."""
    axis = plan.axes[index]
    names = sorted(
        row.name
        for row in variant_parameters(plan)
        if isinstance(row.parameter.layout[index], Shard)
    )
    if names:
        listed = ", ".join(dict.fromkeys(names))
        yield f"expert parallelism over {axis.name} {axis.size}: {listed} split by expert"


_ZERO = {
    1: "ZeRO-1 (optimizer state sharded)",
    2: "ZeRO-2 (optimizer state and gradients sharded)",
    3: "ZeRO-3 / FSDP (weights, gradients and optimizer state sharded)",
}


def _sharded_state(plan: Plan) -> Iterator[str]:
    """ZeRO by level and axes; in how many blocks, where it is not all that have parameters."""
    names = [axis.name for axis in plan.axes]
    blocks: Counter[tuple[int, tuple[str, ...], tuple[int, ...]]] = Counter()
    everywhere = {p.zero for s in plan.stages for p in s.parameters if p.trainable}
    for stage in plan.stages:
        over = {p.zero: found.axes for p in stage.parameters if (found := zero_shard(p, names))}
        sizes = tuple(axis.size for axis in plan.mesh(stage))
        blocks.update((b.zero, over[b.zero], sizes) for b in stage.blocks if b.zero in over)
    whole = sum(len(stage.blocks) for stage in plan.stages)
    for (level, axes, sizes), count in sorted(blocks.items()):
        size_of = dict(zip(names, sizes, strict=True))
        where = " x ".join(f"{name} {size_of[name]}" for name in axes)
        copies = [
            f"{name} {size}"
            for name, size in size_of.items()
            if name in BATCH_AXES and name not in axes and size > 1
        ]
        text = f"{_ZERO[level]} over {where}"
        if copies:
            text = f"hybrid sharding (HSDP): {text}, copies over {' x '.join(copies)}"
        yield text if len(everywhere) == 1 else f"{text} in {count} of {plural(whole, 'block')}"


def _tensor_parallelism(plan: Plan, index: int) -> Iterator[str]:
    """Column- and row-parallel matmuls (Megatron-LM), parallel embeddings, split heads."""
    axis = plan.axes[index]
    listed = _listed_ops(plan, index, _op_technique)
    if not listed:
        sharded = Counter(
            f"{row.name} {row.parameter.layout[index]}"
            for row in variant_parameters(plan)
            if isinstance(row.parameter.layout[index], Shard)
        )
        listed = ", ".join(sorted(sharded))
    yield f"tensor parallelism over {axis.name} {axis.size}: {listed}"


def _listed_ops(plan: Plan, index: int, name_of: Callable[[NodeChoice, int], str]) -> str:
    """What the ops of all blocks do on one axis, by name, with how many do."""
    found: Counter[str] = Counter()
    runs = Counter(block.variant for stage in plan.stages for block in stage.blocks)
    for variant in plan.variants:
        for choice in variant.choices:
            name = name_of(choice, index)
            if name:
                found[name] += runs[variant.name]
    return ", ".join(f"{name} x{count}" for name, count in sorted(found.items()))


def _op_technique(choice: NodeChoice, index: int) -> str:
    """What an op does on one axis; empty where it is none of the well-known forms."""
    stem = op_stem(choice.node)
    inputs = [layout[index] for layout in choice.inputs]
    outputs = [layout[index] for layout in choice.outputs]
    if not outputs:
        return ""
    summed = isinstance(outputs[0], Partial)
    if stem in _EMBEDDINGS and inputs and isinstance(inputs[0], Shard):
        return "vocabulary-parallel embedding" if summed else "hidden-parallel embedding"
    if stem in _MATMULS:
        return _matmul_technique(inputs, outputs[0])
    if stem in _ATTENTION and inputs and all(p == Shard(_HEADS) for p in inputs[:3]):
        return "attention split by heads"
    return ""


def _matmul_technique(inputs: list[Placement], output: Placement) -> str:
    if isinstance(output, Partial) and sum(isinstance(p, Shard) for p in inputs) >= 2:
        return "row-parallel linear"
    whole = any(isinstance(p, Replicate) for p in inputs)
    if isinstance(output, Shard) and output.dim > 0 and whole:
        return "column-parallel linear"
    return ""


def _activations(plan: Plan, index: int) -> Iterator[str]:
    axis = plan.axes[index]
    if axis.sequence:
        yield (
            f"sequence parallelism (Megatron) over {axis.name} {axis.size}: norms, dropout and "
            "residuals on shards of the sequence, all-gather and reduce-scatter for all-reduce"
        )
        return
    scattered = any(
        item.op is CollectiveOp.REDUCE_SCATTER
        and item.phase == "forward"
        and axis.name in item.axes
        for stage in plan.stages
        for item in stage.collectives
    )
    if scattered:
        yield (
            f"sequence parallelism over {axis.name} {axis.size} inside blocks: activations between "
            "products on shards (reduce-scatter, all-gather)"
        )


def _replicated_weights(plan: Plan, index: int) -> list[str]:
    """Matrices that every rank of a tensor-parallel axis holds whole, as key-value projections
    with fewer heads than ranks are."""
    return sorted(
        {
            row.name
            for row in variant_parameters(plan)
            if row.parameter.trainable
            and len(row.parameter.shape) > 1
            and not isinstance(row.parameter.layout[index], Shard)
        }
    )


def _choices(plan: Plan) -> Iterator[NodeChoice]:
    for variant in plan.variants:
        yield from variant.choices
