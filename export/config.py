"""Hugging Face's config.json: what it says, and what the class of transformers adds to it."""

import numpy as np

from export.errors import ExportError
from export.families import FAMILIES, GPT2, TEXT_OF, TYPES, Family
from export.model import Config
from export.rope import KINDS, rope_from_hf
from export.settings import Settings
from export.writer import to_bf16


def family_of(content: dict) -> str:
    """The architecture, or the error that names those known. transformers goes by model_type, so
    that the two have to agree."""
    settings, named = Settings(content, "config.json"), content.get("architectures", [])
    named = [] if named is None else named
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise settings.wrong("architectures", "a list of names")
    kind = content.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise settings.wrong("model_type", "a name")
    family = named[0] if named else TYPES.get(kind, kind)
    known = (*FAMILIES, *TEXT_OF, GPT2)
    if family not in known:
        raise ExportError(
            f"config.json: architecture {family} is not supported; known: {', '.join(known)}"
        )
    if kind is not None and TYPES.get(kind) != family:
        types = " or ".join(name for name, of in TYPES.items() if of == family)
        raise settings.wrong("model_type", f"{types}, as the architecture is {family}")
    return family


# What someone might add to the config of a model that sees, where nobody reads it.
OF_TEXT = ("rope_scaling", "rope_parameters", "sliding_window", "sliding_window_pattern")
OF_TEXT += ("layer_types",)


def text_config(content: dict) -> dict:
    """The config of a model that sees becomes that of its text part; others stay."""
    settings, family = Settings(content, "config.json"), family_of(content)
    if family not in TEXT_OF:
        return content
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise settings.wrong("text_config", "the config of the text part")
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    keys += ("tie_word_embeddings",)
    whole = {key: content[key] for key in keys if content.get(key) is not None}
    for key in OF_TEXT:
        if content.get(key) not in (None, text.get(key)):
            raise settings.wrong(key, "it in text_config, not beside that")
    _refuse_unsupported(settings)
    return text | whole | {"architectures": [TEXT_OF[family]]}


def _list(settings: Settings, key: str, layers: int, known: tuple) -> list:
    """One of the known values for each layer."""
    values = settings.values.get(key)
    if not isinstance(values, list) or len(values) != layers or not all(v in known for v in values):
        raise settings.wrong(key, f"one of {known} for each of {layers} layers")
    return values


