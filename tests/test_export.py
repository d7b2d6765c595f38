"""The exporter's numbers: every source of the same weights gives the same tensors, and the file,
run in float64 from its published format, gives the logits of the golden data."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import reader
import writers
from golden import tiny
from tokenizer_data import DATA, ROOT, SMOLLM2, need

from export import writer
from export.__main__ import main

GOLDEN = Path(__file__).parent / "golden"
STORIES = DATA / "llama2c" / "stories260K.bin"
TOK512 = DATA / "llama2c" / "tok512.bin"


def export(source: Path, target: Path, *options) -> reader.ModelFile:
    assert main([str(source), "-o", str(target), *map(str, options)]) == 0
    assert [path.name for path in target.parent.glob(".*.tmp")] == []
    return reader.read(target)


def same_tensors(one: reader.ModelFile, other: reader.ModelFile) -> None:
    assert one.raw.keys() == other.raw.keys()
    assert [name for name in one.raw if one.raw[name] != other.raw[name]] == []


def differs(one: reader.ModelFile, other: reader.ModelFile) -> set[str]:
    return {key for key in one.config if one.config[key] != other.config[key]}


def put_together(config: dict, tensors: dict) -> dict[str, np.ndarray]:
    """The tensors of model.bin from Hugging Face's, for the comparison."""
    out = {
        "embed": tensors["model.embed_tokens.weight"],
        "norm_final": tensors["model.norm.weight"],
        "classifier": tensors["lm_head.weight"],
    }
    for layer in range(config["num_hidden_layers"]):
        at, to = f"model.layers.{layer}.", f"layers.{layer}."
        stack = [tensors[f"{at}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        out[to + "qkv"] = np.concatenate(stack)
        out[to + "out"] = tensors[at + "self_attn.o_proj.weight"]
        stack = [tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        out[to + "gate_up"] = np.concatenate(stack)
        out[to + "down"] = tensors[at + "mlp.down_proj.weight"]
        out[to + "norm_attention"] = tensors[at + "input_layernorm.weight"]
        out[to + "norm_ffn"] = tensors[at + "post_attention_layernorm.weight"]
    return out


@pytest.fixture(scope="module")
def tiny_tensors():
    return tiny.tensors()


@pytest.fixture(scope="module")
def tiny_file(tiny_tensors, tmp_path_factory):
    """The tiny Llama from one float32 safetensors file, as f32."""
    folder = tmp_path_factory.mktemp("tiny")
    writers.hf_folder(folder / "tiny", tiny.CONFIG, tiny_tensors)
    return export(folder / "tiny", folder / "model.bin", "--dtype", "f32")


# ---- Hugging Face ----


def test_every_weight_arrives(tiny_file, tiny_tensors):
    wanted = put_together(tiny.CONFIG, tiny_tensors)
    assert tiny_file.tensors.keys() - wanted.keys() == {"rope"}
    for name, values in wanted.items():
        assert np.array_equal(tiny_file.tensors[name], values), name


def test_config(tiny_file):
    config = tiny_file.config
    expected = {
        "name": "tiny", "width": 64, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 16,
        "ffn": 176, "vocab": 331, "vocab_used": 331, "context": 512, "weight_dtype": 0,
        "norm_eps": np.float32(1e-5), "gated": 1, "rotary_dims": 16, "rope_tables": 1,
        "rope_scale": 1.0, "attention_scale": 0.25, "embed_scale": 1.0, "bos": 1, "add_bos": 1,
        "pad": reader.NO_ID, "unk": reader.NO_ID, "stop_count": 1, "stops": [2],
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert all(config[key] == 0 for key in config.keys() - expected.keys())


def test_logits_of_transformers(tiny_file):
    golden = np.load(GOLDEN / "tiny_llama.npz")
    difference = np.abs(reader.forward(tiny_file, golden["ids"]) - golden["logits"]).max()
    print(f"largest difference {difference:.2g}")
    assert difference <= 1e-4


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES.keys() - {"llama"}))
def test_other_families(tmp_path, family):
    """They err from float64 by what float32 costs transformers."""
    config, golden = tiny.FAMILIES[family], np.load(GOLDEN / f"tiny_{family}.npz")
    writers.hf_folder(tmp_path / "tiny", config, tiny.tensors(config))
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    said = {
        key: file.config[key] for key in ("qkv_bias", "qk_norm", "norm_placement", "activation")
    }
    assert said == {
        "qkv_bias": "qwen2" in family,
        "qk_norm": {"qwen3": 1, "gemma3": 1, "olmo2": 2}.get(family, 0),
        "norm_placement": {"gemma2": 1, "gemma3": 1, "olmo2": 2}.get(family, 0),
        "activation": "gemma" in family,
    }
    dims = {"phi3": 12, "qwen2": 8, "qwen2_window": 8, "olmo2": 8}
    assert file.config["rotary_dims"] == dims.get(family, 16)
    assert file.layers == {
        "qwen2_window": [(0, 0), (45, 0), (45, 0)],
        "mistral": [(37, 0)] * 3,
        "phi3": [(129, 0)] * 3,
        "smollm3": [(0, 0), (0, reader.NO_ID), (0, 0)],
        "gemma2": [(53, 0), (0, 0), (53, 0)],
        "gemma3": [(53, 1), (0, 0), (53, 1)],
    }.get(family, [(0, 0)] * 3)
    difference = np.abs(reader.forward(file, golden["ids"])[:, ::5] - golden["logits"]).max()
    assert difference <= 1.1 * golden["error"]


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


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_model_that_sees(tmp_path, prefix):
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
    same_tensors(other, file)
    assert differs(other, file) == {"name", "stops", "stop_count"}
    assert other.config["stops"] == [1, 106] and other.layers == file.layers


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_in_gguf(tmp_path, family):
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "tiny", config, tiny.tensors(config))
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    writers.gguf_file(tmp_path / "tiny.gguf", config, tiny.tensors(config))
    other = export(tmp_path / "tiny.gguf", tmp_path / "gguf.bin", "--dtype", "f32")
    same_tensors(other, file)
    assert differs(other, file) == {"stops", "stop_count"}  # a GGUF names one


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


def test_llama3_scaling_counts(tmp_path, tiny_tensors):
    """Llama 3.1 8B keeps 29 frequencies, blends 6 and divides 29; Llama 3.2 1B 15, 3 and 14."""
    from export.config import frequencies, scale_llama3

    for size, factor, counts in ((128, 8.0, (29, 6, 29)), (64, 32.0, (15, 3, 14))):
        base = frequencies(size, 500000.0)
        ratio = base / scale_llama3(base, factor, 1.0, 4.0, 8192)
        kept, divided = np.isclose(ratio, 1, rtol=1e-12), np.isclose(ratio, factor, rtol=1e-12)
        assert (kept.sum(), (~kept & ~divided).sum(), divided.sum()) == counts


@pytest.mark.parametrize("shards", [2, 5])
def test_shards(tmp_path, tiny_file, tiny_tensors, shards):
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tiny_tensors, shards)
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    same_tensors(file, tiny_file)
    assert file.config == tiny_file.config


