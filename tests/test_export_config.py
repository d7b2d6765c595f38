"""What a config.json leaves to the class of transformers, says in its own way, or says wrongly."""

import json
import re
from pathlib import Path

import gpt2_writers
import numpy as np
import pytest
import writers
from exporting import differs, export, refused, same_tensors
from golden import gpt2, tiny

from export.config import config_from_hf, text_config
from export.families import FAMILIES, TYPES

# The classes of transformers 5.24, from their own to_dict(): what each assumes.
DEFAULTS = json.loads((Path(__file__).parent / "golden" / "defaults.json").read_text())
# Not a default but computed where it is null; or kept elsewhere, or no such key there.
COMPUTED = ("head_dim", "num_key_value_heads", "rope_theta", "rope_local_base_freq")


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_class(name):
    ours, theirs = FAMILIES[name].defaults, DEFAULTS[name]
    for key in ours.keys() - set(COMPUTED):
        assert ours[key] == theirs.get(key), key
    rope = theirs["rope_parameters"]
    assert ours["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
    if "sliding_attention" in rope:
        assert ours["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
    config = config_from_hf({"architectures": [name]}, {}, name)
    heads = theirs["num_attention_heads"]
    assert config.kv_heads == theirs["num_key_value_heads"]
    assert config.head_dim == (theirs.get("head_dim") or theirs["hidden_size"] // heads)


def test_model_types():
    """As transformers wrote them into the tiny checkpoints."""
    configs = [*tiny.FAMILIES.values(), gpt2.CONFIG]
    told = {config["model_type"]: config["architectures"][0] for config in configs}
    assert TYPES == told | {"gemma3": "Gemma3ForConditionalGeneration"}


def test_gemma_3_4b():
    """Its text_config has these keys alone."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    config = config_from_hf(text_config(whole), {}, "gemma-3-4b-it")
    said = (config.heads, config.kv_heads, config.head_dim, config.vocab, config.context)
    assert said == (8, 4, 256, 262208, 131072)
    assert config.attention_scale == 1 / 16 and config.embed_scale == 50.5
    assert config.norm_eps == 1e-6 and config.stops == [1, 106] and config.bos == 2
    layers = [config.layer(number) for number in range(34)]
    assert layers == [(0, 0) if i % 6 == 5 else (1024, 1) for i in range(34)]
    exact = 1e6 ** (-np.arange(128) / 128) / 8, 1e4 ** (-np.arange(128) / 128)
    assert np.allclose(config.frequencies, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("family", ["llama", "gemma", "smollm3"])
def test_theta_of_the_class(tmp_path, capsys, family):
    """Said aloud: old readers of new files took it in silence."""
    config = {key: v for key, v in tiny.FAMILIES[family].items() if key != "rope_parameters"}
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    file = export(tmp_path / "t", tmp_path / "t.bin")
    theta = 2e6 if family == "smollm3" else 1e4
    assert np.allclose(file.tensors["rope"][0], theta ** (-np.arange(8) / 8), rtol=1e-6, atol=0)
    said = f"RoPE: theta {theta:g} (not in the config: the family's default)"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "smollm3"])
def test_tied_by_the_class(tmp_path, out, capsys, family):
    """Where the config does not say whether: an lm_head has to be the embedding."""
    config = {k: v for k, v in tiny.FAMILIES[family].items() if k != "tie_word_embeddings"}
    tensors = tiny.tensors(tiny.FAMILIES[family])
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    writers.hf_folder(tmp_path / "same", config, same)
    assert export(tmp_path / "same", tmp_path / "same.bin").config["tied"] == 1
    other = tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}
    writers.hf_folder(tmp_path / "other", config, other)
    refused(capsys, tmp_path / "other", out, "tie_word_embeddings, but lm_head.weight differs")
    writers.hf_folder(tmp_path / "own", config | {"tie_word_embeddings": False}, other)
    assert export(tmp_path / "own", tmp_path / "own.bin").config["tied"] == 0


@pytest.mark.parametrize("told", [False, None, "missing"])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "gpt2"])
def test_untied_without_a_classifier(tmp_path, capsys, family, told):
    """The tensors decide, and the export says so; a missing key is the class's word."""
    config = gpt2.CONFIG if family == "gpt2" else tiny.FAMILIES[family]
    tensors = gpt2_writers.weights() if family == "gpt2" else tiny.tensors(config)
    tensors.pop("lm_head.weight", None)
    config = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    config |= {} if told == "missing" else {"tie_word_embeddings": told}
    writers.hf_folder(tmp_path / "t", config, tensors)
    assert export(tmp_path / "t", tmp_path / "t.bin").config["tied"] == 1
    said = "no lm_head.weight: the config says or implies" in capsys.readouterr().out
    assert said == (told != "missing" or family in ("llama", "phi3"))


@pytest.mark.parametrize("value", ["no", "", 0, 3, 1.5, [], {}])
@pytest.mark.parametrize(
    ("family", "key"),
    [(family, "tie_word_embeddings") for family in ("llama", "gemma3", "phi4", "smollm3")]
    + [("llama", "attention_bias"), ("llama", "mlp_bias"), ("qwen2_window", "use_sliding_window")],
)
def test_flag_that_is_none(tmp_path, out, capsys, family, key, value):
    """Refused also where the tensors leave no doubt."""
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "t", config | {key: value}, tiny.tensors(config))
    pattern = f"config.json: {key}: expected true or false, found {re.escape(repr(value))}"
    refused(capsys, tmp_path / "t", out, pattern)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_that_sees(tmp_path, capsys, prefix):
    """Its tensors as older and as newer files name them; the rest is left out."""
    config = tiny.FAMILIES["gemma3"]
    tensors = tiny.tensors(config)
    writers.hf_folder(tmp_path / "text", config, tensors)
    file = export(tmp_path / "text", tmp_path / "text.bin")
    seeing = {prefix + name.removeprefix("model."): part for name, part in tensors.items()}
    for name in (
        "vision_tower.vision_model.head.bias",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    ):
        seeing["model." * prefix.startswith("model.") + name] = np.ones(8, np.float32)
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {key: value for key, value in config.items() if key != "architectures"},
        "vision_config": {"hidden_size": 9},
    }
    writers.hf_folder(tmp_path / "seeing", whole, seeing)
    other = export(tmp_path / "seeing", tmp_path / "seeing.bin")
    left = "1 tensors of vision_tower and 1 tensors of multi_modal_projector"
    assert f"the text part (left out: {left})" in capsys.readouterr().out
    same_tensors(other, file)
    assert differs(other, file) == {"name", "stops", "stop_count"}
    assert other.config["stops"] == [1, 106] and other.layers == file.layers
    own = {"language_model.lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}
    whole["tie_word_embeddings"] = False
    del whole["text_config"]["tie_word_embeddings"]
    writers.hf_folder(tmp_path / "own", whole, seeing | own)
    assert export(tmp_path / "own", tmp_path / "own.bin").config["tied"] == 0


@pytest.mark.parametrize("buffer", ["rotary_emb.inv_freq", "attn.masked_bias", "attn.bias"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_buffers_are_ignored(tmp_path, family, buffer):
    config = tiny.FAMILIES[family]
    tensors = tiny.tensors(config)
    writers.hf_folder(tmp_path / "t", config, tensors)
    name = f"model.layers.1.self_attn.{buffer}".replace("self_attn.attn", "attn")
    writers.hf_folder(tmp_path / "b", config, tensors | {name: np.ones(8, np.float32)})
    same_tensors(
        export(tmp_path / "b", tmp_path / "b.bin"), export(tmp_path / "t", tmp_path / "t.bin")
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "olmo2"])
@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("num_attention_heads", 2, "proj.weight: expected shape"),
        ("num_key_value_heads", 1, "proj.weight: expected shape"),
        ("head_dim", 24, "proj.weight: expected shape"),
        ("hidden_size", 128, "proj.weight: expected shape|embed_tokens.weight: expected shape"),
        ("intermediate_size", 168, "proj.weight: expected shape"),
        ("vocab_size", 336, r"embed_tokens.weight: expected shape \[336, 64\]"),
        ("num_hidden_layers", 2, "that a model of this config does not have: .*layers.2."),
        ("num_hidden_layers", 4, "tensor model.layers.3.* is missing"),
    ],
)
def test_tensors_of_another_config(tmp_path, out, capsys, family, key, value, pattern):
    config = tiny.FAMILIES[family]
    changed = config | {key: value}
    if "layer_types" in config:
        changed["layer_types"] = ["full_attention"] * changed["num_hidden_layers"]
    writers.hf_folder(tmp_path / "t", changed, tiny.tensors(config))
    refused(capsys, tmp_path / "t", out, pattern)


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3", "qwen2_window"])
@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_window_that_is_none(tmp_path, out, capsys, family, window):
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "t", config | {"sliding_window": window}, tiny.tensors(config))
    refused(capsys, tmp_path / "t", out, "sliding_window: expected a whole number above 0")


@pytest.mark.parametrize("window", [512, 513, 1 << 40])
def test_window_beyond_the_context(tmp_path, window):
    """Phi-3 128k and Qwen 2.5 have such: there is none then."""
    config = tiny.FAMILIES["mistral"] | {"sliding_window": window}
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    assert export(tmp_path / "t", tmp_path / "t.bin").layers == [(0, 0)] * 3


def test_odd_heads(tmp_path, out, capsys):
    config = tiny.FAMILIES["qwen2"] | {"hidden_size": 72}
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    refused(capsys, tmp_path / "t", out, "head size 9 is not a multiple of 8")


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [331, [2, 331], [2, 1 << 40]])
def test_eos_out_of_range(tmp_path, out, capsys, where, ids):
    config = tiny.FAMILIES["gemma3"]
    told = config | ({"eos_token_id": ids} if where == "config.json" else {})
    writers.hf_folder(tmp_path / "t", told, tiny.tensors(config))
    if where != "config.json":
        (tmp_path / "t" / where).write_text(json.dumps({"eos_token_id": ids}))
    refused(capsys, tmp_path / "t", out, r"eos id \d+ is not in 0 to 330")
