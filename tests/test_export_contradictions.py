"""Sources that contradict themselves, or say what the engine does not have, in silence: refused."""

import json
import re
import time
import warnings

import gguf
import gpt2_writers
import numpy as np
import pytest
import writers
from exporting import export, refused, same_tensors
from golden import gpt2, tiny

from export import gpt2 as gpt2_reader
from export import sentencepiece_model as spm
from export.errors import ExportError
from export.families import TYPES
from export.tokenizer import section_from_hf, section_from_sentencepiece

FAMILIES = tiny.FAMILIES | {"gpt2": gpt2.CONFIG}
OLD_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def folder_of(tmp_path, family, **changes):
    weights = gpt2_writers.weights() if family == "gpt2" else tiny.tensors(FAMILIES[family])
    return writers.hf_folder(tmp_path / family, FAMILIES[family] | changes, weights)


@pytest.mark.parametrize("other", [*TYPES, "falcon", "", 7, [], {}])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma", "gemma3", "qwen3", "gpt2"])
def test_model_type_of_another_architecture(tmp_path, out, capsys, family, other):
    """transformers goes by model_type; a Gemma 1 has the names of a Llama's tensors."""
    source = folder_of(tmp_path, family, model_type=other)
    if TYPES.get(str(other)) == FAMILIES[family]["architectures"][0]:
        export(source, out)
    else:
        refused(capsys, source, out, "model_type: expected .*, found " + re.escape(repr(other)))


@pytest.mark.parametrize(
    ("key", "usual"), [("is_causal", True), ("use_bidirectional_attention", False)]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3", "olmo2"])
def test_attention_that_is_not_causal(tmp_path, out, capsys, family, key, usual):
    """As models of embeddings have it."""
    source = folder_of(tmp_path, family, **{key: not usual})
    refused(capsys, source, out, f"{key}( false)? is not supported")
    refused(capsys, folder_of(tmp_path, family, **{key: "all"}), out, f"{key}: expected true or fa")
    plain = export(folder_of(tmp_path, family), tmp_path / "plain.bin")
    for value in (usual, None):
        same_tensors(plain, export(folder_of(tmp_path, family, **{key: value}), out))


def test_attention_that_is_not_causal_in_gguf(tmp_path, out, capsys):
    for family in ("llama", "qwen3", "gemma3"):

        def add(writer):
            writer.add_bool(f"{writer.arch}.attention.causal", False)

        config = tiny.FAMILIES[family]
        writers.gguf_file(tmp_path / "t.gguf", config, tiny.tensors(config), add=add)
        refused(capsys, tmp_path / "t.gguf", out, "attention.causal false is not supported")


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
def test_the_other_gelu(tmp_path, out, capsys, family):
    source = folder_of(tmp_path, family, hidden_activation="gelu")
    refused(capsys, source, out, "hidden_activation: expected gelu_pytorch_tanh, found 'gelu'")
    source = folder_of(tmp_path, family, hidden_act="silu", hidden_activation="gelu_pytorch_tanh")
    refused(capsys, source, out, "hidden_act: expected gelu_pytorch_tanh, found 'silu'")


@pytest.mark.parametrize(
    ("family", "key", "one"),
    [
        ("gemma3", "layer_types", "full_attention"),
        ("qwen2_window", "layer_types", "full_attention"),
        ("smollm3", "no_rope_layers", 1),
    ],
)
def test_layers_of_another_model(tmp_path, out, capsys, family, key, one):
    layers = FAMILIES[family]["num_hidden_layers"]
    for count in (0, 1, layers - 1, layers + 1, 6 * layers):
        source = folder_of(tmp_path, family, **{key: [one] * count})
        refused(capsys, source, out, f"{key}: expected one of .* for each of {layers} layers")


@pytest.mark.parametrize("every", [1, 3, 6])
def test_windows_of_gemma_2(tmp_path, out, capsys, every):
    """Its class has no such key, and moves no window."""
    source = folder_of(tmp_path, "gemma2", sliding_window_pattern=every)
    refused(capsys, source, out, f"sliding_window_pattern: expected 2 or nothing, found {every}")


@pytest.mark.parametrize("scaling", [OLD_YARN, "junk", {"type": "linear", "factor": 2.0}, [1], 7])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_scaling_beside_rope_parameters(tmp_path, out, capsys, family, scaling):
    """Cards say to add rope_scaling; where transformers 5 has written the config it has no effect
    here, and there it would take the place of theta."""
    assert FAMILIES[family]["rope_parameters"]
    source = folder_of(tmp_path, family, rope_scaling=scaling)
    refused(capsys, source, out, "rope_scaling: expected nothing beside rope_parameters")


@pytest.mark.parametrize("family", ["llama", "qwen3_yarn", "gemma3", "phi4"])
def test_scaling_that_rope_parameters_say_too(tmp_path, out, family):
    parameters = FAMILIES[family]["rope_parameters"]
    whole = parameters.get("full_attention", parameters)
    plain = export(folder_of(tmp_path, family), tmp_path / "plain.bin")
    for same in (whole, None, {}):
        same_tensors(plain, export(folder_of(tmp_path, family, rope_scaling=same), out))


@pytest.mark.parametrize("family", ["llama", "qwen3_yarn", "gemma3", "phi4"])
def test_scaling_that_says_a_part(tmp_path, out, capsys, family):
    parameters = FAMILIES[family]["rope_parameters"]
    whole = parameters.get("full_attention", parameters)
    for key in whole:
        part = {k: v for k, v in whole.items() if k != key}
        if part:
            source = folder_of(tmp_path, family, rope_scaling=part)
            refused(capsys, source, out, "rope_scaling: expected nothing beside rope_parameters")


@pytest.mark.parametrize(("piece", "fused"), [("self_attn.q", "qkv"), ("mlp.gate", "gate_up")])
def test_a_part_that_is_there_twice(tmp_path, out, capsys, piece, fused):
    config = FAMILIES["phi3"]
    extra = {f"model.layers.1.{piece}_proj.weight": np.ones((7, 3), np.float32)}
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config) | extra)
    refused(capsys, tmp_path / "t", out, rf"{piece}_proj.weight is there, but .*{fused}_proj.wei")


