"""The exporter's refusals: one line, exit code 2, nothing written."""

import json
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import writers
from exporting import refused
from golden import tiny
from tokenizer_data import DATA, ROOT, need

from export.__main__ import main

STORIES = DATA / "llama2c" / "stories260K.bin"
EMBED, Q0 = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00001-of-00002.safetensors"


# ---- configs ----


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM is not .*LlamaForCausalLM, M",
        ),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "text_config": 3,
            },
            "text_config: expected the config of the text part, found 3",
        ),
        ({"architectures": None, "model_type": "gptj"}, "gptj is not supported; .*GPT2LMHead"),
        ({"architectures": None, "model_type": 8}, "model_type: expected a name, found 8"),
        ({"architectures": 7}, "architectures: expected a list of names, found 7"),
        ({"architectures": {"x": 1}}, "architectures: expected a list of names"),
        ({"architectures": [["x"]]}, "config.json"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"mlp_bias": 3}, "mlp_bias: expected true or false, found 3"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, found 'gelu'"),
        ({"hidden_activation": "gelu"}, "hidden_activation: expected silu, found 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints"),
        ({"hidden_size": 60, "head_dim": 16}, "width 60 is not a multiple of 8"),
        ({"hidden_size": 100, "head_dim": None}, "hidden_size 100 is not a multiple of 8 heads"),
        ({"head_dim": 12}, "head size 12 is not a multiple of 8"),
        ({"head_dim": 520}, "head size 520 is not in 1 to 512"),
        ({"num_key_value_heads": 3}, "8 heads are not a multiple of 3"),
        ({"num_hidden_layers": 1025}, "layers 1025 is not in 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number above 0, found 0"),
        ({"hidden_size": "64"}, "hidden_size: expected a whole number above 0, found '64'"),
        ({"hidden_size": True}, "hidden_size: expected a whole number"),
        ({"vocab_size": 1 << 21}, "vocabulary 2097152 is not in 1 to 1048576"),
        ({"max_position_embeddings": 1 << 23}, "context 8388608 is not in"),
        ({"rms_norm_eps": 0}, "norm epsilon 0.0 is not in"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: expected a number, found 'x'"),
        ({"bos_token_id": 331}, "bos id 331 is not in 0 to 330"),
        ({"eos_token_id": [2, 999]}, "eos id 999 is not in 0 to 330"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id"),
        ({"eos_token_id": list(range(17))}, "17 eos ids, at most 16"),
        ({"rope_parameters": None, "rope_scaling": {"type": "ntk"}}, "'ntk' is not supp.*; known"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of RoPE param"),
        ({"rope_parameters": [1]}, "one set of RoPE param"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: expected a number, found None"),
        ({"num_hidden_layers": 1 << 24}, "layers 16777216 is not in 1 to 1024"),
        ({"num_hidden_layers": 1 << 31}, "a number up to 16777216, found 2147483648"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "theta 0.5 is not in 1 to 1e9"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        (
            {"rope_parameters": tiny.CONFIG["rope_parameters"] | {"low_freq_factor": 4.0}},
            "llama3 RoPE scaling .* makes no sense",
        ),
    ],
)
def test_configs(tmp_path, out, capsys, tensors, changes, pattern):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG | changes, tensors)
    refused(capsys, tmp_path / "t", out, pattern)


@pytest.mark.parametrize("value", [None, True, -1, 0, 1e400, "x", [], {}, [[]], 1 << 31, 1 << 70])
@pytest.mark.parametrize("family", ["llama", "qwen2_window", "phi4", "smollm3", "gemma3"])
def test_config_values_of_any_kind(tmp_path, capsys, family, value):
    """Whatever a key holds: a file or one line."""
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    for key in config.keys() | {"layer_types", "no_rope_layer_interval", "partial_rotary_factor"}:
        (tmp_path / "t" / "config.json").write_text(json.dumps(config | {key: value}))
        capsys.readouterr()
        code = main([str(tmp_path / "t"), "-o", str(tmp_path / "model.bin")])
        _, err = capsys.readouterr()
        assert (code, len(err.splitlines())) in ((0, 0), (2, 1)), (key, err)


@pytest.mark.parametrize("value", [None, True, -1, 0, 1e400, 5e-324, "x", [], {}, [[]], 1 << 70])
@pytest.mark.parametrize("family", ["llama", "phi4", "qwen3_yarn", "gemma3"])
def test_rope_parameters_of_any_kind(tmp_path, capsys, family, value):
    """And those that may be there."""
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    whole = config["rope_parameters"]
    given = whole.get("full_attention", whole)
    more = ("attention_factor", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    for key in given.keys() | {*more, "truncate", "partial_rotary_factor"}:
        rope = given | {"mscale": 1.0, "mscale_all_dim": 1.0} | {key: value}
        rope = whole | {"full_attention": rope} if family == "gemma3" else rope
        (tmp_path / "t" / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
        capsys.readouterr()
        code = main([str(tmp_path / "t"), "-o", str(tmp_path / "model.bin")])
        _, err = capsys.readouterr()
        assert (code, len(err.splitlines())) in ((0, 0), (2, 1)), (key, err)


# ---- tensors ----


def without(tensors, name):
    return {key: values for key, values in tensors.items() if key != name}


def with_value(tensors, name, place, value):
    changed = tensors[name].copy()
    changed[place] = value
    return tensors | {name: changed}


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda t: without(t, Q0), f"tensor {Q0} is missing"),
        (lambda t: without(t, EMBED), f"tensor {EMBED} is missing"),
        (lambda t: t | {"model.extra.weight": t[Q0]}, "does not have: model.extra.weight"),
        (
            lambda t: t | {"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]},
            "does not have: .*q_proj.bias",
        ),
        (
            lambda t: t | {f"model.layers.{i}.x": t["model.norm.weight"] for i in range(3, 9)},
            r"does not have: model.layers.3.x, model.layers.4.x, model.layers.5.x and 3 more",
        ),
        (
            lambda t: t | {Q0: t[Q0][:120]},
            rf"tensor {Q0}: expected shape \[128, 64\], found \[120, 64\]",
        ),
        (lambda t: t | {Q0: t[Q0].reshape(-1)}, r"expected shape \[128, 64\], found \[8192\]"),
        (lambda t: t | {Q0: t[Q0][0, 0]}, r"expected shape \[128, 64\], found \[\]"),
        (
            lambda t: with_value(t, Q0, (5, 7), np.nan),
            rf"{Q0}: value nan at \[5, 7\] is not finite",
        ),
        (lambda t: with_value(t, EMBED, (330, 63), np.inf), r"value inf at \[330, 63\]"),
        (
            lambda t: with_value(t, "model.norm.weight", 9, -np.inf),
            r"norm.weight: value -inf at \[9\]",
        ),
        (
            lambda t: with_value(t, Q0, (0, 1), -3.4e38),
            r"at \[0, 1\] is too large for bf16; use --dt",
        ),
    ],
)
def test_tensors(tmp_path, out, capsys, tensors, change, pattern):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, change(tensors))
    refused(capsys, tmp_path / "t", out, pattern)


def test_f64_that_float_cannot_hold(tmp_path, out, capsys, tensors):
    huge = with_value({k: v.astype(np.float64) for k, v in tensors.items()}, Q0, (1, 1), 1e300)
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, huge, kind="F64")
    refused(capsys, tmp_path / "t", out, r"value inf at \[1, 1\] is not finite", "--dtype", "f32")


