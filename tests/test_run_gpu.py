"""./run on a GPU, with SmolLM2-135M-Instruct: against the CPU backend, transformers, and a plain
computation with the same roundings. Skipped where there is no GPU."""

import functools
from pathlib import Path

import numpy as np
import pytest
import reader
from engine import GPU, answer, logits, model, need_gpu, refusal, run

GOLDEN = Path(__file__).parent / "golden"
VOCAB = 49152


@pytest.fixture(scope="module", autouse=True)
def gpu():
    need_gpu(model("bf16"))


def prompts():
    golden = np.load(GOLDEN / "smollm2_greedy.npz")
    starts = golden["prompt_starts"]
    return [golden["prompt_ids"][starts[p] : starts[p + 1]] for p in range(len(starts) - 1)]


def greedy(dtype, prompt, *arguments):
    """The text of 48 tokens."""
    ids = " ".join(map(str, prompt))
    return answer(model(dtype), "--ids", ids, "-n", 48, "-t", 0, "--ignore-eos", *arguments)


def test_f32_answers_as_the_cpu_and_transformers():
    golden = np.load(GOLDEN / "smollm2_greedy.npz")
    for p, prompt in enumerate(prompts()):
        expected = greedy("f32", prompt)
        assert greedy("f32", prompt, *GPU) == expected, p
        ids = " ".join(map(str, golden["f32_ids"][p]))
        assert expected == answer(model("f32"), "--ids", ids, "--echo", "-n", 0), p


def test_bf16_answers_differ_by_roundings_alone(tmp_path):
    """Along the CPU's own answers, teacher-forced: logits at most twice as far from float64 as
    float64 with the backend's roundings; another choice hardly ever, and only where the two
    likeliest are closer than those roundings. (The CPU rounds weights alone to bf16.)"""
    golden = np.load(GOLDEN / "smollm2_greedy.npz")
    file = reader.read(model("bf16"))
    differing = total = 0
    for p, prompt in enumerate(prompts()):
        answer_ids = golden["bf16_ids"][p]
        ids = np.concatenate([prompt, answer_ids[:-1]])
        right, plain, ours = (
            found[len(prompt) - 1 :]
            for found in (
                reader.forward(file, ids),
                reader.forward(file, ids, reader.to_bf16),
                logits(model("bf16"), ids, VOCAB, tmp_path, *GPU),
            )
        )
        error, plain_error = np.abs(ours - right), np.abs(plain - right)
        other = (ours.argmax(axis=1) != answer_ids).nonzero()[0]
        two = np.sort(right[other])[:, -2:]
        gaps = two[:, 1] - two[:, 0]
        print(
            f"prompt {p}: mean error {error.mean():.3g}, plain {plain_error.mean():.3g}; "
            f"other choices at gaps {gaps}, plain errors {plain_error[other].max(axis=1)}"
        )
        assert error.mean() <= 2 * plain_error.mean(), p
        assert (gaps <= 2 * plain_error[other].max(axis=1)).all(), p
        differing += len(other)
        total += len(ours)
    print(f"{differing} of {total} choices differ")
    assert differing <= total // 50


@functools.cache
def exact(dtype):
    """Ids [T], and their logits [T, V] in float64."""
    ids = np.load(GOLDEN / "smollm2.npz")["ids"][:100]
    return ids, reader.forward(reader.read(model(dtype)), ids)


@functools.cache
def plain_errors():
    """How far float64 with the backend's roundings is from float64 without: the largest error of
    each row [draws, T], and the mean of all. Draws differ by what f32 may change: 2^-22 of each
    number before it is rounded, and of each sum 2^-24 of the magnitudes that it adds up, since what
    cancels does not take its error along. (Tensor cores cut off: row 0's sums were up to 28 times
    that from the exact ones.) Some rows turn on that: of 400 draws row 17 errs by 0.2 to 1.8."""
    ids, right = exact("bf16")
    file, largest, mean = reader.read(model("bf16")), [], []
    for draw in range(16):
        noise = np.random.default_rng(draw)

        def stored(x, noise=noise):
            return reader.to_bf16(x * (1 + 2**-22 * noise.standard_normal(x.shape)))

        def product(rows, matrix, noise=noise):
            sums, magnitudes = rows @ matrix.T, np.abs(rows) @ np.abs(matrix).T
            return sums + 2**-24 * magnitudes * noise.standard_normal(sums.shape)

        error = np.abs(reader.forward(file, ids, stored, product) - right)
        largest.append(error.max(axis=1))
        mean.append(error.mean())
    return np.array(largest), np.mean(mean)


