"""llm.c's checkpoints of GPT-2: 256 int32, of which eight are used, then the tensors in the order
below, each for all layers in a row, all in one dtype. Matrices are [outputs, inputs]; the
embedding's rows are padded, and the padding is left out."""

import struct
from pathlib import Path

import numpy as np

from export.errors import ExportError
from export.files import read_array
from export.gpt2 import END_OF_TEXT, block_config, set_end_of_text
from export.model import Config, Model, Part, part_shapes
from export.tokenizer import AddedToken, Tokenizer, tokenizer_from_hf

MAGIC, TOKENIZER_MAGIC = 20240326, 20240328
HEADER_BYTES = 1024
DTYPES = {3: "<f4", 5: "<u2"}  # by version; 5 is bf16

# What stands together in a line is one tensor of the file.
ORDER = (
    ("embed",),
    ("positions",),
    ("norm_attention",),
    ("norm_attention_bias",),
    ("q", "k", "v"),
    ("q_bias", "k_bias", "v_bias"),
    ("out",),
    ("out_bias",),
    ("norm_ffn",),
    ("norm_ffn_bias",),
    ("up",),
    ("up_bias",),
    ("down",),
    ("down_bias",),
    ("norm_final",),
    ("norm_final_bias",),
)


def is_checkpoint(start: bytes) -> bool:
    """By the first bytes of a file."""
    return start[:4] == struct.pack("<i", MAGIC)


def read_header(path: Path) -> tuple[int, int, Config]:
    """Version, rows of the embedding with its padding, and what the model is."""
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        raise ExportError(f"{path}: cut short in its header")
    _, version, context, vocab, layers, heads, width, rows = struct.unpack_from("<8i", data)
    if version not in DTYPES:
        known = " or ".join(map(str, DTYPES))
        raise ExportError(f"{path}: llm.c version {version}, expected {known}")
    if min(context, vocab, layers, heads, width) < 1 or rows < vocab:
        raise ExportError(
            f"{path}: llm.c's header makes no sense: context {context}, vocabulary {vocab} in "
            f"{rows} rows, {layers} layers, {heads} heads, width {width}"
        )
    config = block_config(width, heads, name=path.stem, layers=layers, vocab=vocab, context=context)
    config.check()
    return version, rows, config


def _part(path: Path, name: str, shape: tuple[int, ...], offset: int, dtype: str) -> Part:
    columns, size = int(np.prod(shape[1:])), np.dtype(dtype).itemsize

    def read(start: int, stop: int) -> np.ndarray:
        values = read_array(path, offset + size * start * columns, (stop - start) * columns, dtype)
        if size == 2:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(stop - start, *shape[1:])

    return Part(name, shape, read)


def tokenizer_from_llmc(path: Path) -> Tokenizer:
    """llm.c's gpt2_tokenizer.bin: 256 u32, of which four are used, then the bytes of each id, the
    lower ids being the earlier merges. Version 1 does not say which one ends a text."""
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        raise ExportError(f"{path}: cut short in its header")
    magic, version, count, end = struct.unpack_from("<4I", data)
    if magic != TOKENIZER_MAGIC or version not in (1, 2):
        raise ExportError(
            f"{path}: expected a tokenizer.json, a folder that has it, or llm.c's tokenizer of "
            f"version 1 or 2"
        )
    end = END_OF_TEXT if version == 1 else end
    pieces, at = [], HEADER_BYTES
    while len(pieces) < count and at < len(data):
        length = data[at]
        pieces.append(data[at + 1 : at + 1 + length])
        at += 1 + length
    if len(pieces) != count or at != len(data) or end >= count:
        raise ExportError(
            f"{path}: expected {count} pieces, id {end} among them, found {len(pieces)} in "
            f"{len(data)} bytes"
        )
    added = AddedToken(end, pieces[end], control=True)
    pieces[end] = b""
    return Tokenizer(pieces, pattern="gpt2", added=[added])


def _tokenizer(path: Path) -> Tokenizer:
    """From a tokenizer.json, from the folder that has one, or from llm.c's own file."""
    if not path.is_dir() and path.name != "tokenizer.json":
        return tokenizer_from_llmc(path)
    folder = path if path.is_dir() else path.parent
    tokenizer = tokenizer_from_hf(folder)
    if tokenizer is None:
        raise ExportError(f"{folder}: there is no tokenizer.json")
    return tokenizer


def load(path: Path, tokenizer_path: Path | None) -> Model:
    version, rows, config = read_header(path)
    shapes, size = part_shapes(config), np.dtype(DTYPES[version]).itemsize
    parts, at = {}, HEADER_BYTES
    for group in ORDER:
        in_layer = f"layers.0.{group[0]}" in shapes
        for layer in range(config.layers if in_layer else 1):
            for name in group:
                name = f"layers.{layer}.{name}" if in_layer else name
                parts[name] = _part(path, name, shapes[name], at, DTYPES[version])
                at += size * int(np.prod(shapes[name]))
        if group == ("embed",):
            at += size * (rows - config.vocab) * config.width
    if path.stat().st_size != at:
        raise ExportError(
            f"{path}: an llm.c checkpoint of this header has {at} bytes, "
            f"found {path.stat().st_size}"
        )
    tokenizer = _tokenizer(tokenizer_path) if tokenizer_path else None
    set_end_of_text(config, tokenizer)
    return Model(f"llm.c version {version}", config, tokenizer, parts)