def test_integers(tmp_path, out, capsys, tensors):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors, kind="I8")
    refused(capsys, tmp_path / "t", out, "values of type I8 are not supported; known: F64, F32")


def test_tied_but_different(tmp_path, out, capsys, tensors):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG | {"tie_word_embeddings": True}, tensors)
    refused(capsys, tmp_path / "t", out, "tie_word_embeddings, but lm_head.weight differs")


# ---- folders and shards ----


def test_folder_without_config(tmp_path, out, capsys):
    refused(capsys, tmp_path, out, "config.json is not there")


def test_folder_without_tensors(tmp_path, out, capsys, tensors):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    (tmp_path / "t" / "model.safetensors").unlink()
    refused(capsys, tmp_path / "t", out, "neither model.safetensors nor model.safetensors.index")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\xff", "[" * 100000])
def test_config_that_is_no_object(tmp_path, out, capsys, tensors, text):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    (tmp_path / "t" / "config.json").write_text(text, encoding="latin-1")
    refused(capsys, tmp_path / "t", out, "config.json: (not valid JSON|expected a JSON object)")


def reindexed(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 7, None]
)
def test_shard_outside_the_folder(tmp_path, out, capsys, tensors, shard):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors, 2)
    shutil.copy(tmp_path / "t" / SHARD, tmp_path / "secret.safetensors")
    reindexed(tmp_path / "t", lambda names: names.update({EMBED: shard}))
    refused(capsys, tmp_path / "t", out, "is not the name of a file in the folder")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda names: names.update({EMBED: "gone.safetensors"}), "gone.safetensors.*does not ex"),
        (lambda names: names.update({"x": SHARD}), "tensor x is not in it"),
        (lambda names: names.pop(EMBED), f"{EMBED} is in it but not in the index"),
        (lambda names: names.clear(), "expected a weight_map"),
    ],
)
def test_index(tmp_path, out, capsys, tensors, change, pattern):
    writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors, 2)
    reindexed(tmp_path / "t", change)
    refused(capsys, tmp_path / "t", out, pattern)


