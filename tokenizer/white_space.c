#include "tokenizer/white_space.h"

#include <string.h>

static const char *const white_space[] = {
    "\t",           "\n",           "\v",           "\f",           "\r",           " ",
    "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81", "\xe2\x80\x82",
    "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86", "\xe2\x80\x87", "\xe2\x80\x88",
    "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f",
    "\xe3\x80\x80"};
enum { WHITE_SPACES = sizeof white_space / sizeof white_space[0] };

size_t white_before(const char *text, size_t from, size_t at) {
    for (int i = 0; i < WHITE_SPACES; i++) {
        size_t bytes = strlen(white_space[i]);
        if (at - from >= bytes && !memcmp(text + at - bytes, white_space[i], bytes)) return bytes;
    }
    return 0;
}

size_t white_after(const char *text, size_t at, size_t end) {
    for (int i = 0; i < WHITE_SPACES; i++) {
        size_t bytes = strlen(white_space[i]);
        if (end - at >= bytes && !memcmp(text + at, white_space[i], bytes)) return bytes;
    }
    return 0;
}
