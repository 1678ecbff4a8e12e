"""Graphs made deeper, plans taken apart, and what is reported of predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calibrate import BOUNDS, fit
from published import Result, errors, feasibility, group_of, regrets
from replay.document import wrongly_told
from replay.lengthen import lengthen
from replay.model import Architecture, build
from replay.price import Captures, grid_step_s, search
from replay.quick import Constants, Quick, Run
from replay.rows import job
from replay.terms import terms

from autopar.capture import capture, find_blocks
from autopar.capture.chain import check_chain
from autopar.costs.calibration import curve_of

SMALL = Architecture(
    hidden=512,
    heads=8,
    kv_heads=8,
    ffn=2048,
    vocab=1024,
    seq_len=256,
    gated=True,
    tied=False,
    dropout=0.0,
    fused_attention=True,
    fused_norm=True,
    fused_rotary=True,
)
ROW = {
    "id": "x",
    "dataset": "somewhere",
    "status": "ok",
    "params_b": 0.036,
    "layers": 8,
    "hidden": 512,
    "heads": 8,
    "ffn": 2048,
    "vocab": 1024,
    "seq_len": 256,
    "gpu": "A100-80GB-SXM",
    "n_gpus": 8,
    "precision": "bf16",
    "global_batch_seqs": 32,
    "micro_batch_seqs": 2,
    "tp": 2,
    "pp": 2,
    "vpp": 1,
    "sequence_parallel": True,
    "zero_stage": 1,
    "recompute": "full",
    "framework": "NeMo",
    "iteration_s": 0.05,
}


@pytest.fixture(scope="module")
def shallow():
    graph = capture(*build(SMALL, 2, 4)).graph
    return graph, find_blocks(graph)


@pytest.fixture(scope="module")
def solved():
    planner, found = search(job(ROW), Captures())
    return planner, found, planner.simulator.fastest(found).prediction


def test_a_lengthened_graph_is_the_deeper_model(shallow):
    graph, chain = lengthen(*shallow, 5)
    deep = capture(*build(SMALL, 5, 4)).graph
    expected = find_blocks(deep)
    check_chain(graph, chain)
    assert [b.class_index for b in chain.blocks] == [b.class_index for b in expected.blocks]
    assert [c.digest for c in chain.classes] == [c.digest for c in expected.classes]
    assert [len(refs) for refs in chain.boundaries] == [len(r) for r in expected.boundaries]
    assert [n.target for n in graph.nodes] == [n.target for n in deep.nodes]
    assert sorted(str(s.spec) for s in graph.sources) == sorted(str(s.spec) for s in deep.sources)
    found = find_blocks(graph)
    assert [b.nodes for b in found.blocks] == [b.nodes for b in chain.blocks]


def test_a_graph_is_not_made_shorter(shallow):
    assert lengthen(*shallow, 2) == shallow
    with pytest.raises(ValueError, match="more than 1"):
        lengthen(*shallow, 1)


def test_the_plan_is_the_published_one(solved):
    _, found, _ = solved
    grid = found.best.grid
    assert found.total == 1
    assert (grid.pipeline, grid.tensor, grid.micro_batch, grid.micro_batches) == (2, 2, 2, 8)
    sizes = [len(own) for own in found.best.problem.stages(found.best.solution.cuts)]
    assert sizes == [5, 5]  # four layers each, the embedding first and the head last


def _run(planner, found, step_s: float) -> Run:
    return Run(
        key="x",
        source="somewhere",
        measured_s=0.05,
        predicted_s=step_s,
        base=Constants.of(curve_of(planner.pricer.device)),
        device=planner.pricer.device,
        execution=planner.setting.execution,
        product_dtype="",
        terms=terms(planner.pricer, found.best),
        weights=(found.best.problem.sum_weight, found.best.problem.max_weight),
    )


def test_the_terms_of_a_plan_add_up_to_its_blocks(solved):
    planner, found, prediction = solved
    run = _run(planner, found, prediction.step_s)
    quick = Quick([run])
    assert quick.step_s(run.base)[0] == pytest.approx(prediction.step_s)
    objective = found.best.solution.objective
    assert quick._raw(run.base)[0] == pytest.approx(objective, rel=0.02)


def test_the_terms_of_a_sharded_plan_add_up_too():
    """Weights gathered and gradients reduced every micro-batch, a block's as one."""
    sharded = {"framework": "Composer/LLM-Foundry FSDP", "tp": 1, "pp": 1, "zero_stage": 3}
    planner, found = search(job({**ROW, **sharded, "id": "z"}), Captures())
    prediction = planner.simulator.fastest(found).prediction
    run = _run(planner, found, prediction.step_s)
    assert all(block.reduce and not block.early for block in run.terms.blocks)
    assert Quick([run])._raw(run.base)[0] == pytest.approx(prediction.step_s, rel=0.02)


