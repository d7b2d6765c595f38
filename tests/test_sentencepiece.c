/* sentencepiece: models that must be refused before the library sees them, and encoding and
 * decoding on a model made by hand. */
#include "tests/tokenizer_section.h"
#include "tokenizer/sentencepiece_check.h"
#include "tokenizer/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>

#include <cmocka.h>

enum { END = -1 }; /* ends a list of ids */

#define UNK "\x0a\x09\x0a\x05<unk>\x18\x02"
#define A                                                                                          \
    "\x0a\x03\x0a\x01"                                                                             \
    "a"
#define BPE          "\x12\x02\x18\x02"
#define MODEL(bytes) (bytes), sizeof(bytes) - 1
struct model_row {
    const char *model;
    size_t bytes;
    const char *message; /* NULL: it is accepted */
};

/* How a model is split over messages, or what it holds beside, does not matter. */
static const struct model_row accepted_models[] = {
    {MODEL(UNK A BPE), NULL},
    {MODEL(BPE UNK A), NULL},
    {MODEL(UNK A "\x12\x02\x18\x01" BPE), NULL}, /* the last type counts */
    {MODEL(UNK A BPE "\x12\x02\x20\x02"), NULL}, /* a trainer field of no interest */
    {MODEL(UNK A BPE "\x12\x0c\xc8\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
     NULL},                                      /* bos_id -1 */
    {MODEL(UNK A BPE "\x1a\x02\x12\x00"), NULL}, /* an empty charsmap */
    {MODEL(UNK A BPE "\xc2\x0c\x01x"), NULL},    /* an extension, field 200 */
    {MODEL(UNK A "\x12\x0e\x18\x02\xd8\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), NULL},
};

static const struct model_row refused_models[] = {
    {MODEL(""), "0 pieces"},
    {MODEL(BPE), "0 pieces"},
    {MODEL(UNK A), "type 1"},
    {MODEL(UNK A "\x12\x02\x18\x01"), "type 1"},
    {MODEL(UNK A BPE "\x12\x02\x18\x03"), "type 3"},
    {MODEL(UNK A BPE "\x12\x02\x18\x09"), "type 9"},
    {MODEL(UNK A BPE "\x1a\x03\x12\x01x"), "precompiled_charsmap"},
    {MODEL(UNK A BPE "\x2a\x03\x12\x01x"), "precompiled_charsmap"},
    {MODEL(UNK A BPE "\x1a\x02\x10\x01"), "the charsmap has wire type 0"},
    {MODEL(UNK A BPE "\x1a\x02\x1a\x00"), "a normalizer setting has wire type 2"},
    {MODEL(UNK A BPE "\x12\x03\xc0\x01\x01"), "suffix"},
    {MODEL(UNK "\x0a\x02\x0a\x00" BPE), "piece 1 has 0 bytes"},
    {MODEL(UNK "\x0a\x02\x18\x01" BPE), "piece 1 has no text"},
    {MODEL(UNK "\x0a\x00" BPE), "piece 1 has no text"},
    {MODEL(UNK "\x0a\x05\x0a\x03x\0y" BPE), "piece 1 has 3 bytes, or holds NUL"},
    {MODEL(UNK "\x0a\x05\x0a\x01"
               "a\x18\x00" BPE),
     "type 0 of piece 1"},
    {MODEL(UNK "\x0a\x05\x0a\x01"
               "a\x18\x07" BPE),
     "type 7 of piece 1"},
    {MODEL(UNK "\x0a\x05\x0a\x01"
               "a\x18\x06" BPE),
     "byte piece 1"},
    {MODEL(UNK "\x0a\x0a\x0a\x06<0xg0>\x18\x06" BPE), "byte piece 1"},
    {MODEL(UNK "\x0a\x0a\x0a\x06<0x-1>\x18\x06" BPE), "byte piece 1"},
    {MODEL(UNK "\x0a\x0a\x0a\x06<0xab>\x18\x06" BPE), "byte piece 1"},
    {MODEL(UNK "\x0a\x02\x08\x01" BPE), "a piece's text has wire type 0"},
    {MODEL(UNK "\x0a\x05\x0a\x01"
               "a\x10\x00" BPE),
     "a score has wire type 0"},
    {MODEL(UNK "\x0a\x05\x0a\x01"
               "a\x1a\x00" BPE),
     "a piece's type has wire type 2"},
    {MODEL(A BPE), "0 unknown pieces"},
    {MODEL(UNK UNK A BPE), "2 unknown pieces"},
    {MODEL(UNK A BPE "\x12\x03\xc0\x02\x02"), "special id 2"},
    {MODEL(UNK A BPE "\x12\x03\xd8\x02\x02"), "special id 2"},
    {MODEL(UNK A BPE "\x12\x0c\xc0\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "special id -1"},
    {MODEL(UNK A BPE "\x12\x0c\xc8\x02\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "special id -2"},
    {MODEL(UNK A BPE "\x12\x03\xc2\x02\x00"), "a trainer setting has wire type 2"},
    {MODEL(UNK A BPE "\x08\x01"), "a piece has wire type 0"},
    {MODEL(UNK A BPE "\x10\x01"), "a part has wire type 0"},
    {MODEL(UNK A BPE "\x02\x00"), "a field number"},
    {MODEL(UNK A BPE "\x80"), "a field number"},
    {MODEL(UNK A BPE "\xff\xff\xff\xff\xff\x01"), "a field number"},
    {MODEL(UNK A BPE "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "a field number"},
    {MODEL(UNK A BPE "\x33"), "unknown wire type"},
    {MODEL(UNK A BPE "\x34"), "unknown wire type"},
    {MODEL(UNK A BPE "\x30"), "a number is cut off"},
    {MODEL(UNK A BPE "\x30\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02"), "a number is cut off"},
    {MODEL(UNK A BPE "\x31\x01\x02\x03\x04\x05\x06\x07"), "8 bytes is cut off"},
    {MODEL(UNK A BPE "\x35\x01\x02\x03"), "4 bytes is cut off"},
    {MODEL(UNK A BPE "\x32"), "a length is cut off"},
    {MODEL(UNK A BPE "\x32\x01"), "beyond the end"},
    {MODEL(UNK A BPE "\x32\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "beyond the end"},
    {MODEL(UNK A BPE "\x0a\x02\x0a\x01"), "beyond the end"},
};

static void check_model(const struct model_row *row) {
    struct sp_model model;
    struct error error = {0};
    unsigned char *copy = malloc(row->bytes + 1);
    assert_non_null(copy);
    memcpy(copy, row->model, row->bytes);
    int code = sentencepiece_check(&model, copy, row->bytes, TINY_VOCAB, &error);
    sp_model_free(&model);
    free(copy);
    if (!row->message) {
        if (code) fail_msg("refused: %s", error.text);
        return;
    }
    if (code != EXIT_BAD_FILE || !strstr(error.text, row->message))
        print_error("expected \"%s\", found %d \"%s\"\n", row->message, code, error.text);
    assert_int_equal(code, EXIT_BAD_FILE);
    assert_non_null(strstr(error.text, row->message));
}

static void test_accepted(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof accepted_models / sizeof accepted_models[0]; i++)
        check_model(&accepted_models[i]);
}

static void test_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refused_models / sizeof refused_models[0]; i++)
        check_model(&refused_models[i]);
}

/* Every prefix of a good model is refused or, where it ends between two fields, a model itself. */
static void test_every_truncation(void **state) {
    (void)state;
    static const char model[] = UNK A BPE "\x1a\x02\x20\x00";
    int accepted = 0;
    for (size_t bytes = 0; bytes < sizeof model; bytes++) {
        struct sp_model parsed;
        struct error error = {0};
        unsigned char *copy = malloc(bytes + 1);
        assert_non_null(copy);
        memcpy(copy, model, bytes);
        int code = sentencepiece_check(&parsed, copy, bytes, TINY_VOCAB, &error);
        assert_true(code == 0 || code == EXIT_BAD_FILE);
        accepted += code == 0;
        sp_model_free(&parsed);
        free(copy);
    }
    assert_int_equal(accepted, 2);
}

static int check(const struct section_bytes *model, int vocab) {
    struct sp_model parsed;
    struct error error = {0};
    int code = sentencepiece_check(&parsed, model->data, model->count, vocab, &error);
    sp_model_free(&parsed);
    return code;
}

static void test_limits(void **state) {
    (void)state;
    struct section_bytes model;
    tiny_sp_model(&model, 1);
    assert_int_equal(check(&model, TINY_SP_PIECES), 0);
    assert_int_equal(check(&model, TINY_SP_PIECES - 1), EXIT_BAD_FILE);

    for (size_t bytes = 255; bytes <= 256; bytes++) {
        char text[256];
        memset(text, 'x', sizeof text);
        model.count = 0;
        put(&model, MODEL(UNK BPE "\x0a"));
        unsigned char lengths[] = {(unsigned char)((bytes + 3) & 0x7f) | 0x80, 2, 0x0a,
                                   (unsigned char)(bytes & 0x7f) | 0x80,
                                   (unsigned char)(bytes >> 7)};
        put(&model, lengths, sizeof lengths);
        put(&model, text, bytes);
        assert_int_equal(check(&model, TINY_VOCAB), bytes == 255 ? 0 : EXIT_BAD_FILE);
    }
    for (size_t nested = 64; nested <= 65; nested++) {
        tiny_sp_model(&model, 1);
        for (size_t bytes = 1; bytes <= nested; bytes++) {
            char text[66] = {0};
            memset(text, 'x', bytes);
            put_piece(&model, text, 0, SP_USER_DEFINED);
            text[0] = 'y'; /* in between, and of no harm */
            put_piece(&model, text, 0, SP_NORMAL);
        }
        assert_int_equal(check(&model, 1000), nested == 64 ? 0 : EXIT_BAD_FILE);
    }
}

/* ---- encoding ---- */

static struct tokenizer *open_sp(int dummy_prefix) {
    struct section_bytes model, section;
    tiny_sp_model(&model, dummy_prefix);
    sp_section(&section, model.data, model.count);
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    int code = tokenizer_open(&tokenizer, section.data, section.count, TINY_VOCAB, &error);
    if (code) fail_msg("not opened: %s", error.text);
    return tokenizer;
}

enum { BYTE = SP_BYTES }; /* BYTE + b is the id of byte b */

static void test_encoding(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t bytes;
        bool prefix, special;
        int32_t ids[12];
    } rows[] = {
#define TEXT(literal) (literal), sizeof(literal) - 1
        {TEXT(""), true, false, {END}},
        {TEXT("a"), true, false, {SP_SPACE_A, END}},
        {TEXT("a"), false, false, {SP_A, END}},
        {TEXT("ab ab"), true, false, {SP_SPACE_AB, SP_SPACE_AB, END}},
        {TEXT("  a "), true, false, {SP_SPACE, SP_SPACE, SP_SPACE_A, SP_SPACE, END}},
        {TEXT("c"), true, false, {SP_SPACE, BYTE + 'c', END}},
        {TEXT("\0"), true, false, {SP_SPACE, BYTE, END}},
        {TEXT("a\0b"), true, false, {SP_SPACE_A, BYTE, SP_B, END}},
        {TEXT("\xc3\xa9"), false, false, {BYTE + 0xc3, BYTE + 0xa9, END}},
        /* Broken UTF-8: byte by byte, and no space after it. */
        {TEXT("a\xff"
              "ab"),
         true,
         false,
         {SP_SPACE_A, BYTE + 0xff, SP_AB, END}},
        {TEXT("\xff"
              "ab"),
         true,
         false,
         {BYTE + 0xff, SP_AB, END}},
        {TEXT("a\xe2\x82"), true, false, {SP_SPACE_A, BYTE + 0xe2, BYTE + 0x82, END}},
        {TEXT("\xed\xa0\x80"), true, false, {BYTE + 0xed, BYTE + 0xa0, BYTE + 0x80, END}},
        {TEXT("\xef\xbf\xbd"), false, false, {BYTE + 0xef, BYTE + 0xbf, BYTE + 0xbd, END}},
        /* Added tokens: the space comes once, at the start of the text. */
        {TEXT("a<p>ab"), true, false, {SP_SPACE_A, PLAIN, SP_AB, END}},
        {TEXT("<p>ab<p>ab"), true, false, {PLAIN, SP_AB, PLAIN, SP_AB, END}},
        {TEXT("<p>ab"), true, false, {PLAIN, SP_AB, END}},
        {TEXT("<s>a"), true, true, {START, SP_A, END}},
        {TEXT("<s>"), false, false, {BYTE + '<', BYTE + 's', BYTE + '>', END}},
        /* The model's own control pieces never match, its user-defined ones always. */
        {TEXT("</e>"), false, true, {BYTE + '<', BYTE + '/', BYTE + 'e', BYTE + '>', END}},
        {TEXT("a<user>a"), true, false, {SP_SPACE_A, SP_USER, SP_A, END}},
#undef TEXT
    };
    struct tokenizer *tokenizer[2] = {open_sp(0), open_sp(1)};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct ids ids = {0};
        struct error error = {0};
        assert_int_equal(tokenizer_encode(tokenizer[rows[i].prefix], rows[i].text, rows[i].bytes,
                                          rows[i].special, &ids, &error),
                         0);
        size_t count = 0;
        while (rows[i].ids[count] != END) count++;
        if (ids.count != count) print_error("row %zu: %zu ids\n", i, ids.count);
        assert_int_equal(ids.count, count);
        if (count > 0) assert_memory_equal(ids.id, rows[i].ids, count * sizeof *ids.id);
        free(ids.id);
    }
    tokenizer_close(tokenizer[0]);
    tokenizer_close(tokenizer[1]);
}

/* Without byte pieces, what the model cannot spell is its unknown piece. */
static void test_no_byte_pieces(void **state) {
    (void)state;
    struct section_bytes section;
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    struct ids ids = {0};
    sp_section(&section, MODEL(UNK A BPE "\x1a\x04\x18\x00\x20\x00"));
    assert_int_equal(tokenizer_open(&tokenizer, section.data, section.count, TINY_VOCAB, &error),
                     0);
    assert_int_equal(tokenizer_encode(tokenizer,
                                      "a\xff"
                                      "ca",
                                      4, false, &ids, &error),
                     0);
    assert_int_equal(ids.count, 4);
    assert_memory_equal(ids.id, ((int32_t[]){1, 0, 0, 1}), 4 * sizeof *ids.id);
    free(ids.id);
    size_t bytes = 0;
    assert_memory_equal(tokenizer_piece(tokenizer, 0, &bytes), " \xe2\x81\x87 ", 5);
    assert_int_equal(bytes, 5);
    tokenizer_close(tokenizer);
}

/* The section around the model. */
static void test_section_refusals(void **state) {
    (void)state;
    static const struct {
        size_t at;
        unsigned char value;
        const char *message;
    } rows[] = {
        {0, 1, "pattern 0"},
        {4, 1, "pattern 1"},
        {8, 1, "flags 0x1"},
        {8, 2, "flags 0x2"},
        {12, 1, "1 pieces"},
        {27, 0x7f, "ends inside the sentencepiece model"},
        {31, 0x80, "ends inside the sentencepiece model"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct section_bytes section;
        struct tokenizer *tokenizer = NULL;
        struct error error = {0};
        sp_section(&section, MODEL(UNK A BPE));
        section.data[rows[i].at] = rows[i].value;
        int code = tokenizer_open(&tokenizer, section.data, section.count, TINY_VOCAB, &error);
        if (!strstr(error.text, rows[i].message)) print_error("found \"%s\"\n", error.text);
        assert_int_equal(code, EXIT_BAD_FILE);
        assert_non_null(strstr(error.text, rows[i].message));
    }
    struct section_bytes section;
    struct tokenizer *tokenizer = NULL;
    struct error error = {0};
    sp_section(&section, "", 0);
    assert_int_equal(tokenizer_open(&tokenizer, section.data, section.count, TINY_VOCAB, &error),
                     EXIT_BAD_FILE);
}

static void test_dummy_prefix(void **state) {
    (void)state;
    static const struct {
        const char *model;
        size_t bytes;
        bool prefix;
    } rows[] = {
        {MODEL(UNK A BPE), true}, /* by default */
        {MODEL(UNK A BPE "\x1a\x00"), true},
        {MODEL(UNK A BPE "\x1a\x02\x18\x00"), false},
        {MODEL(UNK A BPE "\x1a\x02\x18\x01"), true},
        {MODEL(UNK A BPE "\x1a\x04\x18\x00\x18\x01"), true},
        {MODEL(UNK A BPE "\x1a\x02\x18\x00\x1a\x02\x20\x00"), false},
        {MODEL(UNK A BPE "\x2a\x02\x18\x00"), true}, /* of the denormalizer */
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct sp_model parsed;
        struct error error = {0};
        assert_int_equal(sentencepiece_check(&parsed, (const unsigned char *)rows[i].model,
                                             rows[i].bytes, TINY_VOCAB, &error),
                         0);
        assert_int_equal(parsed.dummy_prefix, rows[i].prefix);
        sp_model_free(&parsed);
    }
}

/* What the check lets pass and the library refuses is one line too. */
static void test_refused_by_the_library(void **state) {
    (void)state;
    static const struct model_row rows[] = {
        {MODEL(UNK A A BPE), "already defined"},
        {MODEL(UNK A BPE "\x0a\x0a\x0a\x06<0x41>\x18\x06"), "byte_fallback"},
        {MODEL(UNK A BPE "\x12\x03\x98\x02\x01"), "256 byte pieces"},
        {MODEL(UNK A BPE "\x22\x02\x0a\x01"), "sentencepiece refuses"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct section_bytes section;
        struct tokenizer *tokenizer = NULL;
        struct error error = {0};
        sp_section(&section, rows[i].model, rows[i].bytes);
        assert_int_equal(
            tokenizer_open(&tokenizer, section.data, section.count, TINY_VOCAB, &error),
            EXIT_BAD_FILE);
        assert_null(tokenizer);
        if (!strstr(error.text, rows[i].message)) print_error("found \"%s\"\n", error.text);
        assert_non_null(strstr(error.text, rows[i].message));
    }
}

static void test_names(void **state) {
    (void)state;
    static const struct {
        int32_t id;
        const char *name, *piece;
    } rows[] = {
        {SP_UNK, "<unknown>", " \xe2\x81\x87 "},
        {SP_S, "<s>", ""},
        {SP_END, "</e>", ""},
        {BYTE + 'A', "<0x41>", "A"},
        {BYTE + 0xff, "<0xFF>", "\xff"},
        {SP_SPACE, WORD_START, " "},
        {SP_SPACE_AB, WORD_START "ab", " ab"},
        {SP_USER, "<user>", "<user>"},
        {START, "<s>", ""},
        {PLAIN, "<p>", "<p>"},
        {TINY_SP_PIECES, "", ""},
    };
    struct tokenizer *tokenizer = open_sp(1);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t bytes = 99;
        const char *text = tokenizer_name(tokenizer, rows[i].id, &bytes);
        assert_int_equal(bytes, strlen(rows[i].name));
        assert_memory_equal(text, rows[i].name, bytes);
        text = tokenizer_piece(tokenizer, rows[i].id, &bytes);
        assert_int_equal(bytes, strlen(rows[i].piece));
        assert_memory_equal(text, rows[i].piece, bytes);
    }
    char text[128];
    tokenizer_describe(tokenizer, text, sizeof text);
    assert_string_equal(text, "sentencepiece, 266 pieces, 10 added");
    tokenizer_close(tokenizer);
}

/* The space before a text is dropped, once, and only where the model puts one. */
static void test_first_space(void **state) {
    (void)state;
    static const struct {
        bool prefix, started;
        int32_t ids[5];
        const char *text;
    } rows[] = {
        {true, false, {SP_SPACE_AB, SP_SPACE_A, END}, "ab a"},
        {true, false, {SP_S, SP_SPACE_AB, END}, "ab"},
        {true, false, {SP_SPACE, SP_SPACE_A, END}, " a"},
        {true, false, {SP_A, SP_SPACE_A, END}, "a a"},
        {true, false, {BYTE + 0xff, SP_SPACE_A, END}, "\xff a"},
        {true, false, {BYTE + ' ', SP_A, END}, " a"},
        {true, true, {SP_SPACE_AB, END}, " ab"},
        {false, false, {SP_SPACE_AB, END}, " ab"},
    };
    struct tokenizer *tokenizer[2] = {open_sp(0), open_sp(1)};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct decoder decoder = {.started = rows[i].started};
        char found[8 * DECODER_ROOM];
        size_t used = 0;
        for (const int32_t *id = rows[i].ids; *id != END; id++)
            used += decoder_next(&decoder, tokenizer[rows[i].prefix], *id, found + used);
        used += decoder_end(&decoder, found + used);
        assert_int_equal(used, strlen(rows[i].text));
        assert_memory_equal(found, rows[i].text, used);
    }
    tokenizer_close(tokenizer[0]);
    tokenizer_close(tokenizer[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_section_refusals),
        cmocka_unit_test(test_dummy_prefix),
        cmocka_unit_test(test_encoding),
        cmocka_unit_test(test_no_byte_pieces),
        cmocka_unit_test(test_refused_by_the_library),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_first_space),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
