"""GPT-2 in the exporter: the same file from each source, the numbers of transformers, and what does
not fit."""

import json
from pathlib import Path

import gpt2_writers
import numpy as np
import pytest
import reader
import writers
from exporting import differs, export, refused, same_tensors
from golden import gpt2, tiny

from export.__main__ import main

GOLDEN = Path(__file__).parent / "golden"
WTE, LM_HEAD = "transformer.wte.weight", "lm_head.weight"
FC = "transformer.h.1.mlp.c_fc"


@pytest.fixture(scope="module")
def weights():
    return gpt2_writers.weights()


@pytest.fixture(scope="module")
def whole(weights, tmp_path_factory):
    """The tiny GPT-2 from a Hugging Face folder, as f32."""
    folder = tmp_path_factory.mktemp("gpt2")
    writers.hf_folder(folder / "tiny", gpt2.CONFIG, weights)
    return export(folder / "tiny", folder / "model.bin", "--dtype", "f32")


def error_of(file: reader.ModelFile, family: str) -> tuple[float, float]:
    """The largest difference from transformers, and what float32 costs it."""
    golden = np.load(GOLDEN / f"tiny_{family}.npz")
    ours = reader.forward(file, golden["ids"])[:, ::5]
    return np.abs(ours - golden["logits"]).max(), golden["error"]


# ---- Hugging Face ----


def test_hugging_face(whole):
    expected = {
        "norm": 1, "norm_placement": 0, "qkv_bias": 1, "out_bias": 1, "ffn_bias": 1, "qk_norm": 0,
        "gated": 0, "activation": 1, "learned_positions": 1, "rotary_dims": 0, "rope_tables": 0,
        "attention_scale": 0.25, "tied": 1, "width": 64, "heads": 4, "kv_heads": 4, "head_dim": 16,
        "ffn": 256, "vocab": 331, "vocab_used": 331, "context": 512, "bos": 330, "stops": [330],
        "norm_eps": np.float32(1e-5),
    }  # fmt: skip
    assert {key: whole.config[key] for key in expected} == expected
    assert whole.layers == [(0, reader.NO_ID)] * 3
    difference, error = error_of(whole, "gpt2")
    assert difference <= 1.1 * error


def test_exact_gelu(tmp_path, weights):
    writers.hf_folder(tmp_path / "tiny", gpt2.FAMILIES["gpt2_erf"], weights)
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    difference, error = error_of(file, "gpt2_erf")
    assert difference <= 1.1 * error


