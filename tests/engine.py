"""How the tests start ./run, and where the models are."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

ROOT = Path(__file__).resolve().parent.parent
RUN = os.environ.get("ROOFLINE_RUN", str(ROOT / "run"))
SMOLLM2 = {
    "bf16": ROOT / "weights/SmolLM2-135M-Instruct.bin",
    "f32": ROOT / "weights/SmolLM2-135M-Instruct-f32.bin",
}
GPU = ("--device", "cuda")
# A sanitised build is some ten times slower.
TIMEOUT = 600


def run(*arguments, text=None, **options):
    """Runs ./run, on the CPU where no --device is among the arguments; stdout and stderr as bytes.
    text (bytes) goes to standard input."""
    device = [] if "--device" in arguments else ["--device", "cpu"]
    command = [RUN, *device, *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, timeout=TIMEOUT, check=False, **options
    )


def answer(*arguments, **options):
    """stdout of a run that must succeed."""
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


def refusal(code, *arguments, **options):
    """The one line of a run that must fail with this exit code and print nothing else."""
    done = run("--quiet", *arguments, **options)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == b""
    lines = done.stderr.decode(errors="replace").splitlines()
    assert len(lines) == 1 and lines[0].startswith("run: "), lines
    return lines[0]


def model(dtype):
    """SmolLM2-135M-Instruct, exported by `make test`; skips where it is absent."""
    path = SMOLLM2[dtype]
    if not path.exists():
        pytest.skip(f"{path} is absent: make demo makes it")
    return path


def logits(path, ids, vocab, folder, *arguments):
    """Teacher-forced logits [T, vocab] of ids."""
    target = Path(folder) / "logits.f32"
    answer(path, "--ids", " ".join(map(str, ids)), "--logits", target, *arguments)
    return np.fromfile(target, dtype="<f4").reshape(len(ids), vocab)


def export(source, target, *options):
    """The model.bin that the exporter makes, as a process of its own."""
    command = [sys.executable, "-m", "export", source, "-o", target, *options]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True)
    return target


def patched(path, target, numbers):
    """The file with other u32 at offsets from its config's start, and a checksum that is right."""
    data = bytearray(Path(path).read_bytes())
    for offset, value in numbers.items():
        struct.pack_into("<I", data, 64 + offset, value)
    (head_bytes,) = struct.unpack_from("<Q", data, 24)
    struct.pack_into("<Q", data, 48, 0)
    struct.pack_into("<Q", data, 48, xxhash.xxh64_intdigest(bytes(data[:head_bytes])))
    target.write_bytes(data)
    return target


def greedy_ids(path, prompt, count, *arguments):
    """The ids that follow a prompt, stops among them, in a context that they fill."""
    options = ["-n", count, "-t", 0, "--ignore-eos", "-c", len(prompt) + count]
    ids = answer(path, "--ids", " ".join(map(str, prompt)), *options, *arguments).split()
    return list(map(int, ids))


def check_texts(path, golden, *arguments):
    """The greedy ids after each golden prompt are those of transformers."""
    for kind in ("", "long_") if "long_text" in golden else ("",):
        prompt, text = golden[f"{kind}prompt"], golden[f"{kind}text"]
        assert greedy_ids(path, prompt, len(text), *arguments) == text.tolist(), kind


def need_gpu(path):
    """Skips where no GPU can run this model."""
    done = run(path, "--ids", "1", "-n", 0, *GPU)
    line = done.stderr.decode().strip().splitlines()[-1] if done.returncode else ""
    if any(why in line for why in ("no NVIDIA driver", "no CUDA-capable", "has no CUDA", "8.0 is")):
        pytest.skip(line)
    assert done.returncode == 0, done.stderr
