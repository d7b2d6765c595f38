"""What the exporter makes of chat templates: the shape, bos, the default system message; and
--chat-shape, which overrides it."""

import json
import time

import pytest
import writers
from exporting import export, refused
from golden import tiny

from export import chat

ADDED = [("<|im_start|>", True), ("<|im_end|>", True), ("<s>", True), ("</s>", True)]


def hf(folder, config: dict | None = None, tokenizer=True, **changes):
    """The tiny Llama with a byte-level tokenizer and what stands in tokenizer_config.json."""
    writers.hf_folder(folder, tiny.CONFIG | changes, tiny.tensors())
    if tokenizer:
        content = writers.byte_level_json(added=ADDED)
        (folder / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# What tells the shapes apart in published templates.
INST = "{{ bos_token }}{% if u %}{{ '[INST] ' + content + ' [/INST]' }}"


@pytest.mark.parametrize(
    ("template", "shape"),
    [
        ("", "none"),
        ("{{ messages }}", "none"),
        ("{{'<|im_start|>' + message['role']}}", "chatml"),
        ("{{'<|im_start|>'}}{% set x = message.content.split('</think>')[-1] %}", "qwen3"),
        ("{{'<|im_start|>user<|im_sep|>' + content + '<|im_end|>'}}", "phi4"),
        ("{{'<|im_start|>system\n## Metadata\nReasoning Mode: '}}", "none"),
        ("'<|start_header_id|>' + role + '<|end_header_id|>'", "llama3"),
        ("'<|start_header_id|>system' + 'Cutting Knowledge Date: December 2023\n'", "llama3_1"),
        ("{{'<start_of_turn>' + role}}", "gemma"),
        ("'[INST] ' + '<<SYS>>' + ' [/INST]'", "llama2"),
        ("'[INST] ' + content + ' [/INST]'", "mistral"),
        ("' [INST] ' + content + ' [/INST]'", "mistral_v1"),
        ("'[INST] ' + content + '[/INST]'", "mistral_v3"),
        ("'[INST]' + content + '[/INST]'", "mistral_tekken"),
        ("'[SYSTEM_PROMPT]' + s + '[/SYSTEM_PROMPT]' '[INST]' + u + '[/INST]'", "mistral_v7"),
        ("'[SYSTEM_PROMPT] ' + s + '[/SYSTEM_PROMPT]' '[INST] ' + u + '[/INST]'", "none"),
        ("'[INST]' + content", "none"),
        ("'<|user|>\n' + content + '<|end|>\n'", "phi3"),
        ("'<|user|>\\n' + content + '<|end|>\\n'", "phi3"),
        ("'<|user|>' + '\n' + content + '<|end|>' + '\n'", "phi3"),
        ("'<|' + message['role'] + '|>' + message['content'] + '<|end|>'", "phi4_mini"),
        ("'<|start|>' + role + '<|channel|>' + '<|' + x + '<|end|>'", "none"),
        ("'<|user|>\n' + content + eos_token", "zephyr"),
        ("{{ '<|user|>\n' + message['content'] + '\n' }}{{ content + eos_token }}", "olmo"),
        ("'<|user|>' + content", "none"),
    ],
)
def test_shapes(template, shape):
    assert chat.shape_of(template) == shape


def shape_in(file) -> tuple:
    return file.config["chat_shape"], file.config["chat_bos"], file.config["bos"]


def test_shape_and_bos_in_the_file(tmp_path, out):
    chatml = {"chat_template": "{{'<|im_start|>' + message['role']}}"}
    file = export(hf(tmp_path / "chatml", chatml), out)
    assert shape_in(file) == (chat.SHAPES["chatml"], 0, file.config["bos"])
    mistral = {"chat_template": INST, "bos_token": "<s>", "add_bos_token": True}
    file = export(hf(tmp_path / "mistral", mistral, bos_token_id=7), out)
    assert shape_in(file) == (chat.SHAPES["mistral"], 1, 7)


@pytest.mark.parametrize(
    ("token", "bos", "chat_bos"),
    [("<s>", 261, 1), ({"content": "<s>"}, 261, 1), (None, 0xFFFFFFFF, 0), ("none", 0xFFFFFFFF, 0)],
)
def test_bos_that_only_the_template_has(tmp_path, out, token, bos, chat_bos):
    config = {"chat_template": INST, "bos_token": token}
    file = export(hf(tmp_path / "t", config, bos_token_id=None), out)
    assert shape_in(file) == (chat.SHAPES["mistral"], chat_bos, bos)


def test_chat_shape_overrides_and_fills_in(tmp_path, out):
    with_template = hf(tmp_path / "a", {"chat_template": INST}, bos_token_id=7)
    file = export(with_template, out, "--chat-shape", "mistral_v1")
    assert shape_in(file) == (chat.SHAPES["mistral_v1"], 1, 7)
    assert shape_in(export(with_template, out, "--chat-shape", "none"))[0] == 0
    without = hf(tmp_path / "b", {"add_bos_token": True}, bos_token_id=7)
    assert shape_in(export(without, out)) == (0, 0, 7)
    assert shape_in(export(without, out, "--chat-shape", "olmo")) == (chat.SHAPES["olmo"], 1, 7)
    no_bos = hf(tmp_path / "c", {"add_bos_token": False}, bos_token_id=7)
    assert shape_in(export(no_bos, out, "--chat-shape", "olmo")) == (chat.SHAPES["olmo"], 0, 7)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "{{'<|im_start|>system\nYou are \ud800<|im_end|>'}}"},
        {"chat_template": "{{bos_token}}<|im_start|>", "bos_token": "\ud800"},
        {"chat_template": "{{bos_token}}<|im_start|>", "bos_token": {"content": "\udc00x"}},
    ],
)
def test_half_a_surrogate_pair(tmp_path, out, capsys, config):
    refused(capsys, hf(tmp_path / "t", config, bos_token_id=None), out, "half a surrogate pair")


