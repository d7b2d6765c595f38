#include "tokenizer/tokenizer.h"

#include "tokenizer/added.h"
#include "tokenizer/bpe.h"
#include "tokenizer/section.h"
#include "tokenizer/sentencepiece.h"
#include "tokenizer/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* U+2581, which stands for a space in the pieces of sentencepiece. */
static const char word_start[] = "\xe2\x96\x81";
enum { WORD_START_BYTES = sizeof word_start - 1 };

/* What an id is called and what it prints; zero for ids without either. */
struct entry {
    const char *name, *text;
    uint32_t name_bytes, text_bytes;
};

struct tokenizer {
    unsigned char *copy; /* the section */
    struct section section;
    int vocab;
    struct entry *entry; /* [vocab] */
    char *texts;         /* what sentencepiece's pieces print, back to back */
    struct added added;
    struct bpe *bpe;          /* byte-level BPE, or NULL */
    struct sp_model sp_model; /* sentencepiece, and zero for BPE */
    struct sp *sp;
    int32_t byte_id[256]; /* ids for bytes that are not UTF-8; NO_PIECE: none */
};

int ids_append(struct ids *ids, int32_t id, struct error *error) {
    if (ids->count == ids->capacity) {
        size_t capacity = ids->capacity ? 2 * ids->capacity : 256;
        int32_t *grown =
            capacity > SIZE_MAX / sizeof *grown ? NULL : realloc(ids->id, capacity * sizeof *grown);
        if (!grown) return fail(error, EXIT_MEMORY, "tokenizer: no memory for %zu ids", capacity);
        ids->id = grown;
        ids->capacity = capacity;
    }
    ids->id[ids->count++] = id;
    return 0;
}

static int open_bpe(struct tokenizer *tokenizer, struct error *error) {
    const struct section *section = &tokenizer->section;
    int code = bpe_open(&tokenizer->bpe, section, error);
    if (code) return code;
    for (int byte = 0; byte < 256; byte++)
        tokenizer->byte_id[byte] = bpe_byte(tokenizer->bpe, (unsigned char)byte);
    for (int32_t id = 0; id < section->piece_count; id++) {
        const struct section_piece *piece = &section->piece[id];
        tokenizer->entry[id] = (struct entry){piece->text, piece->text, piece->bytes, piece->bytes};
    }
    return 0;
}

/* Writes what a sentencepiece piece prints to out, at most its own length, and returns the bytes:
 * nothing for control pieces, a byte for byte pieces, a space for each U+2581. */
static uint32_t sp_text(const struct sp_piece *piece, char *out) {
    if (piece->type == SP_CONTROL) return 0;
    if (piece->type == SP_BYTE) {
        out[0] = (char)sp_byte(piece);
        return 1;
    }
    uint32_t written = 0;
    for (uint32_t at = 0; at < piece->bytes;) {
        bool space = piece->bytes - at >= WORD_START_BYTES &&
                     !memcmp(piece->text + at, word_start, WORD_START_BYTES);
        out[written++] = space ? ' ' : piece->text[at];
        at += space ? WORD_START_BYTES : 1;
    }
    return written;
}

/* Names and texts of the pieces, and the ids of bytes: where the model has no byte pieces, bytes
 * are as unknown as the characters that it lacks. */
static int fill_sp_entries(struct tokenizer *tokenizer, struct error *error) {
    static const char unknown[] = " \xe2\x81\x87 "; /* as the library prints it by default */
    const struct sp_model *model = &tokenizer->sp_model;
    char *out = tokenizer->texts = malloc(tokenizer->section.model_bytes);
    if (!out)
        return fail(error, EXIT_MEMORY, "tokenizer: no memory for %d pieces", model->piece_count);
    for (int byte = 0; byte < 256; byte++) tokenizer->byte_id[byte] = model->unknown;
    for (int32_t id = 0; id < model->piece_count; id++) {
        const struct sp_piece *piece = &model->piece[id];
        uint32_t bytes = sp_text(piece, out);
        tokenizer->entry[id] = (struct entry){piece->text, out, piece->bytes, bytes};
        out += bytes;
        if (piece->type == SP_BYTE) tokenizer->byte_id[sp_byte(piece)] = id;
    }
    tokenizer->entry[model->unknown].text = unknown;
    tokenizer->entry[model->unknown].text_bytes = sizeof unknown - 1;
    return 0;
}

