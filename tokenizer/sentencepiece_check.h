/* Reads a sentencepiece model (a protobuf) before the library does: the library crashes on models
 * that are made to crash it, and does not say what its pieces print. */
#ifndef TOKENIZER_SENTENCEPIECE_CHECK_H
#define TOKENIZER_SENTENCEPIECE_CHECK_H

#include "model/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As in the library's sentencepiece_model.proto. */
enum sp_type {
    SP_NORMAL = 1,
    SP_UNKNOWN = 2,
    SP_CONTROL = 3,
    SP_USER_DEFINED = 4,
    SP_UNUSED = 5,
    SP_BYTE = 6
};

struct sp_piece {
    const char *text; /* in the model */
    uint32_t bytes;   /* 1 to 255 */
    enum sp_type type;
};

struct sp_model {
    struct sp_piece *piece; /* [piece_count], indexed by id */
    int32_t piece_count;
    int32_t unknown;   /* the id of the unknown piece */
    bool dummy_prefix; /* a text starts with a space of the library's making */
    bool byte_fallback;
};

/* Reads model[0..bytes), which has to outlive *parsed. Refuses, by name: wire data that is cut off,
 * contradictory or of unexpected type; model types other than BPE; a charsmap; white space as a
 * suffix; pieces that are not 1 to 255 bytes or hold NUL; unknown piece types; byte pieces other
 * than <0x00> to <0xFF>; more than vocab (or 2^20) pieces; other than one unknown piece; special
 * ids beyond the pieces; more than 64 user-defined pieces that are prefixes of one another. Fills
 * *parsed also where it fails, so that sp_model_free can follow. EXIT_BAD_FILE, EXIT_MEMORY. */
int sentencepiece_check(struct sp_model *parsed, const unsigned char *model, size_t bytes,
                        int vocab, struct error *error);
void sp_model_free(struct sp_model *parsed);

/* The byte that a piece of type SP_BYTE stands for, or -1 where its text is not <0x00> to <0xFF>.
 */
int sp_byte(const struct sp_piece *piece);

#endif
