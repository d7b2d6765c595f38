"""Contests on one GPU, for bench_peers.py: who takes part, the race, and lines of the tables."""

import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("ROOFLINE_BUILD", ROOT / "build"))

# C, L, H, G, D, F, V; names and shapes are those of bench_models.h
SHAPES = {
    "1B": (2048, 16, 32, 8, 64, 8192, 128256),
    "3B": (3072, 28, 24, 8, 128, 8192, 128256),
    "8B": (4096, 32, 32, 8, 128, 14336, 128256),
    "Qwen3-0.6B": (1024, 28, 16, 8, 128, 3072, 151936),
    "Qwen3-8B": (4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064),
    "Mistral-7B": (4096, 32, 32, 8, 128, 14336, 32000),
    "Phi-3-mini": (3072, 32, 32, 32, 96, 8192, 32064),
    "Gemma-3-1B": (1152, 26, 4, 1, 256, 6912, 262144),
    "Gemma-3-4B": (2560, 34, 8, 4, 256, 10240, 262208),
}
ROUNDS, HEAT_ROUNDS = 9, 3
BURST_SECONDS = 2e-3  # at least, about
TOLERANCE = 0.02  # of a row's largest value; bf16 rounds by 0.004

wrong = []  # what gave a wrong result


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


# ---- lines ----


def note(line: object) -> None:
    """Beside the tables, and one line whatever it is."""
    print(" ".join(str(line).split())[:300], file=sys.stderr, flush=True)


def row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def heading(*cells: str) -> None:
    print()
    row(*cells)
    print("|" + "---|" * len(cells))


# ---- contests ----


@dataclass
class Contestant:
    name: str
    launch: Callable[[int], torch.Tensor]  # with the operands of turn i; returns the result


def captured(launch: Callable[[int], object], launches: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for i in range(launches):
            launch(i)
    finally:
        graph.capture_end()
    return graph


def race(graphs: list[torch.cuda.CUDAGraph], rounds: int) -> list[float]:
    """Median seconds of a burst of each."""
    times = [[] for _ in graphs]
    for turn in range(rounds):
        for place in range(len(graphs)):
            i = (place + turn) % len(graphs)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[i].replay()
            start.record()
            graphs[i].replay()
            end.record()
            times[i].append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(s.elapsed_time(e) for s, e in pairs) * 1e-3 for pairs in times]


def relative_error(result: torch.Tensor, want: torch.Tensor) -> float:
    """The worst row's largest difference over its largest value; NaN stays NaN."""
    difference = (result.float() - want).abs().amax(1)
    return (difference / want.abs().amax(1)).max().item()


def is_right(work: str, contestant: Contestant, error_of: Callable[[torch.Tensor], float]) -> bool:
    error = error_of(contestant.launch(0))
    if error <= TOLERANCE:
        return True
    note(f"{work}: {contestant.name} is WRONG: error {error:.3g} of a row's largest value")
    wrong.append(f"{work}, {contestant.name}")
    return False


@dataclass
class Outcome:
    """Seconds of a launch; None: a wrong result, or nobody who took the work."""

    name: str
    theirs: float | None
    ours: float | None

    def cells(self, flops: float) -> tuple[str, ...]:
        """Us and TFLOP/s of both sides, and the ratio."""
        us = [f"{s * 1e6:.2f}" if s else "" for s in (self.theirs, self.ours)]
        rates = [f"{flops / s * 1e-12:.1f}" if s else "" for s in (self.theirs, self.ours)]
        ratio = f"{self.ratio:.3f}" if self.ratio else ""
        return us[0] or self.name, us[1] or "WRONG", ratio, rates[0], rates[1]

    @property
    def ratio(self) -> float | None:
        return self.theirs / self.ours if self.theirs and self.ours else None


def contest(
    work: str,
    theirs: list[Contestant],
    ours: Contestant,
    their_error: Callable[[torch.Tensor], float],
    our_error: Callable[[torch.Tensor], float],
    launches: int,
) -> Outcome:
    """The fastest right one of theirs against ours, if that is right."""
    graphs, finalists = {}, {}
    name = "none"
    for contestant in theirs:
        try:
            if is_right(work, contestant, their_error):
                graphs[contestant.name] = captured(contestant.launch, launches)
            else:
                name = "WRONG"
        except RuntimeError as failure:
            note(f"{work}: {contestant.name} does not run: {failure}")
    if graphs:
        heats = dict(zip(graphs, race(list(graphs.values()), HEAT_ROUNDS), strict=True))
        name = min(heats, key=heats.get)
        finalists["theirs"] = graphs[name]
    if is_right(work, ours, our_error):
        finalists["ours"] = captured(ours.launch, launches)
    times = race(list(finalists.values()), ROUNDS)
    seconds = {side: time / launches for side, time in zip(finalists, times, strict=True)}
    return Outcome(name, seconds.get("theirs"), seconds.get("ours"))


def launches_for(flops: float, moved: float) -> int:
    """Of a burst, from a guess at what one takes."""
    return math.ceil(BURST_SECONDS / (max(flops / 600e12, moved / 4e12) + 3e-6))


def summary(title: str, ratios: list[tuple[float, str]]) -> None:
    if not ratios:
        return
    mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
    worst, where = min(ratios)
    print(f"{title}: geometric mean {mean:.3f}, worst {worst:.3f} ({where}), of {len(ratios)}")
