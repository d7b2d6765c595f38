/* Splits a text into the pieces that byte-level BPE merges within: one of a fixed list of patterns,
 * since a pattern from a file could make matching take for ever. */
#ifndef TOKENIZER_PRESPLIT_H
#define TOKENIZER_PRESPLIT_H

#include "model/error.h"
#include "tokenizer/section.h"

#include <stddef.h>

struct presplit;

/* EXIT_MEMORY, EXIT_INTERNAL. */
int presplit_open(struct presplit **presplit, enum pattern pattern, struct error *error);
void presplit_close(struct presplit *presplit); /* NULL is fine */

/* End of the piece that starts at text[from]; from < bytes. The text has to be valid UTF-8.
 * EXIT_MEMORY, EXIT_INTERNAL. */
int presplit_next(struct presplit *presplit, const char *text, size_t bytes, size_t from,
                  size_t *end, struct error *error);

#endif
