/* Every operator of the CPU backend against a plain fp64 computation, on ragged shapes, with NaN
 * past every valid length, and with everything that an operator does not own unchanged after it. */
#include "kernels/config.h"
#include "kernels/simd.h"
#include "tests/random_step.h"

/* ---- fixtures ---- */

/* Random keys and values of all layers for positions 0..count of a slot, as far as the row at `count` sees
 * them. */
static void fill_cache(const struct step *s, size_t slot, size_t count) {
    for (int l = 0; l < s->r->config.layers; l++)
        for (size_t g = 0; g < s->G; g++)
            for (size_t p = first_seen(&s->r->config, l, count); p < count; p++)
                for (size_t d = 0; d < s->D; d++) {
                    *cached(s, REGION_KEYS, l, slot, g, p, d) = random_float(&s->r->state) * 2;
                    *cached(s, REGION_VALUES, l, slot, g, p, d) = random_float(&s->r->state);
                }
}

static void poison(const struct step *s, enum region which) {
    memset(region(s, which), POISON, s->r->engine.plan.region[which].bytes);
}

/* Before an operator, its output poisoned already: scratch poisoned, the arena kept. */
static void begin(struct step *s) {
    poison(s, REGION_PANELS);
    poison(s, REGION_PARTS);
    poison(s, REGION_THREADS);
    s->before = malloc(s->r->arena_bytes);
    assert_non_null(s->before);
    memcpy(s->before, s->r->engine.arena, s->r->arena_bytes);
}

/* These floats were the operator's to write. */
static void allow(struct step *s, const float *from, size_t count) {
    const size_t offset = (size_t)((const char *)from - s->r->engine.arena);
    memcpy(s->before + offset, from, count * sizeof *from);
}

/* After it: nothing else has changed. */
static void end(struct step *s, const char *what) {
    allow(s, region(s, REGION_PANELS), s->r->engine.plan.region[REGION_PANELS].bytes / 4);
    allow(s, region(s, REGION_PARTS), s->r->engine.plan.region[REGION_PARTS].bytes / 4);
    allow(s, region(s, REGION_THREADS), s->r->engine.plan.region[REGION_THREADS].bytes / 4);
    for (size_t i = 0; i < s->r->arena_bytes; i++)
        if (s->before[i] != s->r->engine.arena[i])
            fail_msg("%s: %s wrote at byte %zu of the arena", s->name, what, i);
    free(s->before);
}

/* ---- one operator each ---- */

static void check_embed(struct step *s) {
    struct engine *e = &s->r->engine;
    const struct config *c = e->config;
    const size_t R = (size_t)c->rotary_dims, chunk = (size_t)e->plan.limits.chunk;
    struct both *x = both_new(s->T * s->C), *turn = both_new(s->T * R);
    poison(s, REGION_X);
    poison(s, REGION_ROPE);
    begin(s);
    e->ops->embed(e, s->rows);
    for (size_t i = 0; i < s->T * s->C; i++) {
        const int32_t token = row_numbers(s, 0)[i / s->C], position = row_numbers(s, 2)[i / s->C];
        x[i] = reference_embedding(e, token, position, i % s->C);
    }
    compare(s, "x", region(s, REGION_X), s->C, x, s->T, s->C);
    allow(s, region(s, REGION_X), s->T * s->C);
    for (size_t table = 0; table < (size_t)c->rope_tables; table++) {
        const float *turns = region(s, REGION_ROPE) + table * chunk * R;
        for (size_t i = 0; i < s->T * (R / 2); i++) { /* cosines turn (1, 0), sines come with it */
            const size_t t = i / (R / 2), dim = i % (R / 2);
            struct both unit[2] = {{1, 1}, {0, 0}};
            reference_rope(unit, e->rope + table * (R / 2) + dim, row_numbers(s, 2)[t], 1,
                           c->rope_scale);
            turn[t * R + dim] = unit[0];
            turn[t * R + R / 2 + dim] = unit[1];
        }
        compare(s, "rope", turns, R, turn, s->T, R);
        allow(s, turns, s->T * R);
    }
    end(s, "embed");
    free(x);
    free(turn);
}

