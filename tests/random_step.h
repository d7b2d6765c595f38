/* A step of a random engine, as the kernels' tests look at it. */
#ifndef TESTS_RANDOM_STEP_H
#define TESTS_RANDOM_STEP_H

#include "tests/random_engine.h"
#include "tests/reference.h"

#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>

#include <cmocka.h>

/* One step of a random engine, and what the checks share. */
struct step {
    struct random_engine *r;
    struct rows rows;
    char *before; /* the arena before an operator */
    size_t T, C, H, G, D, F, V, S, qkv,
        hidden; /* the last two: floats between rows of their region */
    char name[160];
};

static inline float *region(const struct step *s, enum region which) {
    return engine_region(&s->r->engine, which);
}

static inline int32_t *row_numbers(const struct step *s, int which) {
    return (int32_t *)(void *)region(s, REGION_ROWS) + which * s->r->engine.plan.limits.chunk;
}

/* Where the cache holds element d of a position's key or value. */
static inline float *cached(const struct step *s, enum region which, int layer, size_t slot,
                            size_t g, size_t position, size_t d) {
    const size_t slots = (size_t)s->r->engine.plan.limits.slots;
    const size_t padded = (s->S + 15) / 16 * 16;
    const size_t cache = ((size_t)layer * slots + slot) * s->G + g;
    if (which == REGION_VALUES) return region(s, which) + (cache * s->S + position) * s->D + d;
    return region(s, which) + cache * padded * s->D + position / 16 * 16 * s->D + d * 16 +
           position % 16;
}

static inline struct step step_of(struct random_engine *r, struct rows rows) {
    const struct config *c = &r->config;
    struct step s = {.r = r,
                     .rows = rows,
                     .T = (size_t)rows.count,
                     .C = (size_t)c->width,
                     .H = (size_t)c->heads,
                     .G = (size_t)c->kv_heads,
                     .D = (size_t)c->head_dim,
                     .F = (size_t)c->ffn,
                     .V = (size_t)c->vocab,
                     .S = (size_t)r->engine.plan.limits.context};
    s.qkv = (s.H + 2 * s.G) * s.D;
    s.hidden = (c->gated ? 2 : 1) * s.F;
    return s;
}

/* h[T, F] of x[T, C] after attention: norm, projections with their biases, activation. */
static inline struct both *reference_hidden(const struct step *s, int layer, const struct both *x) {
    const struct config *c = s->r->engine.config;
    const struct layer_weights *w = &s->r->engine.layer[layer];
    const size_t outputs = (c->gated ? 2 : 1) * s->F;
    struct both *normed = both_new(s->T * s->C), *h = both_new(s->T * s->F);
    struct both *product = both_new(s->T * outputs);
    reference_any_norm(normed, x, w->norm_ffn, w->norm_ffn_bias, c->norm_eps, s->T, s->C);
    reference_product(product, normed, w->gate_up, c->weight_dtype, s->T, outputs, s->C);
    reference_bias(product, w->gate_up_bias, s->T, outputs);
    if (c->gated) reference_activate(c->activation, h, product, s->T, s->F);
    for (size_t i = 0; !c->gated && i < s->T * s->F; i++)
        h[i] = reference_activation(c->activation, product[i]);
    free(normed);
    free(product);
    return h;
}

/* x[T, C] += what attention gives, or the feed-forward part, from the input of its last product. */
static inline void reference_residual(const struct step *s, int layer, enum projection which,
                                      struct both *x, const struct both *in) {
    const struct config *c = s->r->engine.config;
    const struct layer_weights *w = &s->r->engine.layer[layer];
    const bool out = which == ATTENTION_OUT;
    const struct reference_end end =
        out ? (struct reference_end){w->out_bias, w->after_attention, w->after_attention_bias}
            : (struct reference_end){w->down_bias, w->after_ffn, w->after_ffn_bias};
    reference_project(x, in, out ? w->out : w->down, c->weight_dtype, s->T, s->C,
                      out ? s->H * s->D : s->F, end, c->norm_eps);
}

/* y may err twice as much as the plain computation does at worst, and a few roundings. */
static inline void compare(const struct step *s, const char *what, const float *y, size_t y_stride,
                           const struct both *right, size_t rows, size_t columns) {
    double largest = 0, plain = 0;
    for (size_t i = 0; i < rows * columns; i++) {
        largest = fmax(largest, fabs(right[i].exact));
        plain = fmax(plain, fabs((double)right[i].plain - right[i].exact));
    }
    const double tolerance = 2 * plain + 4 * (double)FLT_EPSILON * largest + 1e-30;
    for (size_t t = 0; t < rows; t++)
        for (size_t n = 0; n < columns; n++) {
            const double error = fabs((double)y[t * y_stride + n] - right[t * columns + n].exact);
            if (!(error <= tolerance))
                fail_msg("%s: %s[%zu, %zu] is %.9g, expected %.9g: error %.3g, tolerated %.3g",
                         s->name, what, t, n, (double)y[t * y_stride + n],
                         right[t * columns + n].exact, error, tolerance);
        }
}

static inline int32_t some_token(struct random_engine *r) {
    r->state = r->state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((r->state >> 33) % (uint64_t)r->config.vocab_used);
}

static inline void set_random_rows(struct random_engine *r, int count, int slot, int position) {
    int32_t *tokens = malloc((size_t)count * sizeof *tokens);
    assert_non_null(tokens);
    for (int t = 0; t < count; t++) tokens[t] = some_token(r);
    r->engine.ops->set_rows(&r->engine, tokens, count, slot, position);
    free(tokens);
}

#endif
