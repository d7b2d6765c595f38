/* model/: the reader against every kind of broken file. */
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
        {176, 1, "experts"},
        {128, 2, "qk_norm"},
    };
    struct tiny t = tiny_make();
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        struct config config;
        struct error error = {0};
        unsigned char copy[1024];
        memcpy(copy, t.data + 64, sizeof copy);
        put_u32(copy + flags[i].offset, flags[i].value);
        if (flags[i].offset == 176) put_u32(copy + 180, 1); /* of which one is used */
        if (flags[i].offset == 128) put_u32(copy + 116, 1); /* and biases before that norm */
        assert_int_equal(config_read(&config, copy, sizeof copy, &error), 0);
        assert_int_equal(config_supported(&config, &error), EXIT_BAD_FILE);
        assert_non_null(strstr(error.text, flags[i].name));
    }
    free(t.data);
}

static bool listed(const char *name, const struct tensor *tensors, int count) {
    for (int i = 0; i < count; i++)
        if (!strcmp(tensors[i].name, name)) return true;
    return false;
}

/* Each flag of the config has tensors of its own; the table of RoPE is no parameter. */
static void test_flags_and_their_tensors(void **state) {
    (void)state;
    enum { MOST = 64 };
    static const struct {
        size_t offset;
        uint32_t value;
        const char *names[3]; /* of the first layer */
        int tensors, parameters;
    } flags[] = {
        {104,
         1,
         {"norm_attention_bias", "norm_ffn_bias"},
         2 * TINY_L + 1,
         (2 * TINY_L + 1) * TINY_C},
        {120, 1, {"out_bias"}, TINY_L, TINY_L * TINY_C},
        {124, 1, {"gate_up_bias", "down_bias"}, 2 * TINY_L, TINY_L * (2 * TINY_F + TINY_C)},
        {132, 0, {NULL}, 0, -TINY_L * TINY_F * TINY_C},
        {140, 1, {NULL}, 1, 64 * TINY_C},
    };
    struct tiny t = tiny_make();
    struct error error = {0};
    uint64_t before = 0, bytes = 0;
    int tensors_before = 0;
    for (size_t i = 0; i <= sizeof flags / sizeof *flags; i++) {
        struct config config;
        struct tensor tensors[MOST];
        unsigned char copy[1024];
        memcpy(copy, t.data + 64, sizeof copy);
        if (i > 0) put_u32(copy + flags[i - 1].offset, flags[i - 1].value);
        assert_int_equal(config_read(&config, copy, sizeof copy, &error), 0);
        assert_int_equal(config_supported(&config, &error), 0);
        const int count = config_tensors(&config, tensors, &bytes);
        const uint64_t parameters = config_parameters(&config);
        if (i == 0) {
            before = parameters, tensors_before = count;
            assert_int_equal(before, (TINY_V + 1 + 2 * TINY_L) * TINY_C +
                                         TINY_L * TINY_C * (2 * TINY_H + 2 * TINY_G) * TINY_D +
                                         TINY_L * 3 * TINY_F * TINY_C);
            continue;
        }
        assert_int_equal(count, tensors_before + flags[i - 1].tensors);
        assert_int_equal(parameters, before + (uint64_t)(int64_t)flags[i - 1].parameters);
        for (int n = 0; n < 3 && flags[i - 1].names[n]; n++) {
            char name[64];
            snprintf(name, sizeof name, "layers.0.%s", flags[i - 1].names[n]);
            assert_true(listed(name, tensors, count));
        }
    }
    free(t.data);
}

/* A context up to which RoPE tables serve, where there are none. */
static void test_rope_original_without_tables(void **state) {
    (void)state;
    struct tiny t = tiny_make();
    struct config config;
    struct error error = {0};
    put_u32(t.data + 64 + 144, 0);
    put_u32(t.data + 64 + 148, 0);
    put_u32(t.data + 64 + 280, 4096);
    assert_int_equal(config_read(&config, t.data + 64, 1024, &error), EXIT_BAD_FILE);
    assert_non_null(strstr(error.text, "rope_original is 4096, but rope_tables is 0"));
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_file),
        cmocka_unit_test(test_every_truncation),
        cmocka_unit_test(test_boundary_values),
        cmocka_unit_test(test_every_bit_of_the_head),
        cmocka_unit_test(test_check_finds_bits),
        cmocka_unit_test(test_check_finds_infinity),
        cmocka_unit_test(test_flags_refused_by_name),
        cmocka_unit_test(test_flags_and_their_tensors),
        cmocka_unit_test(test_rope_original_without_tables),
        cmocka_unit_test(test_not_a_file),
    };
    descriptor = memfd_create("model.bin", 0);
    if (descriptor < 0) return 1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
