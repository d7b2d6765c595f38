"""Makes the golden data beside this file, with transformers and with plain numpy (forward.py).

    python make.py SMOLLM2.gguf text.txt stories260K.bin tok512.bin
    python make.py --tiny

SMOLLM2.gguf is SmolLM2-135M-Instruct in any quantisation: it is dequantised first, and those
float32 values are the model. The committed files come from its Q4_1 file (embedding Q8_0).
stories260K.bin and tok512.bin are llama2.c's. It takes about five minutes on two cores.
Needs torch, transformers, accelerate, gguf, numpy; made with torch 2.11, transformers 5.24,
gguf 0.19. The tests read the outputs and need none of these but numpy.

Every model is first compared with the float64 oracle; the largest difference over all logits is
kept as `error`: it is what float32 costs in a good implementation.

smollm2.npz           float32 arithmetic, teacher forced, positions 0 to 600 of text.txt
  text_ids [N]        int32, the whole text tokenised, no BOS added
  ids [601]           int32, the first of them: the input
  columns [64]        int32, vocabulary ids 769 * k for k < 63, and the last one
  and for W in f32 (weights as dequantised), bf16 (matrices and embedding rounded to bfloat16,
  nearest even; norms as they were):
  W_logits [601,64]   float32, at the columns
  W_max [601]         float32, over the whole vocabulary
  W_gap [601]         float32, best logit minus second: where it is small argmax may differ
  W_argmax [601]      int32
  W_logsumexp [601]   float64, computed in float64 from the float32 logits
  W_error             float64
smollm2_greedy.npz    48 greedy tokens on 8 prompts; stop tokens do not stop
  prompt_ids          int32, the prompts one after the other, special tokens as their ids;
                      no BOS added; 4 plain ones, then 4 in ChatML
  prompt_starts [9]   int32, prompt p is prompt_ids[starts[p]:starts[p+1]]
  W_ids [8,48]        int32, generated
  W_gap [8,48]        float32, best logit minus second at each step
tiny_FAMILY.npz       each random model of tiny.py and of gpt2.py
  ids [512]           int32, tiny.ids(512)
  logits [512,331]    float32; but for the Llama every fifth column, [512,67]
  error               float64
  prompt [16]         int32, the first of ids; the very first is another one where that decides
  text [200]          int32, greedy after the prompt; stop tokens do not stop
  and of those with longrope, whose logits are beyond the original context and whose text is within:
  short_logits [256,67], long_prompt [272], long_text [200]
defaults.json         what the classes of transformers assume of a config.json that is empty
rope.npz              inverse frequencies and the factor of each case of rope_cases.py
  NAME, NAME_scale    float32 [dimensions / 2], float; and NAME_long of longrope
stories260K.npz       greedy from BOS alone, in the order of llama2.c: 200 positions
  ids [200]           int32, generated; the input of position p is BOS or ids[p-1]
  logits [32,512]     float32 (rounded from float64), of the first positions
  gap [200]           float32
stories260K.txt       those ids as llama2.c prints them, and a newline
"""

import argparse
import itertools
import json
import struct
from pathlib import Path

import forward
import gguf
import gpt2
import numpy as np
import rope_cases
import tiny
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
POSITIONS = 601  # a prime: no multiple of any tile
GREEDY_STEPS = 48
TINY_POSITIONS, TINY_PROMPT, TINY_STEPS = 512, 16, 200
STORY_POSITIONS, STORY_LOGITS = 200, 32

SYSTEM = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius. In 2024, the Café Zoë sold 1,250 cups of",
    f"{SYSTEM}<|im_start|>user\nWhat is gravity?{ASSISTANT}",
    f"{SYSTEM}<|im_start|>user\nWrite a short poem about the moon.{ASSISTANT}",
    f"<|im_start|>user\nName three primary colours.{ASSISTANT}",
    f"""{SYSTEM}<|im_start|>user
Hi, I'm Ana.{ASSISTANT}Hello Ana! How can I help you today?<|im_end|>
<|im_start|>user
What is 12 + 30, and what is my name?{ASSISTANT}""",
]

# GGUF tensor name, after "blk.N." in a layer -> Hugging Face name, after "model.layers.N.".
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def check(ok, message):
    if not ok:
        raise SystemExit(f"make.py: {message}")


