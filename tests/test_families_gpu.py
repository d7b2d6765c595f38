"""The families on a GPU, as tiny random checkpoints with windows shorter than the text: against
transformers, the CPU backend, and float64. Skipped where there is no GPU."""

from pathlib import Path

import gpt2_writers
import numpy as np
import pytest
import reader
import writers
from engine import GPU, answer, check_texts, logits, need_gpu
from exporting import export
from golden import gpt2, tiny

GOLDEN = Path(__file__).parent / "golden"
CHUNKS = (1, 7, 64, 512)


def checkpoint(name):
    """Its config.json and its tensors."""
    if name in gpt2.FAMILIES:
        return gpt2.FAMILIES[name], gpt2_writers.weights()
    return tiny.FAMILIES[name], tiny.tensors(tiny.FAMILIES[name])


@pytest.fixture(scope="module", params=[*tiny.FAMILIES, *gpt2.FAMILIES])
def family(request, tmp_path_factory):
    """Its name, its ids, and its model in f32 and in bf16."""
    folder = tmp_path_factory.mktemp(request.param)
    writers.hf_folder(folder / "tiny", *checkpoint(request.param))
    files = {dtype: folder / f"{dtype}.bin" for dtype in ("f32", "bf16")}
    for dtype, file in files.items():
        export(folder / "tiny", file, "--dtype", dtype)
    need_gpu(files["bf16"])
    return request.param, np.load(GOLDEN / f"tiny_{request.param}.npz")["ids"], files


@pytest.mark.parametrize("chunk", CHUNKS)
def test_f32_logits_are_those_of_transformers(family, chunk, tmp_path):
    name, ids, files = family
    golden = np.load(GOLDEN / f"tiny_{name}.npz")["logits"]
    ours = logits(files["f32"], ids, tiny.VOCAB, tmp_path, "--chunk", chunk, *GPU)
    cpu = logits(files["f32"], ids, tiny.VOCAB, tmp_path)
    columns = slice(None, None, 1 if golden.shape[1] == tiny.VOCAB else 5)
    assert np.abs(ours[:, columns] - golden).max() <= 1e-4 * np.ptp(golden)
    assert np.abs(ours - cpu).max() <= 1e-4 * np.ptp(golden)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_bf16_logits_err_as_a_plain_computation(family, chunk, tmp_path):
    """All together as far from float64 as float64 with the backend's roundings, and the CPU, which
    rounds less, no further away than both."""
    _, ids, files = family
    file = reader.read(files["bf16"])
    right = reader.forward(file, ids)
    plain = np.abs(reader.forward(file, ids, reader.to_bf16) - right)
    ours = logits(files["bf16"], ids, tiny.VOCAB, tmp_path, "--chunk", chunk, *GPU)
    cpu = logits(files["bf16"], ids, tiny.VOCAB, tmp_path)
    error = np.abs(ours - right)
    ratio = error.max() / plain.max()
    print(f"mean error {error.mean():.3g}, plain {plain.mean():.3g}; largest {ratio:.2f} times")
    assert error.mean() <= 1.25 * plain.mean() and ratio <= 2
    assert np.abs(ours - cpu).max() <= 2 * plain.max() + np.abs(cpu - right).max()


def test_greedy_texts(family):
    """200 ids in f32, longer than any window, as transformers generates them."""
    name, _, files = family
    check_texts(files["f32"], np.load(GOLDEN / f"tiny_{name}.npz"), *GPU)


def test_chunks_give_the_same_text(family):
    _, ids, files = family
    base = [files["f32"], "--ids", " ".join(map(str, ids[:300])), "-n", 100, "-t", 0, *GPU]
    assert len({answer(*base, "--ignore-eos", "--chunk", chunk) for chunk in CHUNKS}) == 1
