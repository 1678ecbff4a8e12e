"""Models named by `path.py:function` in the parity tests: tiny, with random weights, 8 samples."""

import torch
from torch import nn

SAMPLES, SEQ, VOCAB = 8, 8, 50


def token_batch(vocab=VOCAB):
    generator = torch.Generator(device="cpu").manual_seed(1)
    ids = torch.randint(vocab, (SAMPLES, SEQ), generator=generator, device="cpu")
    labels = ids.clone()
    labels[1, 3:] = -100
    labels[4] = -100  # a sample without any label
    device = torch.get_default_device()
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def one_dtype_loss(logits, labels, vocab_size, **_):
    """Mean next-token loss, as Hugging Face's for causal models."""
    logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits, labels)


def hf_gpt2_stock(dropout=0.0):
    """Hugging Face GPT-2: packed QKV, tied embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=SEQ,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config), token_batch()


def hf_llama_stock():
    """Hugging Face Llama: 4 query heads over 2 KV heads, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config), token_batch()


def in_one_dtype(model, batch):
    """The model without its casts to float32, in norms and loss, which hide what 1e-9 can show."""
    model.loss_function = one_dtype_loss
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                replaced = nn.RMSNorm(norm.weight.numel(), norm.variance_epsilon)
                setattr(module, name, replaced)
    return model, batch


def hf_mixtral():
    """Hugging Face Mixtral with grouped products: 4 experts, 2 a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    return MixtralForCausalLM(config), token_batch()


def hf_gpt_oss():
    """Hugging Face gpt-oss: experts with biases, gate and up interleaved."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_cache=False,
    )
    return GptOssForCausalLM(config), token_batch()


def hf_deepseek():
    """Hugging Face DeepSeek-V3: latent attention, groups of experts, a shared expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    return DeepseekV3ForCausalLM(config), token_batch()


def hf_gpt2():
    return in_one_dtype(*hf_gpt2_stock())


def hf_gpt2_dropout():
    """With the dropout of 0.1 that is GPT-2's default, in attention too."""
    return in_one_dtype(*hf_gpt2_stock(dropout=0.1))


def hf_llama():
    return in_one_dtype(*hf_llama_stock())


class Residual(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks, hidden=8):
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(hidden) for _ in range(blocks)))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.blocks(x), y)


class Wide(nn.Module):
    """A language model that is nearly all vocabulary, of a prime number of words."""

    def __init__(self, vocab=4099, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.Sequential(Residual(hidden), Residual(hidden))
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.blocks(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def wide_vocabulary():
    return Wide(), token_batch(4099)


def stack_of(blocks):
    x = torch.randn(SAMPLES, 8)
    return Stack(blocks), {"x": x, "y": torch.tanh(x)}


def seven_blocks():
    return stack_of(7)


def ten_blocks():
    return stack_of(10)


def eight_blocks():
    return stack_of(8)
