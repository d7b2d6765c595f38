"""What a source hands to the writer: a config, a tokenizer, and tensors that are read on demand."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from export.errors import ExportError
from export.tokenizer import Tokenizer

MAX_STOPS = 16


@dataclass
class Config:
    """The fields of model.bin's config that differ between the models supported so far."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of the source; the file's is a multiple of 8
    vocab: int
    context: int
    norm_eps: float
    rope: str  # for people: theta and scaling
    frequencies: np.ndarray  # inverse, float64 [tables, dimensions of a head that turn / 2]
    rope_scale: float = 1.0  # on cosines and sines
    long_frequencies: np.ndarray | None = None  # where the context is longer than rope_original
    rope_original: int = 0
    qkv_bias: bool = False  # on q, k and v
    qk_norm: int = 0  # RMSNorm 1 of each head of q and of k, 2 of all of q and of all of k
    norms_after: bool = False  # of what attention and feed-forward give
    norms_before: bool = True  # of what they take
    activation: str = "silu"  # or gelu, by tanh, or gelu_erf
    layer_norm: bool = False  # in place of RMSNorm
    norm_bias: bool = True  # of LayerNorms; where they have none the file has zeros
    out_bias: bool = False  # after attention
    ffn_bias: bool = False  # on gate, up and down
    gated: bool = True
    learned_positions: bool = False
    attention_scale: float | None = None  # None: head_dim^-0.5
    attention_cap: float = 0.0
    final_cap: float = 0.0
    embed_scale: float = 1.0
    windows: tuple[int, ...] = ()  # of each layer, 0: all positions; (): 0 everywhere
    rope_tables: tuple[int | None, ...] = ()  # of each layer, None: no RoPE; (): 0 everywhere
    bos: int | None = None
    pad: int | None = None
    stops: list[int] = field(default_factory=list)
    chat: str = "none"
    chat_bos: bool = False  # conversations begin with bos

    @property
    def padded_ffn(self) -> int:
        return (self.ffn + 7) // 8 * 8

    @property
    def rotary_dims(self) -> int:
        return 2 * self.frequencies.shape[1]

    @property
    def rope_table(self) -> np.ndarray:
        """The file's: one set of tables, or two below one another."""
        sets = [self.frequencies, self.long_frequencies]
        return np.concatenate([tables for tables in sets if tables is not None])

    def layer(self, number: int) -> tuple[int, int | None]:
        """Its window, and its RoPE table."""
        window = self.windows[number] if self.windows else 0
        table = 0 if len(self.frequencies) else None
        return window, self.rope_tables[number] if self.rope_tables else table

    def check(self) -> None:
        """The limits of model/format.md."""
        for name, value, highest in (
            ("width", self.width, 1 << 16),
            ("layers", self.layers, 1024),
            ("heads", self.heads, 1024),
            ("key/value heads", self.kv_heads, self.heads),
            ("head size", self.head_dim, 512),
            ("feed-forward width", self.ffn, 1 << 20),
            ("vocabulary", self.vocab, 1 << 20),
            ("context", self.context, 1 << 22),
            ("original context", self.rope_original or 1, 1 << 22),
        ):
            if not 1 <= value <= highest:
                raise ExportError(f"config: {name} {value} is not in 1 to {highest}")
        for name, value in (("width", self.width), ("head size", self.head_dim)):
            if value % 8:
                raise ExportError(f"config: {name} {value} is not a multiple of 8")
        if self.heads % self.kv_heads:
            raise ExportError(
                f"config: {self.heads} heads are not a multiple of {self.kv_heads} key/value heads"
            )
        for name, value, lowest in (
            ("factor on RoPE", self.rope_scale, 1e-6),
            ("attention scale", self.attention_scale or 1.0, 1e-6),
            ("cap on attention scores", self.attention_cap, 0),
            ("cap on logits", self.final_cap, 0),
        ):
            if not lowest <= value <= 1e6:
                raise ExportError(f"config: {name} {value} is not in {lowest} to 1e6")
        if not 1e-12 <= self.norm_eps <= 1e-1:
            raise ExportError(f"config: norm epsilon {self.norm_eps} is not in 1e-12 to 1e-1")
        table = self.rope_table.astype(np.float32)
        if len(table) and not 2 <= self.rotary_dims <= self.head_dim:
            raise ExportError(
                f"config: RoPE turns {self.rotary_dims} dimensions of a head of {self.head_dim}"
            )
        if not (np.isfinite(table) & (table > 0)).all():
            raise ExportError("config: a RoPE frequency is not finite and above 0")
        for name, token in (
            ("bos", self.bos),
            ("pad", self.pad),
            *(("eos", i) for i in self.stops),
        ):
            if token is not None and not 0 <= token < self.vocab:
                raise ExportError(f"config: {name} id {token} is not in 0 to {self.vocab - 1}")
        if len(self.stops) > MAX_STOPS:
            raise ExportError(f"config: {len(self.stops)} eos ids, at most {MAX_STOPS} supported")