def test_a_part_that_is_there_twice_in_gguf(tmp_path, out, capsys):
    config = FAMILIES["phi3"]
    extra = {"model.layers.0.mlp.gate_proj.weight": np.ones((7, 32), np.float32)}
    writers.gguf_file(tmp_path / "t.gguf", config, tiny.tensors(config) | extra)
    refused(capsys, tmp_path / "t.gguf", out, "blk.0.ffn_gate.weight is there, but blk.0.ffn_up.w")


def test_a_text_part_that_is_there_twice(tmp_path, out, capsys):
    config = FAMILIES["gemma3"]
    tensors = tiny.tensors(config)
    older = {f"language_model.{name}": part for name, part in tensors.items()}
    newer = {"model.language_model.norm.weight": tensors["model.norm.weight"]}
    text = {key: value for key, value in config.items() if key != "architectures"}
    seeing = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    writers.hf_folder(tmp_path / "t", seeing | {"text_config": text}, older | newer)
    refused(capsys, tmp_path / "t", out, "language_model.*norm.weight are the same part of a model")


@pytest.mark.parametrize(
    ("key", "value", "pattern"),
    [
        ("rope_scaling", {"rope_type": "linear", "factor": 8.0}, "rope_scaling: expected it in te"),
        ("sliding_window_pattern", 3, "sliding_window_pattern: expected it in text_config"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention is not supported"),
        ("quantization_config", {"bits": 4}, "quantised checkpoints are not supported"),
    ],
)
def test_settings_of_the_text_that_stand_outside(tmp_path, out, capsys, key, value, pattern):
    config = FAMILIES["gemma3"]
    tensors = {f"language_model.{name}": part for name, part in tiny.tensors(config).items()}
    text = {key: value for key, value in config.items() if key != "architectures"}
    seeing = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    writers.hf_folder(tmp_path / "t", seeing | {"text_config": text, key: value}, tensors)
    refused(capsys, tmp_path / "t", out, pattern)


@pytest.mark.parametrize("name", ["<image_soft_token>", "<other>"])
def test_the_token_of_images(tmp_path, out, capsys, name):
    """Gemma 3 1B and 270M have it in their tokenizer and no row for it."""
    source = folder_of(tmp_path, "gemma3")
    added = [(f"<{i}>", True) for i in range(72)] + [(name, True)]
    (source / "tokenizer.json").write_text(json.dumps(writers.byte_level_json(added=added)))
    if name == "<other>":
        refused(
            capsys, source, out, "the tokenizer has 332 ids, but the model's vocabulary has 331"
        )
    else:
        assert export(source, out).config["vocab_used"] == 331
        assert f"left out: {name}, for which there is no row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bos", "eos", "found"),
    [(329, 1, "bos, 329"), (1, 330, "eos, 330"), (1, [329, 330], "eos, 329"), (1, [1, 330], None)],
)
def test_tokenizer_of_another_model(tmp_path, out, capsys, bos, eos, found):
    """One of several eos ids may be missing; if none can ever come, the tokenizer is wrong."""
    source = folder_of(tmp_path, "qwen3", bos_token_id=bos, eos_token_id=eos)
    (source / "tokenizer.json").write_text(json.dumps(writers.byte_level_json()))
    if found:
        refused(capsys, source, out, f"and {found}, is none of them: is it another model's")
    else:
        export(source, out)


