"""Tokenizer sections as the exporter makes them from each kind of source.
That the engine reads them as the makers' libraries would is in test_tokenizer.py."""

import json
import random
from pathlib import Path

import gguf
import pytest
import writers
from golden import tiny
from reader import read, read_section
from tokenizer_data import DATA, need, unpacked

from export import sentencepiece_model as spm
from export.__main__ import main
from export.errors import ExportError
from export.tokenizer import (
    AddedToken,
    section_from_bpe,
    section_from_gguf,
    section_from_hf,
    section_from_llama2c,
    section_from_sentencepiece,
    tokenizer_from_hf,
)

MARK = spm.SPACE
METASPACE = {"type": "Metaspace", "replacement": MARK, "split": False}
LLAMA2 = DATA / "llama2c" / "llama2-tokenizer.model"


def hf(folder: Path, content: dict | None = None, config: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    if content is not None:
        (folder / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def small_model() -> bytes:
    """A sentencepiece model with byte fallback and a few merges."""
    pieces = [spm.Piece(b"<unk>", 0, spm.UNKNOWN), spm.Piece(b"<s>", 0, spm.CONTROL)]
    pieces.append(spm.Piece(b"</s>", 0, spm.CONTROL))
    pieces += [spm.Piece(f"<0x{byte:02X}>".encode(), 0, spm.BYTE) for byte in range(256)]
    for text in (f"{MARK}h", "el", "hel", f"{MARK}hel", "lo", MARK, "h", "e", "l", "o"):
        pieces.append(spm.Piece(text.encode(), -float(len(pieces)), spm.NORMAL))
    return spm.build(pieces)


# ---- byte-level BPE ----


def test_byte_level(tmp_path):
    content = writers.byte_level_json(added=[("<|x|>", True), ("<y>", False)])
    content["added_tokens"][1] |= {"lstrip": True, "rstrip": True}
    section = read_section(section_from_hf(hf(tmp_path, content)))
    assert (section["kind"], section["pattern"], section["flags"]) == (1, 1, 0)
    assert section["pieces"] == [*(bytes([i]) for i in range(256)), b"he", b"ll", b"hell"]
    assert section["added"] == [(259, 1, b"<|x|>"), (260, 6, b"<y>")]
    assert section["unmergeable"] == [] and section["system"] == ""


def test_merges_as_strings(tmp_path):
    content = writers.byte_level_json()
    pairs = section_from_hf(hf(tmp_path, content))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    assert section_from_hf(hf(tmp_path, content)) == pairs


def test_settings(tmp_path):
    content = writers.byte_level_json()
    content["model"]["ignore_merges"] = True
    content["normalizer"] = {"type": "NFC"}
    assert read_section(section_from_hf(hf(tmp_path, content)))["flags"] == 3


def test_pieces_that_nothing_merges_to(tmp_path):
    """Among them added tokens of the vocabulary: they have no piece, unless text gets there."""
    content = writers.byte_level_json()
    vocab = content["model"]["vocab"]
    vocab |= {"hello": 259, "<|end▁of|>": 260, "unused": 262}
    content["added_tokens"] = [
        {"id": 260, "content": "<|end▁of|>", "special": True},
        {"id": 257, "content": "ll", "special": True},
        {"id": 33, "content": vocab_letter(vocab, 33), "special": True},
    ]
    section = read_section(section_from_hf(hf(tmp_path, content)))
    assert section["pieces"][257:] == [b"ll", b"hell", b"hello", b"", b"", b"unused"]
    assert section["unmergeable"] == [259, 262]
    assert [(token, flags) for token, flags, _ in section["added"]] == [(33, 0), (257, 0), (260, 1)]


def vocab_letter(vocab: dict, wanted: int) -> str:
    return next(text for text, token in vocab.items() if token == wanted)


def set_in(content: dict, path: str, value) -> dict:
    *parents, last = path.split(".")
    at = content
    for key in parents:
        at = at[key]
    at[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "pattern"),
    [
        ("model.merges", [["l", "l"], ["h", "e"]], "gives id 256 after id 257"),
        ("model.merges", [["h", "x"]], r"merge 0 \('h', 'x'\) needs a piece that does not exist"),
        ("model.merges", ["a b c"], "merge 0 is not a pair"),
        ("model.merges", [7], "malformed|not a pair"),
        ("model.merges", None, "no vocab or no merges"),
        ("model.vocab", {}, "no vocab or no merges"),
        ("model.vocab", {"a": 1 << 20}, "an id is not in 0 to"),
        ("model.vocab", {"a": "b"}, "an id is not in"),
        ("model.vocab.日", 259, "no letter of the byte alphabet"),
        ("model.type", "Unigram", "expected a model of type BPE, found 'Unigram'"),
        ("model", None, "malformed"),
        ("model.dropout", 0.1, "dropout 0.1 is not supported"),
        ("model.end_of_word_suffix", "</w>", "end_of_word_suffix '</w>' is not supported"),
        ("normalizer", {"type": "NFKC"}, "normalizer .*NFKC.* is not supported"),
        ("pre_tokenizer", None, "unknown pre-split None; known: gpt2, llama3, qwen2, smollm2"),
        ("pre_tokenizer.add_prefix_space", True, "unknown pre-split"),
        ("pre_tokenizer.use_regex", False, "unknown pre-split"),
        ("pre_tokenizer", {"type": "Whitespace"}, "unknown pre-split"),
        ("added_tokens", [{"id": 300}], "malformed"),
        ("added_tokens", [{"id": 300, "content": ""}], "has 0 bytes"),
        ("added_tokens", [{"id": 300, "content": "x" * 1025}], "has 1025 bytes"),
        ("added_tokens", [{"id": -1, "content": "x"}], "ids below"),
    ],
)
def test_refused_json(tmp_path, path, value, pattern):
    hf(tmp_path, set_in(writers.byte_level_json(), path, value))
    with pytest.raises(ExportError, match=pattern):
        section_from_hf(tmp_path)


def test_patterns_from_json(tmp_path):
    from export import bpe

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    found = {}
    for regex, name in bpe.REGEXES.items():
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
        steps = {"type": "Sequence", "pretokenizers": [split, byte_level]}
        found[name] = bpe.pattern_from_json(steps)
        with pytest.raises(ExportError):
            bpe.pattern_from_json(
                {"type": "Sequence", "pretokenizers": [split | {"behavior": "Removed"}, byte_level]}
            )
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, byte_level | {"use_regex": True}]
    found["smollm2"] = bpe.pattern_from_json({"type": "Sequence", "pretokenizers": steps})
    assert found == {name: name for name in bpe.PATTERNS}


