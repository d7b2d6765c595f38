/* Tokenizer sections that are small enough to write by hand: for the C test and the fuzzer. */
#ifndef TESTS_TOKENIZER_SECTION_H
#define TESTS_TOKENIZER_SECTION_H

#include "tokenizer/tokenizer.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct section_bytes {
    unsigned char data[16384];
    size_t count;
};

struct tiny_token {
    uint32_t id, flags;
    const char *text;
};

/* Ids 0 to 255 are the bytes in order; these follow from 256 on. */
enum {
    AB = 256,
    BC,
    ABC,
    AA,
    AAAA,
    SPACE_A,
    CAB,
    HELLO,     /* no two pieces make it up: only a whole word can be it */
    XY,        /* never the result of a merge */
    AB_AGAIN,  /* the same bytes as AB */
    NO_TEXT,   /* an id without a piece */
    SMILE_1_2, /* halves of a character of four bytes */
    SMILE_3_4,
    TINY_PIECES
};
static const char *const tiny_pieces[TINY_PIECES - 256] = {
    "ab", "bc", "abc", "aa", "aaaa", " a", "cab", "hello", "xy", "ab", "", "\xf0\x9f", "\x98\x80"};

enum { CONTROL = 1, STRIP_LEFT = 2, STRIP_RIGHT = 4 };
enum { TINY_VOCAB = TINY_PIECES + 16 };
enum { START = TINY_PIECES, STARTING, PLAIN, LEFT, RIGHT, BOTH, PLAIN_AGAIN, FINISH, USER };
static const struct tiny_token tiny_added[] = {
    {START, CONTROL, "<s>"},     {STARTING, CONTROL, "<s>tarting"},
    {PLAIN, 0, "<p>"},           {LEFT, STRIP_LEFT, "<l>"},
    {RIGHT, STRIP_RIGHT, "<r>"}, {BOTH, CONTROL | STRIP_LEFT | STRIP_RIGHT, "<b>"},
    {PLAIN_AGAIN, 0, "<p>"},     {FINISH, CONTROL, "</s>"},
    {USER, CONTROL, "[INST]"},   {USER + 1, CONTROL, "[/INST]"},
};
enum { TINY_ADDED = sizeof tiny_added / sizeof tiny_added[0] };
#define TINY_SYSTEM "You are small."

static inline void put(struct section_bytes *out, const void *data, size_t bytes) {
    if (bytes > sizeof out->data - out->count) bytes = sizeof out->data - out->count;
    memcpy(out->data + out->count, data, bytes);
    out->count += bytes;
}

static inline void put_u32(struct section_bytes *out, uint32_t value) {
    unsigned char bytes[4] = {(unsigned char)value, (unsigned char)(value >> 8),
                              (unsigned char)(value >> 16), (unsigned char)(value >> 24)};
    put(out, bytes, sizeof bytes);
}

static inline void put_header(struct section_bytes *out, uint32_t kind, uint32_t pattern,
                              uint32_t flags, uint32_t pieces, uint32_t model_bytes) {
    out->count = 0;
    put_u32(out, kind);
    put_u32(out, pattern);
    put_u32(out, flags);
    put_u32(out, pieces);
    put_u32(out, TINY_ADDED);
    put_u32(out, sizeof TINY_SYSTEM - 1);
    put_u32(out, model_bytes);
    put_u32(out, 0);
}

static inline void put_added(struct section_bytes *out) {
    for (int i = 0; i < TINY_ADDED; i++) {
        put_u32(out, tiny_added[i].id);
        put_u32(out, tiny_added[i].flags);
        put_u32(out, (uint32_t)strlen(tiny_added[i].text));
    }
}

static inline void put_added_texts(struct section_bytes *out) {
    for (int i = 0; i < TINY_ADDED; i++) put(out, tiny_added[i].text, strlen(tiny_added[i].text));
}

