/* A small, valid model.bin in memory (model/format.md), written independently of the reader: for
 * tests that then break it. */
#ifndef TESTS_TINY_MODEL_H
#define TESTS_TINY_MODEL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { TINY_C = 16, TINY_L = 2, TINY_H = 2, TINY_G = 1, TINY_D = 8, TINY_F = 24, TINY_V = 257 };

struct tiny {
    unsigned char *data;
    size_t bytes, head_bytes, table_at;
    int tensors;
};

static inline void put_u32(unsigned char *p, uint32_t value) {
    for (int i = 0; i < 4; i++) p[i] = (unsigned char)(value >> 8 * i);
}

static inline void put_u64(unsigned char *p, uint64_t value) {
    for (int i = 0; i < 8; i++) p[i] = (unsigned char)(value >> 8 * i);
}

static inline void put_f32(unsigned char *p, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_u32(p, bits);
}

/* The head's checksum made right again after a change. */
static inline void tiny_seal(struct tiny *t) {
    memset(t->data + 48, 0, 8);
    put_u64(t->data + 48, XXH64(t->data, t->head_bytes, 0));
}

static inline void tiny_config(unsigned char *c) {
    const uint32_t fields[][2] = {{64, TINY_C},      {68, TINY_L},      {72, TINY_H}, {76, TINY_G},
                                  {80, TINY_D},      {84, TINY_F},      {88, TINY_V}, {92, TINY_V},
                                  {96, 64},          {100, 0},          {132, 1},     {144, TINY_D},
                                  {148, 1},          {172, 1},          {188, 256},   {192, 1},
                                  {196, UINT32_MAX}, {200, UINT32_MAX}, {204, 1},     {208, 256}};
    memcpy(c, "tiny", 4);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        put_u32(c + fields[i][0], fields[i][1]);
    for (size_t i = 1; i < 16; i++) put_u32(c + 208 + 4 * i, UINT32_MAX);
    put_f32(c + 112, 1e-5F);
    put_f32(c + 152, 1.0F);
    put_f32(c + 156, 0.35355339F);
    put_f32(c + 168, 1.0F);
}

/* 256 single bytes as pieces, and one control token, 256. */
static inline size_t tiny_tokenizer(unsigned char *t) {
    put_u32(t, 1);
    put_u32(t + 4, 1);
    put_u32(t + 12, 256);
    put_u32(t + 16, 1);
    for (size_t i = 0; i < 256; i++) put_u32(t + 32 + 4 * i, 1 | 1U << 31);
    unsigned char *added = t + 32 + 4 * 256, *text = added + 12;
    put_u32(added, 256);
    put_u32(added + 4, 1);
    put_u32(added + 8, 5);
    for (int i = 0; i < 256; i++) text[i] = (unsigned char)i;
    memcpy(text + 256, "<eos>", 5);
    return 32 + 4 * 256 + 12 + 256 + 5;
}

/* Adds an entry, and random values from -0.25 to 0.25 (norms: from 0.75 to 1.25). */
static inline void tiny_tensor(struct tiny *t, const char *name, uint64_t rows, uint64_t columns,
                               uint64_t *end, uint32_t *state) {
    unsigned char *entry = t->data + t->table_at + 128 * (size_t)t->tensors++;
    uint64_t elements = (rows ? rows : 1) * columns, offset = (*end + 255) / 256 * 256;
    memcpy(entry, name, strlen(name));
    put_u32(entry + 68, rows ? 2 : 1);
    put_u64(entry + 72, rows ? rows : columns);
    put_u64(entry + 80, rows ? columns : 0);
    put_u64(entry + 104, offset);
    put_u64(entry + 112, elements * 4);
    for (uint64_t i = 0; i < elements; i++) {
        *state = *state * 1664525U + 1013904223U;
        float value = (float)(*state >> 8) * 0x1p-25F - 0.25F;
        put_f32(t->data + offset + 4 * i, rows ? value : 1 + value);
    }
    put_u64(entry + 120, XXH64(t->data + offset, elements * 4, 0));
    *end = offset + elements * 4;
}

/* The caller frees data. */
static inline struct tiny tiny_make(void) {
    struct tiny t = {.data = calloc(1, 1 << 18)};
    unsigned char *d = t.data;
    const struct {
        const char *name;
        uint64_t rows, columns;
    } parts[] = {{"norm_attention", 0, TINY_C},    {"qkv", (TINY_H + 2 * TINY_G) * TINY_D, TINY_C},
                 {"out", TINY_C, TINY_H * TINY_D}, {"norm_ffn", 0, TINY_C},
                 {"gate_up", 2 * TINY_F, TINY_C},  {"down", TINY_C, TINY_F}};
    const size_t count = sizeof parts / sizeof *parts;
    if (!d) abort();
    memcpy(d, "ROOFLINE", 8);
    put_u32(d + 8, 1);
    put_u32(d + 12, 0x01020304);
    tiny_config(d + 64);
    size_t tokenizer = tiny_tokenizer(d + 512 + 16 * TINY_L);
    t.table_at = 512 + 16 * TINY_L + (tokenizer + 7) / 8 * 8;
    t.head_bytes = (t.table_at + 128 * (3 + TINY_L * count) + 255) / 256 * 256;
    uint64_t end = t.head_bytes;
    uint32_t state = 1;
    tiny_tensor(&t, "rope", 1, TINY_D / 2, &end, &state);
    tiny_tensor(&t, "embed", TINY_V, TINY_C, &end, &state);
    for (int l = 0; l < TINY_L; l++)
        for (size_t i = 0; i < count; i++) {
            char name[64] = "layers.0.";
            name[7] = (char)('0' + l);
            strcat(name, parts[i].name);
            tiny_tensor(&t, name, parts[i].rows, parts[i].columns, &end, &state);
        }
    tiny_tensor(&t, "norm_final", 0, TINY_C, &end, &state);
    t.bytes = (end + 255) / 256 * 256;
    put_u64(d + 16, t.bytes);
    put_u64(d + 24, t.head_bytes);
    put_u64(d + 32, tokenizer);
    put_u64(d + 40, (uint64_t)t.tensors);
    tiny_seal(&t);
    return t;
}

#endif