def test_other_names_and_buffers(tmp_path, weights, whole):
    """The published file has no prefix; older ones have masks; tied classifiers are often there."""
    found = {name.removeprefix("transformer."): values for name, values in weights.items()}
    for layer in range(3):
        found[f"h.{layer}.attn.bias"] = np.tri(4, dtype=np.float32)[None, None]
        found[f"h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)
    found[LM_HEAD] = weights[WTE]
    writers.hf_folder(tmp_path / "t", gpt2.CONFIG, found)
    file = export(tmp_path / "t", tmp_path / "t.bin", "--dtype", "f32")
    same_tensors(file, whole)
    assert differs(file, whole) == {"name"}


def test_configs_of_other_shapes(tmp_path, weights):
    """Settings that are left out, an inner width that is padded, untied, unscaled scores."""

    def written(config, tensors):
        writers.hf_folder(tmp_path / "t", config, tensors)
        return export(tmp_path / "t", tmp_path / "t.bin", "--dtype", "f32")

    bare = {key: gpt2.CONFIG[key] for key in ("model_type", "n_embd", "n_head", "n_layer")}
    bare |= {"vocab_size": 331, "n_positions": 512}
    file = written(bare, weights)
    assert file.config["bos"] == reader.NO_ID and file.config["stops"] == []
    narrow = {
        name: values[..., :252] if "c_fc" in name else values[:252] if "mlp.c_p" in name else values
        for name, values in weights.items()
    }
    narrow = {name: np.copy(values) for name, values in narrow.items()}
    for layer in range(3):
        narrow[f"transformer.h.{layer}.mlp.c_proj.bias"] = weights[
            f"transformer.h.{layer}.mlp.c_proj.bias"
        ]
    changes = {"n_inner": 252, "tie_word_embeddings": False, "scale_attn_weights": False}
    file = written(gpt2.CONFIG | changes, narrow | {LM_HEAD: weights[WTE][::-1].copy()})
    assert file.config["ffn"] == 256 and file.config["attention_scale"] == 1
    assert np.array_equal(file.tensors["classifier"], weights[WTE][::-1])
    assert np.array_equal(file.tensors["layers.1.gate_up_bias"][:252], narrow[f"{FC}.bias"])
    assert not file.tensors["layers.1.gate_up_bias"][252:].any()
    assert not file.tensors["layers.1.down"][:, 252:].any()


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"activation_function": "relu"}, "activation_function: expected gelu or gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not"),
        ({"add_cross_attention": True}, "add_cross_attention is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints"),
        ({"n_head": 5}, "width 64 is not a multiple of 5 heads"),
        ({"n_head": 16}, "head size 4 is not a multiple of 8"),
        ({"n_layer": 0}, "n_layer: expected a whole number above 0"),
        ({"n_layer": 4}, "tensor h.3.attn.c_attn.weight is missing"),
        ({"n_positions": 1024}, r"wpe.weight: expected shape \[1024, 64\], found \[512, 64\]"),
        ({"n_inner": 128}, r"c_fc.weight \(transposed\): expected shape \[128, 64\]"),
        ({"layer_norm_epsilon": 0}, "norm epsilon 0.0 is not in"),
        ({"eos_token_id": 331}, "eos id 331 is not in 0 to 330"),
        ({"bos_token_id": "x"}, "bos_token_id: expected a token id"),
        ({"scale_attn_weights": 3}, "scale_attn_weights: expected true or false"),
    ],
)
def test_hugging_face_configs_that_do_not_fit(tmp_path, out, capsys, weights, changes, pattern):
    writers.hf_folder(tmp_path / "t", gpt2.CONFIG | changes, weights)
    refused(capsys, tmp_path / "t", out, pattern)


@pytest.mark.parametrize("value", [None, True, -1, 0, 1e400, "x", [], {}, [[]], 1 << 70])
@pytest.mark.parametrize("config", [gpt2.CONFIG, gpt2_writers.nanogpt_config()])
def test_config_values_of_any_kind(tmp_path, capsys, weights, value, config):
    """Whatever a key holds: a file or one line."""
    writers.hf_folder(tmp_path / "t", config, weights)
    for key in config:
        (tmp_path / "t" / "config.json").write_text(json.dumps(config | {key: value}))
        capsys.readouterr()
        code = main([str(tmp_path / "t"), "-o", str(tmp_path / "model.bin")])
        _, err = capsys.readouterr()
        assert (code, len(err.splitlines())) in ((0, 0), (2, 1)), (key, err)


