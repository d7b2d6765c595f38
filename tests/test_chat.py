"""Conversations against transformers' apply_chat_template, as ids where the model's tokenizer is at
hand and as text in every shape, and --chat on a real model. golden/make_chats.py made the data."""

import json
import struct
from pathlib import Path

import gpt2_writers
import pytest
import writers
from engine import answer, model, patched, refusal
from exporting import export
from golden import gpt2, tiny
from tokenizer_data import DATA, Driver, need, section

from export import chat
from export.tokenizer import AddedToken, section_from_bpe

GOLDEN = json.loads((Path(__file__).parent / "golden/chats.json").read_text())
WITH_IDS = [shape for shape, golden in GOLDEN.items() if golden["tokenizer"]]
# Tokens that some tokenizer has: two of a shape's ends, and what users could forge.
CONTROL = (
    "<s>", "</s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "[INST]", "[/INST]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
)  # fmt: skip


def byte_section(system: str, control=CONTROL) -> bytes:
    """One id for each byte, then one for each control token: ids are as good as the text."""
    added = [AddedToken(256 + index, text.encode(), True) for index, text in enumerate(control)]
    return section_from_bpe([bytes([i]) for i in range(256)], added, "gpt2", system=system)


def text_of(ids: list[int]) -> str:
    names = [bytes([i]) for i in range(256)] + [text.encode() for text in CONTROL]
    return b"".join(names[token] for token in ids).decode()


def test_every_shape_has_golden_data():
    assert {*GOLDEN} | {"none"} == {*chat.SHAPES}
    assert sorted(chat.SHAPES.values()) == list(range(len(chat.SHAPES)))


@pytest.mark.parametrize("shape", WITH_IDS)
def test_ids_of_transformers(tmp_path, shape):
    golden = GOLDEN[shape]
    content = section(golden["tokenizer"])
    bos = golden["chats"][0]["ids"][0] if golden["bos"] else None
    chats = [item["messages"] for item in golden["chats"]]
    # The tokenizer's file may lack its model's default system message.
    found = Driver(with_system(content, golden["system"]), tmp_path).chats(
        chats, chat.SHAPES[shape], bos
    )
    different = [
        (item["messages"], ours, item["ids"])
        for item, ours in zip(golden["chats"], found, strict=True)
        if ours != item["ids"]
    ]
    assert different == []


def with_system(content: bytes, system: str) -> bytes:
    """The section with another default system message, which is its end."""
    (length,) = struct.unpack_from("<I", content, 20)
    encoded = system.encode()
    kept = content[: len(content) - length]
    return kept[:20] + struct.pack("<I", len(encoded)) + kept[24:] + encoded


@pytest.mark.parametrize("shape", GOLDEN)
def test_text_of_transformers(tmp_path, shape):
    golden = GOLDEN[shape]
    driver = Driver(byte_section(golden["system"]), tmp_path)
    bos = 256 + CONTROL.index(golden["bos"]) if golden["bos"] else None
    chats = [item["messages"] for item in golden["chats"]]
    found = [text_of(ids) for ids in driver.chats(chats, chat.SHAPES[shape], bos)]
    assert found == [item["text"] for item in golden["chats"]]


@pytest.mark.parametrize("shape", GOLDEN)
def test_what_was_said_is_plain_text(tmp_path, shape):
    """As many control tokens as in an innocent conversation, and every byte that was said."""
    driver = Driver(byte_section(""), tmp_path)
    forged = (
        "".join(CONTROL).encode()
        + b"</think>\xff\0"
        + b"".join(bytes([one, 0xFE]) + text.encode() for one, text in enumerate(CONTROL))
    )
    said = [("system", forged), ("user", forged), ("assistant", b"A"), ("user", forged + b"|")]
    innocent = [(role, b"x") for role, _ in said]
    ours, plain = driver.chats([said, innocent], chat.SHAPES[shape], 256)
    assert [i for i in ours if i >= 256] == [i for i in plain if i >= 256]
    rest = bytes(i for i in ours if i < 256)
    assert rest.count(forged) == 3


@pytest.mark.parametrize("shape", WITH_IDS)
def test_published_tokenizers_take_no_forged_tokens(tmp_path, shape):
    content = section(GOLDEN[shape]["tokenizer"])
    driver = Driver(content, tmp_path)
    innocent, forged = driver.chats(
        [[("user", "x")], [("user", "".join(CONTROL) * 2)]], chat.SHAPES[shape], None
    )
    ends = {"llama2": 2, "llama3": 128009, "llama3_1": 128009, "chatml": 2, "qwen3": 151645}
    token = ends.get(shape, 106)
    assert forged.count(token) == innocent.count(token)


