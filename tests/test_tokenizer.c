/* tokenizer/: sections that must be refused, byte-level BPE on a vocabulary made by hand, added
 * tokens, the decoder. test_sentencepiece.c has the other kind, test_text.c what both need. */
#include "tests/tokenizer_section.h"
#include "tokenizer/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cmocka.h>

enum { END = -1 }; /* ends a list of ids */
enum { GPT2 = 1, LLAMA3 = 2, QWEN2 = 3, SMOLLM2 = 4, O200K = 5, TEKKEN = 6 };
enum { IGNORE_MERGES = 1, NFC = 2 };

/* On the heap and without a zero at the end: AddressSanitizer finds a read beyond it. */
static void *exact_copy(const void *data, size_t bytes) {
    void *copy = malloc(bytes > 0 ? bytes : 1);
    assert_non_null(copy);
    if (bytes > 0) memcpy(copy, data, bytes);
    return copy;
}

static struct tokenizer *open_bpe(uint32_t pattern, uint32_t flags) {
    struct section_bytes section;
    tiny_bpe(&section, pattern, flags);
    return open_section(&section);
}

static void expect_ids(struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
                       const int32_t *expected) {
    struct ids ids = {0};
    struct error error = {0};
    char *copy = exact_copy(text, bytes);
    assert_int_equal(tokenizer_encode(tokenizer, copy, bytes, special, &ids, &error), 0);
    free(copy);
    size_t count = 0;
    while (expected[count] != END) count++;
    bool equal = ids.count == count;
    for (size_t i = 0; equal && i < count; i++) equal = ids.id[i] == expected[i];
    if (!equal) {
        print_error("\"%s\" gives", text);
        for (size_t i = 0; i < ids.count; i++) print_error(" %d", ids.id[i]);
        print_error("\n");
    }
    free(ids.id);
    assert_true(equal);
}

/* ---- refusals ---- */

/* Where and how a good section is changed, and a part of the message that has to follow. */
struct refusal {
    int at;
    uint32_t value;
    int longer; /* bytes added at the end, or taken away */
    const char *message;
};

enum { UNCHANGED = -1 };

static void expect_refusal(const struct section_bytes *section, int vocab, const char *message) {
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    unsigned char *copy = exact_copy(section->data, section->count);
    int code = tokenizer_open(&tokenizer, copy, section->count, vocab, &error);
    free(copy);
    if (code != EXIT_BAD_FILE || !strstr(error.text, message))
        print_error("expected \"%s\", found %d \"%s\"\n", message, code, error.text);
    assert_int_equal(code, EXIT_BAD_FILE);
    assert_null(tokenizer);
    assert_non_null(strstr(error.text, message));
}

static void apply(struct section_bytes *section, const struct refusal *refusal) {
    if (refusal->at != UNCHANGED) {
        size_t end = section->count;
        section->count = (size_t)refusal->at;
        put_u32(section, refusal->value);
        section->count = end;
    }
    section->count = (size_t)((long)section->count + refusal->longer);
}

