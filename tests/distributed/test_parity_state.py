"""Programs whose parameters are kept apart from what ops read: ZeRO and mixed precision.

Against the eager model like `test_parity`; in bfloat16 and float16 against the model in that dtype
with float32 copies of its weights. What a rank holds must be what the plan says.
"""

from dataclasses import dataclass

import pytest
from test_parity import SAMPLES, plan_of

from autopar import local
from autopar.compiler import write_program
from autopar.jobs import Job, build, optimizer_class, verify_job
from autopar.runtime.load import load_program, runnable
from autopar.runtime.measure import state_bytes
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.verify import TOLERANCE

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

GRIDS = {
    "dp4": "data=4 tensor=1 pipeline=1",
    "dp2tp2": "data=2 tensor=2 pipeline=1",
    "pp2dp2": "data=2 tensor=1 pipeline=2",
    "hsdp": "data=4 shard=2 tensor=1 pipeline=1",
}


@dataclass(frozen=True)
class Case:
    model: str
    grid: str
    zero: int
    micro_batches: int = 2
    precision: str = "fp64"
    more: str = "recompute=none"

    @property
    def pins(self):
        text = f"{GRIDS[self.grid]} zero={self.zero} micro_batches={self.micro_batches} {self.more}"
        return tuple(tuple(pin.split("=", 1)) for pin in text.split())

    def __str__(self):
        more = self.more.replace("recompute=none", "").replace("=", "_").replace(" ", "-")
        return (
            f"{self.model}-{self.grid}-zero{self.zero}-{self.micro_batches}x-{self.precision}{more}"
        )


CASES = [
    Case("gpt_tiny", "dp4", 1, 3),
    Case("llama_tiny", "dp4", 2, 1),
    Case("hf_gpt2", "dp4", 3, 3),
    Case("llama_tiny", "dp2tp2", 1, 1),
    Case("hf_llama", "dp2tp2", 2, 3),
    Case("gpt_tiny", "dp2tp2", 3, 2),
    Case("hf_gpt2", "pp2dp2", 1, 4),
    Case("gpt_tiny", "pp2dp2", 2, 4),
    Case("llama_tiny", "pp2dp2", 3, 4),
    Case("gpt_tiny", "hsdp", 1, 1),
    Case("gpt_tiny", "hsdp", 2, 2),
    Case("hf_llama", "hsdp", 3, 2),
    Case("gpt_tiny_dropout", "pp2dp2", 3, 2, more="recompute=all"),
    Case("hf_gpt2_dropout", "dp4", 3, 1, more="recompute=all"),
    # Several stages a rank.
    Case("gpt_tiny", "pp2dp2", 2, 4, more="recompute=none schedule=interleaved-1f1b"),
    # Low precision: a rounding of the dtype.
    Case("gpt_tiny", "dp4", 0, 2, "bf16"),
    Case("llama_tiny", "dp2tp2", 1, 2, "bf16"),
    Case("gpt_tiny", "pp2dp2", 2, 2, "bf16"),
    Case("llama_tiny", "dp4", 3, 2, "bf16"),
    Case("gpt_tiny", "dp2tp2", 0, 2, "fp16"),
    Case("gpt_tiny", "pp2dp2", 3, 2, "fp16"),
]


def job_of(source, planned, folder, case):
    write_program(planned, folder / "program")
    dtype = runnable(case.precision).param_dtype
    return Job(
        source=source.spec,
        seq_len=source.seq_len,
        folder=str(folder / "program"),
        dtype=dtype,
        samples=SAMPLES,
        optimizer_kwargs={"lr": 1e-3, "eps": local.ADAM_EPS[dtype]},
        constants=planned.captured.constants,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_and_collectives_equal(pool4, case, tmp_path):
    source, planned = plan_of(case.model, 4, case.pins, case.precision)
    job = job_of(source, planned, tmp_path, case)
    report = local.summarise(planned, pool4.run(verify_job, job), TOLERANCE[job.dtype], job.steps)
    assert report.first_difference is None, report.text
    assert report.unplanned == (), report.text
    levels = {p.zero for stage in planned.plan.stages for p in stage.parameters if p.trainable}
    assert case.zero in levels


SPLIT = "recompute=none schedule=zb-h1"
ORDERED = [
    Case("gpt_tiny", "pp2dp2", 3, 4, more="recompute=selective"),
    Case("gpt_tiny", "pp2dp2", 3, 3, more=SPLIT),
    Case("llama_tiny", "hsdp", 3, 3, more="recompute=all"),
    Case("gpt_tiny", "pp2dp2", 3, 4, more="recompute=none schedule=interleaved-1f1b"),
]


def events(job):
    """What this rank communicates in a step over the axes that split samples, in order."""
    model, batch, _ = build(job)
    parallel = ParallelModel(
        load_program(job.folder),
        model,
        optimizer=(optimizer_class(job.optimizer), dict(job.optimizer_kwargs)),
        constants=job.constants,
    )
    recorder = parallel.world.recorder
    recorder.start()
    parallel.train_step(batch)
    found = recorder.stop()
    return parallel.world.stages, [e for e in found if set(e.axes) <= {"data", "shard"}]


@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_weights_are_gathered_in_one_order_on_all_ranks(pool4, case, tmp_path):
    source, planned = plan_of(case.model, 4, case.pins, case.precision)
    job = job_of(source, planned, tmp_path, case)
    report = local.summarise(planned, pool4.run(verify_job, job), TOLERANCE[job.dtype], job.steps)
    assert report.first_difference is None, report.text
    assert report.unplanned == (), report.text
    by_stages = {}
    for stages, found in pool4.run(events, job):
        assert any(e.op.name == "ALL_GATHER" and e.phase == "backward" for e in found)
        by_stages.setdefault(stages, []).append(found)
    assert len(by_stages) == planned.plan.pipeline
    for others in by_stages.values():
        assert len(others) > 1
        assert all(found == others[0] for found in others)


def measure(job):
    """The terms this rank holds after a step, its stages' first."""
    model, batch, _ = build(job)
    parallel = ParallelModel(
        load_program(job.folder),
        model,
        optimizer=(optimizer_class(job.optimizer), dict(job.optimizer_kwargs)),
        constants=job.constants,
    )
    parallel.train_step(batch)
    return parallel.world.stages, state_bytes(
        parallel.store, parallel.engine.sync, parallel.optimizer
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("grid", "zero"), [("dp4", 0), ("dp4", 1), ("pp2dp2", 2), ("hsdp", 3)])
def test_memory_is_what_the_plan_says(pool4, grid, zero, precision, tmp_path):
    case = Case("gpt_tiny", grid, zero, 2, precision)
    source, planned = plan_of(case.model, 4, case.pins, precision)
    for (stage,), found in pool4.run(measure, job_of(source, planned, tmp_path, case)):
        terms = dict(planned.plan.stages[stage].memory_bytes)
        for term, nbytes in found.items():
            assert nbytes == pytest.approx(terms[term], rel=0.05), (term, stage)
