/* UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef TOKENIZER_UTF8_H
#define TOKENIZER_UTF8_H

#include <stddef.h>

enum { UTF8_INVALID = -1, UTF8_INCOMPLETE = 0 };

/* Bytes of the character at text[0..bytes), bytes > 0: 1 to 4; UTF8_INCOMPLETE where the text ends
 * inside a character, UTF8_INVALID where no character starts with these bytes. */
int utf8_length(const char *text, size_t bytes);

/* Bytes of the longest prefix of text[0..bytes) that is valid. */
size_t utf8_valid(const char *text, size_t bytes);

/* Bytes at the end of text[0..bytes) that further bytes could complete to a character: 0 to 3. */
size_t utf8_unfinished(const char *text, size_t bytes);

#endif
