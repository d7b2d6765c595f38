/* Byte-level BPE: every text is bytes, and merging starts from the single-byte pieces. Bytes that
 * have none (SmolLM2 lacks 21, control characters mostly) are left out of a text, as its makers do.
 */
#ifndef TOKENIZER_BPE_H
#define TOKENIZER_BPE_H

#include "tokenizer/section.h"
#include "tokenizer/tokenizer.h"

enum { NO_PIECE = -1 };

struct bpe;

/* section has to outlive *bpe. EXIT_BAD_FILE, EXIT_MEMORY, EXIT_INTERNAL. */
int bpe_open(struct bpe **bpe, const struct section *section, struct error *error);
void bpe_close(struct bpe *bpe); /* NULL is fine */

/* Appends the ids of text[0..bytes), which has to be valid UTF-8 of at most MAX_TEXT bytes.
 * EXIT_MEMORY, EXIT_INTERNAL. */
int bpe_encode(struct bpe *bpe, const char *text, size_t bytes, struct ids *ids,
               struct error *error);

/* The id of the single-byte piece, or NO_PIECE. */
int32_t bpe_byte(const struct bpe *bpe, unsigned char byte);

#endif
