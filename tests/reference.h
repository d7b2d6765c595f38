/* The operators as plain loops, in fp64 and at the same time in fp32: the first is what is right,
 * the difference between them is how much a plain fp32 computation errs, and a kernel may err at
 * most twice as much. */
#ifndef TESTS_REFERENCE_H
#define TESTS_REFERENCE_H

#include "kernels/ops.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct both {
    double exact;
    float plain;
};

static inline struct both *both_new(size_t count) {
    struct both *b = calloc(count ? count : 1, sizeof *b);
    if (!b) abort();
    return b;
}

static inline struct both *both_from(const float *values, size_t count) {
    struct both *b = both_new(count);
    for (size_t i = 0; i < count; i++) b[i] = (struct both){values[i], values[i]};
    return b;
}

static inline float weight_at(const void *w, enum dtype dtype, size_t i) {
    uint32_t bits = 0;
    float value;
    memcpy((char *)&bits + (dtype == BF16 ? 2 : 0), (const char *)w + i * dtype_size(dtype),
           dtype_size(dtype));
    memcpy(&value, &bits, 4);
    return value;
}

/* y = x / sqrt(mean x^2 + eps) * w, each of T rows of K; w = NULL: y = x. */
static inline void reference_norm(struct both *y, const struct both *x, const float *w, float eps,
                                  size_t T, size_t K) {
    for (size_t t = 0; t < T; t++, x += K, y += K) {
        if (!w) memmove(y, x, K * sizeof *y);
        if (!w) continue;
        struct both sum = {0, 0};
        for (size_t k = 0; k < K; k++) {
            sum.exact += x[k].exact * x[k].exact;
            sum.plain += x[k].plain * x[k].plain;
        }
        sum.exact = 1 / sqrt(sum.exact / (double)K + (double)eps);
        sum.plain = 1 / sqrtf(sum.plain / (float)K + eps);
        for (size_t k = 0; k < K; k++)
            y[k] =
                (struct both){x[k].exact * sum.exact * (double)w[k], x[k].plain * sum.plain * w[k]};
    }
}

/* y += bias, each of T rows of K; NULL: nothing. */
static inline void reference_bias(struct both *y, const float *bias, size_t T, size_t K) {
    for (size_t i = 0; bias && i < T * K; i++)
        y[i] = (struct both){y[i].exact + (double)bias[i % K], y[i].plain + bias[i % K]};
}

/* RMSNorm as above, or with a bias LayerNorm: y = (x - mean) / sqrt(mean (x - mean)^2 + eps) * w + bias. */
static inline void reference_any_norm(struct both *y, const struct both *x, const float *w,
                                      const float *bias, float eps, size_t T, size_t K) {
    struct both *centred = both_new(T * K);
    memcpy(centred, x, T * K * sizeof *x);
    for (size_t t = 0; bias && t < T; t++) {
        struct both mean = {0, 0};
        for (size_t k = 0; k < K; k++) {
            mean.exact += x[t * K + k].exact / (double)K;
            mean.plain += x[t * K + k].plain / (float)K;
        }
        for (size_t k = 0; k < K; k++) {
            centred[t * K + k].exact -= mean.exact;
            centred[t * K + k].plain -= mean.plain;
        }
    }
    reference_norm(y, centred, w, eps, T, K);
    reference_bias(y, bias, T, K);
    free(centred);
}

/* y[T, N] += x[T, K] W[N, K]^T. */
static inline void reference_product(struct both *y, const struct both *x, const void *W,
                                     enum dtype dtype, size_t T, size_t N, size_t K) {
    float *row = malloc(K * sizeof *row);
    if (!row) abort();
    for (size_t n = 0; n < N; n++) {
        for (size_t k = 0; k < K; k++) row[k] = weight_at(W, dtype, n * K + k);
        for (size_t t = 0; t < T; t++) {
            struct both sum = {0, 0};
            for (size_t k = 0; k < K; k++) {
                sum.exact += x[t * K + k].exact * (double)row[k];
                sum.plain += x[t * K + k].plain * row[k];
            }
            y[t * N + n].exact += sum.exact;
            y[t * N + n].plain += sum.plain;
        }
    }
    free(row);
}

/* What follows a product: its bias, and a norm, whose own bias makes it a LayerNorm; any may be NULL. */
struct reference_end {
    const float *bias, *norm, *norm_bias;
};

/* x[T, N] += in[T, K] W[N, K]^T + bias, or with a norm the norm of that. */
static inline void reference_project(struct both *x, const struct both *in, const void *W,
                                     enum dtype dtype, size_t T, size_t N, size_t K,
                                     struct reference_end end, float eps) {
    struct both *y = both_new(T * N);
    reference_product(y, in, W, dtype, T, N, K);
    reference_bias(y, end.bias, T, N);
    if (end.norm) reference_any_norm(y, y, end.norm, end.norm_bias, eps, T, N);
    for (size_t i = 0; i < T * N; i++) {
        x[i].exact += y[i].exact;
        x[i].plain += y[i].plain;
    }
    free(y);
}

/* GELU as the tanh has it. */
static inline struct both reference_gelu(struct both x) {
    const double factor = 0.79788456080286535588; /* sqrt(2 / pi) */
    const double u = factor * (x.exact + 0.044715 * x.exact * x.exact * x.exact);
    const float v = (float)factor * (x.plain + 0.044715f * x.plain * x.plain * x.plain);
    return (struct both){0.5 * x.exact * (1 + tanh(u)), 0.5f * x.plain * (1 + tanhf(v))};
}

