"""Hugging Face folders: config.json, safetensors (one file, or shards with an index)."""

import json
import struct
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from export import chat, gpt2
from export.config import config_from_hf, family_of, text_config
from export.errors import ExportError, malformed
from export.families import FAMILIES, GPT2, TEXT_OF
from export.files import read_array, read_json, read_json_if_there
from export.model import Model, Part, check_tied, collect, split_fused
from export.settings import Settings
from export.tokenizer import Tokenizer, tokenizer_from_hf

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

# Buffers that old checkpoints carry and that are computed, not learned.
IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")

NAMES = {
    "embed": "model.embed_tokens",
    "norm_final": "model.norm",
    "classifier": "lm_head",
    "norm_attention": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_bias": "self_attn.q_proj",
    "k_bias": "self_attn.k_proj",
    "v_bias": "self_attn.v_proj",
    "norm_q": "self_attn.q_norm",
    "norm_k": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "norm_ffn": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
IMAGE = "<image_soft_token>"  # Gemma 3's models of text alone have the tokenizer of those that see
SEEING = ("vision_tower", "multi_modal_projector")  # of models that see: not their text part
FUSED = ("model.layers.{}.self_attn.qkv_proj.weight", "model.layers.{}.mlp.gate_up_proj.weight")
# With norms after the block's halves the name of a Llama's second norm means another one.
NAMES_AFTER = NAMES | {
    "norm_after_attention": "post_attention_layernorm",
    "norm_ffn": "pre_feedforward_layernorm",
    "norm_after_ffn": "post_feedforward_layernorm",
}


def source_name(name: str, names: dict = NAMES) -> str:
    """layers.3.q -> model.layers.3.self_attn.q_proj.weight"""
    *layer, last = name.removeprefix("layers.").split(".")
    kind = ".bias" if last.endswith("_bias") else ".weight"
    return "".join(f"model.layers.{number}." for number in layer) + names[last] + kind


def _shards(folder: Path) -> dict[Path, list[str]]:
    """Each file of tensors and the names that the index puts there (none: no index)."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ExportError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
        return {folder / SINGLE: []}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ExportError(f"{folder / INDEX}: expected a weight_map, found none")
    shards: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        # A shard is a plain file name: the index of a stranger must not reach other folders.
        if not isinstance(shard, str) or shard != Path(shard).name or shard in ("", ".", ".."):
            raise ExportError(
                f"{folder / INDEX}: {shard!r} is not the name of a file in the folder"
            )
        if not (folder / shard).is_file():
            raise ExportError(f"{folder / shard}, named in {INDEX}, does not exist")
        shards.setdefault(folder / shard, []).append(name)
    return shards


def _part(path: Path, name: str, entry: dict, data_at: int) -> Part:
    shape, kind = tuple(entry["shape"]), entry["dtype"]
    columns = int(np.prod(shape[1:]))
    offset = data_at + entry["data_offsets"][0]

    def read(start: int, stop: int) -> np.ndarray:
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise ExportError(
                f"tensor {name}: values of type {kind} are not supported; "
                f"known: {', '.join(DTYPES)}"
            )
        size = np.dtype(dtype).itemsize
        values = read_array(path, offset + size * start * columns, (stop - start) * columns, dtype)
        if kind == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        values = values.astype(np.float32, copy=False)
        return values.reshape(stop - start, *shape[1:])

    return Part(name, shape, read)


def _tensors(path: Path) -> dict[str, Part]:
    """The safetensors library checks the header (lengths, overlaps, holes); the values are then
    read with plain reads, see read_array."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ExportError(f"{path}: not a usable safetensors file: {error}") from None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: _part(path, name, entry, 8 + length) for name, entry in header.items()}


def _all_tensors(folder: Path) -> dict[str, Part]:
    found: dict[str, Part] = {}
    for path, expected in _shards(folder).items():
        parts = _tensors(path)
        if expected and set(expected) != set(parts):
            name = min(set(expected) ^ set(parts))
            where = "is not in it" if name in expected else "is in it but not in the index"
            raise ExportError(f"{path}: {INDEX} does not fit: tensor {name} {where}")
        found |= parts
    return found


def _text_tensors(found: dict[str, Part]) -> tuple[dict[str, Part], str]:
    """What a model that sees has for its text, by the names of a model of text; in words, what is
    left out."""
    text, left = {}, dict.fromkeys(SEEING, 0)
    for name, part in found.items():
        bare = name.removeprefix("model.")
        first = bare.split(".")[0]
        if first in left:
            left[first] += 1
            continue
        inner = bare.removeprefix("language_model.")
        if inner != bare and not inner.startswith(("model.", "lm_head.")):
            inner = "model." + inner
        short = inner if inner != bare else name
        if short in text:
            raise ExportError(f"tensors {text[short].name} and {name} are the same part of a model")
        text[short] = part
    return text, " and ".join(f"{count} tensors of {part}" for part, count in left.items() if count)


def _add_one(parts: dict[str, Part]) -> None:
    """Gemma's norms multiply by 1 + w."""
    for name, part in parts.items():
        if ".norm_" in f".{name}":
            read = part.read
            parts[name] = Part(part.name, part.shape, lambda *rows, read=read: 1 + read(*rows))


def _left_out(tokenizer: Tokenizer, rows: int) -> bool:
    """Drops the token of images where the model has no row for it; whether it did."""
    kept = [t for t in tokenizer.added if t.id < rows or t.text != IMAGE.encode()]
    dropped, tokenizer.added = len(kept) < len(tokenizer.added), kept
    return dropped


def load(folder: Path) -> Model:
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder}: config.json is not there; is this a Hugging Face folder?")
    content = read_json(folder / "config.json")
    generation = read_json_if_there(folder / "generation_config.json")
    family = GPT2 if gpt2.is_nanogpt(content) else family_of(content)
    if family == GPT2:
        return gpt2.load(folder, content, generation, _all_tensors(folder))
    with malformed(f"{folder / 'config.json'}"):
        content = text_config(content)
        config = config_from_hf(content, generation, name=folder.resolve().name)
        kind = FAMILIES[family_of(content)]
        implied = kind.defaults["tie_word_embeddings"]
        tied = Settings(content, "config.json").flag("tie_word_embeddings", implied)
    config.check()
    found = _all_tensors(folder)
    if family in TEXT_OF:
        found, left = _text_tensors(found)
        family = f"{family}, the text part" + (f" (left out: {left})" if left else "")
    if kind.fused:
        split_fused(found, config, FUSED, source_name)
    names = NAMES_AFTER if kind.norms_after else NAMES
    parts = collect(found, config, lambda name: source_name(name, names), IGNORED)
    if kind.gemma:
        _add_one(parts)
    if tied and "classifier" in parts:
        check_tied(parts, "config.json says or implies tie_word_embeddings")
    tokenizer = tokenizer_from_hf(folder)
    if tokenizer and _left_out(tokenizer, config.vocab):
        family += f" (left out: {IMAGE}, for which there is no row)"
    chat.set_shape(config, folder, tokenizer)
    return Model(f"Hugging Face, {family}", config, tokenizer, parts, called_untied=not tied)