def test_the_safetensors_library_writes_what_is_read(tmp_path, tiny_file, tiny_tensors):
    from safetensors.numpy import save_file

    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tiny_tensors)
    save_file(tiny_tensors, tmp_path / "tiny" / "model.safetensors")
    same_tensors(export(tmp_path / "tiny", tmp_path / "m.bin", "--dtype", "f32"), tiny_file)


@pytest.mark.parametrize(("kind", "bits"), [("F64", 52), ("F16", 10), ("BF16", 7)])
def test_source_dtypes(tmp_path, tiny_tensors, kind, bits):
    """Values that the source's dtype holds exactly arrive exactly."""
    held = {}
    for name, values in tiny_tensors.items():
        mantissa, exponent = np.frexp(values)
        short = np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)
        # Below 2^-14 a half has fewer bits.
        held[name] = np.where(np.abs(short) < 2**-13, 0, short).astype(np.float32)
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, held, kind=kind)
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    for name, values in put_together(tiny.CONFIG, held).items():
        assert np.array_equal(file.tensors[name], values), name


def test_bf16_is_the_nearest_and_ties_are_even(tmp_path, tiny_file, tiny_tensors):
    ties = {name: values.copy() for name, values in tiny_tensors.items()}
    row = ties["model.embed_tokens.weight"][0]
    row[:4] = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001], np.uint32).view(np.float32)
    row[4:7] = [3.3895313e38, 1e-40, -0.0]
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, ties)
    file = export(tmp_path / "tiny", tmp_path / "model.bin")
    upper = file.tensors["embed"][0].view(np.uint32) >> 16
    assert upper[:4].tolist() == [0x3F80, 0x3F82, 0xBF80, 0x3F81]
    assert upper[6] == 0x8000
    for name, exact in put_together(tiny.CONFIG, ties).items():
        stored = file.tensors[name]
        if exact.ndim == 1:
            assert np.array_equal(stored, exact)
            continue
        # The two bf16 values around each: the nearer one it is, in exact arithmetic.
        below = exact.view(np.uint32) & 0xFFFF0000
        around = [bits.view(np.float32).astype(np.float64) for bits in (below, below + 0x10000)]
        error = np.abs(stored.astype(np.float64) - exact)
        assert (error == np.minimum(*(np.abs(value - exact) for value in around))).all()
    assert differs(file, tiny_file) == {"weight_dtype"}


