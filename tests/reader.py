"""Reads model.bin from model/format.md alone, and runs it in float64: the exporter's oracle, which
shares no code with it."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

FIELDS = (
    ("name", "64s"), ("width", "I"), ("layers", "I"), ("heads", "I"), ("kv_heads", "I"),
    ("head_dim", "I"), ("ffn", "I"), ("vocab", "I"), ("vocab_used", "I"), ("context", "I"),
    ("weight_dtype", "I"), ("norm", "I"), ("norm_placement", "I"), ("norm_eps", "f"),
    ("qkv_bias", "I"), ("out_bias", "I"), ("ffn_bias", "I"), ("qk_norm", "I"), ("gated", "I"),
    ("activation", "I"), ("learned_positions", "I"), ("rotary_dims", "I"), ("rope_tables", "I"),
    ("rope_scale", "f"), ("attention_scale", "f"), ("attention_cap", "f"), ("final_cap", "f"),
    ("embed_scale", "f"), ("tied", "I"), ("experts", "I"), ("experts_used", "I"),
    ("experts_renormalised", "I"), ("bos", "I"), ("add_bos", "I"), ("pad", "I"), ("unk", "I"),
    ("stop_count", "I"), ("stops", "64s"), ("chat_shape", "I"),
    ("chat_bos", "I"), ("rope_original", "I"),
)  # fmt: skip
NO_ID = 0xFFFFFFFF


@dataclass
class ModelFile:
    config: dict
    layers: list[tuple[int, int]]  # window, RoPE table
    tokenizer: bytes
    tensors: dict[str, np.ndarray]  # float32, whatever the file has
    raw: dict[str, bytes]


def read_config(data: bytes) -> dict:
    layout = "<" + "".join(kind for _, kind in FIELDS)
    names = [name for name, _ in FIELDS]
    config = dict(zip(names, struct.unpack_from(layout, data), strict=True))
    assert not any(data[struct.calcsize(layout) :])
    assert config["name"].endswith(b"\0")
    config["name"] = config["name"].rstrip(b"\0").decode()
    stops = struct.unpack("<16I", config["stops"])
    config["stops"] = list(stops[: config["stop_count"]])
    assert all(stop == NO_ID for stop in stops[config["stop_count"] :])
    return config


def expected_tensors(c: dict) -> list[tuple[str, int, tuple[int, ...]]]:
    """Name, dtype and shape of each tensor, in order."""
    width, ffn, dtype = c["width"], c["ffn"], c["weight_dtype"]
    query, key = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
    tensors = []
    if c["rope_tables"]:
        rows = c["rope_tables"] * (1 + (c["rope_original"] > 0))
        tensors.append(("rope", 0, (rows, c["rotary_dims"] // 2)))
    tensors.append(("embed", dtype, (c["vocab"], width)))
    if c["learned_positions"]:
        tensors.append(("positions", dtype, (c["context"], width)))
    bias = [("qkv_bias", 0, (query + 2 * key,))] if c["qkv_bias"] else []
    sizes = {0: (), 1: (c["head_dim"], c["head_dim"]), 2: (query, key)}[c["qk_norm"]]
    norms = [(name, 0, (size,)) for name, size in zip(("norm_q", "norm_k"), sizes, strict=False)]
    before = ("norm_attention", "norm_ffn") if c["norm_placement"] < 2 else ()
    after = ("norm_after_attention", "norm_after_ffn") if c["norm_placement"] else ()
    up = ffn * (2 if c["gated"] else 1)

    def bias_if(used, name, size=width):
        return [(name, 0, (size,))] if used else []

    def normed(names):
        kinds = ("", "_bias") if c["norm"] else ("",)
        return [(name + kind, 0, (width,)) for name in names for kind in kinds]

    for layer in range(c["layers"]):
        block = [
            *normed(before[:1]),
            ("qkv", dtype, (query + 2 * key, width)),
            *bias,
            *norms,
            ("out", dtype, (width, query)),
            *bias_if(c["out_bias"], "out_bias"),
            *normed(after[:1]),
            *normed(before[1:]),
            ("gate_up", dtype, (up, width)),
            *bias_if(c["ffn_bias"], "gate_up_bias", up),
            ("down", dtype, (width, ffn)),
            *bias_if(c["ffn_bias"], "down_bias"),
            *normed(after[1:]),
        ]
        tensors += [(f"layers.{layer}.{name}", *rest) for name, *rest in block]
    tensors += normed(["norm_final"])
    return tensors if c["tied"] else [*tensors, ("classifier", dtype, (c["vocab"], width))]


def read(path: Path) -> ModelFile:
    """The whole file, each rule of format.md asserted on the way."""
    data = path.read_bytes()
    magic, version, order, file_bytes, head_bytes, tokenizer_bytes, count, checksum = (
        struct.unpack_from("<8s2I5Q", data)
    )
    assert (magic, version, order) == (b"ROOFLINE", 1, 0x01020304)
    assert file_bytes == len(data) and file_bytes % 256 == 0 and head_bytes % 256 == 0
    assert not any(data[56:64])
    head = data[:48] + bytes(8) + data[56:head_bytes]
    assert xxhash.xxh64_intdigest(head) == checksum

    config = read_config(data[64:512])
    at = 512 + 16 * config["layers"]
    entries = list(struct.iter_unpack("<2I8x", data[512:at]))
    tables = (*range(config["rope_tables"]), NO_ID)
    assert all(table in tables and window <= 1 << 22 for window, table in entries)
    assert not any(any(data[place + 8 : place + 16]) for place in range(512, at, 16))
    tokenizer = data[at : at + tokenizer_bytes]
    table = at + (tokenizer_bytes + 7) // 8 * 8
    assert not any(data[at + tokenizer_bytes : table])
    assert not any(data[table + 128 * count : head_bytes])

    expected = expected_tensors(config)
    assert len(expected) == count
    tensors, raw, end = {}, {}, head_bytes
    for index, (name, dtype, shape) in enumerate(expected):
        entry = struct.unpack_from("<64s2I4Q3Q", data, table + 128 * index)
        size = int(np.prod(shape)) * (2 if dtype else 4)
        offset = (end + 255) // 256 * 256
        full = (*shape, 0, 0, 0)[:4]
        assert entry[0].rstrip(b"\0").decode() == name
        assert entry[1:9] == (dtype, len(shape), *full, offset, size), name
        assert not any(data[end:offset])
        end = offset + size
        raw[name] = data[offset:end]
        assert xxhash.xxh64_intdigest(raw[name]) == entry[9], name
        values = np.frombuffer(raw[name], "<u2" if dtype else "<f4")
        if dtype:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(values).all()
        tensors[name] = values.reshape(shape)
    assert len(data) == (end + 255) // 256 * 256 and not any(data[end:])
    return ModelFile(config, entries, tokenizer, tensors, raw)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bf16, ties to even; still float64."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def cap(x: np.ndarray, limit: float) -> np.ndarray:
    return limit * np.tanh(x / limit) if limit else x


def activated(kind: int, x: np.ndarray) -> np.ndarray:
    if kind == 2:
        return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if kind == 1:
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


class Pass:
    """The parts of a forward pass over one text, in float64."""

    def __init__(self, model: ModelFile, count: int, stored, product, context: int):
        self.c, self.count, self.stored, self.product = model.config, count, stored, product
        self.weights = {name: tensor.astype(np.float64) for name, tensor in model.tensors.items()}
        self.position = np.arange(count)
        second = 0 < self.c["rope_original"] < context
        first = self.c["rope_tables"] * second
        self.tables = self.weights["rope"][first:] if self.c["rope_tables"] else ()

    def norm(self, x, name):
        if name + "_bias" in self.weights:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["norm_eps"]) * self.weights[name]
        return x + self.weights.get(name + "_bias", 0)

    def normed_product(self, x, name, matrix):
        """An RMSNorm's factor comes after the product."""
        weights, factor = self.weights, 1
        if name + "_bias" in weights:
            x = self.norm(x, name)
        elif name in weights:
            factor = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["norm_eps"])
            x = x * weights[name]
        return self.product(self.stored(x), weights[matrix]) * factor

    def norm_heads(self, x, name):
        if not self.c["qk_norm"]:
            return x
        rows = x if self.c["qk_norm"] == 1 else x.reshape(self.count, -1)
        return self.norm(rows, name).reshape(x.shape)

    def rotate(self, x, table):
        if table == NO_ID:
            return x
        half = self.c["rotary_dims"] // 2
        angle = self.position[:, None, None] * self.tables[table]
        cos, sin = np.cos(angle) * self.c["rope_scale"], np.sin(angle) * self.c["rope_scale"]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def attention(self, x, at, window, table):
        c, count, stored = self.c, self.count, self.stored
        heads, kv_heads = c["heads"], c["kv_heads"]
        age = self.position[:, None] - self.position
        unseen = np.where((age < 0) | (age >= (window or count)), -np.inf, 0)
        qkv = self.normed_product(x, at + "norm_attention", at + "qkv")
        qkv = qkv + self.weights.get(at + "qkv_bias", 0)
        qkv = qkv.reshape(count, heads + 2 * kv_heads, c["head_dim"])
        q = stored(self.rotate(self.norm_heads(qkv[:, :heads], at + "norm_q"), table))
        k = self.norm_heads(qkv[:, heads : heads + kv_heads], at + "norm_k")
        k = stored(self.rotate(k, table))
        v = stored(qkv[:, heads + kv_heads :])
        k, v = (np.repeat(kv, heads // kv_heads, axis=1) for kv in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * c["attention_scale"]
        scores = cap(scores, c["attention_cap"]) + unseen
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", shares, v).reshape(count, -1)
        return self.leave(mixed, at + "out", at + "norm_after_attention")

    def feed_forward(self, x, at):
        kind = self.c["activation"]
        hidden = self.normed_product(x, at + "norm_ffn", at + "gate_up")
        hidden = hidden + self.weights.get(at + "gate_up_bias", 0)
        if self.c["gated"]:
            gate, up = np.split(hidden, 2, axis=-1)
            hidden = activated(kind, gate) * up
        else:
            hidden = activated(kind, hidden)
        return self.leave(hidden, at + "down", at + "norm_after_ffn")

    def leave(self, x, matrix, norm):
        """What a half of the block gives to the residual stream."""
        out = self.product(self.stored(x), self.weights[matrix])
        out = out + self.weights.get(matrix + "_bias", 0)
        return self.norm(out, norm) if self.c["norm_placement"] else out


def forward(
    model: ModelFile, ids, stored=lambda x: x, product=np.inner, context=None
) -> np.ndarray:
    """Logits [T, V] in float64, as format.md describes the block, in a context as long as the text
    where none is given. stored is what becomes of a number that a backend keeps between two
    operators: the inputs of products, queries, the cache. product is what becomes of rows [T, K]
    and a matrix [N, K].
    """
    c = model.config
    run = Pass(model, len(ids), stored, product, context or len(ids))
    x = run.weights["embed"][ids] * c["embed_scale"]
    if c["learned_positions"]:
        x = x + run.weights["positions"][: len(ids)]
    for layer, (window, table) in enumerate(model.layers):
        x = x + run.attention(x, f"layers.{layer}.", window, table)
        x = x + run.feed_forward(x, f"layers.{layer}.")
    logits = run.normed_product(x, "norm_final", "embed" if c["tied"] else "classifier")
    return cap(logits, c["final_cap"])


def read_section(data: bytes) -> dict:
    """The tokenizer section, taken apart."""
    kind, pattern, flags, pieces, added, system, model = struct.unpack_from("<6IQ", data)
    at = 32

    def take(size):
        nonlocal at
        at += size
        assert at <= len(data)
        return data[at - size : at]

    lengths = struct.unpack(f"<{pieces}I", take(4 * pieces))
    entries = [struct.unpack("<3I", take(12)) for _ in range(added)]
    section = {
        "kind": kind,
        "pattern": pattern,
        "flags": flags,
        "pieces": [take(length & 0x7FFFFFFF) for length in lengths],
        "unmergeable": [i for i, length in enumerate(lengths) if length >> 31],
        "added": [(token, flags, take(length)) for token, flags, length in entries],
        "model": take(model),
        "system": take(system).decode(),
    }
    assert at == len(data)
    return section
