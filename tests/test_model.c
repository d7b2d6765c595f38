/* model/: the reader against every kind of broken file, the plan, the sampler. */
#define _GNU_SOURCE /* memfd_create */
#include "cli/seconds.h"
#include "model/file.h"
#include "model/plan.h"
#include "model/sampler.h"
#include "tests/tiny_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

/* A file in memory: tens of thousands of versions of it are written. */
static int descriptor;
static char path[64];

static void write_file(const void *data, size_t bytes) {
    assert_int_equal(pwrite(descriptor, data, bytes, 0), bytes);
    assert_int_equal(ftruncate(descriptor, (off_t)bytes), 0);
}

/* Opens what was written last, and closes it again. Every refusal is EXIT_BAD_FILE, one line, and
 * takes less than a second. */
static bool opens(void) {
    struct model_file file;
    struct error error = {0};
    double start = seconds();
    int code = model_open(&file, path, &error);
    if (!code) code = config_supported(&file.config, &error);
    assert_true(seconds() - start < 1);
    model_close(&file);
    if (!code) return true;
    assert_int_equal(code, EXIT_BAD_FILE);
    assert_true(strlen(error.text) > 10 && !strchr(error.text, '\n'));
    return false;
}

static void test_whole_file(void **state) {
    (void)state;
    struct tiny t = tiny_make();
    write_file(t.data, t.bytes);
    struct model_file file;
    struct error error = {0};
    assert_int_equal(model_open(&file, path, &error), 0);
    assert_int_equal(config_supported(&file.config, &error), 0);
    assert_int_equal(file.tensor_count, t.tensors);
    assert_int_equal(file.config.ffn, TINY_F);
    assert_int_equal(file.config.bos, 256);
    assert_int_equal(model_check(&file, &error), 0);
    float value = 0;
    assert_int_equal(model_read(&file, &value, file.tensors[1].offset, 4, &error), 0);
    assert_memory_equal(&value, t.data + t.head_bytes + file.tensors[1].offset, 4);
    model_close(&file);
    free(t.data);
}

static void test_every_truncation(void **state) {
    (void)state;
    struct tiny t = tiny_make();
    for (size_t bytes = 0; bytes < t.head_bytes + 512; bytes++) {
        write_file(t.data, bytes);
        assert_false(opens());
        /* The same cut with a header that agrees with the length: other checks must see it. */
        if (bytes < 64) continue;
        struct tiny cut = {malloc(bytes), bytes, bytes < t.head_bytes ? bytes : t.head_bytes, 0, 0};
        assert_non_null(cut.data);
        memcpy(cut.data, t.data, bytes);
        put_u64(cut.data + 16, bytes);
        put_u64(cut.data + 24, cut.head_bytes);
        tiny_seal(&cut);
        write_file(cut.data, bytes);
        assert_false(opens());
        free(cut.data);
    }
    for (size_t extra = 1; extra < 600; extra++) {
        write_file(t.data, t.bytes + extra);
        assert_false(opens());
    }
    free(t.data);
}

/* 24 values at the edges of every field, of 4 and of 8 bytes, in header, config, layers, tokenizer
 * and table. With the old checksum all are refused; with a new one what is left are legal values.
 */
static void test_boundary_values(void **state) {
    (void)state;
    static const uint64_t values[24] = {0,
                                        1,
                                        2,
                                        3,
                                        7,
                                        8,
                                        9,
                                        127,
                                        128,
                                        255,
                                        256,
                                        257,
                                        65535,
                                        65536,
                                        65537,
                                        0x7fffffff,
                                        0x80000000,
                                        0xfffffffe,
                                        0xffffffff,
                                        0x7fc00000,
                                        0x7f800000,
                                        0x7fffffffffffffff,
                                        0x8000000000000000,
                                        0xffffffffffffffff};
    struct tiny t = tiny_make();
    unsigned char *original = malloc(t.bytes);
    assert_non_null(original);
    memcpy(original, t.data, t.bytes);
    int legal = 0, changed = 0;
    for (size_t at = 0; at < t.head_bytes;
         at += at < 512 + 16 * TINY_L + 64 || at >= t.table_at ? 4 : 64)
        for (size_t v = 0; v < 24; v++)
            for (size_t width = 4; width <= 8; width += 4) {
                memcpy(t.data, original, t.head_bytes);
                if (width == 4) put_u32(t.data + at, (uint32_t)values[v]);
                if (width == 8 && at + 8 <= t.head_bytes) put_u64(t.data + at, values[v]);
                if (memcmp(t.data, original, t.head_bytes) == 0) continue;
                changed++;
                write_file(t.data, t.bytes);
                assert_false(opens());
                tiny_seal(&t);
                if (memcmp(t.data, original, t.head_bytes) == 0) continue; /* the checksum itself */
                write_file(t.data, t.bytes);
                legal += opens();
            }
    print_message("[          ] %d changed heads, %d of them legal\n", changed, legal);
    assert_true(changed > 10000);
    free(original);
    free(t.data);
}