@pytest.mark.parametrize(("name", "pattern"), [("llama3_1", 2), ("qwen3", 3)])
def test_published_byte_level(name, pattern):
    folder = unpacked(name)
    content = json.loads((folder / "tokenizer.json").read_text())
    section = read_section(section_from_hf(folder))
    assert section["pattern"] == pattern
    assert section["flags"] == (1 if name == "llama3_1" else 2)
    assert len(section["pieces"]) == len(content["model"]["vocab"])
    assert [(token, text.decode()) for token, _, text in section["added"]] == [
        (item["id"], item["content"]) for item in content["added_tokens"]
    ]


def test_bpe_directly():
    pieces = [bytes([i]) for i in range(256)] + [b"ab", b"", b"xyz"]
    added = [AddedToken(300, b"<x>", True)]
    section = read_section(
        section_from_bpe(pieces, added, "tekken", True, True, "Hi ☺", unmergeable=[258])
    )
    assert section["pieces"] == pieces and section["unmergeable"] == [258]
    assert (section["pattern"], section["flags"], section["system"]) == (6, 3, "Hi ☺")
    with pytest.raises(ExportError, match="piece 259 has 1025 bytes"):
        section_from_bpe([*pieces, b"x" * 1025], [], "gpt2")
    with pytest.raises(ExportError, match="listed twice"):
        section_from_bpe(pieces, added * 2, "gpt2")


# ---- sentencepiece ----


def test_sentencepiece_model_comes_through():
    model = need(LLAMA2).read_bytes()
    section = read_section(section_from_sentencepiece(model, [AddedToken(32000, b"<pad>", True)]))
    assert section["kind"] == 2 and section["model"] == model and section["pieces"] == []
    # Control pieces are listed: the library does not find them in a text.
    assert sorted(section["added"]) == [(1, 1, b"<s>"), (2, 1, b"</s>"), (32000, 1, b"<pad>")]