def test_truncated_safetensors(tmp_path, out, capsys, tensors):
    path = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors) / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(capsys, tmp_path / "t", out, "not a usable safetensors file")


def test_safetensors_cut_while_it_is_read(tmp_path, out, capsys, tensors, monkeypatch):
    """After its header was checked: an error, no signal."""
    from export import huggingface

    path = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors) / "model.safetensors"
    collect = huggingface.collect

    def cut_then_collect(*arguments):
        os.truncate(path, path.stat().st_size - 1)
        return collect(*arguments)

    monkeypatch.setattr(huggingface, "collect", cut_then_collect)
    refused(capsys, tmp_path / "t", out, "is the file cut short")


# ---- GGUF and llama2.c ----


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "llama.expert_count 8 is not supported"),
        (lambda w: w.add_string("llama.rope.scaling.type", "ntk"), "rope.scaling.type: expected"),
        (lambda w: w.add_uint16("split.count", 3), "one part of several"),
        (
            lambda w: w.add_tokenizer_model("bert"),
            "tokenizer.ggml.tokens: expected the tokens' texts, found n",
        ),
    ],
)
def test_gguf_metadata(tmp_path, out, capsys, tensors, change, pattern):
    writers.gguf_file(tmp_path / "t.gguf", tiny.CONFIG, tensors, add=change)
    refused(capsys, tmp_path / "t.gguf", out, pattern)


def test_gguf_of_another_architecture(tmp_path, out, capsys):
    import gguf

    writers.finish(gguf.GGUFWriter(tmp_path / "t.gguf", "phi2"))
    refused(capsys, tmp_path / "t.gguf", out, "architecture phi2 is not supported; known: llama")


def test_gguf_tensors(tmp_path, out, capsys, tensors):
    writers.gguf_file(tmp_path / "t.gguf", tiny.CONFIG, without(tensors, Q0))
    refused(capsys, tmp_path / "t.gguf", out, "tensor blk.0.attn_q.weight is missing")
    nan = with_value(tensors, "model.norm.weight", 3, np.nan)
    writers.gguf_file(tmp_path / "t.gguf", tiny.CONFIG, nan)
    refused(capsys, tmp_path / "t.gguf", out, r"output_norm.weight: value nan at \[3\]")


