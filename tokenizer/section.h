/* The tokenizer section of model.bin (model/format.md), checked and taken apart. */
#ifndef TOKENIZER_SECTION_H
#define TOKENIZER_SECTION_H

#include "model/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum tokenizer_kind { KIND_BPE = 1, KIND_SENTENCEPIECE = 2 };
enum pattern {
    PATTERN_NONE,
    PATTERN_GPT2,
    PATTERN_LLAMA3,
    PATTERN_QWEN2,
    PATTERN_SMOLLM2,
    PATTERN_O200K,
    PATTERN_TEKKEN,
    PATTERNS
};
enum { MAX_PIECE = 1024 }; /* bytes of a piece and of an added token */

struct section_piece {
    const char *text; /* in the section */
    uint32_t bytes;   /* 0: the id has no piece */
    bool unmergeable; /* never the result of a merge */
};

struct section_added {
    const char *text; /* in the section */
    uint32_t bytes;
    int32_t id;
    bool control, strip_left, strip_right;
};

struct section {
    enum tokenizer_kind kind;
    enum pattern pattern;
    bool ignore_merges, nfc;
    struct section_piece *piece; /* [piece_count], indexed by id; NULL for sentencepiece */
    int32_t piece_count;
    struct section_added *added; /* [added_count] */
    int32_t added_count;
    const unsigned char *model; /* sentencepiece only */
    size_t model_bytes;
    const char *system; /* UTF-8, not terminated */
    size_t system_bytes;
};

/* Reads section[0..bytes), which has to outlive *parsed, and checks all that format.md says of it
 * but the sentencepiece model. Ids must be below vocab. Fills *parsed also where it fails, so that
 * section_free can follow in any case. EXIT_BAD_FILE, EXIT_MEMORY. */
int section_read(struct section *parsed, const unsigned char *section, size_t bytes, int vocab,
                 struct error *error);
void section_free(struct section *parsed);

/* "smollm2"; "none" for PATTERN_NONE. */
const char *pattern_name(enum pattern pattern);

#endif
