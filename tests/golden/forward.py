"""The forward pass in plain numpy, of Llama and of families that are near to it: the oracle that
owes nothing to transformers.

Tensors have Hugging Face names and layout: [out, in] matrices, q and k rows in half-split order.
Letters: T positions, H heads, K kv heads, D head_dim, V vocabulary.
"""

import math

import numpy as np


def unpermute(rows, heads):
    """Interleaved q or k rows, pairs (2i, 2i+1) per head, in half-split order, (i, i + D/2)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def head_dim(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def yarn(rope, freq):
    """As the paper has it: by the turns that a dimension makes within the original context. Between
    32 and 1 of them a ramp over the dimensions, from the one below to the one above."""
    spacing = np.log(freq[0] / freq[1])
    turns = rope["original_max_position_embeddings"] * freq[0] / (2 * math.pi)
    first = max(math.floor(math.log(turns / 32) / spacing), 0)
    last = min(math.ceil(math.log(turns) / spacing), 2 * len(freq) - 1)
    kept = 1 - np.clip((np.arange(len(freq)) - first) / (last - first), 0, 1)
    return kept * freq + (1 - kept) * freq / rope["factor"]


def rope_scale(config):
    """What cosines and sines are multiplied by."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "yarn":
        return 0.1 * math.log(rope["factor"]) + 1
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        return math.sqrt(1 + math.log(factor) / math.log(original))
    return 1


def inverse_frequencies(config, layer, count):
    """[rotary dimensions / 2], with the scaling that the config asks for at so many positions."""
    rope = config["rope_parameters"]
    rope = rope.get(config["layer_types"][layer], rope) if "full_attention" in rope else rope
    dim = int(head_dim(config) * rope.get("partial_rotary_factor", 1))
    freq = rope["rope_theta"] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope["rope_type"] == "default":
        return freq
    if rope["rope_type"] == "linear":
        return freq / rope["factor"]
    if rope["rope_type"] == "longrope":
        longer = count > rope["original_max_position_embeddings"]
        return freq / np.array(rope["long_factor" if longer else "short_factor"])
    if rope["rope_type"] == "yarn":
        return yarn(rope, freq)
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope_type {rope['rope_type']} is not one of those here")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * freq + (1 - keep) * freq / rope["factor"]


def window(config, layer):
    """Positions that a query of the layer sees, its own included; None: all before it."""
    kinds = config.get("layer_types")
    if kinds and kinds[layer] != "sliding_attention":
        return None
    return config.get("sliding_window")


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, cos, sin):
    """Half-split rope of x [T, heads, D]; cos and sin are [T, 1, R/2]: dimensions past R stay."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def cap(x, limit):
    return limit * np.tanh(x / limit) if limit else x


def activated(x, gemma):
    if gemma:
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def attention(q, k, v, seen, scale, limit):
    """Causal attention of q [T, H, D] over k, v [T, K, D], of the last `seen` positions; returns
    [T, H * D]."""
    positions, heads, dim = q.shape
    group = heads // k.shape[1]
    hidden = np.triu(np.ones((positions, positions), bool), 1)
    hidden |= np.tril(np.ones((positions, positions), bool), -(seen or positions))
    out = np.empty_like(q)
    for h in range(heads):
        scores = cap(q[:, h] @ k[:, h // group].T * scale, limit)
        scores[hidden] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h // group]
    return out.reshape(positions, heads * dim)


def logits(config, weights, ids, dtype=np.float64):
    """[T, V] logits of the token ids [T], everything computed in dtype."""

    def w(name):
        return weights[name].astype(dtype)

    def project(h, name):
        bias = name + ".bias"
        out = h @ w(name + ".weight").T + (w(bias) if bias in weights else 0)
        return out.reshape(len(ids), -1, dim)

    gemma = "gemma" in config.get("model_type", "")

    def norm(x, name):
        return rms_norm(x, w(name) + gemma, eps) if name in weights else x

    def norm_heads(x, name):
        """Of each head, or of all of them together, as the weights are long."""
        whole = name in weights and len(weights[name]) > dim
        return norm(x.reshape(len(ids), -1), name).reshape(x.shape) if whole else norm(x, name)

    eps = config["rms_norm_eps"]
    dim = head_dim(config)
    scale = (config.get("query_pre_attn_scalar") or dim) ** -0.5
    norms_after = any("post_feedforward_layernorm" in name for name in weights)
    turns = config.get("no_rope_layers") or [1] * config["num_hidden_layers"]
    x = w("model.embed_tokens.weight")[ids]
    if gemma:
        x = x * dtype(np.float32(math.sqrt(config["hidden_size"])))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        angle = np.arange(len(ids))[:, None, None] * inverse_frequencies(config, layer, len(ids))
        cos, sin = (rope_scale(config) * f(angle).astype(dtype) for f in (np.cos, np.sin))
        h = norm(x, at + "input_layernorm.weight")
        if at + "self_attn.qkv_proj.weight" in weights:
            qkv = project(h, at + "self_attn.qkv_proj")
            heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
            q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
        else:
            q, k, v = (project(h, f"{at}self_attn.{name}_proj") for name in "qkv")
        q = norm_heads(q, at + "self_attn.q_norm.weight")
        k = norm_heads(k, at + "self_attn.k_norm.weight")
        if turns[layer]:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        h = attention(q, k, v, window(config, layer), scale, config.get("attn_logit_softcapping"))
        h = h @ w(at + "self_attn.o_proj.weight").T
        x = x + (norm(h, at + "post_attention_layernorm.weight") if norms_after else h)
        before = "pre_feedforward" if norms_after else "post_attention"
        h = norm(x, f"{at}{before}_layernorm.weight")
        if at + "mlp.gate_up_proj.weight" in weights:
            gate, up = np.split(h @ w(at + "mlp.gate_up_proj.weight").T, 2, axis=1)
        else:
            gate, up = (h @ w(f"{at}mlp.{name}_proj.weight").T for name in ("gate", "up"))
        h = activated(gate, gemma) * up @ w(at + "mlp.down_proj.weight").T
        x = x + (norm(h, at + "post_feedforward_layernorm.weight") if norms_after else h)
    tied = config["tie_word_embeddings"]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return cap(norm(x, "model.norm.weight") @ w(head).T, config.get("final_logit_softcapping"))