def save(name, **arrays):
    path = HERE / name
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size} bytes")
    for key, value in arrays.items():
        print(f"  {key} {np.shape(value)} {np.asarray(value).dtype}")


def weights_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def top(logits):
    """Best column, its value and its lead over the second, of float32 logits [..., V]."""
    value, column = torch.as_tensor(logits).topk(2)
    gap = value[..., 0] - value[..., 1]
    return column[..., 0].int().numpy(), value[..., 0].float().numpy(), gap.float().numpy()


def all_logits(model, ids):
    """[T, V] float32 and the largest difference from the float64 oracle."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    oracle = gpt2 if model.config.model_type == "gpt2" else forward
    exact = oracle.logits(model.config.to_dict(), weights_of(model), ids)
    error = np.abs(logits - exact).max()
    check(error < 2e-3, f"transformers differs from the oracle by {error}")
    return logits, error


# SmolLM2


def load_smollm2(path):
    """Model and tokenizer, the model in float32."""
    files = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **files, dtype=torch.float32, attn_implementation="eager"
    )
    check(model.config.rope_parameters["rope_theta"] == 100000, "rope theta is not 100000")
    tokenizer = AutoTokenizer.from_pretrained(**files)
    # transformers builds GPT-2's split from a GGUF; SmolLM2's isolates every digit before it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return model, tokenizer


def hugging_face_name(name):
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, layer, kind = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}"


def check_weights(model, path):
    """What transformers loaded is what the gguf package dequantises, q and k un-permuted."""
    heads = {
        "attn_q": model.config.num_attention_heads,
        "attn_k": model.config.num_key_value_heads,
    }
    loaded = dict(model.named_parameters())  # names a tied tensor once
    reader = gguf.GGUFReader(path)
    check(len(reader.tensors) == len(loaded), "the GGUF and the model differ in tensor count")
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for kind, count in heads.items():
            if f".{kind}." in tensor.name:
                values = forward.unpermute(values, count)
        same = np.array_equal(values, loaded[hugging_face_name(tensor.name)].detach().numpy())
        check(same, f"{tensor.name} differs between the GGUF and the model")


def round_to_bf16(model):
    """Rounds matrices and embedding in place, to nearest even; arithmetic stays float32."""
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.bfloat16().float())


def token_ids(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array(ids, np.int32)


def teacher_forced(model, ids, columns, name):
    """The arrays of smollm2.npz for one set of weights."""
    logits, error = all_logits(model, ids)
    argmax, best, gap = top(logits)
    return {
        f"{name}_logits": logits[:, columns],
        f"{name}_max": best,
        f"{name}_gap": gap,
        f"{name}_argmax": argmax,
        f"{name}_logsumexp": np.logaddexp.reduce(logits, axis=1, dtype=np.float64),
        f"{name}_error": error,
    }


def continue_greedily(model, prompt):
    """GREEDY_STEPS generated ids and gaps, with transformers' key-value cache."""
    ids, gaps, cache = [], [], None
    tokens = torch.from_numpy(prompt).long()
    with torch.inference_mode():
        for _ in range(GREEDY_STEPS):
            out = model(tokens[None], cache=cache, use_cache=True)
            cache = out.cache
            token, _, gap = top(out.logits[0, -1])
            ids.append(token)
            gaps.append(gap)
            tokens = torch.tensor([int(token)])
    return np.array(ids, np.int32), np.array(gaps, np.float32)


def greedy(model, prompts, name):
    """The arrays of smollm2_greedy.npz for one set of weights."""
    ids, gaps = zip(*(continue_greedily(model, prompt) for prompt in prompts), strict=True)
    return {f"{name}_ids": np.stack(ids), f"{name}_gap": np.stack(gaps)}


