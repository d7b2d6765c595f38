"""The tokenizer section of model.bin (model/format.md), from each kind of source.

section_from_hf(folder)                         a Hugging Face folder; None without a tokenizer
section_from_gguf(reader)                       an open gguf.GGUFReader
section_from_llama2c(path, count)               llama2.c's tokenizer.bin
section_from_sentencepiece(model_bytes, added)  a tokenizer.model
section_from_bpe(pieces, added, ...)            byte-level BPE, already as bytes by id

The tokenizer_from_* functions give the same as a Tokenizer, for what else the exporter needs."""

import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from export import bpe, chat
from export import sentencepiece_model as spm
from export.errors import ExportError, malformed
from export.files import read_json_if_there

KIND_BPE, KIND_SENTENCEPIECE = 1, 2
IGNORE_MERGES, NFC = 1, 2
CONTROL, LSTRIP, RSTRIP = 1, 2, 4
UNMERGEABLE = 1 << 31
MAX_PIECE_BYTES = 1024
MAX_IDS = 1 << 20


class AddedToken(NamedTuple):
    """A token matched as a literal string. control: only on request, and it prints nothing."""

    id: int
    text: bytes
    control: bool = False
    lstrip: bool = False
    rstrip: bool = False

    @property
    def flags(self) -> int:
        return self.control * CONTROL | self.lstrip * LSTRIP | self.rstrip * RSTRIP


def _check_length(index: int, piece: bytes, most: int) -> None:
    if len(piece) > most:
        raise ExportError(
            f"tokenizer: piece {index} has {len(piece)} bytes, at most {most} supported"
        )


@dataclass
class Tokenizer:
    """Either byte-level BPE (pieces) or sentencepiece (model, its protobuf)."""

    pieces: Sequence[bytes] = ()
    unmergeable: Collection[int] = ()
    pattern: str = ""
    ignore_merges: bool = False
    nfc: bool = False
    model: bytes = b""
    added: Sequence[AddedToken] = ()
    system: str = ""
    add_bos: bool = False
    unk: int | None = None
    sentencepieces: list[spm.Piece] = field(init=False)

    def __post_init__(self):
        """A sentencepiece model never finds its own control pieces in a text, so the engine has to:
        they are listed as added tokens too."""
        self.sentencepieces = spm.parse(self.model).pieces if self.model else []
        listed, added = {token.id for token in self.added}, list(self.added)
        for index, piece in enumerate(self.sentencepieces):
            if piece.kind == spm.UNKNOWN:
                self.unk = index
            if piece.kind == spm.CONTROL and index not in listed:
                added.append(AddedToken(index, piece.text, control=True))
        self.added = added
        self._check()

    def _check(self) -> None:
        if len(self.pieces) > MAX_IDS:
            raise ExportError(f"tokenizer: {len(self.pieces)} pieces, at most {MAX_IDS} supported")
        for index, piece in enumerate(self.pieces):
            _check_length(index, piece, MAX_PIECE_BYTES)
        for token in self.added:
            if not 1 <= len(token.text) <= MAX_PIECE_BYTES or not 0 <= token.id < MAX_IDS:
                raise ExportError(
                    f"tokenizer: added token {token.id} has {len(token.text)} bytes; supported: "
                    f"1 to {MAX_PIECE_BYTES} bytes, ids below {MAX_IDS}"
                )
        if len({token.id for token in self.added}) != len(self.added):
            raise ExportError("tokenizer: an added token is listed twice")

    @property
    def id_count(self) -> int:
        """One more than the highest id that stands for something."""
        used = [index for index, piece in enumerate(self.pieces) if piece]
        used += [token.id for token in self.added]
        return max(max(used, default=-1) + 1, len(self.sentencepieces))

    def id_of_control(self, text: str) -> int | None:
        """The id of a control token by its text."""
        wanted = text.encode()
        for token in self.added:
            if token.control and token.text == wanted:
                return token.id
        return None

    def describe(self) -> str:
        if self.model:
            kind, count = "sentencepiece", len(self.sentencepieces)
        else:
            kind, count = f"byte-level BPE ({self.pattern})", sum(map(bool, self.pieces))
        return f"{kind}, {count} pieces, {len(self.added)} added"

    def section(self) -> bytes:
        system = self.system.encode()
        header = struct.pack(
            "<6IQ",
            KIND_SENTENCEPIECE if self.model else KIND_BPE,
            bpe.PATTERNS[self.pattern] if self.pattern else 0,
            self.ignore_merges * IGNORE_MERGES | self.nfc * NFC,
            len(self.pieces),
            len(self.added),
            len(system),
            len(self.model),
        )
        lengths = [
            len(piece) | (UNMERGEABLE if index in self.unmergeable else 0)
            for index, piece in enumerate(self.pieces)
        ]
        added = [(token.id, token.flags, len(token.text)) for token in self.added]
        return b"".join(
            (
                header,
                struct.pack(f"<{len(lengths)}I", *lengths),
                *(struct.pack("<3I", *entry) for entry in added),
                *self.pieces,
                *(token.text for token in self.added),
                self.model,
                system,
            )
        )


