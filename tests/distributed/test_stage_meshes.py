"""Pipelines whose stages have other degrees, or other numbers of devices, beside one device."""

import pytest
from compositions import row
from many_ranks import verify_in_threads
from test_compositions import in_processes, run_row

from autopar.runtime.launch import WorkerPool

pytestmark = pytest.mark.distributed

FEW = (
    row("llama_tiny", 4, "pipeline=2 data=2 stage1.tensor=2"),
    row("llama_tiny", 3, "pipeline=2 data= stage0.devices=2 stage0.tensor=2 stage1.devices=1"),
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
