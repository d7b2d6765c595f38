"""Writes a model.bin of a well-known shape with random weights and no tokenizer: what benchmarks
run where no checkpoint can be fetched.
`python -m tests.random_model 8b -o /tmp/8b.bin [--dtype f32]`"""

import argparse
from pathlib import Path

import numpy as np

from export.format import DTYPES, Layout
from export.model import Config, Model, Part, part_shapes
from export.rope import frequencies

# width, layers, heads, kv_heads, head_dim, ffn, vocab, tied, theta
SHAPES = {
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True, 1e5),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256, True, 5e5),
    "3b": (3072, 28, 24, 8, 128, 8192, 128256, True, 5e5),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256, False, 5e5),
}
BLOCK = 4194301  # random numbers that repeat; prime, so that rows differ


def random_model(shape: str, context: int) -> Model:
    width, layers, heads, kv_heads, head_dim, ffn, vocab, tied, theta = SHAPES[shape]
    config = Config(
        name=f"random {shape}",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        context=context,
        norm_eps=1e-5,
        rope=f"theta {theta}",
        frequencies=frequencies(head_dim, theta)[None],
    )
    parts = {
        name: Part(name, sizes, lambda start, stop: np.zeros(0, np.float32))
        for name, sizes in part_shapes(config).items()
        if name != "classifier" or not tied
    }
    return Model("llama", config, None, parts)


def random_bytes(dtype: str, scale: float, count: int, start: int, block: np.ndarray) -> bytes:
    """`count` numbers, uniform in -scale..scale, as the file holds them."""
    values = np.resize(np.roll(block, -start % BLOCK), count) * np.float32(scale)
    bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16).tobytes() if dtype == "bf16" else bits.tobytes()


def write(shape: str, target: Path, dtype: str, context: int) -> None:
    model = random_model(shape, context)
    layout = Layout(model, DTYPES[dtype])
    block = np.random.default_rng(1).uniform(-1, 1, BLOCK).astype(np.float32)
    with target.open("wb") as file:
        file.write(layout.head())
        for index, tensor in enumerate(layout.tensors):
            file.write(bytes(tensor.offset - file.tell()))
            count = int(np.prod(tensor.shape))
            if tensor.name == "rope":
                file.write(model.config.frequencies.astype("<f4").tobytes())
                continue
            if len(tensor.shape) == 1:  # norms
                file.write((1 + 0.2 * np.resize(block, count)).astype("<f4").tobytes())
                continue
            scale = (3 / tensor.shape[1]) ** 0.5  # about unit gain
            one = random_bytes(dtype, scale, min(count, BLOCK), 7919 * index, block)
            whole, rest = divmod(count, BLOCK)
            for _ in range(whole):
                file.write(one)
            file.write(one[: rest * len(one) // min(count, BLOCK)])
        file.write(bytes(layout.file_bytes - file.tell()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--context", type=int, default=131072)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.output, arguments.dtype, arguments.context)


if __name__ == "__main__":
    main()