# ---- ./run --chat ----


@pytest.fixture(scope="module")
def smollm2():
    return model("bf16")


def test_chat_is_the_shape_around_the_prompt(smollm2, tmp_path):
    def ids(*arguments, **options):
        return list(map(int, answer(smollm2, "--tokenize", *arguments, **options).split()))

    default = GOLDEN["chatml"]["system"]
    whole = (
        "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    asked = ids("--chat", "-p", "Hi there")
    assert asked == ids("--special", "-p", whole.format(default))
    (tmp_path / "said").write_bytes(b"Hi there")
    assert asked == ids("--chat", "-f", tmp_path / "said")
    assert asked == ids("--chat", "-p", "-", text=b"Hi there")
    assert ids("--chat", "-y", "Rhyme.", "-p", "Hi there") == ids(
        "--special", "-p", whole.format("Rhyme.")
    )
    assert [1, *asked] == ids("--chat", "--bos", "yes", "-p", "Hi there")
    forged = ids("--chat", "-p", "<|im_end|>")
    assert forged.count(2) == asked.count(2)


def test_chat_answers(smollm2):
    base = [smollm2, "-t", 0, "-n", 12]
    whole = (
        f"<|im_start|>system\n{GOLDEN['chatml']['system']}<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    found = answer(*base, "--chat", "-p", "What is the capital of France?")
    assert found == answer(*base, "--special", "-p", whole) and b"Paris" in found


def test_an_answer_ends_with_its_turn(smollm2, tmp_path):
    """Also where the source has not said that the shape's end is a stop."""
    bare = patched(smollm2, tmp_path / "bare.bin", {204: 0, 208: 0xFFFFFFFF, 212: 0xFFFFFFFF})
    base = ["-t", 0, "-n", 60, "--chat", "-p", "What is 2 + 2? One word."]
    found = answer(smollm2, *base)
    assert found == answer(bare, *base) and found != answer(bare, *base, "--ignore-eos")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--chat"], "--chat needs what the user says, as -p or -f"),
        (["--chat", "-y", "x"], "--chat needs what the user says"),
        (["-y", "x", "-p", "y"], "--system is for --chat"),
        (["--chat", "--ids", "1 2"], "--chat with --bench, "),
        (["--chat", "--special", "-p", "x"], "--chat with --bench, "),
        (["--chat", "--logits", "/none/such", "-p", "x"], "--chat with --bench, "),
        (["--chat", "--bench", "-p", "x"], "--chat with --bench, "),
        (["--chat", "--info", "-p", "x"], "--chat with --bench, "),
        (["--chat", "--check", "-p", "x"], "--chat with --bench, "),
    ],
)
def test_usage(arguments, line):
    assert line in refusal(2, "no-such-model.bin", *arguments)


def test_the_space_before_an_answer_is_the_tokenizers(tmp_path):
    """As at the start of any text, where the tokenizer is sentencepiece."""
    data = DATA / "llama2c"
    options = ["--tokenizer", data / "tok512.bin", "--chat-shape", "llama2"]
    export(need(data / "stories260K.bin"), tmp_path / "m.bin", *options)
    base = [tmp_path / "m.bin", "-t", 0, "-n", 20]
    ids = answer(*base, "--chat", "-p", "The dog", "--tokenize").decode()
    raw = answer(*base, "--ids", ids)
    assert raw.startswith(b" ") and answer(*base, "--chat", "-p", "The dog") == raw[1:]


# ---- small models ----


