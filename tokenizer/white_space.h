/* White space as Unicode has it: the 25 characters with the property White_Space. */
#ifndef TOKENIZER_WHITE_SPACE_H
#define TOKENIZER_WHITE_SPACE_H

#include <stddef.h>

/* Bytes of the white-space character that ends at text[at], none before text[from]; 0: there is
 * none. */
size_t white_before(const char *text, size_t from, size_t at);

/* Bytes of the one that starts at text[at], none after text[end - 1]; 0: there is none. */
size_t white_after(const char *text, size_t at, size_t end);

#endif