def test_tied_by_absence_and_by_equality(tmp_path, tiny_tensors):
    tensors = dict(tiny_tensors)
    del tensors["lm_head.weight"]
    writers.hf_folder(tmp_path / "absent", tiny.CONFIG, tensors)
    absent = export(tmp_path / "absent", tmp_path / "absent.bin")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    writers.hf_folder(tmp_path / "equal", tiny.CONFIG | {"tie_word_embeddings": True}, tensors)
    equal = export(tmp_path / "equal", tmp_path / "equal.bin")
    assert absent.config["tied"] == equal.config["tied"] == 1
    same_tensors(absent, equal)


def test_old_config_keys_and_defaults(tmp_path, tiny_tensors):
    """rope_theta and rope_scaling of transformers 4; absent and null keys."""
    old = dict(tiny.CONFIG)
    rope = dict(old.pop("rope_parameters"))
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    for key in ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"):
        del old[key]
    del old["bos_token_id"]
    old["eos_token_id"] = [5, 6, 5]
    writers.hf_folder(tmp_path / "old", old, tiny_tensors)
    file = export(tmp_path / "old", tmp_path / "model.bin", "--dtype", "f32")
    assert file.config["norm_eps"] == np.float32(1e-6) and file.config["bos"] == 1
    assert file.config["stops"] == [5, 6]
    (tmp_path / "old" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "bos_token_id": 3, "pad_token_id": 9})
    )
    file = export(tmp_path / "old", tmp_path / "model.bin")
    assert (file.config["stops"], file.config["bos"], file.config["pad"]) == ([7, 8], 3, 9)


@pytest.mark.parametrize("none", [None, -1])
def test_no_ids(tmp_path, tiny_tensors, none):
    """null, and the -1 of Llama 1's first conversions."""
    config = tiny.CONFIG | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), none)
    writers.hf_folder(tmp_path / "t", config, tiny_tensors)
    file = export(tmp_path / "t", tmp_path / "model.bin").config
    assert (file["bos"], file["add_bos"], file["stops"]) == (reader.NO_ID, 0, [])
    assert file["pad"] == reader.NO_ID


def small(**changes) -> tuple[dict, dict]:
    """Config and tensors of one layer that fit together, for changes of shape."""
    config = tiny.CONFIG | changes | {"num_hidden_layers": 1, "vocab_size": 40}
    width, ffn, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or width // heads
    query, key = heads * size, kv_heads * size
    shapes = [(width,), (query, width), (key, width), (key, width), (width, query), (width,)]
    shapes += [(ffn, width), (ffn, width), (width, ffn)]
    tensors = {"model.embed_tokens.weight": tiny.tensor("model.embed_tokens", (vocab, width))}
    for (name, _), shape in zip(writers.LAYER_NAMES, shapes, strict=True):
        name = f"model.layers.0.{name}.weight"
        tensors[name] = tiny.tensor(name, shape)
    tensors["model.norm.weight"] = tiny.tensor("model.norm.weight", (width,))
    return config, tensors


def test_missing_head_dim_and_kv_heads(tmp_path):
    config, tensors = small(head_dim=None, num_key_value_heads=None)
    writers.hf_folder(tmp_path / "t", config, tensors)
    file = export(tmp_path / "t", tmp_path / "model.bin").config
    assert (file["head_dim"], file["kv_heads"]) == (8, 8)
    del config["head_dim"], config["num_key_value_heads"]
    writers.hf_folder(tmp_path / "t", config, tensors)
    assert export(tmp_path / "t", tmp_path / "model.bin").config == file