@dataclass(frozen=True)
class Part:
    """One tensor of the source, as float32: read(start, stop) gives these rows of a matrix, or
    these elements of a vector. name is what the source calls it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]


@dataclass
class Model:
    family: str
    config: Config
    tokenizer: Tokenizer | None
    parts: dict[str, Part]  # by the names of part_shapes
    called_untied: bool = False  # by its config; the tensors decide

    @property
    def tied(self) -> bool:
        return "classifier" not in self.parts

    @property
    def vocab_used(self) -> int:
        return self.tokenizer.id_count if self.tokenizer else self.config.vocab

    def check(self) -> None:
        self.config.check()
        if self.vocab_used > self.config.vocab:
            raise ExportError(
                f"the tokenizer has {self.vocab_used} ids, but the model's vocabulary "
                f"has {self.config.vocab} rows"
            )
        bos, stop = self.config.bos, min(self.config.stops, default=None)
        for name, token in (("bos", bos), ("eos", stop)):
            if token is not None and token >= self.vocab_used:
                raise ExportError(
                    f"the tokenizer has {self.vocab_used} ids, and {name}, {token}, is none of "
                    "them: is it another model's?"
                )


def part_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of such a model by our names, before q, k, v and gate, up are put together."""
    width, ffn, size = config.width, config.ffn, config.head_dim
    query, key = config.heads * size, config.kv_heads * size
    biases = (("q_bias", (query,)), ("k_bias", (key,)), ("v_bias", (key,)))
    normed = (size, size) if config.qk_norm == 1 else (query, key)
    norms = (("norm_q", normed[:1]), ("norm_k", normed[1:]))
    vector = (width,)
    ups = ("gate", "up") if config.gated else ("up",)

    def norm(name: str, used: bool = True) -> tuple:
        kinds = ("", "_bias") if config.layer_norm and config.norm_bias else ("",)
        return tuple((name + kind, vector) for kind in kinds) if used else ()

    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, width)}
    if config.learned_positions:
        shapes["positions"] = (config.context, width)
    for layer in range(config.layers):
        for name, shape in (
            *norm("norm_attention", config.norms_before),
            ("q", (query, width)),
            ("k", (key, width)),
            ("v", (key, width)),
            *(biases if config.qkv_bias else ()),
            *(norms if config.qk_norm else ()),
            ("out", (width, query)),
            *((("out_bias", vector),) if config.out_bias else ()),
            *norm("norm_after_attention", config.norms_after),
            *norm("norm_ffn", config.norms_before),
            *((name, (ffn, width)) for name in ups),
            *((f"{name}_bias", (ffn,)) for name in ups if config.ffn_bias),
            ("down", (width, ffn)),
            *((("down_bias", vector),) if config.ffn_bias else ()),
            *norm("norm_after_ffn", config.norms_after),
        ):
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes | dict(norm("norm_final")) | {"classifier": (config.vocab, width)}


