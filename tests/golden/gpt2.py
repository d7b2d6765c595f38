"""A tiny random GPT-2, made like the models of tiny.py, and its forward pass in plain numpy: the
oracle that owes nothing to transformers. Tensors have Hugging Face's names and layout: matrices are
[inputs, outputs]. The vocabulary is odd; the second one has the exact GELU."""

import math

import numpy as np

CONFIG = {
    "activation_function": "gelu_new",
    "add_cross_attention": False,
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 330,
    "embd_pdrop": 0.1,
    "eos_token_id": 330,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 3,
    "n_positions": 512,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.1,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "vocab_size": 331,
}
FAMILIES = {"gpt2": CONFIG, "gpt2_erf": CONFIG | {"activation_function": "gelu"}}


def shapes():
    """Every tensor's name and shape, the embedding first."""
    width, ffn = CONFIG["n_embd"], 4 * CONFIG["n_embd"]
    layer = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, ffn),
        "mlp.c_fc.bias": (ffn,),
        "mlp.c_proj.weight": (ffn, width),
        "mlp.c_proj.bias": (width,),
    }
    result = {"wte.weight": (CONFIG["vocab_size"], width)}
    result["wpe.weight"] = (CONFIG["n_positions"], width)
    for number in range(CONFIG["n_layer"]):
        result |= {f"h.{number}.{name}": shape for name, shape in layer.items()}
    result |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {f"transformer.{name}": shape for name, shape in result.items()}


def tensor(name, values):
    """Norms' weights lie in [0.75, 1.25), positions in [-1, 1), q's, k's and v's matrix in
    [-0.5, 0.5), the others in [-0.25, 0.25): so attention matters, and texts do not soon repeat
    one id."""
    if "ln_" in name and name.endswith("weight"):
        return 1 + values / 4
    if name.endswith("c_attn.weight"):
        return values / 2
    return values if ".wpe." in name else values / 4


def tensors(uniform):
    """All weights, float32; uniform is tiny.py's."""
    return {name: tensor(name, uniform(name, shape)) for name, shape in shapes().items()}


def gelu(x, exact):
    if exact:
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(q, k, v):
    """Causal attention of one head, [T, D] each."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    scores[np.triu(np.ones(scores.shape, bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ v


def logits(config, weights, ids):
    """[T, V] logits of the token ids [T] in float64. A bias that is missing is 0."""

    def w(name):
        return weights[f"transformer.{name}"].astype(np.float64)

    def bias(name):
        return w(name) if f"transformer.{name}" in weights else 0

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return x * w(f"{name}.weight") + bias(f"{name}.bias")

    def conv1d(x, name):
        return x @ w(f"{name}.weight") + bias(f"{name}.bias")

    x = w("wte.weight")[ids] + w("wpe.weight")[: len(ids)]
    for layer in range(config["n_layer"]):
        at = f"h.{layer}."
        qkv = np.split(conv1d(norm(x, at + "ln_1"), at + "attn.c_attn"), 3, axis=1)
        heads = zip(*(np.split(part, config["n_head"], axis=1) for part in qkv), strict=True)
        mixed = np.concatenate([attention(*head) for head in heads], axis=1)
        x = x + conv1d(mixed, at + "attn.c_proj")
        h = conv1d(norm(x, at + "ln_2"), at + "mlp.c_fc")
        h = gelu(h, config["activation_function"] == "gelu")
        x = x + conv1d(h, at + "mlp.c_proj")
    return norm(x, "ln_f") @ w("wte.weight").T
