/* Fuzzes the tokenizer: a section that is good but for a few bytes, and any text.
 *
 * Input: a byte of choices, a byte whose low half is the number of patches, the patches (u16
 * offset, u8 value), the text. A section without patches opens, and byte-level BPE gives the text
 * back. */
#include "tests/tokenizer_section.h"
#include "tokenizer/tokenizer.h"

#include <stdbool.h>
#include <stdlib.h>

enum { SPECIAL = 1, SENTENCEPIECE = 2, DUMMY_PREFIX = 4, IGNORE_MERGES = 1, NFC = 2 };
enum { PATCH_BYTES = 3 };

/* Choices that are not for sentencepiece: bits 2 and 3 are the flags, the high half the pattern. */
static uint32_t bpe_flags(unsigned choices) {
    return choices >> 2 & (IGNORE_MERGES | NFC);
}

static void make_section(struct section_bytes *section, unsigned choices) {
    if (choices & SENTENCEPIECE) {
        struct section_bytes model;
        tiny_sp_model(&model, (choices & DUMMY_PREFIX) != 0);
        sp_section(section, model.data, model.count);
    } else {
        tiny_bpe(section, 1 + (choices >> 4) % 6, bpe_flags(choices));
    }
}

/* Whether the pieces of ids, back to back, are the text. */
static bool is_text(const struct tokenizer *tokenizer, const struct ids *ids, const char *text,
                    size_t bytes) {
    size_t at = 0;
    for (size_t i = 0; i < ids->count; i++) {
        size_t length = 0;
        const char *piece = tokenizer_piece(tokenizer, ids->id[i], &length);
        if (length > bytes - at || (length > 0 && memcmp(text + at, piece, length) != 0))
            return false;
        at += length;
    }
    return at == bytes;
}

static void decode(const struct tokenizer *tokenizer, const struct ids *ids) {
    struct decoder decoder = {0};
    char out[DECODER_ROOM];
    for (size_t i = 0; i < ids->count; i++)
        if (decoder_next(&decoder, tokenizer, ids->id[i], out) > sizeof out) abort();
    if (decoder_end(&decoder, out) > 3) abort();
}

static void look_up(const struct tokenizer *tokenizer) {
    char text[256];
    size_t bytes = 0;
    tokenizer_describe(tokenizer, text, sizeof text);
    tokenizer_system(tokenizer, &bytes);
    for (int32_t id = -1; id <= TINY_VOCAB; id++) {
        tokenizer_name(tokenizer, id, &bytes);
        if (bytes > 1024) abort();
    }
}

struct input {
    const uint8_t *data;
    size_t size;
};

/* A section with the patches that the input starts with; NULL where it is refused. */
static struct tokenizer *open_patched(unsigned choices, unsigned patches, struct input *input) {
    struct section_bytes section;
    make_section(&section, choices);
    for (unsigned i = 0; i < patches && input->size >= PATCH_BYTES; i++) {
        size_t at = (size_t)input->data[0] << 8 | input->data[1];
        section.data[at % section.count] = input->data[2];
        input->data += PATCH_BYTES;
        input->size -= PATCH_BYTES;
    }
    struct tokenizer *tokenizer = NULL;
    struct error error;
    int code = tokenizer_open(&tokenizer, section.data, section.count, TINY_VOCAB, &error);
    if (code && (code != EXIT_BAD_FILE || tokenizer || patches == 0)) abort();
    if (tokenizer) look_up(tokenizer);
    return tokenizer;
}

static void encode(struct tokenizer *tokenizer, unsigned choices, bool good, const char *text,
                   size_t bytes) {
    struct ids ids = {0};
    struct error error;
    if (tokenizer_encode(tokenizer, text, bytes, choices & SPECIAL, &ids, &error)) abort();
    for (size_t i = 0; i < ids.count; i++)
        if (ids.id[i] < 0 || ids.id[i] >= TINY_VOCAB) abort();
    decode(tokenizer, &ids);
    /* Control tokens print nothing, others swallow white space, NFC composes. */
    bool exact = good && !(choices & (SPECIAL | SENTENCEPIECE)) && !(bpe_flags(choices) & NFC) &&
                 !memchr(text, '>', bytes);
    if (exact && !is_text(tokenizer, &ids, text, bytes)) abort();
    free(ids.id);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct tokenizer *good[256]; /* kept: opening takes most of the time */
    if (size < 2) return 0;
    unsigned choices = data[0], patches = data[1] % 16;
    struct input input = {data + 2, size - 2};
    if (patches == 0) {
        if (!good[choices]) good[choices] = open_patched(choices, 0, &input);
        encode(good[choices], choices, true, (const char *)input.data, input.size);
        return 0;
    }
    struct tokenizer *tokenizer = open_patched(choices, patches, &input);
    if (!tokenizer) return 0;
    encode(tokenizer, choices, false, (const char *)input.data, input.size);
    tokenizer_close(tokenizer);
    return 0;
}