/* K and V of the step's rows in the cache, against columns of the reference. */
static void check_append(struct step *s, int layer, enum region which, const struct both *right,
                         size_t column) {
    float *got = malloc(s->T * s->G * s->D * sizeof *got);
    struct both *expected = both_new(s->T * s->G * s->D);
    assert_non_null(got);
    for (size_t t = 0; t < s->T; t++)
        for (size_t i = 0; i < s->G * s->D; i++) {
            const float *at = cached(s, which, layer, (size_t)row_numbers(s, 1)[t], i / s->D,
                                     (size_t)row_numbers(s, 2)[t], i % s->D);
            got[t * s->G * s->D + i] = *at;
            expected[t * s->G * s->D + i] = right[t * s->qkv + column + i];
            allow(s, at, 1);
        }
    compare(s, region_name(which), got, s->G * s->D, expected, s->T, s->G * s->D);
    free(got);
    free(expected);
}

static void check_qkv(struct step *s, int layer) {
    struct engine *e = &s->r->engine;
    const struct layer_weights *w = &e->layer[layer];
    struct both *x = both_from(region(s, REGION_X), s->T * s->C), *qkv = both_new(s->T * s->qkv);
    poison(s, REGION_QKV);
    begin(s);
    e->ops->qkv(e, layer, s->rows);
    reference_any_norm(x, x, w->norm_attention, w->norm_attention_bias, e->config->norm_eps, s->T,
                       s->C);
    reference_product(qkv, x, w->qkv, e->config->weight_dtype, s->T, s->qkv, s->C);
    for (size_t t = 0; t < s->T; t++)
        reference_heads(&s->r->engine, layer, qkv + t * s->qkv, row_numbers(s, 2)[t]);
    compare(s, "q", region(s, REGION_QKV), s->qkv, qkv, s->T, s->qkv);
    check_append(s, layer, REGION_KEYS, qkv, s->H * s->D);
    check_append(s, layer, REGION_VALUES, qkv, (s->H + s->G) * s->D);
    allow(s, region(s, REGION_QKV), s->T * s->qkv);
    end(s, "qkv");
    free(x);
    free(qkv);
}

static void check_attend(struct step *s, int layer) {
    struct engine *e = &s->r->engine;
    struct both *q = both_from(region(s, REGION_QKV), s->T * s->qkv);
    struct both *a = both_new(s->T * s->H * s->D);
    poison(s, REGION_A);
    begin(s);
    e->ops->attend(e, layer, s->rows);
    for (size_t t = 0; t < s->T; t++)
        for (size_t g = 0; g < s->G; g++) {
            const size_t slot = (size_t)row_numbers(s, 1)[t];
            const size_t first = first_seen(&s->r->config, layer, (size_t)row_numbers(s, 2)[t]);
            const size_t count = (size_t)row_numbers(s, 2)[t] + 1 - first, per_group = s->H / s->G;
            struct both *k = both_new(count * s->D), *v = both_new(count * s->D);
            for (size_t i = 0; i < count * s->D; i++) {
                const size_t at = first + i / s->D;
                const float key = *cached(s, REGION_KEYS, layer, slot, g, at, i % s->D);
                const float value = *cached(s, REGION_VALUES, layer, slot, g, at, i % s->D);
                k[i] = (struct both){(double)key, key};
                v[i] = (struct both){(double)value, value};
            }
            for (size_t h = g * per_group; h < (g + 1) * per_group; h++)
                reference_attend(a + (t * s->H + h) * s->D, q + t * s->qkv + h * s->D, k, v, count,
                                 s->D, e->config->attention_scale, e->config->attention_cap);
            free(k);
            free(v);
        }
    compare(s, "a", region(s, REGION_A), s->H * s->D, a, s->T, s->H * s->D);
    allow(s, region(s, REGION_A), s->T * s->H * s->D);
    end(s, "attend");
    free(q);
    free(a);
}

