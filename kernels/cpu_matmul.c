/* Matrix products of the CPU backend, y[T, N] (+)= x[T, K] W[N, K]^T, in two regimes.
 *
 * What      W is bf16 or f32 and lies row-major as in model.bin; x and y are f32. K is a multiple of
 *           8, N and T are anything. x may be normalised first.
 * Owners    each thread owns a contiguous range of rows of W and computes y of those rows for all T.
 * Numerics  fp32 sums, in an order that depends on K alone: K is cut into parts (part_depth); in a
 *           part eight chains, k = i mod 8 in weight order, are added in ascending order; parts are
 *           added to y. So a row's result is the same to the bit in either regime, whatever the other
 *           rows are and however many threads there are: a prompt may be cut anywhere.
 * Decode    (T <= CPU_DECODE_ROWS) reads W once: 2 T N K FLOPs on N K weights; at T = 1 the bound is
 *           memory. Weights stay in registers and meet up to 3 rows of x as dot products, the chains
 *           in the lanes. A thread reads 4 (or 3) rows of W at a time, a quarter of its range apart:
 *           so many streams fill the memory's queues, neighbouring rows do not.
 * Prefill   converts 24 rows of W at a time into scratch, to be multiplied with every row of x: 16
 *           rows of x side by side in the lanes (a panel), W broadcast, 6 x 16 sums in registers, one
 *           chain after the other. Bound by multiply-adds. x is brought into panels once; W is not
 *           packed any further, since that costs more than it saves below 512 rows.
 * Barrier   one, in matmul_prepare: all of x prepared | products read it. */
#include "kernels/cpu_matmul.h"

#include "kernels/config.h"
#include "kernels/cpu_block.h"
#include "kernels/simd.h"

#include <math.h>

/* ---- the input ---- */

/* Eight elements of a row, normalised where the product wants it. With a bias all of it is one
 * expression: a branch within would let some callers add by FMA, and others not. */
INLINE v8f normalised8(const struct input *in, const float *x, size_t k, struct norm_row row) {
    const v8f v = load8(x + k);
    if (in->norm_bias)
        return (v - row.mean) * row.scale * load8(in->norm + k) + load8(in->norm_bias + k);
    if (in->norm) return v * row.scale * load8(in->norm + k);
    return v;
}

/* What the norm needs of a row; nothing where there is none. */
INLINE struct norm_row row_of(const struct input *in, const float *x) {
    if (!in->norm) return (struct norm_row){0, 1};
    return norm_row(x, in->K, in->norm_eps, in->norm_bias != NULL);
}

