"""State bytes, named terms and reserves: known numbers."""

from __future__ import annotations

import pytest
import torch

from autopar.costs.memory import (
    MemoryTerms,
    Training,
    reserve_bytes,
    reserve_terms,
    state_bytes,
    zero_bytes,
)
from autopar.costs.optimizer_state import (
    OPTIMIZERS,
    optimizer_note,
    optimizer_row,
    optimizer_state_bytes,
    optimizer_step_bytes,
)
from autopar.ir.cluster import DeviceSpec
from autopar.ir.precision import PRECISIONS

GIB = 2**30


def training(precision, optimizer="adamw", **options):
    return Training(precision=PRECISIONS[precision], optimizer=optimizer, optimizer_kwargs=options)


@pytest.mark.parametrize(
    ("precision", "each"),
    [
        ("fp32", (4, 4, 0, 8)),  # 16 bytes a parameter
        ("fp64", (8, 8, 0, 16)),
        ("bf16", (2, 2, 4, 8)),  # 2 + 2 + 4 + 8
        ("fp16", (2, 2, 4, 8)),
    ],
)
def test_adam_state_of_a_parameter(precision, each):
    found = state_bytes(1000, True, "float32", training(precision))
    assert tuple(found) == tuple(1000 * size for size in each)


ZERO = {
    # (precision, level, gradients accumulate): bytes a parameter over d = 8 ranks
    ("fp32", 0, False): (4, 4, 0, 8),
    ("fp32", 1, False): (4, 4, 4 / 8, 8 / 8),
    ("fp32", 2, False): (4, 4 / 8, 4 / 8, 8 / 8),
    ("fp32", 3, False): (4 / 8, 4 / 8, 0, 8 / 8),
    ("bf16", 0, False): (2, 2, 4, 8),
    ("bf16", 1, False): (2, 2, 4 / 8, 8 / 8),
    ("bf16", 2, False): (2, 2 / 8, 4 / 8, 8 / 8),
    ("bf16", 3, False): (2 / 8, 2 / 8, 4 / 8, 8 / 8),
    ("bf16", 2, True): (2, 2, 4 / 8, 8 / 8),
    ("bf16", 3, True): (2 / 8, 2, 4 / 8, 8 / 8),
}


@pytest.mark.parametrize("case", ZERO)
def test_zero_divides_state_gradients_and_weights(case):
    """ZeRO (Rajbhandari et al. 2020): 2 + 2 + 12/d, 2 + 14/d and 16/d bytes with Adam and bf16."""
    precision, level, accumulates = case
    whole, shard = (
        state_bytes(count, True, "float32", training(precision)) for count in (8000, 1000)
    )
    found = zero_bytes(whole, shard, level, accumulates=accumulates)
    assert tuple(found) == tuple(8000 * each for each in ZERO[case])


def test_frozen_weights_are_split_at_level_3():
    whole, shard = (state_bytes(n, False, "float32", training("fp32")) for n in (8000, 1000))
    assert tuple(zero_bytes(whole, shard, 3)) == (4000, 0, 0, 0)


def test_gpt3_weights_and_adam_state():
    """GPT-3: 700 GB of fp32 weights, 2.1 TB with Adam's two states at 12 bytes (Alpa, 2022)."""
    state = state_bytes(175_000_000_000, True, "float32", training("fp32", "adam"))
    assert state.weights == 700e9
    assert state.weights + state.optimizer == 2.1e12


def test_frozen_weights_have_no_gradient_and_no_state():
    """Linear(1024, 1024) frozen, LoRA A (1024, 8) and B (8, 1024), fp32 Adam."""
    setup = training("fp32", "adam")
    frozen = state_bytes(1024 * 1024, False, "float32", setup).terms
    lora = state_bytes(16384, True, "float32", setup).terms
    assert frozen == MemoryTerms(weights_bytes=4_194_304)
    assert lora.gradients_bytes + lora.optimizer_bytes == 16384 * 4 * 3 == 196_608
    total = frozen + lora
    assert total.weights_bytes == 4_194_304 + 65_536
    assert total.total_bytes == 4_194_304 + 4 * 65_536


@pytest.mark.parametrize(
    ("captured", "precision", "size"),
    [("bfloat16", "fp32", 2), ("float32", "bf16", 2), ("int64", "bf16", 8), ("bool", "bf16", 1)],
)
def test_frozen_weights_are_never_widened(captured, precision, size):
    assert tuple(state_bytes(10, False, captured, training(precision))) == (10 * size, 0, 0, 0)


def test_terms_add_by_name():
    left = MemoryTerms(weights_bytes=1, activations_bytes=2, reserve_bytes=4)
    right = MemoryTerms(activations_bytes=8, communication_bytes=16)
    assert (left + right).activations_bytes == 10
    assert (left + right).total_bytes == 31


@pytest.mark.parametrize(("kind", "size"), [("cuda", GIB + 22 * 2**20 + 4 * GIB), ("cpu", 0)])
def test_reserve(kind, size):
    """A context of 1 GiB, 128 MiB for every communicator, 4 % of 100 GiB and two segments."""
    device = DeviceSpec(
        name="d",
        kind=kind,
        memory_bytes=100 * GIB,
        memory_bandwidth_bytes_s=1.0,
        peak_flops=(("float32", 1.0),),
        matmul_efficiency=1.0,
        kernel_launch_s=0.0,
        source="test",
    )
    assert reserve_bytes(device) == size
    names = [name for name, _ in reserve_terms(device)]
    assert names == (["context", "communicators", "fragmentation"] if kind == "cuda" else [])
    assert reserve_bytes(device, 3) - size == 3 * 128 * 2**20 * (kind == "cuda")


TORCH_OPTIMIZERS = {
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Adamax": [{}],
    "Adadelta": [{}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adagrad": [{}],
    "RMSprop": [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}],
    "ASGD": [{}],
    "Muon": [{}],
}


@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n, options in TORCH_OPTIMIZERS.items() for o in options]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_states_are_those_torch_keeps(name, options, dtype):
    weight = torch.nn.Parameter(torch.zeros(30, 50, dtype=getattr(torch, dtype)))
    weight.grad = torch.ones_like(weight)
    optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
    optimizer.step()
    kept = sum(
        value.nbytes
        for value in optimizer.state[weight].values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    assert optimizer_state_bytes(name, options, 1500, dtype) == kept


def test_rows_cover_names_with_modules():
    assert optimizer_row("torch.optim.adamw.AdamW") is OPTIMIZERS["adamw"]
    assert optimizer_note("AdamW") is None


def test_unknown_optimizers_are_assumed_and_noted():
    assert optimizer_state_bytes("Mystery", {}, 10, "bfloat16") == 80
    assert "Mystery" in (optimizer_note("Mystery") or "")


def test_step_traffic_of_adam():
    plain = optimizer_step_bytes("adam", {}, 1, "float32", "float32")
    assert plain == 4 + 2 * 4 + 2 * 8
    mixed = optimizer_step_bytes("adam", {}, 1, "bfloat16", "bfloat16", master=True)
    assert mixed == 2 + (2 * 4 + 2) + 2 * 8