static void check_project(struct step *s, int layer, enum projection which) {
    struct engine *e = &s->r->engine;
    const bool out = which == ATTENTION_OUT;
    const size_t K = out ? s->H * s->D : s->F, stride = out ? K : s->hidden;
    struct both *in = both_new(s->T * K), *x = both_from(region(s, REGION_X), s->T * s->C);
    for (size_t i = 0; i < s->T * K; i++) {
        const float value = region(s, out ? REGION_A : REGION_H)[i / K * stride + i % K];
        in[i] = (struct both){(double)value, value};
    }
    begin(s);
    e->ops->project(e, layer, which, s->rows);
    reference_residual(s, layer, which, x, in);
    if (e->layer[layer].after_attention) allow(s, region(s, REGION_QKV), s->T * s->C);
    compare(s, out ? "x + a Wout" : "x + h Wdown", region(s, REGION_X), s->C, x, s->T, s->C);
    allow(s, region(s, REGION_X), s->T * s->C);
    end(s, "project");
    free(in);
    free(x);
}

static void check_gate_up(struct step *s, int layer) {
    struct engine *e = &s->r->engine;
    struct both *x = both_from(region(s, REGION_X), s->T * s->C);
    poison(s, REGION_H);
    begin(s);
    e->ops->gate_up(e, layer, s->rows);
    struct both *h = reference_hidden(s, layer, x);
    compare(s, "h", region(s, REGION_H), s->hidden, h, s->T, s->F);
    allow(s, region(s, REGION_H), s->T * s->hidden);
    end(s, "gate_up");
    free(x);
    free(h);
}

static void check_classify(struct step *s) {
    struct engine *e = &s->r->engine;
    const size_t n = (size_t)s->rows.classified, used = (size_t)e->config->vocab_used;
    struct both *x = both_from(region(s, REGION_X) + (s->T - n) * s->C, n * s->C);
    struct both *logits = both_new(n * used);
    float *row = malloc(used * sizeof *row);
    assert_non_null(row);
    poison(s, REGION_LOGITS);
    begin(s);
    e->ops->classify(e, s->rows);
    reference_any_norm(x, x, e->norm_final, e->norm_final_bias, e->config->norm_eps, n, s->C);
    reference_product(logits, x, e->classifier, e->config->weight_dtype, n, used, s->C);
    for (size_t i = 0; i < n * used; i++)
        logits[i] = reference_cap(logits[i], e->config->final_cap);
    compare(s, "logits", region(s, REGION_LOGITS), s->V, logits, n, used);
    for (size_t t = 0; t < n; t++) {
        e->ops->read_logits(e, (int)t, row, &(struct error){0});
        assert_memory_equal(row, region(s, REGION_LOGITS) + t * s->V, used * sizeof *row);
        allow(s, region(s, REGION_LOGITS) + t * s->V, used);
    }
    end(s, "classify");
    free(x);
    free(logits);
    free(row);
}

/* Every operator once, on the rows that are set. */
static void check_step(struct step *s) {
    const struct config *c = s->r->engine.config;
    snprintf(s->name, sizeof s->name,
             "C %zu H %zu G %zu D %zu F %zu V %zu %s, T %zu at %d, %d threads", s->C, s->H, s->G,
             s->D, s->F, s->V, dtype_name(c->weight_dtype), s->T, row_numbers(s, 2)[0],
             s->r->engine.plan.limits.threads);
    check_embed(s);
    for (int l = 0; l < c->layers; l++) {
        check_qkv(s, l);
        check_attend(s, l);
        check_project(s, l, ATTENTION_OUT);
        check_gate_up(s, l);
        check_project(s, l, FEED_FORWARD_DOWN);
    }
    if (s->rows.classified) check_classify(s);
}