def test_a_plan_that_does_not_say_what_runs_again_is_made_to_fit():
    large = {"layers": 64, "pp": 1, "tp": 1, "zero_stage": 0, "global_batch_seqs": 1024}
    short = {"gpu": "V100-16GB", "precision": "fp16", "micro_batch_seqs": 128}
    stated = {k: v for k, v in {**ROW, **large, **short}.items() if k != "params_b"}
    unsaid = {k: v for k, v in stated.items() if k != "recompute"}
    planner, found = search(job(unsaid), Captures())
    assert planner.setting.pins.recompute is None
    assert any(o.again.steps for options in found.best.options.values() for o in options)
    boundless, _ = search(job({**stated, "recompute": "none"}), Captures())
    assert boundless.setting.cluster.device(0).memory_bytes > planner.setting.memory_bytes(0)


def test_weights_are_split_as_megatron_splits_them(solved):
    _, found, _ = solved
    split = {
        name.partition(".")[2]: str(state.layout[-1])
        for options in found.best.options.values()
        for name, state in options[0].states
    }
    assert {split["0.attention.q.weight"], split["0.feed_forward.up.weight"]} == {"S(0)"}
    assert {split["0.attention.out.weight"], split["0.feed_forward.down.weight"]} == {"S(1)"}


def test_pricing_a_grid_again_from_its_options_gives_the_objective(solved):
    planner, found, _ = solved
    again = grid_step_s(found.best, planner.bounds.weights(found.best.grid))
    assert again == pytest.approx(found.best.solution.objective, rel=0.03)


def test_constants_are_found_again(solved):
    """What was measured is what the model says with other constants: the fit finds its way."""
    planner, found, prediction = solved
    run = _run(planner, found, prediction.step_s)
    real = replace(run.base, sustained=0.6)
    seconds = float(Quick([run]).step_s(real)[0])
    assert seconds > 1.02 * prediction.step_s
    measured = Run(**{n: getattr(run, n) for n in Run.__slots__} | {"measured_s": seconds})
    best, error = fit([measured] * 2, run.base)
    assert error["median_error"] < 0.005
    for name, (low, high) in BOUNDS.items():
        assert low <= getattr(best, name) <= high


def result(key: str, **known: object) -> Result:
    base = {"source": "s", "part": "fit", "model": "m", "group": "g", "measured_s": 1.0}
    return Result(**{"key": key, "oom": False, **base, **known})


def test_plans_of_several_frameworks_are_no_group():
    rows = [{**ROW, "plan_group": "g", "framework": name} for name in ("A", "B", "A")]
    assert group_of(rows[0]) == group_of(rows[2]) != group_of(rows[1])
    assert group_of(ROW) is None


def test_errors_regret_and_feasibility():
    runs = [
        result("a", measured_s=1.0, step_s=0.9, fits=True),
        result("b", measured_s=1.2, step_s=0.8, fits=True),
        result("c", measured_s=None, oom=True, fits=False),
        result("d", measured_s=None, oom=True, fits=True),
        result("e", why="no"),
    ]
    found = errors(runs)
    assert found["runs"] == 2
    assert found["median"] == pytest.approx(np.mean([0.1, 1 / 3]))
    assert found["bias"] == pytest.approx(-np.mean([0.1, 1 / 3]))
    assert regrets(runs) == [pytest.approx(0.2)]  # b is ranked first
    told = feasibility(runs)
    assert (told["oom"], told["oom_predicted"], told["ran"], told["ran_predicted"]) == (
        2,
        0.5,
        2,
        1,
    )


def test_runs_whose_memory_is_told_wrong_are_listed():
    def run(key, *, oom, fits):
        return Result(
            key=key, source="s", part="test", model="m", group=None, measured_s=1.0, oom=oom,
            step_s=1.0, fits=fits, peak_gib=79.96,
        )  # fmt: skip

    told = [run("a", oom=False, fits=True), run("b", oom=True, fits=False)]
    wrong = [run("c", oom=False, fits=False), run("d", oom=True, fits=True)]
    rows = [line for line in wrongly_told([*told, *wrong]) if line.startswith("| s |")]
    assert rows == ["| s | test | c | m | yes | 80.0 |", "| s | test | d | m | no | 80.0 |"]
