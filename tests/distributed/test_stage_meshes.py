"""Pipelines whose stages have other degrees, or other numbers of devices, beside one device."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compositions import row
from many_ranks import verify_in_threads
from test_compositions import in_processes, run_row

import autopar
from autopar.compiler import load_source
from autopar.runtime.launch import WorkerPool

pytestmark = pytest.mark.distributed

FEW = (
    row("llama_tiny", 4, "pipeline=2 data=2 stage1.tensor=2"),
    row("gpt_tiny", 3, "pipeline=2 data= stage0.devices=2 stage0.tensor=2 stage1.devices=1"),
)
"""In processes."""

MANY = (
    row("llama_tiny", 4, "pipeline=2 data=2 stage0.tensor=2 sequence=on schedule=gpipe"),
    row("llama_tiny", 8, "pipeline=2 data=4 stage1.tensor=2 zero=2"),
    row("llama_tiny", 8, "pipeline=2 data=2 context=2 stage0.tensor=2 recompute=all"),
    row("llama_tiny", 8, "pipeline=4 data=2 stage1.tensor=2 stage2.data=1 micro_batches=3"),
    row(
        "llama_tiny",
        8,
        "pipeline=2 tensor=2 data=2 sequence=on stage1.tensor=4 schedule=interleaved-1f1b chunks=2",
    ),
    row("llama_tiny", 4, "pipeline=2 data=2 stage1.tensor=2 schedule=zb-h1 micro_batches=4"),
    row("llama_tiny", 3, "pipeline=2 data= stage0.devices=1 stage1.devices=2 stage1.data=2"),
    # A weight on the first and the last stage.
    row("gpt_tiny_dropout", 4, "pipeline=2 data=2 stage1.tensor=2 recompute=all"),
    row("gpt_tiny", 8, "pipeline=4 data=2 stage3.tensor=2 zero=1 micro_batches=4"),
    row("gpt_tiny", 4, "pipeline=2 data=2 stage1.tensor=2", "bf16"),
)
"""In threads of one process."""


def name(found):
    return found.name


@pytest.fixture(scope="module")
def pool3():
    with WorkerPool(3, timeout_s=30.0) as pool:
        yield pool


@pytest.mark.parametrize("found", FEW, ids=name)
def test_processes_equal_one_device(found, request, tmp_path):
    pool = request.getfixturevalue(f"pool{found.devices}")
    run_row(in_processes(pool), found, tmp_path / "program")


@pytest.mark.parametrize("found", MANY, ids=name)
def test_ranks_equal_one_device(found, tmp_path):
    run_row(lambda job: verify_in_threads(found.devices, job), found, tmp_path / "program")


def check_checkpoint(folder):
    """Training goes on from a checkpoint as it went on without."""
    source = load_source("gpt_tiny", seq_len=16)
    torch.manual_seed(0)
    model, batch, loss_fn = source.build(device="cpu", dtype=torch.float64, samples=8)
    parallel = autopar.parallelize(
        model,
        f"local:{dist.get_world_size()}",
        batch=batch,
        loss_fn=loss_fn,
        optimizer=(torch.optim.AdamW, {"lr": 1e-2}),
        pins={"pipeline": "2", "stage0.devices": "1", "stage1.tensor": "2", "micro_batches": "2"},
    )
    parallel.train_step(batch)
    program = parallel.program
    dcp.save(program.state_dict(), checkpoint_id=folder)
    went_on = [parallel.train_step(batch).item() for _ in range(2)]
    state = program.state_dict()
    dcp.load(state, checkpoint_id=folder)
    program.load_state_dict(state)
    assert [parallel.train_step(batch).item() for _ in range(2)] == went_on
    names = set(model.state_dict()) if dist.get_rank() == 0 else set()
    assert set(parallel.full_state_dict()) == names


def test_a_checkpoint_holds_a_weight_that_lies_in_two_layouts(pool3, tmp_path):
    pool3.run(check_checkpoint, str(tmp_path / "checkpoint"))
