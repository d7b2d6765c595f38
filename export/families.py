"""The architectures of transformers that can be exported: what each assumes of keys that a
config.json leaves out, and what it has beside a Llama."""

from dataclasses import dataclass

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "sliding_window": None,
    "head_dim": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2 = LLAMA | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
PHI3 = LLAMA | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "rms_norm_eps": 1e-5,
}
SMOLLM3 = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}
GEMMA = LLAMA | {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
GEMMA2 = GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3 = GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
OLMO2 = LLAMA | {
    "vocab_size": 50304,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Family:
    defaults: dict
    qkv_bias: bool = False
    qk_norm: int = 0  # RMSNorm 1 of each head of q and of k, 2 of all of q and of all of k
    window: bool = False  # sliding_window counts, in all layers
    window_by_flag: bool = False  # sliding_window counts with use_sliding_window, in some layers
    full_every: int = 0  # of so many layers the last one has no window
    local_rope: bool = False  # layers with a window have RoPE frequencies of their own
    partial_rope: bool = False  # partial_rotary_factor counts
    rope_by_layer: bool = False  # no_rope_layers counts
    fused: bool = False  # one matrix has q, k and v, another gate and up
    gemma: bool = False  # norms by 1 + w, GELU, the embedding times sqrt(width)
    norms_after: bool = False  # of what attention and feed-forward give, before x takes it
    norms_before: bool = True


FAMILIES = {
    "LlamaForCausalLM": Family(LLAMA),
    "MistralForCausalLM": Family(MISTRAL, window=True),
    "Qwen2ForCausalLM": Family(QWEN2, qkv_bias=True, window_by_flag=True),
    "Qwen3ForCausalLM": Family(QWEN2 | {"head_dim": 128}, qk_norm=1, window_by_flag=True),
    "Phi3ForCausalLM": Family(PHI3, window=True, partial_rope=True, fused=True),
    "SmolLM3ForCausalLM": Family(SMOLLM3, window_by_flag=True, rope_by_layer=True),
    "Olmo2ForCausalLM": Family(OLMO2, qk_norm=2, norms_after=True, norms_before=False),
    "GemmaForCausalLM": Family(GEMMA, gemma=True),
    "Gemma2ForCausalLM": Family(GEMMA2, gemma=True, norms_after=True, full_every=2),
    "Gemma3ForCausalLM": Family(
        GEMMA3, gemma=True, norms_after=True, qk_norm=1, full_every=6, local_rope=True
    ),
}
GPT2 = "GPT2LMHeadModel"  # which gpt2.py reads
# Models that see: their text part, of which text_config tells, is one of the above.
TEXT_OF = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
# By model_type, which a config.json has beside the name of the architecture, or in its place.
TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
TYPES |= {"gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration"}
TYPES["gpt2"] = GPT2
