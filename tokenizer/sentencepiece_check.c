#include "tokenizer/sentencepiece_check.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PIECES = 1 << 20, MAX_SP_PIECE = 255, MAX_NESTED = 64 };
enum { MAX_MODEL = 1 << 30 }; /* bytes; the library counts them in an int */

/* Of the protobuf encoding. */
enum wire { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };
enum model_field { PIECE = 1, TRAINER = 2, NORMALIZER = 3, SELF_TEST = 4, DENORMALIZER = 5 };
enum piece_field { PIECE_TEXT = 1, PIECE_SCORE = 2, PIECE_TYPE = 3 };
enum trainer_field {
    MODEL_TYPE = 3,
    SPACE_AS_SUFFIX = 24,
    BYTE_FALLBACK = 35,
    UNK_ID = 40,
    PAD_ID = 43
};
enum normalizer_field { CHARSMAP = 2, DUMMY_PREFIX = 3 };
enum { TYPE_UNIGRAM = 1, TYPE_BPE = 2 };

/* What is left of a message. */
struct message {
    const unsigned char *at, *end;
};

struct field {
    uint32_t number;
    enum wire wire;
    uint64_t value;        /* VARINT */
    struct message inside; /* BYTES */
};

static int malformed(const char *what, struct error *error) {
    return fail(error, EXIT_BAD_FILE, "tokenizer: sentencepiece model: %s", what);
}

static bool read_varint(struct message *message, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 64 && message->at < message->end; shift += 7) {
        unsigned char c = *message->at++;
        if (shift == 63 && c > 1) return false;
        *value |= (uint64_t)(c & 0x7f) << shift;
        if (c < 0x80) return true;
    }
    return false;
}

static bool skip(struct message *message, uint64_t bytes) {
    if (bytes > (uint64_t)(message->end - message->at)) return false;
    message->at += bytes;
    return true;
}

/* Reads the next field; message->at < message->end. */
static int read_field(struct message *message, struct field *field, struct error *error) {
    uint64_t tag = 0;
    memset(field, 0, sizeof *field);
    if (!read_varint(message, &tag) || tag > UINT32_MAX || tag >> 3 == 0)
        return malformed("a field number is cut off or out of range", error);
    field->number = (uint32_t)(tag >> 3);
    field->wire = (enum wire)(tag & 7);
    switch (field->wire) {
    case VARINT:
        if (!read_varint(message, &field->value)) return malformed("a number is cut off", error);
        return 0;
    case FIXED64:
        if (!skip(message, 8)) return malformed("a number of 8 bytes is cut off", error);
        return 0;
    case FIXED32:
        if (!skip(message, 4)) return malformed("a number of 4 bytes is cut off", error);
        return 0;
    case BYTES:
        if (!read_varint(message, &field->value)) return malformed("a length is cut off", error);
        field->inside.at = message->at;
        if (!skip(message, field->value))
            return malformed("a length reaches beyond the end", error);
        field->inside.end = message->at;
        return 0;
    }
    return malformed("a field has an unknown wire type", error);
}

static int expect(const struct field *field, enum wire wire, const char *name,
                  struct error *error) {
    if (field->wire == wire) return 0;
    return fail(error, EXIT_BAD_FILE, "tokenizer: sentencepiece model: %s has wire type %d, not %d",
                name, (int)field->wire, (int)wire);
}

/* The library keeps the low half of a number, and a later field overrides an earlier one. */
static int32_t number(const struct field *field) {
    return (int32_t)(uint32_t)field->value;
}

static int count_pieces(struct message message, uint32_t *pieces, struct error *error) {
    *pieces = 0;
    while (message.at < message.end) {
        struct field field;
        int code = read_field(&message, &field, error);
        if (!code && field.number == PIECE) code = expect(&field, BYTES, "a piece", error);
        if (code) return code;
        if (field.number == PIECE) ++*pieces;
        if (*pieces > MAX_PIECES)
            return fail(error, EXIT_BAD_FILE, "tokenizer: sentencepiece model: more than %d pieces",
                        MAX_PIECES);
    }
    return 0;
}