/* Byte-level BPE. Offsets in it: header 0, lengths 32, added tokens TINY_ADDED_AT. */
enum { TINY_ADDED_AT = 32 + 4 * TINY_PIECES, TINY_TEXT_AT = TINY_ADDED_AT + 12 * TINY_ADDED };
static inline void tiny_bpe(struct section_bytes *out, uint32_t pattern, uint32_t flags) {
    put_header(out, 1, pattern, flags, TINY_PIECES, 0);
    for (int byte = 0; byte < 256; byte++) put_u32(out, 1);
    for (int id = 256; id < TINY_PIECES; id++)
        put_u32(out, (uint32_t)strlen(tiny_pieces[id - 256]) | (id == XY ? 0x80000000u : 0));
    put_added(out);
    for (int byte = 0; byte < 256; byte++) put(out, &(unsigned char){(unsigned char)byte}, 1);
    for (int id = 256; id < TINY_PIECES; id++)
        put(out, tiny_pieces[id - 256], strlen(tiny_pieces[id - 256]));
    put_added_texts(out);
    put(out, TINY_SYSTEM, sizeof TINY_SYSTEM - 1);
}

/* One sentencepiece piece: text of less than 120 bytes, a score and a type. */
static inline void put_piece(struct section_bytes *out, const char *text, float score, int type) {
    size_t bytes = strlen(text);
    unsigned char head[4] = {0x0a, (unsigned char)(bytes + 9), 0x0a, (unsigned char)bytes};
    unsigned char tail[7] = {0x15, 0, 0, 0, 0, 0x18, (unsigned char)type};
    memcpy(tail + 1, &score, sizeof score);
    put(out, head, sizeof head);
    put(out, text, bytes);
    put(out, tail, sizeof tail);
}

/* Ids of the tiny sentencepiece model. */
enum {
    SP_UNK,
    SP_S,
    SP_END,
    SP_BYTES,
    SP_SPACE = SP_BYTES + 256,
    SP_A,
    SP_B,
    SP_SPACE_A,
    SP_AB,
    SP_SPACE_AB,
    SP_USER,
    TINY_SP_PIECES
};
#define WORD_START "\xe2\x96\x81"

static inline void tiny_sp_model(struct section_bytes *out, int dummy_prefix) {
    static const char *const pieces[] = {WORD_START,     "a",  "b",
                                         WORD_START "a", "ab", WORD_START "ab"};
    out->count = 0;
    put_piece(out, "<unknown>", 0, 2);
    put_piece(out, "<s>", 0, 3);
    put_piece(out, "</e>", 0, 3);
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[16];
        snprintf(text, sizeof text, "<0x%02X>", byte & 0xffu);
        put_piece(out, text, 0, 6);
    }
    for (int i = 0; i < 6; i++) put_piece(out, pieces[i], (float)-i, 1);
    put_piece(out, "<user>", 0, 4);
    /* trainer_spec: BPE, byte_fallback; normalizer_spec: the prefix, no removal of spaces. */
    put(out, "\x12\x05\x18\x02\x98\x02\x01", 7);
    unsigned char normalizer[] = {0x1a, 4, 0x18, (unsigned char)dummy_prefix, 0x20, 0};
    put(out, normalizer, sizeof normalizer);
}

static inline void sp_section(struct section_bytes *out, const void *model, size_t bytes) {
    put_header(out, 2, 0, 0, 0, (uint32_t)bytes);
    put_added(out);
    put_added_texts(out);
    put(out, model, bytes);
    put(out, TINY_SYSTEM, sizeof TINY_SYSTEM - 1);
}

/* Of a section that is right, with the ids above. */
static inline struct tokenizer *open_section(const struct section_bytes *section) {
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    if (!tokenizer_open(&tokenizer, section->data, section->count, TINY_VOCAB, &error))
        return tokenizer;
    fprintf(stderr, "not opened: %s\n", error.text);
    abort();
}

#endif