def _turning(settings: Settings, layers: int) -> tuple[bool, ...]:
    """Whether each layer has RoPE."""
    if settings.values.get("no_rope_layers") is not None:
        return tuple(bool(turns) for turns in _list(settings, "no_rope_layers", layers, (0, 1)))
    interval = settings.integer("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


def _sliding(settings: Settings, family: Family, turning: tuple[bool, ...]) -> list[bool]:
    """Which layers look no further back than sliding_window."""
    layers = len(turning)
    by_layer = family.window_by_flag or family.full_every > 0
    if by_layer and settings.values.get("layer_types") is not None:
        return [kind == KINDS[1] for kind in _list(settings, "layer_types", layers, KINDS)]
    if family.full_every:
        key = "sliding_window_pattern"
        every = settings.integer(key, family.full_every)
        if every != family.full_every and not family.local_rope:  # Gemma 2, whose class has no such
            raise settings.wrong(key, f"{family.full_every} or nothing")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if family.rope_by_layer:
        return [not turns for turns in turning]
    if family.window_by_flag:
        first = settings.values.get("max_window_layers", family.defaults["max_window_layers"])
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise settings.wrong("max_window_layers", "a number of layers")
        return [layer >= first for layer in range(layers)]
    return [True] * layers


def _window(settings: Settings, family: Family, context: int) -> int:
    """0: none that is shorter than the context, or of a family that has none."""
    if not (family.window or family.window_by_flag or family.full_every):
        return 0
    window = settings.values.get("sliding_window", family.defaults["sliding_window"])
    if window is None or (family.window_by_flag and not settings.flag("use_sliding_window")):
        return 0
    window = settings.integer("sliding_window", family.defaults["sliding_window"], most=1 << 62)
    return window if window < context else 0


def _cap(settings: Settings, family: Family, key: str) -> float:
    if settings.values.get(key, family.defaults.get(key)) is None:
        return 0.0
    return settings.number(key, family.defaults.get(key))


def _head_dim(settings: Settings, family: Family, width: int, heads: int) -> int:
    if settings.values.get("head_dim", family.defaults["head_dim"]) is not None:
        return settings.integer("head_dim", family.defaults["head_dim"])
    if width % heads:
        raise ExportError(
            f"{settings.where}: hidden_size {width} is not a multiple of {heads} heads"
        )
    return width // heads


def _attention_scale(settings: Settings, family: Family, head_dim: int) -> float:
    scalar, key = float(head_dim), "query_pre_attn_scalar"
    if key in family.defaults:
        scalar = settings.number(key, family.defaults[key])
        if not 1 <= scalar <= 1e6:
            raise settings.wrong(key, "1 to 1e6")
    return scalar**-0.5


def _embed_scale(settings: Settings, width: int) -> float:
    """sqrt(width), in the dtype that the weights were trained in, as transformers rounds it."""
    dtype = settings.values.get("dtype") or settings.values.get("torch_dtype")
    root = np.float32(np.sqrt(width))
    if dtype == "bfloat16":
        return float((to_bf16(root[None]).astype(np.uint32) << 16).view(np.float32)[0])
    return float(np.float16(root)) if dtype == "float16" else float(root)


def _check_activation(settings: Settings, family: Family) -> None:
    """Gemma's is the tanh's GELU, also where Gemma 1's first configs called it gelu."""
    known = {"hidden_act": ("silu",)}
    if "hidden_activation" in settings.values:
        known["hidden_activation"] = ("silu",)
    if family.gemma:
        tanh = ("gelu_pytorch_tanh", None)
        known = {"hidden_activation": tanh, "hidden_act": (*tanh, "gelu")}
    for key, names in known.items():
        if settings.values.get(key, names[0]) not in names:
            raise settings.wrong(key, names[0])


def _refuse_unsupported(settings: Settings) -> None:
    settings.refuse(
        attention_bias=False, mlp_bias=False, use_bidirectional_attention=False, is_causal=True
    )
    if settings.values.get("quantization_config"):
        raise ExportError("config.json: quantised checkpoints are not supported; use the original")


def ids_from_hf(settings: Settings, generation: dict, defaults: dict) -> list[list[int]]:
    """bos, pad and eos. What generation_config.json says goes first."""
    later = Settings(generation, "generation_config.json")
    return [
        (settings if generation.get(key) is None else later).ids(key, defaults[key])
        for key in ("bos_token_id", "pad_token_id", "eos_token_id")
    ]


def config_from_hf(
    content: dict, generation: dict, name: str, where: str = "config.json"
) -> Config:
    """generation: generation_config.json, whose ids go first. where: what messages call content."""
    family = FAMILIES[family_of(content)]
    defaults = family.defaults
    settings = Settings(content, where)

    def integer(key: str) -> int:
        return settings.integer(key, defaults[key])

    width, heads, context = (
        integer(key) for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
    )
    kv_heads = content.get("num_key_value_heads", defaults["num_key_value_heads"])
    kv_heads = heads if kv_heads is None else integer("num_key_value_heads")
    head_dim = _head_dim(settings, family, width, heads)
    layers = integer("num_hidden_layers")
    turning = _turning(settings, layers) if family.rope_by_layer else (True,) * layers
    sliding, window = _sliding(settings, family, turning), _window(settings, family, context)
    _check_activation(settings, family)
    _refuse_unsupported(settings)
    rope = rope_from_hf(settings, family, head_dim, context, sliding)
    bos, pad, stops = ids_from_hf(settings, generation, defaults)
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
        rope=rope.about,
        frequencies=rope.tables,
        rope_scale=rope.scale,
        long_frequencies=rope.long,
        rope_original=rope.original,
        bos=bos[0] if bos else None,
        pad=pad[0] if pad else None,
        stops=stops,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norms_after=family.norms_after,
        norms_before=family.norms_before,
        activation="gelu" if family.gemma else "silu",
        attention_scale=_attention_scale(settings, family, head_dim),
        attention_cap=_cap(settings, family, "attn_logit_softcapping"),
        final_cap=_cap(settings, family, "final_logit_softcapping"),
        embed_scale=_embed_scale(settings, width) if family.gemma else 1.0,
        windows=tuple(window * slides for slides in sliding),
        rope_tables=tuple(
            (slides if family.local_rope else 0) if turns else None
            for slides, turns in zip(sliding, turning, strict=True)
        ),
    )
