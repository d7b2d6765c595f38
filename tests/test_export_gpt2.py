"""GPT-2 in the exporter: the same file from each source, the numbers of transformers, and what does
not fit."""

import json
import struct
from pathlib import Path

import gpt2_writers
import numpy as np
import pytest
import reader
import writers
from exporting import differs, export, refused, same_tensors
from golden import gpt2, tiny
from tokenizer_data import DATA, gguf_reader, need

from export import llmc, tokenizer
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
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, found 'no'"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings: expected true or false, found 0"),
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
        (None, {LM_HEAD: (331, 64)}, "implies tie_word_embeddings, but lm_head.weight differs"),
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


# ---- llm.c ----


@pytest.mark.parametrize("version", [3, 5])
def test_llmc(tmp_path, weights, whole, version):
    """The padding of the embedding is left out."""
    held = weights
    if version == 5:
        held = {
            name: (writers.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
            for name, values in weights.items()
        }
    gpt2_writers.llmc_file(tmp_path / "t.bin", weights, version)
    file = export(tmp_path / "t.bin", tmp_path / "model.bin", "--dtype", "f32")
    assert differs(file, whole) == {"name", "bos", "add_bos", "stops", "stop_count"}
    writers.hf_folder(tmp_path / "held", gpt2.CONFIG, held)
    same_tensors(file, export(tmp_path / "held", tmp_path / "held.bin", "--dtype", "f32"))


def test_llmc_with_gpt2s_vocabulary(tmp_path):
    """Ids that the file does not name are those of GPT-2."""
    sizes = {"context": 8, "vocab": 50257, "layers": 1, "heads": 1, "width": 8}
    count = 50304 * 8 + 8 * 8 + 12 * 8 * 8 + 13 * 8 + 2 * 8
    gpt2_writers.llmc_file(tmp_path / "t.bin", gpt2_writers.weights(), rows=50304, **sizes)
    head = (tmp_path / "t.bin").read_bytes()[:1024]
    (tmp_path / "t.bin").write_bytes(head + np.ones(count, "<f4").tobytes())
    file = export(tmp_path / "t.bin", tmp_path / "model.bin")
    assert (file.config["vocab"], file.config["vocab_used"]) == (50257, 50257)
    assert (file.config["bos"], file.config["stops"]) == (50256, [50256])


@pytest.mark.parametrize("given", ["folder", "tokenizer.json", "tokenizer.bin"])
def test_llmc_with_a_tokenizer(tmp_path, weights, given):
    content = writers.byte_level_json(added=[("<|endoftext|>", True)])
    end = content["added_tokens"][0]["id"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(content))
    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"<|endoftext|>"]
    path = {
        "folder": tmp_path / "folder",
        "tokenizer.json": tmp_path / "folder" / "tokenizer.json",
        "tokenizer.bin": gpt2_writers.llmc_tokenizer(tmp_path / "tokenizer.bin", pieces),
    }[given]
    gpt2_writers.llmc_file(tmp_path / "t.bin", weights)
    file = export(tmp_path / "t.bin", tmp_path / "model.bin", "--tokenizer", path)
    section = reader.read_section(file.tokenizer)
    assert section["pieces"][256:] == [b"he", b"ll", b"hell", b""][: len(section["pieces"]) - 256]
    assert section["added"] == [(end, 1, b"<|endoftext|>")] and section["pattern"] == 1
    assert section["unmergeable"] == []
    assert (file.config["bos"], file.config["add_bos"], file.config["stops"]) == (end, 0, [end])
    assert file.config["vocab_used"] == end + 1


@pytest.mark.parametrize(
    ("header", "pattern"),
    [
        ({"version": 1}, "llm.c version 1, expected 3 or 5"),
        ({"magic": 20240327}, "not a llama2.c model, nor anything else that is known"),
        ({"width": 0}, "llm.c's header makes no sense: .* width 0"),
        ({"rows": 330}, "llm.c's header makes no sense: .* vocabulary 331 in 330 rows"),
        ({"layers": -1}, "llm.c's header makes no sense"),
        ({"heads": 5}, "width 64 is not a multiple of 5 heads"),
        ({"heads": 16}, "head size 4 is not a multiple of 8"),
        ({"layers": 2000}, "layers 2000 is not in 1 to 1024"),
        ({"layers": 4}, r"an llm.c checkpoint of this header has \d+ bytes, found"),
        ({"context": 511}, r"an llm.c checkpoint of this header has \d+ bytes, found"),
    ],
)
def test_llmc_that_does_not_fit(tmp_path, out, capsys, weights, header, pattern):
    path = gpt2_writers.llmc_file(tmp_path / "t.bin", weights)
    fields = ("magic", "version", "context", "vocab", "layers", "heads", "width", "rows")
    data = bytearray(path.read_bytes())
    for key, value in header.items():
        struct.pack_into("<i", data, 4 * fields.index(key), value)
    path.write_bytes(data)
    refused(capsys, path, out, pattern)


