"""The exporter's numbers from GGUF files: the same weights in every kind of block."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import reader
import writers
from exporting import differs, export, put_together, refused, small
from golden import tiny
from tokenizer_data import SMOLLM2, need

from export.errors import ExportError
from export.gguf_config import config_from_gguf
from export.rope import scale_yarn

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_gguf_of_the_same_weights(tmp_path, tensors, tiny_file, kind):
    held = {
        name: gguf.dequantize(
            gguf.quantize(values, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind]
        )
        if values.ndim == 2
        else values
        for name, values in tensors.items()
    }
    writers.gguf_file(tmp_path / "tiny.gguf", tiny.CONFIG, tensors, kind)
    file = export(tmp_path / "tiny.gguf", tmp_path / "a.bin", "--dtype", "f32")
    for name, values in put_together(tiny.CONFIG, held).items():
        assert np.array_equal(file.tensors[name], values), name
    # The factors in the file are float32, those of the config are not.
    assert np.allclose(file.tensors["rope"], tiny_file.tensors["rope"], rtol=2e-7, atol=0)
    assert differs(file, tiny_file) <= {"bos", "stops", "stop_count", "add_bos"}


def blocks_of(kind: gguf.GGMLQuantizationType, shape, rng) -> np.ndarray:
    """Random blocks, as bytes, whose values are finite and small."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    kept = []
    for _ in range(200):
        blocks = rng.integers(0, 256, (500, block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(blocks, kind)
            kept.append(blocks[(np.abs(values) < 1e4).all(1)])
        if sum(map(len, kept)) >= 50:
            break
    rows, columns = shape
    chosen = np.concatenate(kept)[rng.integers(0, sum(map(len, kept)), rows * columns // size)]
    return chosen.reshape(rows, -1)


DEQUANTISABLE = sorted(kind.name for kind in gguf.quants._type_traits)


@pytest.mark.parametrize("kind", [name for name in DEQUANTISABLE if name != "BF16"])
def test_gguf_blocks(tmp_path, kind):
    """Every type that the gguf package can undo: the values are the package's, in our order."""
    config, shapes = small(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64
    )
    quantised = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(7)
    source, held = {}, {}
    for name, values in shapes.items():
        source[name] = values if values.ndim == 1 else blocks_of(quantised, values.shape, rng)
        held[name] = values if values.ndim == 1 else gguf.dequantize(source[name], quantised)
    path = tmp_path / "model.gguf"
    writers.gguf_file(path, config, source, kind)
    file = export(path, tmp_path / "model.bin", "--dtype", "f32")
    held["lm_head.weight"] = None
    for name, values in put_together(config, held).items():
        if values is not None:
            assert np.array_equal(file.tensors[name], values), name


@pytest.mark.parametrize(
    ("kind", "levels"), [("Q8_0", 127), ("Q4_0", 7), ("Q4_1", 7), ("Q5_0", 15), ("Q5_1", 15)]
)
def test_gguf_quantised_weights_are_near(tmp_path, kind, levels):
    config, tensors = small(intermediate_size=160, hidden_size=96, head_dim=32)
    writers.gguf_file(tmp_path / "q.gguf", config, tensors, kind)
    near = export(tmp_path / "q.gguf", tmp_path / "q.bin", "--dtype", "f32")
    writers.hf_folder(tmp_path / "exact", config, tensors)
    exact = export(tmp_path / "exact", tmp_path / "exact.bin", "--dtype", "f32")
    for name, values in exact.tensors.items():
        limit = 0 if values.shape[0] == 1 or values.ndim == 1 else np.abs(values).max() / levels
        if name != "rope":
            assert np.abs(near.tensors[name] - values).max() <= limit * 1.01, name


def test_gguf_linear_scaling(tmp_path):
    config, tensors = small(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})

    def new(metadata):
        metadata.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        metadata.add_rope_scaling_factor(4.0)

    def old(metadata):
        metadata.add_float32("llama.rope.scale_linear", 2.0)

    exact = 10000.0 ** (-np.arange(8) / 8)
    for add, factor in ((None, 1), (new, 4), (old, 2)):
        writers.gguf_file(tmp_path / "t.gguf", config, tensors, add=add)
        file = export(tmp_path / "t.gguf", tmp_path / "model.bin")
        assert np.array_equal(file.tensors["rope"][0], (exact / factor).astype(np.float32))


# What a Gemma 2 or a Phi 3 of GGUF says at least.
METADATA = {
    "embedding_length": 96,
    "attention.head_count": 4,
    "attention.key_length": 32,
    "block_count": 6,
    "context_length": 4096,
    "feed_forward_length": 64,
    "vocab_size": 100,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 64,
}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


def windows(architecture, **more):
    config = config_from_gguf(METADATA | more, architecture, "t", {})
    return [bool(window) for window in config.windows]


def test_gguf_windows():
    """By the architecture, by a period, by a list."""
    pattern = "attention.sliding_window_pattern"
    assert windows("llama") == windows("phi3") == [True] * 6
    assert windows("gemma2") == [True, False] * 3
    assert windows("gemma3") == [True] * 5 + [False]
    assert windows("gemma3", **{pattern: 3}) == [True, True, False] * 2
    assert windows("gemma2", **{pattern: [True, 0, 0, 1, 0, 0]}) == [True, False, False] * 2
    assert windows("phi3", **{"attention.sliding_window": 0}) == [False] * 6
    missing = {key: value for key, value in METADATA.items() if "window" not in key}
    assert not any(config_from_gguf(missing, "llama", "t", {}).windows)
    long = missing | {"context_length": 8192}
    assert config_from_gguf(long, "gemma2", "t", {}).windows == (4096, 0) * 3


def test_gguf_scale_of_scores():
    """The largest Gemmas have a scale that is not their heads'."""
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        for count, size in ((layers, 24), (layers - 1, 32), (layers + 1, 32)):
            config = config_from_gguf(METADATA | {"block_count": count}, architecture, "t", {})
            assert config.attention_scale == size**-0.5


def test_gguf_rope():
    """YaRN's keys, longrope's factor, bases of layers with a window, part of a head."""
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 1024, "attention.sliding_window": 0}
    base = 10000.0 ** (-np.arange(16) / 16)
    config = config_from_gguf(METADATA | yarn, "llama", "t", {})
    plain = scale_yarn(base, 1e4, 4.0, 32, 1, 1024)
    assert np.array_equal(config.frequencies[0], plain)
    assert config.rope_scale == 0.1 * np.log(4) + 1
    keys = {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.25}
    more = yarn | {f"rope.scaling.{key}": value for key, value in keys.items()}
    config = config_from_gguf(METADATA | more, "llama", "t", {})
    assert np.array_equal(config.frequencies[0], scale_yarn(base, 1e4, 4.0, 8, 2, 1024))
    assert config.rope_scale == 1.25 and not np.array_equal(config.frequencies[0], plain)
    config = config_from_gguf(
        METADATA | {"rope.scaling.attn_factor": 1.5, "rope.freq_base": 5e5}, "phi3", "t", FACTORS
    )
    base = 5e5 ** (-np.arange(16) / 16)
    assert np.array_equal(config.frequencies[0], base) and config.rope_original == 4096
    assert np.array_equal(config.long_frequencies[0], base / 2) and config.rope_scale == 1.5
    assert config_from_gguf(METADATA, "phi3", "t", FACTORS).rope_scale == 1
    config = config_from_gguf(METADATA | {"rope.freq_base": 1e6}, "gemma3", "t", {})
    assert np.array_equal(config.frequencies[1], 10000.0 ** (-np.arange(16) / 16))
    for dims in range(2, 90, 2):  # 88 * (30 / 88) is below 30
        part = {"attention.key_length": 88, "rope.dimension_count": dims}
        assert config_from_gguf(METADATA | part, "phi3", "t", {}).rotary_dims == dims


@pytest.mark.parametrize(
    ("architecture", "more", "factors", "pattern"),
    [
        ("qwen2", {}, {}, "qwen2.attention.sliding_window 64 is not supported"),
        ("gpt2", {}, {}, "gpt2.attention.sliding_window 64 is not supported"),
        ("gemma3", {"attention.sliding_window": -1}, {}, "attention.sliding_window: expected a wh"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, {}, "window_pattern: expected a whole"),
        ("gemma3", {"attention.sliding_window_pattern": [1]}, {}, "layer_types: expected one of"),
        ("gemma3", {"attention.sliding_window_pattern": [2] * 6}, {}, "layer_types: expected one"),
        ("llama", {"attn_logit_softcapping": 9.0}, {}, "llama.attn_logit_softcapping 9.0 is not"),
        ("gemma", {"final_logit_softcapping": 9.0}, {}, "gemma.final_logit_softcapping 9.0 is no"),
        ("gemma2", {"attn_logit_softcapping": "x"}, {}, "attn_logit_softcapping: expected a num"),
        ("gemma2", {"rope.freq_base_swa": 1e4}, {}, "gemma2.rope.freq_base_swa 10000.0 is not"),
        ("phi3", {"rope.scaling.attn_factor": 1.2}, {}, "phi3.rope.scaling.attn_factor 1.2 is not"),
        ("phi3", {"rope.scaling.type": "longrope"}, {}, "longrope without the tensors"),
        ("phi3", {}, {"short_factor": [1.0] * 16}, "long_factor: expected 16 finite numbers"),
        ("phi3", {}, FACTORS | {"long_factor": [0.0] * 16}, "long_factor: expected 16 finite"),
        ("phi3", {"rope.dimension_count": 34}, {}, "rope.dimension_count: expected the head size"),
        ("llama", {"rope.dimension_count": 16}, {}, "rope.dimension_count: expected the head si"),
        ("llama", {"rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor 0.5 is not supp"),
        ("llama", {"rope.scaling.factor": 0.5}, {}, "rope.scaling.factor: expected at least 1"),
        ("llama", {"attention.value_length": 16}, {}, "attention.value_length: expected the head"),
        (
            "llama",
            {"attention.head_count_kv": [4, 4]},
            {},
            "head_count_kv: expected a whole number",
        ),
    ],
)
def test_gguf_metadata_that_does_not_fit(architecture, more, factors, pattern):
    metadata = METADATA | more
    if architecture in ("gemma",):
        metadata = {key: value for key, value in metadata.items() if "window" not in key}
    with pytest.raises(ExportError, match=pattern):
        config_from_gguf(metadata, architecture, "t", factors)


@pytest.mark.parametrize(
    ("key", "value", "kind", "pattern"),
    [
        ("tokenizer.ggml.bos_token_id", "x", "STRING", "bos_token_id: expected an id, found 'x'"),
        ("tokenizer.ggml.eos_token_id", 1.5, "FLOAT32", "eos_token_id: expected an id, found 1.5"),
        ("tokenizer.ggml.eot_token_id", True, "BOOL", "eot_token_id: expected an id, found True"),
        ("general.name", 7, "UINT32", "general.name: expected a text, found 7"),
    ],
)
def test_gguf_values_of_another_kind(tmp_path, tensors, capsys, key, value, kind, pattern):
    def add(writer):
        writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType[kind])

    writers.gguf_file(tmp_path / "t.gguf", tiny.CONFIG, tensors, add=add)
    refused(capsys, tmp_path / "t.gguf", tmp_path / "model.bin", pattern)


def test_gguf_tokens(tmp_path, tensors):
    """Ids of bos and pad, stops by key and by text, the shape of the chat."""
    content = writers.byte_level_json(added=[("<|im_end|>", True), ("<|eot_id|>", False)])
    vocab = content["model"]["vocab"]
    tokens = [*vocab, "<|im_end|>", "<|eot_id|>", "<|endoftext|>"]

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(vocab) + [3, 4, 3])
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_bos_token_id(7)
        writer.add_eos_token_id(9)
        writer.add_eot_token_id(11)
        writer.add_pad_token_id(8)
        writer.add_unk_token_id(6)
        writer.add_chat_template("{{'<|im_start|>system\nBe kind.<|im_end|>'}}")

    writers.gguf_file(tmp_path / "t.gguf", tiny.CONFIG, tensors, add=add)
    file = export(tmp_path / "t.gguf", tmp_path / "model.bin")
    config = file.config
    assert (config["bos"], config["pad"], config["unk"], config["add_bos"]) == (7, 8, 6, 0)
    # <|eot_id|> is an ordinary token here, and stops nothing.
    assert config["stops"] == [9, 11, len(vocab), len(vocab) + 2]
    assert config["vocab_used"] == len(tokens) and config["chat_shape"] == 3
    assert file.tokenizer.endswith(b"Be kind.")


def test_smollm2(tmp_path):
    """The real file, against the golden logits of transformers at a few positions."""
    golden = np.load(GOLDEN / "smollm2.npz")
    file = export(need(SMOLLM2), tmp_path / "model.bin", "--dtype", "f32")
    ids = golden["ids"][:9]
    logits = reader.forward(file, ids)
    error = np.abs(logits[:, golden["columns"]] - golden["f32_logits"][: len(ids)]).max()
    assert error <= 1e-3 and np.array_equal(logits.argmax(1), golden["f32_argmax"][: len(ids)])
    assert (file.config["stops"], file.config["bos"], file.config["chat_shape"]) == ([2, 0], 1, 3)
    assert file.config["add_bos"] == 0 and file.config["vocab_used"] == 49152
