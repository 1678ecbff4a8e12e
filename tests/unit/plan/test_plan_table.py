"""What a plan, a difference and an explanation say. `python <this file>` rewrites the golden."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.ir.collective import Collective, CollectiveOp
from autopar.ir.mesh import stage_mesh
from autopar.ir.placement import R_STAR, P, R, Shard
from autopar.ir.size import Size
from autopar.plan.check import check_plan
from autopar.plan.diff import diff_plans, plan_changes
from autopar.plan.explain import explain
from autopar.plan.plan import NodeChoice, TensorEntry
from autopar.plan.serialize import from_json, to_json
from autopar.plan.table import parameter_count, plan_summary, plan_table, sequence_length
from autopar.plan.techniques import op_stem, techniques, variant_parameters

GOLDEN = Path(__file__).parents[2] / "golden"


def _changed_stage(plan, position, **changes):
    stages = list(plan.stages)
    stages[position] = replace(stages[position], **changes)
    return replace(plan, stages=tuple(stages))


def _parameters(plan, **layouts):
    """The plan with other layouts for the parameters whose last module is a key."""
    stages = tuple(
        replace(
            stage,
            parameters=tuple(
                replace(p, layout=layouts.get(p.fqn.split(".")[-2], p.layout))
                for p in stage.parameters
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def _layer(plan, *choices):
    embed, layer, head = plan.variants
    return replace(plan, variants=(embed, replace(layer, choices=choices), head))


def test_table_is_the_golden_text(sample_plan):
    found = plan_table(sample_plan) + "\n"
    assert found == (GOLDEN / "plan_table.txt").read_text(), f"review, then run {__file__}"


def test_table_survives_the_round_trip(sample_plan):
    assert plan_table(from_json(to_json(sample_plan))) == plan_table(sample_plan)


def test_summary_is_json_and_agrees(sample_plan):
    summary = plan_summary(sample_plan)
    assert json.loads(json.dumps(summary)) == summary
    # 512 x 64 embedding (tied), six layers of 64 + 2 x 64 x 256
    assert summary["parameters"] == 512 * 64 + 6 * (64 + 2 * 64 * 256)
    assert summary["tokens_per_s"] == 800 * 32
    assert summary["stages"][0]["peak_bytes"] == 12.5 * 2**30
    assert summary["axes"] == {"data": 2, "tensor": 2}
    assert summary["pins"] == [{"key": "schedule", "value": "1f1b", "cost_s": 0.0}]


def test_buffers_are_no_parameters(sample_plan):
    first, *rest = sample_plan.stages[0].parameters
    plan = _changed_stage(sample_plan, 0, parameters=(replace(first, buffer=True), *rest))
    plan = _changed_stage(plan, 1, parameters=plan.stages[1].parameters[:-1])
    assert parameter_count(plan) == 6 * (64 + 2 * 64 * 256)


@pytest.mark.parametrize(
    ("shape", "dtype", "length"),
    [
        ((Size(0, 1), Size(128)), "int64", 128),
        ((Size(0, 1), Size(128)), "float32", None),
        ((Size(0, 1),), "int64", None),
        ((Size(0, 1), Size(0, 128)), "int64", None),
    ],
)
def test_sequence_length(sample_plan, shape, dtype, length):
    inputs = (TensorEntry(fqn="x", shape=shape, dtype=dtype),)
    plan = replace(sample_plan, model=replace(sample_plan.model, inputs=inputs))
    assert sequence_length(plan) == length


def test_a_plan_of_nothing_much_has_a_table(sample_plan):
    """One stage, no axes, all zero: no division, no empty column breaks it."""
    whole = tuple(
        replace(p, layout=())
        for p in {p.fqn: p for s in sample_plan.stages for p in s.parameters}.values()
    )
    variants = tuple(
        replace(v, choices=(), recompute=tuple(replace(r, steps=()) for r in v.recompute))
        for v in sample_plan.variants
    )
    stage = replace(
        sample_plan.stages[0],
        ranks=(0,),
        blocks=tuple(b for s in sample_plan.stages for b in s.blocks),
        parameters=whole,
        time_s=(),
        memory_bytes=(),
        collectives=(),
    )
    prediction = replace(
        sample_plan.prediction, step_s=0.0, samples_per_s=0.0, peak_bytes=0.0, time_s=()
    )
    plan = replace(
        sample_plan,
        pipeline=1,
        axes=(),
        variants=variants,
        stages=(stage,),
        collectives=(),
        prediction=prediction,
        certificate=replace(sample_plan.certificate, runners_up=()),
        pins=(),
        notes=(),
        training=replace(sample_plan.training, micro_batches=16),
    )
    check_plan(plan)
    text = plan_table(plan)
    assert "gradient accumulation over 16 micro-batches" in text
    assert "Runners-up" not in text and "Collectives" not in text
    assert "What bounds the step" in explain(plan)
    assert "devices" in diff_plans(plan, sample_plan)


def test_terms_that_are_zero_and_axes_of_one_are_left_out(sample_plan):
    plan = _changed_stage(
        sample_plan, 0, memory_bytes=(*sample_plan.stages[0].memory_bytes, ("master", 0.0))
    )
    plan = replace(plan, axes=(replace(plan.axes[0], size=1), plan.axes[1]))
    text = plan_table(plan)
    assert "master" not in text and "master" not in explain(plan)
    header = next(line for line in text.splitlines() if line.startswith("  variant"))
    assert header.split() == ["variant", "parameter", "count", "shape", "dtype", "tensor"]


def test_techniques_of_the_sample(sample_plan):
    assert techniques(sample_plan) == (
        "pipeline parallelism over 2 stages (1F1B)",
        "data parallelism over data 2: parameters replicated, gradients summed",
        "tensor parallelism over tensor 2: column-parallel linear x7, row-parallel linear x6, "
        "vocabulary-parallel embedding x1",
        "full activation recomputation (3 of 8 blocks)",
        "embed.weight on stages 0, 1, its gradients summed between them",
    )


ACTIVATION = (Shard(0), R)


@pytest.mark.parametrize(
    ("node", "inputs", "output", "name"),
    [
        ("linear_3", (R_STAR, Shard(0)), Shard(2), "column-parallel linear x7"),
        ("linear", (Shard(2), Shard(1)), P, "row-parallel linear x6"),
        # addmm takes the bias first, and the weight as it multiplies
        ("addmm", (Shard(0), R_STAR, Shard(1)), Shard(1), "column-parallel linear x7"),
        ("addmm_1", (R, Shard(1), Shard(0)), P, "row-parallel linear x6"),
        (
            "scaled_dot_product_attention",
            (Shard(1), Shard(1), Shard(1)),
            Shard(1),
            "attention split by heads x6",
        ),
    ],
)
def test_ops_have_their_names(sample_plan, node, inputs, output, name):
    choice = NodeChoice(
        node=node,
        inputs=tuple((R, placement) for placement in inputs),
        outputs=((R, output),),
    )
    found = techniques(_layer(sample_plan, choice))[2]
    assert name in found


@pytest.mark.parametrize(
    ("node", "inputs", "output"),
    [
        ("linear", (Shard(0), R_STAR), Shard(0)),
        ("linear", (R, R), R),
        ("relu", (Shard(2),), Shard(2)),
        # a sum over experts, say: one operand is whole
        ("bmm", (R, Shard(0)), P),
        ("bmm", (Shard(0), Shard(0)), Shard(0)),
    ],
)
def test_other_ops_have_none(sample_plan, node, inputs, output):
    choice = NodeChoice(node=node, inputs=tuple((R, p) for p in inputs), outputs=((R, output),))
    assert techniques(_layer(sample_plan, choice))[2] == (
        "tensor parallelism over tensor 2: column-parallel linear x1, "
        "vocabulary-parallel embedding x1"
    )


def test_megatron_sequence_parallelism_is_named(sample_plan):
    data, tensor = sample_plan.axes
    plan = replace(sample_plan, axes=(data, replace(tensor, sequence=True)))
    named = "sequence parallelism (Megatron) over tensor 2: "
    assert any(line.startswith(named) for line in techniques(plan))
    assert not any(line.startswith(named) for line in techniques(sample_plan))


@pytest.mark.parametrize(
    ("query", "key", "kind"),
    [
        (Shard(2), R_STAR, "attention with gathered keys and values x6"),
        (Shard(2), Shard(2), "ring attention x6"),
        (Shard(1), Shard(1), "all-to-all between sequence and heads (Ulysses) x6"),
        (R, R, "activations split along the sequence"),
    ],
)
def test_context_parallelism_says_how_queries_meet_keys(sample_plan, query, key, kind):
    axes = stage_mesh(data=2, context=2, zigzag=True)[:2]
    whole = _parameters(sample_plan, embed=(R, R), up=(R, R), down=(R, R))
    inputs = tuple((R, placement) for placement in (query, key, key))
    attention = NodeChoice(
        node="scaled_dot_product_attention_1", inputs=inputs, outputs=((R, query),)
    )
    lines = techniques(_layer(replace(whole, axes=axes), attention))
    line = f"context parallelism over context 2: {kind}, sequence dealt out in zig-zag"
    assert line in lines


def test_scattered_activations_are_seen_in_the_collectives(sample_plan):
    scatter = Collective(
        op=CollectiveOp.REDUCE_SCATTER, nbytes=8, axes=("tensor",), phase="forward", value="x"
    )
    plan = _changed_stage(sample_plan, 0, collectives=(scatter,))
    line = (
        "sequence parallelism over tensor 2 inside blocks: activations between products on shards "
        "(reduce-scatter, all-gather)"
    )
    assert line in techniques(plan) and line not in techniques(sample_plan)


def test_replicated_weights_are_named(sample_plan):
    plan = _parameters(sample_plan, down=(R, R))
    assert "replicated over tensor: down.weight" in techniques(plan)


def test_a_second_replicating_axis_is_not_called_data_parallel(sample_plan):
    whole = _parameters(sample_plan, embed=(R, R), up=(R, R), down=(R, R))
    plan = _layer(
        replace(whole, variants=tuple(replace(v, choices=()) for v in whole.variants)),
        NodeChoice(node="linear", inputs=(ACTIVATION, (R, R)), outputs=(ACTIVATION,)),
    )
    found = techniques(plan)
    assert "data parallelism over data 2: parameters replicated, gradients summed" in found
    assert any(line.startswith("replication over tensor 2") for line in found)


def test_parameters_of_equal_blocks_are_one_row(sample_plan):
    rows = {
        (r.variant, r.name): (r.count, str(r.parameter.layout[1]))
        for r in variant_parameters(sample_plan)
    }
    assert rows == {
        ("embed", "embed.weight"): (1, "S(0)"),
        ("layer", "norm.weight"): (6, "R"),
        ("layer", "up.weight"): (6, "S(0)"),
        ("layer", "down.weight"): (6, "S(1)"),
    }


def test_op_stem():
    names = ("linear", "linear_3", "scaled_dot_product_attention_12", "add_1_2", "rms_norm")
    assert [op_stem(name) for name in names] == [
        "linear",
        "linear",
        "scaled_dot_product_attention",
        "add",
        "rms_norm",
    ]


def test_diff_of_equal_plans(sample_plan):
    assert diff_plans(sample_plan, sample_plan) == "the plans are identical"
    assert plan_changes(sample_plan, sample_plan) == ()


def test_diff_says_what_changed_and_what_it_costs(sample_plan):
    slower = replace(sample_plan.prediction, step_s=0.05)
    other = replace(_parameters(sample_plan, up=(R, R)), prediction=slower, schedule="gpipe")
    text = diff_plans(sample_plan, other)
    assert "step            40 ms     50 ms  +25.0%" in text
    assert "schedule 1f1b -> pipeline 2 x data 2" in text
    assert "layers.*.up.weight  x6     data R* tensor S(0)  ->  data R tensor R" in text
    assert "values that differ: schedule 1, stages 12, prediction 1" in text


def test_diff_names_stages_ops_and_collectives(sample_plan):
    first, second = sample_plan.stages
    moved = replace(
        sample_plan,
        stages=(
            replace(first, blocks=first.blocks[:3], collectives=()),
            replace(second, blocks=(first.blocks[3], *second.blocks)),
        ),
    )
    embedding = replace(
        sample_plan.variants[0].choices[0],
        inputs=((R, Shard(1)), (Shard(0), R)),
        outputs=((Shard(0), Shard(2)),),
    )
    moved = replace(
        moved,
        variants=(
            replace(sample_plan.variants[0], choices=(embedding,)),
            *sample_plan.variants[1:],
        ),
    )
    lines = [" ".join(line.split()) for line in diff_plans(sample_plan, moved).splitlines()]
    assert "0 a 0-3 0-3 1-3 full 12.5 GiB" in lines
    assert "0 b 0-2 0-3 1-2 full 12.5 GiB" in lines
    assert "embedding of class 0: data S(0) tensor P(sum) -> data S(0) tensor S(2)" in lines
    assert "all_reduce tensor forward 48 -> 24 768 KiB -> 384 KiB" in lines


def test_changes_list_every_path(sample_plan):
    other = replace(sample_plan, notes=(), pipeline=3)
    assert plan_changes(sample_plan, other) == (
        ("pipeline", 2, 3),
        ("notes", ["op cumsum has no sharding rule and is replicated"], None),
    )
    assert plan_changes(replace(sample_plan, notes=("a", "b")), replace(other, notes=("a",)))[
        1
    ] == (
        "notes[1]",
        "b",
        None,
    )


def test_explain_names_what_dominates(sample_plan):
    lines = [line.strip() for line in explain(sample_plan).splitlines()]
    bounds = lines.index("What bounds the step")
    assert lines[bounds + 1] == "backward: 19.2 ms, 48.0% of the step"
    assert "slowest stage: 1, 3.6 ms a micro-batch, forward and backward" in lines
    assert "fastest stage: 0, waits 16.7% of that time" in lines
    assert "fullest: stage 0, 12.5 GiB of 15 GiB, 2.5 GiB (16.7%) free" in lines
    assert "optimal: objective 40 ms, proven bound 39.96 ms, gap 0.1%" in lines


def test_explain_an_op(sample_plan):
    assert explain(sample_plan, "linear_1").splitlines() == [
        "op linear_1 of variant layer",
        "  runs in 6 blocks: 1-6",
        "  in layers.0 to layers.5",
        "  input 0: data S(0), tensor S(2)",
        "  input 1: data R*, tensor S(1)",
        "  output 0: data S(0), tensor P(sum)",
        "",
        "Collectives of it",
        "  forward: all_reduce of 16 KiB over tensor, 24 a step on stages 0-1",
    ]


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_explain_a_parameter_by_any_of_its_names(sample_plan, name):
    text = explain(sample_plan, name)
    assert "parameter embed.weight on stage 0" in text
    assert "parameter embed.weight on stage 1" in text
    assert "sync: all_reduce of 64 KiB over tied, 1 a step on stages 0-1" in text


def test_explain_an_unknown_op_names_near_ones(sample_plan):
    with pytest.raises(InputError, match=r"no op or parameter 'linear_2'.*did you mean linear"):
        explain(sample_plan, "linear_2")
    with pytest.raises(InputError, match=r"names 5 ops .* and 19 parameters; ops: embedding"):
        explain(sample_plan, "?")


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from conftest import build_sample_plan

    (GOLDEN / "plan_table.txt").write_text(plan_table(build_sample_plan()) + "\n")