def make_smollm2(path, text):
    model, tokenizer = load_smollm2(path)
    check_weights(model, path)
    text_ids = token_ids(tokenizer, text)
    check(len(text_ids) >= POSITIONS, f"the text has {len(text_ids)} tokens, not {POSITIONS}")
    ids = text_ids[:POSITIONS]
    vocab = model.config.vocab_size
    columns = np.array([*range(0, 769 * 63, 769), vocab - 1], np.int32)
    prompts = [token_ids(tokenizer, prompt) for prompt in PROMPTS]

    forced = teacher_forced(model, ids, columns, "f32")
    continued = greedy(model, prompts, "f32")
    round_to_bf16(model)
    forced |= teacher_forced(model, ids, columns, "bf16")
    continued |= greedy(model, prompts, "bf16")

    save("smollm2.npz", text_ids=text_ids, ids=ids, columns=columns, **forced)
    starts = [0, *itertools.accumulate(map(len, prompts))]
    save(
        "smollm2_greedy.npz",
        prompt_ids=np.concatenate(prompts),
        prompt_starts=np.array(starts, np.int32),
        **continued,
    )
    for name in ("f32", "bf16"):
        print(f"  {name}: error {forced[name + '_error']:.2e}, gaps at least", end=" ")
        print(f"{forced[name + '_gap'].min():.2e} and {continued[name + '_gap'].min():.2e}")
        for row in continued[f"{name}_ids"]:
            print(f"    {tokenizer.decode(row)!r}")


# The tiny random models


def generate(model, prompt):
    """TINY_STEPS greedy ids, stop tokens like any other, and the least lead of a best logit."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.from_numpy(prompt).long()[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=TINY_STEPS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    gaps = [top(logits[0])[2] for logits in out.logits]
    return out.sequences[0, len(prompt) :].int().numpy(), min(gaps)


def tell(model, prompt, error):
    """The prompt and its text. Where the best two logits are somewhere nearer than 5 times what
    float32 costs, two good implementations may differ: the prompt's first id gives way to the next,
    and another text follows."""
    prompt = prompt.copy()
    for _ in range(20):
        text, gap = generate(model, prompt)
        if gap > 5 * error:
            print(f"  text after {len(prompt)} ids, the first {prompt[0]}: gap at least {gap:.2e}")
            return prompt, text
        prompt[0] = (prompt[0] + 1) % tiny.VOCAB
    raise SystemExit("make.py: no prompt whose text is sure in float32")


def make_tiny(family, settings, weights):
    config = AutoConfig.for_model(**settings, attn_implementation="eager")
    written = config.to_dict()
    check(all(written[key] == value for key, value in settings.items()), "a setting is not kept")
    model = AutoModelForCausalLM.from_config(config).eval()
    weights = {name: torch.from_numpy(value) for name, value in weights.items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = next(iter(weights.values()))  # the embedding
    model.load_state_dict(weights, strict=True)
    ids = tiny.ids(TINY_POSITIONS)
    logits, error = all_logits(model, ids)
    columns = slice(None, None, 1 if family == "llama" else 5)
    arrays = {"ids": ids, "logits": logits[:, columns], "error": error}
    arrays["prompt"], arrays["text"] = tell(model, ids[:TINY_PROMPT], error)
    if settings.get("rope_parameters", {}).get("rope_type") == "longrope":
        original = settings["original_max_position_embeddings"]
        arrays["short_logits"] = all_logits(model, ids[:original])[0][:, columns]
        longer = tell(model, ids[: original + TINY_PROMPT], error)
        arrays["long_prompt"], arrays["long_text"] = longer
    save(f"tiny_{family}.npz", **arrays)
    print(f"  error {error:.2e}, gap at least {top(logits)[2].min():.2e}")


def make_defaults():
    """What the class of each tiny family's config assumes of keys that are left out."""
    named = {
        settings["model_type"]: settings["architectures"][0] for settings in tiny.FAMILIES.values()
    }
    kept = ("architectures", "transformers_version", "id2label", "label2id", "model_type")
    defaults = {}
    for kind, name in named.items():
        told = AutoConfig.for_model(kind).to_dict().items()
        defaults[name] = {
            key: value for key, value in told if key not in kept and value is not None
        }
    text = json.dumps(defaults, indent=1, sort_keys=True)
    (HERE / "defaults.json").write_text(text + "\n")


def make_rope():
    """What transformers makes of each set of RoPE parameters in rope_cases.py."""
    arrays = {}
    for name, case in rope_cases.CASES.items():
        config = AutoConfig.for_model(**case)
        kind = config.rope_parameters["rope_type"]
        longest = case.get("original_max_position_embeddings", 0) + 1
        for part, length in (
            (("", None), ("_long", longest)) if kind == "longrope" else (("", None),)
        ):
            table, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
            arrays[name + part], arrays[name + "_scale"] = table.numpy(), scale
    save("rope.npz", **arrays)


# stories260K


