"""GPT-2: folders of Hugging Face, whose matrices are [inputs, outputs], and folders with nanoGPT's
weights in model.safetensors and its model_args in config.json; what its GGUF files say."""

from pathlib import Path

import numpy as np

from export import chat
from export.config import ids_from_hf
from export.errors import ExportError, malformed
from export.families import GPT2
from export.model import Config, Model, Part, check_tied, collect, rows_of, transposed
from export.settings import Settings
from export.tokenizer import Tokenizer, tokenizer_from_hf

END_OF_TEXT = 50256  # of GPT-2's vocabulary
TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
NANOGPT = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias", "dropout")

# Names that other classes of transformers have, and this one takes.
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

# Buffers that are computed, not learned.
IGNORED = (".attn.bias", ".attn.masked_bias")

NAMES = {
    "embed": "wte",
    "positions": "wpe",
    "norm_final": "ln_f",
    "classifier": "lm_head",
    "norm_attention": "ln_1",
    "q": "attn.q",
    "k": "attn.k",
    "v": "attn.v",
    "out": "attn.c_proj",
    "norm_ffn": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def source_name(name: str) -> str:
    """layers.3.out_bias -> h.3.attn.c_proj.bias"""
    *layer, last = name.removeprefix("layers.").split(".")
    kind = ".bias" if last.endswith("_bias") else ".weight"
    return "".join(f"h.{number}." for number in layer) + NAMES[last.removesuffix("_bias")] + kind


def is_nanogpt(content: dict) -> bool:
    return "block_size" in content and not content.keys() & {"architectures", "model_type"}


def block_config(width: int, heads: int, **others) -> Config:
    """The config of a model with GPT-2's block."""
    if width % heads:
        raise ExportError(f"config: width {width} is not a multiple of {heads} heads")
    fields = {
        "kv_heads": heads,
        "head_dim": width // heads,
        "ffn": 4 * width,
        "norm_eps": 1e-5,
        "rope": "none",
        "frequencies": np.empty((0, 0)),
        "layer_norm": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
        "gated": False,
        "activation": "gelu",
        "learned_positions": True,
    }
    return Config(width=width, heads=heads, **fields | others)


def _without_aliases(content: dict) -> dict:
    own = {ALIASES[key]: v for key, v in content.items() if key in ALIASES and v is not None}
    for alias, key in ALIASES.items():
        if key in own and content.get(key, own[key]) != own[key]:
            raise Settings(content, "config.json").wrong(alias, f"that of {key}, {content[key]}")
    return content | own


def _config_from_hf(content: dict, generation: dict, name: str) -> Config:
    content = _without_aliases(content)
    settings = Settings(content, "config.json")
    settings.refuse(
        scale_attn_by_inverse_layer_idx=False, add_cross_attention=False, is_causal=True
    )
    if content.get("quantization_config"):
        raise ExportError("config.json: quantised checkpoints are not supported; use the original")
    activation = content.get("activation_function", TANH[0])
    if activation not in (*TANH, "gelu"):
        raise settings.wrong("activation_function", f"gelu or {TANH[0]}")
    width, vocab = settings.integer("n_embd", 768), settings.integer("vocab_size", 50257)
    ffn = 4 * width if content.get("n_inner") is None else settings.integer("n_inner", None)
    end = END_OF_TEXT if vocab > END_OF_TEXT else None
    defaults = {"bos_token_id": end, "pad_token_id": None, "eos_token_id": end}
    bos, pad, stops = ids_from_hf(settings, generation, defaults)
    scaled = content.get("scale_attn_weights") is None or settings.flag("scale_attn_weights")
    return block_config(
        width,
        settings.integer("n_head", 12),
        name=name,
        layers=settings.integer("n_layer", 12),
        ffn=ffn,
        vocab=vocab,
        context=settings.integer("n_positions", 1024),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        activation="gelu_erf" if activation == "gelu" else "gelu",
        attention_scale=None if scaled else 1.0,
        bos=bos[0] if bos else None,
        pad=pad[0] if pad else None,
        stops=stops,
    )


def _config_from_nanogpt(content: dict, name: str) -> Config:
    """Its GELU is the exact one. bias: whether products and norms have biases."""
    settings = Settings(content, "config.json")
    strange = sorted(content.keys() - set(NANOGPT))
    if strange:
        raise ExportError(
            f"config.json: {strange[0]} is not a setting of nanoGPT's; known: {', '.join(NANOGPT)}"
        )
    biases = content.get("bias") is None or settings.flag("bias")
    return block_config(
        settings.integer("n_embd", None),
        settings.integer("n_head", None),
        name=name,
        layers=settings.integer("n_layer", None),
        vocab=settings.integer("vocab_size", None),
        context=settings.integer("block_size", None),
        activation="gelu_erf",
        norm_bias=biases,
        qkv_bias=biases,
        out_bias=biases,
        ffn_bias=biases,
    )


def config_from_gguf(settings: Settings, name: str) -> Config:
    """settings: the keys that begin with the architecture and a dot, without these."""
    return block_config(
        settings.integer("embedding_length", None),
        settings.integer("attention.head_count", None),
        name=name,
        layers=settings.integer("block_count", None),
        ffn=settings.integer("feed_forward_length", None),
        vocab=settings.integer("vocab_size", None),
        context=settings.integer("context_length", None),
        norm_eps=settings.number("attention.layer_norm_epsilon", None),
    )


def set_end_of_text(config: Config, tokenizer: Tokenizer | None) -> None:
    """Sources that say nothing of ids: one separates texts, and stands before and after each."""
    if tokenizer:
        end = tokenizer.id_of_control("<|endoftext|>")
    else:
        end = END_OF_TEXT if config.vocab > END_OF_TEXT else None
    config.bos, config.stops = end, [] if end is None else [end]


def split_qkv(found: dict[str, Part], config: Config, fused: str, name_of) -> None:
    """q, k and v out of one matrix, and their biases out of one vector. fused: its name but for the
    layer and the kind; name_of: from our names to the source's."""
    width = config.width
    for layer in range(config.layers):
        for kind, ours, columns in ((".weight", "", (width,)), (".bias", "_bias", ()))[
            : 1 + config.qkv_bias
        ]:
            name, shape = fused.format(layer) + kind, (3 * width, *columns)
            part = found.pop(name, None)
            if part is None:
                raise ExportError(f"tensor {name} is missing")
            if part.shape != shape:
                raise ExportError(
                    f"tensor {part.name}: expected shape {list(shape)}, found {list(part.shape)}"
                )
            for place, letter in enumerate("qkv"):
                piece = name_of(f"layers.{layer}.{letter}{ours}")
                if piece in found:
                    raise ExportError(f"tensor {piece} is there, but {name} has it too")
                found[piece] = rows_of(part, place * width, width)


def _bare(found: dict[str, Part]) -> dict[str, Part]:
    """Without what torch.compile and the class of the model put before the names."""
    bare: dict[str, Part] = {}
    for name, part in found.items():
        short = name.removeprefix("_orig_mod.").removeprefix("transformer.")
        if short in bare:
            raise ExportError(f"tensors {bare[short].name} and {name} are the same part of a model")
        bare[short] = part
    return bare


def load(folder: Path, content: dict, generation: dict, found: dict[str, Part]) -> Model:
    own, name = is_nanogpt(content), folder.resolve().name
    tied = own or Settings(content, "config.json").flag("tie_word_embeddings", True)
    with malformed(f"{folder / 'config.json'}"):
        if own:
            config = _config_from_nanogpt(content, name)
        else:
            config = _config_from_hf(content, generation, name)
    config.check()
    bare = _bare(found)
    if not own:
        for short, part in bare.items():
            if short.endswith(CONV1D):
                bare[short] = transposed(part)
    split_qkv(bare, config, "h.{}.attn.c_attn", source_name)
    parts = collect(bare, config, source_name, IGNORED)
    if tied and "classifier" in parts:
        check_tied(
            parts,
            "the classifier is tied" if own else "config.json says or implies tie_word_embeddings",
        )
    tokenizer = tokenizer_from_hf(folder)
    if own:
        set_end_of_text(config, tokenizer)
    chat.set_shape(config, folder, tokenizer)
    kind = "nanoGPT" if own else f"Hugging Face, {GPT2}"
    return Model(kind, config, tokenizer, parts, called_untied=not tied)
