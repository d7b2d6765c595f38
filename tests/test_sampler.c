/* model/sampler: which id is drawn. */
#include "model/config.h"
#include "model/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const struct sampling plain = {1, 0, 1, 0, 1, 64, 7};

static int32_t draw(struct sampling sampling, const float *logits, int vocab, int *code) {
    struct sampler sampler;
    struct error error = {0};
    float copy[512];
    int32_t id = NO_ID;
    memcpy(copy, logits, sizeof *logits * (size_t)vocab);
    assert_int_equal(sampler_open(&sampler, sampling, vocab, &error), 0);
    *code = sampler_draw(&sampler, copy, &id, &error);
    sampler_close(&sampler);
    return id;
}

static void test_greedy(void **state) {
    (void)state;
    const float logits[] = {-3, 5, 2, 5, -INFINITY};
    struct sampling greedy = plain;
    int code = 0;
    greedy.temperature = 0;
    assert_int_equal(draw(greedy, logits, 5, &code), 1); /* the lower id of two equals */
    assert_int_equal(code, 0);
}

static void test_logits_that_are_no_numbers(void **state) {
    (void)state;
    const float bad[][3] = {
        {NAN, 1, 2}, {1, 2, NAN}, {1, INFINITY, 2}, {-INFINITY, -INFINITY, -INFINITY}};
    for (size_t i = 0; i < 4; i++)
        for (int t = 0; t < 2; t++) {
            struct sampling sampling = plain;
            int code = 0;
            sampling.temperature = (float)t;
            draw(sampling, bad[i], 3, &code);
            assert_int_equal(code, EXIT_INTERNAL);
        }
}

/* Frequencies of 40,000 draws against the probabilities of the filtered softmax. */
static void frequencies(struct sampling sampling, const float *logits, int vocab,
                        const double *expected) {
    enum { DRAWS = 40000 };
    struct sampler sampler;
    struct error error = {0};
    int count[16] = {0};
    assert_int_equal(sampler_open(&sampler, sampling, vocab, &error), 0);
    for (int i = 0; i < DRAWS; i++) {
        float copy[16];
        int32_t id = NO_ID;
        memcpy(copy, logits, sizeof *logits * (size_t)vocab);
        assert_int_equal(sampler_draw(&sampler, copy, &id, &error), 0);
        count[id]++;
    }
    sampler_close(&sampler);
    for (int i = 0; i < vocab; i++) {
        double deviation = sqrt(expected[i] * (1 - expected[i]) / DRAWS);
        assert_true(fabs((double)count[i] / DRAWS - expected[i]) <= 5 * deviation);
    }
}

static void test_distribution(void **state) {
    (void)state;
    /* probabilities 0.4, 0.3, 0.2, 0.1, not in order */
    const float logits[] = {logf(0.2F), logf(0.4F), logf(0.1F), logf(0.3F)};
    struct sampling s = plain;
    frequencies(s, logits, 4, (const double[]){0.2, 0.4, 0.1, 0.3});
    s.top_k = 2;
    frequencies(s, logits, 4, (const double[]){0, 4 / 7., 0, 3 / 7.});
    s = plain;
    s.top_p = 0.75F; /* 0.4 + 0.3 < 0.75: the third is needed */
    frequencies(s, logits, 4, (const double[]){2 / 9., 4 / 9., 0, 3 / 9.});
    s = plain;
    s.min_p = 0.6F; /* of 0.4: 0.24 */
    frequencies(s, logits, 4, (const double[]){0, 4 / 7., 0, 3 / 7.});
    s = plain;
    s.temperature = 0.5F; /* squares */
    frequencies(s, logits, 4, (const double[]){4 / 30., 16 / 30., 1 / 30., 9 / 30.});
    s = plain;
    s.temperature = 1e9F;
    frequencies(s, logits, 4, (const double[]){0.25, 0.25, 0.25, 0.25});
    s = plain;
    s.top_p = 0;
    frequencies(s, logits, 4, (const double[]){0, 1, 0, 0});
}

static void test_top_k_is_a_sort(void **state) {
    (void)state;
    float logits[500];
    uint32_t random = 3;
    for (int i = 0; i < 500; i++) {
        random = random * 1664525U + 1013904223U;
        logits[i] = (float)(random >> 28); /* many equals */
    }
    for (int k = 1; k < 500; k += 7) {
        struct sampling s = plain;
        struct sampler sampler;
        struct error error = {0};
        float copy[500];
        int32_t id = NO_ID;
        memcpy(copy, logits, sizeof copy);
        s.top_k = k;
        assert_int_equal(sampler_open(&sampler, s, 500, &error), 0);
        assert_int_equal(sampler_draw(&sampler, copy, &id, &error), 0);
        for (int i = 0; i < k; i++) { /* as many come before candidate i as its rank says */
            int rank = 0;
            for (int j = 0; j < 500; j++) {
                const struct candidate *c = &sampler.candidates[i];
                rank += logits[j] > c->value || (logits[j] == c->value && j < c->id);
            }
            assert_int_equal(rank, i);
        }
        sampler_close(&sampler);
    }
}

static void test_penalty(void **state) {
    (void)state;
    struct sampling s = plain;
    struct sampler sampler;
    struct error error = {0};
    s.temperature = 0;
    s.repeat_penalty = 2;
    s.repeat_last = 3;
    assert_int_equal(sampler_open(&sampler, s, 4, &error), 0);
    const int32_t accepted[] = {0, 1, 1, 1};
    int32_t id = NO_ID;
    for (int i = 0; i < 4; i++) sampler_accept(&sampler, accepted[i]); /* 0 is forgotten */
    float logits[] = {1.5F, 2.8F, -1, 1.4F};
    assert_int_equal(sampler_draw(&sampler, logits, &id, &error), 0);
    assert_int_equal(id, 0);
    assert_true(logits[1] == 1.4F); /* once, however often it occurred */
    float negative[] = {-3, -1.4F, -3, -3};
    assert_int_equal(sampler_draw(&sampler, negative, &id, &error), 0);
    assert_true(negative[1] == -2.8F); /* further down, not up */
    for (int i = 0; i < 100; i++) sampler_accept(&sampler, 2);
    assert_true(sampler.recent_count < 6);
    sampler_close(&sampler);
}

static void test_seed(void **state) {
    (void)state;
    float logits[256] = {0};
    int code = 0, different = 0;
    for (uint64_t seed = 0; seed < 64; seed++) {
        struct sampling s = plain;
        s.seed = seed;
        int32_t once = draw(s, logits, 256, &code), twice = draw(s, logits, 256, &code);
        assert_int_equal(once, twice);
        s.seed++;
        different += draw(s, logits, 256, &code) != once;
    }
    assert_true(different > 55);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),       cmocka_unit_test(test_logits_that_are_no_numbers),
        cmocka_unit_test(test_distribution), cmocka_unit_test(test_top_k_is_a_sort),
        cmocka_unit_test(test_penalty),      cmocka_unit_test(test_seed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
