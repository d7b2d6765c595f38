/* The operators as plain loops (reference.h), on all cores, with the roundings of the CUDA backend in
 * the plain half: in bf16 mode inputs of products, queries, keys and values are bf16 (the weights of
 * attention in steps of many rows, too), and the norm's factor meets the finished sum. Of wide products
 * only some columns are computed. */
#ifndef TESTS_GPU_REFERENCE_H
#define TESTS_GPU_REFERENCE_H

#include "kernels/config.h"
#include "kernels/cpu_team.h"
#include "tests/gpu_engine.h"
#include "tests/reference.h"

#include <float.h>

/* The threads that compute references. */
static struct team *team;

/* ---- numbers ---- */

/* To the nearest bf16, ties to even. */
static inline float rounded(float x, enum dtype dtype) {
    uint32_t bits;
    if (dtype == F32) return x;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000U;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void round_plain(struct both *b, size_t count, enum dtype dtype) {
    for (size_t i = 0; i < count; i++) b[i].plain = rounded(b[i].plain, dtype);
}

/* Elements of dtype m as floats. */
static inline float *floats_from(const void *from, enum dtype dtype, size_t count) {
    float *values = allocated(count * sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = weight_at(from, dtype, i);
    return values;
}

static inline struct both *both_of(const void *from, enum dtype dtype, size_t count) {
    struct both *b = both_new(count);
    for (size_t i = 0; i < count; i++) {
        const float value = weight_at(from, dtype, i);
        b[i] = (struct both){(double)value, value};
    }
    return b;
}

/* ---- products ---- */

/* Which columns of a product are computed: every so many-th and the last, by pairs `half` apart that
 * belong together (halves of a head, gate and up); half = N: no pairs. */
struct columns {
    size_t N, half, every;
};

static inline bool chosen(struct columns c, size_t n) {
    const size_t last = c.N - 1;
    const size_t pair = n / (2 * c.half) * c.half + n % c.half;
    return pair % c.every == 0 || pair == last / (2 * c.half) * c.half + last % c.half;
}

/* Eight rows side by side: [T/8, K, 8], rows past T zero. */
struct product_job {
    const double *exact;
    const float *plain;
    const void *W;
    enum dtype dtype;
    size_t T, K;
    struct columns columns;
    struct both *y;
};

static inline void product_columns(struct member me, void *job) {
    const struct product_job *p = job;
    float *row = allocated(p->K * sizeof *row);
    for (size_t n = me.index; n < p->columns.N; n += me.count) {
        struct both *y = p->y + n;
        if (!chosen(p->columns, n)) {
            for (size_t t = 0; t < p->T; t++) y[t * p->columns.N].exact = (double)NAN;
            continue;
        }
        for (size_t k = 0; k < p->K; k++) row[k] = weight_at(p->W, p->dtype, n * p->K + k);
        for (size_t t = 0; t < p->T; t += 8) {
            const double *x = p->exact + t * p->K;
            const float *x_plain = p->plain + t * p->K;
            double exact[8] = {0};
            float plain[8] = {0};
            for (size_t k = 0; k < p->K; k++)
                for (size_t j = 0; j < 8; j++) {
                    exact[j] += x[k * 8 + j] * (double)row[k];
                    plain[j] += x_plain[k * 8 + j] * row[k];
                }
            for (size_t j = 0; j < 8 && t + j < p->T; j++) {
                y[(t + j) * p->columns.N].exact += exact[j];
                y[(t + j) * p->columns.N].plain += plain[j];
            }
        }
    }
    free(row);
}

/* y[T, N] += in[T, K] W[N, K]^T of the chosen columns; the others become NaN: not known. */
static inline void product(struct both *y, const struct both *in, const void *W, enum dtype dtype,
                           size_t T, size_t K, struct columns columns) {
    const size_t padded = (T + 7) / 8 * 8;
    double *exact = calloc(padded * K, sizeof *exact);
    float *plain = calloc(padded * K, sizeof *plain);
    if (!exact || !plain) abort();
    for (size_t t = 0; t < T; t++)
        for (size_t k = 0; k < K; k++) {
            exact[(t / 8 * K + k) * 8 + t % 8] = in[t * K + k].exact;
            plain[(t / 8 * K + k) * 8 + t % 8] = in[t * K + k].plain;
        }
    struct product_job job = {exact, plain, W, dtype, T, K, columns, y};
    team_run(team, product_columns, &job);
    free(exact);
    free(plain);
}

/* y[T, N] = norm(x) W^T: rounded inputs x gamma, then the norm's factor; with a bias the rounded LayerNorm;
 * gamma NULL: x W^T. */
static inline struct both *normed_product(const struct both *x, const float *gamma,
                                          const float *bias, float eps, const void *W,
                                          enum dtype dtype, size_t T, size_t K,
                                          struct columns columns) {
    struct both *y = both_new(T * columns.N), *in = both_new(T * K);
    if (bias) {
        reference_any_norm(in, x, gamma, bias, eps, T, K);
        round_plain(in, T * K, dtype);
    }
    for (size_t i = 0; !bias && i < T * K; i++) {
        const float w = gamma ? gamma[i % K] : 1;
        in[i] = (struct both){x[i].exact * (double)w, rounded(x[i].plain * w, dtype)};
    }
    product(y, in, W, dtype, T, K, columns);
    for (size_t t = 0; gamma && !bias && t < T; t++) {
        struct both sum = {0, 0};
        for (size_t k = 0; k < K; k++) {
            sum.exact += x[t * K + k].exact * x[t * K + k].exact;
            sum.plain += x[t * K + k].plain * x[t * K + k].plain;
        }
        sum.exact = 1 / sqrt(sum.exact / (double)K + (double)eps);
        sum.plain = 1 / sqrtf(sum.plain / (float)K + eps);
        for (size_t n = 0; n < columns.N; n++) {
            y[t * columns.N + n].exact *= sum.exact;
            y[t * columns.N + n].plain *= sum.plain;
        }
    }
    free(in);
    return y;
}

/* ---- attention ---- */

struct attention_job {
    const struct both *q, *k, *v; /* [T, H, D], [slots, G, R, D]; position s lies at s mod R */
    struct both *out;             /* [T, H, D] */
    const int32_t *slots, *positions;
    size_t T, H, G, D, R;
    int layer;
    const struct config *config; /* scale, cap, windows */
    bool rounds; /* the weights of the values: to bf16, as inputs of a product on tensor cores */
};

/* The weights of `count` positions from `first` on, the largest 1. Returns their sum, before they are
 * rounded. */
static inline struct both weigh(struct both *weight, const struct both *q, const struct both *k,
                                size_t first, size_t count, const struct attention_job *a) {
    const float scale = a->config->attention_scale;
    struct both top = {-INFINITY, -INFINITY}, sum = {0, 0};
    for (size_t s = 0; s < count; s++) {
        struct both score = {0, 0};
        for (size_t d = 0; d < a->D; d++) {
            const struct both key = k[(first + s) % a->R * a->D + d];
            score.exact += q[d].exact * key.exact;
            score.plain += q[d].plain * key.plain;
        }
        weight[s] = reference_cap((struct both){score.exact * (double)scale, score.plain * scale},
                                  a->config->attention_cap);
        top.exact = fmax(top.exact, weight[s].exact);
        top.plain = fmaxf(top.plain, weight[s].plain);
    }
    for (size_t s = 0; s < count; s++) {
        weight[s].exact = exp(weight[s].exact - top.exact);
        weight[s].plain = expf(weight[s].plain - top.plain);
        sum.exact += weight[s].exact;
        sum.plain += weight[s].plain;
        if (a->rounds) weight[s].plain = rounded(weight[s].plain, BF16);
    }
    return sum;
}

/* Members take heads of rows in turn. */
static inline void attention_heads(struct member me, void *job) {
    const struct attention_job *a = job;
    const size_t D = a->D;
    struct both *weight = both_new(a->R), *out = both_new(D);
    for (size_t i = me.index; i < a->T * a->H; i += me.count) {
        const size_t t = i / a->H, g = i % a->H / (a->H / a->G);
        const size_t from = ((size_t)a->slots[t] * a->G + g) * a->R * D;
        const size_t first = first_seen(a->config, a->layer, (size_t)a->positions[t]);
        const size_t count = (size_t)a->positions[t] + 1 - first;
        const struct both sum = weigh(weight, a->q + i * D, a->k + from, first, count, a);
        memset(out, 0, D * sizeof *out);
        for (size_t s = 0; s < count; s++)
            for (size_t d = 0; d < D; d++) {
                const struct both value = a->v[from + (first + s) % a->R * D + d];
                out[d].exact += weight[s].exact * value.exact;
                out[d].plain += weight[s].plain * value.plain;
            }
        for (size_t d = 0; d < D; d++)
            a->out[i * D + d] = (struct both){out[d].exact / sum.exact, out[d].plain / sum.plain};
    }
    free(weight);
    free(out);
}

/* Softmax attention, rounded as it is stored. */
static inline void attention(struct attention_job *a, enum dtype dtype) {
    a->rounds = dtype == BF16 && a->T > CUDA_DECODE_ROWS;
    team_run(team, attention_heads, a);
    round_plain(a->out, a->T * a->H * a->D, dtype);
}

/* ---- comparing ---- */

/* How much a result may err: twice what the plain computation does at worst, and a few roundings.
 * rounding: it is stored in m, and the worst of that is known even where the plain one was lucky.
 * K: length of its sums in bf16; tensor cores cut off what does not fit into a sum, every 8 products
 * at the latest, half a unit on average and always towards zero. */
static inline double tolerance_of(const struct both *right, size_t count, size_t K,
                                  enum dtype dtype, bool stored) {
    double largest = 0, plain = 0;
    for (size_t i = 0; i < count; i++) {
        if (isnan(right[i].exact)) continue;
        largest = fmax(largest, fabs(right[i].exact));
        plain = fmax(plain, fabs((double)right[i].plain - right[i].exact));
    }
    if (dtype == BF16 && stored) plain = fmax(plain, largest * 0x1p-9);
    const double units = dtype == BF16 ? 8 + (double)K / 16 : 8;
    return 2 * plain + units * (double)FLT_EPSILON * largest + 1e-30;
}

/* One case: y[rows, columns] against what is right. What is not known must be a number. */
static inline void compare(const char *name, const char *what, const float *y, size_t y_stride,
                           const struct both *right, size_t rows, size_t columns,
                           double tolerance) {
    size_t wrong = 0, first = 0;
    double worst = 0;
    for (size_t i = 0; i < rows * columns; i++) {
        const float value = y[i / columns * y_stride + i % columns];
        const bool known = !isnan(right[i].exact);
        const double error = known ? fabs((double)value - right[i].exact) : (double)(value - value);
        if (error <= tolerance) continue;
        if (!wrong++) first = i;
        worst = isnan(worst) || isnan(error) ? (double)NAN : fmax(worst, error);
    }
    check(
        !wrong,
        "%s: %s: %zu of %zu wrong, the first [%zu, %zu] is %.9g, expected %.9g; worst error %.3g, "
        "tolerated %.3g",
        name, what, wrong, rows * columns, first / columns, first % columns,
        (double)y[first / columns * y_stride + first % columns], right[first].exact, worst,
        tolerance);
}

#endif