def test_sentencepiece_folder(tmp_path):
    hf(tmp_path, None, {"added_tokens_decoder": {
        "1": {"content": "<s>", "special": True, "rstrip": True},
        "269": {"content": "<|x|>", "special": True},
        "270": {"content": "<y>", "special": False, "lstrip": True},
    }})  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(small_model())
    (tmp_path / "added_tokens.json").write_text('{"<y>": 270, "<z>": 271}')
    section = read_section(section_from_hf(tmp_path))
    assert section["model"] == small_model()
    assert sorted(section["added"]) == [
        (1, 5, b"<s>"), (2, 1, b"</s>"), (269, 1, b"<|x|>"), (270, 2, b"<y>"), (271, 0, b"<z>"),
    ]  # fmt: skip
    hf(tmp_path, None, {"added_tokens_decoder": {"262": {"content": "<other>"}}})
    with pytest.raises(ExportError, match="added token 262 is b'<other>', but .* b'.*hel' there"):
        section_from_hf(tmp_path)


def test_special_user_defined_pieces_become_control_pieces(tmp_path):
    """The library would find them in any text."""
    pieces = spm.parse(small_model()).pieces
    users = [spm.Piece(text, 0, spm.USER_DEFINED) for text in (b"<turn>", b"<b>")]
    before, after = spm.build([*pieces, *users]), spm.build([*pieces, *users], False)
    decoder = {
        str(len(pieces)): {"content": "<turn>", "special": True},
        str(len(pieces) + 1): {"content": "<b>", "special": False},
    }
    hf(tmp_path, None, {"added_tokens_decoder": decoder})
    (tmp_path / "tokenizer.model").write_bytes(before)
    section = read_section(section_from_hf(tmp_path))
    changed = [*pieces, users[0]._replace(kind=spm.CONTROL), users[1]]
    assert section["model"] == spm.build(changed)
    assert (len(pieces), 1, b"<turn>") in section["added"]
    assert not any(text == b"<b>" for *_, text in section["added"])
    assert spm.with_controls(after, {len(pieces)}) == spm.build(changed, False)
    assert spm.with_controls(after, set()) == after


def test_marks_that_a_gguf_calls_user_defined_become_control_pieces(tmp_path):
    pieces = spm.parse(small_model()).pieces
    users = [spm.Piece(text, 0.0, spm.USER_DEFINED) for text in (b"<|im_start|>", b"<b>", b"<|x")]
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.text for piece in (*pieces, *users)])
    writer.add_token_scores([float(piece.score) for piece in (*pieces, *users)])
    writer.add_token_types([piece.kind for piece in (*pieces, *users)])
    writers.finish(writer)
    section = read_section(section_from_gguf(gguf.GGUFReader(tmp_path / "t.gguf")))
    changed = [*pieces, users[0]._replace(kind=spm.CONTROL), *users[1:]]
    assert section["model"] == spm.build(changed)


def varint_field(number: int, value: int) -> bytes:
    return bytes([number << 3, value])


def bytes_field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def piece_field(text: bytes, kind: int = spm.NORMAL) -> bytes:
    message = bytes([1 << 3 | 2]) + spm._write_varint(len(text)) + text + varint_field(3, kind)
    return bytes([1 << 3 | 2]) + spm._write_varint(len(message)) + message


