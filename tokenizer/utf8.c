#include "tokenizer/utf8.h"

int utf8_length(const char *text, size_t bytes) {
    unsigned char lead = (unsigned char)text[0];
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return UTF8_INVALID;
    int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    /* Only the second byte can make a form overlong, a surrogate or too large. */
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == bytes) return UTF8_INCOMPLETE;
        unsigned char c = (unsigned char)text[i];
        if (c < low || c > high) return UTF8_INVALID;
        low = 0x80;
        high = 0xbf;
    }
    return length;
}

size_t utf8_valid(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        int length = utf8_length(text + at, bytes - at);
        if (length <= 0) break;
        at += (size_t)length;
    }
    return at;
}

size_t utf8_unfinished(const char *text, size_t bytes) {
    for (size_t tail = 1; tail <= 3 && tail <= bytes; tail++)
        if (utf8_length(text + bytes - tail, tail) == UTF8_INCOMPLETE) return tail;
    return 0;
}