def section_from_bpe(
    pieces: Sequence[bytes],
    added: Sequence[AddedToken],
    pattern: str,
    ignore_merges: bool = False,
    nfc: bool = False,
    system: str = "",
    unmergeable: Collection[int] = (),
) -> bytes:
    """pieces: the bytes of each id, b"" where it has none; unmergeable: ids of pieces that are
    never the result of a merge; pattern: a name in bpe.PATTERNS."""
    return Tokenizer(
        pieces, set(unmergeable), pattern, ignore_merges, nfc, added=added, system=system
    ).section()


def section_from_sentencepiece(
    model_bytes: bytes, added: Sequence[AddedToken] = (), system: str = ""
) -> bytes:
    """added: tokens that the model itself does not have."""
    return Tokenizer(model=model_bytes, added=added, system=system).section()


def section_from_hf(folder: Path | str) -> bytes | None:
    tokenizer = tokenizer_from_hf(Path(folder))
    return tokenizer.section() if tokenizer else None


def section_from_gguf(reader) -> bytes | None:
    tokenizer = tokenizer_from_gguf(reader)
    return tokenizer.section() if tokenizer else None


def section_from_llama2c(path: Path | str, count: int) -> bytes:
    return tokenizer_from_llama2c(Path(path), count).section()


def _byte_level(
    vocab: dict[str, int], merges: list, added: list[AddedToken], pattern: str, **settings
) -> Tokenizer:
    ids = {token.id for token in added}
    pieces, unmergeable = bpe.pieces_by_id(vocab, bpe.split_merges(merges), ids)
    # What plain text reaches cannot be a control token, whatever the file says.
    added = [
        token._replace(control=False) if token.id < len(pieces) and pieces[token.id] else token
        for token in added
    ]
    return Tokenizer(pieces, unmergeable, pattern, added=added, **settings)


def _added_from_hf(folder: Path, tokenizer_json: dict, config: dict) -> list[AddedToken]:
    """Added tokens by id: from tokenizer.json, else from the older files beside it."""
    found: dict[int, AddedToken] = {}

    def add(token: int | str, content: str, flags: dict) -> None:
        special, lstrip, rstrip = (bool(flags.get(key)) for key in ("special", "lstrip", "rstrip"))
        found.setdefault(
            int(token), AddedToken(int(token), content.encode(), special, lstrip, rstrip)
        )

    for item in tokenizer_json.get("added_tokens") or ():
        add(item["id"], item["content"], item)
    for token, item in (config.get("added_tokens_decoder") or {}).items():
        add(token, item["content"], item)
    special = str(config.get("additional_special_tokens"))
    for content, token in read_json_if_there(folder / "added_tokens.json").items():
        add(token, content, {"special": content in special})
    return [found[token] for token in sorted(found)]


def _hf_adds_bos(tokenizer_json: dict, config: dict, default: bool) -> bool:
    """tokenizer_config.json decides, then a post-processor that begins with a special token."""
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    post = tokenizer_json.get("post_processor") or {}
    for step in post.get("processors", [post]):
        if step.get("type") == "TemplateProcessing":
            return "SpecialToken" in (step.get("single") or [{}])[0]
    return default


def _byte_level_from_hf(content: dict, added: list[AddedToken], add_bos: bool, system: str):
    model, normalizer = content["model"], content.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        raise ExportError(f"tokenizer.json: normalizer {str(normalizer)[:100]} is not supported")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ExportError(f"tokenizer.json: {key} {model[key]!r} is not supported")
    return _byte_level(
        model["vocab"],
        model["merges"],
        added,
        bpe.pattern_from_json(content.get("pre_tokenizer")),
        ignore_merges=bool(model.get("ignore_merges")),
        nfc=normalizer == {"type": "NFC"},
        system=system,
        add_bos=add_bos,
        unk=model["vocab"].get(model.get("unk_token")),
    )


def _adds_dummy_prefix(content: dict) -> bool:
    """Whether a tokenizer.json made from a sentencepiece model puts a space before the text."""
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": spm.SPACE}
    prepend = {"type": "Prepend", "prepend": spm.SPACE}
    normalizer, pre_tokenizer = content.get("normalizer"), content.get("pre_tokenizer")
    if normalizer == {"type": "Sequence", "normalizers": [prepend, to_mark]}:
        return True
    if normalizer == to_mark:
        return False
    if normalizer is None and pre_tokenizer and pre_tokenizer.get("type") == "Metaspace":
        scheme = pre_tokenizer.get("prepend_scheme", "always")
        if pre_tokenizer.get("replacement") == spm.SPACE and not pre_tokenizer.get("split", True):
            return scheme != "never" and bool(pre_tokenizer.get("add_prefix_space", True))
    raise ExportError(
        "tokenizer.json: its normalizer and pre_tokenizer are not those of a sentencepiece model; "
        "put the original tokenizer.model beside it"
    )


def _ranks_by_piece(results: list[int], merges: list[tuple[str, str]]) -> dict[int, int]:
    """The rank of each piece: of the first of its merges. Where the merges of several pieces are
    mixed, these had one score, and converters put those with the longer sides first."""
    last = {result: index for index, result in enumerate(results)}
    ranks, start, end = {}, 0, -1
    for index, result in enumerate(results):
        if index > end:
            start = index
        end = max(end, last[result])
        ranks[result] = start
    sharing = Counter(ranks.values())
    for index in range(1, len(results)):
        before, rank = ranks[results[index - 1]], ranks[results[index]]
        sides, sides_before = (tuple(map(len, merges[i])) for i in (index, index - 1))
        if rank == before and sharing[rank] > 1 and sides > sides_before:
            raise ExportError(
                f"tokenizer.json: the merges to id {results[index]} are spread over the ranking, "
                "which no sentencepiece model gives; put the original tokenizer.model beside it"
            )
    return ranks


def sentencepiece_from_json(content: dict, added: list[AddedToken]) -> bytes:
    """Rebuilds the model behind a tokenizer.json with byte_fallback. It is exact when each piece's
    merges stand together in the ranking, and all ways to split a piece are listed: then rank by
    piece is what the scores said. Merges of added tokens never happen: those match first."""
    vocab = content["model"]["vocab"]
    merges = bpe.split_merges(content["model"]["merges"])
    by_id = {token.id: token for token in added}
    for text, token in vocab.items():
        _check_length(token, text.encode(), spm.MAX_PIECE_BYTES)
    results = bpe.merge_results(vocab, merges)
    kept = [index for index, result in enumerate(results) if result not in by_id]
    ranks = _ranks_by_piece([results[i] for i in kept], [merges[i] for i in kept])
    pieces, splits = [], 0
    for text, token in sorted(vocab.items(), key=lambda item: item[1]):
        if token != len(pieces):
            raise ExportError(f"tokenizer.json: id {len(pieces)} has no piece")
        if token in ranks:
            splits += sum(text[:k] in vocab and text[k:] in vocab for k in range(1, len(text)))
        kind = _kind_of_json_piece(text, token, by_id, content["model"].get("unk_token"))
        if kind == spm.NORMAL and len(text) > 1 and token not in ranks:
            raise ExportError(f"tokenizer.json: no merge gives piece {token}, {text!r}")
        pieces.append(spm.Piece(text.encode(), -float(ranks.get(token, len(kept))), kind))
    if splits != len(kept):
        raise ExportError(
            f"tokenizer.json: expected {splits} merges, one for each split of a piece, found "
            f"{len(kept)}; put the original tokenizer.model beside it"
        )
    return spm.build(pieces, _adds_dummy_prefix(content))


def _kind_of_json_piece(text: str, token: int, added: dict[int, AddedToken], unk: str) -> int:
    if text == unk:
        return spm.UNKNOWN
    if token in added:
        return spm.CONTROL if added[token].control else spm.USER_DEFINED
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return spm.BYTE if is_byte else spm.NORMAL


def _added_to_model(model: bytes, added: list[AddedToken]) -> tuple[bytes, list[AddedToken]]:
    """The added tokens that a sentencepiece model does not match by itself. Those that are special
    it must not: the library would find user-defined pieces, such as Gemma's <end_of_turn>, in what
    a user types, and so they become control pieces."""
    pieces, kept = spm.parse(model).pieces, []
    special = {token.id for token in added if token.control}
    found = {index for index in special if index < len(pieces)}
    found = {index for index in found if pieces[index].kind == spm.USER_DEFINED}
    for token in added:
        if token.id >= len(pieces):
            kept.append(token)
        elif pieces[token.id].text != token.text:
            raise ExportError(
                f"tokenizer: added token {token.id} is {token.text!r}, but the sentencepiece model "
                f"has {pieces[token.id].text!r} there"
            )
        elif pieces[token.id].kind in (spm.CONTROL, spm.UNKNOWN) or token.id in found:
            kept.append(token._replace(control=True))
    return spm.with_controls(model, found) if found else model, kept


def _require(content: dict) -> None:
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        found = model.get("type") if isinstance(model, dict) else model
        raise ExportError(f"tokenizer.json: expected a model of type BPE, found {found!r}")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list) or not vocab:
        raise ExportError("tokenizer.json: its model has no vocab or no merges")
    if not all(isinstance(i, int) and 0 <= i < MAX_IDS for i in vocab.values()):
        raise ExportError(f"tokenizer.json: an id is not in 0 to {MAX_IDS - 1}")


def tokenizer_from_hf(folder: Path) -> Tokenizer | None:
    """A byte-level tokenizer.json, else tokenizer.model, else a tokenizer.json made from one."""
    content = read_json_if_there(folder / "tokenizer.json")
    config = read_json_if_there(folder / "tokenizer_config.json")
    original = folder / "tokenizer.model"
    if not (folder / "tokenizer.json").is_file() and not original.is_file():
        return None
    with malformed(f"{folder}: the tokenizer's JSON"):
        added = _added_from_hf(folder, content, config)
        system = chat.default_system(chat.template_from_hf(folder))
        from_json = content and not content["model"].get("byte_fallback")
        if from_json or not original.is_file():
            _require(content)
        if from_json:
            add_bos = _hf_adds_bos(content, config, default=False)
            return _byte_level_from_hf(content, added, add_bos, system)
        add_bos = _hf_adds_bos(content, config, default=True)
        if original.is_file():
            model = original.read_bytes()
        else:
            model = sentencepiece_from_json(content, added)
        model, added = _added_to_model(model, added)
        return Tokenizer(model=model, added=added, system=system, add_bos=add_bos)


def _gguf_value(reader, key: str, default=None):
    item = reader.get_field(f"tokenizer.{key}")
    return default if item is None else item.contents()


def _gguf_flag(reader, key: str, default: bool | None = None) -> bool | None:
    value = _gguf_value(reader, key, default)
    if value is not None and not isinstance(value, bool):
        raise ExportError(f"tokenizer.{key}: expected true or false, found {str(value)[:100]}")
    return value


def _gguf_unknown(reader, count: int) -> int | None:
    value = _gguf_value(reader, "ggml.unknown_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < count):
        raise ExportError(
            f"tokenizer.ggml.unknown_token_id: expected an id below {count}, "
            f"found {str(value)[:100]}"
        )
    return value


def tokenizer_from_gguf(reader) -> Tokenizer | None:
    kind = _gguf_value(reader, "ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens = _gguf_value(reader, "ggml.tokens", [])
    kinds = _gguf_value(reader, "ggml.token_type", [spm.NORMAL] * len(tokens))
    if not tokens:
        raise ExportError("tokenizer.ggml.tokens: expected the tokens' texts, found none")
    if len(kinds) != len(tokens):
        raise ExportError(
            f"tokenizer.ggml.token_type: expected {len(tokens)} entries, found {len(kinds)}"
        )
    template = _gguf_value(reader, "chat_template", "")
    system = chat.default_system(template)
    add_bos = _gguf_flag(reader, "ggml.add_bos_token")
    unknown = _gguf_unknown(reader, len(tokens))  # a sentencepiece model has its own
    if kind == "gpt2":
        return _byte_level_from_gguf(reader, tokens, kinds, add_bos, system, unknown)
    if kind == "llama":
        scores = _gguf_value(reader, "ggml.scores", [])
        if len(scores) != len(tokens):
            raise ExportError(
                f"tokenizer.ggml.scores: expected {len(tokens)} entries, found {len(scores)}"
            )
        pieces = [
            spm.Piece(text.encode(), score, _kind_of_gguf_piece(text, piece_kind))
            for text, score, piece_kind in zip(tokens, scores, kinds, strict=True)
        ]
        model = spm.build(pieces, _gguf_flag(reader, "ggml.add_space_prefix", True))
        return Tokenizer(model=model, system=system, add_bos=add_bos is not False)
    raise ExportError(f"tokenizer.ggml.model: expected gpt2 or llama, found {kind!r}")


def _kind_of_gguf_piece(text: str, kind: int) -> int:
    """Converters have called tokens such as <|im_start|> user-defined, which are found in what a
    user types, and after a space at its start. They were special in what was converted."""
    mark = text.startswith("<|") and text.endswith("|>")
    return spm.CONTROL if mark and kind == spm.USER_DEFINED else kind


def _byte_level_from_gguf(
    reader, tokens: list, kinds: list, add_bos: bool | None, system: str, unknown: int | None
) -> Tokenizer:
    pattern, ignore_merges, adds_by_default = bpe.pattern_from_gguf(
        _gguf_value(reader, "ggml.pre", "default")
    )
    vocab: dict[str, int] = {}
    added = []
    for index, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (spm.CONTROL, spm.UNKNOWN, spm.USER_DEFINED):
            added.append(AddedToken(index, text.encode(), kind != spm.USER_DEFINED))
        elif kind != spm.UNUSED:
            vocab.setdefault(text, index)
    return _byte_level(
        vocab,
        _gguf_value(reader, "ggml.merges", []),
        added,
        pattern,
        ignore_merges=ignore_merges,
        nfc=pattern == "qwen2",
        system=system,
        add_bos=adds_by_default if add_bos is None else add_bos,
        unk=unknown,
    )


def tokenizer_from_llama2c(path: Path, count: int) -> Tokenizer:
    """llama2.c's tokenizer.bin: u32 longest, then for each piece f32 score, u32 length, bytes. The
    file does not say how many pieces it has; spaces stand for the model's own U+2581, and ids 0,
    1, 2 are unk, bos and eos."""
    data = path.read_bytes()
    at, pieces = 4, []
    while at < len(data) and len(pieces) < count:
        if at + 8 > len(data):
            raise ExportError(f"{path}: cut short in the header of piece {len(pieces)}")
        score, length = struct.unpack_from("<fI", data, at)
        text = data[at + 8 : at + 8 + length]
        if len(text) != length:
            raise ExportError(f"{path}: cut short in piece {len(pieces)}")
        at += 8 + length
        pieces.append(_llama2c_piece(len(pieces), text, score))
    if len(pieces) != count or at != len(data):
        more = "more" if at != len(data) else len(pieces)
        raise ExportError(f"{path}: expected {count} pieces, as the model has, found {more}")
    return Tokenizer(model=spm.build(pieces), add_bos=True)


def _llama2c_piece(index: int, text: bytes, score: float) -> spm.Piece:
    if index < 3:
        kind = spm.UNKNOWN if index == 0 else spm.CONTROL
        return spm.Piece((b"<unk>", b"<s>", b"</s>")[index], score, kind)
    is_byte = len(text) == 6 and text.startswith(b"<0x") and text.endswith(b">")
    kind = spm.BYTE if is_byte else spm.NORMAL
    return spm.Piece(text.replace(b" ", spm.SPACE.encode()), score, kind)