@pytest.mark.parametrize(
    "start", ["<|user|>\n'", "<|user|>' + '\n", "[INST]", "<|im_start|>system\nx"]
)
def test_long_templates(start):
    """Much of what begins a mark takes no time; each start to the end of it took 15 s."""
    begun, text = time.monotonic(), start * (300_000 // len(start))
    chat.shape_of(text)
    chat.default_system(text)
    assert time.monotonic() - begun < 2


def test_chat_shape_that_cannot_be(tmp_path, out, capsys):
    refused(capsys, hf(tmp_path / "a"), out, "invalid choice: 'chat'", "--chat-shape", "chat")
    bare = hf(tmp_path / "b", tokenizer=False)
    refused(capsys, bare, out, "--chat-shape needs a tokenizer", "--chat-shape", "chatml")
    export(bare, out, "--chat-shape", "none")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ '<|im_start|>system\nYou are S.<|im_end|>\n' }}", "You are S."),
        (
            "{{- '<|im_start|>system\\nYou\\'re \\\"Q\\\".\\nYes.<|im_end|>\\n' }}",
            'You\'re "Q".\nYes.',
        ),
        ("{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>' }}", ""),
        ("{{ '<|im_start|>system\n' }}{{ 'x' }}<|im_end|>", ""),
        ("{{ '<|im_start|>user\nYou are S.<|im_end|>' }}", ""),
        ("<|start_header_id|><|im_end|>", ""),
    ],
)
def test_default_system(template, message):
    assert chat.default_system(template) == message


def test_template_files(tmp_path):
    def hf(config):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    hf({"chat_template": "one"})
    assert chat.template_from_hf(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    hf({"chat_template": named})
    assert chat.template_from_hf(tmp_path) == "two"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "three"}')
    assert chat.template_from_hf(tmp_path) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert chat.template_from_hf(tmp_path) == "four"
    for odd in (7, [7], [{"name": "default", "template": 7}], {"a": 1}):
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        (tmp_path / "chat_template.json").unlink(missing_ok=True)
        hf({"chat_template": odd})
        assert chat.template_from_hf(tmp_path) == ""
