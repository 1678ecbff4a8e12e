"""Parallel programs against the eager single-device model: every number, every collective.

Each case plans in this process, writes the program, and trains it on gloo processes beside the
eager model: loss, every gradient, gradient norm, and all weights after three AdamW steps. What the
ranks communicated must be the plan's list.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from autopar import local
from autopar.compiler import PlanOptions, load_source, plan_source, write_program
from autopar.ir.placement import Shard
from autopar.jobs import Job, verify_job
from autopar.plan.plan import Recompute
from autopar.runtime.verify import TOLERANCE

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODELS_FILE = Path(__file__).with_name("parity_models.py")
SAMPLES, SEQ = 8, 8
DTYPES = {"fp64": "float64", "fp32": "float32"}
GRIDS = {
    "dp4": {"data": 4, "tensor": 1, "pipeline": 1},
    "tp4": {"data": 1, "tensor": 4, "pipeline": 1},
    "pp4": {"data": 1, "tensor": 1, "pipeline": 4},
    "dp2tp2": {"data": 2, "tensor": 2, "pipeline": 1},
    "dp2pp2": {"data": 2, "tensor": 1, "pipeline": 2},
    "tp2pp2": {"data": 1, "tensor": 2, "pipeline": 2},
    "dp2tp2pp2": {"data": 2, "tensor": 2, "pipeline": 2},
}
MODELS = ("mlp", "gpt_tiny", "llama_tiny", "hf_gpt2", "hf_llama")
SCHEDULES = ("gpipe", "1f1b")
RECOMPUTE = ("none", "selective", "all")
MICRO_BATCHES = (1, 2, 3, 8)


@dataclass(frozen=True)
class Case:
    model: str
    grid: str
    micro_batches: int = 2
    schedule: str = "1f1b"
    recompute: str = "none"
    precision: str = "fp64"
    expert: int = 0

    @property
    def pins(self):
        pins = {
            **GRIDS[self.grid],
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "recompute": self.recompute,
            **({"expert": self.expert} if self.expert else {}),
        }
        return tuple((key, str(value)) for key, value in pins.items())

    def __str__(self):
        recompute = "" if self.recompute == "none" else f"-recompute_{self.recompute}"
        return (
            f"{self.model}-{self.grid}-{self.micro_batches}x-{self.schedule}{recompute}"
            f"-{self.precision}{f'-ep{self.expert}' if self.expert else ''}"
        )


# Not every combination, but every pair of (grid, model), (grid, schedule), (grid, recompute) and
# (grid, micro-batches): see `test_cases_cover_all_pairs`. KV heads of llama_tiny and hf_llama (2)
# are fewer than the ranks of tp4; samples of a micro-batch are fewer than those of dp4 at 3 and 8.
# `_stock` models are Hugging Face's as they are; the others keep to the model's dtype throughout.
CASES = [
    Case("mlp", "dp4", 1, "gpipe", "all"),
    Case("gpt_tiny", "dp4", 3, "1f1b", "none"),
    Case("llama_tiny", "dp4", 2, "1f1b", "all"),
    Case("hf_gpt2", "dp4", 8, "gpipe", "none"),
    Case("hf_llama", "dp4", 2, "1f1b", "selective"),
    Case("mlp", "tp4", 2, "1f1b", "all"),
    Case("gpt_tiny", "tp4", 8, "gpipe", "selective"),
    Case("llama_tiny", "tp4", 3, "1f1b", "all"),
    Case("hf_gpt2", "tp4", 1, "1f1b", "none"),
    Case("hf_llama", "tp4", 2, "gpipe", "all"),
    Case("mlp", "pp4", 8, "1f1b", "none"),
    Case("gpt_tiny", "pp4", 3, "gpipe", "selective"),
    Case("llama_tiny", "pp4", 1, "1f1b", "all"),
    Case("hf_gpt2", "pp4", 2, "gpipe", "none"),
    Case("hf_llama", "pp4", 8, "1f1b", "all"),
    Case("mlp", "dp2tp2", 3, "gpipe", "none"),
    Case("gpt_tiny", "dp2tp2", 1, "1f1b", "all"),
    Case("llama_tiny", "dp2tp2", 8, "gpipe", "none"),
    Case("hf_gpt2", "dp2tp2", 2, "1f1b", "all"),
    Case("hf_llama", "dp2tp2", 3, "1f1b", "selective"),
    Case("mlp", "dp2pp2", 2, "gpipe", "all"),
    Case("gpt_tiny", "dp2pp2", 8, "1f1b", "selective"),
    Case("llama_tiny", "dp2pp2", 3, "1f1b", "none"),
    Case("hf_gpt2", "dp2pp2", 3, "gpipe", "all"),
    Case("hf_llama", "dp2pp2", 1, "1f1b", "all"),
    Case("mlp", "tp2pp2", 1, "1f1b", "none"),
    Case("gpt_tiny", "tp2pp2", 2, "1f1b", "all"),
    Case("llama_tiny", "tp2pp2", 8, "1f1b", "all"),
    Case("hf_gpt2", "tp2pp2", 3, "1f1b", "none"),
    Case("hf_llama", "tp2pp2", 2, "gpipe", "selective"),
    Case("mlp", "dp2tp2pp2", 8, "1f1b", "all"),
    Case("gpt_tiny", "dp2tp2pp2", 1, "gpipe", "none"),
    Case("llama_tiny", "dp2tp2pp2", 2, "1f1b", "none"),
    Case("hf_gpt2", "dp2tp2pp2", 2, "1f1b", "selective"),
    Case("hf_llama", "dp2tp2pp2", 3, "gpipe", "all"),
    # Single precision: every grid once.
    Case("gpt_tiny", "dp4", 2, precision="fp32"),
    Case("hf_gpt2_stock", "tp4", 2, precision="fp32"),
    Case("llama_tiny", "pp4", 3, precision="fp32"),
    Case("hf_llama_stock", "dp2tp2", 1, precision="fp32"),
    Case("mlp", "dp2pp2", 3, precision="fp32"),
    Case("hf_gpt2_stock", "tp2pp2", 8, "gpipe", "all", precision="fp32"),
    Case("hf_llama_stock", "dp2tp2pp2", 2, precision="fp32"),
    # Dropout: the eager model draws the same masks.
    Case("gpt_tiny_dropout", "tp4", 2),
    Case("gpt_tiny_dropout", "dp2pp2", 3, "1f1b", "all"),
    Case("gpt_tiny_dropout", "dp2tp2pp2", 3, "gpipe"),
    Case("hf_gpt2_dropout", "dp4", 3),
    Case("hf_gpt2_dropout", "pp4", 8, "gpipe", "all"),
    Case("hf_gpt2_dropout", "dp2tp2", 2, "1f1b", "all"),
    Case("hf_gpt2_dropout", "tp2pp2", 3),
    # Experts with a capacity, in double precision; dropless ones in single, which is what torch's
    # grouped product runs in. With dp4 a rank has no sample in some micro-batches.
    Case("switch_tiny", "dp4", 3, recompute="all"),
    Case("switch_tiny", "tp2pp2", 2),
    Case("glam_tiny", "dp2tp2", 3, "gpipe"),
    Case("mixtral_tiny", "dp4", 3, precision="fp32"),
    Case("qwen3_moe_tiny", "tp4", 2, precision="fp32"),
    Case("deepseek_tiny", "dp2tp2", 2, "1f1b", "all", precision="fp32"),
    Case("mixtral_tiny", "dp2pp2", 2, precision="fp32"),
    Case("hf_mixtral", "dp2tp2", 3, precision="fp32"),
    Case("hf_gpt_oss", "dp2tp2", 1, precision="fp32"),
    Case("hf_deepseek", "dp4", 2, "1f1b", "all", precision="fp32"),
    # Experts split over ranks that split samples: all of them, or the inner ones of two axes.
    Case("switch_tiny", "dp4", 3, recompute="all", expert=4),
    Case("glam_tiny", "dp4", 3, "gpipe", expert=2),
    Case("glam_tiny", "dp2tp2", 3, expert=2),
    Case("switch_tiny", "dp2pp2", 3, expert=2),
    Case("mixtral_tiny", "dp4", 3, recompute="all", precision="fp32", expert=4),
    Case("deepseek_tiny", "dp4", 3, "gpipe", precision="fp32", expert=2),
    Case("qwen3_moe_tiny", "dp2tp2", 3, precision="fp32", expert=2),
    Case("hf_mixtral", "dp2pp2", 2, precision="fp32", expert=2),
    Case("hf_gpt_oss", "dp4", 3, precision="fp32", expert=4),
    # More blocks than stages, in no even number.
    Case("seven_blocks", "dp2pp2", 3),
    Case("seven_blocks", "tp2pp2", 2, "gpipe"),
    Case("ten_blocks", "pp4", 3),
]


def spec_of(model):
    """Zoo models by name, those of `parity_models.py` by path."""
    file = MODELS_FILE.read_text()
    return f"{MODELS_FILE}:{model}" if f"def {model}(" in file else model


def plan_of(model, devices, pins, precision):
    spec = spec_of(model)
    source = load_source(spec, seq_len=None if ":" in spec else SEQ)
    options = PlanOptions(global_batch=SAMPLES, pins=pins, precision=precision, price_pins=False)
    return source, plan_source(source, f"local:{devices}", options)


def check(pool, model, pins, precision, folder):
    """Plan, run beside the eager model on every rank, compare. Returns what was planned."""
    source, planned = plan_of(model, pool.size, pins, precision)
    write_program(planned, folder / "program")
    dtype = DTYPES[precision]
    job = Job(
        source=source.spec,
        seq_len=source.seq_len,
        folder=str(folder / "program"),
        dtype=dtype,
        samples=SAMPLES,
        optimizer_kwargs={"lr": 1e-3, "eps": local.ADAM_EPS[dtype]},
        constants=planned.captured.constants,
    )
    reports = pool.run(verify_job, job)
    report = local.summarise(planned, reports, TOLERANCE[dtype], job.steps)
    assert report.first_difference is None, report.text
    assert report.unplanned == (), report.text
    check_complete(planned, reports)
    return planned


def check_complete(planned, reports):
    """Every trainable parameter was compared, on some rank, before and after; and losses move."""
    graph = planned.captured.graph
    trainable = {s.fqn for s in graph.sources if s.trainable}
    for what in ("gradient", "initial weights", "weights after 3 steps"):
        seen = {d.name for report in reports for d in report.deviations if d.what == what}
        assert trainable <= seen, f"{what} not compared: {sorted(trainable - seen)}"
    assert len({report.losses for report in reports}) == 1
    assert len(set(reports[0].losses)) == 3


@pytest.fixture
def pool(request):
    devices = 8 if request.node.callspec.params["case"].grid == "dp2tp2pp2" else 4
    return request.getfixturevalue(f"pool{devices}")


def test_cases_cover_all_pairs():
    free = [case for case in CASES if case.precision == "fp64" and case.model in MODELS]
    for field, values in (
        ("model", MODELS),
        ("schedule", SCHEDULES),
        ("recompute", RECOMPUTE),
        ("micro_batches", MICRO_BATCHES),
    ):
        found = {(case.grid, getattr(case, field)) for case in free}
        assert set(product(GRIDS, values)) <= found, field
    assert {case.grid for case in CASES if case.precision == "fp32"} == set(GRIDS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_and_collectives_equal(pool, case, tmp_path):
    plan = check(pool, case.model, case.pins, case.precision, tmp_path).plan
    grid = GRIDS[case.grid]
    assert plan.pipeline == grid["pipeline"]
    samples = plan.axis("data") * plan.axis("shard")  # experts may split on a part of the samples
    assert (samples, plan.axis("tensor")) == (grid["data"], grid["tensor"])
    if case.expert:
        shard = case.expert if 1 < case.expert < grid["data"] else 1
        assert plan.axis("shard") == shard
        split = plan.axes[0].name if shard == 1 else "shard"
        at = [axis.name for axis in plan.axes].index(split)
        held = [p for s in plan.stages for p in s.parameters if len(p.shape) == 3]
        assert held
        assert all(p.layout[at] == Shard(0) for p in held)
        moved = [c for c in plan.collectives if c.op == "all_to_all" and c.axes == (split,)]
        assert {c.phase for c in moved} >= {"forward", "backward"}
    assert plan.schedule == case.schedule
    assert plan.training.micro_batches == case.micro_batches
    kinds = {b.recompute_kind for stage in plan.stages for b in stage.blocks} - {Recompute.NONE}
    wanted = {"none": set(), "selective": {Recompute.SELECTIVE}, "all": {Recompute.FULL}}
    assert kinds == wanted[case.recompute]


@pytest.mark.parametrize("model", [*MODELS, "gpt_tiny_dropout", "hf_gpt2_dropout", "seven_blocks"])
def test_the_plan_found_without_pins(pool4, model, tmp_path):
    check(pool4, model, (), "fp64", tmp_path)


@pytest.mark.parametrize("grid", ["tp4", "dp2tp2", "tp2pp2"])
def test_a_vocabulary_that_stays_split(pool4, grid, tmp_path):
    """Embedding rows and logits are never put together: the loss runs on the shards."""
    pins = Case("", grid, 3).pins
    source = "".join(check(pool4, "wide_vocabulary", pins, "fp64", tmp_path).files().values())
    assert "kernels.vocab_embedding(" in source
    assert "kernels.vocab_cross_entropy(" in source