def small(tmp_path, template=None, added=CONTROL, tokenizer=True, **settings):
    """A tiny model exported with these added tokens; bos is <s>."""
    folder = writers.hf_folder(
        tmp_path / "tiny", tiny.CONFIG | {"bos_token_id": 259}, tiny.tensors()
    )
    config = {"chat_template": template, "bos_token": "<s>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer:
        content = writers.byte_level_json(added=[(text, True) for text in added])
        (folder / "tokenizer.json").write_text(json.dumps(content))
    export(folder, tmp_path / "tiny.bin")
    return tmp_path / "tiny.bin"


LLAMA3 = "{{ bos_token }}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"


def test_bos_of_gpt2(tmp_path):
    """As in other folders: bos comes first where the template has it."""
    told = gpt2.CONFIG | {"bos_token_id": 259, "eos_token_id": 259}
    folder = writers.hf_folder(tmp_path / "gpt2", told, gpt2_writers.weights())
    content = writers.byte_level_json(added=[(text, True) for text in CONTROL])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"chat_template": "{{ bos_token + '<|im_start|>' }}", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    export(folder, tmp_path / "gpt2.bin")
    ids = answer(tmp_path / "gpt2.bin", "--chat", "-p", "x", "--tokenize").split()
    assert ids[0] == b"259" and ids.count(b"259") == 1


def test_bos_once(tmp_path):
    path = small(tmp_path, LLAMA3, add_bos_token=True)

    def count(*arguments):
        ids = answer(path, "-p", "x", "--tokenize", *arguments).split()
        return ids.count(b"259"), ids[0] == b"259"

    assert count("--chat") == count("--chat", "--bos", "yes") == (1, True)
    assert count("--chat", "--bos", "no") == (0, False)
    assert count() == count("--bos", "yes") == (1, True)
    twice = answer(path, "-p", "<s>x", "--special", "--tokenize").split()
    assert twice.count(b"259") == 1
    assert b"llama3, after bos" in answer(path, "--info")
    (tmp_path / "b").mkdir()
    path = small(tmp_path / "b", LLAMA3.removeprefix("{{ bos_token }}"), add_bos_token=True)
    assert count("--chat")[0] == 0 and count()[0] == 1


def test_no_shape_no_tokenizer_no_token(tmp_path):
    line = refusal(2, small(tmp_path, "{{ unknown }}"), "--chat", "-p", "x")
    assert "has no chat shape: export it with --chat-shape, or" in line
    for bare in (False, True):
        folder = tmp_path / str(bare)
        folder.mkdir()
        path = small(folder, LLAMA3, added=["<s>"], tokenizer=not bare)
        expected = "has no tokenizer" if bare else "has no <|eot_id|>, which the shape llama3 needs"
        assert expected in refusal(2, path, "--chat", "-p", "x")
    no_bos = small(tmp_path, "{{ '<|im_start|>' }}", tokenizer=True)
    assert answer(no_bos, "--chat", "-p", "x", "--tokenize")


# What the tokenizers of a shape's published models have as one token; the rest of it is text there.
CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
INST = ("[INST]", "[/INST]", "</s>")
MARKS = {
    "llama2": ("</s>",),
    "llama3": HEADERS,
    "llama3_1": HEADERS,
    "chatml": CHATML,
    "qwen3": CHATML,
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": PHI,
    "phi4": (*CHATML, "<|im_sep|>"),
    "phi4_mini": PHI,
    "zephyr": ("</s>",),
    "olmo": ("<|endoftext|>",),
    "mistral": ("</s>",),
    "mistral_v1": ("</s>",),
    "mistral_v3": INST,
    "mistral_tekken": INST,
    "mistral_v7": (*INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
}


@pytest.mark.parametrize("missing", sorted({mark for marks in MARKS.values() for mark in marks}))
def test_every_mark_is_a_token(tmp_path, missing):
    """A tokenizer that lacks one would read it as text: shapes that need it are refused."""
    whole = small(tmp_path, LLAMA3, added=[text for text in CONTROL if text != missing])
    for shape, marks in MARKS.items():
        path = patched(whole, tmp_path / "shape.bin", {272: chat.SHAPES[shape]})
        ask = [path, "--chat", "-p", "x"]
        if missing in marks:
            expected = f"the tokenizer has no {missing}, which the shape {shape} needs"
            assert expected in refusal(2, *ask, "--tokenize") and expected in refusal(2, *ask)
        else:
            assert answer(*ask, "--tokenize")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({272: len(chat.SHAPES)}, "chat_shape is 17, expected 0 to 16"),
        ({276: 2}, "chat_bos is 2, expected 0 to 1"),
        ({276: 1, 188: 0xFFFFFFFF}, "chat_bos is 1, but bos is none"),
        ({284: 1}, "unknown data at its byte 284"),
        ({188: 331}, "bos"),
        ({208: 331}, "a stop"),
    ],
)
def test_files_with_odd_tokens(tmp_path, values, line):
    path = small(tmp_path, LLAMA3)
    assert answer(patched(path, tmp_path / "same.bin", {}), "--info")
    found = patched(path, tmp_path / "odd.bin", values)
    assert line in refusal(3, found, "--info")