def test_ffn_is_padded_with_zeros(tmp_path):
    config, tensors = small(intermediate_size=171)
    writers.hf_folder(tmp_path / "t", config, tensors)
    file = export(tmp_path / "t", tmp_path / "model.bin", "--dtype", "f32")
    assert file.config["ffn"] == 176
    at = "model.layers.0.mlp."
    gate, up = np.split(file.tensors["layers.0.gate_up"], 2)
    for stored, name in ((gate, "gate"), (up, "up"), (file.tensors["layers.0.down"].T, "down")):
        original = tensors[f"{at}{name}_proj.weight"]
        original = original.T if name == "down" else original
        assert np.array_equal(stored[:171], original) and not stored[171:].any()


def test_linear_scaling_and_default(tmp_path):
    tables = []
    for rope in (
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ):
        config, tensors = small(rope_parameters=rope)
        writers.hf_folder(tmp_path / "t", config, tensors)
        tables.append(export(tmp_path / "t", tmp_path / "model.bin").tensors["rope"][0])
    exact = 10000.0 ** (-np.arange(8) / 8)
    assert np.array_equal(tables[0], exact.astype(np.float32))
    assert np.array_equal(tables[1], (exact / 4).astype(np.float32))


def test_mistral(tmp_path):
    config, tensors = small(architectures=["MistralForCausalLM"], sliding_window=None)
    plain = export(writers.hf_folder(tmp_path / "t", config, tensors), tmp_path / "a.bin")
    config["sliding_window"] = config["max_position_embeddings"]  # never reached
    wide = export(writers.hf_folder(tmp_path / "t", config, tensors), tmp_path / "b.bin")
    same_tensors(plain, wide)


def test_ignored_buffers(tmp_path, tiny_tensors, tiny_file):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tiny_tensors | extra)
    same_tensors(export(tmp_path / "t", tmp_path / "m.bin", "--dtype", "f32"), tiny_file)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("plain", "plain"), ("é" * 40, "é" * 31), ("a\nb\0\x1b[c", "ab[c"), ("", "")],
)
def test_names(tmp_path, tiny_tensors, name, stored):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tiny_tensors)
    file = export(tmp_path / "t", tmp_path / "model.bin", "--name", name)
    assert file.config["name"] == stored


def test_what_it_prints(tmp_path, tiny_tensors, capsys):
    writers.hf_folder(tmp_path / "my model", tiny.CONFIG, tiny_tensors)
    export(tmp_path / "my model", tmp_path / "my model.bin")
    out, err = capsys.readouterr()
    assert "LlamaForCausalLM" in out and "no tokenizer" in out and "llama3 scaling 8" in out
    assert f"{(tmp_path / 'my model.bin').stat().st_size} bytes" in out and err == ""
    assert out.splitlines()[-1].startswith(f"  ./run '{tmp_path}/my model.bin' --ids")


# ---- GGUF ----


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_gguf_of_the_same_weights(tmp_path, tiny_tensors, tiny_file, kind):
    held = {
        name: gguf.dequantize(
            gguf.quantize(values, gguf.GGMLQuantizationType[kind]), gguf.GGMLQuantizationType[kind]
        )
        if values.ndim == 2
        else values
        for name, values in tiny_tensors.items()
    }
    writers.gguf_file(tmp_path / "tiny.gguf", tiny.CONFIG, tiny_tensors, kind)
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


def test_gguf_tokens(tmp_path, tiny_tensors):
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

    writers.gguf_file(tmp_path / "t.gguf", tiny.CONFIG, tiny_tensors, add=add)
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


# ---- llama2.c ----


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    target = tmp_path_factory.mktemp("stories") / "model.bin"
    return export(need(STORIES), target, "--dtype", "f32", "--tokenizer", TOK512)


def test_stories_tell_the_golden_story(stories):
    golden = np.load(GOLDEN / "stories260K.npz")
    logits = reader.forward(stories, np.concatenate([[1], golden["ids"][:-1]]))
    assert np.array_equal(logits.argmax(1), golden["ids"])
    assert np.abs(logits[: len(golden["logits"])] - golden["logits"]).max() <= 1e-5
    config = stories.config
    assert (config["ffn"], config["bos"], config["add_bos"]) == (176, 1, 1)
    assert (config["stops"], config["unk"], config["norm_eps"]) == ([1, 2], 0, np.float32(1e-5))


def test_llama2c_v1(tmp_path, stories):
    header, tensors = writers.read_llama2c_v0(STORIES)
    writers.llama2c_file(tmp_path / "stories260K.bin", 1, header, tensors)
    options = ("--dtype", "f32", "--tokenizer", TOK512)
    file = export(tmp_path / "stories260K.bin", tmp_path / "model.bin", *options)
    same_tensors(file, stories)
    assert file.config == stories.config and file.tokenizer == stories.tokenizer