static int open_sentencepiece(struct tokenizer *tokenizer, struct error *error) {
    const struct section *section = &tokenizer->section;
    struct sp_model *model = &tokenizer->sp_model;
    int code =
        sentencepiece_check(model, section->model, section->model_bytes, tokenizer->vocab, error);
    if (!code) code = sp_open(&tokenizer->sp, section->model, section->model_bytes, model, error);
    if (!code) code = fill_sp_entries(tokenizer, error);
    return code;
}

static int open_parts(struct tokenizer *tokenizer, size_t bytes, struct error *error) {
    struct section *section = &tokenizer->section;
    int code = section_read(section, tokenizer->copy, bytes, tokenizer->vocab, error);
    if (!code)
        code = section->kind == KIND_BPE ? open_bpe(tokenizer, error)
                                         : open_sentencepiece(tokenizer, error);
    if (!code) code = added_open(&tokenizer->added, section, error);
    if (code) return code;
    for (int32_t i = 0; i < section->added_count; i++) {
        const struct section_added *token = &section->added[i];
        uint32_t printed = token->control ? 0 : token->bytes;
        tokenizer->entry[token->id] =
            (struct entry){token->text, token->text, token->bytes, printed};
    }
    return 0;
}

int tokenizer_open(struct tokenizer **tokenizer, const void *section, size_t bytes, int vocab,
                   struct error *error) {
    *tokenizer = NULL;
    if (vocab < 1) return fail(error, EXIT_INTERNAL, "tokenizer: a vocabulary of %d rows", vocab);
    struct tokenizer *opened = calloc(1, sizeof *opened);
    if (!opened) return fail(error, EXIT_MEMORY, "tokenizer: no memory");
    opened->vocab = vocab;
    opened->copy = malloc(bytes > 0 ? bytes : 1);
    opened->entry = calloc((size_t)vocab, sizeof *opened->entry);
    int code = 0;
    if (!opened->copy || !opened->entry) {
        code = fail(error, EXIT_MEMORY, "tokenizer: no memory for a section of %zu bytes", bytes);
    } else {
        if (bytes > 0) memcpy(opened->copy, section, bytes);
        code = open_parts(opened, bytes, error);
    }
    if (code)
        tokenizer_close(opened);
    else
        *tokenizer = opened;
    return code;
}

void tokenizer_close(struct tokenizer *tokenizer) {
    if (!tokenizer) return;
    bpe_close(tokenizer->bpe);
    sp_close(tokenizer->sp);
    sp_model_free(&tokenizer->sp_model);
    added_close(&tokenizer->added);
    section_free(&tokenizer->section);
    free(tokenizer->texts);
    free(tokenizer->entry);
    free(tokenizer->copy);
    free(tokenizer);
}

/* Text between two added tokens. Bytes that are not UTF-8 are taken out one by one, so that neither
 * PCRE2 nor sentencepiece sees them and no byte is lost. */
static int encode_between(struct tokenizer *tokenizer, const char *text, size_t bytes,
                          bool text_start, struct ids *ids, struct error *error) {
    int code = 0;
    for (size_t at = 0; at < bytes && !code;) {
        size_t valid = utf8_valid(text + at, bytes - at);
        if (valid == 0) {
            int32_t id = tokenizer->byte_id[(unsigned char)text[at++]];
            if (id != NO_PIECE) code = ids_append(ids, id, error);
            continue;
        }
        code = tokenizer->bpe
                   ? bpe_encode(tokenizer->bpe, text + at, valid, ids, error)
                   : sp_encode(tokenizer->sp, text + at, valid, text_start && at == 0, ids, error);
        at += valid;
    }
    return code;
}

/* space_each: before each stretch between added tokens that starts with none, else before text[0]. */
static int encode_parts(struct tokenizer *tokenizer, const char *text, size_t bytes,
                        const struct text_part *part, bool space_each, struct ids *ids,
                        struct error *error) {
    if (bytes > MAX_TEXT)
        return fail(error, EXIT_USAGE, "tokenizer: a text of %zu bytes; at most %d", bytes,
                    MAX_TEXT);
    struct added_match match = {0};
    bool found = true;
    for (size_t done = 0; found; done = match.end) {
        found = added_find(&tokenizer->added, text, bytes, done, &part, &match);
        size_t end = found ? match.start : bytes;
        bool space = space_each ? end > done && text[done] != ' ' : done == 0;
        int code = encode_between(tokenizer, text + done, end - done, space, ids, error);
        if (!code && found) code = ids_append(ids, match.id, error);
        if (code) return code;
    }
    return 0;
}