@pytest.mark.parametrize("chunk", [1, 16, 1024])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_logits_err_as_a_plain_computation(dtype, chunk, tmp_path):
    """Each row at most twice as far from float64 as plain computations, and all together; f32:
    1e-3."""
    ids, right = exact(dtype)
    error = np.abs(logits(model(dtype), ids, VOCAB, tmp_path, "--chunk", chunk, *GPU) - right)
    if dtype == "f32":
        print(f"f32, chunks of {chunk}: {error.max():.3g}")
        assert error.max() <= 1e-3
        return
    largest, mean = plain_errors()
    ratio = error.max(axis=1) / largest.max(axis=0)
    print(
        f"bf16, chunks of {chunk}: rows {ratio.mean():.2f} times the largest of plain draws, "
        f"row {ratio.argmax()} {ratio.max():.2f} times; mean {error.mean():.3g}, plain {mean:.3g}"
    )
    assert (ratio <= 2).all() and error.mean() <= 2 * mean


def first_difference(texts):
    """Ids up to where two texts part, and what each goes on with."""
    a, b = (list(map(int, answer(model("bf16"), "-p", t, "--tokenize").split())) for t in texts)
    common = next(i for i in range(len(a)) if a[i : i + 1] != b[i : i + 1])
    return a[:common], [a[common], b[common]]


def test_chunks_give_the_same_text():
    """In bf16 they may part where the two choices are closer than roundings, which differ with the
    number of rows: chunks have kernels of their own."""
    prompt = (GOLDEN / "text.txt").read_text()[:700]
    file = reader.read(model("bf16"))
    for dtype in ("f32", "bf16"):
        base = [model(dtype), "-p", prompt, "-n", 40, "-t", 0, "--ignore-eos", *GPU]
        texts = [answer(*base, "--chunk", chunk).decode() for chunk in (1, 7, 64, 4096)]
        first, *others = dict.fromkeys(texts)
        assert dtype == "bf16" or not others, texts
        for other in others:
            ids, choices = first_difference((prompt + first, prompt + other))
            right, plain = (reader.forward(file, ids, *to)[-1] for to in ((), (reader.to_bf16,)))
            gap, error = abs(np.diff(right[choices])[0]), np.abs(plain - right).max()
            print(f"texts part after {len(ids)} ids, gap {gap:.3g}, plain error {error:.3g}")
            assert right.argmax() in choices, choices
            assert gap <= error


def test_same_seed_same_text():
    base = [model("bf16"), "-p", "Once upon a time", "-n", 64, "-t", 1, *GPU]
    texts = {answer(*base, "-s", 5) for _ in range(4)}
    assert len(texts) == 1
    assert len({answer(*base, "-s", seed) for seed in range(4)}) > 1


def test_a_context_that_ends_while_it_answers():
    base = [model("bf16"), "-p", "Once upon a time", "-t", 0, "--ignore-eos", *GPU]
    short = run(*base, "-c", 20, "-n", -1)
    assert short.returncode == 0 and b"context of 20 positions is full" in short.stderr
    assert answer(*base, "-c", 200, "-n", 60).startswith(short.stdout.rstrip(b"\n"))


def test_refusals():
    assert "the first is cuda:0" in refusal(5, model("bf16"), "-p", "x", "--device", "cuda:99")
    line = refusal(4, model("f32"), "-p", "x", "-c", 1 << 22, *GPU)
    assert line.startswith("run: device memory: ") and "MiB free" in line
    assert "the longest context that fits is " in line


def test_the_gpu_is_what_auto_means():
    done = run("--verbose", model("bf16"), "-p", "x", "-n", 1, "--device", "auto")
    assert done.returncode == 0 and b"compute capability" in done.stderr
