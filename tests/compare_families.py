"""How far the tiny checkpoints of every family are from transformers, from each of their sources:

    python -m tests.compare_families [--device cuda]

f32 logits over 512 positions, in parts of their range, and how many of 200 greedy ids are the same.
A GGUF does not say which layers have no RoPE or, but for Gemmas and Mistral, a window, nor what the
scale of scores is. Where a tiny config is not what the architecture implies, the same file is asked
of a GGUF as of a folder whose config is that. With a GPU also how far its f32 and bf16 logits are
from the CPU's, in parts of the range."""

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import gpt2_writers  # noqa: E402
import reader  # noqa: E402
import writers  # noqa: E402
from engine import GPU, export, greedy_ids, logits  # noqa: E402
from golden import gpt2, tiny  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
IMPLIED = ("gemma2", "gemma3", "smollm3")


def sources(folder: Path):
    """Family, the golden data's name, what the source is, where it lies."""
    for family, config in tiny.FAMILIES.items():
        tensors = tiny.tensors(config)
        yield family, family, "Hugging Face", writers.hf_folder(folder / family, config, tensors)
        if family not in (*IMPLIED, "qwen2_window"):
            gguf = folder / f"{family}.gguf"
            writers.gguf_file(gguf, config, tensors)
            yield family, family, "GGUF", gguf
    weights = gpt2_writers.weights()
    for name, config in gpt2.FAMILIES.items():
        if name == "gpt2":
            yield name, name, "Hugging Face", writers.hf_folder(folder / name, config, weights)
    yield "gpt2", "gpt2_erf", "nanoGPT", gpt2_writers.nanogpt_folder(folder / "nano", weights)
    yield "gpt2", "gpt2", "llm.c", gpt2_writers.llmc_file(folder / "llmc.bin", weights)
    yield "gpt2", "gpt2", "GGUF", gpt2_writers.gguf_file(folder / "gpt2.gguf", weights)


def same_ids(model: Path, golden, *device: str) -> str:
    text = golden["text"]
    ours = greedy_ids(model, golden["prompt"], len(text), *device)
    return f"{sum(a == b for a, b in zip(ours, text, strict=True))} of {len(text)}"


def same_from_gguf(family: str, folder: Path) -> bool:
    """Whether a config that a GGUF can say gives the same layers and tensors from both sources."""
    config = writers.as_gguf_says(tiny.FAMILIES[family])
    tensors = tiny.tensors(config)
    writers.gguf_file(folder / "implied.gguf", config, tensors)
    one, other = (
        reader.read(export(source, folder / f"{i}.bin", "--dtype", "f32"))
        for i, source in enumerate(
            (writers.hf_folder(folder / "implied", config, tensors), folder / "implied.gguf")
        )
    )
    same = all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    return same and one.layers == other.layers and one.tensors.keys() == other.tensors.keys()


def main() -> None:
    gpu = "cuda" in sys.argv
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    command = ["tests/compare_families.py", *sys.argv[1:]]
    print(f"{datetime.date.today()}; commit {commit or 'unknown'}: {' '.join(command)}")
    more = ("GPU f32 from CPU", "GPU bf16 from CPU", "GPU's greedy ids") if gpu else ()
    print("| family | source | logits range | largest difference | in parts | greedy ids |", end="")
    print("".join(f" {name} |" for name in more) + "\n" + "|---" * (6 + len(more)) + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, data, kind, source in sources(folder):
            golden = np.load(GOLDEN / f"tiny_{data}.npz")
            model = export(source, folder / "model.bin", "--dtype", "f32")
            ids, expected = golden["ids"], golden["logits"]
            ours = logits(model, ids, tiny.VOCAB, folder)
            step = 1 if expected.shape[1] == tiny.VOCAB else 5
            extent, error = np.ptp(expected), np.abs(ours[:, ::step] - expected).max()
            cells = [family, kind, f"{extent:.3g}", f"{error:.2g}", f"{error / extent:.1e}"]
            cells.append(same_ids(model, golden))
            for dtype in ("f32", "bf16") if gpu else ():
                file = export(source, folder / f"{dtype}.bin", "--dtype", dtype)
                cpu = logits(file, ids, tiny.VOCAB, folder)
                there = logits(file, ids, tiny.VOCAB, folder, *GPU)
                cells.append(f"{np.abs(there - cpu).max() / extent:.1e}")
            if gpu:
                cells.append(same_ids(model, golden, *GPU))
            print("| " + " | ".join(cells) + " |", flush=True)
        for family in IMPLIED:
            same = "the same file" if same_from_gguf(family, folder) else "ANOTHER FILE"
            print(f"| {family} | GGUF, as it implies | | {same} | | |" + " |" * len(more))


if __name__ == "__main__":
    main()
