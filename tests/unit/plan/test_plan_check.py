"""A sound plan passes; each contradiction is found and named, and all are listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import PlanMismatch
from autopar.ir.collective import Collective, CollectiveOp
from autopar.ir.placement import P, R, Shard
from autopar.plan.check import check_plan, plan_problems, shared_parameters
from autopar.plan.plan import MeshAxis, RecomputePlan
from autopar.schedules.registry import SCHEDULES


def _stage(plan, position, /, **changes):
    stages = list(plan.stages)
    stages[position] = replace(stages[position], **changes)
    return replace(plan, stages=tuple(stages))


def _training(plan, **changes):
    return replace(plan, training=replace(plan.training, **changes))


def _parameter(plan, **changes):
    """Stage 0 with its second parameter (layers.0.norm.weight, of 64) changed."""
    first, second, *rest = plan.stages[0].parameters
    return _stage(plan, 0, parameters=(first, replace(second, **changes), *rest))


def _up(plan, **changes):
    """Stage 0 with layers.0.up.weight (256 x 64) changed."""
    first, second, third, *rest = plan.stages[0].parameters
    return _stage(plan, 0, parameters=(first, second, replace(third, **changes), *rest))


def _block(plan, **changes):
    *blocks, last = plan.stages[0].blocks
    return _stage(plan, 0, blocks=(*blocks, replace(last, **changes)))


def _choice(plan, **changes):
    embed, *rest = plan.variants
    choices = (replace(embed.choices[0], **changes),)
    return replace(plan, variants=(replace(embed, choices=choices), *rest))


def _collective(plan, **changes):
    item = Collective(op=CollectiveOp.ALL_REDUCE, nbytes=8, axes=("data",), phase="sync", value="x")
    return replace(plan, collectives=(*plan.collectives, replace(item, **changes)))


def _memory(plan, activations):
    terms = dict(plan.stages[1].memory_bytes) | {"activations": activations}
    return _stage(plan, 1, memory_bytes=tuple(terms.items()))


def _again(plan, **fields):
    embed, layer, head = plan.variants
    layer = replace(layer, recompute=(RecomputePlan(**fields),))
    return replace(plan, variants=(embed, layer, head))


GIB = 2**30
PARAMETER = "stage 0: parameter layers.0.norm.weight"
UP = "stage 0: parameter layers.0.up.weight"

ONE_PROBLEM = {
    "pipeline": (
        lambda p: replace(p, pipeline=3),
        "pipeline: expected 2, the number of stages, found 3",
    ),
    "schedule": (
        lambda p: replace(p, schedule="best"),
        f"schedule: expected one of {', '.join(SCHEDULES)}, found 'best'",
    ),
    "global batch": (
        lambda p: _training(p, global_batch=33),
        "training: 8 micro-batches of 2 over 2 data-parallel ranks hold 32 samples of the global "
        "batch of 33",
    ),
    "batch of zero": (
        lambda p: _training(p, global_batch=0),
        "training.global_batch: expected at least 1, found 0",
    ),
    "stage index": (
        lambda p: _stage(p, 0, index=5),
        "stages[0].index: expected 0, found 5",
    ),
    "block missing": (
        lambda p: _stage(p, 0, blocks=p.stages[0].blocks[:3]),
        "blocks 3: on no stage",
    ),
    "block twice": (
        lambda p: _stage(p, 1, blocks=(p.stages[0].blocks[3], *p.stages[1].blocks)),
        "block 3: expected on one stage, found 2 times",
    ),
    "block order": (
        lambda p: _stage(p, 0, blocks=(*p.stages[0].blocks[:2], *p.stages[0].blocks[3:1:-1])),
        "block 2: expected the stages to hold the blocks in order, after 3",
    ),
    "in flight": (
        lambda p: _stage(p, 0, in_flight=0),
        "stage 0: in_flight: expected at least 1, found 0",
    ),
    "too few ranks": (
        lambda p: _stage(p, 0, ranks=(0, 1, 2)),
        "stage 0: expected 4 ranks (data 2 x tensor 2), found 3",
    ),
    "rank twice": (
        lambda p: _stage(p, 1, ranks=(3, 4, 5, 6)),
        "rank 3: on stage 0 and on stage 1",
    ),
    "rank outside": (
        lambda p: _stage(p, 1, ranks=(4, 5, 6, 8)),
        "rank 8: outside the cluster of 8 devices",
    ),
    "parameter missing": (
        lambda p: _stage(p, 1, parameters=p.stages[1].parameters[1:]),
        "parameter layers.3.norm.weight: on no stage",
    ),
    "parameter twice": (
        lambda p: _stage(p, 1, parameters=(*p.stages[1].parameters, p.stages[1].parameters[0])),
        "stage 1: parameter layers.3.norm.weight: expected once, found 2 times",
    ),
    "parameter unknown": (
        lambda p: _stage(
            p,
            1,
            parameters=(*p.stages[1].parameters, replace(p.stages[1].parameters[0], fqn="x")),
        ),
        "stage 1: parameter x: not one of the model's",
    ),
    "parameter shape": (
        lambda p: _parameter(p, shape=(65,)),
        f"{PARAMETER}: expected the model's shape [64], found [65]",
    ),
    "placements per axis": (
        lambda p: _parameter(p, layout=(R,)),
        f"{PARAMETER}: expected 2 placements, one per mesh axis, found 1",
    ),
    "shard beyond": (
        lambda p: _parameter(p, layout=(R, Shard(1))),
        f"{PARAMETER}: S(1) of a tensor of 1 dim",
    ),
    "partial parameter": (
        lambda p: _parameter(p, layout=(R, P)),
        f"{PARAMETER}: a parameter cannot be P(sum)",
    ),
    "zero level without a layout": (
        lambda p: _parameter(p, zero=1),
        f"{PARAMETER}: zero 1 with the stored layout none",
    ),
    "pieces": (
        lambda p: _up(p, layout=(R, Shard(0, (128, 64)))),
        f"{UP}: the pieces of S(0:128|64) are not 256 together",
    ),
    "tied copies differ": (
        lambda p: _stage(
            p,
            1,
            parameters=(
                *p.stages[1].parameters[:-1],
                replace(p.stages[1].parameters[-1], layout=(R, R)),
            ),
        ),
        "stage 1: parameter embed.weight: not as on an earlier stage",
    ),
    "variant unknown": (
        lambda p: _block(p, variant="other"),
        "block 3: no variant is called 'other'",
    ),
    "variant unused": (
        lambda p: replace(p, variants=(*p.variants, replace(p.variants[0], name="spare"))),
        "variant spare: run by no block",
    ),
    "recompute unknown": (
        lambda p: _block(p, recompute="selective"),
        "block 3: recompute: expected one of none, full, which variant layer has, found "
        "'selective'",
    ),
    "recompute of another op": (
        lambda p: _again(p, name="full", steps=("linear", "softmax")),
        "variant layer: recompute full: 'softmax' is neither an op of the variant nor a move",
    ),
    "recompute twice": (
        lambda p: _again(p, name="full", steps=("linear", "linear")),
        "variant layer: recompute full: 'linear' is listed 2 times",
    ),
    "variant twice": (
        lambda p: replace(p, variants=(*p.variants, p.variants[0])),
        "variant embed: expected once, found 2 times",
    ),
    "choice layout": (
        lambda p: _choice(p, outputs=((R, R, R),)),
        "variant embed: op embedding: expected 2 placements, one per mesh axis, found 3",
    ),
    "collective axis": (
        lambda p: _collective(p, axes=("expert",)),
        "plan: all_reduce of x: no axis is called expert",
    ),
    "collective count": (
        lambda p: _collective(p, count=0),
        "plan: all_reduce of x: 0 times 8 bytes",
    ),
    "collective totals": (
        lambda p: _collective(p, nbytes=2**20),
        "plan: all_reduce sync data: 1.376 MiB in all, 385.5 KiB over the stages",
    ),
    "collective of the stages alone": (
        lambda p: replace(p, collectives=p.collectives[1:]),
        "plan: all_reduce backward tensor: 0 B in all, 768 KiB over the stages",
    ),
    "memory limit": (
        lambda p: _stage(p, 0, memory_limit_bytes=0),
        "stage 0: memory_limit_bytes: expected at least 1, found 0",
    ),
    "memory": (
        lambda p: _memory(p, 9.01 * GIB),
        "stage 1: needs 15.01 GiB of 15 GiB: activations 9.01 GiB, optimizer state 4 GiB, "
        "weights 2 GiB",
    ),
    "peak bytes": (
        lambda p: replace(p, prediction=replace(p.prediction, peak_bytes=9.0 * GIB)),
        "prediction.peak_bytes: states 9 GiB, the stages add up to 12.5 GiB",
    ),
    "peak stage": (
        lambda p: replace(p, prediction=replace(p.prediction, peak_stage=2)),
        "prediction.peak_stage: there is no stage 2",
    ),
}


def test_the_sample_is_sound(sample_plan):
    assert plan_problems(sample_plan) == ()
    check_plan(sample_plan)


@pytest.mark.parametrize(("change", "problem"), ONE_PROBLEM.values(), ids=ONE_PROBLEM.keys())
def test_each_contradiction_is_named(sample_plan, change, problem):
    assert problem in plan_problems(change(sample_plan))


def test_all_problems_are_listed_in_one_error(sample_plan):
    broken = replace(_training(sample_plan, global_batch=64), pipeline=4)
    with pytest.raises(PlanMismatch) as caught:
        check_plan(broken)
    first, *rest = str(caught.value).splitlines()
    assert first == "the plan contradicts itself in 2 places:"
    assert [line.split(":")[0] for line in rest] == ["  pipeline", "  training"]


def test_a_long_list_is_cut(sample_plan):
    layouts = tuple(replace(p, layout=()) for p in sample_plan.stages[0].parameters)
    many = _stage(sample_plan, 0, parameters=(*layouts, *layouts, *layouts))
    with pytest.raises(PlanMismatch, match=r"\n  and \d+ more$"):
        check_plan(many)


def test_an_empty_plan_is_refused_without_a_crash(sample_plan):
    empty = replace(sample_plan, stages=(), axes=(), variants=(), pipeline=0)
    problems = plan_problems(empty)
    assert "pipeline: expected at least 1, found 0" in problems
    assert "parameter embed.weight: on no stage" in problems


def test_repeated_axis(sample_plan):
    axes = (MeshAxis(name="data", size=2), MeshAxis(name="data", size=2))
    problems = plan_problems(replace(sample_plan, axes=axes))
    assert "axis data: expected one mesh axis of a name, none of pipeline, tied, world" in problems


def test_shared_parameters(sample_plan):
    assert shared_parameters(sample_plan) == {"embed.weight": (0, 1)}
