/* tokenizer/: what is done to text before any token is known: UTF-8, NFC and the pre-split. */
#include "tokenizer/nfc.h"
#include "tokenizer/presplit.h"
#include "tokenizer/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void test_presplit(void **state) {
    (void)state;
    static const struct {
        enum pattern pattern;
        const char *pieces; /* | separates them */
    } rows[] = {
        {PATTERN_GPT2, "It|'s| 2024|!|  | x|\n|\n|y"},
        {PATTERN_GPT2, "a|'|S| \xe1\xa0\x8e|b"}, /* U+180E is no white space */
        {PATTERN_LLAMA3, "It|'S| |202|4|!\n\n|  | x| \n|y"},
        {PATTERN_LLAMA3, "a|'\xc5\xbf|b"}, /* U+017F is an s without case */
        {PATTERN_QWEN2, "a| |2|0|\t|\tb"},
        {PATTERN_SMOLLM2, "a| |2|0| |3|'s|  | b"},
        {PATTERN_SMOLLM2, "a|  |2"},
        {PATTERN_O200K, "Hello|World's| don't| |123|4|!/\n|x"},
        {PATTERN_TEKKEN, "Hello|World|'s| don|'t| |1|2|!/\n|x"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[128];
        size_t bytes = 0, at = 0, end = 0;
        for (const char *c = rows[i].pieces; *c; c++)
            if (*c != '|') text[bytes++] = *c;
        struct presplit *presplit = NULL;
        struct error error = {0};
        assert_int_equal(presplit_open(&presplit, rows[i].pattern, &error), 0);
        char found[256] = "";
        size_t used = 0;
        for (; at < bytes; at = end) {
            assert_int_equal(presplit_next(presplit, text, bytes, at, &end, &error), 0);
            if (at > 0) found[used++] = '|';
            memcpy(found + used, text + at, end - at);
            used += end - at;
        }
        presplit_close(presplit);
        assert_string_equal(found, rows[i].pieces);
    }
}

static void test_nfc(void **state) {
    (void)state;
    static const struct {
        const char *text, *normal; /* NULL: left as it is */
    } rows[] = {
        {"", NULL},
        {"plain, \xc3\xa9", NULL},
        {"e\xcc\x81", "\xc3\xa9"},
        {"\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81"}, /* Hangul */
        {"\xe2\x84\xab", "\xc3\x85"},                             /* Angstrom */
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"},             /* grows */
        {"a\xcc\x81\xcc\xa3", "\xe1\xba\xa1\xcc\x81"},            /* reordered */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char *normal = NULL;
        size_t bytes = 0;
        struct error error = {0};
        assert_int_equal(nfc(rows[i].text, strlen(rows[i].text), &normal, &bytes, &error), 0);
        assert_int_equal(normal != NULL, rows[i].normal != NULL);
        if (normal) assert_string_equal(normal, rows[i].normal);
        assert_int_equal(bytes, strlen(rows[i].normal ? rows[i].normal : rows[i].text));
        free(normal);
    }
    for (size_t marks = 256; marks <= 257; marks++) {
        char text[1 + 2 * 257] = "e";
        char *normal = NULL;
        size_t bytes = 0;
        struct error error = {0};
        for (size_t i = 0; i < 2 * marks; i++) text[1 + i] = "\xcc\x81"[i % 2];
        assert_int_equal(nfc(text, 1 + 2 * marks, &normal, &bytes, &error), 0);
        assert_int_equal(normal != NULL, marks == 256);
        free(normal);
    }
}

static void test_utf8(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int length;
    } rows[] = {
        {"\x7f", 1},
        {"\x80", UTF8_INVALID},
        {"\xc1\x80", UTF8_INVALID},
        {"\xc2", UTF8_INCOMPLETE},
        {"\xc2\x7f", UTF8_INVALID},
        {"\xc2\x80", 2},
        {"\xdf\xbf", 2},
        {"\xdf\xc0", UTF8_INVALID},
        {"\xe0\x9f", UTF8_INVALID},
        {"\xe0\xa0", UTF8_INCOMPLETE},
        {"\xe0\xa0\x80", 3},
        {"\xe2\x82\xc0", UTF8_INVALID},
        {"\xed\x9f\xbf", 3},
        {"\xed\xa0", UTF8_INVALID},
        {"\xee\x80\x80", 3},
        {"\xf0\x8f", UTF8_INVALID},
        {"\xf0\x90\x80", UTF8_INCOMPLETE},
        {"\xf0\x90\x80\x80", 4},
        {"\xf4\x8f\xbf\xbf", 4},
        {"\xf4\x90", UTF8_INVALID},
        {"\xf5\x80", UTF8_INVALID},
        {"\xff", UTF8_INVALID},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t bytes = strlen(rows[i].text);
        assert_int_equal(utf8_length(rows[i].text, bytes), rows[i].length);
        assert_int_equal(utf8_valid(rows[i].text, bytes), rows[i].length > 0 ? bytes : 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_utf8), cmocka_unit_test(test_nfc),
                                       cmocka_unit_test(test_presplit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
