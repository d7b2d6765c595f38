"""RoPE: every kind of scaling against what transformers makes of it, and what makes no sense."""

from pathlib import Path

import numpy as np
import pytest
import writers
from exporting import export, refused, small
from golden import rope_cases, tiny

from export.config import config_from_hf

GOLDEN = Path(__file__).parent / "golden"
FAMILY = {"llama": "Llama", "qwen2": "Qwen2", "phi3": "Phi3"}


@pytest.mark.parametrize("name", rope_cases.CASES)
def test_tables_and_factor(name):
    """transformers computes in float32: a power of theta is off by some of its roundings."""
    case, golden = rope_cases.CASES[name], np.load(GOLDEN / "rope.npz")
    architecture = f"{FAMILY[case['model_type']]}ForCausalLM"
    config = config_from_hf(case | {"architectures": [architecture]}, {}, name)
    assert np.allclose(config.frequencies, golden[name], rtol=1e-6, atol=0)
    assert abs(config.rope_scale - golden[f"{name}_scale"]) < 1e-7
    if case["model_type"] == "phi3":
        assert np.allclose(config.long_frequencies, golden[f"{name}_long"], rtol=1e-6, atol=0)
        assert config.rope_original == case["original_max_position_embeddings"]
    else:
        assert config.long_frequencies is None and config.rope_original == 0


def test_phi3_128k():
    """The factor that its card tells."""
    config = config_from_hf(
        rope_cases.CASES["longrope"] | {"architectures": ["Phi3ForCausalLM"]}, {}, "phi"
    )
    assert abs(config.rope_scale - 1.190238) < 1e-6


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_longrope_as_older_configs_say_it(tmp_path, kind):
    new = tiny.FAMILIES["phi3_long"]
    rope = {key: new["rope_parameters"][key] for key in ("long_factor", "short_factor")}
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 200.0, "rope_scaling": rope | {"type": kind}}
    for name, config in (("new", new), ("old", old)):
        writers.hf_folder(tmp_path / name, config, tiny.tensors(new))
    file = export(tmp_path / "new", tmp_path / "new.bin")
    other = export(tmp_path / "old", tmp_path / "old.bin")
    assert other.config == file.config | {"name": "old"} and other.raw == file.raw


def test_original_context_of_a_family(tmp_path):
    """A Phi-3 that does not tell it has 4096; others have their context, and no scaling then."""
    config = dict(tiny.FAMILIES["phi3_long"])
    del config["original_max_position_embeddings"]
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    assert export(tmp_path / "t", tmp_path / "t.bin").config["rope_original"] == 4096
    config, tensors = small(
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": None}
    )
    writers.hf_folder(tmp_path / "y", config, tensors)
    file = export(tmp_path / "y", tmp_path / "y.bin")
    assert file.config["rope_scale"] == 1
    assert np.allclose(file.tensors["rope"][0], 1e4 ** (-np.arange(8) / 8), rtol=1e-6, atol=0)


LONG = tiny.FAMILIES["phi3_long"]["rope_parameters"]
YARN = tiny.FAMILIES["qwen3_yarn"]["rope_parameters"]


@pytest.mark.parametrize(
    ("family", "rope", "pattern"),
    [
        ("phi3_long", LONG | {"long_factor": [1.0] * 7}, "long_factor: expected 8 finite numbers"),
        ("phi3_long", LONG | {"short_factor": [1.0] * 9}, "short_factor: expected 8 finite num"),
        ("phi3_long", LONG | {"short_factor": None}, "short_factor: expected 8 finite numbers"),
        ("phi3_long", LONG | {"long_factor": [1.0] * 7 + [0]}, "expected 8 finite numbers above 0"),
        ("phi3_long", LONG | {"long_factor": [1.0] * 7 + [-2]}, "expected 8 finite numbers above"),
        ("phi3_long", LONG | {"long_factor": [1.0] * 7 + [1e999]}, "long_factor: expected 8 fin"),
        ("phi3_long", LONG | {"long_factor": [1.0] * 7 + [float("nan")]}, "expected 8 finite num"),
        ("phi3_long", LONG | {"long_factor": [1.0] * 7 + [True]}, "expected 8 finite numbers"),
        ("phi3_long", LONG | {"long_factor": [1.0] * 7 + [1e300]}, "a RoPE frequency is not"),
        ("phi3_long", LONG | {"attention_factor": 0}, "factor on RoPE 0.0 is not in 1e-06 to"),
        ("phi4", LONG | {"partial_rotary_factor": 0.75}, "short_factor: expected 6 finite numbers"),
        ("qwen3_yarn", YARN | {"factor": 0.5}, "YaRN with factor 0.5, .* makes no sense"),
        ("qwen3_yarn", YARN | {"factor": "4"}, "factor: expected a number, found '4'"),
        (
            "qwen3_yarn",
            YARN | {"beta_fast": 0.5},
            "YaRN .* beta_fast 0.5, beta_slow 1, .* no sense",
        ),
        ("qwen3_yarn", YARN | {"beta_slow": -1}, "beta_slow -1.0, .* makes no sense"),
        ("qwen3_yarn", YARN | {"rope_theta": 1.0}, "theta 1.0 makes no sense"),
        ("qwen3_yarn", YARN | {"truncate": 3}, "truncate: expected true or false, found 3"),
        (
            "qwen3_yarn",
            YARN | {"original_max_position_embeddings": 0},
            "original_max_position_embeddings: expected a whole number above 0",
        ),
        (
            "gemma3",
            {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}},
            "kinds of layers with factors of their own",
        ),
    ],
)
def test_what_makes_no_sense(tmp_path, out, capsys, family, rope, pattern):
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "t", config | {"rope_parameters": rope}, tiny.tensors(config))
    refused(capsys, tmp_path / "t", out, pattern)


