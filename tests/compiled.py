"""Whole prompts through layers that PyTorch compiles, beside ours, for bench_peers.py."""

import re
import subprocess
from collections.abc import Callable

import torch
from contest import BUILD, SHAPES, captured, heading, note, race, random, row, summary
from torch.nn.attention import SDPBackend, sdpa_kernel

PROMPTS = (512, 2048, 8192, 32768)
PROMPT_ROUNDS = 5


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


def library_prompts(name: str) -> dict[int, tuple[torch.cuda.CUDAGraph, Callable]]:
    """All layers and the last row's logits, by the number of rows, over the same weights: the
    graph, and what holds its operands."""
    C, L, H, G, D, F, V = SHAPES[name]
    sizes = ((H + 2 * G) * D, C), (C, H * D), (2 * F, C), (C, F)
    weights = [
        [random(*size).mul_(0.02) for size in sizes] + [random(2, C).fill_(1)] for _ in range(L)
    ]
    head = random(V, C).mul_(0.02)
    torch.compiler.reset()  # it compiles a function for a few shapes only
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    graphs = {}
    for rows in PROMPTS:
        x = random(rows, C)
        frequencies = 1e-5 ** (torch.arange(D // 2, device="cuda") / (D // 2))
        angles = torch.arange(rows, device="cuda")[:, None] * frequencies
        cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()

        def launch(_: int, x=x, cosines=cosines, sines=sines) -> torch.Tensor:
            y = x
            for of_layer in weights:
                y = compiled(y, of_layer, cosines, sines, H, G, D)
            return y[-1:] @ head.t()

        try:
            launch(0)
            graphs[rows] = captured(launch, 1), launch
        except RuntimeError as failure:
            note(f"{name} prompt of {rows}, compiled layers: {failure}")
        torch.cuda.empty_cache()
    return graphs


def our_prompts(name: str) -> dict[int, float]:
    """Seconds, by the number of rows."""
    command = [str(BUILD / "tests/bench_gpu"), name.upper(), "--prefill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    pattern = rf"^\| {name.upper()} \| prompt of (\d+) \| ([\d.]+) \|"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-200:] or done.stdout[-200:]}")
    return {int(rows): float(us) * 1e-6 for rows, us in found}


@torch.no_grad()
def prompts(name: str) -> None:
    if not (BUILD / "tests/bench_gpu").exists():
        raise RuntimeError(f"{BUILD}/tests/bench_gpu is not built")
    graphs = library_prompts(name)

    def measured() -> dict[int, float]:
        return {rows: race([graph], PROMPT_ROUNDS)[0] for rows, (graph, _) in graphs.items()}

    before, ours, after = measured(), our_prompts(name), measured()
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
