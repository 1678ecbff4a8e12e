"""The list of models: how to build each, an example batch, and where its sizes come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from model_zoo.deepseek import DeepSeek, DeepSeekConfig
from model_zoo.gpt import GPT, GPTConfig
from model_zoo.llama import Llama, LlamaConfig
from model_zoo.mlp import MLP
from model_zoo.moe import CapacityConfig, CapacityModel, DroplessConfig, DroplessModel

Batch = dict[str, Tensor]
"""Keyword arguments of the model's forward; the first dim of every tensor is the samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One model of the zoo.

    `build()` and `example(batch, seq_len)` create on torch's default device, so that
    `with torch.device("meta")` gives a model of any size without memory. `example` draws the same
    values every time; `seq_len` None means `default_seq_len`, and models without a sequence dim
    ignore it. `num_parameters` counts tied parameters once. `build_layers(n)` is the model with `n`
    layers instead of its own `layers`; `max_seq_len` is the longest sequence that it has positions
    for, None where it takes any.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    example: Callable[[int, int | None], Batch]
    default_batch: int
    default_seq_len: int | None
    num_parameters: int
    source: str
    layers: int
    build_layers: Callable[[int], nn.Module]
    max_seq_len: int | None = None


def load(name: str) -> ModelSpec:
    """The model called `name`. Raises ValueError that lists the nearest names, or all."""
    if name in ZOO:
        return ZOO[name]
    near = get_close_matches(name, ZOO, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"models: {', '.join(ZOO)}"
    raise ValueError(f"no model {name!r} in the zoo; {hint}")


def _mlp(
    name: str, *, num_layers: int, hidden: int, default_batch: int, num_parameters: int
) -> ModelSpec:
    def example(batch: int, seq_len: int | None = None) -> Batch:
        generator = torch.Generator(device="cpu").manual_seed(0)
        xy = torch.randn(2, batch, hidden, generator=generator, device="cpu")
        x, y = xy.to(torch.get_default_device())
        return {"x": x, "y": y}

    return ModelSpec(
        name=name,
        family="mlp",
        build=lambda: MLP(num_layers, hidden, bias=True, activation="gelu"),
        example=example,
        default_batch=default_batch,
        default_seq_len=None,
        num_parameters=num_parameters,
        source="ours",
        layers=num_layers,
        build_layers=lambda layers: MLP(layers, hidden, bias=True, activation="gelu"),
    )


def _token_example(vocab: int, default_seq_len: int) -> Callable[[int, int | None], Batch]:
    def example(batch: int, seq_len: int | None = None) -> Batch:
        generator = torch.Generator(device="cpu").manual_seed(0)
        shape = (batch, default_seq_len if seq_len is None else seq_len)
        ids = torch.randint(vocab, shape, generator=generator, device="cpu")
        ids = ids.to(torch.get_default_device())
        return {"input_ids": ids, "labels": ids.clone()}

    return example


def _gpt(name: str, num_parameters: int, source: str, config: GPTConfig) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="gpt",
        build=lambda: GPT(config),
        example=_token_example(config.vocab, config.seq_len),
        default_batch=8,
        default_seq_len=config.seq_len,
        num_parameters=num_parameters,
        source=source,
        layers=config.layers,
        build_layers=lambda layers: GPT(replace(config, layers=layers)),
        max_seq_len=config.seq_len,
    )


def _llama(
    name: str, num_parameters: int, source: str, seq_len: int, config: LlamaConfig
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        build=lambda: Llama(config),
        example=_token_example(config.vocab, seq_len),
        default_batch=8,
        default_seq_len=seq_len,
        num_parameters=num_parameters,
        source=source,
        layers=config.layers,
        build_layers=lambda layers: Llama(replace(config, layers=layers)),
    )


def _moe(
    name: str,
    num_parameters: int,
    source: str,
    seq_len: int,
    config: CapacityConfig | DroplessConfig | DeepSeekConfig,
) -> ModelSpec:
    def build(layers: int = config.layers) -> nn.Module:
        sized = replace(config, layers=layers)
        if isinstance(sized, CapacityConfig):
            return CapacityModel(sized)
        return DroplessModel(sized) if isinstance(sized, DroplessConfig) else DeepSeek(sized)

    return ModelSpec(
        name=name,
        family="moe",
        build=build,
        example=_token_example(config.vocab, seq_len),
        default_batch=8,
        default_seq_len=seq_len,
        num_parameters=num_parameters,
        source=source,
        layers=config.layers,
        build_layers=build,
    )