FULL, SLIDING = (
    tiny.FAMILIES["gemma3"]["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding")
)
BY_KIND = {"full_attention": FULL, "sliding_attention": SLIDING}
WANTED = "for each kind of layer, full_attention and sliding_attention, found "
FLAT = "one set of RoPE parameters, not by kind of layer, found "


@pytest.mark.parametrize(
    ("family", "changes", "pattern"),
    [
        ("gemma3", {"rope_parameters": FULL}, f"{WANTED}the keys factor, rope_theta, rope_type"),
        ("gemma3", {"rope_parameters": BY_KIND | FULL}, f"{WANTED}the keys factor, full_attention"),
        ("gemma3", {"rope_parameters": {"full_attention": FULL}}, f"{WANTED}the keys full_atten"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": SLIDING}},
            f"{WANTED}the keys sliding_attention$",
        ),
        (
            "gemma3",
            {"rope_parameters": BY_KIND | {"chunked_attention": FULL}},
            f"{WANTED}the keys chunked_attention, full_attention, sliding_attention$",
        ),
        (
            "gemma3",
            {
                "layer_types": ["full_attention"] * 3,
                "rope_parameters": {"sliding_attention": SLIDING},
            },
            "for each kind of layer, full_attention, found the keys sliding_attention$",
        ),
        *(
            ("gemma3", {"rope_parameters": BY_KIND | {kind: value}}, f"{WANTED}{{'full_attention'")
            for kind in BY_KIND
            for value in (None, 3, "x", [FULL])
        ),
        *(
            ("gemma3", {"rope_parameters": value}, f"rope_parameters: .*{WANTED}")
            for value in (0, "x", [], [FULL])
        ),
        ("gemma3", {"rope_parameters": None, "rope_scaling": BY_KIND}, f"rope_scaling: .*{FLAT}"),
        *(
            (family, {"rope_parameters": BY_KIND}, f"rope_parameters: expected {FLAT}{{'full_att")
            for family in ("llama", "qwen2_window", "gemma2", "smollm3")
        ),
        *(
            ("llama", {"rope_parameters": None, "rope_scaling": value}, f"rope_scaling: .*{FLAT}")
            for value in (0, "x", [], BY_KIND)
        ),
    ],
)
def test_sets_of_other_kinds_of_layers(tmp_path, out, capsys, family, changes, pattern):
    config = tiny.FAMILIES[family]
    writers.hf_folder(tmp_path / "t", config | changes, tiny.tensors(config))
    refused(capsys, tmp_path / "t", out, pattern)


@pytest.mark.parametrize("kind", BY_KIND)
def test_set_that_no_layer_needs(tmp_path, kind):
    """It may be there, as transformers writes both, or not."""
    config = tiny.FAMILIES["gemma3"] | {"layer_types": [kind] * 3}
    files = []
    for name, rope in (("both", BY_KIND), ("one", {kind: BY_KIND[kind]})):
        writers.hf_folder(tmp_path / name, config | {"rope_parameters": rope}, tiny.tensors(config))
        files.append(export(tmp_path / name, tmp_path / f"{name}.bin", "--dtype", "f32"))
    table = 1 if kind == "sliding_attention" else 0
    both, one = (file.tensors["rope"][table] for file in files)
    assert np.array_equal(both, one) and [t for _, t in files[1].layers] == [table] * 3


def test_original_context_out_of_range(tmp_path, out, capsys):
    config = tiny.FAMILIES["phi3_long"] | {"original_max_position_embeddings": 1 << 23}
    writers.hf_folder(tmp_path / "t", config, tiny.tensors(config))
    refused(capsys, tmp_path / "t", out, "original context 8388608 is not in 1 to 4194304")
