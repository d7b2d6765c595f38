"""Families beside Llama: what configs say, the logits of transformers, and what does not fit."""

from pathlib import Path

import numpy as np
import pytest
import reader
import writers
from exporting import differs, export, refused, same_tensors, small
from golden import tiny

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES.keys() - {"llama"}))
def test_other_families(tmp_path, family):
    """They differ from transformers' by as much as float32 costs it, and tables in float32 cost
    less than that."""
    config, golden = tiny.FAMILIES[family], np.load(GOLDEN / f"tiny_{family}.npz")
    writers.hf_folder(tmp_path / "tiny", config, tiny.tensors(config))
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    said = {
        key: file.config[key] for key in ("qkv_bias", "qk_norm", "norm_placement", "activation")
    }
    assert said == {
        "qkv_bias": "qwen2" in family,
        "qk_norm": {"qwen3": 1, "qwen3_yarn": 1, "gemma3": 1, "olmo2": 2}.get(family, 0),
        "norm_placement": {"gemma2": 1, "gemma3": 1, "olmo2": 2}.get(family, 0),
        "activation": "gemma" in family,
    }
    dims = {"phi3": 12, "phi4": 12, "qwen2": 8, "qwen2_window": 8, "olmo2": 8}
    assert file.config["rotary_dims"] == dims.get(family, 16)
    assert file.layers == {
        "qwen2_window": [(0, 0), (45, 0), (45, 0)],
        "mistral": [(37, 0)] * 3,
        "phi3": [(129, 0)] * 3,
        "phi4": [(400, 0)] * 3,
        "smollm3": [(0, 0), (0, reader.NO_ID), (0, 0)],
        "gemma2": [(53, 0), (0, 0), (53, 0)],
        "gemma3": [(53, 1), (0, 0), (53, 1)],
    }.get(family, [(0, 0)] * 3)
    difference = np.abs(reader.forward(file, golden["ids"])[:, ::5] - golden["logits"]).max()
    assert difference <= 2 * golden["error"]
    if "short_logits" in golden:
        ours = reader.forward(file, golden["ids"][:256])[:, ::5]
        assert np.abs(ours - golden["short_logits"]).max() <= 2 * golden["error"]


def test_gemma_as_older_configs_say_it(tmp_path):
    """gelu or nothing for its GELU; rope_theta, rope_local_base_freq and rope_scaling; the
    embedding's factor rounded to the dtype of the weights."""
    new = tiny.FAMILIES["gemma3"]
    tensors = tiny.tensors(new)
    writers.hf_folder(tmp_path / "new", new, tensors)
    file = export(tmp_path / "new", tmp_path / "new.bin")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": 900.0, "rope_local_base_freq": 100.0, "hidden_activation": None}
    old |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "torch_dtype": "bfloat16"}
    writers.hf_folder(tmp_path / "old", old, tensors)
    other = export(tmp_path / "old", tmp_path / "old.bin")
    same_tensors(other, file)
    assert differs(other, file) == {"name"} and other.layers == file.layers
    for dtype, scale in (("float32", 10.198039), ("bfloat16", 10.1875), ("float16", 10.1953125)):
        config, tensors = small(**(tiny.FAMILIES["gemma"] | {"hidden_size": 104, "dtype": dtype}))
        writers.hf_folder(tmp_path / "t", config, tensors)
        file = export(tmp_path / "t", tmp_path / "t.bin")
        assert abs(file.config["embed_scale"] - scale) < 1e-6


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES.keys() - {"llama", "qwen2_window"}))
def test_other_families_in_gguf(tmp_path, family):
    """In llama.cpp's layout."""
    config = writers.as_gguf_says(tiny.FAMILIES[family])
    writers.hf_folder(tmp_path / "tiny", config, tiny.tensors(config))
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    writers.gguf_file(tmp_path / "tiny.gguf", config, tiny.tensors(config))
    other = export(tmp_path / "tiny.gguf", tmp_path / "gguf.bin", "--dtype", "f32")
    same_tensors(other, file)
    assert other.layers == file.layers
    # A GGUF names one stop; this one has no tokens at all.
    assert differs(other, file) <= {"stops", "stop_count", "bos", "add_bos", "pad"}


