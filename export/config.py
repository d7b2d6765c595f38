"""Configs of the sources: Hugging Face's config.json and GGUF's metadata; RoPE frequencies."""

import math
from dataclasses import dataclass

import numpy as np

from export.errors import ExportError
from export.model import Config

# What transformers assumes of keys that a config.json leaves out.
LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "sliding_window": None,
    "head_dim": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MISTRAL_DEFAULTS = LLAMA_DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
QWEN2_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
PHI3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "rms_norm_eps": 1e-5,
}
SMOLLM3_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
    "rope_theta": 2000000.0,
}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    defaults: dict
    qkv_bias: bool = False
    qk_norm: bool = False  # of each head
    window_by_flag: bool = False  # sliding_window counts with use_sliding_window, in some layers
    partial_rope: bool = False  # partial_rotary_factor counts
    rope_by_layer: bool = False  # no_rope_layers counts
    fused: bool = False  # one matrix has q, k and v, another gate and up


FAMILIES = {
    "LlamaForCausalLM": Family(LLAMA_DEFAULTS),
    "MistralForCausalLM": Family(MISTRAL_DEFAULTS),
    "Qwen2ForCausalLM": Family(QWEN2_DEFAULTS, qkv_bias=True, window_by_flag=True),
    "Qwen3ForCausalLM": Family(
        QWEN2_DEFAULTS | {"head_dim": 128}, qk_norm=True, window_by_flag=True
    ),
    "Phi3ForCausalLM": Family(PHI3_DEFAULTS, partial_rope=True, fused=True),
    "SmolLM3ForCausalLM": Family(SMOLLM3_DEFAULTS, window_by_flag=True, rope_by_layer=True),
}
TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}  # model_type
ROPE_TYPES = ("default", "linear", "llama3")


def frequencies(dims: int, theta: float) -> np.ndarray:
    """Inverse frequencies, float64 [dims/2], where RoPE turns so many dimensions of a head."""
    if not (math.isfinite(theta) and 1 <= theta <= 1e9):
        raise ExportError(f"config: RoPE theta {theta} is not in 1 to 1e9")
    return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def scale_llama3(
    base: np.ndarray, factor: float, low: float, high: float, original: float
) -> np.ndarray:
    """Wavelengths above original/low are stretched by factor, those below original/high are kept,
    and between the two the frequencies are blended."""
    if not (factor >= 1 and 0 < low < high and original > 0):
        raise ExportError(
            f"config: llama3 RoPE scaling with factor {factor}, low_freq_factor {low}, "
            f"high_freq_factor {high}, original context {original} makes no sense"
        )
    turns = original * base / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * base + (1 - keep) * base / factor


class Settings:
    """A JSON object whose values are checked as they are read."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def wrong(self, key: str, expected: str) -> ExportError:
        found = repr(self.values.get(key))[:100]
        return ExportError(f"{self.where}: {key}: expected {expected}, found {found}")

    def integer(self, key: str, default: int | None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def ids(self, key: str, default: int | None) -> list[int]:
        """An id, a list of ids, or null; negative ones mean none."""
        value = self.values.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.wrong(key, "a token id, a list of them, or null")
        return [i for i in dict.fromkeys(ids) if i >= 0]


def family_of(content: dict) -> str:
    """The architecture, or the error that names those known."""
    named = content.get("architectures")
    family = named[0] if isinstance(named, list) and named else None
    if family is None:
        family = TYPES.get(content.get("model_type"), content.get("model_type"))
    if family not in FAMILIES:
        raise ExportError(
            f"config.json: architecture {family} is not supported; known: {', '.join(FAMILIES)}"
        )
    return family


def _rope_from_hf(settings: Settings, family: Family, head_dim: int) -> tuple[str, np.ndarray]:
    """Reads rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    values = settings.values
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise settings.wrong("rope_parameters", "one set of RoPE parameters")
    given = "rope_theta" in values or "rope_theta" in scaling
    rope = Settings(
        {
            "rope_theta": values.get("rope_theta", family.defaults["rope_theta"]),
            "partial_rotary_factor": values.get("partial_rotary_factor", 1.0),
        }
        | scaling,
        "config.json: RoPE",
    )
    part = rope.number("partial_rotary_factor", None)
    if not (0 < part <= 1 if family.partial_rope else part == 1):
        raise rope.wrong("partial_rotary_factor", "1" if not family.partial_rope else "0 to 1")
    dims = int(head_dim * part)
    if dims % 2:
        raise rope.wrong("partial_rotary_factor", f"an even part of {head_dim} dimensions")
    theta = rope.number("rope_theta", None)
    base = frequencies(dims, theta)
    about = f"theta {theta:g}" + ("" if given else " (not in the config: the family's default)")
    if dims < head_dim:
        about += f", {dims} of {head_dim} dimensions"
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return about, base
    if kind == "linear":
        factor = rope.number("factor", None)
        if factor < 1:
            raise rope.wrong("factor", "at least 1")
        return f"{about}, linear scaling {factor:g}", base / factor
    if kind == "llama3":
        factor = rope.number("factor", None)
        return f"{about}, llama3 scaling {factor:g}", scale_llama3(
            base,
            factor,
            rope.number("low_freq_factor", None),
            rope.number("high_freq_factor", None),
            rope.number("original_max_position_embeddings", None),
        )
    raise ExportError(
        f"config.json: RoPE scaling {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}"
    )


