"""The exporter as its tests call it: what it writes, and what it refuses."""

import re
from pathlib import Path

import numpy as np
import reader
import writers
from golden import tiny

from export.__main__ import main


def export(source: Path, target: Path, *options) -> reader.ModelFile:
    assert main([str(source), "-o", str(target), *map(str, options)]) == 0
    assert [path.name for path in target.parent.glob(".*.tmp")] == []
    return reader.read(target)


def same_tensors(one: reader.ModelFile, other: reader.ModelFile) -> None:
    assert one.raw.keys() == other.raw.keys()
    assert [name for name in one.raw if one.raw[name] != other.raw[name]] == []


def differs(one: reader.ModelFile, other: reader.ModelFile) -> set[str]:
    return {key for key in one.config if one.config[key] != other.config[key]}


def put_together(config: dict, tensors: dict) -> dict[str, np.ndarray]:
    """The tensors of model.bin from Hugging Face's, for the comparison."""
    out = {
        "embed": tensors["model.embed_tokens.weight"],
        "norm_final": tensors["model.norm.weight"],
        "classifier": tensors["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        at, to = f"model.layers.{layer}.", f"layers.{layer}."
        stack = [tensors[f"{at}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        out[to + "qkv"] = np.concatenate(stack)
        out[to + "out"] = tensors[at + "self_attn.o_proj.weight"]
        stack = [tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        out[to + "gate_up"] = np.concatenate(stack)
        out[to + "down"] = tensors[at + "mlp.down_proj.weight"]
        out[to + "norm_attention"] = tensors[at + "input_layernorm.weight"]
        out[to + "norm_ffn"] = tensors[at + "post_attention_layernorm.weight"]
    return out


def small(**changes) -> tuple[dict, dict]:
    """Config and tensors of one layer that fit together, for changes of shape."""
    config = tiny.CONFIG | changes | {"num_hidden_layers": 1, "vocab_size": 40}
    width, ffn, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or width // heads
    query, key = heads * size, kv_heads * size
    shapes = [(width,), (query, width), (key, width), (key, width), (width, query), (width,)]
    shapes += [(ffn, width), (ffn, width), (width, ffn)]
    tensors = {"model.embed_tokens.weight": tiny.tensor("model.embed_tokens", (vocab, width))}
    for (name, _), shape in zip(writers.LAYER_NAMES, shapes, strict=True):
        name = f"model.layers.0.{name}.weight"
        tensors[name] = tiny.tensor(name, shape)
    tensors["model.norm.weight"] = tiny.tensor("model.norm.weight", (width,))
    return config, tensors


def refused(capsys, source: Path, target: Path, pattern: str, *options) -> None:
    """One line that matches the pattern, and the target's folder as it was."""
    folder = target.parent
    before = sorted(folder.iterdir()) if folder.is_dir() else None
    capsys.readouterr()
    assert main([str(source), "-o", str(target), *map(str, options)]) == 2
    _, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("export: error: "), err
    assert re.search(pattern, lines[0]), lines[0]
    assert before == (sorted(folder.iterdir()) if folder.is_dir() else None)