static inline struct both reference_activation(enum activation kind, struct both x) {
    if (kind == GELU_TANH) return reference_gelu(x);
    if (kind == GELU)
        return (struct both){x.exact / 2 * (1 + erf(x.exact / sqrt(2.0))),
                             x.plain / 2 * (1 + erff(x.plain / sqrtf(2.0f)))};
    return (struct both){x.exact / (1 + exp(-x.exact)), x.plain / (1 + expf(-x.plain))};
}

/* h[T, F] = activation(gate) up of gate_up[T, gate F | up F]. */
static inline void reference_activate(enum activation kind, struct both *h,
                                      const struct both *gate_up, size_t T, size_t F) {
    for (size_t t = 0; t < T; t++)
        for (size_t f = 0; f < F; f++) {
            const struct both u = gate_up[t * 2 * F + F + f];
            const struct both a = reference_activation(kind, gate_up[t * 2 * F + f]);
            h[t * F + f] = (struct both){a.exact * u.exact, a.plain * u.plain};
        }
}

/* c tanh(x / c); c = 0: x. */
static inline struct both reference_cap(struct both x, float c) {
    if (c == 0) return x;
    return (struct both){(double)c * tanh(x.exact / (double)c), c * tanhf(x.plain / c)};
}

/* RoPE of one head: the angle is rounded to f32 as it is in the model. */
static inline void reference_rope(struct both *x, const float *frequency, int position, size_t half,
                                  float scale) {
    for (size_t i = 0; i < half; i++) {
        const float angle = (float)position * frequency[i];
        const struct both a = x[i], b = x[half + i];
        const struct both c = {cos((double)angle) * (double)scale, cosf(angle) * scale};
        const struct both s = {sin((double)angle) * (double)scale, sinf(angle) * scale};
        x[i] = (struct both){a.exact * c.exact - b.exact * s.exact,
                             a.plain * c.plain - b.plain * s.plain};
        x[half + i] = (struct both){b.exact * c.exact + a.exact * s.exact,
                                    b.plain * c.plain + a.plain * s.plain};
    }
}

/* The embedding of a token at a position, element i. */
static inline struct both reference_embedding(const struct engine *e, int32_t token, int position,
                                              size_t i) {
    const struct config *c = e->config;
    const size_t C = (size_t)c->width;
    const float value = weight_at(e->embed, c->weight_dtype, (size_t)token * C + i);
    struct both x = {(double)value * (double)c->embed_scale, value * c->embed_scale};
    if (!e->positions) return x;
    const float learned = weight_at(e->positions, c->weight_dtype, (size_t)position * C + i);
    return (struct both){x.exact + (double)learned, x.plain + learned};
}

/* What follows the product in a row of qkv: bias, norms of q's and k's heads, RoPE. */
static inline void reference_heads(const struct engine *e, int layer, struct both *row,
                                   int position) {
    const struct config *c = e->config;
    const struct layer_weights *w = &e->layer[layer];
    const size_t H = (size_t)c->heads, G = (size_t)c->kv_heads, D = (size_t)c->head_dim;
    const size_t half = (size_t)c->rotary_dims / 2;
    const int table = c->layer[layer].rope_table;
    for (size_t i = 0; w->qkv_bias && i < (H + 2 * G) * D; i++)
        row[i] =
            (struct both){row[i].exact + (double)w->qkv_bias[i], row[i].plain + w->qkv_bias[i]};
    const bool spans = c->qk_norm == QK_NORM_FULL;
    if (spans) reference_norm(row, row, w->norm_q, c->norm_eps, 1, H * D);
    if (spans) reference_norm(row + H * D, row + H * D, w->norm_k, c->norm_eps, 1, G * D);
    for (size_t i = 0; i < H + G; i++, row += D) {
        const float *norm = i < H ? w->norm_q : w->norm_k;
        if (norm && !spans) reference_norm(row, row, norm, c->norm_eps, 1, D);
        if (table != NO_ID)
            reference_rope(row, e->rope + (size_t)table * half, position, half, c->rope_scale);
    }
}

/* The first position that a row at this one sees. */
static inline size_t first_seen(const struct config *c, int layer, size_t position) {
    const size_t window = (size_t)c->layer[layer].window;
    return window && position + 1 > window ? position + 1 - window : 0;
}

/* out[D] = softmax(scale q . k, with a cap) v over `count` positions. */
static inline void reference_attend(struct both *out, const struct both *q, const struct both *k,
                                    const struct both *v, size_t count, size_t D, float scale,
                                    float cap) {
    struct both *score = both_new(count), top = {-INFINITY, -INFINITY}, sum = {0, 0};
    for (size_t s = 0; s < count; s++) {
        for (size_t d = 0; d < D; d++) {
            score[s].exact += q[d].exact * k[s * D + d].exact;
            score[s].plain += q[d].plain * k[s * D + d].plain;
        }
        score[s].exact *= (double)scale;
        score[s].plain *= scale;
        score[s] = reference_cap(score[s], cap);
        top.exact = fmax(top.exact, score[s].exact);
        top.plain = fmaxf(top.plain, score[s].plain);
    }
    for (size_t s = 0; s < count; s++) {
        score[s].exact = exp(score[s].exact - top.exact);
        score[s].plain = expf(score[s].plain - top.plain);
        sum.exact += score[s].exact;
        sum.plain += score[s].plain;
    }
    for (size_t d = 0; d < D; d++) {
        struct both o = {0, 0};
        for (size_t s = 0; s < count; s++) {
            o.exact += score[s].exact * v[s * D + d].exact;
            o.plain += score[s].plain * v[s * D + d].plain;
        }
        out[d] = (struct both){o.exact / sum.exact, o.plain / sum.plain};
    }
    free(score);
}

#endif
