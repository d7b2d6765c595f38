/* Encoding by the sentencepiece library. C++ behind a C interface: no exception leaves it. Where
 * the library itself runs out of memory, the program ends with a line on stderr and exit code
 * EXIT_MEMORY, since the library cannot be left then. */
#ifndef TOKENIZER_SENTENCEPIECE_H
#define TOKENIZER_SENTENCEPIECE_H

#include "tokenizer/sentencepiece_check.h"
#include "tokenizer/tokenizer.h"

struct sp;

/* Loads model[0..bytes) (copied), which sentencepiece_check has accepted as *parsed.
 * EXIT_BAD_FILE, EXIT_MEMORY. */
int sp_open(struct sp **sp, const unsigned char *model, size_t bytes, const struct sp_model *parsed,
            struct error *error);
void sp_close(struct sp *sp); /* NULL is fine */

/* Appends the ids of text[0..bytes), valid UTF-8 of at most MAX_TEXT bytes. Where the model puts a
 * space before a text, it does so only if text_start. EXIT_MEMORY, EXIT_INTERNAL. */
int sp_encode(struct sp *sp, const char *text, size_t bytes, bool text_start, struct ids *ids,
              struct error *error);

#endif
