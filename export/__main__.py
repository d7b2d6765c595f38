"""python3 -m export SOURCE -o model.bin: see --help."""

import argparse
import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

import numpy as np

from export import chat, gguf_file, huggingface, llama2c, llmc
from export.errors import ExportError
from export.format import DTYPES, MAGIC, Layout
from export.model import Model
from export.writer import check_target, discard_unfinished, write_model

OK, UNUSABLE, INTERRUPTED = 0, 2, 130
MESSAGE = 1000  # letters, at most


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ExportError(f"{message} (try --help)")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="export",
        description="Turns a published checkpoint into a model.bin for ./run.",
        epilog="Exit codes: 0 done, 2 usage or a source that cannot be used, 130 interrupted.",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a folder (safetensors) of Hugging Face or nanoGPT, a .gguf file, a .bin of llama2.c "
        "or llm.c",
    )
    parser.add_argument(
        "-o", dest="target", type=Path, required=True, metavar="FILE", help="the file to write"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of the matrices (default: bf16)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="of a .bin: llama2.c's tokenizer.bin; llm.c's gpt2_tokenizer.bin, a tokenizer.json or "
        "its folder",
    )
    parser.add_argument(
        "--chat-shape",
        choices=chat.SHAPES,
        help="how a conversation is written (default: told from the chat template)",
    )
    parser.add_argument("--name", help="the model's name in the file (default: the source's)")
    return parser.parse_args(arguments)


def load(source: Path, tokenizer: Path | None) -> Model:
    """Tells the kind of source by what it is, not by its name."""
    if not source.exists():
        raise ExportError(f"{source} does not exist")
    for path in (source, tokenizer):
        if path and path.exists() and not (path.is_dir() or path.is_file()):
            raise ExportError(f"{path} is a device or a pipe, expected a file or a folder")
    if source.is_dir():
        kind = "hugging face"
    else:
        with source.open("rb") as file:
            kind = file.read(8)
    if tokenizer and (source.is_dir() or kind.startswith(b"GGUF")):
        raise ExportError(
            "--tokenizer is for .bin files of llama2.c and llm.c; other sources bring their own"
        )
    if source.is_dir():
        return huggingface.load(source)
    if kind.startswith(b"GGUF"):
        return gguf_file.load(source)
    if kind == MAGIC:
        raise ExportError(f"{source} is a model.bin already")
    if source.suffix in (".safetensors", ".json", ".model"):
        raise ExportError(f"{source} is a part of a checkpoint; give its folder")
    if llmc.is_checkpoint(kind):
        return llmc.load(source, tokenizer)
    return llama2c.load(source, tokenizer)


def choose_shape(model: Model, shape: str) -> None:
    """--chat-shape. Where no template says whether bos is first, it is as in any other text."""
    if model.tokenizer is None and shape != "none":
        raise ExportError("--chat-shape needs a tokenizer, and the source has none")
    if model.config.chat == "none":
        model.config.chat_bos |= bool(model.tokenizer and model.tokenizer.add_bos)
    model.config.chat = shape


def describe(model: Model, dtype: str) -> str:
    config, tokenizer = model.config, model.tokenizer
    heads = f"{config.heads} heads, {config.kv_heads} key/value heads of {config.head_dim}"
    tied = " (tied)" if model.tied else ""
    lines = [
        f"{config.name}: {model.family}",
        f"  {config.layers} layers, width {config.width}, {heads}, feed-forward {config.ffn}",
        f"  vocabulary {config.vocab}{tied}, context {config.context}, matrices as {dtype}",
        "  positions: learned" if config.learned_positions else f"  RoPE: {config.rope}",
    ]
    if model.tied and model.called_untied:
        lines.append(
            "  tied, as there is no lm_head.weight: the config says or implies that it is not"
        )
    sliding = [window for window in config.windows if window]
    if sliding:
        lines.append(f"  window: {sliding[0]} positions in {len(sliding)} layers")
    if None in config.rope_tables:
        lines.append(f"  no RoPE in {config.rope_tables.count(None)} layers")
    if tokenizer:
        lines.append(f"  tokenizer: {tokenizer.describe()}; chat shape: {config.chat}")
    else:
        lines.append("  no tokenizer found: the file will take token ids only (./run --ids)")
    return "\n".join(lines)


def check_overwriting(target: Path, source: Path, tokenizer: Path | None) -> None:
    """What is read from may not be written to. In a folder that is read from, a model.bin may be
    written anew."""
    if not target.exists():
        return
    files, folders = [source], [source]
    if tokenizer:  # beside a tokenizer.json others are read
        files, folders = [source, tokenizer], [source, tokenizer, tokenizer.parent]
    with target.open("rb") as file:
        if file.read(8) not in (MAGIC, b""):
            files += [file for folder in folders if folder.is_dir() for file in folder.iterdir()]
    if any(file.exists() and target.samefile(file) for file in files):
        raise ExportError(f"{target} is the source itself, or a part of it")


def export(arguments: argparse.Namespace) -> None:
    source, target = arguments.source, arguments.target
    check_target(target)
    check_overwriting(target, source, arguments.tokenizer)
    model = load(source, arguments.tokenizer)
    if arguments.name is not None:
        model.config.name = arguments.name
    if arguments.chat_shape is not None:
        choose_shape(model, arguments.chat_shape)
    model.check()
    print(describe(model, arguments.dtype), flush=True)
    layout = Layout(model, DTYPES[arguments.dtype])
    write_model(layout, target)
    prompt = '-p "Once upon a time"' if model.tokenizer else '--ids "1 2 3"'
    print(f"{target}: {layout.file_bytes} bytes, read back and verified. Run it:")
    print(f"  ./run {shlex.quote(str(target))} {prompt}")


def _interrupt(*_) -> None:
    """Ends the program wherever it is. An exception could be caught, or come after the last try."""
    discard_unfinished()
    with contextlib.suppress(OSError):
        os.write(2, b"export: interrupted\n")
    os._exit(INTERRUPTED)


def catch_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def prepare_streams() -> None:
    """Messages never fail: not on a terminal without the name's letters, not without a stderr."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")


def main(arguments: list[str]) -> int:
    try:
        # numpy says nothing: what is not finite is found where it would be written.
        with np.errstate(all="ignore"):
            export(parse_arguments(arguments))
    except (ExportError, OSError) as error:
        # One line, whatever a file name or a library put into the message.
        print("export: error:", " ".join(str(error).split())[:MESSAGE], file=sys.stderr)
        return UNUSABLE
    except MemoryError:
        print(
            "export: error: out of memory; are the source's files what they should be?",
            file=sys.stderr,
        )
        return UNUSABLE
    return OK


if __name__ == "__main__":
    catch_signals()
    prepare_streams()
    sys.exit(main(sys.argv[1:]))