def _list(settings: Settings, key: str, layers: int, known: tuple) -> list:
    """One of the known values for each layer."""
    values = settings.values.get(key)
    if not isinstance(values, list) or len(values) < layers or not all(v in known for v in values):
        raise settings.wrong(key, f"one of {known} for each of {layers} layers")
    return values[:layers]


def _turning(settings: Settings, layers: int) -> tuple[bool, ...]:
    """Whether each layer has RoPE."""
    if settings.values.get("no_rope_layers") is not None:
        return tuple(bool(turns) for turns in _list(settings, "no_rope_layers", layers, (0, 1)))
    interval = settings.integer("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _windows(
    settings: Settings, family: Family, context: int, turning: tuple[bool, ...]
) -> tuple[int, ...]:
    """Each layer's window, or (), where none has one that is shorter than the context."""
    window, layers = (
        settings.values.get("sliding_window", family.defaults["sliding_window"]),
        len(turning),
    )
    if family.window_by_flag and not settings.flag("use_sliding_window"):
        window = None
    if window is None:
        return ()
    window = settings.integer("sliding_window", family.defaults["sliding_window"])
    if window >= context:
        return ()
    sliding = [True] * layers
    if family.window_by_flag and settings.values.get("layer_types") is not None:
        kinds = ("full_attention", "sliding_attention")
        sliding = [kind == kinds[1] for kind in _list(settings, "layer_types", layers, kinds)]
    elif family.rope_by_layer:
        sliding = [not turns for turns in turning]
    elif family.window_by_flag:
        first = settings.values.get("max_window_layers", family.defaults["max_window_layers"])
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise settings.wrong("max_window_layers", "a number of layers")
        sliding = [layer >= first for layer in range(layers)]
    return tuple(window * has for has in sliding) if any(sliding) else ()


def _refuse_unsupported(settings: Settings) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if settings.flag(key):
            raise ExportError(f"config.json: {key} is not supported yet")
    if settings.values.get("hidden_act", "silu") != "silu":
        raise settings.wrong("hidden_act", "silu")
    if settings.values.get("quantization_config"):
        raise ExportError("config.json: quantised checkpoints are not supported; use the original")


def config_from_hf(content: dict, generation: dict, name: str) -> Config:
    """generation: generation_config.json, whose token ids override those of config.json."""
    family = FAMILIES[family_of(content)]
    defaults = family.defaults
    settings = Settings(content, "config.json")

    def integer(key: str) -> int:
        return settings.integer(key, defaults[key])

    width, heads, context = (
        integer(key) for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    kv_heads = content.get("num_key_value_heads", defaults["num_key_value_heads"])
    kv_heads = heads if kv_heads is None else integer("num_key_value_heads")
    if content.get("head_dim", defaults["head_dim"]) is not None:
        head_dim = integer("head_dim")
    elif width % heads:
        raise ExportError(f"config.json: hidden_size {width} is not a multiple of {heads} heads")
    else:
        head_dim = width // heads
    layers = integer("num_hidden_layers")
    turning = _turning(settings, layers) if family.rope_by_layer else (True,) * layers
    _refuse_unsupported(settings)
    ids = Settings(content | {k: v for k, v in generation.items() if v is not None}, "config.json")
    rope, table = _rope_from_hf(settings, family, head_dim)
    bos, pad = (ids.ids(key, defaults[key]) for key in ("bos_token_id", "pad_token_id"))
    return Config(
        name=name,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=integer("intermediate_size"),
        vocab=integer("vocab_size"),
        context=context,
        norm_eps=settings.number("rms_norm_eps", defaults["rms_norm_eps"]),
        rope=rope,
        frequencies=table,
        bos=bos[0] if bos else None,
        pad=pad[0] if pad else None,
        stops=ids.ids("eos_token_id", defaults["eos_token_id"]),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        windows=_windows(settings, family, context, turning),
        turning=turning,
    )


# Metadata of a GGUF that changes the arithmetic and that none of these families has.
GGUF_REFUSED = (
    "expert_count",
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
)


def config_from_gguf(metadata: dict, architecture: str, name: str) -> Config:
    """metadata: the keys that begin with the architecture and a dot, without these. The factors of
    llama3 scaling stand in a tensor of their own."""
    settings = Settings(metadata, "GGUF metadata")
    for key in GGUF_REFUSED:
        if metadata.get(key):
            raise ExportError(
                f"GGUF metadata: {architecture}.{key} {metadata[key]} is not supported yet"
            )
    width, heads = (
        settings.integer(key, None) for key in ("embedding_length", "attention.head_count")
    )
    head_dim = settings.integer("attention.key_length", max(width // heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if settings.integer(key, head_dim) != head_dim:
            raise settings.wrong(key, f"the head size, {head_dim}")
    theta = settings.number("rope.freq_base", LLAMA_DEFAULTS["rope_theta"])
    base = frequencies(head_dim, theta)
    scaling = metadata.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise settings.wrong("rope.scaling.type", "none or linear")
    factor = settings.number("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    if factor and factor < 1:
        raise settings.wrong("rope.scaling.factor", "at least 1")
    return Config(
        name=name,
        width=width,
        layers=settings.integer("block_count", None),
        heads=heads,
        kv_heads=settings.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=settings.integer("feed_forward_length", None),
        vocab=settings.integer("vocab_size", None),
        context=settings.integer("context_length", None),
        norm_eps=settings.number("attention.layer_norm_rms_epsilon", None),
        rope=f"theta {theta:g}" + (f", linear scaling {factor:g}" if factor > 1 else ""),
        frequencies=base / (factor or 1.0),
    )