@pytest.mark.parametrize("group", [64, 16])
def test_llama2c_v2(tmp_path, stories, group):
    """Groups of 64 straddle the rows of w2, which have 172 values."""
    header, tensors = writers.read_llama2c_v0(STORIES)
    writers.llama2c_file(tmp_path / "q.bin", 2, header, tensors, group)
    file = export(tmp_path / "q.bin", tmp_path / "model.bin", "--dtype", "f32")
    for name, exact in stories.tensors.items():
        near = file.tensors[name]
        limit = np.abs(exact).max() / 127 / 2 if exact.ndim == 2 and name != "rope" else 0
        assert np.abs(near - exact).max() <= limit * 1.0001, name
    # To the last bit: the rows of w2, whose groups are the awkward ones.
    values, scales = writers.quantised(tensors["model.layers.2.mlp.down_proj.weight"], group)
    exact = (values.astype(np.float32) * scales[:, None]).reshape(64, 172)
    assert np.array_equal(file.tensors["layers.2.down"][:, :172], exact)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_llama2c_classifier_and_zero_group(tmp_path, stories, version):
    header, tensors = writers.read_llama2c_v0(STORIES)
    tensors["lm_head.weight"] = np.flipud(tensors["model.embed_tokens.weight"]).copy()
    tensors["lm_head.weight"][3, :64] = 0
    if version == 0:
        writers.llama2c_v0_file(tmp_path / "c.bin", header, tensors)
    else:
        writers.llama2c_file(tmp_path / "c.bin", version, header, tensors)
    file = export(tmp_path / "c.bin", tmp_path / "model.bin", "--dtype", "f32")
    assert file.config["tied"] == 0 and file.tokenizer == b""
    assert not file.tensors["classifier"][3].any()
    if version < 2:
        assert np.array_equal(file.tensors["classifier"], tensors["lm_head.weight"])


# ---- memory ----


@pytest.mark.parametrize("size", [100, 700, 5000])
def test_chunks_of_any_size(tmp_path, tiny_tensors, tiny_file, stories, monkeypatch, size):
    """Reading a few rows at a time, which cuts heads and groups apart, changes nothing."""
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tiny_tensors)
    writers.gguf_file(tmp_path / "tiny.gguf", tiny.CONFIG, tiny_tensors)
    header, tensors = writers.read_llama2c_v0(STORIES)
    writers.llama2c_file(tmp_path / "v2.bin", 2, header, tensors)
    whole = export(tmp_path / "v2.bin", tmp_path / "whole.bin")
    monkeypatch.setattr(writer, "CHUNK_BYTES", size)
    same_tensors(export(tmp_path / "tiny", tmp_path / "a.bin", "--dtype", "f32"), tiny_file)
    from_gguf = export(tmp_path / "tiny.gguf", tmp_path / "b.bin", "--dtype", "f32")
    from_gguf.raw["rope"] = tiny_file.raw["rope"]
    same_tensors(from_gguf, tiny_file)
    same_tensors(export(tmp_path / "v2.bin", tmp_path / "c.bin"), whole)
    options = ("--dtype", "f32", "--tokenizer", TOK512)
    same_tensors(export(STORIES, tmp_path / "d.bin", *options), stories)


PEAK = """
import sys
from export.__main__ import main
code = main(sys.argv[1:])
print("peak", *(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def test_memory_stays_small(tmp_path):
    """An embedding of 512 MiB, made of holes: exported within 128 MiB of memory."""
    config, tensors = small()
    config |= {"vocab_size": 131072, "hidden_size": 2048}
    header, at = {}, 0
    for name, values in tensors.items():
        # The tensors of small() with the two sizes replaced.
        sizes = {40: 131072, 64: 2048}
        shape = [sizes.get(size, size) for size in values.shape]
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder = writers.hf_folder(tmp_path / "big", config, tensors)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    command = [sys.executable, "-c", PEAK, folder, "-o", tmp_path / "model.bin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak = int(done.stdout.rsplit("peak ", 1)[1])
    print(f"{peak / 1024:.0f} MiB")
    assert (tmp_path / "model.bin").stat().st_size > 512 << 20
    (tmp_path / "model.bin").unlink()
    assert peak < 128 * 1024
