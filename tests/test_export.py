"""The exporter's numbers: every source of the same weights gives the same tensors, and the file,
run in float64 from its published format, gives the logits of the golden data."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reader
import writers
from exporting import differs, export, put_together, same_tensors, small
from golden import tiny
from tokenizer_data import DATA, ROOT, need

from export import writer

GOLDEN = Path(__file__).parent / "golden"
STORIES = DATA / "llama2c" / "stories260K.bin"
TOK512 = DATA / "llama2c" / "tok512.bin"


# ---- Hugging Face ----


def test_every_weight_arrives(tiny_file, tensors):
    wanted = put_together(tiny.CONFIG, tensors)
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


def test_llama3_scaling_counts(tmp_path, tensors):
    """Llama 3.1 8B keeps 29 frequencies, blends 6 and divides 29; Llama 3.2 1B 15, 3 and 14."""
    from export.rope import frequencies, scale_llama3

    for size, factor, counts in ((128, 8.0, (29, 6, 29)), (64, 32.0, (15, 3, 14))):
        base = frequencies(size, 500000.0)
        ratio = base / scale_llama3(base, factor, 1.0, 4.0, 8192)
        kept, divided = np.isclose(ratio, 1, rtol=1e-12), np.isclose(ratio, factor, rtol=1e-12)
        assert (kept.sum(), (~kept & ~divided).sum(), divided.sum()) == counts


@pytest.mark.parametrize("shards", [2, 5])
def test_shards(tmp_path, tiny_file, tensors, shards):
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tensors, shards)
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    same_tensors(file, tiny_file)
    assert file.config == tiny_file.config


def test_the_safetensors_library_writes_what_is_read(tmp_path, tiny_file, tensors):
    from safetensors.numpy import save_file

    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tensors)
    save_file(tensors, tmp_path / "tiny" / "model.safetensors")
    same_tensors(export(tmp_path / "tiny", tmp_path / "m.bin", "--dtype", "f32"), tiny_file)


@pytest.mark.parametrize(("kind", "bits"), [("F64", 52), ("F16", 10), ("BF16", 7)])
def test_source_dtypes(tmp_path, tensors, kind, bits):
    """Values that the source's dtype holds exactly arrive exactly."""
    held = {}
    for name, values in tensors.items():
        mantissa, exponent = np.frexp(values)
        short = np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)
        # Below 2^-14 a half has fewer bits.
        held[name] = np.where(np.abs(short) < 2**-13, 0, short).astype(np.float32)
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, held, kind=kind)
    file = export(tmp_path / "tiny", tmp_path / "model.bin", "--dtype", "f32")
    for name, values in put_together(tiny.CONFIG, held).items():
        assert np.array_equal(file.tensors[name], values), name


def test_bf16_is_the_nearest_and_ties_are_even(tmp_path, tiny_file, tensors):
    ties = {name: values.copy() for name, values in tensors.items()}
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


def test_tied_by_absence_and_by_equality(tmp_path, tensors):
    tensors = dict(tensors)
    del tensors["lm_head.weight"]
    writers.hf_folder(tmp_path / "absent", tiny.CONFIG, tensors)
    absent = export(tmp_path / "absent", tmp_path / "absent.bin")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    writers.hf_folder(tmp_path / "equal", tiny.CONFIG | {"tie_word_embeddings": True}, tensors)
    equal = export(tmp_path / "equal", tmp_path / "equal.bin")
    assert absent.config["tied"] == equal.config["tied"] == 1
    same_tensors(absent, equal)


def test_old_config_keys_and_defaults(tmp_path, tensors):
    """rope_theta and rope_scaling of transformers 4; absent and null keys."""
    old = dict(tiny.CONFIG)
    rope = dict(old.pop("rope_parameters"))
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    rope["type"] = rope.pop("rope_type")
    for key in ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"):
        del old[key]
    del old["bos_token_id"]
    old["eos_token_id"] = [5, 6, 5]
    writers.hf_folder(tmp_path / "old", old, tensors)
    file = export(tmp_path / "old", tmp_path / "model.bin", "--dtype", "f32")
    assert file.config["norm_eps"] == np.float32(1e-6) and file.config["bos"] == 1
    assert file.config["stops"] == [5, 6]
    (tmp_path / "old" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "bos_token_id": 3, "pad_token_id": 9})
    )
    file = export(tmp_path / "old", tmp_path / "model.bin")
    assert (file.config["stops"], file.config["bos"], file.config["pad"]) == ([7, 8], 3, 9)


@pytest.mark.parametrize("none", [None, -1])
def test_no_ids(tmp_path, tensors, none):
    """null, and the -1 of Llama 1's first conversions."""
    config = tiny.CONFIG | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), none)
    writers.hf_folder(tmp_path / "t", config, tensors)
    file = export(tmp_path / "t", tmp_path / "model.bin").config
    assert (file["bos"], file["add_bos"], file["stops"]) == (reader.NO_ID, 0, [])
    assert file["pad"] == reader.NO_ID


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
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config, tensors = small(**mistral, sliding_window=None)
    plain = export(writers.hf_folder(tmp_path / "t", config, tensors), tmp_path / "a.bin")
    config["sliding_window"] = config["max_position_embeddings"]  # never reached
    wide = export(writers.hf_folder(tmp_path / "t", config, tensors), tmp_path / "b.bin")
    same_tensors(plain, wide)


def test_ignored_buffers(tmp_path, tensors, tiny_file):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors | extra)
    same_tensors(export(tmp_path / "t", tmp_path / "m.bin", "--dtype", "f32"), tiny_file)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("plain", "plain"), ("é" * 40, "é" * 31), ("a\nb\0\x1b[c", "ab[c"), ("", "")],
)
def test_names(tmp_path, tensors, name, stored):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    file = export(tmp_path / "t", tmp_path / "model.bin", "--name", name)
    assert file.config["name"] == stored


def test_what_it_prints(tmp_path, tensors, capsys):
    writers.hf_folder(tmp_path / "my model", tiny.CONFIG, tensors)
    export(tmp_path / "my model", tmp_path / "my model.bin")
    out, err = capsys.readouterr()
    assert "LlamaForCausalLM" in out and "no tokenizer" in out and "llama3 scaling 8" in out
    assert f"{(tmp_path / 'my model.bin').stat().st_size} bytes" in out and err == ""
    assert out.splitlines()[-1].startswith(f"  ./run '{tmp_path}/my model.bin' --ids")


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
def test_chunks_of_any_size(tmp_path, tensors, tiny_file, stories, monkeypatch, size):
    """Reading a few rows at a time, which cuts heads and groups apart, changes nothing."""
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tensors)
    writers.gguf_file(tmp_path / "tiny.gguf", tiny.CONFIG, tensors)
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
