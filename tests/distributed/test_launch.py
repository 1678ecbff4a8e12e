"""Starting and ending processes; who is blamed when one fails."""

import os
import platform
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autopar.errors import InputError, RuntimeFailure
from autopar.runtime.axes import create_world
from autopar.runtime.launch import WorkerPool, init_from_env, launch

pytestmark = pytest.mark.distributed


def add(x, y):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return x + y + total.item(), dist.get_rank(), os.environ["OMP_NUM_THREADS"]


def test_launch_returns_results_by_rank():
    before = os.environ.get("OMP_NUM_THREADS")
    assert launch(add, 2, (1, 2)) == [(4.0, 0, "1"), (4.0, 1, "1")]
    assert os.environ.get("OMP_NUM_THREADS") == before


def fail_on_second():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("first cause")
    dist.all_reduce(torch.ones(1))


def kill_second():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def wait_alone():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


@pytest.mark.slow
def test_the_first_failure_is_reported_and_the_pool_goes_on():
    with WorkerPool(2, timeout_s=4.0) as pool:
        first = pool.run(add, 0, 0)
        ids = pool.process_ids
        assert pool.run(add, 0, 0) == first
        assert pool.process_ids == ids
        for function, message in (
            (fail_on_second, "rank 1 of 2 failed: .*ZeroDivisionError: first cause"),
            (kill_second, r"rank 1 of 2 failed: the process ended .*exit code -9"),
            (wait_alone, "rank 0 of 2 failed: .*[Tt]imed out"),
        ):
            started = time.monotonic()
            with pytest.raises(RuntimeFailure, match=f"(?s){message}"):
                pool.run(function)
            assert time.monotonic() - started < 30
            assert pool.process_ids == ()
        assert pool.run(add, 0, 0) == first
        pids = pool.process_ids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_only_named_functions_can_be_sent(pool4):
    with pytest.raises(ValueError, match="not a module-level function"):
        pool4.run(lambda: None)


def test_torchrun_is_needed(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match=r"RANK, .*torchrun"):
        init_from_env()


def make_groups(close):
    """Threads of gloo groups once a mesh of two axes has been used, and kept or closed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    world = create_world([("data", 2), ("tensor", 2)], [range(4)])
    mesh = world.meshes[0].device_mesh("cpu")
    for parameter in model.parameters():
        distribute_tensor(parameter.detach(), mesh, [Shard(0), Replicate()]).full_tensor()
    if close:
        world.close()
    return gloo_threads()


def gloo_threads():
    tasks = Path("/proc/self/task")
    return sum((task / "comm").read_text().startswith("gloo_tcp") for task in tasks.iterdir())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("close", [False, True])
def test_groups_of_a_call_end_with_it(pool4, close):
    before = pool4.run(gloo_threads)
    during = pool4.run(make_groups, close)
    assert all(count > start for count, start in zip(during, before, strict=True))
    assert pool4.run(gloo_threads) == before == [1] * 4


def faults_of_steps():
    """Page faults while large tensors come and go, time after time."""
    counts = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (2**24, 2**22, 2**23):
            torch.ones(size)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_workers_keep_the_memory_that_tensors_leave(pool2):
    for *_, last in pool2.run(faults_of_steps):
        assert last < 1000  # of 28672 pages of 4 KiB
