"""Tiny random models whose weights every test can make again, bit for bit, with numpy alone: a
Llama, and others of nearly its shape with what their families have.

The Llama's shape is awkward on purpose: heads * head_dim (128) is not the hidden size (64), four
query heads share a kv head, the vocabulary is odd, the output is untied, and llama3 rope scaling
keeps 2 of the 8 frequencies, blends 2 and divides 4. The Qwen 2 has heads of 8, as its config says
nothing of their size. Windows are shorter than the text that the models are given: in all layers of
the Mistral, of the Phi 3 and of the Phi 4, in the last two of one Qwen 2, in the first and the last
of the Gemmas 2 and 3. Phi 3 (long) and Phi 4 have longrope: other frequencies beyond 256
positions.

A value is k / 2^15 * range, k a 16-bit signed integer from a hash of the tensor's name and of the
element's index, range a power of two: exact in float32, and mostly not in bfloat16 or float16.
"""

import numpy as np

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 64, 176, 3, 331
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 16

# What transformers 5 writes as config.json.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 200.0,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": VOCAB,
}

NOT_QWEN = ("attention_bias", "mlp_bias", "pretraining_tp")
QWEN = {key: value for key, value in CONFIG.items() if key not in NOT_QWEN} | {
    "bos_token_id": None,
    "eos_token_id": [2, 330],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 200.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
QWEN2 = QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
del QWEN2["head_dim"]
WINDOW = {"max_window_layers": 1, "sliding_window": 45, "use_sliding_window": True}

PLAIN_ROPE = {"rope_theta": 200.0, "rope_type": "default"}
MISTRAL = {key: value for key, value in CONFIG.items() if key not in NOT_QWEN} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_parameters": PLAIN_ROPE,
    "sliding_window": 37,
}
PHI3 = MISTRAL | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "num_attention_heads": 4,
    "original_max_position_embeddings": 512,
    "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.75},
    "sliding_window": 129,
}
del PHI3["head_dim"]
LONGROPE = {
    "long_factor": [1.0, 1.25, 1.5, 2.0, 3.0, 4.5, 7.0, 9.5],
    "original_max_position_embeddings": 256,
    "rope_theta": 200.0,
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.0625, 1.125, 1.25, 1.5, 1.75, 2.0],
}
PHI3_LONG = PHI3 | {
    "original_max_position_embeddings": 256,
    "rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0},
    "sliding_window": None,
}
PHI4 = PHI3_LONG | {
    "rope_parameters": LONGROPE
    | {
        "long_factor": LONGROPE["long_factor"][:6],
        "partial_rotary_factor": 0.75,
        "short_factor": LONGROPE["short_factor"][1:7],
    },
    "sliding_window": 400,
    "tie_word_embeddings": True,
}
QWEN3_YARN = QWEN3 | {
    "rope_parameters": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 200.0,
        "rope_type": "yarn",
    },
}
SMOLLM3 = {key: value for key, value in CONFIG.items() if key != "pretraining_tp"} | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layers": [1, 0, 1],
    "rope_parameters": PLAIN_ROPE,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
OLMO2 = {key: value for key, value in CONFIG.items() if key not in NOT_QWEN} | {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "model_type": "olmo2",
    "num_key_value_heads": 2,
    "rope_parameters": PLAIN_ROPE,
}
del OLMO2["head_dim"]
GEMMA = {
    key: value for key, value in CONFIG.items() if key not in ("mlp_bias", "pretraining_tp")
} | {
    "architectures": ["GemmaForCausalLM"],
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "model_type": "gemma",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": PLAIN_ROPE,
    "tie_word_embeddings": True,
}
GEMMA2 = {key: value for key, value in GEMMA.items() if key != "hidden_act"} | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 6.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma2",
    "query_pre_attn_scalar": 24,
    "sliding_window": 53,
}
GEMMA3 = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "model_type": "gemma3_text",
    "rope_parameters": {
        "full_attention": {"factor": 8.0, "rope_theta": 900.0, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    },
}
FAMILIES = {
    "llama": CONFIG,
    "olmo2": OLMO2,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "qwen2": QWEN2,
    "qwen2_window": QWEN2 | WINDOW,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "phi3_long": PHI3_LONG,
    "phi4": PHI4,
    "qwen3_yarn": QWEN3_YARN,
    "smollm3": SMOLLM3,
}


def layer_shapes(config):
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", HIDDEN // heads)
    query, key = heads * size, kv_heads * size
    if config["model_type"] == "phi3":
        return {
            "input_layernorm.weight": (HIDDEN,),
            "self_attn.qkv_proj.weight": (query + 2 * key, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, query),
            "post_attention_layernorm.weight": (HIDDEN,),
            "mlp.gate_up_proj.weight": (2 * INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    result = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (query, HIDDEN),
        "self_attn.k_proj.weight": (key, HIDDEN),
        "self_attn.v_proj.weight": (key, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    if config["model_type"] == "qwen2":
        for letter, rows in (("q", query), ("k", key), ("v", key)):
            result[f"self_attn.{letter}_proj.bias"] = (rows,)
    if config["model_type"] == "olmo2":
        del result["input_layernorm.weight"]
        result["self_attn.q_norm.weight"], result["self_attn.k_norm.weight"] = (query,), (key,)
    if config["model_type"] in ("gemma2", "gemma3_text"):
        result["pre_feedforward_layernorm.weight"] = (HIDDEN,)
    if config["model_type"] in ("olmo2", "gemma2", "gemma3_text"):
        result["post_feedforward_layernorm.weight"] = (HIDDEN,)
    if config["model_type"] in ("qwen3", "gemma3_text"):
        result |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (HEAD_DIM,))
    return result


def shapes(config=CONFIG):
    """Every tensor's Hugging Face name and shape, in file order."""
    result = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in layer_shapes(config).items():
            result[f"model.layers.{layer}.{name}"] = shape
    result["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (VOCAB, HIDDEN)
    return result


def hashed(name, count):
    """count uint64: FNV-1a of the name, then splitmix64's finaliser at each index."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(name, shape):
    """float32 in [-1, 1), multiples of 2^-15."""
    bits = hashed(name, int(np.prod(shape))) >> np.uint64(48)
    return ((bits.astype(np.float32) - 32768) / 32768).reshape(shape)


def tensor(name, shape):
    """Norms lie in [0.75, 1.25), the embedding in [-1, 1), matrices and biases in [-0.25, 0.25)."""
    values = uniform(name, shape)
    if name.endswith("norm.weight"):
        return 1 + values / 4
    return values if "embed_tokens" in name else values / 4


def tensors(config=CONFIG):
    """All weights: Hugging Face name -> float32 array, in file order. An embedding that is the
    classifier, too, is small: else every id would be followed by itself."""
    weights = {name: tensor(name, shape) for name, shape in shapes(config).items()}
    if config["tie_word_embeddings"]:
        weights["model.embed_tokens.weight"] /= 64
    return weights


def ids(count):
    """count token ids in [0, VOCAB), int32."""
    return (hashed("ids", count) % np.uint64(VOCAB)).astype(np.int32)