def collect(
    found: dict[str, Part], config: Config, source_name: Callable[[str], str], ignored=()
) -> dict[str, Part]:
    """Sorts a source's tensors under our names. All but the classifier have to be there, with the
    shape that the config says, and none may be left over: an unknown tensor is a part of the model
    that the file would silently lack."""
    left, parts = dict(found), {}
    for name, shape in part_shapes(config).items():
        part = left.pop(source_name(name), None)
        if part is None:
            if name == "classifier":
                continue
            raise ExportError(f"tensor {source_name(name)} is missing")
        if part.shape != shape:
            raise ExportError(
                f"tensor {part.name}: expected shape {list(shape)}, found {list(part.shape)}"
            )
        parts[name] = part
    unused = [name for name in left if not name.endswith(tuple(ignored))]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise ExportError(
            f"tensors that a model of this config does not have: {', '.join(unused[:3])}{more}"
        )
    return parts


def half_split(part: Part, heads: int) -> Part:
    """Rows of q or k in the order of interleaved RoPE, pairs (2i, 2i + 1) in each head, in the
    order of half-split RoPE, (i, i + D/2)."""
    size = part.shape[0] // heads
    order = np.arange(size).reshape(-1, 2).T.reshape(-1)

    def read(start: int, stop: int) -> np.ndarray:
        first, last = start // size, (stop + size - 1) // size
        rows = part.read(first * size, last * size)
        rows = rows.reshape(last - first, size, -1)[:, order].reshape(rows.shape)
        return rows[start - first * size : stop - first * size]

    return Part(part.name, part.shape, read)


def transposed(part: Part) -> Part:
    """A matrix that the source has as [inputs, outputs]. A read takes all of it from the disk."""
    if len(part.shape) != 2:
        return part  # whoever expects a matrix says so
    rows, columns = part.shape
    name = f"{part.name} (transposed)"
    return Part(name, (columns, rows), lambda start, stop: part.read(0, rows)[:, start:stop].T)


def split_fused(
    found: dict[str, Part],
    config: Config,
    fused: tuple[str, str],
    source_name: Callable[[str], str],
) -> None:
    """Some files have q, k and v in one matrix, and gate and up in another. fused: their names,
    with {} for the layer."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    pieces = ({"q": query, "k": key, "v": key}, {"gate": config.ffn, "up": config.ffn})
    for layer in range(config.layers):
        for template, rows in zip(fused, pieces, strict=True):
            name, first = template.format(layer), 0
            part = found.pop(name, None)
            if part is None:
                raise ExportError(f"tensor {name} is missing")
            shape = (sum(rows.values()), config.width)
            if part.shape != shape:
                raise ExportError(
                    f"tensor {part.name}: expected shape {list(shape)}, found {list(part.shape)}"
                )
            for piece, count in rows.items():
                place = source_name(f"layers.{layer}.{piece}")
                if place in found:
                    raise ExportError(f"tensor {place} is there, but {name} has it too")
                found[place] = rows_of(part, first, count)
                first += count


def rows_of(part: Part, first: int, count: int) -> Part:
    """Some rows of a matrix, or elements of a vector."""
    shape = (count, *part.shape[1:])
    return Part(part.name, shape, lambda start, stop: part.read(first + start, first + stop))


def padded(part: Part, *shape: int) -> Part:
    """The matrix with zeros below and to the right, the vector with zeros behind."""
    if part.shape == shape:
        return part

    def read(start: int, stop: int) -> np.ndarray:
        out = np.zeros((stop - start, *shape[1:]), np.float32)
        last = min(stop, part.shape[0])
        if start < last:
            out[: last - start, *map(slice, part.shape[1:])] = part.read(start, last)
        return out

    return Part(part.name, shape, read)


def check_tied(parts: dict[str, Part], who: str) -> None:
    """A classifier that is called tied has to be the embedding, and is left out."""
    embed, classifier = parts["embed"], parts.pop("classifier")
    step = max(1, (1 << 22) // embed.shape[1])
    for start in range(0, embed.shape[0], step):
        rows = start, min(start + step, embed.shape[0])
        if not np.array_equal(embed.read(*rows), classifier.read(*rows)):
            raise ExportError(
                f"{who}, but {classifier.name} differs from "
                f"{embed.name} in rows {rows[0]} to {rows[1] - 1}"
            )