@pytest.mark.parametrize("alias", gpt2_reader.ALIASES)
def test_gpt2_by_other_names(tmp_path, out, capsys, alias):
    """transformers takes them; no tensor shows how many heads there are."""
    own = gpt2_reader.ALIASES
    config, plain = FAMILIES["gpt2"], export(folder_of(tmp_path, "gpt2"), tmp_path / "plain.bin")
    value = config[own[alias]]
    other = {key: v for key, v in config.items() if key != own[alias]} | {alias: value}
    writers.hf_folder(tmp_path / "t", other, gpt2_writers.weights())
    file = export(tmp_path / "t", out)
    assert file.config["heads"] == plain.config["heads"]
    same_tensors(plain, file)
    source = folder_of(tmp_path, "gpt2", **{alias: 2 * value})
    refused(
        capsys, source, out, f"{alias}: expected that of {own[alias]}, {value}, found {2 * value}"
    )


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_ids_by_where_they_stand(tmp_path, out, capsys, where):
    source = folder_of(tmp_path, "llama")
    told = json.loads((source / where).read_text()) if where == "config.json" else {}
    (source / where).write_text(json.dumps(told | {"eos_token_id": "x"}))
    refused(capsys, source, out, f"{where}: eos_token_id: expected a token id")


@pytest.mark.parametrize("place", ["short_factor", "long_factor"])
def test_factors_that_overflow(tmp_path, out, capsys, place):
    """The one line is ours: numpy has nothing to say beside it."""
    config = json.loads(json.dumps(FAMILIES["phi3_long"]))
    config["rope_parameters"][place][-1] = 5e-324
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(capsys, tmp_path / "t", out, "a RoPE frequency is not finite")


