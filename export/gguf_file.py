"""GGUF files, through the gguf package; blocks of every type that the package can dequantise."""

from pathlib import Path

import gguf
import numpy as np

from export import chat, gpt2
from export.errors import ExportError, malformed
from export.files import read_array
from export.gguf_config import ARCHITECTURES, config_from_gguf
from export.model import Config, Model, Part, collect, half_split, split_fused
from export.tokenizer import Tokenizer, tokenizer_from_gguf

NAMES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm_final": "output_norm",
    "classifier": "output",
    "norm_attention": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "norm_q": "attn_q_norm",
    "norm_k": "attn_k_norm",
    "out": "attn_output",
    "norm_after_attention": "post_attention_norm",
    "norm_ffn": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "norm_after_ffn": "post_ffw_norm",
}
FUSED = ("blk.{}.attn_qkv.weight", "blk.{}.ffn_up.weight")

# A GGUF names one eos id; chat models end their turns with these, which are found by their text.
STOP_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
)


class Reader(gguf.GGUFReader):
    """The package's reader takes what is left where a file ends too early, and then counts on;
    this one says so."""

    def _get(self, offset, dtype, count=1, override_order=None):
        wanted = int(offset) + np.dtype(dtype).itemsize * int(count)
        if wanted > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, but {wanted} bytes are described")
        return super()._get(offset, dtype, count, override_order)


def source_name(name: str) -> str:
    """layers.3.q -> blk.3.attn_q.weight"""
    *layer, last = name.removeprefix("layers.").split(".")
    kind = ".bias" if last.endswith("_bias") else ".weight"
    return "".join(f"blk.{number}." for number in layer) + NAMES[last.removesuffix("_bias")] + kind


def _open(path: Path) -> Reader:
    reader = Reader(path)
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ExportError(f"{path}: big-endian GGUF files are not supported")
    if _value(reader, "split.count", 1) > 1:
        raise ExportError(
            f"{path}: one part of several; merge them first (llama-gguf-split --merge)"
        )
    architecture = _value(reader, "general.architecture", None)
    if architecture not in ARCHITECTURES:
        raise ExportError(
            f"{path}: architecture {architecture} is not supported; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    _check_offsets(path, reader)
    return reader


def _check_offsets(path: Path, reader: Reader) -> None:
    """Tensors lie in the header's order, each as soon after the one before as general.alignment
    allows."""
    expected, step = 0, int(reader.alignment)
    for tensor in reader.tensors:
        found = int(tensor.field.parts[-1][0])
        if found != expected:
            raise ExportError(
                f"{path}: tensor {tensor.name}: expected offset {expected} (in order, at multiples "
                f"of {step}), found {found}; is the file damaged?"
            )
        expected += -(-int(tensor.n_bytes) // step) * step


def _value(reader: Reader, key: str, default):
    item = reader.get_field(key)
    return default if item is None else item.contents()


def _part(path: Path, tensor: gguf.ReaderTensor) -> Part:
    """ggml's first dimension is the contiguous one, our last."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    columns = shape[-1]
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    kind = tensor.tensor_type.name

    def read(start: int, stop: int) -> np.ndarray:
        if len(shape) == 1:
            return read_rows(0, 1)[0, start:stop]
        return read_rows(start, stop)

    def read_rows(start: int, stop: int) -> np.ndarray:
        row_bytes = columns // block * block_bytes
        offset = tensor.data_offset + start * row_bytes
        data = read_array(path, offset, (stop - start) * row_bytes, "u1")
        try:
            rows = gguf.dequantize(data.reshape(stop - start, row_bytes), tensor.tensor_type)
        except NotImplementedError:
            raise ExportError(
                f"tensor {tensor.name}: values of type {kind} are not supported"
            ) from None
        return rows.astype(np.float32, copy=False)

    return Part(tensor.name, shape, read)


def _longrope_factors(found: dict[str, Part]) -> dict[str, list[float]]:
    parts = {kind: found.pop(f"rope_factors_{kind}.weight", None) for kind in ("short", "long")}
    return {
        f"{kind}_factor": part.read(0, part.shape[0]).astype(float).tolist()
        for kind, part in parts.items()
        if part
    }


def _apply_rope_factors(config: Config, part: Part) -> None:
    """Converters write llama3 scaling as what to divide each frequency by."""
    if part.shape != config.frequencies.shape[1:]:
        raise ExportError(
            f"tensor {part.name}: expected shape {list(config.frequencies.shape[1:])}, "
            f"found {list(part.shape)}"
        )
    factors = part.read(0, part.shape[0]).astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ExportError(f"tensor {part.name}: a factor is not finite and above 0")
    config.frequencies = config.frequencies / factors
    config.rope += f", scaled by {part.name}"


def _set_tokens(config: Config, reader: Reader, tokenizer: Tokenizer | None) -> None:
    def token(name: str) -> int | None:
        value = _value(reader, f"tokenizer.ggml.{name}_token_id", None)
        if value is not None and type(value) is not int:
            raise ExportError(
                f"GGUF: tokenizer.ggml.{name}_token_id: expected an id, found {value!r}"
            )
        return value

    config.bos, config.pad = token("bos"), token("padding")
    stops = [token(name) for name in ("eos", "eot", "eom")]
    if tokenizer:
        stops += [tokenizer.id_of_control(text) for text in STOP_TEXTS]
    config.stops = list(dict.fromkeys(stop for stop in stops if stop is not None))
    template = _value(reader, "tokenizer.chat_template", "")
    config.chat, config.chat_bos = chat.shape_of(template), chat.has_bos(template)


def load(path: Path) -> Model:
    with malformed(f"{path}: the GGUF file"):
        return _load(path)


def _load(path: Path) -> Model:
    reader = _open(path)
    architecture = _value(reader, "general.architecture", None)
    kind = ARCHITECTURES[architecture]
    metadata = {
        key.removeprefix(f"{architecture}."): item.contents()
        for key, item in reader.fields.items()
        if key.startswith(f"{architecture}.")
    }
    found = {tensor.name: _part(path, tensor) for tensor in reader.tensors}
    embed = found.get("token_embd.weight")
    if embed is None:
        raise ExportError("tensor token_embd.weight is missing: is this a tokenizer alone?")
    metadata.setdefault("vocab_size", embed.shape[0])
    name = _value(reader, "general.name", None) or path.stem
    if not isinstance(name, str):
        raise ExportError(f"GGUF: general.name: expected a text, found {name!r}")
    longrope = {} if kind.gpt2 else _longrope_factors(found)
    config = config_from_gguf(metadata, architecture, name, longrope)
    factors = found.pop("rope_freqs.weight", None)
    if factors:
        _apply_rope_factors(config, factors)
    tokenizer = tokenizer_from_gguf(reader)
    _set_tokens(config, reader, tokenizer)
    if kind.family.fused:
        split_fused(found, config, FUSED, source_name)
    if kind.gpt2:
        config.check()
        gpt2.split_qkv(found, config, "blk.{}.attn_qkv", source_name)
    parts = collect(found, config, source_name)
    for layer in range(config.layers if kind.interleaved else 0):
        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            name = f"layers.{layer}.{name}"
            parts[name] = half_split(parts[name], heads)
    return Model(f'GGUF, architecture "{architecture}"', config, tokenizer, parts)