def test_llmc_that_is_cut_short(tmp_path, out, capsys, weights):
    path = gpt2_writers.llmc_file(tmp_path / "t.bin", weights)
    data = path.read_bytes()
    for size, pattern in (
        (1000, "cut short in its header"),
        (1024, "has 830720 bytes, found 1024"),
        (len(data) - 1, "bytes, found"),
        (len(data) + 4, "bytes, found"),
    ):
        path.write_bytes(data.ljust(size, b"\0")[:size])
        refused(capsys, path, out, pattern)


def test_llmc_tokenizers_that_do_not_fit(tmp_path, out, capsys, weights):
    path = gpt2_writers.llmc_file(tmp_path / "t.bin", weights)
    pieces = [bytes([byte]) for byte in range(256)] + [b"<|endoftext|>"]
    own = tmp_path / "gpt2_tokenizer.bin"
    for header, pattern in (
        ({"magic": 20240327}, "expected a tokenizer.json, a folder that has it, or llm.c's"),
        ({"version": 3}, "llm.c's tokenizer of version 1 or 2"),
        ({"count": 258}, "expected 258 pieces, id 256 among them, found 257 in"),
        ({"count": 256, "end": 9}, "expected 256 pieces, id 9 among them, found 256 in"),
        ({"end": 257}, "expected 257 pieces, id 257 among them"),
        ({"version": 1}, "id 50256 among them"),
    ):
        gpt2_writers.llmc_tokenizer(own, pieces, **header)
        refused(capsys, path, out, pattern, "--tokenizer", own)
    gpt2_writers.llmc_tokenizer(own, pieces * 2, end=256)
    refused(capsys, path, out, "tokenizer has 514 ids, but .* 331 rows", "--tokenizer", own)
    own.write_bytes(b"x" * 1023)
    refused(capsys, path, out, "cut short in its header", "--tokenizer", own)
    refused(capsys, path, out, "No such file", "--tokenizer", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    refused(capsys, path, out, "there is no tokenizer.json", "--tokenizer", tmp_path / "empty")


def test_llmc_tokenizer_is_gpt2s(tmp_path):
    """Its own file and GPT-2's published vocabulary give the same tokenizer."""
    published = tokenizer.section_from_gguf(
        gguf_reader(need(DATA / "tokenizers" / "gpt2-vocab.gguf"))
    )
    pieces = [*reader.read_section(published)["pieces"], b"<|endoftext|>"][:50257]
    pieces[50256] = b"<|endoftext|>"
    path = gpt2_writers.llmc_tokenizer(tmp_path / "gpt2_tokenizer.bin", pieces)
    ours = reader.read_section(llmc.tokenizer_from_llmc(path).section())
    theirs = reader.read_section(published)
    assert ours["pieces"][:50256] == theirs["pieces"][:50256]
    for key in ("kind", "pattern", "flags", "unmergeable", "added"):
        assert ours[key] == theirs[key]
    gpt2_writers.llmc_tokenizer(path, pieces, version=1, end=0)
    assert llmc.tokenizer_from_llmc(path).id_of_control("<|endoftext|>") == 50256


# ---- GGUF ----


def test_gguf(tmp_path, weights, whole):
    """Older converters write the embedding a second time as the classifier."""
    file = export(
        gpt2_writers.gguf_file(tmp_path / "t.gguf", weights), tmp_path / "t.bin", "--dtype", "f32"
    )
    same_tensors(file, whole)
    assert differs(file, whole) == {"name"}
    twice = weights | {LM_HEAD: weights[WTE]}
    gpt2_writers.gguf_file(tmp_path / "t.gguf", twice)
    file = export(tmp_path / "t.gguf", tmp_path / "t.bin", "--dtype", "f32")
    assert np.array_equal(file.tensors["classifier"], weights[WTE])


@pytest.mark.parametrize(
    ("changes", "missing", "pattern"),
    [
        ({"attention.layer_norm_epsilon": None}, None, "layer_norm_epsilon: expected a number"),
        ({"attention.head_count": 5}, None, "width 64 is not a multiple of 5 heads"),
        ({"block_count": 1 << 31}, None, "a number up to 16777216, found 2147483648"),
        ({"attention.scale": 0.5}, None, "gpt2.attention.scale 0.5 is not supported"),
        ({"context_length": 64}, None, r"position_embd.weight: expected shape \[64, 64\]"),
        ({"feed_forward_length": 128}, None, r"ffn_up.weight: expected shape \[128, 64\]"),
        ({}, "transformer.h.1.attn.c_attn.bias", "tensor blk.1.attn_qkv.bias is missing"),
        ({}, "transformer.h.1.mlp.c_proj.bias", "tensor blk.1.ffn_down.bias is missing"),
    ],
)
def test_gguf_that_does_not_fit(tmp_path, out, capsys, weights, changes, missing, pattern):
    kept = {name: values for name, values in weights.items() if name != missing}
    gpt2_writers.gguf_file(tmp_path / "t.gguf", kept, **changes)
    refused(capsys, tmp_path / "t.gguf", out, pattern)
