"""What runs before each op that is measured on a CPU."""

import time
from statistics import median

import torch
from torch.overrides import TorchFunctionMode

from autopar.profiler import links
from autopar.profiler.between import OtherOps
from autopar.profiler.timing import HostClock


def test_other_ops_leave_nothing_behind():
    others = OtherOps()
    with torch.no_grad():  # whatever the caller's mode is
        others()
    assert torch.get_rng_state().equal(torch.get_rng_state())
    assert all(leaf.grad is None for leaf in (others._table, others._weight, others._scale))


def test_the_clock_of_a_cpu_runs_other_ops_before_each_op_and_does_not_count_them():
    clock = HostClock()
    order = []

    class Noted(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            order.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    with Noted():
        begun = time.thread_time()
        _, seconds = clock.seconds(lambda: order.append("measured"))
        whole_s = time.thread_time() - begun
    assert order[-1] == "measured"
    assert {"embedding", "layer_norm", "softmax", "gelu", "cross_entropy"} <= set(order)
    assert seconds < whole_s / 4


def test_what_comes_between_computing_is_told_where_the_machine_slows_down(monkeypatch):
    """Each time that is taken is a hundredth longer than the one before."""
    ran, taken = [], 0

    def slowest(run, loops, device):
        nonlocal taken
        ran.clear()
        run()
        taken += 1
        return 1.01**taken * (1.1 if ran else 1.0)

    monkeypatch.setattr(links, "_slowest", slowest)
    found = links._between_s(lambda: ran.append(1), torch.device("cpu"))
    assert min(found) > 0.1 and median(found) < 0.15