@pytest.mark.parametrize("alignment", [None, 64])
def test_gguf_tensors_that_are_elsewhere(tmp_path, out, capsys, tensors, alignment):
    """Of the last tensor but one, which stays within the file; and far outside."""
    path = tmp_path / "t.gguf"
    add = alignment and (lambda writer: writer.add_custom_alignment(alignment))
    writers.gguf_file(path, tiny.CONFIG, tensors, add=add)
    assert main([str(path), "-o", str(tmp_path / "model.bin")]) == 0
    whole, name, step = path.read_bytes(), b"output_norm.weight", alignment or 32
    at = whole.index(name) + len(name) + 4 + 8 + 4  # its number of dimensions, its rows, its type
    (offset,) = struct.unpack_from("<Q", whole, at)
    far = (1 << 63) - offset, (1 << 64) - step - offset
    for moved in (1, 4, step // 2, step - 1, step, -step, -2 * step, *far):
        content = bytearray(whole)
        struct.pack_into("<Q", content, at, offset + moved)
        path.write_bytes(content)
        where = f"expected offset {offset} .* multiples of {step}.*, found {offset + moved}; is"
        refused(capsys, path, out, f"output_norm.weight: {where}|it ends at byte \\d+, but")


def test_broken_gguf(tmp_path, capsys, tensors):
    """Cut at many places and with any bytes changed in the head: a file or one line."""
    path = tmp_path / "t.gguf"
    writers.gguf_file(path, tiny.CONFIG, tensors)
    whole = path.read_bytes()
    choose = random.Random(11)
    head = whole.index(b"blk.2.ffn_down") + 64
    broken = [whole[:length] for length in [4, 8, 23, *choose.sample(range(24, head), 20)]]
    broken += [whole[:length] for length in choose.sample(range(head, len(whole)), 5)]
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(4, head)] = choose.choice([0, 1, 0x7F, 0x80, 0xFF])
        broken.append(bytes(changed))
    refusals = 0
    for content in broken:
        path.write_bytes(content)
        capsys.readouterr()
        code = main([str(path), "-o", str(tmp_path / "model.bin")])
        _, err = capsys.readouterr()
        assert (code, len(err.splitlines())) in ((0, 0), (2, 1)), err
        refusals += code == 2
    assert refusals > len(broken) // 2


def test_llama2c(tmp_path, out, capsys):
    whole = need(STORIES).read_bytes()
    path = tmp_path / "model.bin"
    for length in (0, 27, 28, 1000, len(whole) - 4, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(capsys, path, out, "too short|has 1056540 bytes, found")
    path.write_bytes(whole + b"\0")
    refused(capsys, path, out, "has 1056540 bytes, found 1056541")
    for field in range(7):
        for value in (0, -1, 1 << 30, -(1 << 31)):
            content = bytearray(whole)
            struct.pack_into("<i", content, 4 * field, value)
            path.write_bytes(content)
            refused(capsys, path, out, "llama2.c model|config:|multiple of")
    for version, pattern in ((3, "version 3, expected 1 or 2"), (2, "groups of 0 values")):
        path.write_bytes(struct.pack("<Ii7i", 0x616B3432, version, *[8] * 7).ljust(300, b"\0"))
        refused(capsys, path, out, pattern)
    path.write_bytes(struct.pack("<Ii7i", 0x616B3432, 1, *[8] * 7))
    refused(capsys, path, out, "cut short in its header")


def test_llama2c_tokenizer(tmp_path, out, capsys):
    tok = need(DATA / "llama2c" / "tok512.bin").read_bytes()
    path = tmp_path / "tok.bin"
    for content in (b"", tok[:100], tok[:-1], tok[:-20], tok + b"x", tok + tok[4:20]):
        path.write_bytes(content)
        pattern = "cut short|expected 512 pieces"
        refused(capsys, STORIES, out, pattern, "--tokenizer", path)
    refused(capsys, STORIES, out, "No such file", "--tokenizer", tmp_path / "none")


# ---- the command line ----


def test_usage(tmp_path, out, capsys, tensors):
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    refused(capsys, tmp_path / "none", out, "none does not exist")
    refused(capsys, folder, tmp_path / "no" / "model.bin", "the folder .*no does not exist")
    refused(capsys, folder, tmp_path / "out", "is a directory; -o takes the file")
    refused(capsys, folder, out, "invalid choice: 'q8'", "--dtype", "q8")
    refused(capsys, folder, out, "unrecognized arguments: --x", "--x")
    refused(capsys, folder, out, "--tokenizer is for .bin files of llama2.c", "--tokenizer", folder)
    refused(capsys, folder / "model.safetensors", out, "part of a checkpoint; give its folder")
    assert main([str(folder), "-o", str(out)]) == 0
    refused(capsys, out, tmp_path / "other.bin", "is a model.bin already")
    assert main([]) == 2
    assert "the following arguments are required" in capsys.readouterr().err
    (tmp_path / "text").write_text("hello, this is no model at all")
    refused(capsys, tmp_path / "text", out, "nor anything else that is known")
    source = tmp_path / "t.gguf"
    writers.gguf_file(source, tiny.CONFIG, tensors)
    refused(capsys, source, source, "is the source itself")


def test_a_target_that_is_read_from(tmp_path, capsys, tensors):
    """A checkpoint's own files stay; a model.bin beside them is written anew."""
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors, shards=2)
    (folder / "link").symlink_to("config.json")
    for path in sorted(folder.iterdir()):
        before = path.read_bytes()
        refused(capsys, folder, path, "is the source itself, or a part of it")
        assert path.read_bytes() == before
    (tmp_path / "elsewhere").symlink_to(folder / SHARD)
    refused(capsys, folder, tmp_path / "elsewhere", "is the source itself, or a part of it")
    (tmp_path / "tokenizer").mkdir()
    for tokenizer in (tmp_path / "tokenizer", tmp_path / "tokenizer" / "tokenizer.json"):
        for target in (tmp_path / "tokenizer" / name for name in ("tokenizer.json", "x.json")):
            target.write_text("{}")
            refused(capsys, tmp_path / "x.bin", target, "source itself", "--tokenizer", tokenizer)
            assert target.read_text() == "{}"
    (folder / "model.bin").touch()
    for _ in range(2):
        assert main([str(folder), "-o", str(folder / "model.bin")]) == 0


