"""GGUF's metadata, said as a config.json of transformers would say it. What llama.cpp takes from
the architecture alone is added; what changes the arithmetic and no such family has is refused.
GPT-2's becomes a config in gpt2.py."""

from dataclasses import dataclass

from export import gpt2
from export.config import config_from_hf
from export.errors import ExportError
from export.families import FAMILIES, GPT2, Family
from export.model import Config
from export.settings import Settings


@dataclass(frozen=True)
class Architecture:
    name: str  # of transformers
    interleaved: bool = False  # rows of q and k are in the order of interleaved RoPE
    window: bool = False  # attention.sliding_window counts
    root_layers: int = 0  # the size of so many layers scales scores by (width / heads)^-0.5

    @property
    def gpt2(self) -> bool:
        return self.name == GPT2

    @property
    def family(self) -> Family:
        return Family({}) if self.gpt2 else FAMILIES[self.name]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", interleaved=True, window=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", window=True, root_layers=46),
    "gemma3": Architecture("Gemma3ForCausalLM", window=True, root_layers=62),
    "phi3": Architecture("Phi3ForCausalLM", window=True),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True),
    "gpt2": Architecture(GPT2),
}

# Metadata that changes the arithmetic and that none of these families has.
REFUSED = (
    "expert_count",
    "attention.scale",
    "attention.clamp_kqv",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _refuse(settings: Settings, kind: Architecture, architecture: str, long: bool) -> None:
    keys = list(REFUSED)
    keys += [key for key in CAPS if key not in kind.family.defaults]
    keys += [] if kind.window else ["attention.sliding_window"]
    keys += [] if kind.family.local_rope else ["rope.freq_base_swa"]
    keys += [] if long else ["rope.scaling.attn_factor"]
    for key in keys:
        if settings.values.get(key):
            raise ExportError(
                f"GGUF metadata: {architecture}.{key} {settings.values[key]} is not supported yet"
            )
    settings.refuse(**{"attention.causal": True})


def _scaling(settings: Settings, factors: dict[str, list[float]]) -> dict:
    """What rope_scaling would say; factors: short_factor and long_factor, of longrope."""
    known = ("none", "linear", "yarn", "longrope")
    kind = settings.values.get("rope.scaling.type", "linear")  # llama.cpp's default
    if kind not in known:
        raise settings.wrong("rope.scaling.type", " or ".join(known))
    if factors:
        scale = settings.number("rope.scaling.attn_factor", 1.0)
        return {"rope_type": "longrope", "attention_factor": scale} | factors
    if kind == "longrope":
        raise ExportError("GGUF: longrope without the tensors rope_factors_long and _short")
    if kind == "none":
        return {}
    keys = ("rope.scaling.factor", "rope.scale_linear")
    key = keys[0] if keys[0] in settings.values else keys[1]
    factor = settings.number(key, 1.0)
    if factor and factor < 1:
        raise settings.wrong(key, "at least 1")
    if kind == "yarn":
        told = {
            name: settings.values.get(f"rope.scaling.yarn_{key}")
            for name, key in (
                ("attention_factor", "attn_factor"),
                ("beta_fast", "beta_fast"),
                ("beta_slow", "beta_slow"),
            )
        }
        return {"rope_type": "yarn", "factor": factor} | told
    return {"rope_type": "linear", "factor": factor} if factor > 1 else {}


def _rope(settings: Settings, kind: Architecture, head_dim: int, factors: dict) -> dict:
    dims = settings.integer("rope.dimension_count", head_dim)
    if dims != head_dim and not (kind.family.partial_rope and dims < head_dim):
        raise settings.wrong("rope.dimension_count", f"the head size, {head_dim}")
    rope = {"rope_theta": settings.number("rope.freq_base", 10000.0)}
    if dims < head_dim:
        rope["partial_rotary_factor"] = (dims + 0.5) / head_dim  # of which the whole part counts
    rope |= _scaling(settings, factors)
    if not kind.family.local_rope:
        return rope
    local = settings.number("rope.freq_base_swa", 10000.0)
    return {"full_attention": rope, "sliding_attention": {"rope_theta": local}}


def _windows(settings: Settings, kind: Architecture) -> dict:
    """Windows are in all layers, or the architecture says in which, or a period, or a list does."""
    if not kind.window:
        return {}
    missing = kind.family.defaults["sliding_window"]
    window = settings.values.get("attention.sliding_window", missing)
    if window:
        window = settings.integer("attention.sliding_window", missing)
    told = {"sliding_window": window or None}
    pattern = settings.values.get("attention.sliding_window_pattern")
    if kind.family.full_every and isinstance(pattern, list):
        names = {True: "sliding_attention", False: "full_attention"}
        return told | {"layer_types": [names.get(slides) for slides in pattern]}
    if kind.family.full_every and pattern is not None:
        every = settings.integer("attention.sliding_window_pattern", None)
        return told | {"sliding_window_pattern": every}
    return told


def config_from_gguf(
    metadata: dict, architecture: str, name: str, factors: dict[str, list[float]]
) -> Config:
    """metadata: the keys that begin with the architecture and a dot, without these. factors: of
    longrope, where the file has such tensors. Those of llama3 scaling are applied later."""
    kind, settings = ARCHITECTURES[architecture], Settings(metadata, "GGUF metadata")
    _refuse(settings, kind, architecture, bool(factors))
    if kind.gpt2:
        return gpt2.config_from_gguf(settings, name)
    width, heads, layers, context = (
        settings.integer(key, None)
        for key in ("embedding_length", "attention.head_count", "block_count", "context_length")
    )
    head_dim = settings.integer("attention.key_length", max(width // heads, 1))
    if settings.integer("attention.value_length", head_dim) != head_dim:
        raise settings.wrong("attention.value_length", f"the head size, {head_dim}")
    content = {
        "architectures": [kind.name],
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": settings.integer("feed_forward_length", None),
        "vocab_size": settings.integer("vocab_size", None),
        "max_position_embeddings": context,
        "original_max_position_embeddings": settings.integer(
            "rope.scaling.original_context_length", context
        ),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon", None),
        "rope_parameters": _rope(settings, kind, head_dim, factors),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    content |= {key: settings.number(key, None) for key in CAPS if key in metadata}
    if "query_pre_attn_scalar" in kind.family.defaults:
        content["query_pre_attn_scalar"] = width / heads if layers == kind.root_layers else head_dim
    content |= _windows(settings, kind)
    if kind.interleaved and content.get("sliding_window"):  # llama.cpp has no architecture for it
        content["architectures"] = ["MistralForCausalLM"]
    return config_from_hf(content, {}, name, "GGUF metadata")
