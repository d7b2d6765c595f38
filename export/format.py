"""The layout of model.bin, version 1, as model/format.md has it."""

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from export import chat
from export.model import MAX_STOPS, Config, Model, Part, padded

MAGIC, VERSION, BYTE_ORDER = b"ROOFLINE", 1, 0x01020304
HEADER_BYTES, CONFIG_BYTES, LAYER_BYTES, ENTRY_BYTES = 64, 448, 16, 128
CHECKSUM_AT = 48  # of the head, in the header
NO_ID = 0xFFFFFFFF
NAME_BYTES = 64
F32, BF16 = 0, 1
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_erf": 2}
DTYPES = {"f32": F32, "bf16": BF16}
DTYPE_BYTES = {F32: 4, BF16: 2}


def align(offset: int, step: int) -> int:
    return (offset + step - 1) // step * step


@dataclass
class Tensor:
    """One tensor of the file: parts below one another. checksum is known once it is written."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    parts: list[Part]
    offset: int = 0
    checksum: int = 0

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPE_BYTES[self.dtype]

    def entry(self) -> bytes:
        shape = [*self.shape, 0, 0, 0][:4]
        return struct.pack(
            "<64s2I4Q3Q",
            self.name.encode(),
            self.dtype,
            len(self.shape),
            *shape,
            self.offset,
            self.bytes,
            self.checksum,
        )


class Layout:
    """Where everything stands in the file."""

    def __init__(self, model: Model, dtype: int):
        self.model, self.dtype = model, dtype
        self.tensors = file_tensors(model, dtype)
        self.section = model.tokenizer.section() if model.tokenizer else b""
        self.table_at = (
            HEADER_BYTES
            + CONFIG_BYTES
            + LAYER_BYTES * model.config.layers
            + align(len(self.section), 8)
        )
        self.head_bytes = align(self.table_at + ENTRY_BYTES * len(self.tensors), 256)
        at = self.head_bytes
        for tensor in self.tensors:
            tensor.offset = at
            at = align(at + tensor.bytes, 256)
        self.file_bytes = at

    def head(self) -> bytes:
        """Everything before the first tensor; the tensors' checksums must be known."""
        head = bytearray(self.head_bytes)
        struct.pack_into(
            "<8s2I4Q",
            head,
            0,
            MAGIC,
            VERSION,
            BYTE_ORDER,
            self.file_bytes,
            self.head_bytes,
            len(self.section),
            len(self.tensors),
        )
        config = config_bytes(self.model, self.dtype)
        head[HEADER_BYTES : HEADER_BYTES + CONFIG_BYTES] = config
        at = HEADER_BYTES + CONFIG_BYTES
        for layer in range(self.model.config.layers):
            window, table = self.model.config.layer(layer)
            struct.pack_into("<2I", head, at, window, NO_ID if table is None else table)
            at += LAYER_BYTES
        head[at : at + len(self.section)] = self.section
        for index, tensor in enumerate(self.tensors):
            at = self.table_at + ENTRY_BYTES * index
            head[at : at + ENTRY_BYTES] = tensor.entry()
        struct.pack_into("<Q", head, CHECKSUM_AT, xxhash.xxh64_intdigest(head))
        return bytes(head)


def file_name_field(name: str) -> bytes:
    """At most 63 bytes of whole characters, none of them a control character."""
    clean = "".join(character for character in name if character.isprintable())
    return clean.encode(errors="ignore")[: NAME_BYTES - 1].decode(errors="ignore").encode()