def read_stories(path):
    """Config and float32 weights of a llama2.c v0 file, in Hugging Face names and row order."""
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, _ = struct.unpack("<7i", data[:28])
    check(vocab > 0, "only files with a tied classifier are read")
    kv_dim = dim * kv_heads // heads
    stream = np.frombuffer(data, "<f4", offset=28)
    at = 0

    def take(*shape):
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return stream[at - size : at].reshape(shape)

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    for name, *shape in (
        ("input_layernorm", dim),
        ("self_attn.q_proj", dim, dim),
        ("self_attn.k_proj", kv_dim, dim),
        ("self_attn.v_proj", kv_dim, dim),
        ("self_attn.o_proj", dim, dim),
        ("post_attention_layernorm", dim),
        ("mlp.gate_proj", hidden, dim),
        ("mlp.down_proj", dim, hidden),
        ("mlp.up_proj", hidden, dim),
    ):
        for layer, values in enumerate(take(layers, *shape)):
            weights[f"model.layers.{layer}.{name}.weight"] = values
    weights["model.norm.weight"] = take(dim)

    # The file's rows are in the order of interleaved rope.
    for layer in range(layers):
        for kind, count in (("q", heads), ("k", kv_heads)):
            name = f"model.layers.{layer}.self_attn.{kind}_proj.weight"
            weights[name] = forward.unpermute(weights[name], count)
    config = {
        "head_dim": dim // heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    }
    return config, weights


def tell_story(config, weights, dtype):
    """STORY_POSITIONS ids, their logits [., V] and gaps; every step runs from position 0."""
    ids, logits = [1], []
    for _ in range(STORY_POSITIONS):
        logits.append(forward.logits(config, weights, ids, dtype)[-1])
        ids.append(int(logits[-1].argmax()))
    logits = np.stack(logits)
    return np.array(ids[1:], np.int32), logits, top(logits)[2]


def read_pieces(path):
    """The byte strings of a llama2.c tokenizer file, in id order."""
    data, at, pieces = path.read_bytes(), 4, []
    while at < len(data):
        _, size = struct.unpack_from("<fi", data, at)
        pieces.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return pieces


def decode(pieces, ids):
    """The bytes that llama2.c prints for ids that follow BOS."""
    out = b""
    for previous, token in itertools.pairwise([1, *ids]):
        piece = pieces[token]
        if previous == 1:
            piece = piece.removeprefix(b" ")
        if piece.startswith(b"<0x") and len(piece) == 6:
            piece = bytes([int(piece[3:5], 16)])
        out += piece
    return out


def make_stories(model, tokenizer):
    config, weights = read_stories(model)
    ids, logits, gaps = tell_story(config, weights, np.float64)
    check(1 not in ids, "BOS ends the story early in llama2.c")
    same = np.array_equal(ids, tell_story(config, weights, np.float32)[0])
    check(same, "float32 and float64 tell different stories")
    text = decode(read_pieces(tokenizer), ids) + b"\n"
    check(text.startswith(b"Once upon a time, there was a little girl named Lily."), text)
    first = logits[:STORY_LOGITS].astype(np.float32)
    save("stories260K.npz", ids=ids, logits=first, gap=gaps)
    (HERE / "stories260K.txt").write_bytes(text)
    print(f"  gap at least {gaps.min():.2e}\n{text.decode()}")


def main():
    parser = argparse.ArgumentParser(description="Makes the golden data beside this file.")
    parser.add_argument("--tiny", action="store_true", help="the tiny random models alone")
    parser.add_argument("smollm2", type=Path, nargs="?", help="SmolLM2-135M-Instruct, a GGUF file")
    parser.add_argument("text", type=Path, nargs="?", help="an English text, UTF-8")
    parser.add_argument("stories", type=Path, nargs="?", help="stories260K.bin of llama2.c")
    parser.add_argument("tokenizer", type=Path, nargs="?", help="tok512.bin of llama2.c")
    args = parser.parse_args()
    for family, settings in tiny.FAMILIES.items():
        make_tiny(family, settings, tiny.tensors(settings))
    for family, settings in gpt2.FAMILIES.items():
        make_tiny(family, settings, gpt2.tensors(tiny.uniform))
    make_rope()
    make_defaults()
    if args.tiny:
        return
    check(args.tokenizer, "four files are needed")
    make_stories(args.stories, args.tokenizer)
    make_smollm2(args.smollm2, args.text.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
