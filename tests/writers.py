"""Writes the exporter's sources, each from its published layout: Hugging Face folders, GGUF files,
llama2.c files of versions 0, 1 and 2, small tokenizers. Tensors go by their Hugging Face names."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np

from export.bpe import BYTE_OF

LAYER_NAMES = (
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)
OTHER_NAMES = (
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
)
# Where norms come after the block's halves, the name of a Llama's second norm means another.
NAMES_AFTER = (
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)
INTERLEAVED = ("llama", "mistral", "smollm3")
ARCHITECTURE_OF = {"mistral": "llama", "gemma3_text": "gemma3"}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k from half-split order to pairs, as the converters of llama2.c and llama.cpp do."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


# ---- Hugging Face ----


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Truncated: enough for values that bf16 holds exactly."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def safetensors_file(path: Path, tensors: dict[str, np.ndarray], kind: str = "F32") -> None:
    dtypes = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1"}
    header, at, blobs = {"__metadata__": {"format": "pt"}}, 0, []
    for name, values in tensors.items():
        blob = (to_bf16(values) if kind == "BF16" else values.astype(dtypes[kind])).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [at, at + len(blob)],
        }
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def hf_folder(folder: Path, config: dict, tensors: dict, shards: int = 1, kind="F32") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors_file(folder / "model.safetensors", tensors, kind)
        return folder
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        safetensors_file(folder / file, part, kind)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# ---- GGUF ----


def gguf_name(name: str, names_after: bool = False) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    names = dict(LAYER_NAMES + OTHER_NAMES + (NAMES_AFTER if names_after else ()))
    return f"blk.{layer}.{names[part]}.{kind}"


def rope_factors(config: dict) -> np.ndarray | None:
    """What llama.cpp's converter writes as rope_freqs for llama3 scaling."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return None
    factors = []
    original = rope["original_max_position_embeddings"]
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config["head_dim"])
        low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add_rope(writer: gguf.GGUFWriter, config: dict) -> None:
    """As llama.cpp's converters do; factors of longrope are tensors."""
    rope = config["rope_parameters"]
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    original = rope.get("original_max_position_embeddings")
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(factor) / np.log(original)))
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def as_gguf_says(config: dict) -> dict:
    """A GGUF says nothing of the scale of scores nor of the layers that have a window, or no RoPE:
    it is the size of the heads, and the order that the architecture has."""
    scale = "query_pre_attn_scalar"
    implied = {scale: config["head_dim"]} if scale in config else {}
    return config | {"no_rope_layers": None, "layer_types": None} | implied


def gguf_writer(path: Path, config: dict) -> gguf.GGUFWriter:
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCHITECTURE_OF.get(kind, kind))
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add_rope(writer, config)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            getattr(writer, f"add_{key}")(config[key])
    if kind in ("mistral", "phi3", "gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_file(path: Path, config: dict, tensors: dict, kind: str = "F32", add=None) -> None:
    """Matrices in blocks of this kind, or as given where they are raw blocks (uint8) already."""
    quantised = gguf.GGMLQuantizationType[kind]
    writer = gguf_writer(path, config)
    if add:
        add(writer)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    after = any("post_feedforward" in name for name in tensors)
    for name, values in tensors.items():
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        if "gemma" in config["model_type"] and "norm" in name:
            values = values + 1
        for letter, key in heads.items():
            if config["model_type"] in INTERLEAVED and f"self_attn.{letter}_proj" in name:
                values = interleaved(values, config[key])
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name, after), values)
        elif values.dtype == np.uint8:
            writer.add_tensor(gguf_name(name, after), values, raw_dtype=quantised)
        else:
            blocks = gguf.quantize(values, quantised)
            writer.add_tensor(gguf_name(name, after), blocks, raw_dtype=quantised)
    finish(writer)


# ---- llama2.c ----

LLAMA2C_LAYERS = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj"),
    "mlp.up_proj",
)


