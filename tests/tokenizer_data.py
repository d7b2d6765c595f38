"""For the tokenizer tests: published tokenizers and the libraries that go with them, the driver
program, and random texts."""

import functools
import lzma
import os
import random
import resource
import shutil
import struct
import subprocess
import tempfile
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("ROOFLINE_DATA", ROOT.parent / "shared" / "data"))
BUILD = Path(os.environ.get("ROOFLINE_BUILD", ROOT / "build"))
SMOLLM2 = Path(
    os.environ.get("ROOFLINE_SMOLLM2_GGUF", ROOT / "weights" / "SmolLM2-135M-Instruct.Q4_1.gguf")
)
SLOWER = 10 if "sanitize" in BUILD.name else 1


def need(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path


# ---- published tokenizers ----


@functools.cache
def unpacked(name: str) -> Path:
    """A folder with the tokenizer.json and tokenizer_config.json of DATA/tokenizers/name."""
    source = need(DATA / "tokenizers" / name)
    folder = Path(tempfile.mkdtemp(prefix=f"tokenizer-{name}-"))
    with lzma.open(source / "tokenizer.json.xz") as packed:
        (folder / "tokenizer.json").write_bytes(packed.read())
    shutil.copy(source / "tokenizer_config.json", folder)
    return folder


@functools.cache
def gguf_reader(path: Path):
    return pytest.importorskip("gguf").GGUFReader(need(path))


@functools.cache
def section(name: str) -> bytes:
    """The tokenizer section of a published tokenizer."""
    from export import tokenizer

    if name == "llama2":
        model = need(DATA / "llama2c" / "llama2-tokenizer.model").read_bytes()
        return tokenizer.section_from_sentencepiece(model)
    if name == "gpt2":
        return tokenizer.section_from_gguf(gguf_reader(DATA / "tokenizers" / "gpt2-vocab.gguf"))
    if name == "smollm2":
        return tokenizer.section_from_gguf(gguf_reader(SMOLLM2))
    # The published folder called llama2 has Mistral's vocabulary.
    return tokenizer.section_from_hf(unpacked("llama2" if name == "mistral" else name))


def smollm2_reference():
    """The tokenizer.json of SmolLM2, rebuilt from its GGUF."""
    tokenizers = pytest.importorskip("tokenizers")
    fields = gguf_reader(SMOLLM2).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    vocab = {text: index for index, text in enumerate(tokens)}
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return reference


def gpt2_reference(regex: str | None):
    """GPT-2's vocabulary behind another pre-split; None: behind its own."""
    tokenizers = pytest.importorskip("tokenizers")
    fields = gguf_reader(DATA / "tokenizers" / "gpt2-vocab.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    vocab = {text: index for index, text in enumerate(tokens)}
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    if regex is None:
        reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return reference
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return reference


@functools.cache
def reference(name: str):
    """A function from texts to lists of ids: what the makers' library says."""
    if name == "llama2":
        library = pytest.importorskip("sentencepiece")
        path = need(DATA / "llama2c" / "llama2-tokenizer.model")
        return library.SentencePieceProcessor(str(path)).encode
    if name == "smollm2":
        tokenizer = smollm2_reference()
    elif name == "gpt2":
        tokenizer = gpt2_reference(None)
    else:
        library = pytest.importorskip("tokenizers")
        tokenizer = library.Tokenizer.from_file(str(unpacked(name) / "tokenizer.json"))
    return lambda texts: ids_of(tokenizer, texts)


def ids_of(tokenizer, texts: list[str]) -> list[list[int]]:
    return [item.ids for item in tokenizer.encode_batch(texts, add_special_tokens=False)]


# ---- the driver ----


class Driver:
    """Runs tests/tokenize.c on a section."""

    vocab = 1 << 20  # as many rows as a model may have

    def __init__(self, content: bytes, folder: Path):
        self.program = need(BUILD / "tests" / "tokenize")
        self.path = folder / "section"
        self.path.write_bytes(content)
        self.seconds = 0.0  # processor time of the last call

    def __call__(self, texts: list[bytes], special=False, decode=False) -> list:
        """The ids of each text; with decode, pairs of ids and the bytes they decode to."""
        command = [self.program, self.path, str(self.vocab), "special" if special else "plain"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command + ["decode"] * decode,
            input=b"".join(struct.pack("<I", len(text)) + text for text in texts),
            capture_output=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert done.returncode == 0 and done.stderr == b"", (done.returncode, done.stderr)
        return self._split(done.stdout, len(texts), decode)

    def chats(self, chats: list[list], shape: int, bos: int | None) -> list[list[int]]:
        """The ids of conversations: lists of role and text."""
        roles = ("system", "user", "assistant")
        content = bytearray()
        for messages in chats:
            content += struct.pack("<I", len(messages))
            for role, text in messages:
                encoded = text if isinstance(text, bytes) else text.encode()
                content += struct.pack("<2I", roles.index(role), len(encoded)) + encoded
        bos = -1 if bos is None else bos
        command = [self.program, self.path, str(self.vocab), "chat", str(shape), str(bos)]
        done = subprocess.run(command, input=content, capture_output=True, check=False)
        assert done.returncode == 0 and done.stderr == b"", (done.returncode, done.stderr)
        return self._split(done.stdout, len(chats), decode=False)

    @staticmethod
    def _split(output: bytes, count: int, decode: bool) -> list:
        at, results = 0, []
        for _ in range(count):
            (length,) = struct.unpack_from("<I", output, at)
            ids = list(struct.unpack_from(f"<{length}i", output, at + 4))
            at += 4 + 4 * length
            if decode:
                (length,) = struct.unpack_from("<I", output, at)
                results.append((ids, output[at + 4 : at + 4 + length]))
                at += 4 + length
            else:
                results.append(ids)
        assert at == len(output)
        return results


def first_difference(texts: list, ours: list, theirs: list, seed: int) -> str | None:
    """What to print where two lists of ids differ."""
    different = [row for row in zip(texts, ours, theirs, strict=True) if row[1] != row[2]]
    if not different:
        return None
    text, our_ids, their_ids = min(different, key=lambda row: len(row[0]))
    return f"seed {seed}: {len(different)} differ, such as {text!a}: {our_ids} not {their_ids}"


# ---- random texts ----

WHITE = (
    " \t\n\r\v\f\x85\xa0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000"
    "\u180e\u200b\ufeff\x1c\x1f"  # these five look like white space and are not
)
SUFFIXES = ("s", "S", "\u017f", "t", "T", "re", "Re", "rE", "ve", "m", "ll", "LL", "d", "D", "x")
WORDS = (
    "Hello", "the", "world", "Ünïcode", "Việt", "가각", "각", "한국어", "e\u0301", "\u212b", "ﬁ",
    "हिन्दी", "ไทย", "العربية", "עברית", "日本語", "ელ", "ՀԱՅ", "a\u0323\u0301",
    "\u1100\u1161\u11a8", "ǅ", "ʰ", "ª", "ß", "İ", "ı", "Ⅻ", "①", "🄰", "K",
)  # fmt: skip
VIETNAMESE = "ăâđêôơưắằẳẵặấầẩẫậếềểễệốồổỗộớờởỡợứừửữựỳỵỷỹ"
EMOJI = ("😀", "👩\u200d🚀", "🏽", "❤\ufe0f", "🇩🇪", "✅", "☃", "🏴\U000e0067\U000e007f")


def is_settled(character: int) -> bool:
    """Whether all libraries agree about this code point: assigned since Unicode 3.2, or never."""
    if 0xD800 <= character < 0xE000:
        return False
    in_use = character < 0x40000 or 0xE0000 <= character < 0xF0000
    return not in_use or unicodedata.ucd_3_2_0.category(chr(character)) != "Cn"


def _any_of(choose: random.Random, low: int, high: int, count: int) -> str:
    points = (choose.randrange(low, high) for _ in range(count))
    return "".join(chr(point) for point in points if is_settled(point))


def _decomposed(choose: random.Random, text: str) -> str:
    """With its marks apart, and sometimes in another order or cut off."""
    marked = unicodedata.normalize(choose.choice(("NFD", "NFKD")), text)
    return marked[: choose.choice((-1, None))] + choose.choice(("", "", "\u0323", "\u0301\u0323"))


def _stretch(choose: random.Random) -> str:
    count = choose.randint(1, 8)
    kinds = (
        lambda: _any_of(choose, 0x20, 0x7F, count),
        lambda: "".join(choose.choices("abcdefghijklmnopqrstuvwxyzABCXYZ", k=count)),
        lambda: "".join(choose.choices("0123456789\u0663\u096b\u2167\xbd\xb2", k=count)),
        lambda: "".join(choose.choices(WHITE, k=count)),
        lambda: choose.choice("'\u2019\u02bc") + choose.choice(SUFFIXES),
        lambda: _any_of(choose, 0x4E00, 0x9FA6, count),
        lambda: "".join(choose.choices(EMOJI, k=count)),
        lambda: choose.choice("aeoEnu") + _any_of(choose, 0x300, 0x370, count),
        lambda: _any_of(choose, 0, 0x20, count),
        lambda: choose.choice(" \n\t") * choose.randint(1, 20),
        lambda: choose.choice(("\r\n", "\n\n", " \n", "\n ", "\t\n", "\n\t ")) * count,
        lambda: _any_of(choose, 0, 0x110000, count),
        lambda: _any_of(choose, 0xA0, 0x2000, count),
        lambda: _decomposed(choose, "".join(choose.choices(VIETNAMESE + "abc ", k=count))),
        lambda: _decomposed(choose, _any_of(choose, 0xAC00, 0xD7A4, count)),
        lambda: _decomposed(choose, _any_of(choose, 0xC0, 0x1F00, count)),
        lambda: _any_of(choose, 0x1100, 0x11FA, count),
        lambda: choose.choice(WORDS),
        lambda: " " + choose.choice(WORDS),
        lambda: "".join(choose.choices("!?.,;:()[]{}<>/\\|-_=+*&^%$#@~`\"'", k=count)),
    )
    return choose.choice(kinds)()


def random_texts(seed: int, count: int) -> list[str]:
    choose = random.Random(seed)
    return ["".join(_stretch(choose) for _ in range(choose.randint(1, 12))) for _ in range(count)]


def megabyte(kind: str) -> bytes:
    """A text of 2**20 bytes."""
    size = 1 << 20
    choose = random.Random(1)
    if kind == "random bytes":
        return choose.randbytes(size)
    if kind == "words":
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = ("".join(choose.choices(letters, k=choose.randint(1, 10))) for _ in range(size))
        return " ".join(words).encode()[:size]
    unit = {
        "english": "The quick brown fox jumps over the lazy dog. It's 12 o'clock, isn't it?\n",
        "one letter": "a",
        "spaces": " ",
        "newlines": "\n",
        "spaces and letters": "a ",
        "digits": "7",
        "cjk": "漢字仮名交じり文",
        "emoji": "😀👩\u200d🚀🏽",
        "punctuation": "!?.,;:",
        "marks": "\u0316\u0301",
        "256 marks": "e" + "\u0301\u0316" * 128,
        "nul": "\0",
        "less than": "<",
        "almost a token": "<|im_star",
        "tokens": "<|im_start|>",
    }[kind].encode()
    return (unit * (size // len(unit) + 1))[:size]


MEGABYTES = (
    "english", "words", "one letter", "spaces", "newlines", "spaces and letters", "digits", "cjk",
    "emoji", "punctuation", "random bytes", "marks", "256 marks", "nul", "less than",
    "almost a token", "tokens",
)  # fmt: skip


def streamed(text: bytes) -> bytes:
    """What a decoder makes of bytes: the end of a text cannot complete a character any more."""
    for tail in (1, 2, 3):
        try:
            text[-tail:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return text[:-tail] + "\ufffd".encode()
    return text