/* One row in weight order. */
static void prepare_row(const struct input *in, const float *x, float *to) {
    const struct norm_row row = row_of(in, x);
    size_t k = 0;
    for (; k + 16 <= in->K; k += 16) {
        v8f a = normalised8(in, x, k, row), b = normalised8(in, x, k + 8, row);
        if (in->dtype == BF16) {
            v8f even = shuffle(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
            b = shuffle(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
            a = even;
        }
        store8(to + k, a);
        store8(to + k + 8, b);
    }
    if (k == in->K) return;
    v8f last = normalised8(in, x, k, row);
    if (in->dtype == BF16) last = shuffle(last, last, 0, 2, 4, 6, 1, 3, 5, 7);
    store8(to + k, last);
}

/* Inputs that are summed up before they are added to y: a function of K alone, so that decode and
 * prefill round alike. A multiple of 16, which keeps the weight order. */
static size_t part_depth(size_t K) {
    const size_t parts = (K + CPU_TILE_DEPTH - 1) / CPU_TILE_DEPTH;
    return (K / parts + 15) / 16 * 16;
}

/* Eight elements of up to eight rows, from k on, side by side: lane i of at[j] is x[i, k + j]. */
INLINE void columns8(const struct input *in, const float *x, const struct norm_row *row,
                     size_t rows, size_t k, v8f at[8]) {
    for (size_t i = 0; i < 8; i++) {
        at[i] = (v8f){0};
        if (i < rows) at[i] = normalised8(in, x + i * in->x_stride, k, row[i]);
    }
    transpose8(at);
}

/* Up to 16 rows as a panel [K][16]; missing rows are zeros. Each part is laid out chain by chain, as
 * block_dots sums it up: element e of the part, in weight order, is e / 8 in chain e mod 8. A line
 * (16 elements) of a row is used up before the next row's: rows a power of two apart share few
 * places in L1. */
static void prepare_panel(const struct input *in, const float *x, size_t rows, float *to) {
    const size_t depth = part_depth(in->K);
    struct norm_row row[CPU_PANEL];
    for (size_t i = 0; i < rows; i++) row[i] = row_of(in, x + i * in->x_stride);
    for (size_t part = 0, n; part < in->K; part += n, to += n * CPU_PANEL) {
        n = in->K - part < depth ? in->K - part : depth;
        for (size_t line = 0; line < n; line += 16)
            for (size_t half = 0; half < CPU_PANEL; half += 8)
                for (size_t k = line, width = n - line < 16 ? 8 : 16; k < line + width; k += 8) {
                    v8f at[8];
                    columns8(in, x + half * in->x_stride, row + half, rows < half ? 0 : rows - half,
                             part + k, at);
                    for (size_t i = 0; i < 8; i++) {
                        const size_t e = line + weight_order(k - line + i, width, in->dtype);
                        store8(to + (e % 8 * (n / 8) + e / 8) * CPU_PANEL + half, at[i]);
                    }
                }
    }
}

/* What a member keeps to itself: its copy of the input (decode), or converted weights (prefill). */
static float *private_floats(const struct input *in, struct member me) {
    return in->private + me.index * THREAD_FLOATS;
}

const float *matmul_prepare(const struct input *in, struct member me) {
    if (in->T <= CPU_DECODE_ROWS && in->T * in->K <= CPU_PRIVATE) {
        float *own = private_floats(in, me);
        for (size_t t = 0; t < in->T; t++)
            prepare_row(in, in->x + t * in->x_stride, own + t * in->K);
        return own;
    }
    if (in->T <= CPU_DECODE_ROWS) {
        for (size_t t = me.index; t < in->T; t += me.count)
            prepare_row(in, in->x + t * in->x_stride, in->shared + t * in->K);
    } else {
        for (size_t t = me.index * CPU_PANEL; t < in->T; t += me.count * CPU_PANEL)
            prepare_panel(in, in->x + t * in->x_stride,
                          in->T - t < CPU_PANEL ? in->T - t : CPU_PANEL, in->shared + t * in->K);
    }
    team_barrier(me); /* all of x is prepared | products read it */
    return in->shared;
}

/* ---- decode ---- */

/* What the dot products of one call have in common. */
struct dots {
    size_t K, row, w_gap;   /* bytes of a row of W, and between the rows that go together */
    size_t y_gap, y_stride; /* floats between their outputs, and between rows of y */
    bool add;
};

/* y[m, r] (+)= w[r] . x[m] for R rows of W and M of x, over n inputs. */
INLINE void dots(const struct dots *d, const char *w, const float *x, float *y, size_t n, bool add,
                 enum dtype dtype, int R, int M) {
    const size_t bytes = dtype == F32 ? 4 : 2, K = d->K, w_gap = d->w_gap;
    v8f sum[9];
    for (int i = 0; i < R * M; i++) sum[i] = (v8f){0};
    size_t k = 0;
    for (; k + 16 <= n; k += 16)
        for (int half = 0; half < 2; half++) {
            v8f weight[4];
            for (int r = 0; r < R; r++) {
                const char *from = w + (size_t)r * w_gap + k * bytes;
                if (half == 0) __builtin_prefetch(from + CPU_AHEAD);
                weight[r] = weights8(from, dtype, half);
            }
            for (int m = 0; m < M; m++) {
                const v8f in = load8_once(x + (size_t)m * K + k + half * 8);
                for (int r = 0; r < R; r++) sum[r * M + m] += weight[r] * in;
            }
        }
    if (k < n)
        for (int r = 0; r < R; r++) {
            const v8f weight = last_weights8(w + (size_t)r * w_gap + k * bytes, dtype);
            for (int m = 0; m < M; m++) sum[r * M + m] += weight * load8(x + (size_t)m * K + k);
        }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) {
            float *to = y + (size_t)m * d->y_stride + (size_t)r * d->y_gap;
            const float all = sum8_in_order(sum[r * M + m]);
            *to = add ? *to + all : all;
        }
}

/* A function of its own for every form, for n and the `count` - 1 rows of W after it: within a
 * larger one the compilers run out of registers. */
#define DOTS(dtype, R, M)                                                                          \
    static void dots_##dtype##_##R##M(const struct dots *d, const char *w, const float *x,         \
                                      float *y, size_t count) {                                    \
        const size_t depth = part_depth(d->K), bytes = (dtype) == F32 ? 4 : 2;                     \
        for (; count > 0; count--, w += d->row, y++)                                               \
            for (size_t k = 0; k < d->K; k += depth)                                               \
                dots(d, w + k * bytes, x + k, y, d->K - k < depth ? d->K - k : depth,              \
                     d->add || k > 0, dtype, R, M);                                                \
    }
