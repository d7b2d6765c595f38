"""Makes chats.json beside this file: conversations as published chat templates write them.

    python make_chats.py TEMPLATES TOKENIZERS llama2-tokenizer.model SMOLLM2.gguf

TEMPLATES has SHAPE.jinja for every name in SHAPES, the templates of the models named there (what
they say of tools may be left out). TOKENIZERS has llama2 (whose vocabulary is Mistral's), llama3_1,
qwen3 and gemma3, each a folder of a tokenizer.json, unpacked, and a tokenizer_config.json. Needs
transformers 5.24, gguf, sentencepiece; the tests read chats.json alone.

chats.json: by shape {bos: its text or null, system: the default system message, tokenizer: a name
in tokenizer_data.section or null, chats: [{messages: [[role, text], ...], text, ids: unless
tokenizer is null}]}
"""

import argparse
import json
from pathlib import Path

from make import check
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = Path(__file__).parent

# shape: bos, eos, tokenizer; the model whose template it is
SHAPES = {
    "llama2": ("<s>", "</s>", "llama2"),  # Llama-2-7b-chat
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "llama3_1"),  # Meta-Llama-3-8B-Instruct
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>", "llama3_1"),  # Llama-3.1-8B-Instruct
    "chatml": (None, "<|im_end|>", "smollm2"),  # SmolLM2-135M-Instruct
    "qwen3": (None, "<|im_end|>", "qwen3"),  # Qwen3-8B
    "gemma": ("<bos>", "<end_of_turn>", "gemma3"),  # gemma-3-1b-it
    "phi3": (None, "<|endoftext|>", None),  # Phi-3.5-mini-instruct
    "phi4": (None, "<|im_end|>", None),  # phi-4
    "phi4_mini": (None, "<|endoftext|>", None),  # Phi-4-mini-instruct
    "zephyr": (None, "</s>", None),  # zephyr-7b-beta, TinyLlama-1.1B-Chat
    "olmo": ("<|endoftext|>", "<|endoftext|>", None),  # OLMo-2-1124-7B-Instruct
    "mistral": ("<s>", "</s>", "mistral"),  # Mistral-7B-Instruct-v0.2 as first published
    "mistral_v1": ("<s>", "</s>", "mistral"),  # Mistral-7B-Instruct-v0.2 today
    "mistral_v3": ("<s>", "</s>", None),  # Mistral-7B-Instruct-v0.3
    "mistral_tekken": ("<s>", "</s>", None),  # Mistral-Nemo-Instruct-2407
    "mistral_v7": ("<s>", "</s>", None),  # Mistral-Small-3.1-24B-Instruct-2503
}
FOLDERS = {"mistral": "llama2", "llama3_1": "llama3_1", "qwen3": "qwen3", "gemma3": "gemma3"}
DEFAULT_SYSTEM = {
    "chatml": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
}

SYSTEM = ("system", "You are a terse assistant.\nAnswer in verse.")
TURNS = (
    ("user", "What is 12 + 30?"),
    ("assistant", "Forty-two, it's true."),
    ("user", "And in French, s'il vous plaît?"),
    ("assistant", "Quarante-deux, mon vieux."),
    ("user", "def f(x):\n\treturn x * 1000  # why?"),
)
SPACED = (
    ("user", "  \n spaces before and after\u00a0 \t\n"),
    ("assistant", " \x1f\u2003 here  too \n\x1c\n"),
    ("user", "\n\nnewlines first"),
    ("assistant", "newlines last\n\n"),
    ("user", "   "),
)
FOREIGN = (
    (
        "user",
        "Tie\u0302\u0301ng Vie\u0323\u0302t, e\u0301\u0323, \u1112\u1161\u11ab\u1100\u1173\u11af",
    ),
    ("assistant", "日本語 हिन्दी العربية 👩\u200d🚀🏽"),
    ("user", "\u212b \ufb01 ﷺ 1 234,5 €"),
)
THOUGHTS = (
    ("user", "Think."),
    ("assistant", "<think>\nHm.\n</think>\n\nI do."),
    ("user", "Again."),
    ("assistant", "<think>a</think>b</think>\n\n\n c\n"),
    ("user", "So?"),
    ("assistant", "</think>\nNo."),
    ("user", "<think>I do too.</think>\n\nAnd you?"),
)
MARKED = (
    ("user", "[INST] <<SYS>> {{ bos_token }} <|user|>\n"),
    ("assistant", "▁ <0x0A> ##"),
    ("user", "Human: [/INST]"),
)
CONVERSATIONS = (
    (SYSTEM, *TURNS),
    TURNS,
    TURNS[:1],
    (("system", " \n spaced out \n "), *SPACED),
    SPACED[:3],
    (("system", FOREIGN[0][1]), *FOREIGN),
    FOREIGN,
    THOUGHTS,
    (SYSTEM, *MARKED),
    (("system", ""), ("user", "Hello")),
)


def llama2(path):
    """Of a tokenizer.model, transformers 5.24 merges the pieces with the lowest scores first, such
    as two spaces. sentencepiece, with which the model was trained, merges them last."""
    pieces = SentencePieceProcessor(str(path))
    content = json.loads(LlamaTokenizer.from_pretrained(path.parent).backend_tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    merges.sort(key=lambda pair: -pieces.get_score(vocab["".join(pair)]))
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def smollm2(path):
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def fits(shape, messages):
    """Some templates refuse a system message, some fill its absence with today's date, and to some
    an empty one is none."""
    with_system = messages[0][0] == "system"
    if shape == "mistral":
        return not with_system
    if shape == "mistral_v7":
        return with_system
    return shape != "phi3" or not with_system or messages[0][1]


def make_shape(shape, template, tokenizer):
    bos, eos, name = SHAPES[shape]
    chats = []
    for conversation in CONVERSATIONS:
        if not fits(shape, conversation):
            continue
        messages = [{"role": role, "content": text} for role, text in conversation]
        text = _compile_jinja_template(template).render(
            messages=messages, bos_token=bos or "", eos_token=eos, add_generation_prompt=True
        )
        chat = {"messages": conversation, "text": text}
        if tokenizer:
            settings = {"add_generation_prompt": True, "chat_template": template}
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
            check(rendered == text, f"{shape}: {rendered!r} is not {text!r}")
            chat["ids"] = tokenizer.apply_chat_template(messages, return_dict=False, **settings)
        chats.append(chat)
    system = DEFAULT_SYSTEM.get(shape, "")
    return {"bos": bos, "system": system, "tokenizer": name, "chats": chats}


def main():
    parser = argparse.ArgumentParser(description="Makes chats.json beside this file.")
    for name in ("templates", "tokenizers", "llama2", "smollm2"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    tokenizers = {
        name: AutoTokenizer.from_pretrained(args.tokenizers / folder)
        for name, folder in FOLDERS.items()
    }
    tokenizers["llama2"] = llama2(args.llama2)
    tokenizers["smollm2"] = smollm2(args.smollm2)
    made = {}
    for shape, (*_, name) in SHAPES.items():
        template = (args.templates / f"{shape}.jinja").read_text(encoding="utf-8")
        made[shape] = make_shape(shape, template, tokenizers.get(name))
        print(shape, [len(chat.get("ids", ())) for chat in made[shape]["chats"]])
    lines = (f"{json.dumps(shape)}: {json.dumps(made[shape])}" for shape in made)
    (HERE / "chats.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
