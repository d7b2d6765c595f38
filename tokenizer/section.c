#include "tokenizer/section.h"

#include "tokenizer/utf8.h"

#include <stdlib.h>
#include <string.h>

enum {
    HEADER_BYTES = 32,
    LENGTH_BYTES = 4,
    ADDED_BYTES = 12,
    FLAG_IGNORE_MERGES = 1,
    FLAG_NFC = 2,
    ADDED_CONTROL = 1,
    ADDED_STRIP_LEFT = 2,
    ADDED_STRIP_RIGHT = 4
};
#define UNMERGEABLE 0x80000000u

static const char *const pattern_names[PATTERNS] = {"none",    "gpt2",  "llama3", "qwen2",
                                                    "smollm2", "o200k", "tekken"};

const char *pattern_name(enum pattern pattern) {
    return pattern_names[pattern];
}

static uint32_t read_u32(const unsigned char *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The part of the section that is not read yet. */
struct rest {
    const unsigned char *at;
    size_t bytes;
};

/* The next `bytes` bytes, or NULL where fewer are left. */
static const unsigned char *take(struct rest *rest, uint64_t bytes) {
    if (bytes > rest->bytes) return NULL;
    const unsigned char *taken = rest->at;
    rest->at += bytes;
    rest->bytes -= (size_t)bytes;
    return taken;
}

static int too_short(const char *part, struct error *error) {
    return fail(error, EXIT_BAD_FILE, "tokenizer: the section ends inside %s", part);
}

/* Kind, pattern and flags, which have to fit one another. */
static int read_choices(struct section *parsed, const unsigned char *header, struct error *error) {
    uint32_t kind = read_u32(header), pattern = read_u32(header + 4), flags = read_u32(header + 8);
    if (kind != KIND_BPE && kind != KIND_SENTENCEPIECE)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: kind %u is unknown; 1 is byte-level BPE, 2 is sentencepiece", kind);
    bool bpe = kind == KIND_BPE;
    if (bpe ? pattern == PATTERN_NONE || pattern >= PATTERNS : pattern != PATTERN_NONE)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: pattern %u is unknown; byte-level BPE has 1 to %d, sentencepiece 0",
                    pattern, PATTERNS - 1);
    if (flags & ~(uint32_t)(bpe ? FLAG_IGNORE_MERGES | FLAG_NFC : 0))
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: flags 0x%x are unknown; byte-level BPE has 1 (ignore_merges) and "
                    "2 (NFC), sentencepiece none",
                    flags);
    parsed->kind = bpe ? KIND_BPE : KIND_SENTENCEPIECE;
    parsed->pattern = (enum pattern)pattern;
    parsed->ignore_merges = flags & FLAG_IGNORE_MERGES;
    parsed->nfc = flags & FLAG_NFC;
    return 0;
}

/* Counts of pieces and added tokens, bytes of the model: against vocab and the kind. */
static int read_counts(struct section *parsed, const unsigned char *header, int vocab,
                       struct error *error) {
    uint32_t pieces = read_u32(header + 12), added = read_u32(header + 16);
    uint64_t model = read_u32(header + 24) | (uint64_t)read_u32(header + 28) << 32;
    if (pieces > (uint32_t)vocab || added > (uint32_t)vocab)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: %u pieces and %u added tokens, but the vocabulary has %d rows",
                    pieces, added, vocab);
    bool bpe = parsed->kind == KIND_BPE;
    if (bpe ? model > 0 : pieces > 0 || model == 0)
        return fail(error, EXIT_BAD_FILE,
                    "tokenizer: %s with %u pieces and a sentencepiece model of %llu bytes",
                    bpe ? "byte-level BPE" : "sentencepiece", pieces, (unsigned long long)model);
    if (model > SIZE_MAX) return too_short("the sentencepiece model", error);
    parsed->piece_count = (int32_t)pieces;
    parsed->added_count = (int32_t)added;
    parsed->model_bytes = (size_t)model;
    parsed->system_bytes = read_u32(header + 20);
    return 0;
}

/* Lengths of the pieces; their text follows further behind. */
static int read_lengths(struct section *parsed, struct rest *rest, struct error *error) {
    const unsigned char *lengths = take(rest, LENGTH_BYTES * (uint64_t)parsed->piece_count);
    if (!lengths) return too_short("the lengths of the pieces", error);
    if (parsed->piece_count == 0) return 0;
    parsed->piece = calloc((size_t)parsed->piece_count, sizeof *parsed->piece);
    if (!parsed->piece)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for %d pieces", parsed->piece_count);
    for (int32_t id = 0; id < parsed->piece_count; id++) {
        uint32_t length = read_u32(lengths + LENGTH_BYTES * (size_t)id);
        struct section_piece *piece = &parsed->piece[id];
        piece->unmergeable = length & UNMERGEABLE;
        piece->bytes = length & ~UNMERGEABLE;
        if (piece->bytes > MAX_PIECE || (piece->bytes == 0 && piece->unmergeable))
            return fail(error, EXIT_BAD_FILE, "tokenizer: length 0x%x of piece %d; at most %d",
                        length, id, MAX_PIECE);
    }
    return 0;
}