#define FORMS(dtype)                                                                               \
    DOTS(dtype, 1, 1)                                                                              \
    DOTS(dtype, 1, 2)                                                                              \
    DOTS(dtype, 1, 3)                                                                              \
    DOTS(dtype, 3, 2)                                                                              \
    DOTS(dtype, 3, 3)                                                                              \
    DOTS(dtype, 4, 1)                                                                              \
    DOTS(dtype, 4, 2)
FORMS(F32)
FORMS(BF16)

/* [dtype][R][M] */
typedef void dots_form(const struct dots *d, const char *w, const float *x, float *y, size_t count);
#define TABLE(dtype)                                                                               \
    {                                                                                              \
        [1] = {0, dots_##dtype##_11, dots_##dtype##_12, dots_##dtype##_13},                        \
        [3] = {0, 0, dots_##dtype##_32, dots_##dtype##_33}, [4] = {                                \
            0,                                                                                     \
            dots_##dtype##_41,                                                                     \
            dots_##dtype##_42                                                                      \
        }                                                                                          \
    }
static dots_form *const forms[DTYPES][5][4] = {[F32] = TABLE(F32), [BF16] = TABLE(BF16)};

/* R rows of W at a time against all rows of x, which go in blocks of at most `most`, as even as
 * possible: 7 are 3, 2 and 2. The first block brings some rows of W from memory, the others find
 * them in L1. */
static void dots_all(const struct input *in, const struct dots *d, const char *w, const float *x,
                     float *y, size_t count, size_t R, size_t most) {
    const size_t blocks = (in->T + most - 1) / most, fit = CPU_L1 / (R * d->row);
    const size_t step = blocks == 1 ? count : fit > 0 ? fit : 1;
    for (size_t n = 0; n < count; n += step) {
        const size_t some = count - n < step ? count - n : step;
        for (size_t t = 0, M, left = blocks; t < in->T; t += M, left--) {
            M = (in->T - t + left - 1) / left;
            forms[in->dtype][R][M](d, w + n * d->row, x + t * in->K, y + t * d->y_stride + n, some);
        }
    }
}

/* 4 rows of W with 1 or 2 of x, or 3 with 3: as many sums as 16 registers hold beside the operands.
 * The rows of W that go together are as far apart as the range allows; those that are left over
 * come last, one by one. */
static void decode(const struct input *in, const float *x, const char *W, struct span own, float *y,
                   size_t y_stride, bool add) {
    const bool pairs = in->T <= 2 || in->T == 4;
    const size_t R = pairs ? 4 : 3, most = pairs ? 2 : 3, row = in->K * dtype_size(in->dtype);
    const size_t far = (own.last - own.first) / R, rest = own.first + far * R;
    const struct dots d = {in->K, row, far * row, far, y_stride, add};
    dots_all(in, &d, W + own.first * row, x, y + own.first, far, R, most);
    dots_all(in, &d, W + rest * row, x, y + rest, own.last - rest, 1, most);
}

/* ---- prefill ---- */

/* Converts depth weights of some rows into to[rows][CPU_TILE_DEPTH], in weight order. */
INLINE void unpack(const char *w, size_t row, size_t rows, size_t depth, enum dtype dtype,
                   float *to) {
    const size_t bytes = dtype == F32 ? 4 : 2;
    for (size_t i = 0; i < rows; i++, w += row, to += CPU_TILE_DEPTH) {
        size_t k = 0;
        for (; k + 16 <= depth; k += 16) {
            store8(to + k, weights8(w + k * bytes, dtype, 0));
            store8(to + k + 8, weights8(w + k * bytes, dtype, 1));
        }
        if (k < depth) store8(to + k, last_weights8(w + k * bytes, dtype));
    }
}

/* Asks for the lines first..last of rows of W, which are `lines` lines long. */
static void ask_for_weights(const char *w, size_t row, size_t lines, size_t first, size_t last) {
    for (size_t i = first; i < last; i++)
        __builtin_prefetch(w + i / lines * row + i % lines * CPU_LINE, 0, 2);
}

/* Asks for the tile of y that is about to be written: 24 floats of each row. */
static void ask_for_outputs(const float *y, size_t y_stride, size_t tokens) {
    for (size_t t = 0; t < tokens; t++, y += y_stride) {
        __builtin_prefetch(y, 1);
        __builtin_prefetch(y + CPU_LINE / sizeof *y, 1);
    }
}

/* y[tokens, rows] (+)= the transpose of c[rows, 16]. */
static void write_out(const float *c, size_t rows, size_t tokens, float *y, size_t y_stride,
                      bool add) {
    for (size_t half = 0; half < tokens; half += 8)
        for (size_t n = 0; n < rows; n += 8) {
            v8f r[8];
            for (size_t i = 0; i < 8; i++) r[i] = load8(c + (n + i) * CPU_PANEL + half);
            transpose8(r);
            for (size_t t = 0; t < 8 && half + t < tokens; t++) {
                float *to = y + (half + t) * y_stride + n;
                if (n + 8 <= rows) {
                    if (add) r[t] += load8(to);
                    store8(to, r[t]);
                    continue;
                }
                for (size_t i = 0; i < rows - n; i++) to[i] = (add ? to[i] : 0) + r[t][i];
            }
        }
}

/* Some rows of W, already in scratch, against all panels. Meanwhile the next rows of W are asked
 * for, a part with each panel: all at once would wait for the memory's queues. */
static void multiply_panels(const struct input *in, const float *panels, const float *weights,
                            size_t rows, size_t depth, const char *next, float *y, size_t y_stride,
                            bool add) {
    const size_t bytes = in->dtype == F32 ? 4 : 2,
                 lines = (depth * bytes + CPU_LINE - 1) / CPU_LINE;
    const size_t count = (in->T + CPU_PANEL - 1) / CPU_PANEL;
    float c[CPU_TILE_ROWS * CPU_PANEL];
    for (size_t p = 0; p < count; p++) {
        const size_t left = in->T - p * CPU_PANEL, tokens = left < CPU_PANEL ? left : CPU_PANEL;
        float *to = y + p * CPU_PANEL * y_stride;
        ask_for_weights(next, in->K * bytes, lines, rows * lines * p / count,
                        rows * lines * (p + 1) / count);
        ask_for_outputs(to, y_stride, tokens);
        block_dots(weights, CPU_TILE_DEPTH, panels + p * CPU_PANEL * in->K, c, rows, tokens <= 8,
                   depth);
        write_out(c, rows, tokens, to, y_stride, add);
    }
}

static void prefill(const struct input *in, const float *panels, const char *W, struct span own,
                    float *y, size_t y_stride, bool add, struct member me) {
    const size_t bytes = in->dtype == F32 ? 4 : 2, row = in->K * bytes;
    const size_t step = part_depth(in->K);
    float *weights = private_floats(in, me);
    for (size_t k = 0; k < in->K; k += step) {
        const size_t depth = in->K - k < step ? in->K - k : step;
        for (size_t n = own.first; n < own.last; n += CPU_TILE_ROWS) {
            const size_t rows = own.last - n < CPU_TILE_ROWS ? own.last - n : CPU_TILE_ROWS;
            const char *w = W + n * row + k * bytes;
            if (in->dtype == F32)
                unpack(w, row, rows, depth, F32, weights);
            else
                unpack(w, row, rows, depth, BF16, weights);
            multiply_panels(in, panels + k * CPU_PANEL, weights, rows, depth, w + rows * row, y + n,
                            y_stride, add || k > 0);
        }
    }
}

void matmul(const struct input *in, const float *prepared, const void *W, struct span own, float *y,
            size_t y_stride, bool add, struct member me) {
    if (in->T <= CPU_DECODE_ROWS)
        decode(in, prepared, W, own, y, y_stride, add);
    else
        prefill(in, prepared, W, own, y, y_stride, add, me);
}
