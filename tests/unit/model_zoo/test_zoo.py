from __future__ import annotations

import ast
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import model_zoo
from model_zoo.registry import ZOO, ModelSpec, load

CAPACITY, DROPLESS = (
    ("switch_tiny", "glam_tiny"),
    ("mixtral_tiny", "qwen3_moe_tiny", "deepseek_tiny"),
)
TINY = ("mlp", "gpt_tiny", "gpt_tiny_dropout", "llama_tiny", *CAPACITY, *DROPLESS)
TINY_LMS = TINY[1:]

# The sizes that papers and model cards print, in the precision they print them.
PRINTED = {
    "gpt2": "124M",
    "gpt2_medium": "355M",
    "gpt2_large": "774M",
    "gpt2_xl": "1.6B",
    "gpt3_125m": "125M",
    "gpt3_760m": "760M",
    "gpt3_1_3b": "1.3B",
    "gpt3_2_7b": "2.7B",
    "gpt3_6_7b": "6.7B",
    "gpt3_13b": "13B",
    "gpt3_175b": "175B",
    "megatron_turing_530b": "530B",
    "llama2_7b": "6.7B",
    "llama2_13b": "13.0B",
    "llama2_70b": "69.0B",
    "llama3_8b": "8.0B",
    "llama3_70b": "70.6B",
    "llama3_405b": "405.9B",
    "switch_base_128": "7.4B",
    "glam_64b_64e": "1.2T",
    "mixtral_8x7b": "46.7B",
    "mixtral_8x22b": "140.6B",
    "qwen3_30b_a3b": "30.5B",
    "qwen3_235b_a22b": "235B",
    "deepseek_v3": "671B",
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def loss_of(output: Tensor | dict[str, Tensor]) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def meta(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return spec.build()


@pytest.mark.parametrize("name", ZOO)
def test_parameter_count(name: str) -> None:
    count = sum(p.numel() for p in meta(ZOO[name]).parameters())
    assert count == ZOO[name].num_parameters
    if name in PRINTED:
        digits, unit = PRINTED[name][:-1], {"M": 1e6, "B": 1e9, "T": 1e12}[PRINTED[name][-1]]
        decimals = len(digits.partition(".")[2])
        assert f"{count / unit:.{decimals}f}" == digits


@pytest.mark.parametrize("name", ZOO)
def test_names_and_default_example(name: str) -> None:
    spec = ZOO[name]
    assert spec.name == name
    with torch.device("meta"):
        batch = spec.example(spec.default_batch, None)
    for value in batch.values():
        assert value.is_meta
        assert value.shape[0] == spec.default_batch
        if spec.default_seq_len is not None:
            assert value.shape == (spec.default_batch, spec.default_seq_len)


def test_load_names_the_nearest() -> None:
    assert load("gpt2") is ZOO["gpt2"]
    with pytest.raises(ValueError, match="llama3_405b"):
        load("llama3-405b")
    with pytest.raises(ValueError, match="megatron_turing_530b"):
        load("zzz")


def test_largest_model_takes_no_memory() -> None:
    largest = max(ZOO.values(), key=lambda spec: spec.num_parameters)
    tracemalloc.start()
    model = meta(largest)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(p.is_meta for p in model.parameters())
    assert peak_bytes < 64 * 2**20


@pytest.mark.parametrize("name", TINY)
def test_loss_falls_over_five_steps(name: str) -> None:
    spec = ZOO[name]
    model, batch = spec.build(), spec.example(4, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        assert loss.shape == ()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in TINY if name not in DROPLESS])
def test_examples_repeat_and_double_precision_works(name: str) -> None:
    spec = ZOO[name]
    first, again = spec.example(2, 16), spec.example(2, 16)
    assert all(torch.equal(first[key], again[key]) for key in first)
    if name != "mlp":
        assert first["input_ids"].shape == (2, 16)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in first.items()}
    assert loss_of(spec.build().double()(**batch)).dtype == torch.float64