/* T rows at a position of slot 1 of two; everything else in the caches is NaN. */
static void check_shape(struct shape shape, enum dtype dtype, int T, int position, int threads) {
    struct random_engine r;
    struct config c = random_config(shape, dtype);
    c.rope_scale = 1.25f;
    c.embed_scale = 1.5f;
    c.tied = T % 2;
    random_flags(&c, T, position);
    c.vocab_used = shape.V > 2 ? shape.V - T % 3 : shape.V;
    c.context = position + T;
    random_engine_open(&r, c,
                       (struct limits){position + T + T % 5, T + T % 3, 2, T, threads, false});
    /* Of a vocabulary of one all rows, so that the plain computation's error is known from more than one. */
    const bool all = T % 4 == 3 || shape.V == 1;
    struct step s = step_of(&r, (struct rows){T, all ? T : T < 3 ? 1 : T % 4});
    fill_cache(&s, 1, (size_t)position);
    set_random_rows(&r, T, 1, position);
    check_step(&s);
    random_engine_close(&r);
}

/* ---- tests ---- */

/* Sizes around every tile and unroll: 8 and 16 weights, 4 and 3 rows far apart, 6, 8, 24 rows of W,
 * 8 and 16 rows of x, 768 inputs; heads a group from 1 to 8. */
static const struct shape shapes[] = {
    {8, 1, 1, 1, 8, 8, 331},     {16, 1, 2, 1, 8, 24, 17},  {24, 2, 3, 1, 16, 40, 41},
    {40, 1, 4, 2, 24, 32, 1},    {32, 1, 7, 1, 8, 64, 23},  {72, 1, 8, 1, 16, 56, 49},
    {64, 1, 9, 3, 64, 176, 100}, {24, 1, 2, 2, 48, 16, 3},  {56, 1, 3, 3, 80, 72, 25},
    {104, 1, 6, 2, 96, 136, 47}, {48, 1, 4, 1, 128, 8, 26}, {88, 1, 2, 1, 256, 48, 9},
    {16, 1, 1, 1, 512, 16, 7},   {8, 1, 16, 2, 8, 200, 2}};
static const struct shape wide[] = {{760, 1, 3, 1, 8, 784, 31},
                                    {776, 1, 2, 1, 16, 1544, 29},
                                    {768, 1, 1, 1, 24, 1536, 24},
                                    {1544, 1, 1, 1, 8, 72, 5}};
static const int rows[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                           16, 17, 18, 23, 24, 25, 31, 32, 33, 47, 48, 49, 64, 65};
static const int positions[] = {0, 1, 5, 14, 15, 16, 17, 63, 100, 111, 127, 128, 130, 255};
enum { SHAPES = sizeof shapes / sizeof *shapes, WIDE = sizeof wide / sizeof *wide };
enum { ROWS = sizeof rows / sizeof *rows, POSITIONS = sizeof positions / sizeof *positions };

static void every_operator_on_ragged_shapes(void **state) {
    (void)state;
    int n = 0;
    for (int i = 0; i < SHAPES; i++)
        for (int t = 0; t < ROWS; t++)
            for (int dtype = F32; dtype <= BF16; dtype++, n++)
                check_shape(shapes[i], (enum dtype)dtype, rows[t], positions[n % POSITIONS],
                            1 + n % 3);
}

static void every_operator_on_wide_shapes(void **state) {
    (void)state;
    for (int i = 0; i < WIDE; i++)
        for (int t = i % 2; t < ROWS; t += 4)
            for (int dtype = F32; dtype <= BF16; dtype++)
                check_shape(wide[i], (enum dtype)dtype, rows[t], 3, 1 + (t + dtype) % 3);
}

/* Long caches, where a short step splits the positions. */
static void attention_over_long_caches(void **state) {
    (void)state;
    static const int far[] = {256, 257, 511, 512, 513, 700, 2047, 2048, 2600};
    for (int i = 0; i < (int)(sizeof far / sizeof *far); i++)
        for (int T = 1; T < 10; T++)
            check_shape(shapes[(i + T) % 5], BF16, T, far[i] - T % 2, 1 + (i + T) % 3);
    check_shape(shapes[2], F32, 65, 1500, 2);
}

