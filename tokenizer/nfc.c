#include "tokenizer/nfc.h"

#include <stdbool.h>
#include <utf8proc.h>

enum { MAX_MARKS = 256 };

/* Below U+0300, whose first byte is 0xcc, no character takes part in a composition as its second.
 */
static bool may_change(const char *text, size_t bytes) {
    for (size_t at = 0; at < bytes; at++)
        if ((unsigned char)text[at] >= 0xcc) return true;
    return false;
}

static bool has_long_run_of_marks(const char *text, size_t bytes) {
    int marks = 0;
    for (size_t at = 0; at < bytes;) {
        utf8proc_int32_t code_point = 0;
        at += (size_t)utf8proc_iterate((const utf8proc_uint8_t *)text + at,
                                       (utf8proc_ssize_t)(bytes - at), &code_point);
        utf8proc_category_t category = utf8proc_category(code_point);
        bool mark = category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
                    category == UTF8PROC_CATEGORY_ME;
        marks = mark ? marks + 1 : 0;
        if (marks > MAX_MARKS) return true;
    }
    return false;
}

int nfc(const char *text, size_t bytes, char **normal, size_t *normal_bytes, struct error *error) {
    *normal = NULL;
    *normal_bytes = bytes;
    if (!may_change(text, bytes) || has_long_run_of_marks(text, bytes)) return 0;
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t result = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)bytes,
                                           &composed, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (result < 0)
        return fail(error, result == UTF8PROC_ERROR_NOMEM ? EXIT_MEMORY : EXIT_INTERNAL,
                    "tokenizer: utf8proc failed to normalise a text: %s", utf8proc_errmsg(result));
    *normal = (char *)composed;
    *normal_bytes = (size_t)result;
    return 0;
}
