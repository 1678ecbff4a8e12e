"""The measured device: what is measured and kept, never how fast."""

from __future__ import annotations

import torch

from autopar.costs import measure
from autopar.costs.measure import measure_device


def test_device_has_every_figure(monkeypatch):
    monkeypatch.setattr(measure, "MATMUL_DIMS", (32,))
    monkeypatch.setattr(measure, "COPY_BYTES", 2**16)
    threads = torch.get_num_threads()
    device = measure_device(workers=4, memory_bytes=1000)
    assert torch.get_num_threads() == threads
    assert device.kind == "cpu"
    assert device.memory_bytes == 1000
    assert {"float32", "float64"} <= dict(device.peak_flops).keys()
    assert min(dict(device.peak_flops).values()) > 0
    assert device.memory_bandwidth_bytes_s > 0
    assert 0 < device.kernel_launch_s < 1e-3
