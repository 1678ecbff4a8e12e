"""Measured devices and profiles: what is measured and kept, never how fast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs import measure
from autopar.costs.compute import op_time
from autopar.costs.local_op import SLOT, LocalOp
from autopar.costs.measure import measure_device, measure_ops
from autopar.costs.profiles import Profile, load_profile, parse_profile, save_profile
from autopar.errors import InputError
from autopar.ir.graph import Ref


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        heads = self.inner(x).view(2, 8, 2, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + F.gelu(y.transpose(1, 2).flatten(2))
        x = torch.cat([x, x.to(torch.float64).float()], 1).contiguous()
        return F.cross_entropy(self.head(x)[:, :8].flatten(0, 1), tokens.flatten())


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


def test_every_op_of_a_model_that_moves_data_is_measured(graphs):
    ops = graphs.local_ops(graphs.to_graph(Block(), torch.zeros(2, 8, dtype=torch.long)))
    profile = measure_ops(ops, repeats=2)
    left_out = {item.name for item in ops if item.key not in profile.entries}
    assert left_out == {"view", "transpose", "flatten"}
    device = measure_device(memory_bytes=1)
    for item in ops:
        times = op_time(item, device, profile)
        assert times.measured is (item.name not in left_out)
        assert times.backward_s >= 0


def op(target, *args, shape=(4, 8), grads=(True,)):
    return LocalOp(
        target=target,
        input_shapes=(shape,),
        input_dtypes=("float32",),
        output_shapes=(shape,),
        output_dtypes=("float32",),
        args=(Ref(SLOT, 0), *args),
        requires_grad=any(grads),
        grad_inputs=grads,
    )


def test_ops_that_fail_or_are_too_large_are_left_out():
    good, unknown = op("aten.gelu.default"), op("custom.nothing.default")
    wrong, large = op("aten.softmax.int", 7), op("aten.silu.default", shape=(2**10, 2**10))
    profile = measure_ops([good, unknown, wrong, large], repeats=1, limit_bytes=2**20)
    assert profile.entries.keys() == {good.key}


def test_own_ops_are_measured():
    loss = LocalOp(
        target="autopar.cross_entropy_sum.default",
        input_shapes=((4, 8), (4,)),
        input_dtypes=("bfloat16", "int64"),
        output_shapes=((),),
        output_dtypes=("float32",),
        args=(Ref(SLOT, 0), Ref(SLOT, 1), -100, 0.0),
        requires_grad=True,
        grad_inputs=(True, False),
    )
    count = LocalOp(
        target="autopar.count_valid.default",
        input_shapes=((4,),),
        input_dtypes=("int64",),
        output_shapes=((),),
        output_dtypes=("int64",),
        args=(Ref(SLOT, 0), -100),
    )
    assert measure_ops([loss, count], repeats=1).entries.keys() == {loss.key, count.key}


def test_keys_tell_shapes_dtypes_attributes_and_gradients_apart():
    ops = [
        op("aten.softmax.int", -1),
        op("aten.softmax.int", 0),
        op("aten.softmax.int", -1, shape=(8, 4)),
        op("aten.softmax.int", -1, grads=(False,)),
        op("aten.log_softmax.int", -1),
    ]
    assert len({item.key for item in ops}) == len(ops)


def test_profile_file_round_trips_and_is_deterministic(tmp_path):
    profile = Profile(device="cpu", entries={"b": (1e-6, 2e-6), "a": (3e-7, 0.0)})
    path = tmp_path / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert [item.name for item in tmp_path.iterdir()] == ["profile.json"]
    again = Profile(device="cpu", entries=dict(reversed(profile.entries.items())))
    assert again.to_json() == profile.to_json() == path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "field version"),
        ('{"version": 9}', "found 9"),
        ('{"version": 1, "device": 3, "entries": {}}', "device"),
        ('{"version": 1, "device": "cpu", "entries": {"k": [1]}}', "'k'"),
        ('{"version": 1, "device": "cpu", "entries": {"k": [1, null]}}', "'k'"),
    ],
)
def test_a_malformed_profile_is_refused_by_field(text, message):
    with pytest.raises(InputError, match=message):
        parse_profile(text)


def test_a_missing_profile_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.json"):
        load_profile(tmp_path / "none.json")


def test_profiles_of_one_device_merge():
    left, right = (
        Profile(device="cpu", entries={"k": (v, v), str(v): (0.0, 0.0)}) for v in (1.0, 2.0)
    )
    assert left.merged(right).entries == {"k": (2.0, 2.0), "1.0": (0.0, 0.0), "2.0": (0.0, 0.0)}
    with pytest.raises(InputError, match="gpu"):
        left.merged(Profile(device="gpu"))
