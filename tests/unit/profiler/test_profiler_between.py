"""What runs before each op that is measured on a CPU."""

import time

import torch
from torch.overrides import TorchFunctionMode

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