int tokenizer_encode(struct tokenizer *tokenizer, const char *text, size_t bytes,
                     bool parse_special, struct ids *ids, struct error *error) {
    const struct text_part all = {bytes, parse_special};
    return encode_parts(tokenizer, text, bytes, &all, false, ids, error);
}

int tokenizer_encode_parts(struct tokenizer *tokenizer, const char *text,
                           const struct text_part *part, int parts, struct ids *ids,
                           struct error *error) {
    return encode_parts(tokenizer, text, parts > 0 ? part[parts - 1].end : 0, part, true, ids,
                        error);
}

static const struct entry *entry_of(const struct tokenizer *tokenizer, int32_t id) {
    static const struct entry none = {"", "", 0, 0};
    bool has_entry = id >= 0 && id < tokenizer->vocab && tokenizer->entry[id].name;
    return has_entry ? &tokenizer->entry[id] : &none;
}

const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id, size_t *bytes) {
    const struct entry *entry = entry_of(tokenizer, id);
    *bytes = entry->text_bytes;
    return entry->text;
}

const char *tokenizer_name(const struct tokenizer *tokenizer, int32_t id, size_t *bytes) {
    const struct entry *entry = entry_of(tokenizer, id);
    *bytes = entry->name_bytes;
    return entry->name;
}

void tokenizer_describe(const struct tokenizer *tokenizer, char *text, size_t size) {
    const struct section *section = &tokenizer->section;
    if (!tokenizer->bpe) {
        snprintf(text, size, "sentencepiece, %d pieces, %d added", tokenizer->sp_model.piece_count,
                 section->added_count);
        return;
    }
    int missing = 0;
    for (int byte = 0; byte < 256; byte++) missing += tokenizer->byte_id[byte] == NO_PIECE;
    int used = snprintf(text, size, "byte-level BPE (%s), %d pieces, %d added",
                        pattern_name(section->pattern), section->piece_count, section->added_count);
    if (missing > 0 && used > 0 && (size_t)used < size)
        snprintf(text + used, size - (size_t)used, ", %d bytes without a piece", missing);
}

const char *tokenizer_system(const struct tokenizer *tokenizer, size_t *bytes) {
    *bytes = tokenizer->section.system_bytes;
    return tokenizer->section.system;
}

/* Whether id starts with the space that the model puts before a text. */
static bool has_dummy_prefix(const struct tokenizer *tokenizer, int32_t id) {
    size_t name_bytes = 0;
    const char *name = tokenizer_name(tokenizer, id, &name_bytes);
    return tokenizer->sp_model.dummy_prefix && name_bytes >= WORD_START_BYTES &&
           !memcmp(name, word_start, WORD_START_BYTES);
}

size_t decoder_next(struct decoder *decoder, const struct tokenizer *tokenizer, int32_t id,
                    char *out) {
    size_t bytes = 0;
    const char *text = tokenizer_piece(tokenizer, id, &bytes);
    if (bytes == 0) return 0;
    if (!decoder->started && text[0] == ' ' && has_dummy_prefix(tokenizer, id)) {
        text++;
        bytes--;
    }
    decoder->started = true;

    size_t total = (size_t)decoder->held_bytes + bytes;
    memcpy(out, decoder->held, (size_t)decoder->held_bytes);
    memcpy(out + decoder->held_bytes, text, bytes);
    size_t held = utf8_unfinished(out, total);
    memcpy(decoder->held, out + total - held, held);
    decoder->held_bytes = (int)held;
    return total - held;
}

size_t decoder_end(struct decoder *decoder, char *out) {
    static const char replacement[] = {'\xef', '\xbf', '\xbd'}; /* U+FFFD */
    if (decoder->held_bytes == 0) return 0;
    decoder->held_bytes = 0;
    memcpy(out, replacement, sizeof replacement);
    return sizeof replacement;
}