@pytest.mark.parametrize(
    ("missing", "added", "pattern"),
    [
        (f"{FC}.bias", {}, "tensor h.1.mlp.c_fc.bias is missing"),
        ("transformer.ln_f.bias", {}, "tensor ln_f.bias is missing"),
        ("transformer.wpe.weight", {}, "tensor wpe.weight is missing"),
        ("transformer.h.2.attn.c_attn.bias", {}, "tensor h.2.attn.c_attn.bias is missing"),
        (None, {"transformer.h.0.x.weight": (3,)}, "does not have: h.0.x.weight"),
        (None, {"transformer.h.3.ln_1.bias": (64,)}, "does not have: h.3.ln_1.bias"),
        (None, {"h.0.attn.q.weight": (64, 64)}, "h.0.attn.q.weight is there, but h.0.attn.c_attn"),
        (None, {"wte.weight": (331, 64)}, "transformer.wte.weight and wte.weight are the same"),
        (None, {LM_HEAD: (331, 64)}, "config.json ties the classifier, but lm_head.weight differs"),
        (None, {f"{FC}.weight": (64,)}, r"c_fc.weight: expected shape \[256, 64\], found \[64\]"),
        (
            None,
            {"transformer.h.0.attn.c_attn.weight": (192, 64)},
            r"c_attn.weight \(transposed\): expected shape \[192, 64\], found \[64, 192\]",
        ),
        (
            None,
            {"transformer.h.0.attn.c_attn.bias": (64,)},
            r"c_attn.bias: expected shape \[192\], found \[64\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, out, capsys, weights, missing, added, pattern):
    found = {name: values for name, values in weights.items() if name != missing}
    found |= {name: np.ones(shape, np.float32) for name, shape in added.items()}
    writers.hf_folder(tmp_path / "t", gpt2.CONFIG, found)
    refused(capsys, tmp_path / "t", out, pattern)


# ---- nanoGPT ----


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(tmp_path, weights, whole, prefix):
    gpt2_writers.nanogpt_folder(tmp_path / "t", weights, prefix)
    file = export(tmp_path / "t", tmp_path / "t.bin", "--dtype", "f32")
    same_tensors(file, whole)
    assert differs(file, whole) == {"name", "activation", "bos", "add_bos", "stops", "stop_count"}
    difference, error = error_of(file, "gpt2_erf")
    assert difference <= 1.1 * error


def test_nanogpt_without_biases(tmp_path, weights):
    """None on products; those of the norms are zeros in the file."""
    kept = gpt2_writers.without_biases(weights)
    gpt2_writers.nanogpt_folder(tmp_path / "t", kept, bias=False)
    file = export(tmp_path / "t", tmp_path / "t.bin", "--dtype", "f32")
    assert [file.config[key] for key in ("qkv_bias", "out_bias", "ffn_bias")] == [0, 0, 0]
    assert not file.tensors["norm_final_bias"].any() and "layers.0.out_bias" not in file.tensors
    ids = tiny.ids(100)
    exact = gpt2.logits(gpt2.FAMILIES["gpt2_erf"], kept, ids)
    assert np.abs(reader.forward(file, ids) - exact).max() < 1e-9


def test_nanogpt_pads_its_vocabulary(tmp_path, weights):
    """Rows past the tokenizer's ids are never sampled; its <|endoftext|> begins and ends texts."""
    folder = gpt2_writers.nanogpt_folder(tmp_path / "t", weights)
    content = writers.byte_level_json(added=[("<|endoftext|>", True)])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    file = export(folder, tmp_path / "t.bin")
    end = content["added_tokens"][0]["id"]
    assert (file.config["vocab"], file.config["vocab_used"]) == (331, end + 1)
    assert (file.config["bos"], file.config["add_bos"], file.config["stops"]) == (end, 0, [end])


@pytest.mark.parametrize(
    ("changes", "bias", "pattern"),
    [
        ({"bias": False}, True, "does not have: h.0.ln_1.bias, "),
        ({"bias": True}, False, "tensor h.0.attn.c_attn.bias is missing"),
        ({"bias": 1}, True, "bias: expected true or false"),
        ({"use_rmsnorm": True}, True, "use_rmsnorm is not a setting of nanoGPT's; known: n_layer"),
        ({"n_embd": None}, True, "n_embd: expected a whole number"),
        ({"n_head": 3}, True, "width 64 is not a multiple of 3 heads"),
        ({"block_size": 64}, True, r"wpe.weight: expected shape \[64, 64\], found \[512, 64\]"),
    ],
)
def test_nanogpt_that_does_not_fit(tmp_path, out, capsys, weights, changes, bias, pattern):
    kept = weights if bias else gpt2_writers.without_biases(weights)
    gpt2_writers.nanogpt_folder(tmp_path / "t", kept, **changes)
    refused(capsys, tmp_path / "t", out, pattern)


def test_nanogpt_classifier_is_tied(tmp_path, out, capsys, weights):
    folder = gpt2_writers.nanogpt_folder(tmp_path / "t", weights)
    found = gpt2_writers.linear(weights) | {LM_HEAD: weights[WTE] + 1}
    writers.safetensors_file(folder / "model.safetensors", found)
    refused(capsys, folder, out, "the classifier is tied, but lm_head.weight differs")