static void test_bpe_refusals(void **state) {
    (void)state;
    enum { LENGTHS = 32, ADDED = TINY_ADDED_AT };
    static const struct refusal rows[] = {
        {0, 0, 0, "kind 0"},
        {0, 3, 0, "kind 3"},
        {4, 0, 0, "pattern 0"},
        {4, 7, 0, "pattern 7"},
        {8, 4, 0, "flags 0x4"},
        {8, 0x80000001, 0, "flags 0x80000001"},
        {12, TINY_VOCAB + 1, 0, "the vocabulary has"},
        {12, 0xffffffff, 0, "the vocabulary has"},
        {12, TINY_PIECES + 1, 0, "added token"},
        {16, TINY_VOCAB + 1, 0, "the vocabulary has"},
        {16, TINY_ADDED + 1, 0, "added token"},
        {20, sizeof TINY_SYSTEM, 0, "the system message"},
        {20, sizeof TINY_SYSTEM - 2, 0, "1 bytes follow"},
        {20, 0xffffffff, 0, "the system message"},
        {24, 1, 0, "sentencepiece model of 1 bytes"},
        {28, 1, 0, "sentencepiece model of 4294967296 bytes"},
        {LENGTHS, 1025, 0, "length 0x401"},
        {LENGTHS, 0x40000001, 0, "length 0x40000001"},
        {LENGTHS, 0x80000000, 0, "length 0x80000000"},
        {LENGTHS, 1024, 0, "ends inside"},
        {ADDED, TINY_VOCAB, 0, "has id"},
        {ADDED, 0xffffffff, 0, "has id"},
        {ADDED, STARTING, 0, "added twice"},
        {ADDED + 4, 8, 0, "unknown flags 0x8"},
        {ADDED + 8, 0, 0, "length 0"},
        {ADDED + 8, 1025, 0, "length 1025"},
        {ADDED + 8, 1024, 0, "ends inside"},
        {UNCHANGED, 0, 1, "1 bytes follow"},
        {UNCHANGED, 0, -1, "the system message"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct section_bytes section;
        tiny_bpe(&section, GPT2, 0);
        section.data[section.count] = 0;
        apply(&section, &rows[i]);
        expect_refusal(&section, TINY_VOCAB, rows[i].message);
    }
}

static void test_every_truncation(void **state) {
    (void)state;
    struct section_bytes model, section;
    for (int sentencepiece = 0; sentencepiece < 2; sentencepiece++) {
        tiny_bpe(&section, GPT2, 0);
        if (sentencepiece) {
            tiny_sp_model(&model, 1);
            sp_section(&section, model.data, model.count);
        }
        for (size_t whole = section.count; section.count-- > 0;) {
            expect_refusal(&section, TINY_VOCAB, "tokenizer: ");
            if (section.count + 64 < whole && section.count > 128) section.count -= 7;
        }
    }
}

static void test_other_refusals(void **state) {
    (void)state;
    struct section_bytes section;
    tiny_bpe(&section, GPT2, 0);
    section.data[section.count - 1] = 0xff;
    expect_refusal(&section, TINY_VOCAB, "not valid UTF-8");
    tiny_bpe(&section, GPT2, 0);
    expect_refusal(&section, TINY_PIECES - 1, "the vocabulary has");
    expect_refusal(&section, TINY_PIECES + TINY_ADDED - 1, "has id");

    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    assert_int_equal(tokenizer_open(&tokenizer, section.data, section.count, 0, &error),
                     EXIT_INTERNAL);
    assert_null(tokenizer);
    tokenizer_close(NULL);
}

/* Pieces that all have the same place in a hash table would make every look-up slow. */
static void test_colliding_pieces(void **state) {
    (void)state;
    enum { COLLIDING = 200, PIECES = 256 + COLLIDING, SLOTS = 1024 };
    struct section_bytes section = {{0}, 0};
    put_u32(&section, 1);
    put_u32(&section, GPT2);
    put_u32(&section, 0);
    put_u32(&section, PIECES);
    for (int i = 0; i < 4; i++) put_u32(&section, 0);
    for (int id = 0; id < PIECES; id++) put_u32(&section, id < 256 ? 1 : 4);
    for (int byte = 0; byte < 256; byte++) put(&section, &(unsigned char){(unsigned char)byte}, 1);
    struct section_bytes harmless = section, same = section;
    for (int i = 0; i < COLLIDING; i++) put(&same, "same", 4);
    int colliding = 0;
    for (uint32_t text = 0; colliding < COLLIDING; text++) {
        if (text < COLLIDING) put_u32(&harmless, text);
        if (XXH3_64bits(&text, sizeof text) % SLOTS != 0) continue;
        put_u32(&section, text);
        colliding++;
    }
    expect_refusal(&section, TINY_VOCAB + COLLIDING, "shares its hash");
    const struct section_bytes *good[] = {&harmless, &same};
    for (int i = 0; i < 2; i++) {
        struct tokenizer *tokenizer = NULL;
        struct error error = {0};
        assert_int_equal(tokenizer_open(&tokenizer, good[i]->data, good[i]->count,
                                        TINY_VOCAB + COLLIDING, &error),
                         0);
        tokenizer_close(tokenizer);
    }
}

/* ---- byte-level BPE ---- */

struct ids_row {
    const char *text;
    size_t bytes;
    int32_t ids[12];
};
#define TEXT(literal) (literal), sizeof(literal) - 1

static void test_merges(void **state) {
    (void)state;
    static const struct ids_row rows[] = {
        {TEXT(""), {END}},
        {TEXT("c"), {'c', END}},
        {TEXT("ab"), {AB, END}}, /* not AB_AGAIN */
        {TEXT("abc"), {ABC, END}},
        {TEXT("bc"), {BC, END}},
        {TEXT("cab"), {CAB, END}},
        {TEXT("aaa"), {AA, 'a', END}},
        {TEXT("aaaaa"), {AAAA, 'a', END}},
        {TEXT("aab"), {'a', AB, END}},
        {TEXT("b a a"), {'b', SPACE_A, SPACE_A, END}},
        {TEXT("hello"), {'h', 'e', 'l', 'l', 'o', END}},
        {TEXT("xy"), {'x', 'y', END}},
        {TEXT("\0"), {0, END}},
        {TEXT("a\0b"), {'a', 0, 'b', END}},
        {TEXT("a\xff\xe2\x82"), {'a', 0xff, 0xe2, 0x82, END}},
        {TEXT("ab\xff"
              "ab"),
         {AB, 0xff, AB, END}},
        {TEXT("\xc0\x80\xed\xa0\x80"), {0xc0, 0x80, 0xed, 0xa0, 0x80, END}},
        {TEXT("\xf0\x9f\x98\x80"), {SMILE_1_2, SMILE_3_4, END}},
        {TEXT("e\xcc\x81"), {'e', 0xcc, 0x81, END}},
    };
    struct tokenizer *tokenizer = open_bpe(GPT2, 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        expect_ids(tokenizer, rows[i].text, rows[i].bytes, false, rows[i].ids);
    tokenizer_close(tokenizer);
}

static void test_flags(void **state) {
    (void)state;
    struct tokenizer *tokenizer = open_bpe(GPT2, IGNORE_MERGES);
    expect_ids(tokenizer, TEXT("hello"), false, (int32_t[]){HELLO, END});
    expect_ids(tokenizer, TEXT("xy"), false, (int32_t[]){XY, END});
    expect_ids(tokenizer, TEXT("xyab"), false, (int32_t[]){'x', 'y', AB, END});
    expect_ids(tokenizer, TEXT("ab"), false, (int32_t[]){AB, END});
    tokenizer_close(tokenizer);

    tokenizer = open_bpe(QWEN2, NFC);
    expect_ids(tokenizer, TEXT("e\xcc\x81"), false, (int32_t[]){0xc3, 0xa9, END});
    expect_ids(tokenizer, TEXT("e\xcc\xff\x81"), false, (int32_t[]){'e', 0xcc, 0xff, 0x81, END});
    tokenizer_close(tokenizer);
}

/* Lowest id first, leftmost among equals, by trying all pairs again after each merge. */
static size_t merge_slowly(const char *text, size_t bytes, int32_t *ids) {
    size_t start[64] = {0}, count = bytes;
    for (size_t i = 0; i < bytes; i++) {
        start[i] = i;
        ids[i] = (unsigned char)text[i];
    }
    for (;;) {
        size_t best = 0;
        int32_t best_id = TINY_PIECES;
        for (size_t i = 0; i + 1 < count; i++) {
            size_t end = i + 2 < count ? start[i + 2] : bytes, length = end - start[i];
            for (int32_t id = 256; id < best_id; id++) {
                const char *piece = tiny_pieces[id - 256];
                if (id == XY || strlen(piece) != length ||
                    memcmp(piece, text + start[i], length) != 0)
                    continue;
                best = i;
                best_id = id;
            }
        }
        if (best_id == TINY_PIECES) return count;
        ids[best] = best_id;
        count--;
        for (size_t i = best + 1; i < count; i++) {
            start[i] = start[i + 1];
            ids[i] = ids[i + 1];
        }
    }
}

static void test_order_of_merges(void **state) {
    (void)state;
    struct tokenizer *tokenizer = open_bpe(GPT2, 0);
    uint32_t random = 1;
    for (int round = 0; round < 20000; round++) {
        char text[40];
        int32_t expected[41];
        size_t bytes = 1 + (size_t)round % sizeof text;
        for (size_t i = 0; i < bytes; i++) {
            random = random * 1664525 + 1013904223;
            text[i] = "abcaab"[(random >> 16) % 6];
        }
        expected[merge_slowly(text, bytes, expected)] = END;
        expect_ids(tokenizer, text, bytes, false, expected);
    }
    tokenizer_close(tokenizer);
}

/* A byte without a piece is left out, and its neighbours merge. */
static void test_missing_byte(void **state) {
    (void)state;
    static const unsigned char bytes[] = {0x04, 0xff};
    for (size_t i = 0; i < sizeof bytes; i++) {
        struct section_bytes section;
        tiny_bpe(&section, GPT2, 0);
        struct refusal no_piece = {32 + 4 * bytes[i], 0, 0, NULL};
        apply(&section, &no_piece);
        size_t at = TINY_TEXT_AT + (size_t)bytes[i];
        memmove(section.data + at, section.data + at + 1, section.count - at - 1);
        section.count--;
        struct tokenizer *tokenizer = open_section(&section);
        char text[] = {(char)bytes[i], 'c', (char)bytes[i], (char)bytes[i], 'c'};
        expect_ids(tokenizer, text, 1, false, (int32_t[]){END});
        expect_ids(tokenizer, text, sizeof text, false, (int32_t[]){'c', 'c', END});
        expect_ids(tokenizer, TEXT("\3ab\5"), false, (int32_t[]){3, AB, 5, END});
        char description[128];
        tokenizer_describe(tokenizer, description, sizeof description);
        assert_non_null(strstr(description, ", 1 bytes without a piece"));
        tokenizer_close(tokenizer);
    }
}

/* ---- added tokens ---- */

static void test_added(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool special;
        int32_t ids[12];
    } rows[] = {
        {"<s>", true, {START, END}},
        {"<s>", false, {'<', 's', '>', END}},
        {"a<s>b", true, {'a', START, 'b', END}},
        {"<s>tarting", true, {STARTING, END}}, /* the longest */
        {"<s>tartin", true, {START, 't', 'a', 'r', 't', 'i', 'n', END}},
        {"<s><s><p>", true, {START, START, PLAIN, END}},
        {"<<s>", true, {'<', START, END}},
        {"<s", true, {'<', 's', END}},
        {"<p>", false, {PLAIN, END}}, /* not PLAIN_AGAIN */
        {"a \n<l> b", false, {'a', LEFT, ' ', 'b', END}},
        {"a <r> \t\xe2\x80\x83"
         "b",
         false,
         {'a', ' ', RIGHT, 'b', END}},
        {"a <b> b", true, {'a', BOTH, 'b', END}},
        {"a <b> b", false, {'a', ' ', '<', 'b', '>', ' ', 'b', END}},
        {"<r> <l>", false, {RIGHT, LEFT, END}},
        {" <l>", false, {LEFT, END}},
        {"a\xe1\xa0\x8e<l>", false, {'a', 0xe1, 0xa0, 0x8e, LEFT, END}}, /* U+180E stays */
    };
    for (uint32_t pattern = GPT2; pattern <= TEKKEN; pattern++) {
        struct tokenizer *tokenizer = open_bpe(pattern, 0);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
            expect_ids(tokenizer, rows[i].text, strlen(rows[i].text), rows[i].special, rows[i].ids);
        tokenizer_close(tokenizer);
    }
}

static void test_names(void **state) {
    (void)state;
    static const struct {
        int32_t id;
        const char *name, *piece;
    } rows[] = {
        {'a', "a", "a"},       {AB, "ab", "ab"},         {NO_TEXT, "", ""},    {START, "<s>", ""},
        {PLAIN, "<p>", "<p>"}, {TINY_VOCAB - 1, "", ""}, {TINY_VOCAB, "", ""}, {-1, "", ""},
        {INT32_MAX, "", ""},   {INT32_MIN, "", ""},
    };
    struct tokenizer *tokenizer = open_bpe(SMOLLM2, 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t bytes = 99;
        const char *text = tokenizer_name(tokenizer, rows[i].id, &bytes);
        assert_int_equal(bytes, strlen(rows[i].name));
        assert_memory_equal(text, rows[i].name, bytes);
        text = tokenizer_piece(tokenizer, rows[i].id, &bytes);
        assert_int_equal(bytes, strlen(rows[i].piece));
        assert_memory_equal(text, rows[i].piece, bytes);
    }
    size_t bytes = 0;
    assert_memory_equal(tokenizer_system(tokenizer, &bytes), TINY_SYSTEM, sizeof TINY_SYSTEM - 1);
    assert_int_equal(bytes, sizeof TINY_SYSTEM - 1);
    char text[128];
    tokenizer_describe(tokenizer, text, sizeof text);
    assert_string_equal(text, "byte-level BPE (smollm2), 269 pieces, 10 added");
    tokenizer_describe(tokenizer, text, 8);
    assert_string_equal(text, "byte-le");
    tokenizer_close(tokenizer);
}

/* ---- the decoder ---- */

static void test_decoder(void **state) {
    (void)state;
    static const struct {
        int32_t ids[6];
        const char *outputs; /* of each call, each followed by |, and of the end */
    } rows[] = {
        {{END}, ""},
        {{'a', AB, END}, "a|ab|"},
        {{0xc3, 0xa9, END}, "|\xc3\xa9|"},
        {{0xe2, 0x82, 0xac, END}, "||\xe2\x82\xac|"},
        {{0xf0, 0x9f, 0x98, 0x80, END}, "|||\xf0\x9f\x98\x80|"},
        {{SMILE_1_2, SMILE_3_4, END}, "|\xf0\x9f\x98\x80|"},
        {{SMILE_1_2, 0x98, 0x80, 'a', END}, "||\xf0\x9f\x98\x80|a|"},
        {{0xf0, START, 0x9f, SMILE_3_4, END}, "|||\xf0\x9f\x98\x80|"},
        {{0xff, 'a', END}, "\xff|a|"},
        {{0x80, END}, "\x80|"},
        {{0xc0, 0x80, END}, "\xc0|\x80|"},
        {{0xe2, 'a', END},
         "|\xe2"
         "a|"},
        {{0xe2, 0x82, 'a', END},
         "||\xe2\x82"
         "a|"},
        {{SMILE_1_2, 0x98, 'z', END}, "||\xf0\x9f\x98z|"},
        {{SMILE_1_2, SMILE_1_2, SMILE_3_4, END}, "|\xf0\x9f|\xf0\x9f\x98\x80|"},
        {{0xed, 0xa0, 0x80, END}, "|\xed\xa0|\x80|"}, /* a surrogate */
        {{0xf4, 0x90, END}, "|\xf4\x90|"},            /* above U+10FFFF */
        {{0xe2, END}, "|\xef\xbf\xbd"},
        {{0xe2, 0x82, END}, "||\xef\xbf\xbd"},
        {{SMILE_1_2, 0x98, END}, "||\xef\xbf\xbd"},
        {{' ', SPACE_A, END}, " | a|"}, /* only sentencepiece adds a first space */
    };
    struct tokenizer *tokenizer = open_bpe(GPT2, 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct decoder decoder = {0};
        char found[8 * DECODER_ROOM];
        size_t used = 0;
        for (const int32_t *id = rows[i].ids; *id != END; id++) {
            used += decoder_next(&decoder, tokenizer, *id, found + used);
            found[used++] = '|';
        }
        used += decoder_end(&decoder, found + used);
        assert_int_equal(used, strlen(rows[i].outputs));
        assert_memory_equal(found, rows[i].outputs, used);
        assert_int_equal(decoder_end(&decoder, found), 0);
    }
    tokenizer_close(tokenizer);
}

static void test_limits(void **state) {
    (void)state;
    struct error error = {0};
    struct ids ids = {0};
    for (int32_t i = 0; i < 1000; i++) assert_int_equal(ids_append(&ids, i, &error), 0);
    for (int32_t i = 0; i < 1000; i++) assert_int_equal(ids.id[i], i);
    assert_int_equal(ids.count, 1000);
    free(ids.id);
    struct ids full = {NULL, SIZE_MAX / 4, SIZE_MAX / 4};
    assert_int_equal(ids_append(&full, 0, &error), EXIT_MEMORY);
    assert_int_equal(full.count, SIZE_MAX / 4);

    struct tokenizer *tokenizer = open_bpe(GPT2, 0);
    struct ids none = {0};
    assert_int_equal(tokenizer_encode(tokenizer, "", (size_t)MAX_TEXT + 1, false, &none, &error),
                     EXIT_USAGE);
    assert_int_equal(none.count, 0);
    tokenizer_close(tokenizer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bpe_refusals),    cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_other_refusals),  cmocka_unit_test(test_colliding_pieces),
        cmocka_unit_test(test_merges),          cmocka_unit_test(test_flags),
        cmocka_unit_test(test_order_of_merges), cmocka_unit_test(test_missing_byte),

        cmocka_unit_test(test_added),           cmocka_unit_test(test_names),
        cmocka_unit_test(test_decoder),         cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
