"""Whole prompts through layers that PyTorch compiles, beside ours, for bench_peers.py."""

import re
import subprocess
from collections.abc import Callable
from functools import partial

import torch
from contest import BUILD, SHAPES, captured, heading, note, race, random, row, summary
from torch.nn.attention import SDPBackend, sdpa_kernel

PROMPTS = (512, 2048, 8192, 32768)
PROMPT_ROUNDS = 5


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)


def layer(
    x, weights, cosines, sines, heads: int, kv_heads: int, size: int, gemma: bool
) -> torch.Tensor:
    """A layer over a prompt, x [T, C]. Bias and norms of q and k may be None. A window
    is not made use of: the library's attention is fastest without a mask."""
    qkv, out, gate_up, down, gammas, bias, of_heads = weights
    rows, width = x.shape
    norm = torch.nn.functional.rms_norm
    activate = partial(torch.nn.functional.gelu, approximate="tanh")
    after = (lambda y, g: norm(y, (width,), g, 1e-5)) if gemma else lambda y, _: y
    found = torch.nn.functional.linear(norm(x, (width,), gammas[0], 1e-5), qkv, bias)
    parts = found.view(1, rows, heads + 2 * kv_heads, size).transpose(1, 2)
    q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)
    if of_heads is not None:
        q, k = norm(q, (size,), of_heads[0], 1e-5), norm(k, (size,), of_heads[1], 1e-5)
    q, k = turned(q, cosines, sines), turned(k, cosines, sines)
    backend = SDPBackend.FLASH_ATTENTION if size > 128 else SDPBackend.CUDNN_ATTENTION
    with sdpa_kernel(backend):
        a = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    x = x + after(a.transpose(1, 2).reshape(rows, heads * size) @ out.t(), gammas[2])
    gate, up = (norm(x, (width,), gammas[1], 1e-5) @ gate_up.t()).chunk(2, dim=-1)
    h = (activate(gate) if gemma else torch.nn.functional.silu(gate)) * up
    return x + after(h @ down.t(), gammas[3])


def library_prompts(
    name: str, lengths: tuple[int, ...]
) -> dict[int, tuple[torch.cuda.CUDAGraph, Callable]]:
    """All layers and the last row's logits, by the number of rows, over the same weights: the
    graph, and what holds its operands."""
    C, L, H, G, D, F, V = SHAPES[name]
    sizes = ((H + 2 * G) * D, C), (C, H * D), (2 * F, C), (C, F)
    bias = random((H + 2 * G) * D) if "Qwen2" in name else None
    of_heads = random(2, D).fill_(1) if "Qwen3" in name or "Gemma-3" in name else None
    gemma = "Gemma" in name
    weights = [
        [random(*size).mul_(0.02) for size in sizes] + [random(4, C).fill_(1), bias, of_heads]
        for _ in range(L)
    ]
    head = random(V, C).mul_(0.02)
    torch.compiler.reset()  # it compiles a function for a few shapes only
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    graphs = {}
    for rows in lengths:
        x = random(rows, C)
        frequencies = 1e-5 ** (torch.arange(D // 2, device="cuda") / (D // 2))
        angles = torch.arange(rows, device="cuda")[:, None] * frequencies
        cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()

        def launch(_: int, x=x, cosines=cosines, sines=sines) -> torch.Tensor:
            y = x
            for of_layer in weights:
                y = compiled(y, of_layer, cosines, sines, H, G, D, gemma)
            return y[-1:] @ head.t()

        try:
            launch(0)
            graphs[rows] = captured(launch, 1), launch
        except RuntimeError as failure:
            note(f"{name} prompt of {rows}, compiled layers: {failure}")
        torch.cuda.empty_cache()
    return graphs


def our_prompts(name: str, lengths: tuple[int, ...]) -> dict[int, float]:
    """Seconds, by the number of rows."""
    command = [str(BUILD / "tests/bench_gpu"), name, "--prefill", *map(str, lengths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    pattern = rf"^\| {re.escape(name)} \| prompt of (\d+) \| ([\d.]+) \|"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-200:] or done.stdout[-200:]}")
    return {int(rows): float(us) * 1e-6 for rows, us in found}


@torch.no_grad()
def prompts(name: str, lengths: tuple[int, ...]) -> None:
    if not (BUILD / "tests/bench_gpu").exists():
        raise RuntimeError(f"{BUILD}/tests/bench_gpu is not built")
    graphs = library_prompts(name, lengths)

    def measured() -> dict[int, float]:
        return {rows: race([graph], PROMPT_ROUNDS)[0] for rows, (graph, _) in graphs.items()}

    before, ours, after = measured(), our_prompts(name, lengths), measured()
    heading(
        *("model", "prompt", "compiled layers ms", "ours ms", "compiled layers again ms"),
        *("ratio", "compiled tokens/s", "ours tokens/s"),
    )
    ratios = []
    for rows in graphs:
        if rows not in ours:
            note(f"{name} prompt of {rows} left out: bench_gpu does not have it")
            continue
        theirs = (before[rows] + after[rows]) / 2
        ratios.append((theirs / ours[rows], f"prompt of {rows}"))
        times = (f"{s * 1e3:.2f}" for s in (before[rows], ours[rows], after[rows]))
        rates = (f"{rows / s:.0f}" for s in (theirs, ours[rows]))
        row(name, rows, *times, f"{ratios[-1][0]:.3f}", *rates)
    print()
    summary(f"{name}, prompts", ratios)