static int read_piece(struct sp_piece *piece, int32_t id, struct message message,
                      struct error *error) {
    piece->type = SP_NORMAL;
    while (message.at < message.end) {
        struct field field;
        int code = read_field(&message, &field, error);
        if (!code && field.number == PIECE_TEXT)
            code = expect(&field, BYTES, "a piece's text", error);
        if (!code && field.number == PIECE_SCORE) code = expect(&field, FIXED32, "a score", error);
        if (!code && field.number == PIECE_TYPE)
            code = expect(&field, VARINT, "a piece's type", error);
        if (code) return code;
        if (field.number == PIECE_TEXT) {
            if (field.value == 0 || field.value > MAX_SP_PIECE ||
                memchr(field.inside.at, 0, (size_t)field.value))
                return fail(
                    error, EXIT_BAD_FILE,
                    "tokenizer: sentencepiece model: piece %d has %llu bytes, or holds NUL; "
                    "1 to %d bytes without NUL are allowed",
                    id, (unsigned long long)field.value, MAX_SP_PIECE);
            piece->text = (const char *)field.inside.at;
            piece->bytes = (uint32_t)field.value;
        }
        if (field.number == PIECE_TYPE) {
            if (number(&field) < SP_NORMAL || number(&field) > SP_BYTE)
                return fail(error, EXIT_BAD_FILE,
                            "tokenizer: sentencepiece model: type %d of piece %d; 1 to 6",
                            number(&field), id);
            piece->type = (enum sp_type)number(&field);
        }
    }
    if (piece->bytes == 0)
        return fail(error, EXIT_BAD_FILE, "tokenizer: sentencepiece model: piece %d has no text",
                    id);
    if (piece->type == SP_BYTE && sp_byte(piece) < 0)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: sentencepiece model: byte piece %d is not <0x00> to <0xFF>", id);
    return 0;
}

/* Trainer settings that matter for encoding. *model_type is carried from one occurrence to the
 * next, as the message may be given in parts. */
static int read_trainer(struct sp_model *parsed, struct message message, int32_t *model_type,
                        struct error *error) {
    while (message.at < message.end) {
        struct field field;
        int code = read_field(&message, &field, error);
        if (code) return code;
        bool special = field.number >= UNK_ID && field.number <= PAD_ID;
        if (field.number == MODEL_TYPE || field.number == SPACE_AS_SUFFIX ||
            field.number == BYTE_FALLBACK || special)
            code = expect(&field, VARINT, "a trainer setting", error);
        if (code) return code;
        if (field.number == MODEL_TYPE) *model_type = number(&field);
        if (field.number == BYTE_FALLBACK) parsed->byte_fallback = field.value != 0;
        if (field.number == SPACE_AS_SUFFIX && field.value)
            return malformed("white space as a suffix is not implemented", error);
        bool absent = field.number != UNK_ID && number(&field) == -1;
        if (special && !absent && (number(&field) < 0 || number(&field) >= parsed->piece_count))
            return fail(error, EXIT_BAD_FILE,
                        "tokenizer: sentencepiece model: special id %d, but it has %d pieces",
                        number(&field), parsed->piece_count);
    }
    return 0;
}

static int read_normalizer(struct sp_model *parsed, struct message message, struct error *error) {
    while (message.at < message.end) {
        struct field field;
        int code = read_field(&message, &field, error);
        if (!code && field.number == CHARSMAP) code = expect(&field, BYTES, "the charsmap", error);
        if (!code && field.number == DUMMY_PREFIX)
            code = expect(&field, VARINT, "a normalizer setting", error);
        if (code) return code;
        if (field.number == CHARSMAP && field.value > 0)
            return malformed("it has a table of character replacements (precompiled_charsmap), "
                             "which is not implemented",
                             error);
        if (field.number == DUMMY_PREFIX) parsed->dummy_prefix = field.value != 0;
    }
    return 0;
}

