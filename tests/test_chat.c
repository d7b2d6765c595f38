/* Conversations that are refused, what was said that looks like control tokens, and the parts of a
 * text; that each shape is its model's is in test_chat.py. */
#include "tests/tokenizer_section.h"
#include "tokenizer/chat.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>

#include <cmocka.h>

enum { ENDS = -1 }; /* a list of ids */

static struct tokenizer *open_bpe(void) {
    struct section_bytes section;
    tiny_bpe(&section, 1, 0);
    return open_section(&section);
}

static struct tokenizer *open_sentencepiece(int dummy_prefix) {
    struct section_bytes model, section;
    tiny_sp_model(&model, dummy_prefix);
    sp_section(&section, model.data, model.count);
    return open_section(&section);
}

static void expect(const struct ids *ids, const int32_t *expected) {
    size_t count = 0;
    while (expected[count] != ENDS) count++;
    bool equal = ids->count == count;
    for (size_t i = 0; equal && i < count; i++) equal = ids->id[i] == expected[i];
    for (size_t i = 0; !equal && i < ids->count; i++) print_error(" %d", ids->id[i]);
    assert_true(equal);
}

/* ---- a text of parts ---- */

static void expect_parts(struct tokenizer *tokenizer, const char *text,
                         const struct text_part *part, int parts, const int32_t *expected) {
    struct ids ids = {0};
    struct error error;
    assert_int_equal(tokenizer_encode_parts(tokenizer, text, part, parts, &ids, &error), 0);
    expect(&ids, expected);
    free(ids.id);
}

static void test_control_tokens_in_trusted_parts_only(void **state) {
    (void)state;
    struct tokenizer *t = open_bpe();
    const struct text_part plain_then[] = {{3, false}, {6, true}};
    expect_parts(t, "<s><s>", plain_then, 2, (int32_t[]){'<', 's', '>', START, ENDS});
    const struct text_part then_plain[] = {{3, true}, {6, false}};
    expect_parts(t, "<s><s>", then_plain, 2, (int32_t[]){START, '<', 's', '>', ENDS});
    /* A token across the end of a part, and one of which only the start is trusted. */
    const struct text_part across[] = {{2, true}, {6, false}};
    expect_parts(t, "<s><s>", across, 2, (int32_t[]){'<', 's', '>', '<', 's', '>', ENDS});
    const struct text_part starting[] = {{3, true}, {9, false}};
    expect_parts(t, "<s>tarting", starting, 2,
                 (int32_t[]){START, 't', 'a', 'r', 't', 'i', 'n', ENDS});
    const struct text_part whole[] = {{10, true}};
    expect_parts(t, "<s>tarting", whole, 1, (int32_t[]){STARTING, ENDS});
    /* Ordinary added tokens are found anywhere, pieces merge across parts. */
    const struct text_part merged[] = {{1, true}, {2, false}, {5, true}};
    expect_parts(t, "ab<p>", merged, 3, (int32_t[]){AB, PLAIN, ENDS});
    expect_parts(t, "ab<p>", (const struct text_part[]){{3, true}, {5, false}}, 2,
                 (int32_t[]){AB, PLAIN, ENDS});
    expect_parts(t, "", NULL, 0, (int32_t[]){ENDS});
    tokenizer_close(t);
}

static void test_space_before_each_stretch(void **state) {
    (void)state;
    const struct text_part all[] = {{9, true}};
    struct tokenizer *t = open_sentencepiece(1);
    expect_parts(t, "a<s> a<s>", all, 1, (int32_t[]){SP_SPACE_A, START, SP_SPACE_A, START, ENDS});
    expect_parts(t, " a<s>a<s>", all, 1, (int32_t[]){SP_SPACE_A, START, SP_SPACE_A, START, ENDS});
    tokenizer_close(t);
    t = open_sentencepiece(0);
    expect_parts(t, "a<s> a<s>", all, 1, (int32_t[]){SP_A, START, SP_SPACE_A, START, ENDS});
    tokenizer_close(t);
}

/* ---- conversations ---- */

static struct chat_message said(enum chat_role role, const char *text) {
    return (struct chat_message){role, text, strlen(text)};
}

static void expect_refusal(struct tokenizer *tokenizer, enum chat_shape shape, const char *roles,
                           const char *message) {
    struct chat_message messages[8];
    int count = 0;
    for (; roles[count]; count++)
        messages[count] = said(roles[count] == 's'   ? CHAT_SYSTEM
                               : roles[count] == 'u' ? CHAT_USER
                                                     : CHAT_ASSISTANT,
                               "x");
    struct ids ids = {0};
    struct error error = {0};
    int code = chat_encode(tokenizer, shape, NO_ID, messages, count, &ids, &error);
    if (message) {
        assert_int_equal(code, EXIT_USAGE);
        assert_non_null(strstr(error.text, message));
        assert_int_equal(ids.count, 0);
    } else {
        assert_int_equal(code, 0);
    }
    free(ids.id);
}

