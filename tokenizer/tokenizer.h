/* Text to ids and back, from the tokenizer section of model.bin (model/format.md): byte-level BPE
 * on PCRE2, or the sentencepiece library. Any bytes may be encoded, NUL and broken UTF-8 included.
 */
#ifndef TOKENIZER_TOKENIZER_H
#define TOKENIZER_TOKENIZER_H

#include "model/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tokenizer;

/* A growing list of ids; starts as {0}, released with free(ids.id). */
struct ids {
    int32_t *id;
    size_t count, capacity;
};

/* Checks and opens a tokenizer section of `bytes` bytes (copied: the caller may free it). Ids must
 * be below vocab. EXIT_BAD_FILE, EXIT_MEMORY. */
int tokenizer_open(struct tokenizer **tokenizer, const void *section, size_t bytes, int vocab,
                   struct error *error);
void tokenizer_close(struct tokenizer *tokenizer); /* NULL is fine */

enum { MAX_TEXT = 1 << 28 }; /* bytes of a text to encode */

/* Appends the ids of text[0..bytes). Added tokens with the control flag are recognised only where
 * parse_special; bos is the caller's business. Bytes that are not UTF-8 become the ids of single
 * bytes (of the unknown piece, where a sentencepiece model has no byte pieces). A byte for which a
 * byte-level vocabulary has no piece is left out. The space that sentencepiece models put before a
 * text comes once a call, before text[0], and not where that is an added token or not UTF-8. Pieces
 * that a sentencepiece model itself calls user-defined are matched by the library, whatever
 * parse_special says. Linear in bytes up to a logarithm. EXIT_USAGE (longer than MAX_TEXT),
 * EXIT_MEMORY, EXIT_INTERNAL. */
int tokenizer_encode(struct tokenizer *tokenizer, const char *text, size_t bytes,
                     bool parse_special, struct ids *ids, struct error *error);

/* A part of a text: text[..end), from where the one before it ends. */
struct text_part {
    size_t end;
    bool parse_special;
};

/* As tokenizer_encode, for a text of which some parts may name control tokens and others may not:
 * a chat template with what was typed between. The last part ends where the text does. The space of
 * sentencepiece models comes before each stretch between added tokens that does not start with one,
 * as transformers has it. */
int tokenizer_encode_parts(struct tokenizer *tokenizer, const char *text,
                           const struct text_part *part, int parts, struct ids *ids,
                           struct error *error);

/* Appends one id. EXIT_MEMORY. */
int ids_append(struct ids *ids, int32_t id, struct error *error);

/* The bytes that id stands for, without regard to its neighbours; *bytes is 0 for control tokens
 * and for ids without text. Any id is allowed. The pointer lives as long as the tokenizer. A
 * sentencepiece word-start mark is a space. */
const char *tokenizer_piece(const struct tokenizer *tokenizer, int32_t id, size_t *bytes);

/* As tokenizer_piece, but the written form of control tokens too ("<|im_end|>"), for --info. */
const char *tokenizer_name(const struct tokenizer *tokenizer, int32_t id, size_t *bytes);

/* What --info prints: "byte-level BPE (smollm2), 49152 pieces, 17 added, 21 bytes without a
 * piece". */
void tokenizer_describe(const struct tokenizer *tokenizer, char *text, size_t size);

/* The default system message of the chat shape, "" where there is none. */
const char *tokenizer_system(const struct tokenizer *tokenizer, size_t *bytes);

/* Ids to text as they come: holds back incomplete UTF-8 (up to 3 bytes), and drops the one space
 * that sentencepiece puts at the start of a text. Starts as {0} for a new text; after a prompt that
 * is not echoed set `started`, so that a first space is kept. */
struct decoder {
    unsigned char held[4];
    int held_bytes;
    bool started;
};

enum { DECODER_ROOM = 1100 }; /* the longest output of one call: a piece, and what was held */

/* Appends id's text to out[0..DECODER_ROOM) and returns the bytes written: whole characters only.
 * Bytes that can never become valid UTF-8 pass through as they are. */
size_t decoder_next(struct decoder *decoder, const struct tokenizer *tokenizer, int32_t id,
                    char *out);

/* The end of the text: U+FFFD where an incomplete character was held. */
size_t decoder_end(struct decoder *decoder, char *out);

#endif