/* Rows of a step that belong to different sequences, also at neighbouring and at falling positions. */
static void rows_of_several_slots(void **state) {
    (void)state;
    static const int slots[] = {0, 0, 1, 2, 2, 2, 2, 1}, at[] = {3, 4, 5, 300, 299, 301, 303, 6};
    for (int i = 0; i < 6; i++)
        for (int T = 1; T <= 8; T++) {
            struct random_engine r;
            random_engine_open(&r, random_config(shapes[i], BF16),
                               (struct limits){310, 8, 3, 8, 1 + i % 3, false});
            struct step s = step_of(&r, (struct rows){T, T});
            set_random_rows(&r, T, 0, 0);
            for (int t = 0; t < T; t++) {
                row_numbers(&s, 1)[t] = slots[(t + i) % 8];
                row_numbers(&s, 2)[t] = at[(t + i) % 8];
            }
            fill_cache(&s, 0, 4);
            fill_cache(&s, 1, 6);
            fill_cache(&s, 2, 303);
            check_step(&s);
            random_engine_close(&r);
        }
}

/* A later row of the same step is past a row's length, too: its NaN stays its own. */
static void a_nan_row_does_not_reach_earlier_rows(void **state) {
    (void)state;
    for (int i = 0; i < SHAPES; i++)
        for (int T = 2; T < 40; T += 1 + T / 4) {
            struct random_engine r;
            random_engine_open(&r, random_config(shapes[i], BF16),
                               (struct limits){64, T, 1, T, 2, false});
            struct step s = step_of(&r, (struct rows){T, T});
            set_random_rows(&r, T, 0, 0);
            r.engine.ops->embed(&r.engine, s.rows);
            for (size_t c = 0; c < s.C; c++) region(&s, REGION_X)[(s.T - 1) * s.C + c] = NAN;
            r.engine.ops->qkv(&r.engine, 0, s.rows);
            r.engine.ops->attend(&r.engine, 0, s.rows);
            for (size_t a = 0; a < s.T * s.H * s.D; a++)
                assert_int_equal(isnan(region(&s, REGION_A)[a]), a >= (s.T - 1) * s.H * s.D);
            random_engine_close(&r);
        }
}

/* ---- vectors ---- */

static void exp8_is_right_over_its_range(void **state) {
    (void)state;
    for (int i = 0; i < 1753000; i++) {
        const float x = -87.3f + (float)i * 1e-4f;
        const double error = fabs((double)exp8(splat8(x))[3] / exp((double)x) - 1);
        if (!(error < 1e-7)) fail_msg("exp8(%.9g): relative error %.3g", (double)x, error);
    }
    const v8f y = exp8((v8f){-87.4f, -1e30f, -INFINITY, NAN, INFINITY, 1e30f, 0.0f, -0.0f});
    assert_true(y[0] == 0 && y[1] == 0 && y[2] == 0 && isnan(y[3]));
    assert_true(y[4] == y[5] && y[4] > 1e38f && isfinite(y[4]) && y[6] == 1 && y[7] == 1);
}

/* The deviations are summed up, not the squares less the mean's: those would cancel. */
static void a_layer_norm_of_a_row_far_from_zero(void **state) {
    (void)state;
    enum { K = 72 };
    uint64_t random = 1;
    for (int n = 0; n < 20; n++) {
        float x[K];
        double mean = 0, variance = 0;
        for (int k = 0; k < K; k++) x[k] = 1000 + random_float(&random);
        for (int k = 0; k < K; k++) mean += (double)x[k] / K;
        for (int k = 0; k < K; k++) variance += ((double)x[k] - mean) * ((double)x[k] - mean) / K;
        const struct norm_row row = norm_row(x, K, 1e-5f, true);
        assert_true(fabs((double)row.mean / mean - 1) < 1e-6);
        assert_true(fabs((double)row.scale * sqrt(variance + 1e-5) - 1) < 1e-6);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp8_is_right_over_its_range),
        cmocka_unit_test(a_layer_norm_of_a_row_far_from_zero),
        cmocka_unit_test(every_operator_on_ragged_shapes),
        cmocka_unit_test(every_operator_on_wide_shapes),
        cmocka_unit_test(attention_over_long_caches),
        cmocka_unit_test(rows_of_several_slots),
        cmocka_unit_test(a_nan_row_does_not_reach_earlier_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