static void test_roles(void **state) {
    (void)state;
    struct tokenizer *t = open_sentencepiece(1);
    static const char *const good[] = {"u", "su", "uau", "suau", "suauau"};
    static const char *const bad[] = {"",   "s",   "a",    "ua",   "uu",  "au",
                                      "sa", "sua", "ussu", "usau", "ssu", "uaua"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        expect_refusal(t, CHAT_ZEPHYR, good[i], NULL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_refusal(t, CHAT_ZEPHYR, bad[i], "expected a system message or none, then user");
    expect_refusal(t, CHAT_NONE, "u", "no chat shape");
    expect_refusal(t, CHAT_CHATML, "u", "has no <|im_end|>, which the shape chatml needs");
    expect_refusal(t, CHAT_LLAMA3_1, "u", "has no <|eot_id|>, which the shape llama3_1 needs");
    tokenizer_close(t);
}

/* Of a model without bytes for it, any text is one id: <|im_end|> would be, and would end answers. */
static void test_what_is_unknown_is_no_mark(void **state) {
    (void)state;
    struct section_bytes model = {.count = 0}, section;
    put_piece(&model, "<unknown>", 0, 2);
    put_piece(&model, "a", 0, 1);
    put(&model, "\x12\x02\x18\x02", 4);         /* trainer_spec: BPE, no byte_fallback */
    put(&model, "\x1a\x04\x18\x00\x20\x00", 6); /* normalizer_spec: no prefix */
    sp_section(&section, model.data, model.count);
    struct tokenizer *t = open_section(&section);
    struct ids ids = {0};
    struct error error;
    assert_int_equal(tokenizer_encode(t, "<|im_end|>", 10, true, &ids, &error), 0);
    expect(&ids, (int32_t[]){SP_UNK, ENDS});
    free(ids.id);
    expect_refusal(t, CHAT_CHATML, "u", "has no <|im_end|>, which the shape chatml needs");
    expect_refusal(t, CHAT_MISTRAL_V3, "u", NULL);
    expect_refusal(t, CHAT_MISTRAL_V7, "u", "has no [SYSTEM_PROMPT], which the shape mistral_v7");
    tokenizer_close(t);
}

static void test_every_turn_of_llama2_has_bos(void **state) {
    (void)state;
    struct tokenizer *t = open_sentencepiece(1);
    struct chat_message messages[] = {said(CHAT_SYSTEM, " b "), said(CHAT_USER, " </s>a "),
                                      said(CHAT_ASSISTANT, "<s>"), said(CHAT_USER, "a")};
    for (int with_bos = 0; with_bos < 2; with_bos++) {
        struct ids ids = {0};
        struct error error;
        assert_int_equal(
            chat_encode(t, CHAT_LLAMA2, with_bos ? START : NO_ID, messages, 4, &ids, &error), 0);
        int bos = 0, end = 0;
        for (size_t i = 0; i < ids.count; i++) {
            bos += ids.id[i] == START;
            end += ids.id[i] == FINISH;
        }
        assert_int_equal(bos, 2 * with_bos);
        assert_int_equal(end, 1);
        free(ids.id);
    }
    tokenizer_close(t);
}

static void test_default_system_message(void **state) {
    (void)state;
    struct tokenizer *t = open_sentencepiece(0);
    const struct chat_message own[] = {said(CHAT_SYSTEM, TINY_SYSTEM), said(CHAT_USER, "a")};
    const struct chat_message empty[] = {said(CHAT_SYSTEM, ""), said(CHAT_USER, "a")};
    struct ids by_default = {0}, by_hand = {0}, without = {0};
    struct error error;
    assert_int_equal(chat_encode(t, CHAT_MISTRAL, NO_ID, own + 1, 1, &by_default, &error), 0);
    assert_int_equal(chat_encode(t, CHAT_MISTRAL, NO_ID, own, 2, &by_hand, &error), 0);
    assert_int_equal(chat_encode(t, CHAT_MISTRAL, NO_ID, empty, 2, &without, &error), 0);
    assert_int_equal(by_default.count, by_hand.count);
    assert_memory_equal(by_default.id, by_hand.id, by_hand.count * sizeof *by_hand.id);
    assert_true(without.count < by_hand.count);
    free(by_default.id);
    free(by_hand.id);
    free(without.id);
    tokenizer_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_control_tokens_in_trusted_parts_only),
        cmocka_unit_test(test_space_before_each_stretch),
        cmocka_unit_test(test_roles),
        cmocka_unit_test(test_what_is_unknown_is_no_mark),
        cmocka_unit_test(test_every_turn_of_llama2_has_bos),
        cmocka_unit_test(test_default_system_message),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