def config_fields(model: Model, dtype: int) -> list[tuple[str, str, object]]:
    """Name, struct format and value of each field, in order."""
    config, tokenizer = model.config, model.tokenizer

    def token(value: int | None) -> int:
        return NO_ID if value is None else value

    add_bos = config.bos is not None and (tokenizer is None or tokenizer.add_bos)
    placement = 0 if not config.norms_after else 1 if config.norms_before else 2
    stops = config.stops + [NO_ID] * (MAX_STOPS - len(config.stops))
    return [
        ("name", "64s", file_name_field(config.name)),
        ("width", "I", config.width),
        ("layers", "I", config.layers),
        ("heads", "I", config.heads),
        ("kv_heads", "I", config.kv_heads),
        ("head_dim", "I", config.head_dim),
        ("ffn", "I", config.padded_ffn),
        ("vocab", "I", config.vocab),
        ("vocab_used", "I", model.vocab_used),
        ("context", "I", config.context),
        ("weight_dtype", "I", dtype),
        ("norm", "I", config.layer_norm),
        ("norm_placement", "I", placement),
        ("norm_eps", "f", config.norm_eps),
        ("qkv_bias", "I", config.qkv_bias),
        ("out_bias", "I", config.out_bias),
        ("ffn_bias", "I", config.ffn_bias),
        ("qk_norm", "I", config.qk_norm),
        ("gated", "I", config.gated),
        ("activation", "I", ACTIVATIONS[config.activation]),
        ("learned_positions", "I", config.learned_positions),
        ("rotary_dims", "I", config.rotary_dims),
        ("rope_tables", "I", len(config.frequencies)),
        ("rope_scale", "f", config.rope_scale),
        ("attention_scale", "f", config.attention_scale or config.head_dim**-0.5),
        ("attention_cap", "f", config.attention_cap),
        ("final_cap", "f", config.final_cap),
        ("embed_scale", "f", config.embed_scale),
        ("tied", "I", model.tied),
        ("experts", "I", 0),
        ("experts_used", "I", 0),
        ("experts_renormalised", "I", 0),
        ("bos", "I", token(config.bos)),
        ("add_bos", "I", add_bos),
        ("pad", "I", token(config.pad)),
        ("unk", "I", token(tokenizer.unk if tokenizer else None)),
        ("stop_count", "I", len(config.stops)),
        *(("stops", "I", stop) for stop in stops),
        ("chat_shape", "I", chat.SHAPES[config.chat]),
        ("chat_bos", "I", config.chat_bos and config.bos is not None),
        ("rope_original", "I", config.rope_original),
    ]


def config_bytes(model: Model, dtype: int) -> bytes:
    _, formats, values = zip(*config_fields(model, dtype), strict=True)
    return struct.pack("<" + "".join(formats), *values).ljust(CONFIG_BYTES, b"\0")


def rope_part(config: Config) -> Part:
    table = config.rope_table.astype(np.float32)
    return Part("rope", table.shape, lambda start, stop: table[start:stop])


def zeros(size: int) -> Part:
    return Part("zeros", (size,), lambda start, stop: np.zeros(stop - start, np.float32))


def file_tensors(model: Model, dtype: int) -> list[Tensor]:
    """The tensors in the order of the file, q, k, v and gate, up together."""
    config, parts = model.config, model.parts
    ffn, width = config.padded_ffn, config.width
    tensors = []
    if len(config.frequencies):
        tensors.append(Tensor("rope", F32, config.rope_table.shape, [rope_part(config)]))

    def matrix(name: str, *stacked: Part) -> None:
        rows = sum(part.shape[0] for part in stacked)
        tensors.append(Tensor(name, dtype, (rows, stacked[0].shape[1]), list(stacked)))

    def vector(name: str, *joined: Part) -> None:
        stacked = joined or (parts[name],)
        tensors.append(Tensor(name, F32, (sum(part.shape[0] for part in stacked),), list(stacked)))

    def norm(name: str, used: bool = True) -> None:
        if used:
            vector(name)
        if used and config.layer_norm:
            vector(f"{name}_bias", parts.get(f"{name}_bias") or zeros(width))

    matrix("embed", parts["embed"])
    if config.learned_positions:
        matrix("positions", parts["positions"])
    ups = ("gate", "up") if config.gated else ("up",)
    for layer in range(config.layers):
        at = f"layers.{layer}."
        norm(at + "norm_attention", config.norms_before)
        matrix(at + "qkv", *(parts[at + name] for name in "qkv"))
        if config.qkv_bias:
            vector(at + "qkv_bias", *(parts[f"{at}{name}_bias"] for name in "qkv"))
        if config.qk_norm:
            vector(at + "norm_q")
            vector(at + "norm_k")
        matrix(at + "out", parts[at + "out"])
        if config.out_bias:
            vector(at + "out_bias")
        norm(at + "norm_after_attention", config.norms_after)
        norm(at + "norm_ffn", config.norms_before)
        matrix(at + "gate_up", *(padded(parts[at + name], ffn, width) for name in ups))
        if config.ffn_bias:
            vector(at + "gate_up_bias", *(padded(parts[f"{at}{name}_bias"], ffn) for name in ups))
        matrix(at + "down", padded(parts[at + "down"], width, ffn))
        if config.ffn_bias:
            vector(at + "down_bias")
        norm(at + "norm_after_ffn", config.norms_after)
    norm("norm_final")
    if not model.tied:
        matrix("classifier", parts["classifier"])
    return tensors