UNK = piece_field(b"<unk>", spm.UNKNOWN)
BPE_SPEC = bytes_field(2, varint_field(3, 2))


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        (UNK + piece_field(b"a"), "expected type bpe, found unigram"),
        (UNK + bytes_field(2, varint_field(3, 3)), "expected type bpe, found word"),
        (UNK + BPE_SPEC + bytes_field(3, bytes_field(2, b"map")), "charsmap is not supported"),
        (BPE_SPEC, "expected 1 to 1048576 pieces, found 0"),
        (BPE_SPEC + piece_field(b"a"), "expected one unk piece, found 0"),
        (BPE_SPEC + UNK + piece_field(b"x", spm.UNKNOWN), "expected one unk piece, found 2"),
        (BPE_SPEC + UNK + piece_field(b"a") * 2, "pieces 1 and 2 are both b'a'"),
        (BPE_SPEC + UNK + piece_field(b""), "piece 1 must have 1 to 255 bytes"),
        (BPE_SPEC + UNK + piece_field(b"x" * 256), "piece 1 must have .* found 256 bytes"),
        (BPE_SPEC + UNK + piece_field(b"a\0"), "no NUL"),
        (BPE_SPEC + UNK + piece_field(b"a", 7), "piece 1 has unknown type 7"),
        (b"\x0a\xff", "cut short"),
        (b"\x0a\x05abc", "field cut short"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 12, "number cut short"),
        (varint_field(1, 3), "wrong wire type"),
        (bytes_field(1, varint_field(1, 3)), "piece has the wrong wire type"),
    ],
)
def test_refused_models(model, pattern):
    with pytest.raises(ExportError, match=pattern):
        section_from_sentencepiece(model)


def random_texts(pieces: list[str], count: int) -> list[str]:
    choose = random.Random(3)
    texts = []
    for _ in range(count):
        parts = [choose.choice(pieces).replace(MARK, " ") for _ in range(choose.randint(1, 12))]
        parts += choose.choices([" ", "  ", "\n", "é", "😀", "\u3000", "a", "日"], k=4)
        choose.shuffle(parts)
        texts.append("".join(parts))
    return texts


def same_ids(first: bytes, second: bytes, count: int = 5000) -> None:
    library = pytest.importorskip("sentencepiece")
    one, other = (library.SentencePieceProcessor(model_proto=model) for model in (first, second))
    pieces = [one.id_to_piece(i) for i in range(259, one.get_piece_size())]
    texts = random_texts(pieces, count)
    assert one.encode(texts) == other.encode(texts)
    assert [one.is_control(i) for i in range(300)] == [other.is_control(i) for i in range(300)]


def test_rebuilt_from_tokenizer_bin():
    section = section_from_llama2c(need(DATA / "llama2c" / "tokenizer.bin"), 32000)
    rebuilt = read_section(section)["model"]
    original = need(LLAMA2).read_bytes()
    assert spm.parse(rebuilt).pieces == spm.parse(original).pieces
    same_ids(original, rebuilt)


def test_rebuilt_from_gguf(tmp_path):
    import gguf

    original = need(LLAMA2).read_bytes()
    pieces = spm.parse(original).pieces
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.text for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.kind for piece in pieces])
    writers.finish(writer)
    rebuilt = read_section(section_from_gguf(gguf.GGUFReader(tmp_path / "t.gguf")))["model"]
    assert spm.parse(rebuilt).pieces == pieces
    same_ids(original, rebuilt)


def converted_to_json(model: bytes) -> dict:
    """What transformers' converter makes of a sentencepiece model: each piece by each split, the
    best scores first, and of those with one score the longer sides."""
    pieces = spm.parse(model).pieces
    vocab = {piece.text.decode(): index for index, piece in enumerate(pieces)}
    merges = []
    for text, index in vocab.items():
        splits = [(text[:k], text[k:]) for k in range(1, len(text))]
        found = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        merges += [(pieces[index].score, len(one), len(two), one, two) for one, two in found]
    ordered = sorted(merges, key=lambda merge: merge[:3], reverse=True)
    names = ("<unk>", "<s>", "</s>")
    return {
        "added_tokens": [{"id": i, "content": names[i], "special": True} for i in range(3)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": MARK},
                {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
            ],
        },
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [f"{one} {two}" for *_, one, two in ordered],
        },
    }