static int read_model(struct sp_model *parsed, struct message message, struct error *error) {
    int32_t id = 0, model_type = TYPE_UNIGRAM;
    struct sp_model ignored = {0};
    while (message.at < message.end) {
        struct field field;
        int code = read_field(&message, &field, error);
        if (!code && field.number <= DENORMALIZER) code = expect(&field, BYTES, "a part", error);
        if (code) return code;
        if (field.number == PIECE) {
            code = read_piece(&parsed->piece[id], id, field.inside, error);
            id++;
        }
        if (field.number == TRAINER) code = read_trainer(parsed, field.inside, &model_type, error);
        if (field.number == NORMALIZER) code = read_normalizer(parsed, field.inside, error);
        if (field.number == DENORMALIZER) code = read_normalizer(&ignored, field.inside, error);
        if (code) return code;
    }
    if (model_type != TYPE_BPE)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: sentencepiece model: type %d; only %d (BPE) is implemented",
                    model_type, TYPE_BPE);
    return 0;
}

static int find_unknown(struct sp_model *parsed, struct error *error) {
    int count = 0;
    for (int32_t id = 0; id < parsed->piece_count; id++)
        if (parsed->piece[id].type == SP_UNKNOWN) {
            parsed->unknown = id;
            count++;
        }
    if (count == 1) return 0;
    return fail(error, EXIT_BAD_FILE,
                "tokenizer: sentencepiece model: %d unknown pieces; there has to be one", count);
}

static int by_bytes(const void *left, const void *right) {
    const struct sp_piece *a = *(const struct sp_piece *const *)left;
    const struct sp_piece *b = *(const struct sp_piece *const *)right;
    int order = memcmp(a->text, b->text, a->bytes < b->bytes ? a->bytes : b->bytes);
    return order ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static bool starts_with(const struct sp_piece *piece, const struct sp_piece *start) {
    return piece->bytes >= start->bytes && !memcmp(piece->text, start->text, start->bytes);
}

/* The library collects the user-defined pieces that match at one place in an array of 64, and reads
 * beyond it where more do. Sorted, the prefixes of a piece are the nearest ones before it. */
static int check_nesting(const struct sp_model *parsed, struct error *error) {
    size_t count = 0;
    const struct sp_piece *open[MAX_NESTED], **sorted;
    sorted = malloc((size_t)parsed->piece_count * sizeof(struct sp_piece *));
    if (!sorted)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for %d pieces", parsed->piece_count);
    for (int32_t id = 0; id < parsed->piece_count; id++)
        if (parsed->piece[id].type == SP_USER_DEFINED) sorted[count++] = &parsed->piece[id];
    qsort(sorted, count, sizeof(struct sp_piece *), by_bytes);
    int depth = 0, code = 0;
    for (size_t i = 0; i < count && !code; i++) {
        while (depth > 0 && !starts_with(sorted[i], open[depth - 1])) depth--;
        if (depth == MAX_NESTED)
            code = fail(error, EXIT_BAD_FILE,
                        "tokenizer: sentencepiece model: more than %d user-defined pieces start "
                        "one another",
                        MAX_NESTED);
        else
            open[depth++] = sorted[i];
    }
    free(sorted);
    return code;
}

int sentencepiece_check(struct sp_model *parsed, const unsigned char *model, size_t bytes,
                        int vocab, struct error *error) {
    memset(parsed, 0, sizeof *parsed);
    parsed->dummy_prefix = true;
    if (bytes > MAX_MODEL)
        return fail(error, EXIT_BAD_FILE, "tokenizer: sentencepiece model: %zu bytes; at most %d",
                    bytes, MAX_MODEL);
    struct message message = {model, model + bytes};
    uint32_t pieces = 0;
    int code = count_pieces(message, &pieces, error);
    if (code) return code;
    if (pieces == 0 || pieces > (uint32_t)vocab)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: sentencepiece model: %u pieces, but the vocabulary has %d rows",
                    pieces, vocab);
    parsed->piece = calloc(pieces, sizeof *parsed->piece);
    if (!parsed->piece)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for %u pieces", pieces);
    parsed->piece_count = (int32_t)pieces;
    code = read_model(parsed, message, error);
    if (!code) code = find_unknown(parsed, error);
    if (!code) code = check_nesting(parsed, error);
    return code;
}

void sp_model_free(struct sp_model *parsed) {
    free(parsed->piece);
    parsed->piece = NULL;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

int sp_byte(const struct sp_piece *piece) {
    const char *text = piece->text;
    if (piece->bytes != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') return -1;
    int high = hex_digit(text[3]), low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}
