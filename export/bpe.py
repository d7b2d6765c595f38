"""Byte-level BPE as published (vocab, merges, a pre-split) and as model.bin wants it (bytes by id).

The engine merges the pair whose joined bytes have the lowest id, and needs no list of merges. That
is the published algorithm where the merges, in order of rank, give results in order of id."""

import itertools
from collections.abc import Collection, Iterable

from export.errors import ExportError

PATTERNS = {"gpt2": 1, "llama3": 2, "qwen2": 3, "smollm2": 4, "o200k": 5, "tekken": 6}

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    return (
        CONTRACTION
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        + SPACES
    )


def _o200k(contraction: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{UPPER}*{LOWER}+{contraction}|{start}{UPPER}+{LOWER}*{contraction}"
    return f"{words}|{digits}" + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES


# Published regular expressions, compared as strings: model.bin names a pattern, it holds none.
REGEXES = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    _llama3(r"\p{N}{1,3}"): "llama3",
    _llama3(r"\p{N}"): "qwen2",
    _o200k(CONTRACTION + "?", r"\p{N}{1,3}"): "o200k",
    _o200k("", r"\p{N}"): "tekken",
}

# tokenizer.ggml.pre -> pattern, ignore_merges, and whether text starts with bos when the file does
# not say. Names in one row share a pattern in llama.cpp; its "default" is none of ours.
GGUF_PATTERNS = {
    name: (pattern, ignore_merges, add_bos)
    for names, pattern, ignore_merges, add_bos in (
        (("gpt-2",), "gpt2", False, False),
        (("llama-bpe", "llama3", "llama-v3", "falcon3"), "llama3", True, True),
        (("dbrx", "smaug-bpe"), "llama3", False, False),
        (("qwen2", "deepseek-r1-qwen"), "qwen2", False, False),
        (("smollm", "starcoder", "refact"), "smollm2", False, False),
        (("gpt-4o",), "o200k", False, False),
        (("tekken",), "tekken", True, True),
    )
    for name in names
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's visible character for each byte: printable Latin-1 stands for itself, the other 68
    bytes for U+0100 onwards, in order."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


BYTE_OF = _byte_alphabet()


def to_bytes(text: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in text)
    except KeyError as error:
        raise ExportError(
            f"tokenizer: piece {text!r} has {error}, which is no letter of the byte alphabet"
        ) from None


def pattern_from_json(pre_tokenizer: dict | None) -> str:
    """The pattern behind the pre_tokenizer of a tokenizer.json."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    kinds = [step.get("type") for step in steps]
    byte_level = steps[-1]
    if kinds[-1] == "ByteLevel" and not byte_level.get("add_prefix_space", True):
        use_regex = byte_level.get("use_regex", True)
        if kinds == ["ByteLevel"] and use_regex:
            return "gpt2"
        if kinds == ["Digits", "ByteLevel"] and use_regex and steps[0].get("individual_digits"):
            return "smollm2"
        if kinds == ["Split", "ByteLevel"] and not use_regex:
            regex = steps[0].get("pattern", {}).get("Regex")
            known = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
            if known and regex in REGEXES:
                return REGEXES[regex]
    raise ExportError(
        f"tokenizer: unknown pre-split {str(pre_tokenizer)[:200]}; known: {', '.join(PATTERNS)}"
    )


def pattern_from_gguf(pre: str) -> tuple[str, bool, bool]:
    if pre not in GGUF_PATTERNS:
        raise ExportError(
            f"tokenizer: unknown pre-split {pre!r} (tokenizer.ggml.pre); "
            f"known: {', '.join(GGUF_PATTERNS)}"
        )
    return GGUF_PATTERNS[pre]


def split_merges(merges: Iterable) -> list[tuple[str, str]]:
    """Merges as pairs; files have them as "left right" or as ["left", "right"]."""
    pairs = []
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ExportError(f"tokenizer: merge {rank} is not a pair: {str(merge)[:100]}")
        pairs.append((pair[0], pair[1]))
    return pairs


def merge_results(vocab: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """The id that each merge gives, in order of rank."""
    results = []
    for rank, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ExportError(
                f"tokenizer: merge {rank} ({left!r}, {right!r}) needs a piece that does not exist"
            )
        results.append(vocab[left + right])
    return results


def pieces_by_id(
    vocab: dict[str, int], merges: list[tuple[str, str]], added: Collection[int]
) -> tuple[list[bytes], set[int]]:
    """The bytes of each id, b"" where there is no piece, and the ids that no merge results in.
    An added token gets a piece only where plain text reaches it: by a merge, or as one byte."""
    results = merge_results(vocab, merges)
    for rank, (before, after) in enumerate(itertools.pairwise(results)):
        if after < before:
            raise ExportError(
                f"tokenizer: merge {rank + 1} gives id {after} after id {before}; only "
                "vocabularies whose merges are in order of id are supported"
            )
    merged = set(results)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token in vocab.items():
        if token not in added or token in merged or text in BYTE_OF:
            pieces[token] = to_bytes(text)
    unmergeable = {i for i, piece in enumerate(pieces) if len(piece) > 1 and i not in merged}
    return pieces, unmergeable
