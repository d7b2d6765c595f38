"""Sets of RoPE parameters as published configs have them, or nearly: rope.npz holds what
transformers makes of them. Phi-3's lists are made up, with the length and the range of its own."""

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "max_position_embeddings": 131072,
}


def phi3(head_dim, part, original=4096, **rope):
    turning = int(head_dim * part) // 2
    return {
        "model_type": "phi3",
        "hidden_size": 32 * head_dim,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": part,
            "short_factor": [1 + i / 64 for i in range(turning)],
            "long_factor": [1 + i * i / 32 for i in range(turning)],
        }
        | rope,
    }


def yarn(theta, original, **rope):
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0} | rope
    return {"rope_parameters": rope | {"original_max_position_embeddings": original}}


CASES = {
    "linear": LLAMA
    | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "dynamic": LLAMA
    | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "llama3": LLAMA
    | {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": QWEN | yarn(1e6, 32768),
    "yarn_betas": QWEN | yarn(1e6, 32768, beta_fast=16.0, beta_slow=2.0),
    "yarn_factor": QWEN | yarn(1e6, 32768, attention_factor=1.5),
    "yarn_weights": LLAMA | yarn(10000.0, 4096, factor=40.0, mscale=0.8, mscale_all_dim=1.2),
    "yarn_fractions": LLAMA | yarn(10000.0, 4096, truncate=False),
    "yarn_short": LLAMA | yarn(10000.0, 8),
    "yarn_least": LLAMA | yarn(10000.0, 6),
    "yarn_most": LLAMA | yarn(20.0, 4096, beta_fast=128.0),
    "longrope": phi3(96, 1.0),
    "longrope_part": phi3(128, 0.75),
    "longrope_factor": phi3(96, 1.0, factor=16.0),
    "longrope_told": phi3(96, 1.0, attention_factor=1.25),
    "longrope_same": phi3(96, 1.0, 131072),
    "longrope_less": phi3(96, 1.0, 262144),
}
