"""Writes GPT-2 as its sources have it, each from its published layout. Tensors go by their Hugging
Face names and are those of golden/gpt2.py."""

import struct
from pathlib import Path

import gguf
import numpy as np
import writers
from golden import gpt2, tiny

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def weights() -> dict:
    return gpt2.tensors(tiny.uniform)


def linear(tensors: dict) -> dict:
    """Matrices as [outputs, inputs]."""
    return {name: values.T if name.endswith(CONV1D) else values for name, values in tensors.items()}


def without_biases(tensors: dict) -> dict:
    return {name: values for name, values in tensors.items() if not name.endswith(".bias")}


def nanogpt_config(**changes) -> dict:
    c = gpt2.CONFIG
    sizes = {key: c[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return sizes | {"block_size": c["n_positions"], "bias": True, "dropout": 0.0} | changes


def nanogpt_folder(folder: Path, tensors: dict, prefix: str = "", **changes) -> Path:
    """A state dict with its tied classifier, from safetensors, and its model_args."""
    tensors = linear(tensors)
    tensors |= {"lm_head.weight": tensors["transformer.wte.weight"]}
    named = {prefix + name: values for name, values in tensors.items()}
    return writers.hf_folder(folder, nanogpt_config(**changes), named)


def llmc_file(path: Path, tensors: dict, version: int = 3, rows: int = 384, **header) -> Path:
    """rows: of the embedding, padded with what must never be sampled."""
    c = gpt2.CONFIG
    tensors = linear(tensors)
    embedding = tensors.pop("transformer.wte.weight")
    padding = np.full((rows - len(embedding), embedding.shape[1]), 99, np.float32)
    at = {f"transformer.h.{layer}.": layer for layer in range(c["n_layer"])}
    names = [name.removeprefix("transformer.h.0.") for name in tensors if ".h.0." in name]
    stacked = [tensors[prefix + name] for name in names for prefix in at]
    values = [embedding, padding, tensors["transformer.wpe.weight"], *stacked]
    values += [tensors[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")]
    head = {"magic": 20240326, "version": version, "context": c["n_positions"]}
    head |= {"vocab": c["vocab_size"], "layers": c["n_layer"], "heads": c["n_head"]}
    head |= {"width": c["n_embd"], "rows": rows}
    data = [writers.to_bf16(v) if version == 5 else v.astype("<f4") for v in values]
    start = struct.pack("<8i", *(head | header).values()).ljust(1024, b"\0")
    path.write_bytes(start + b"".join(array.tobytes() for array in data))
    return path


def llmc_tokenizer(path: Path, pieces: list[bytes], **header) -> Path:
    head = {"magic": 20240328, "version": 2, "count": len(pieces), "end": len(pieces) - 1}
    head |= header
    texts = b"".join(bytes([len(piece)]) + piece for piece in pieces)
    path.write_bytes(struct.pack("<4I", *head.values()).ljust(1024, b"\0") + texts)
    return path


GGUF_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
}


def gguf_file(path: Path, tensors: dict, **changes) -> Path:
    """What llama.cpp's converter writes; changes: of keys without "gpt2." (None: left out)."""
    c = gpt2.CONFIG
    writer = gguf.GGUFWriter(path, "gpt2")
    keys = {
        "block_count": c["n_layer"],
        "context_length": c["n_positions"],
        "embedding_length": c["n_embd"],
        "feed_forward_length": 4 * c["n_embd"],
        "attention.head_count": c["n_head"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
    }
    for key, value in (keys | changes).items():
        if isinstance(value, float):
            writer.add_float32(f"gpt2.{key}", value)
        elif value is not None:
            writer.add_uint32(f"gpt2.{key}", value)
    writer.add_eos_token_id(c["eos_token_id"])
    writer.add_bos_token_id(c["bos_token_id"])
    for name, values in linear(tensors).items():
        *layer, rest = name.removeprefix("transformer.").removeprefix("h.").split(".", 1)
        if not layer[0].isdigit():
            layer, rest = [], ".".join([*layer, rest])
        part, kind = rest.rsplit(".", 1)
        at = "".join(f"blk.{number}." for number in layer)
        writer.add_tensor(f"{at}{GGUF_NAMES[part]}.{kind}", np.ascontiguousarray(values))
    writers.finish(writer)
    return path
