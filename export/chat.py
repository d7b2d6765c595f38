"""The shape of a chat, told from the marks in a chat template. Templates are programs from the
model's author; they are searched, never run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.files import read_json, read_json_if_there

if TYPE_CHECKING:  # both import this file
    from export.model import Config
    from export.tokenizer import Tokenizer

SHAPES = {
    "none": 0,
    "llama2": 1,
    "llama3": 2,
    "chatml": 3,
    "gemma": 4,
    "phi3": 5,
    "zephyr": 6,
    "mistral": 7,
    "llama3_1": 8,
    "qwen3": 9,
    "phi4": 10,
    "phi4_mini": 11,
    "olmo": 12,
    "mistral_v1": 13,
    "mistral_v3": 14,
    "mistral_tekken": 15,
    "mistral_v7": 16,
}

# What has to be found in a template (regular expressions), and what must not be. The first entry
# that fits wins. \n in a template's strings stands here as a newline. No repetition may run to the
# end of a template from many places.
MARKS = (
    (("<\\|im_start\\|>", "<\\|im_sep\\|>"), (), "phi4"),
    (("<\\|im_start\\|>", "Reasoning Mode"), (), "none"),  # SmolLM3: a system text that varies
    (("<\\|im_start\\|>", "split\\('</think>'\\)"), (), "qwen3"),
    (("<\\|im_start\\|>",), (), "chatml"),
    (("<\\|start_header_id\\|>", "Cutting Knowledge Date"), (), "llama3_1"),
    (("<\\|start_header_id\\|>",), (), "llama3"),
    (("<start_of_turn>",), (), "gemma"),
    (("\\[INST\\]", "<<SYS>>"), (), "llama2"),
    (("\\[INST\\]", "\\[SYSTEM_PROMPT\\]"), ("\\[SYSTEM_PROMPT\\] ",), "mistral_v7"),
    (("\\[INST\\]", "\\[SYSTEM_PROMPT\\]"), (), "none"),
    ((" \\[INST\\] ", " \\[/INST\\]"), (), "mistral_v1"),
    (("\\[INST\\] ", " \\[/INST\\]"), (), "mistral"),
    (("\\[INST\\] ", "\\[/INST\\]"), (), "mistral_v3"),
    (("\\[INST\\]", "\\[/INST\\]"), (), "mistral_tekken"),
    (("<\\|(user\\|>|')", "<\\|end\\|>(' *\\+ *')?\n"), (), "phi3"),
    (("<\\|(user\\|>|')", "<\\|end\\|>"), ("<\\|channel\\|>",), "phi4_mini"),
    (("<\\|user\\|>(' *\\+ *')?\n'[^}]{,200}eos_token",), (), "zephyr"),
    (("<\\|user\\|>(' *\\+ *')?\n'[^}]{,200}'\n'",), (), "olmo"),
)

# A string literal that holds a whole system message: no quote, brace or mark inside. Newlines
# stand in templates as themselves or as \n.
CHATML_SYSTEM = re.compile(
    r"<\|im_start\|>system(?:\n|\\n)((?:\\.|[^'\"{}\\<])+)<\|im_end\|>", re.DOTALL
)


def template_from_hf(folder: Path) -> str:
    """The text of the default chat template, "" where the folder has none."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace")
    if (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template")
    else:
        template = read_json_if_there(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        template = next((i.get("template") for i in named if i.get("name") == "default"), None)
    return encodable(template, "chat template") if isinstance(template, str) else ""


def encodable(text: str, what: str) -> str:
    """The text, unless JSON has half a surrogate pair in it."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ExportError(f"{what}: expected Unicode, found half a surrogate pair")
    return text


def shape_of(template: str) -> str:
    """ "none" for a template that is not one of those that the engine has."""
    text = template.replace("\\n", "\n")
    for wanted, unwanted, shape in MARKS:
        found = all(re.search(mark, text) for mark in wanted)
        if found and not any(re.search(mark, text) for mark in unwanted):
            return shape
    return "none"


def has_bos(template: str) -> bool:
    """Whether the template itself begins a conversation with bos: nothing else does."""
    return "bos_token" in template


def bos_token(folder: Path) -> str:
    """The text of what a template calls bos_token."""
    token = read_json_if_there(folder / "tokenizer_config.json").get("bos_token")
    text = str(token.get("content") if isinstance(token, dict) else token)
    return encodable(text, "tokenizer_config.json: bos_token")


def set_shape(config: Config, folder: Path, tokenizer: Tokenizer | None) -> None:
    """The shape, and whether bos comes first, as a folder's template has it."""
    template = template_from_hf(folder)
    config.chat, config.chat_bos = shape_of(template), has_bos(template)
    if config.chat_bos and config.bos is None and tokenizer:
        config.bos = tokenizer.id_of_control(bos_token(folder))


def default_system(template: str) -> str:
    """The message that a ChatML template supplies where the conversation has no system message."""
    found = CHATML_SYSTEM.search(template)
    if not found:
        return ""
    escapes = {"n": "\n", "t": "\t"}
    return re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), found[1], flags=re.DOTALL)