def test_rebuilt_from_json(tmp_path):
    """Llama 2's model through the converter and back: the same order of merging."""
    original = need(LLAMA2).read_bytes()
    rebuilt = read_section(section_from_hf(hf(tmp_path, converted_to_json(original))))["model"]
    pieces, again = spm.parse(original).pieces, spm.parse(rebuilt).pieces
    assert [(p.text, p.kind) for p in again] == [(p.text, p.kind) for p in pieces]
    same_ids(original, rebuilt)


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
def test_rebuilt_from_published_json(name):
    """Against the tokenizers library on the same file."""
    library = pytest.importorskip("tokenizers")
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor
    folder = unpacked(name)
    reference = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = processor(model_proto=read_section(section_from_hf(folder))["model"])
    texts = random_texts([reference.id_to_token(i) for i in range(1000, 30000)], 3000)
    theirs = [item.ids for item in reference.encode_batch(texts, add_special_tokens=False)]
    assert model.encode(texts) == theirs


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda c: c["model"]["merges"].remove(f"{MARK} hel"), "expected 6 merges, .* found 5"),
        (
            lambda c: c["model"]["merges"].insert(0, c["model"]["merges"].pop(3)),
            "are spread over the ranking, which no sentencepiece model gives",
        ),
        (lambda c: c["model"]["vocab"].update({"xy": 269}), "no merge gives piece 269, 'xy'"),
        (lambda c: c["model"]["vocab"].update({"z": 300}), "id 269 has no piece"),
        (
            lambda c: c.update({"normalizer": {"type": "NFKC"}}),
            "not those of a sentencepiece model",
        ),
        (lambda c: c.update({"normalizer": None}), "not those of a sentencepiece model"),
        (lambda c: c["model"]["vocab"].update({"x" * 10**6: 269}), "269 has 1000000 bytes"),
        (lambda c: c.clear(), "expected a model of type BPE, found None"),
    ],
)
def test_json_that_no_model_gives(tmp_path, change, pattern):
    content = converted_to_json(small_model())
    section_from_hf(hf(tmp_path, content))
    change(content)
    with pytest.raises(ExportError, match=pattern):
        section_from_hf(hf(tmp_path, content))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        ({"type": "Replace", "pattern": {"String": " "}, "content": MARK}, None, False),
        (None, METASPACE | {"prepend_scheme": "first"}, True),
        (None, METASPACE | {"prepend_scheme": "never"}, False),
    ],
)
def test_dummy_prefix_from_json(tmp_path, normalizer, pre_tokenizer, prefix):
    library = pytest.importorskip("sentencepiece")
    content = converted_to_json(small_model())
    content |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    model = read_section(section_from_hf(hf(tmp_path, content)))["model"]
    first = library.SentencePieceProcessor(model_proto=model).encode("hello", out_type=str)[0]
    assert first.startswith(MARK) == prefix


# ---- what goes with a tokenizer ----


@pytest.mark.parametrize(
    ("config", "post", "kind", "adds"),
    [
        ({}, None, "bpe", False),
        ({}, None, "spm", True),
        ({"add_bos_token": False}, None, "spm", False),
        ({"add_bos_token": True}, None, "bpe", True),
        ({}, [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}], "bpe", True),
        ({}, [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}], "spm", False),
        ({"add_bos_token": None}, None, "spm", True),
    ],
)
def test_add_bos(tmp_path, config, post, kind, adds):
    content = writers.byte_level_json() if kind == "bpe" else converted_to_json(small_model())
    if post:
        template = {"type": "TemplateProcessing", "single": post}
        content["post_processor"] = {"type": "Sequence", "processors": [{"type": "X"}, template]}
    assert tokenizer_from_hf(hf(tmp_path, content, config)).add_bos == adds


def test_a_folder_without_tokenizer(tmp_path):
    assert section_from_hf(tmp_path) is None


def test_more_ids_than_rows(tmp_path, capsys):
    content = writers.byte_level_json(added=[(f"<{i}>", True) for i in range(73)])
    folder = writers.hf_folder(tmp_path / "t", tiny.CONFIG, tiny.tensors())
    hf(folder, content)
    assert main([str(folder), "-o", str(tmp_path / "model.bin")]) == 2
    assert not (tmp_path / "model.bin").exists()
    assert "the tokenizer has 332 ids, but the model's vocabulary has 331 rows" in (
        capsys.readouterr().err
    )
    content["added_tokens"].pop()
    hf(folder, content)
    assert main([str(folder), "-o", str(tmp_path / "model.bin")]) == 0
    content["added_tokens"] = content["added_tokens"][:5]
    hf(folder, content, {"chat_template": "<|user|> <|end|>"})
    assert main([str(folder), "-o", str(tmp_path / "model.bin")]) == 0
    config = read(tmp_path / "model.bin").config
    assert (config["vocab"], config["vocab_used"], config["chat_shape"]) == (331, 264, 11)
