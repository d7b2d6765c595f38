"""The libraries on the work of tests/bench_gpu.c, in the same minute: cuBLAS for the products,
cuDNN and FlashAttention for attention, all through PyTorch, bf16, random data. Each line is a CUDA
graph of launches over rotated operands, as bench_gpu has it.
`python tests/bench_peers.py [8b 1b]`"""

import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# C, H, G, D, F, V
SHAPES = {
    "1b": (2048, 32, 8, 64, 8192, 128256),
    "3b": (3072, 24, 8, 128, 8192, 128256),
    "8b": (4096, 32, 8, 128, 14336, 128256),
}
LAUNCHES, ROUNDS, L2_BYTES = 24, 7, 60 << 20


def microseconds(work, copies: int) -> float:
    """Median time of work(i), i rotating over the copies of its operands."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(copies):
            work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(LAUNCHES):
            work(i % copies)
    times = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times[1:])


def random(*shape) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def product(rows: int, outputs: int, inputs: int) -> float:
    copies = max(1, min(LAUNCHES, 4 * L2_BYTES // (2 * outputs * inputs) + 1))
    weights = [random(outputs, inputs) for _ in range(copies)]
    x = random(rows, inputs)
    y = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    return microseconds(lambda i: torch.mm(x, weights[i].t(), out=y), copies)


def attention(
    rows: int, cached: int, heads: int, kv_heads: int, size: int, backend
) -> float | None:
    """One sequence: `rows` queries at the end of `cached` positions."""
    copies = max(1, min(LAUNCHES, 4 * L2_BYTES // (4 * cached * kv_heads * size) + 1))
    q = random(1, heads, rows, size)
    caches = [[random(1, kv_heads, cached, size) for _ in range(2)] for _ in range(copies)]
    causal = rows > 1

    def work(i):
        k, v = caches[i]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )

    try:
        with sdpa_kernel(backend):
            return microseconds(work, copies)
    except RuntimeError:
        return None  # the library has no kernel for it


def main(names: list[str]) -> None:
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, ", end="")
    print(f"{torch.cuda.get_device_name()}, microseconds")
    print("| model | work | library | us | GB/s | TFLOP/s |\n|---|---|---|---|---|---|")
    for name in names:
        C, H, G, D, F, V = SHAPES[name]
        products = {
            "qkv": ((H + 2 * G) * D, C),
            "project out": (C, H * D),
            "gate_up": (2 * F, C),
            "project down": (C, F),
            "classify": (V, C),
        }
        for rows in (1, 16, 512, 2048):
            for work, (outputs, inputs) in products.items():
                us = product(rows, outputs, inputs)
                moved = 2 * outputs * inputs / us * 1e-3
                flops = 2 * rows * outputs * inputs / us * 1e-6
                line = (
                    f"| {name} | {work}, T {rows} | cuBLAS | {us:.1f} | {moved:.0f} | {flops:.1f} |"
                )
                print(line, flush=True)
        for rows, cached in ((1, 1000), (1, 32768), (512, 512), (2048, 2048), (8192, 8192)):
            for library, backend in (
                ("cuDNN", SDPBackend.CUDNN_ATTENTION),
                ("FlashAttention", SDPBackend.FLASH_ATTENTION),
            ):
                us = attention(rows, cached, H, G, D, backend)
                if us is None:
                    continue
                pairs = cached if rows == 1 else rows * (rows + 1) / 2
                flops = 4 * H * D * pairs / us * 1e-6
                moved = 4 * cached * G * D / us * 1e-3
                print(
                    f"| {name} | attend, T {rows} of {cached} | {library} | {us:.1f} | "
                    f"{moved:.0f} | {flops:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main([name.lower() for name in sys.argv[1:]] or list(SHAPES))
