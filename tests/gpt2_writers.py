"""Writes GPT-2 as its sources have it, each from its published layout. Tensors go by their Hugging
Face names and are those of golden/gpt2.py."""

from pathlib import Path

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