_GPT2 = "Radford et al. 2019, Table 2; huggingface.co/openai-community config.json"
_GPT3 = "Brown et al. 2020, arXiv:2005.14165, Table 2.1"
_LLAMA2 = "Touvron et al. 2023, arXiv:2307.09288; huggingface.co/meta-llama config.json"
_LLAMA3 = "Grattafiori et al. 2024, arXiv:2407.21783, Table 3"


def _gpt_tiny(name: str, *, dropout: float) -> ModelSpec:
    config = GPTConfig(layers=4, hidden=64, heads=4, vocab=512, seq_len=64, dropout=dropout)
    return _gpt(name, 236_928, "ours", config)


def _gpt2(name: str, num_parameters: int, *, layers: int, hidden: int, heads: int) -> ModelSpec:
    return _gpt(name, num_parameters, _GPT2, GPTConfig(layers=layers, hidden=hidden, heads=heads))


def _gpt3(
    name: str, num_parameters: int, *, layers: int, hidden: int, heads: int, note: str = ""
) -> ModelSpec:
    config = GPTConfig(layers=layers, hidden=hidden, heads=heads, seq_len=2048)
    return _gpt(name, num_parameters, _GPT3 + note, config)


def _llama3(
    name: str, num_parameters: int, *, layers: int, hidden: int, heads: int, ffn: int
) -> ModelSpec:
    config = LlamaConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128256,
        rope_theta=500000.0,
    )
    return _llama(name, num_parameters, _LLAMA3, 8192, config)


_LLAMA_TINY = LlamaConfig(layers=4, hidden=64, heads=4, kv_heads=2, ffn=176, vocab=512)
_LLAMA2_7B = LlamaConfig(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000)
_LLAMA2_13B = LlamaConfig(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000)
_LLAMA2_70B = LlamaConfig(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000)

_HEADS_16 = "; the table's 24 heads do not divide 2048, its head size 128 gives 16"
_WIDTH_5120 = "; the table's width 5140 is no multiple of 40 heads, 40 x 128 = 5120"

_SWITCH = "Fedus et al. 2021, arXiv:2101.03961, Table 9; huggingface.co/google config.json"
_GLAM = "Du et al. 2021, arXiv:2112.06905, Table 4"
_MIXTRAL = "Jiang et al. 2024, arXiv:2401.04088, Table 1; huggingface.co/mistralai config.json"
_DEEPSEEK = "DeepSeek-AI 2024, arXiv:2412.19437, section 4.2"
_QWEN3 = "Yang et al. 2025, arXiv:2505.09388, Table 2; huggingface.co/Qwen config.json"
_DECODER = "; here one decoder of 24 layers, there an encoder and a decoder of 12 each"

_SWITCH_TINY = CapacityConfig(
    layers=2, hidden=32, heads=4, head_dim=8, ffn=64, vocab=512, experts=4, top_k=1
)
_GLAM_TINY = CapacityConfig(
    layers=2, hidden=32, heads=4, head_dim=8, ffn=64, vocab=512, experts=4, top_k=2, gated=True
)
_MIXTRAL_TINY = DroplessConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=512, experts=4, top_k=2
)
_QWEN3_TINY = DroplessConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=16, vocab=512, experts=8, top_k=4,
    norm_eps=1e-6, head_norm=True,
)  # fmt: skip
_DEEPSEEK_TINY = DeepSeekConfig(
    layers=3, hidden=32, heads=4, q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8,
    ffn=64, expert_ffn=16, experts=8, shared_experts=1, top_k=3, groups=4, top_groups=2,
    dense_layers=1, vocab=512,
)  # fmt: skip
_SWITCH_BASE = CapacityConfig(
    layers=24, hidden=768, heads=12, head_dim=64, ffn=3072, vocab=32128, experts=128, top_k=1
)
_GLAM_1T = CapacityConfig(
    layers=64, hidden=8192, heads=128, head_dim=128, ffn=32768, vocab=256000, experts=64, top_k=2,
    gated=True,
)  # fmt: skip
_MIXTRAL_8X7B = DroplessConfig(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, experts=8,
    top_k=2,
)  # fmt: skip
_MIXTRAL_8X22B = DroplessConfig(
    layers=56, hidden=6144, heads=48, kv_heads=8, head_dim=128, ffn=16384, vocab=32000, experts=8,
    top_k=2,
)  # fmt: skip
_QWEN3_30B = DroplessConfig(
    layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=768, vocab=151936, experts=128,
    top_k=8, norm_eps=1e-6, head_norm=True,
)  # fmt: skip
_QWEN3_235B = DroplessConfig(
    layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, ffn=1536, vocab=151936, experts=128,
    top_k=8, norm_eps=1e-6, head_norm=True,
)  # fmt: skip
_DEEPSEEK_V3 = DeepSeekConfig(
    layers=61, hidden=7168, heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64,
    value_dim=128, ffn=18432, expert_ffn=2048, experts=256, shared_experts=1, top_k=8, groups=8,
    top_groups=4, dense_layers=3, vocab=129280,
)  # fmt: skip

