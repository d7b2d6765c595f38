"""GPT-2 through export and ./run, from each of its sources: the logits and the text of transformers
come out, and positions end where the learned ones do."""

import gpt2_writers
import numpy as np
import pytest
import writers
from engine import ROOT, answer, check_texts, export, logits, refusal
from golden import gpt2, tiny

GOLDEN = ROOT / "tests" / "golden"


def from_hugging_face(folder, weights):
    return writers.hf_folder(folder / "hf", gpt2.CONFIG, weights), "gpt2"


def from_nanogpt(folder, weights):
    return gpt2_writers.nanogpt_folder(folder / "nano", weights), "gpt2_erf"


def from_llmc(folder, weights):
    return gpt2_writers.llmc_file(folder / "llmc.bin", weights), "gpt2"


def from_gguf(folder, weights):
    return gpt2_writers.gguf_file(folder / "tiny.gguf", weights), "gpt2"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    source, _ = from_hugging_face(folder, gpt2_writers.weights())
    return export(source, folder / "model.bin", "--dtype", "f32")


@pytest.mark.parametrize("source", [from_hugging_face, from_nanogpt, from_llmc, from_gguf])
def test_logits_and_text(tmp_path, source):
    """Logits differ from those of transformers by up to 1e-4 of their range; texts do not."""
    path, family = source(tmp_path, gpt2_writers.weights())
    file = export(path, tmp_path / "model.bin", "--dtype", "f32")
    golden = np.load(GOLDEN / f"tiny_{family}.npz")
    ours = logits(file, golden["ids"], tiny.VOCAB, tmp_path)[:, ::5]
    assert np.abs(ours - golden["logits"]).max() <= 1e-4 * np.ptp(golden["logits"])
    check_texts(file, golden)


def test_positions_end(model):
    """-c takes no more of them than there are, in any use; without -c the text ends with them."""
    expected = "a context of 513 is asked for, but the model has learned 512 positions and has no"
    assert expected in refusal(2, model, "--ids", "1", "-c", 513)
    assert expected in refusal(2, model, "--bench", "--pp", 513, "--tg", 1)
    many = " ".join(["1"] * 513)
    assert "the prompt has 513 tokens" in refusal(2, model, "--ids", many)
    assert expected in refusal(2, model, "--ids", many, "-c", 513)
    text = answer(model, "--ids", " ".join(["1"] * 500), "-n", -1, "-t", 0, "--ignore-eos")
    assert len(text.split()) == 13  # the last one needs no position
    assert text == answer(
        model, "--ids", " ".join(["1"] * 500), "-n", -1, "-t", 0, "--ignore-eos", "-c", 512
    )


def test_info_says_what_is_special(model):
    said = answer(model, "--info").decode()
    for line in (
        " 4 of 16, 4 for keys and values, with biases, a bias on what they give\n",
        "positions            learned, 512 of them\n",
        "feed-forward         256, GELU, with biases\n",
        "norm                 LayerNorm, epsilon 1e-05\n",
        "parameters           0.20 M\n",
        "layers.2.norm_ffn_bias       f32   [64]\n",
    ):
        assert line in said
    assert "RoPE" not in said


def test_benchmark_counts_two_matrices_in_the_feed_forward_part(model):
    table = answer(model, "--bench", "--pp", 0, "--tg", 1, "--threads", 1).decode()
    (row,) = (line for line in table.splitlines() if "| tg1 |" in line)
    columns = [column.strip() for column in row.split("|")]
    rate = float(columns[7].split()[0])
    weights = 3 * 64 * (4 * 64 + 2 * 256) + 331 * 64
    assert abs(float(columns[8]) * 1e9 / rate / (4 * weights) - 1) < 0.1
    assert abs(float(columns[9]) * 1e9 / rate / (2 * weights) - 1) < 0.1