static void test_every_bit_of_the_head(void **state) {
    (void)state;
    struct tiny t = tiny_make();
    for (size_t bit = 0; bit < 8 * t.head_bytes; bit++) {
        t.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        write_file(t.data, t.bytes);
        assert_false(opens());
        t.data[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    free(t.data);
}

static int check_written(struct error *error) {
    struct model_file file;
    assert_int_equal(model_open(&file, path, error), 0);
    int code = model_check(&file, error);
    model_close(&file);
    return code;
}

/* --check finds a flipped bit wherever it is, in a tensor or between two. */
static void test_check_finds_bits(void **state) {
    (void)state;
    struct tiny t = tiny_make();
    struct error error = {0};
    for (size_t at = t.head_bytes; at < t.bytes; at += 41) {
        t.data[at] ^= (unsigned char)(1 << at % 8);
        write_file(t.data, t.bytes);
        assert_int_equal(check_written(&error), EXIT_BAD_FILE);
        t.data[at] ^= (unsigned char)(1 << at % 8);
    }
    free(t.data);
}

static void test_check_finds_infinity(void **state) {
    (void)state;
    struct tiny t = tiny_make();
    struct error error = {0};
    unsigned char *entry = t.data + t.table_at + 128; /* embed: its checksum is made right */
    size_t at = t.head_bytes + 256, bytes = 4 * TINY_V * TINY_C;
    put_u32(t.data + at + 40, 0x7f800000);
    put_u64(entry + 120, XXH64(t.data + at, bytes, 0));
    tiny_seal(&t);
    write_file(t.data, t.bytes);
    assert_int_equal(check_written(&error), EXIT_BAD_FILE);
    assert_non_null(strstr(error.text, "element 10 of tensor embed is not finite"));
    free(t.data);
}

/* Each flag that no backend implements is refused, and the message names it. */
static void test_flags_refused_by_name(void **state) {
    (void)state;
    static const struct {
        size_t offset;
        uint32_t value;
        const char *name;
    } flags[] = {
        {104, 1, "LayerNorm"},       {108, 1, "norm_placement"}, {108, 2, "norm_placement"},
        {116, 1, "qkv_bias"},        {120, 1, "out_bias"},       {124, 1, "ffn_bias"},
        {128, 1, "qk_norm"},         {128, 2, "qk_norm"},        {132, 0, "gated"},
        {136, 1, "activation"},      {140, 1, "learned"},        {144, 4, "rotary_dims"},
        {160, 0x41200000, "scores"}, {164, 0x41200000, "logits"}};
    struct tiny t = tiny_make();
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        struct config config;
        struct error error = {0};
        unsigned char copy[1024];
        memcpy(copy, t.data + 64, sizeof copy);
        put_u32(copy + flags[i].offset, flags[i].value);
        assert_int_equal(config_read(&config, copy, sizeof copy, &error), 0);
        assert_int_equal(config_supported(&config, &error), EXIT_BAD_FILE);
        assert_non_null(strstr(error.text, flags[i].name));
    }
    free(t.data);
}

static void test_not_a_file(void **state) {
    (void)state;
    static const char *const paths[] = {"/", "/dev/null", "/dev/zero", "/nonexistent/model.bin"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        struct model_file file;
        struct error error = {0};
        assert_int_equal(model_open(&file, paths[i], &error), EXIT_BAD_FILE);
        assert_non_null(strstr(error.text, paths[i]));
    }
}

/* ---- the plan ---- */

static struct config plan_config(void) {
    return (struct config){.width = 576,
                           .layers = 30,
                           .heads = 9,
                           .kv_heads = 3,
                           .head_dim = 64,
                           .ffn = 1536,
                           .vocab = 49152,
                           .context = 8192,
                           .rotary_dims = 64,
                           .rope_tables = 1};
}

static void test_plan_regions(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    struct limits limits = {1001, 512, 2, 3, 2, false};
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
    assert_int_equal(plan.region[REGION_KEYS].bytes, 4UL * 30 * 2 * 3 * 1008 * 64);
    assert_int_equal(plan.region[REGION_VALUES].bytes, 4UL * 30 * 2 * 3 * 1001 * 64);
    assert_int_equal(plan.region[REGION_LOGITS].bytes, 4UL * 3 * 49152);
    for (int r = 0; r + 1 < REGIONS; r++) {
        assert_int_equal(plan.region[r].offset % PLAN_ALIGN, 0);
        assert_true(plan.region[r].offset + plan.region[r].bytes <= plan.region[r + 1].offset);
    }
    assert_true(plan.region[REGIONS - 1].offset + plan.region[REGIONS - 1].bytes <= plan.bytes);
}

/* What a plan for a GPU holds: the cache in the weights' dtype, no CPU buffers. */
static void test_plan_for_a_device(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    struct limits limits = {1001, 512, 2, 3, 2, true};
    for (enum dtype m = F32; m <= BF16; m++) {
        c.weight_dtype = m;
        assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
        assert_int_equal(plan.region[REGION_KEYS].bytes, dtype_size(m) * 30 * 2 * 3 * 1001 * 64);
        assert_int_equal(plan.region[REGION_VALUES].bytes, plan.region[REGION_KEYS].bytes);
        assert_int_equal(plan.region[REGION_Q].bytes, dtype_size(m) * 512 * 9 * 64);
        assert_int_equal(plan.region[REGION_THREADS].bytes, 0);
        for (int r = 0; r + 1 < REGIONS; r++)
            assert_true(plan.region[r].offset + plan.region[r].bytes <= plan.region[r + 1].offset);
    }
}

static void test_plan_largest_context(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    struct limits limits = {8192, 512, 1, 1, 2, false};
    for (int context = 1; context <= 8192; context += 511) {
        limits.context = context;
        assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
        limits.context = 8192;
        int fits = plan_largest_context(&c, 1 << 20, limits, plan.bytes);
        assert_true(fits >= context && fits < context + 16);
    }
    assert_int_equal(plan_largest_context(&c, 1 << 20, limits, 1 << 20), 0);
}

/* The rows of this model take 20 KB each on a device; with a feed-forward 32 times as wide 210 KB, so
 * that 4096 of them fit into 1 GiB. */
static void test_plan_chunk(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    struct limits limits = {8192, 0, 1, 1, 2, false};
    assert_int_equal(plan_chunk(&c, 1 << 20, limits, SIZE_MAX), 512);
    limits.device = true;
    const int most = plan_chunk(&c, 1 << 20, limits, SIZE_MAX);
    for (int chunk = most; chunk >= 512; chunk /= 2) {
        limits.chunk = chunk;
        assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
        assert_int_equal(plan_chunk(&c, 1 << 20, limits, plan.bytes), chunk);
    }
    assert_int_equal(plan_chunk(&c, 1 << 20, limits, 0), 512); /* allocate says what is missing */
    c.ffn *= 32;
    const int fewer = plan_chunk(&c, 1 << 20, limits, SIZE_MAX);
    assert_int_equal(most, 8192);
    assert_int_equal(fewer, 4096);
    limits.chunk = 2 * fewer;
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
    const size_t too_much = plan.bytes;
    limits.chunk = 1;
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
    assert_true(too_much - plan.bytes > (size_t)1 << 30);
}

static void test_plan_too_large(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    c.layers = c.heads = c.kv_heads = 1024;
    c.head_dim = 512;
    struct limits limits = {1 << 22, 65536, 1024, 1, 1024, false};
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), EXIT_MEMORY);
}

/* ---- the sampler ---- */

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
        cmocka_unit_test(test_whole_file),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_boundary_values),
        cmocka_unit_test(test_every_bit_of_the_head),
        cmocka_unit_test(test_check_finds_bits),
        cmocka_unit_test(test_check_finds_infinity),
        cmocka_unit_test(test_flags_refused_by_name),
        cmocka_unit_test(test_not_a_file),
        cmocka_unit_test(test_plan_regions),
        cmocka_unit_test(test_plan_for_a_device),
        cmocka_unit_test(test_plan_largest_context),
        cmocka_unit_test(test_plan_chunk),
        cmocka_unit_test(test_plan_too_large),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_logits_that_are_no_numbers),
        cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_top_k_is_a_sort),
        cmocka_unit_test(test_penalty),
        cmocka_unit_test(test_seed),
    };
    descriptor = memfd_create("model.bin", 0);
    if (descriptor < 0) return 1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
