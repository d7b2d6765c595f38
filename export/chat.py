"""The shape of a chat, told from the marks in a chat template. Templates are programs from the
model's author; they are searched, never run."""

import re
from pathlib import Path

from export.files import read_json, read_json_if_there

SHAPES = {
    "none": 0,
    "llama2": 1,
    "llama3": 2,
    "chatml": 3,
    "gemma": 4,
    "phi3": 5,
    "zephyr": 6,
    "mistral": 7,
}

# The first entry whose marks all occur in the template wins.
MARKS = (
    (("<|im_start|>",), "chatml"),
    (("<|start_header_id|>",), "llama3"),
    (("<start_of_turn>",), "gemma"),
    (("[INST]", "<<SYS>>"), "llama2"),
    (("[INST]",), "mistral"),
    (("<|user|>", "<|end|>"), "phi3"),
    (("<|user|>",), "zephyr"),
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
    return template if isinstance(template, str) else ""


def shape_of(template: str) -> str:
    for marks, shape in MARKS:
        if all(mark in template for mark in marks):
            return shape
    return "none"


def default_system(template: str) -> str:
    """The message that a ChatML template supplies where the conversation has no system message."""
    found = CHATML_SYSTEM.search(template)
    if not found:
        return ""
    escapes = {"n": "\n", "t": "\t"}
    return re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), found[1], flags=re.DOTALL)
