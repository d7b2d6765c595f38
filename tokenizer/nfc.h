/* Unicode normalisation form C, which Qwen's tokenizers apply before anything else. */
#ifndef TOKENIZER_NFC_H
#define TOKENIZER_NFC_H

#include "model/error.h"

#include <stddef.h>

/* Normalises text[0..bytes), which has to be valid UTF-8. *normal is the result, for the caller to
 * free, of *normal_bytes bytes; or NULL where the text stays as it is. Text with a run of more than
 * 256 combining marks, which no language has, is left alone: sorting them takes quadratic time.
 * EXIT_MEMORY, EXIT_INTERNAL. */
int nfc(const char *text, size_t bytes, char **normal, size_t *normal_bytes, struct error *error);

#endif
