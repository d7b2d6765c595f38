"""Tokens per second of ./run beside llama.cpp's llama-bench on the same machine, in turns.

    python tests/compare.py --llama-bench PATH --f32 F32.gguf --bf16 BF16.gguf --f16 F16.gguf
        [--run ./run] [--rounds 5] [--threads 2] [-o tests/results/NAME.txt]

The .gguf files hold the same model as weights/SmolLM2-135M-Instruct*.bin. In every round each
program runs each test once (after its own warm-up), one after the other, so that a machine whose
speed drifts is the same for all of them; ratios are taken within a round, and the medians over the
rounds are printed, with the smallest and the largest in brackets.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "bf16": ROOT / "weights/SmolLM2-135M-Instruct.bin",
    "f32": ROOT / "weights/SmolLM2-135M-Instruct-f32.bin",
}
# ours, peer's dtype, test, ratio to reach (None: only told)
PAIRS = [
    ("bf16", "f16", "tg64", 1.3),
    ("bf16", "bf16", "tg64", None),
    ("f32", "f32", "tg64", 1.05),
    ("bf16", "f16", "pp512", 1.05),
    ("bf16", "bf16", "pp512", None),
    ("f32", "f32", "pp512", 1.35),
]
ROOF_SHARES = {"bf16": 0.90, "f32": 0.95}


def output(command):
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def ours(options, dtype):
    """{test: record} of one run."""
    command = [options.run, MODELS[dtype], "--bench", "--pp", "512", "--tg", "64", "-r", "2"]
    text = output([*map(str, command), "-o", "json", "--threads", str(options.threads)])
    return {record["test"]: record for record in json.loads(text)}


def peers(options, dtype):
    """{test: tokens per second} of one run."""
    command = [options.llama_bench, "-m", getattr(options, dtype), "-p", "512", "-n", "64"]
    text = output([*map(str, command), "-r", "2", "-t", str(options.threads), "-o", "json"])
    return {
        f"pp{t['n_prompt']}" if t["n_prompt"] else f"tg{t['n_gen']}": t["avg_ts"]
        for t in json.loads(text)
    }


def spread(values, form="{:.2f}"):
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{form} [{form} to {form}]".format(middle, low, high)


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def report(options, rounds, write):
    record = rounds[0]["ours"]["bf16"]["tg64"]
    write(f"date      {time.strftime('%Y-%m-%d %H:%M')} UTC")
    write(f"machine   {processor()}, Linux {platform.release()}")
    write(f"commit    {record['commit']}; {record['device']}")
    write("command   " + " ".join(["python", *sys.argv]))
    write(f"rounds    {len(rounds)}, two repetitions of each test in each; {options.note}")
    write("")
    for dtype in MODELS:
        for test, key, unit in (("tg64", "bytes", "GB/s"), ("pp512", "flops", "GFLOP/s")):
            records = [r["ours"][dtype][test] for r in rounds]
            rate = spread([r["tokens_per_second"] for r in records], "{:.1f}")
            share = spread([100 * r["roof_share"] for r in records], "{:.1f}")
            roof = spread([r[f"roof_{key}_per_second"] * 1e-9 for r in records], "{:.1f}")
            goal = f", to reach {100 * ROOF_SHARES[dtype]:.0f} %" if test == "tg64" else ""
            write(
                f"ours {dtype:4} {test:6} {rate} tokens/s; {share} % of the roof{goal}; "
                f"roof {roof} {unit}"
            )
    for dtype in ("f32", "bf16", "f16"):
        for test in ("tg64", "pp512"):
            rate = spread([r["peers"][dtype][test] for r in rounds], "{:.1f}")
            write(f"llama.cpp {dtype:4} {test:6} {rate} tokens/s")
    write("")
    for dtype, other, test, goal in PAIRS:
        ratios = [
            r["ours"][dtype][test]["tokens_per_second"] / r["peers"][other][test] for r in rounds
        ]
        wanted = f", to reach {goal}" if goal else ""
        write(f"ratio {test:6} ours {dtype:4} / llama.cpp {other:4} {spread(ratios)}{wanted}")


def main():
    parser = argparse.ArgumentParser()
    for name in ("llama-bench", "f32", "bf16", "f16"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--run", default=str(ROOT / "run"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="how the two were built")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    rounds = []
    for i in range(options.rounds):
        turn = {"ours": {}, "peers": {}}
        turn["peers"]["f16"] = peers(options, "f16")
        turn["ours"]["bf16"] = ours(options, "bf16")
        turn["peers"]["bf16"] = peers(options, "bf16")
        turn["peers"]["f32"] = peers(options, "f32")
        turn["ours"]["f32"] = ours(options, "f32")
        rounds.append(turn)
        print(f"round {i + 1} of {options.rounds}", file=sys.stderr)
    lines = []
    report(options, rounds, lines.append)
    print("\n".join(lines))
    if options.output:
        Path(options.output).parent.mkdir(exist_ok=True)
        Path(options.output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