/* Ids, flags and lengths of the added tokens. */
static int read_added(struct section *parsed, struct rest *rest, int vocab, struct error *error) {
    const unsigned char *entries = take(rest, ADDED_BYTES * (uint64_t)parsed->added_count);
    if (!entries) return too_short("the list of added tokens", error);
    if (parsed->added_count == 0) return 0;
    parsed->added = calloc((size_t)parsed->added_count, sizeof *parsed->added);
    if (!parsed->added)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for %d added tokens",
                    parsed->added_count);
    for (int32_t i = 0; i < parsed->added_count; i++) {
        const unsigned char *entry = entries + ADDED_BYTES * (size_t)i;
        uint32_t id = read_u32(entry), flags = read_u32(entry + 4), length = read_u32(entry + 8);
        if (id >= (uint32_t)vocab)
            return fail(error, EXIT_BAD_FILE,
                        "tokenizer: added token %d has id %u, but the vocabulary has %d rows", i,
                        id, vocab);
        if (flags & ~(uint32_t)(ADDED_CONTROL | ADDED_STRIP_LEFT | ADDED_STRIP_RIGHT))
            return fail(error, EXIT_BAD_FILE,
                        "tokenizer: added token %u has unknown flags 0x%x; known are 1 (control), "
                        "2 and 4 (swallows white space before, after)",
                        id, flags);
        if (length == 0 || length > MAX_PIECE)
            return fail(error, EXIT_BAD_FILE, "tokenizer: added token %u has length %u; 1 to %d",
                        id, length, MAX_PIECE);
        struct section_added *added = &parsed->added[i];
        added->id = (int32_t)id;
        added->bytes = length;
        added->control = flags & ADDED_CONTROL;
        added->strip_left = flags & ADDED_STRIP_LEFT;
        added->strip_right = flags & ADDED_STRIP_RIGHT;
    }
    return 0;
}

/* Points every piece and added token to its text. */
static int read_texts(struct section *parsed, struct rest *rest, struct error *error) {
    for (int32_t id = 0; id < parsed->piece_count; id++) {
        parsed->piece[id].text = (const char *)take(rest, parsed->piece[id].bytes);
        if (!parsed->piece[id].text) return too_short("the text of the pieces", error);
    }
    for (int32_t i = 0; i < parsed->added_count; i++) {
        parsed->added[i].text = (const char *)take(rest, parsed->added[i].bytes);
        if (!parsed->added[i].text) return too_short("the text of the added tokens", error);
    }
    return 0;
}

static int check_unique(const struct section *parsed, int vocab, struct error *error) {
    if (parsed->added_count == 0) return 0;
    bool *seen = calloc((size_t)vocab, sizeof *seen);
    if (!seen) return fail(error, EXIT_MEMORY, "tokenizer: no memory for %d flags", vocab);
    int code = 0;
    for (int32_t i = 0; i < parsed->added_count && !code; i++) {
        int32_t id = parsed->added[i].id;
        if (seen[id]) code = fail(error, EXIT_BAD_FILE, "tokenizer: id %d is added twice", id);
        seen[id] = true;
    }
    free(seen);
    return code;
}

int section_read(struct section *parsed, const unsigned char *section, size_t bytes, int vocab,
                 struct error *error) {
    memset(parsed, 0, sizeof *parsed);
    struct rest rest = {section, bytes};
    const unsigned char *header = take(&rest, HEADER_BYTES);
    if (!header) return too_short("its header", error);
    int code = read_choices(parsed, header, error);
    if (!code) code = read_counts(parsed, header, vocab, error);
    if (!code) code = read_lengths(parsed, &rest, error);
    if (!code) code = read_added(parsed, &rest, vocab, error);
    if (!code) code = read_texts(parsed, &rest, error);
    if (!code) code = check_unique(parsed, vocab, error);
    if (code) return code;

    parsed->model = take(&rest, parsed->model_bytes);
    if (!parsed->model) return too_short("the sentencepiece model", error);
    parsed->system = (const char *)take(&rest, parsed->system_bytes);
    if (!parsed->system) return too_short("the system message", error);
    if (utf8_valid(parsed->system, parsed->system_bytes) != parsed->system_bytes)
        return fail(error, EXIT_BAD_FILE, "tokenizer: the system message is not valid UTF-8");
    if (rest.bytes > 0)
        return fail(error, EXIT_BAD_FILE, "tokenizer: %zu bytes follow the section's last part",
                    rest.bytes);
    return 0;
}

void section_free(struct section *parsed) {
    free(parsed->piece);
    free(parsed->added);
    parsed->piece = NULL;
    parsed->added = NULL;
}