def gguf_with(tmp_path, key, value, kind):
    def add(writer):
        if key.startswith("tokenizer"):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("qwen2")
            writer.add_token_list([writers.LETTER_OF[byte] for byte in range(256)])
        of = getattr(gguf.GGUFValueType, kind)
        writer.kv_data[0][key.replace("ARCH", writer.arch)] = gguf.GGUFValue(value, of)

    config = FAMILIES["qwen3"]
    writers.gguf_file(tmp_path / "t.gguf", config, tiny.tensors(config), add=add)
    return tmp_path / "t.gguf"


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("tokenizer.ggml.unknown_token_id", "a", "STRING"),
        ("tokenizer.ggml.unknown_token_id", -1, "INT32"),
        ("tokenizer.ggml.unknown_token_id", 256, "UINT32"),
        ("tokenizer.ggml.unknown_token_id", 1 << 40, "UINT64"),
        ("tokenizer.ggml.unknown_token_id", 1.0, "FLOAT32"),
        ("tokenizer.ggml.unknown_token_id", True, "BOOL"),
        ("tokenizer.ggml.add_bos_token", "false", "STRING"),
        ("ARCH.rope.scaling.factor", float("nan"), "FLOAT32"),
        ("ARCH.rope.scaling.factor", float("inf"), "FLOAT32"),
        ("ARCH.rope.scale_linear", float("nan"), "FLOAT32"),
        ("ARCH.rope.scale_linear", "2", "STRING"),
        ("ARCH.rope.freq_base", float("nan"), "FLOAT32"),
    ],
)
def test_gguf_values(tmp_path, out, capsys, key, value, kind):
    source = gguf_with(tmp_path, key, value, kind)
    refused(capsys, source, out, f"{key.removeprefix('ARCH.')}: expected ")


def test_gguf_scaling_of_no_kind(tmp_path, out):
    """As llama.cpp has it: none in spite of a factor; linear where no kind is named."""
    plain = export(gguf_with(tmp_path, "general.author", "x", "STRING"), tmp_path / "plain.bin")
    for kind, factor in (("none", 1.0), (None, 8.0), ("linear", 8.0)):

        def add(writer, kind=kind):
            if kind:
                writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
            writer.add_float32(f"{writer.arch}.rope.scaling.factor", 8.0)

        config = FAMILIES["qwen3"]
        writers.gguf_file(tmp_path / "t.gguf", config, tiny.tensors(config), add=add)
        rope = export(tmp_path / "t.gguf", out).tensors["rope"]
        assert np.allclose(rope, plain.tensors["rope"] / factor, rtol=1e-6, atol=0)


def test_gguf_of_a_tokenizer_alone(tmp_path, out, capsys):
    writers.gguf_file(tmp_path / "t.gguf", FAMILIES["qwen3"], {})
    refused(capsys, tmp_path / "t.gguf", out, "token_embd.weight is missing: is this a tokenizer a")


def test_gguf_arrays_of_arrays(tmp_path, out, capsys):
    number = np.array([9, 1], np.uint64)
    array = b"".join((number[:1].astype("<u4").tobytes(), number[1:].astype("<u8").tobytes()))
    head = b"GGUF" + np.array([3], "<u4").tobytes() + np.array([0, 1, 1], "<u8").tobytes()
    data = head + b"a" + np.array([9], "<u4").tobytes() + array * 5000 + bytes(64)
    (tmp_path / "t.gguf").write_bytes(data)
    refused(capsys, tmp_path / "t.gguf", out, "t.gguf: the GGUF file is malformed")


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite(score):
    pieces = [spm.Piece(b"<unk>", 0.0, spm.UNKNOWN), spm.Piece(b"a", score, spm.NORMAL)]
    with pytest.raises(ExportError, match="piece 1: expected a finite score, found"):
        section_from_sentencepiece(spm.build(pieces))


def test_many_control_pieces():
    """60,000 took 12 s."""
    begun = time.monotonic()
    control = [spm.Piece(f"<{i}>".encode(), 0.0, spm.CONTROL) for i in range(60_000)]
    section_from_sentencepiece(spm.build([spm.Piece(b"<unk>", 0.0, spm.UNKNOWN), *control]))
    assert time.monotonic() - begun < 8


def test_many_added_tokens(tmp_path):
    """20,000 beside a list of as many took 17 s."""
    begun, names = time.monotonic(), [f"<{i}>" for i in range(20_000)]
    for name, content in (
        ("tokenizer.json", writers.byte_level_json()),
        ("tokenizer_config.json", {"additional_special_tokens": names}),
        ("added_tokens.json", {name: 300 + i for i, name in enumerate(names)}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    section_from_hf(tmp_path)
    assert time.monotonic() - begun < 8
