"""Ours beside the libraries, on the same work and in one run:

    python tests/bench_peers.py [8B ...] [--products] [--attention] [--general] [--prompts]

Products against cuBLAS (the fastest way that its heuristic offers) and attention against cuDNN and
FlashAttention run in one process, both sides as CUDA graphs. A card's clock follows the power it
draws, so it depends on what ran before: the sides take turns, in another order each round, and
each timed burst follows an untimed one of the same kind. Whole prompts against compiled layers of
PyTorch take turns by process: theirs, ours (tests/bench_gpu), theirs again.

A ratio is their time over ours: above 1 ours is faster. Ours let the next launch start early, as in
the engine (programmatic dependent launch); the libraries' do not. A product of one row is here that
of cuda_matmul_few.cu; the engine's own form for it (cuda_decode.cu) is in bench_gpu's tables. With
--general the same products and attention by the kernels of older devices (mma.sync), attention
against FlashAttention alone. bf16, random data; without names 8B and 1B, without flags all;
names are those of contest.py. Numbers: of what length prompts are."""

import ctypes
import datetime
import math
import subprocess
import sys
import warnings

import torch
from compiled import PROMPTS, prompts, turned
from contest import (
    BUILD,
    ROOT,
    SHAPES,
    Contestant,
    Outcome,
    contest,
    heading,
    launches_for,
    note,
    random,
    relative_error,
    row,
    summary,
    wrong,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

PRODUCT_ROWS = (1, 16, 32, 64, 128, 256, 512, 777, 1024, 2048, 2049, 4096, 8192)
GENERAL_ROWS = (512, 2048, 8192)
HEAD_ROWS = 512  # the most rows that are classified
# H, G, D, T, S: T queries at the end of S positions
ATTENTION = (
    *((32, 8, D, T, T) for D in (128, 64) for T in (512, 1024, 2048, 4096, 8192, 16384, 32768)),
    *((32, 8, D, 2048, 32768) for D in (128, 64)),
    *((16, 8, D, T, T) for D in (96, 256) for T in (2048, 8192)),
)

GENERAL_ATTENTION = tuple((32, 8, D, T, T) for D in (128, 64) for T in (2048, 8192))

ROTATED_BYTES = 4 * (60 << 20)  # of weights or cache in turn, so that L2 has none of it
COUNTERS, TILE_ROWS = 4096, 256  # kernels/config.h


# ---- tests/peers.cu ----


class Peers:
    def __init__(self) -> None:
        self.functions = ctypes.CDLL(str(BUILD / "tests/peers.so"))
        self.functions.peers_error.restype = ctypes.c_char_p
        pointer, number = ctypes.c_void_p, ctypes.c_int
        for name, result, arguments in (
            ("peers_open", number, []),
            ("peers_general", number, [number]),
            (
                "peers_product",
                number,
                [pointer] + [number] * 4 + [pointer] * 6 + [number] * 3 + [pointer] * 3,
            ),
            (
                "peers_attention",
                number,
                [pointer] + [number] * 5 + [ctypes.c_float] + [pointer] * 7,
            ),
            ("cublas_load", ctypes.c_int64, []),
            ("cublas_open", number, [number] * 3),
            ("cublas_product", number, [pointer, number] + [pointer] * 3),
        ):
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        self.call("peers_open")
        self.general = False
        self.cublas = 0  # its version
        try:
            self.cublas = self.call("cublas_load")
        except RuntimeError as failure:
            note(failure)

    def call(self, name: str, *arguments: int | float | torch.Tensor | None) -> int:
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        result = getattr(self.functions, name)(*plain)
        if result < 0:
            raise RuntimeError(self.functions.peers_error().decode(errors="replace"))
        return result

    def take_general_path(self) -> None:
        self.general = True
        self.call("peers_general", 1)

    def launch(self, name: str, *arguments: int | float | torch.Tensor | None) -> None:
        self.call(name, torch.cuda.current_stream().cuda_stream, *arguments)


# ---- products ----

EPILOGUES = {"store": 0, "add": 1, "activate": 2, "heads": 3}  # kernels/cuda.h


class Ours:
    """A product with what follows it in the engine: "store" nothing, "add" the residual and the
    next norm's first half, "activate" SwiGLU, "heads" RoPE and the cache. The general path has
    kernels of their own for norms and heads."""

    def __init__(
        self, epilogue: str, M: int, N: int, heads: tuple[int, int, int], general: bool
    ) -> None:
        self.epilogue, self.heads = epilogue, heads
        normed = epilogue == "add" and not general
        wide = N // 2 if epilogue == "activate" else N
        dtype = torch.float32 if epilogue in ("store", "add") else torch.bfloat16
        self.out = torch.full((M, wide), math.nan, device="cuda", dtype=dtype)
        self.gamma = torch.rand(N, device="cuda") if normed else None
        self.next = random(M, N) if normed else None
        self.squares = torch.empty(max(256, N // 64 + 2) * max(M, 64), device="cuda")
        self.slots = torch.zeros(M, device="cuda", dtype=torch.int32)
        self.positions = torch.arange(M, device="cuda", dtype=torch.int32)
        self.rope = torch.randn(M, 2, heads[2] // 2, device="cuda")
        if epilogue == "add":
            self.out.normal_()

    def launch(self, peers: Peers, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
        N, K = W.shape
        numbers = (EPILOGUES[self.epilogue], x.shape[0], N, K)
        norm = (self.gamma, self.next, self.squares)
        turns = (*self.heads, self.slots, self.positions, self.rope)
        peers.launch("peers_product", *numbers, x, W, self.out, *norm, *turns)
        return self.out

    def error(self, want: torch.Tensor) -> float:
        """Of out and of what the next norm takes from it."""
        if self.gamma is None:
            return relative_error(self.out, want)
        return max(relative_error(self.out, want), relative_error(self.next, want * self.gamma))

    def want(self, sums: torch.Tensor) -> torch.Tensor:
        """What out becomes, from out as it is and sums f32 [M, N]."""
        if self.epilogue == "store":
            return sums
        if self.epilogue == "add":
            return self.out + sums
        if self.epilogue == "activate":
            gate, up = sums.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        H, G, D = self.heads
        q, k, v = sums.view(-1, H + 2 * G, D).split((H, G, G), dim=1)
        q, k = (turned(x, self.rope[:, None, 0], self.rope[:, None, 1]) for x in (q, k))
        parts = (q.flatten(), k.transpose(0, 1).flatten(), v.transpose(0, 1).flatten())
        return torch.cat(parts).view_as(sums)


def product(
    peers: Peers, epilogue: str, M: int, weights: torch.Tensor, heads: tuple[int, int, int]
) -> Outcome:
    copies, N, K = weights.shape
    x = random(math.ceil(M / TILE_ROWS) * TILE_ROWS, K)[:M]
    y = torch.full((M, N), math.nan, device="cuda", dtype=torch.bfloat16)
    sums = x.float() @ weights[0].float().t()
    our = Ours(epilogue, M, N, heads, peers.general)
    want = our.want(sums)

    def ours(i: int) -> torch.Tensor:
        return our.launch(peers, x, weights[i % copies])

    ways = peers.call("cublas_open", M, N, K) if peers.cublas else 0

    def way(number: int) -> Contestant:
        def launch(i: int) -> torch.Tensor:
            peers.launch("cublas_product", number, x, weights[i % copies], y)
            return y

        return Contestant(f"way {number + 1} of {ways}", launch)

    def their_error(result: torch.Tensor) -> float:
        error = relative_error(result, sums)
        result.fill_(math.nan)  # the next way must not pass with what this one wrote
        return error

    return contest(
        f"M {M}, N {N}, K {K}",
        [way(number) for number in range(ways)],
        Contestant("ours", ours),
        their_error,
        lambda _: our.error(want),
        launches_for(2 * M * N * K, 2 * N * K),
    )


def products(peers: Peers, name: str) -> None:
    C, _, H, G, D, F, V = SHAPES[name]
    works = {
        "qkv": ("store" if peers.general else "heads", (H + 2 * G) * D, C),
        "out": ("add", C, H * D),
        "gate_up": ("activate", 2 * F, C),
        "down": ("add", C, F),
        "head": ("store", V, C),
    }
    many, few = [], []
    heading(
        *("model", "product", "ours does", "N x K", "M", "cuBLAS us", "ours us", "ratio"),
        *("cuBLAS TFLOP/s", "ours TFLOP/s", "cuBLAS's fastest"),
    )
    for work, (epilogue, N, K) in works.items():
        weights = random(math.ceil(ROTATED_BYTES / (2 * N * K)), N, K).mul_(K**-0.5)
        for M in GENERAL_ROWS if peers.general else PRODUCT_ROWS:
            if work == "head" and M > HEAD_ROWS:
                break
            try:
                outcome = product(peers, epilogue, M, weights, (H, G, D))
            except RuntimeError as failure:
                note(f"{name} {work} M {M} left out: {failure}")
                continue
            cells = outcome.cells(2 * M * N * K)
            row(name, work, epilogue, f"{N} x {K}", M, *cells, outcome.name)
            if outcome.ratio and M >= 16:
                (many if M >= 512 else few).append((outcome.ratio, f"{work}, M {M}"))
        del weights
        torch.cuda.empty_cache()
    print()
    path = ", general path" if peers.general else ""
    summary(f"{name}{path}, M >= 512", many)
    summary(f"{name}{path}, 16 <= M < 512", few)


# ---- attention ----


def in_layout(x: torch.Tensor, rows_first: bool) -> torch.Tensor:
    """[.., heads, rows, D], of which heads or rows are the outer dimension in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if rows_first else x.contiguous()


def library_attention(
    backend: SDPBackend, name: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask
) -> Contestant:
    """q [1, H, T, D], keys and values [copies, G or H, S, D]."""
    grouped = keys.shape[1] < q.shape[1]

    def launch(i: int) -> torch.Tensor:
        turn = i % len(keys)
        k, v = keys[turn : turn + 1], values[turn : turn + 1]
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        return out[0].transpose(0, 1)

    return Contestant(name, launch)


def library_attentions(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, general: bool
) -> list[Contestant]:
    """What takes the work: each library (cuDNN not beside the general path) in each layout, with a
    K/V head for each query head in memory where it does not know groups. q [1, H, T, D], keys and
    values [copies, G, S, D]."""
    T, S, group = q.shape[2], keys.shape[2], q.shape[1] // keys.shape[1]
    takers = []
    for library, backend in (
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("FlashAttention", SDPBackend.FLASH_ATTENTION),
    ):
        if general and library == "cuDNN":
            continue
        mask = None
        if T < S and library == "cuDNN":  # its own causal mask is that of T = S
            library = "cuDNN, mask in memory"
            mask = torch.ones(T, S, device="cuda", dtype=torch.bool).tril(S - T)[None, None]
        elif T < S:
            mask = causal_lower_right(T, S)
        for rows_first in (False, True):
            name = f"{library}, {'rows' if rows_first else 'heads'} first"
            for expanded in (False, True):
                parts = [
                    in_layout(x.repeat_interleave(group, 1) if expanded else x, rows_first)
                    for x in (keys, values)
                ]
                taker = library_attention(
                    backend,
                    name + (", K/V repeated" if expanded else ""),
                    in_layout(q, rows_first),
                    *parts,
                    mask,
                )
                try:
                    taker.launch(0)
                except (RuntimeError, TypeError) as refusal:
                    note(f"{taker.name}, T {T} of {S}, D {q.shape[3]}: {refusal}")
                    continue
                takers.append(taker)
                break
    return takers


def some_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Causal attention in f32 for some of the rows of q [T, H, D]; keys, values [G, S, D]."""
    (T, H, D), (G, S, _) = q.shape, keys.shape
    queries = q[chosen].float().view(-1, G, H // G, D)
    scores = torch.einsum("ngrd,gsd->ngrs", queries, keys.float()) * D**-0.5
    hidden = torch.arange(S, device=q.device) > (chosen + S - T)[:, None]
    weights = scores.masked_fill_(hidden[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("ngrs,gsd->ngrd", weights, values.float()).reshape(-1, H * D)


def attention(peers: Peers, H: int, G: int, D: int, T: int, S: int) -> Outcome:
    copies = math.ceil(ROTATED_BYTES / (4 * S * G * D))
    q, keys, values = random(T, H, D), random(copies, G, S, D), random(copies, G, S, D)
    out = torch.full((T, H, D), math.nan, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(T, device="cuda", dtype=torch.int32)
    positions = torch.arange(S - T, S, device="cuda", dtype=torch.int32)
    counters = torch.zeros(COUNTERS, device="cuda", dtype=torch.int32)

    def ours(i: int) -> torch.Tensor:
        k, v = keys[i % copies], values[i % copies]
        shape = T, H, G, D, S, D**-0.5
        peers.launch("peers_attention", *shape, q, k, v, slots, positions, counters, out)
        return out

    chosen = torch.linspace(0, T - 1, 48, device="cuda").long()
    want = some_rows(q, keys[0], values[0], chosen)

    def error(result: torch.Tensor) -> float:
        return relative_error(result[chosen].flatten(1), want)

    return contest(
        f"attention {H}/{G}, D {D}, T {T} of {S}",
        library_attentions(q.transpose(0, 1)[None], keys, values, peers.general),
        Contestant("ours", ours),
        error,
        error,
        launches_for(4 * H * D * T * (S - T / 2), 4 * S * G * D),
    )


def attentions(peers: Peers) -> None:
    ratios = []
    heading(
        *("H/G", "D", "T", "S", "library us", "ours us", "ratio"),
        *("library TFLOP/s", "ours TFLOP/s", "library"),
    )
    for H, G, D, T, S in GENERAL_ATTENTION if peers.general else ATTENTION:
        try:
            outcome = attention(peers, H, G, D, T, S)
        except RuntimeError as failure:
            note(f"attention {H}/{G}, D {D}, T {T} of {S} left out: {failure}")
            continue
        finally:
            torch.cuda.empty_cache()
        pairs = T * S - T * (T - 1) / 2
        row(f"{H}/{G}", D, T, S, *outcome.cells(4 * H * D * pairs), outcome.name)
        if outcome.ratio:
            ratios.append((outcome.ratio, f"D {D}, T {T} of {S}"))
    print()
    summary("attention" + (", general path" if peers.general else ""), ratios)


# ---- from the command line down ----


def said_by(*command: str) -> str:
    """What a program prints; nothing where it is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def print_run(peers: Peers | None) -> None:
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    built = BUILD / "commit"  # what the kernels were built from
    commit = built.read_text().strip() if built.exists() else ""
    version = peers.cublas if peers else 0
    cublas = f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else "none"
    print(
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, driver "
        f"{driver.partition(chr(10))[0] or 'unknown'}, PyTorch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}, cuBLAS {cublas}, bf16, random data; commit "
        f"{commit or 'unknown'}: {' '.join(sys.argv)}",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    flags = ("--products", "--attention", "--general", "--prompts")
    unknown = [a for a in arguments if a not in flags and a not in SHAPES and not a.isdigit()]
    if unknown:
        print(__doc__ if unknown[0] in ("-h", "--help") else f"what is {unknown[0]}? try --help")
        return 0 if unknown[0] in ("-h", "--help") else 2
    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no GPU")
        return 0
    names = [a for a in arguments if a in SHAPES] or ["8B", "1B"]
    lengths = tuple(n for n in PROMPTS if str(n) in arguments) or PROMPTS
    wanted = [flag for flag in flags if flag in arguments] or list(flags)
    warnings.simplefilter("ignore")  # why an attention kernel was not taken: note() says enough
    torch.backends.cuda.matmul.allow_tf32 = False  # for what results are compared with
    torch.cuda.set_stream(torch.cuda.Stream())
    peers = None
    try:
        peers = Peers()
    except (OSError, RuntimeError, AttributeError) as failure:
        note(f"no products and no attention: {failure}")
    print_run(peers)
    if peers and "--products" in wanted:
        for name in names:
            products(peers, name)
    if peers and "--attention" in wanted:
        attentions(peers)
    if peers and "--general" in wanted:
        peers.take_general_path()
        for name in names:
            products(peers, name)
        attentions(peers)
    if "--prompts" in wanted:
        for name in names:
            try:
                prompts(name, lengths)
            except (RuntimeError, OSError, subprocess.SubprocessError) as failure:
                note(f"{name} prompts left out: {failure}")
    if wrong:
        note(f"{len(wrong)} results are wrong: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
