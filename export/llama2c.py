"""llama2.c's .bin files: v0 (float32, no magic), v1 (float32) and v2 (int8 in groups).

All three are interleaved Llamas with theta 10000 and epsilon 1e-5, and say nothing of tokens: ids
1 and 2 are bos and eos, and bos also ends a text, as stories were trained one after the other."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from export.errors import ExportError
from export.files import read_array
from export.model import Config, Model, Part, half_split, part_shapes
from export.rope import frequencies
from export.tokenizer import tokenizer_from_llama2c

MAGIC = 0x616B3432
V0_HEADER_BYTES, HEADER_BYTES = 28, 256
THETA, EPS, BOS, EOS = 10000.0, 1e-5, 1, 2

# The order of the files; names without a dot stand once, the others are all layers in a row.
NORMS = (".norm_attention", ".norm_ffn", "norm_final")
MATRICES = ("embed", ".q", ".k", ".v", ".out", ".gate", ".down", ".up")
V0_ORDER = (
    *("embed", ".norm_attention", ".q", ".k", ".v", ".out"),
    *(".norm_ffn", ".gate", ".down", ".up", "norm_final"),
)


@dataclass
class Header:
    version: int
    bytes: int
    config: Config
    tied: bool
    group: int = 0  # of v2


def read_header(path: Path) -> Header:
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
    if len(data) < V0_HEADER_BYTES:
        raise ExportError(f"{path}: {len(data)} bytes, too short for any model")
    version, at = 0, 0
    if struct.unpack_from("<I", data)[0] == MAGIC:
        (version,), at = struct.unpack_from("<i", data, 4), 8
        if version not in (1, 2):
            raise ExportError(f"{path}: llama2.c version {version}, expected 1 or 2 (or 0)")
        if len(data) < HEADER_BYTES:
            raise ExportError(f"{path}: cut short in its header")
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data, at)
    tied = vocab > 0
    group = 0
    if version:
        tied = bool(data[36])
        (group,) = struct.unpack_from("<i", data, 37) if version == 2 else (0,)
    elif vocab < 0:
        vocab = -vocab
    if min(dim, hidden, layers, heads, kv_heads, vocab, context) < 1 or dim % heads:
        raise ExportError(f"{path}: not a llama2.c model, nor anything else that is known")
    if version == 2 and (group < 1 or dim % group):
        raise ExportError(f"{path}: groups of {group} values do not divide the width, {dim}")
    head_dim = dim // heads
    config = Config(
        name=path.stem,
        width=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=hidden,
        vocab=vocab,
        context=context,
        norm_eps=EPS,
        rope=f"theta {THETA:g}",
        frequencies=frequencies(head_dim, THETA)[None],
        bos=BOS,
        stops=[BOS, EOS],
    )
    config.check()
    return Header(version, HEADER_BYTES if version else V0_HEADER_BYTES, config, tied, group)


def tensor_order(header: Header) -> Iterator[str]:
    """The names of part_shapes in the order of the file."""
    order = V0_ORDER if header.version == 0 else NORMS + MATRICES
    for name in order:
        if name.startswith("."):
            yield from (f"layers.{layer}{name}" for layer in range(header.config.layers))
        else:
            yield name
    if not header.tied:
        yield "classifier"


def _float_part(path: Path, name: str, shape: tuple[int, ...], offset: int) -> Part:
    columns = int(np.prod(shape[1:]))

    def read(start: int, stop: int) -> np.ndarray:
        values = read_array(path, offset + 4 * start * columns, (stop - start) * columns, "<f4")
        return values.reshape(stop - start, *shape[1:])

    return Part(name, shape, read)


def _int8_part(path: Path, name: str, shape: tuple[int, ...], offset: int, group: int) -> Part:
    """int8 values, then a float32 scale for each group of them; a group may straddle rows."""
    rows, columns = shape
    scales_at = offset + rows * columns

    def read(start: int, stop: int) -> np.ndarray:
        first, last = start * columns, stop * columns
        values = read_array(path, offset + first, last - first, "i1").astype(np.float32)
        low, high = first // group, (last + group - 1) // group
        scales = read_array(path, scales_at + 4 * low, high - low, "<f4")
        scales = np.repeat(scales, group)[first - low * group :][: last - first]
        # llama2.c's exporter divides a group of zeros by zero: its scale is NaN, its values are 0.
        values = np.where(values == 0, values, values * scales)
        return values.reshape(stop - start, columns)

    return Part(name, shape, read)


def load(path: Path, tokenizer_path: Path | None) -> Model:
    header = read_header(path)
    config = header.config
    shapes = part_shapes(config)
    parts, at = {}, header.bytes
    for name in tensor_order(header):
        shape = shapes[name]
        count = int(np.prod(shape))
        if header.version == 2 and len(shape) == 2:
            if count % header.group:
                raise ExportError(f"tensor {name}: groups of {header.group} do not divide it")
            parts[name] = _int8_part(path, name, shape, at, header.group)
            at += count + 4 * (count // header.group)
        else:
            parts[name] = _float_part(path, name, shape, at)
            at += 4 * count
        if name == "norm_final" and header.version == 0:
            at += 4 * config.context * config.head_dim  # tables of RoPE, which nobody reads
    if path.stat().st_size != at:
        raise ExportError(
            f"{path}: a llama2.c model of this header has {at} bytes, found {path.stat().st_size}"
        )
    for layer in range(config.layers):
        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            name = f"layers.{layer}.{name}"
            parts[name] = half_split(parts[name], heads)
    tokenizer = tokenizer_from_llama2c(tokenizer_path, config.vocab) if tokenizer_path else None
    return Model(f"llama2.c version {header.version}", config, tokenizer, parts)