def read_llama2c_v0(path: Path) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """The header and the tensors (q and k still interleaved) of a file with a tied classifier."""
    data = path.read_bytes()
    header = struct.unpack("<7i", data[:28])
    dim, hidden, layers, heads, kv_heads, vocab, _ = header
    kv_dim = dim * kv_heads // heads
    rows = {"self_attn.k_proj": kv_dim, "self_attn.v_proj": kv_dim}
    rows |= {"mlp.gate_proj": hidden, "mlp.up_proj": hidden}
    values, at, tensors = np.frombuffer(data, "<f4", offset=28), 0, {}

    def take(name, shape):
        nonlocal at
        tensors[f"{name}.weight"] = values[at : at + np.prod(shape)].reshape(shape)
        at += int(np.prod(shape))

    take("model.embed_tokens", (vocab, dim))
    for name in LLAMA2C_LAYERS:
        columns = hidden if name == "mlp.down_proj" else dim
        shape = (dim,) if "norm" in name else (rows.get(name, dim), columns)
        for layer in range(layers):
            take(f"model.layers.{layer}.{name}", shape)
    take("model.norm", (dim,))
    return header, tensors


def _in_order(header: tuple, tensors: dict, names: tuple) -> list[np.ndarray]:
    found = []
    for name in names:
        if f"{name}.weight" in tensors:
            found.append(tensors[f"{name}.weight"])
        else:
            found += [tensors[f"model.layers.{i}.{name}.weight"] for i in range(header[2])]
    return found


def quantised(values: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and float32 scales; a group of zeros gets NaN, as in llama2.c's exporter."""
    groups = values.reshape(-1, group)
    scales = np.abs(groups).max(1) / 127
    with np.errstate(invalid="ignore"):
        whole = np.round(groups / scales[:, None])
    scales = np.where(scales == 0, np.float32(np.nan), scales)
    return np.nan_to_num(whole).astype(np.int8), scales.astype("<f4")


def llama2c_file(path: Path, version: int, header: tuple, tensors: dict, group: int = 64) -> None:
    """Version 1 or 2, with a classifier of its own where tensors has lm_head."""
    norms = ("input_layernorm", "post_attention_layernorm", "model.norm")
    matrices = ("model.embed_tokens", *(name for name in LLAMA2C_LAYERS if "norm" not in name))
    # These two versions put w1, w2, w3 last, in this order, as version 0 does.
    tied = "lm_head.weight" not in tensors
    if not tied:
        matrices += ("lm_head",)
    head = struct.pack("<Ii7iB", 0x616B3432, version, *header, tied)
    if version == 2:
        head += struct.pack("<i", group)
    with path.open("wb") as file:
        file.write(head.ljust(256, b"\0"))
        for values in _in_order(header, tensors, norms):
            file.write(values.astype("<f4").tobytes())
        for values in _in_order(header, tensors, matrices):
            if version == 1:
                file.write(values.astype("<f4").tobytes())
            else:
                for part in quantised(values, group):
                    file.write(part.tobytes())


def llama2c_v0_file(path: Path, header: tuple, tensors: dict) -> None:
    """With a classifier of its own: the vocabulary is negative."""
    dim, _, _, heads, _, vocab, context = header
    names = ("model.embed_tokens", *LLAMA2C_LAYERS, "model.norm")
    with path.open("wb") as file:
        file.write(struct.pack("<7i", *header[:5], -vocab, context))
        for values in _in_order(header, tensors, names):
            file.write(values.astype("<f4").tobytes())
        file.write(np.full(context * (dim // heads), np.nan, "<f4").tobytes())  # cos and sin
        file.write(tensors["lm_head.weight"].astype("<f4").tobytes())


# ---- tokenizers ----

LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}


def byte_level_json(merges=(("h", "e"), ("l", "l"), ("he", "ll")), added=()) -> dict:
    """A tokenizer.json of GPT-2's kind: 256 bytes, merges in order, added tokens behind."""
    vocab = {LETTER_OF[byte]: byte for byte in range(256)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokens = [
        {
            "id": len(vocab) + i,
            "content": text,
            "special": special,
            "lstrip": False,
            "rstrip": False,
        }
        for i, (text, special) in enumerate(added)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }
