"""The sentencepiece model: as much of its protobuf as a tokenizer needs, read and written.

ModelProto:     1 pieces (repeated), 2 trainer_spec, 3 normalizer_spec
SentencePiece:  1 piece (string), 2 score (float), 3 type (enum, default NORMAL)
TrainerSpec:    3 model_type (enum, default unigram), 4 vocab_size, 35 byte_fallback
NormalizerSpec: 1 name, 2 precompiled_charsmap, 3 add_dummy_prefix (default true),
                4 remove_extra_whitespaces (default true), 5 escape_whitespaces (default true)
"""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from export.errors import ExportError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MODEL_TYPE_BPE = 2
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

MAX_PIECES = 1 << 20
MAX_PIECE_BYTES = 255
SPACE = "\u2581"  # stands for a space in every piece


class Piece(NamedTuple):
    text: bytes
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    pieces: list[Piece]
    model_type: int
    charsmap: bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ExportError("sentencepiece model: not a protobuf (number cut short)")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (field number, value) pairs of one message; fixed-width values come as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
        elif wire in (BYTES, FIXED32, FIXED64):
            if wire == BYTES:
                length, at = _varint(data, at)
            else:
                length = 4 if wire == FIXED32 else 8
            if length > len(data) - at:
                raise ExportError("sentencepiece model: not a protobuf (field cut short)")
            value, at = data[at : at + length], at + length
        else:
            raise ExportError(f"sentencepiece model: not a protobuf (wire type {wire})")
        yield key >> 3, value


def _expect(value: int | bytes, kind: type, name: str):
    if not isinstance(value, kind):
        raise ExportError(f"sentencepiece model: {name} has the wrong wire type")
    return value


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _expect(value, bytes, "piece")
        elif number == 2:
            value = _expect(value, bytes, "score")
            if len(value) != 4:
                raise ExportError("sentencepiece model: score has the wrong wire type")
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = _expect(value, int, "type")
    return Piece(text, score, kind)


def parse(data: bytes) -> SentencePieceModel:
    """Reads a model and refuses what the engine's sentencepiece library would trip over."""
    pieces, model_type, charsmap = [], 1, b""
    for number, value in _fields(data):
        if number not in (1, 2, 3):
            continue
        value = _expect(value, bytes, "a message")
        if number == 1:
            pieces.append(_piece(value))
        for inner, setting in _fields(value) if number != 1 else ():
            if number == 2 and inner == 3:
                model_type = _expect(setting, int, "model_type")
            elif number == 3 and inner == 2:
                charsmap = _expect(setting, bytes, "precompiled_charsmap")
    model = SentencePieceModel(pieces, model_type, charsmap)
    _check(model)
    return model


def _check(model: SentencePieceModel) -> None:
    if model.model_type != MODEL_TYPE_BPE:
        found = MODEL_TYPES.get(model.model_type, model.model_type)
        raise ExportError(f"sentencepiece model: expected type bpe, found {found}")
    if model.charsmap:
        raise ExportError("sentencepiece model: a normaliser with a charsmap is not supported")
    if not 1 <= len(model.pieces) <= MAX_PIECES:
        raise ExportError(
            f"sentencepiece model: expected 1 to {MAX_PIECES} pieces, found {len(model.pieces)}"
        )
    seen: dict[bytes, int] = {}
    for index, piece in enumerate(model.pieces):
        if not 1 <= len(piece.text) <= MAX_PIECE_BYTES or b"\0" in piece.text:
            raise ExportError(
                f"sentencepiece model: piece {index} must have 1 to {MAX_PIECE_BYTES} bytes and "
                f"no NUL, found {len(piece.text)} bytes"
            )
        if not math.isfinite(piece.score):
            raise ExportError(
                f"sentencepiece model: piece {index}: expected a finite score, found {piece.score}"
            )
        if not NORMAL <= piece.kind <= BYTE:
            raise ExportError(f"sentencepiece model: piece {index} has unknown type {piece.kind}")
        if piece.text in seen:
            twins = f"{seen[piece.text]} and {index}"
            raise ExportError(f"sentencepiece model: pieces {twins} are both {piece.text!r}")
        seen[piece.text] = index
    unknown = sum(piece.kind == UNKNOWN for piece in model.pieces)
    if unknown != 1:
        raise ExportError(f"sentencepiece model: expected one unk piece, found {unknown}")


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: bytes | float) -> bytes:
    if isinstance(value, bytes):
        return _write_varint(number << 3 | BYTES) + _write_varint(len(value)) + value
    if isinstance(value, float):
        return _write_varint(number << 3 | FIXED32) + struct.pack("<f", value)
    return _write_varint(number << 3 | VARINT) + _write_varint(value)


def _piece_message(piece: Piece) -> bytes:
    message = _field(1, piece.text) + _field(2, float(piece.score))
    return message if piece.kind == NORMAL else message + _field(3, piece.kind)


def with_controls(data: bytes, ids: set[int]) -> bytes:
    """The model with these pieces as control pieces, all else as it was."""
    out, index = bytearray(), 0
    for number, value in _fields(data):
        if number == 1:
            if index in ids:
                value = _piece_message(_piece(value)._replace(kind=CONTROL))
            index += 1
        out += _field(number, value)
    return bytes(out)


def build(pieces: list[Piece], add_dummy_prefix: bool = True) -> bytes:
    """A BPE model without normalisation, as Llama's own: spaces kept and escaped."""
    out = bytearray()
    for piece in pieces:
        out += _field(1, _piece_message(piece))
    has_bytes = any(piece.kind == BYTE for piece in pieces)
    out += _field(
        2, _field(3, MODEL_TYPE_BPE) + _field(4, len(pieces)) + _field(35, int(has_bytes))
    )
    out += _field(
        3, _field(1, b"identity") + _field(3, int(add_dummy_prefix)) + _field(4, 0) + _field(5, 1)
    )
    return bytes(out)
