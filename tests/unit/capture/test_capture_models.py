"""Models as people have them: the zoo's, and Hugging Face's from a configuration."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from autopar.capture import capture, find_blocks, same_when_evaluating, verify_capture
from autopar.ir.graph import SourceKind
from model_zoo.registry import load

transformers = pytest.importorskip("transformers")
IDS = torch.arange(64).reshape(4, 16) * 7 % 64
BATCH = {"input_ids": IDS, "labels": IDS}


def llama(layers: int, **config) -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64} | config
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **sizes
        )
    )


def gpt2(layers: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=layers, n_head=4, n_positions=32, eos_token_id=0
        )
    )


def t5(layers: int) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4},
            **{"num_layers": layers, "decoder_start_token_id": 0, "pad_token_id": 0},
        )
    )


def mixtral(layers: int) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "use_cache": False},
            **{"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"num_local_experts": 4, "experts_implementation": "grouped_mm"},
        )
    )


@pytest.mark.parametrize("build", [llama, gpt2])
def test_hugging_face_decoders(build):
    model = build(3)
    captured = capture(model, BATCH)
    for samples in (4, 1, 3):
        verify_capture(model, {k: v[:samples] for k, v in BATCH.items()}, captured)
    chain = find_blocks(captured.graph)
    assert [c.members for c in chain.classes] == [(0,), (1, 2, 3), (4,)]
    evaluation = capture(model.eval(), BATCH)
    verify_capture(model, BATCH, evaluation)
    assert same_when_evaluating(captured.graph, evaluation.graph)


def test_every_parameter_keeps_its_name():
    model = gpt2(1)
    graph = capture(model, BATCH).graph
    names = [s for s in graph.sources if s.kind is SourceKind.PARAMETER]
    assert [s.fqn for s in names] == [name for name, _ in model.named_parameters()]
    assert names[0].tied == ("lm_head.weight",)


def test_gradient_checkpointing_is_noted():
    model = llama(1)
    model.gradient_checkpointing_enable()
    captured = capture(model, BATCH)
    assert any("checkpointing" in note for note in captured.graph.notes)
    verify_capture(model, BATCH, captured)


@pytest.mark.slow
def test_an_encoder_and_a_decoder_fold_into_their_layers():
    model = t5(4)
    captured = capture(model, BATCH)
    verify_capture(model, BATCH, captured)
    chain = find_blocks(captured.graph)
    layers = [c.members for c in chain.classes if len(c.members) == 3]
    # the first layer of each also makes the position bias
    assert [
        [chain.blocks[i].module_path.split(".layer")[0] for i in members] for members in layers
    ] == [[f"{part}.block.{i}" for i in (1, 2, 3)] for part in ("encoder", "decoder")]


@pytest.mark.parametrize("name", ["mlp", "gpt_tiny", "gpt_tiny_dropout", "llama_tiny"])
def test_zoo_models(name):
    spec = load(name)
    torch.manual_seed(0)
    model, batch = spec.build(), spec.example(4, None)
    captured = capture(model, batch)
    assert captured.graph.notes == ()
    verify_capture(model, spec.example(3, None), captured)
    find_blocks(captured.graph)


@pytest.mark.parametrize(
    "name",
    ["gpt_tiny_dropout", "llama_tiny", "glam_tiny", "qwen3_moe_tiny", "deepseek_tiny"],
)
def test_zoo_models_are_the_same_when_every_layer_is_traced(name):
    with torch.device("meta"):
        model, batch = load(name).build(), load(name).example(4, None)
    assert capture(model, batch).graph == capture(model, batch, every_call=True).graph


@pytest.mark.parametrize(
    "build",
    [llama, partial(llama, use_cache=False), gpt2, t5, mixtral],
    ids=["cached", "llama", "gpt2", "t5", "mixtral"],
)
def test_hugging_face_models_are_the_same_when_every_layer_is_traced(build):
    model = build(3)
    assert capture(model, BATCH).graph == capture(model, BATCH, every_call=True).graph


def test_a_hugging_face_layer_is_traced_once(monkeypatch):
    forward, count = nn.Linear.forward, []
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: count.append(1) or forward(self, x))
    capture(llama(4, use_cache=False), BATCH)
    assert len(count) == 7 + 1  # of one layer, and the head


@pytest.mark.slow
def test_a_large_model_is_captured_without_weights():
    spec = load("llama2_7b")
    with torch.device("meta"):
        model, batch = spec.build(), spec.example(2, 128)
    chain = find_blocks(capture(model, batch).graph)
    assert [len(c.members) for c in chain.classes] == [1, 32, 1]