_MODELS = (
    _mlp("mlp", num_layers=4, hidden=64, default_batch=32, num_parameters=16_640),
    _mlp("mlp_wide", num_layers=8, hidden=1024, default_batch=128, num_parameters=8_396_800),
    _gpt_tiny("gpt_tiny", dropout=0.0),
    _gpt_tiny("gpt_tiny_dropout", dropout=0.1),
    _gpt2("gpt2", 124_439_808, layers=12, hidden=768, heads=12),
    _gpt2("gpt2_medium", 354_823_168, layers=24, hidden=1024, heads=16),
    _gpt2("gpt2_large", 774_030_080, layers=36, hidden=1280, heads=20),
    _gpt2("gpt2_xl", 1_557_611_200, layers=48, hidden=1600, heads=25),
    _gpt3("gpt3_125m", 125_226_240, layers=12, hidden=768, heads=12),
    _gpt3("gpt3_350m", 355_871_744, layers=24, hidden=1024, heads=16),
    _gpt3("gpt3_760m", 760_300_032, layers=24, hidden=1536, heads=16),
    _gpt3("gpt3_1_3b", 1_315_723_264, layers=24, hidden=2048, heads=16, note=_HEADS_16),
    _gpt3("gpt3_2_7b", 2_651_553_280, layers=32, hidden=2560, heads=32),
    _gpt3("gpt3_6_7b", 6_658_404_352, layers=32, hidden=4096, heads=32),
    _gpt3("gpt3_13b", 12_853_386_240, layers=40, hidden=5120, heads=40, note=_WIDTH_5120),
    _gpt3("gpt3_175b", 174_604_259_328, layers=96, hidden=12288, heads=96),
    _gpt(
        "megatron_turing_530b",
        529_600_819_200,
        "Smith et al. 2022, arXiv:2201.11990, section 3.2",
        GPTConfig(layers=105, hidden=20480, heads=128, vocab=51200, seq_len=2048),
    ),
    _llama("llama_tiny", 250_432, "ours", 64, _LLAMA_TINY),
    _llama("llama2_7b", 6_738_415_616, _LLAMA2, 4096, _LLAMA2_7B),
    _llama("llama2_13b", 13_015_864_320, _LLAMA2, 4096, _LLAMA2_13B),
    _llama("llama2_70b", 68_976_648_192, _LLAMA2, 4096, _LLAMA2_70B),
    _llama3("llama3_8b", 8_030_261_248, layers=32, hidden=4096, heads=32, ffn=14336),
    _llama3("llama3_70b", 70_553_706_496, layers=80, hidden=8192, heads=64, ffn=28672),
    _llama3("llama3_405b", 405_853_388_800, layers=126, hidden=16384, heads=128, ffn=53248),
    _moe("switch_tiny", 61_728, "ours", 16, _SWITCH_TINY),
    _moe("glam_tiny", 63_776, "ours", 16, _GLAM_TINY),
    _moe("mixtral_tiny", 76_192, "ours", 16, _MIXTRAL_TINY),
    _moe("qwen3_moe_tiny", 70_368, "ours", 16, _QWEN3_TINY),
    _moe("deepseek_tiny", 81_240, "ours", 16, _DEEPSEEK_TINY),
    _moe("switch_base_128", 7_411_569_408, _SWITCH + _DECODER, 512, _SWITCH_BASE),
    _moe("glam_64b_64e", 1_163_853_307_904, _GLAM, 1024, _GLAM_1T),
    _moe("mixtral_8x7b", 46_702_792_704, _MIXTRAL, 4096, _MIXTRAL_8X7B),
    _moe("mixtral_8x22b", 140_620_634_112, _MIXTRAL, 4096, _MIXTRAL_8X22B),
    _moe("qwen3_30b_a3b", 30_532_122_624, _QWEN3, 4096, _QWEN3_30B),
    _moe("qwen3_235b_a22b", 235_093_634_560, _QWEN3, 4096, _QWEN3_235B),
    _moe("deepseek_v3", 671_026_404_352, _DEEPSEEK, 4096, _DEEPSEEK_V3),
)

ZOO: dict[str, ModelSpec] = {spec.name: spec for spec in _MODELS}
"""Every model, by name."""