@pytest.mark.parametrize("device", ["cpu", "meta"])
# torch traces grouped products in bfloat16 only; autopar's capture tests trace the dropless models
@pytest.mark.parametrize("name", [name for name in TINY if name not in DROPLESS])
def test_exports_with_symbolic_batch(name: str, device: str) -> None:
    spec = ZOO[name]
    with torch.device(device):
        model, batch = spec.build(), spec.example(4, None)
    shapes = {key: {0: Dim.AUTO} for key in batch}
    program = export(model, (), batch, dynamic_shapes=shapes, strict=False)
    inputs = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in batch]
    assert len(inputs) == 2
    assert all(isinstance(n.meta["val"].shape[0], torch.SymInt) for n in inputs)
    if device == "cpu" and "dropout" not in name:
        other = spec.example(3, None)
        expected, found = loss_of(model(**other)), loss_of(program.module()(**other))
        torch.testing.assert_close(found, expected)


# GShard gives slots to all first choices before the second ones, earlier tokens' too
@pytest.mark.parametrize("name", [name for name in TINY_LMS if name != "glam_tiny"])
def test_later_tokens_do_not_reach_earlier_logits(name: str) -> None:
    model = ZOO[name].build().eval()
    ids = ZOO[name].example(2, 16)["input_ids"]
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 512
    before, after = model(ids)["logits"], model(changed)["logits"]
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", [name for name in TINY_LMS if name not in CAPACITY])
def test_loss_is_next_token_cross_entropy(name: str) -> None:
    model = ZOO[name].build().eval()
    batch = ZOO[name].example(2, 8)
    batch["labels"][0, 5] = -100
    output = model(**batch)
    log_p = output["logits"].log_softmax(-1)
    terms = [
        -log_p[b, t, batch["labels"][b, t + 1]]
        for b in range(2)
        for t in range(7)
        if batch["labels"][b, t + 1] >= 0
    ]
    assert len(terms) == 13
    torch.testing.assert_close(output["loss"], torch.stack(terms).mean())


def test_llama_attention_depends_on_distance_only() -> None:
    """Rotary positions: a shifted pair of vectors has the same score."""
    from model_zoo.llama import Rotary, rotate

    cos, sin = Rotary(16)(torch.zeros(1, 12, 32))
    q, k = torch.randn(2, 16)
    turned_q, turned_k = rotate(q.expand(12, 16), cos, sin), rotate(k.expand(12, 16), cos, sin)
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[2, 0], scores[11, 9])
    torch.testing.assert_close(scores[0, 0], q @ k)
    assert not torch.allclose(scores[2, 0], scores[3, 0])


def test_llama_shares_key_value_heads() -> None:
    from model_zoo.llama import repeat_heads

    x = torch.arange(2).view(1, 2, 1, 1)
    assert repeat_heads(x, 3).flatten().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", TINY)
def test_every_owner_of_parameters_can_initialise_them(name: str) -> None:
    model = ZOO[name].build()
    materialised = meta(ZOO[name]).to_empty(device="cpu")
    for tensor in (*materialised.parameters(), *materialised.buffers()):
        tensor.data.fill_(torch.nan)
    for module in materialised.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()
    for tensor in (*materialised.parameters(), *materialised.buffers()):
        assert torch.isfinite(tensor).all()
    spread = {n: p.std().item() for n, p in model.named_parameters() if p.dim() > 1}
    for n, p in materialised.named_parameters():
        if n in spread:
            assert p.std().item() == pytest.approx(spread[n], rel=0.1)


def test_gpt_projections_into_the_residual_stream_start_smaller() -> None:
    block = ZOO["gpt_tiny"].build().get_submodule("blocks.0")
    std = 0.02 / (2 * 4) ** 0.5
    assert block.feed_forward.down.weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.attention.proj.weight.std().item() == pytest.approx(std, rel=0.05)
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_dropout_only_while_training() -> None:
    model = ZOO["gpt_tiny_dropout"].build()
    batch = ZOO["gpt_tiny_dropout"].example(2, 16)
    assert model(**batch)["loss"] != model(**batch)["loss"]
    model.eval()
    assert model(**batch)["loss"] == model(**batch)["loss"]


def test_the_zoo_never_imports_autopar() -> None:
    files = list(Path(model_zoo.__file__).parent.rglob("*.py"))
    assert len(files) >= 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "autopar" for name in names), file
