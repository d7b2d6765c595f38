"""The libraries on the work of tests/bench_gpu.c, in the same minute: cuBLAS for the products,
cuDNN and FlashAttention for attention, and whole prompts with compiled layers around both; all
through PyTorch, bf16, random data. Each line is a CUDA graph of launches over rotated operands, as
bench_gpu has it. `python tests/bench_peers.py [8b 1b] [--operators] [--prompts]`"""

import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# C, L, H, G, D, F, V
SHAPES = {
    "1b": (2048, 16, 32, 8, 64, 8192, 128256),
    "3b": (3072, 28, 24, 8, 128, 8192, 128256),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
}
LAUNCHES, ROUNDS, L2_BYTES = 24, 7, 60 << 20


def microseconds(work, copies: int, launches: int = LAUNCHES) -> float:
    """Median time of work(i), i rotating over the copies of its operands."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(copies):
            work(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            work(i % copies)
    times = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
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


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)


def layer(x, weights, cosines, sines, heads: int, kv_heads: int, size: int) -> torch.Tensor:
    """A Llama layer over the rows of one prompt, x [T, C]."""
    qkv, out, gate_up, down, gammas = weights
    rows, width = x.shape
    norm = torch.nn.functional.rms_norm
    found = norm(x, (width,), gammas[0], 1e-5) @ qkv.t()
    parts = found.view(1, rows, heads + 2 * kv_heads, size).transpose(1, 2)
    q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
    q, k = turned(q, cosines, sines), turned(k, cosines, sines)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        a = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    x = x + a.transpose(1, 2).reshape(rows, heads * size) @ out.t()
    gate, up = (norm(x, (width,), gammas[1], 1e-5) @ gate_up.t()).chunk(2, dim=-1)
    return x + (torch.nn.functional.silu(gate) * up) @ down.t()


def prompt(name: str, rows: int) -> float:
    """Milliseconds of all layers and the last row's logits."""
    C, L, H, G, D, F, V = SHAPES[name]
    sizes = ((H + 2 * G) * D, C), (C, H * D), (2 * F, C), (C, F), (2, C)
    weights = [[random(*size) * 0.02 for size in sizes] for _ in range(L)]
    head, x = random(V, C), random(rows, C)
    cosines, sines = random(rows, D // 2), random(rows, D // 2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def work(_):
        y = x
        for of_layer in weights:
            y = compiled(y, of_layer, cosines, sines, H, G, D)
        return y[-1:] @ head.t()

    with torch.no_grad():
        return microseconds(work, 1, launches=1) * 1e-3


def prompts(name: str) -> None:
    for rows in (512, 2048, 8192):
        ms = prompt(name, rows)
        print(
            f"| {name} | prompt of {rows} | compiled layers, cuBLAS, cuDNN | {ms * 1e3:.0f} | | |"
            f" {rows / ms * 1e3:.0f} tokens/s",
            flush=True,
        )


def operators(name: str) -> None:
    C, _, H, G, D, F, V = SHAPES[name]
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
            line = f"| {name} | {work}, T {rows} | cuBLAS | {us:.1f} | {moved:.0f} | {flops:.1f} |"
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


def main(arguments: list[str]) -> None:
    names = [a for a in arguments if a in SHAPES] or list(SHAPES)
    all_of_it = not any(a.startswith("--") for a in arguments)
    print(f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, ", end="")
    print(f"{torch.cuda.get_device_name()}, microseconds")
    print("| model | work | library | us | GB/s | TFLOP/s |\n|---|---|---|---|---|---|")
    for name in names:
        if all_of_it or "--operators" in arguments:
            operators(name)
        if all_of_it or "--prompts" in arguments:
            prompts(name)


if __name__ == "__main__":
    main([argument.lower() for argument in sys.argv[1:]])