def test_layers_of_other_kinds(tmp_path):
    """Which layers have a window or RoPE, as the class of transformers says or the config."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]

    def layers(family, **changes):
        config = tiny.FAMILIES[family] | changes
        writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
        return export(tmp_path / "t", tmp_path / "t.bin").layers

    assert layers("qwen2_window", layer_types=kinds) == [(45, 0), (0, 0), (0, 0)]
    assert layers("qwen2_window", sliding_window=512) == [(0, 0)] * 3
    assert layers("qwen2_window", max_window_layers=0) == [(45, 0)] * 3
    assert layers("mistral", sliding_window=None) == [(0, 0)] * 3
    for family in ("llama", "olmo2", "gemma"):  # whose attention does not look at it
        assert layers(family, sliding_window=33) == [(0, 0)] * 3
    missing = tiny.FAMILIES["mistral"] | {"max_position_embeddings": 32768}
    del missing["sliding_window"]
    writers.hf_folder(tmp_path / "m", missing, tiny.tensors(missing))
    assert export(tmp_path / "m", tmp_path / "m.bin").layers == [(4096, 0)] * 3
    none = reader.NO_ID
    assert layers("smollm3", no_rope_layers=None) == [(0, 0)] * 3  # the fourth has none
    assert layers("smollm3", no_rope_layers=None, no_rope_layer_interval=3)[2] == (0, none)
    assert layers("gemma3", layer_types=None) == [(53, 1)] * 3  # the sixth has none
    every = layers("gemma3", layer_types=None, sliding_window_pattern=2, sliding_window=512)
    assert every == [(0, 1), (0, 0), (0, 1)]
    windows = layers("smollm3", use_sliding_window=True, sliding_window=9)
    assert windows == [(0, 0), (9, none), (0, 0)]


@pytest.mark.parametrize(
    ("family", "changes", "missing", "added", "pattern"),
    [
        ("qwen2", {}, "self_attn.k_proj.bias", None, r"layers.1.self_attn.k_proj.bias is missing"),
        ("qwen3", {}, "self_attn.q_norm.weight", None, r"self_attn.q_norm.weight is missing"),
        ("llama", {}, None, "self_attn.q_norm.weight", "does not have: .*q_norm"),
        ("qwen2", {}, None, "self_attn.q_norm.weight", "does not have: .*q_norm"),
        ("qwen3", {}, None, "self_attn.v_proj.bias", "does not have: .*v_proj.bias"),
        (
            "qwen2_window",
            {"sliding_window": 0},
            None,
            None,
            "sliding_window: expected a whole number",
        ),
        (
            "qwen2_window",
            {"max_window_layers": -1},
            None,
            None,
            "max_window_layers: expected a numb",
        ),
        ("qwen2_window", {"layer_types": ["full_attention"]}, None, None, "for each of 3 layers"),
        ("qwen2_window", {"layer_types": ["chunked"] * 3}, None, None, "layer_types: expected one"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, None, None, "no_rope_layers: expected one of"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            None,
            None,
            "no_rope_layer_interval: expected a whole number",
        ),
        ("gemma", {"hidden_act": "silu"}, None, None, "hidden_act: expected gelu_pytorch_tanh"),
        ("gemma2", {"attn_logit_softcapping": "x"}, None, None, "attn_logit_softcapping: expected"),
        ("gemma2", {"final_logit_softcapping": -1.0}, None, None, "cap on logits -1.0 is not in"),
        ("gemma2", {}, "post_feedforward_layernorm.weight", None, "post_feedforward.* is missing"),
        ("gemma", {}, None, "pre_feedforward_layernorm.weight", "does not have: .*pre_feed"),
        ("olmo2", {}, None, "input_layernorm.weight", "does not have: .*input_layernorm"),
        ("olmo2", {"num_key_value_heads": 1}, None, None, r"k_proj.weight: expected shape"),
        ("gemma3", {"query_pre_attn_scalar": 0}, None, None, "query_pre_attn_scalar: expected"),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, None, None, "one set of RoPE par"),
        ("mistral", {"sliding_window": "9"}, None, None, "sliding_window: expected a whole number"),
        (
            "mistral",
            {"partial_rotary_factor": 0.5},
            None,
            None,
            "partial_rotary_factor: expected 1",
        ),
        (
            "phi3",
            {},
            "self_attn.qkv_proj.weight",
            None,
            "layers.1.self_attn.qkv_proj.weight is mis",
        ),
        (
            "phi3",
            {"intermediate_size": 88},
            None,
            None,
            r"gate_up_proj.weight: expected shape \[176",
        ),
        (
            "phi3",
            {"num_key_value_heads": 1},
            None,
            None,
            r"qkv_proj.weight: expected shape \[96, 6",
        ),
        (
            "phi3",
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            None,
            None,
            "an even part of",
        ),
        (
            "phi3",
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            None,
            None,
            "expected 0 to 1",
        ),
        ("qwen3", {"attention_bias": True}, None, None, "attention_bias is not supported"),
        ("qwen3", {"head_dim": 8}, None, None, r"q_proj.weight: expected shape \[64, 64\]"),
    ],
)
def test_families_that_do_not_fit(tmp_path, out, capsys, family, changes, missing, added, pattern):
    config = tiny.FAMILIES[family]
    tensors = tiny.tensors(config)
    if missing:
        del tensors[f"model.layers.1.{missing}"]
    if added:
        tensors[f"model.layers.1.{added}"] = np.ones(16, np.float32)
    writers.hf_folder(tmp_path / "t", config | changes, tensors)
    refused(capsys, tmp_path / "t", out, pattern)
