/* model/plan: every size of a run. */
#include "kernels/ops.h"
#include "model/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static struct config plan_config(void) {
    return (struct config){.width = 576,
                           .layers = 30,
                           .heads = 9,
                           .kv_heads = 3,
                           .head_dim = 64,
                           .ffn = 1536,
                           .vocab = 49152,
                           .context = 8192,
                           .gated = 1,
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
    assert_int_equal(plan.region[REGION_H].bytes, 4UL * 512 * 2 * 1536);
    c.gated = 0;
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
    assert_int_equal(plan.region[REGION_H].bytes, 4UL * 512 * 1536);
    assert_int_equal(plan.region[REGION_QKV].bytes, 4UL * 512 * (9 + 2 * 3) * 64);
    limits.device = true; /* up alone takes the place of q, k and v, before its activation */
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
    assert_int_equal(plan.region[REGION_QKV].bytes, 4UL * 512 * 1536);
    for (int r = 0; r + 1 < REGIONS; r++) {
        assert_int_equal(plan.region[r].offset % PLAN_ALIGN, 0);
        assert_true(plan.region[r].offset + plan.region[r].bytes <= plan.region[r + 1].offset);
    }
    assert_true(plan.region[REGIONS - 1].offset + plan.region[REGIONS - 1].bytes <= plan.bytes);
}

/* What a plan for a GPU holds: the cache in the weights' dtype, whole tiles of rows where products read
 * them, no CPU buffers. */
static void test_plan_for_a_device(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    struct limits limits = {1001, 500, 2, 3, 2, true};
    assert_int_equal(plan_device_rows(&limits), 512);
    for (enum dtype m = F32; m <= BF16; m++) {
        c.weight_dtype = m;
        assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
        assert_int_equal(plan.region[REGION_KEYS].bytes, dtype_size(m) * 30 * 2 * 3 * 1001 * 64);
        assert_int_equal(plan.region[REGION_VALUES].bytes, plan.region[REGION_KEYS].bytes);
        assert_int_equal(plan.region[REGION_Q].bytes, dtype_size(m) * 500 * 9 * 64);
        assert_int_equal(plan.region[REGION_A].bytes, dtype_size(m) * 512 * 9 * 64);
        assert_int_equal(plan.region[REGION_H].bytes, dtype_size(m) * 512 * (size_t)c.ffn);
        assert_int_equal(plan.region[REGION_PANELS].bytes, dtype_size(m) * 512 * (size_t)c.width);
        assert_int_equal(plan.region[REGION_THREADS].bytes, 0);
        for (int r = 0; r + 1 < REGIONS; r++)
            assert_true(plan.region[r].offset + plan.region[r].bytes <= plan.region[r + 1].offset);
    }
}

/* Layers with a window keep a ring: what the rows of a step see together. */
static void test_rings_of_a_device(void **state) {
    (void)state;
    struct config c = plan_config();
    struct plan plan;
    struct error error = {0};
    struct limits limits = {4001, 500, 2, 3, 2, true};
    c.layer[0].window = 1024; /* and 499 rows more: 1523, of tiles 1536 */
    c.layer[1].window = 3900; /* more than the context */
    assert_int_equal(plan_device_ring(&c, &limits, 0), 1536);
    assert_int_equal(plan_device_ring(&c, &limits, 1), 4001);
    assert_int_equal(plan_device_ring(&c, &limits, 2), 4001);
    assert_int_equal(plan_make(&plan, &c, 1 << 20, limits, &error), 0);
    assert_int_equal(plan.region[REGION_KEYS].bytes, 4UL * 2 * 3 * (1536 + 29 * 4001) * 64);
    assert_int_equal(plan.region[REGION_VALUES].bytes, plan.region[REGION_KEYS].bytes);
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

/* What a step's rows add to the rings of windows, 138 KB each in this model, counts as theirs; where the context
 * is short the rings hold all of it, and rows add nothing. */
static void test_chunk_of_a_model_with_windows(void **state) {
    (void)state;
    struct config c = plan_config();
    struct limits limits = {65536, 0, 1, 1, 2, true};
    c.kv_heads = 9;
    for (int l = 0; l < c.layers; l++) c.layer[l].window = 1024;
    assert_int_equal(plan_chunk(&c, 1 << 20, limits, SIZE_MAX), 4096);
    limits.context = 1024;
    assert_int_equal(plan_chunk(&c, 1 << 20, limits, SIZE_MAX), 8192);
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

/* Of two sets of RoPE tables the first serves contexts up to the one that the config names. */
static void test_context_chooses_rope(void **state) {
    (void)state;
    struct config c = plan_config();
    float weights[2 * 2 * 32];
    struct engine e = {.config = &c, .arena = (char *)weights};
    struct error error = {0};
    const struct tensor rope = {.name = "rope"};
    const struct {
        int original, context;
        size_t at;
    } cases[] = {{0, 8192, 0}, {4096, 1, 0}, {4096, 4096, 0}, {4096, 4097, 64}, {4096, 8192, 64}};
    c.rope_tables = 2;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c.rope_original = cases[i].original;
        e.plan.limits.context = cases[i].context;
        assert_int_equal(engine_locate_weights(&e, &rope, 1, &error), 0);
        assert_ptr_equal(e.rope, weights + cases[i].at);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_regions),
        cmocka_unit_test(test_plan_for_a_device),
        cmocka_unit_test(test_rings_of_a_device),
        cmocka_unit_test(test_plan_largest_context),
        cmocka_unit_test(test_plan_chunk),
        cmocka_unit_test(test_chunk_of_a_model_with_windows),
        cmocka_unit_test(test_plan_too_large),
        cmocka_unit_test(test_context_chooses_rope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