def test_out_of_memory(tmp_path, out, capsys, tensors, monkeypatch):
    def load(*_):
        raise MemoryError

    monkeypatch.setattr("export.__main__.huggingface.load", load)
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    refused(capsys, folder, out, "out of memory")


def test_help(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    out, err = capsys.readouterr()
    assert "--dtype" in out and err == ""


def test_a_disk_too_small(tmp_path, out, capsys, tensors, monkeypatch):
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1000))
    refused(capsys, folder, out, r"\d+ bytes needed, 1000 free")


def test_a_disk_that_changes_what_is_written(tmp_path, out, capsys, tensors, monkeypatch):
    from export import writer

    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tensors)
    verify = writer._verify
    for place, pattern in (
        (100, "the head reads"),
        (-300, "tensor classifier reads"),
        (None, "wro"),
    ):

        def damage(path, *arguments, place=place):
            content = bytearray(path.read_bytes())
            if place is None:
                content.pop()
            else:
                content[place] ^= 1
            path.write_bytes(content)
            verify(path, *arguments)

        monkeypatch.setattr(writer, "_verify", damage)
        refused(capsys, folder, out, pattern)


# ---- what is no file ----


def test_devices_and_pipes(tmp_path, capsys, tensors, out):
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tensors)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([str(tmp_path / "tiny"), "-o", str(pipe)]) == 2
    assert "a device or a pipe" in capsys.readouterr().err and stat.S_ISFIFO(pipe.stat().st_mode)
    refused(capsys, pipe, out, "a device or a pipe")


def test_messages_survive_any_stream(tmp_path, tensors):
    """No stderr at all; a stdout that cannot show the name's letters."""
    writers.hf_folder(tmp_path / "tiny", tiny.CONFIG, tensors)
    command = f"{sys.executable} -m export {tmp_path}/tiny -o {tmp_path}/model.bin --name né☃"
    for way in ("2>&-", ">/dev/null"):
        shell = f"LC_ALL=C PYTHONIOENCODING=ascii {command} {way}"
        done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
