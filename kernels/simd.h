/* Vectors of eight floats in plain C: gcc's and clang's vector extensions, no intrinsics. The same
 * source becomes AVX2 with -march=haswell and pairs of SSE registers on a plain x86-64. Loads and
 * stores need no alignment. NaN passes through, but for the two that compare (max8, largest8). */
#ifndef KERNELS_SIMD_H
#define KERNELS_SIMD_H

#include "model/config.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Without AVX such vectors would be passed in another way than with it; nothing here is passed at
 * all, since every function is inlined. */
#pragma GCC diagnostic ignored "-Wpsabi"

typedef float v4f __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t v4u __attribute__((vector_size(16), aligned(4), may_alias));
typedef float v8f __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t v8u __attribute__((vector_size(32), aligned(4), may_alias));

/* Kernels are written once, with their tile sizes as arguments; inlining makes them constants. */
#define INLINE  static inline __attribute__((always_inline))
#define shuffle __builtin_shufflevector

INLINE v8f load8(const float *p) {
    return *(const v8f *)p;
}

/* A load that stays one: compilers put an ordinary load into every instruction that uses its value,
 * and then a loop reads memory several times as often. */
INLINE v8f load8_once(const float *p) {
    return *(const volatile v8f *)p;
}

INLINE void store8(float *p, v8f v) {
    *(v8f *)p = v;
}

INLINE v8f splat8(float x) {
    return (v8f){x, x, x, x, x, x, x, x};
}

/* where ? a : b, lane by lane; where is the result of a comparison. */
INLINE v8f select8(v8u where, v8f a, v8f b) {
    return (v8f)(((v8u)a & where) | ((v8u)b & ~where));
}

/* The larger of both; b where either is NaN. */
INLINE v8f max8(v8f a, v8f b) {
    return select8((v8u)(a > b), a, b);
}

/* Sum of the lanes as ((0+4)+(2+6)) + ((1+5)+(3+7)): three roundings. */
INLINE float sum8(v8f v) {
    v4f half = shuffle(v, v, 0, 1, 2, 3) + shuffle(v, v, 4, 5, 6, 7);
    half += shuffle(half, half, 2, 3, 0, 1);
    return half[0] + half[1];
}

/* Sum of the lanes in ascending order: seven roundings, in the order in which prefill adds its
 * chains (cpu_block.c). */
INLINE float sum8_in_order(v8f v) {
    float sum = v[0];
    for (int i = 1; i < 8; i++) sum += v[i];
    return sum;
}

/* The largest lane; NaN lanes may or may not count. */
INLINE float largest8(v8f v) {
    v = max8(v, shuffle(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = max8(v, shuffle(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return v[0] > v[1] ? v[0] : v[1];
}

/* e^x for x <= 88: relative error below 1e-7 from -87.3 on, 0 below. 2^n e^r with n the nearest
 * integer to x log2(e), ln 2 in two parts, and a polynomial for |r| < 0.35. */
INLINE v8f exp8_below_88(v8f x) {
    v8f shifted = x * 1.44269504f + 12582912.0f; /* 1.5 2^23: the integer is in the low bits */
    v8f n = shifted - 12582912.0f;
    v8f r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8f p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    v8f power = (v8f)(((v8u)shifted + 127) << 23); /* 2^n: the exponent field is n + 127 */
    return select8((v8u)(x < -87.3f), (v8f){0}, p * power);
}

/* e^x: the same, and e^88 above 88. */
INLINE v8f exp8(v8f x) {
    return exp8_below_88(select8((v8u)(x > 88.0f), splat8(88.0f), x));
}

/* Transposes 8 rows of 8: row i becomes the former column i. */
INLINE void transpose8(v8f row[8]) {
    v8f pair[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = shuffle(row[i], row[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pair[i + 1] = shuffle(row[i], row[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++) {
            quad[j] = shuffle(pair[j], pair[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            quad[j + 2] = shuffle(pair[j], pair[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        row[i] = shuffle(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        row[i + 4] = shuffle(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* ---- weights ----
 * Weights are taken 16 at a time as two vectors: f32 as the first and the last eight; bf16, the
 * upper half of an f32, as the even and the odd eight, which costs a shift or a mask and no
 * shuffle. What they are multiplied with is stored in the same order, the *weight order*. Where a
 * row is no multiple of 16 long its last eight are one vector: bf16 as four even, four odd. */

/* Half (0 or 1) of the 16 weights at w. */
INLINE v8f weights8(const char *w, enum dtype dtype, int half) {
    if (dtype == F32) return load8_once((const float *)w + half * 8);
    v8u pairs = *(const v8u *)w;
    return half ? (v8f)(pairs & 0xffff0000u) : (v8f)(pairs << 16);
}

/* The last eight weights of a row. */
INLINE v8f last_weights8(const char *w, enum dtype dtype) {
    if (dtype == F32) return *(const v8f *)w;
    v4u pairs = *(const v4u *)w;
    v4u even = pairs << 16, odd = pairs & 0xffff0000u;
    return (v8f)shuffle(even, odd, 0, 1, 2, 3, 4, 5, 6, 7);
}

/* Where element k of a row of K is found in weight order. */
INLINE size_t weight_order(size_t k, size_t K, enum dtype dtype) {
    if (dtype == F32) return k;
    size_t block = k / 16 * 16, width = K - block < 16 ? K - block : 16;
    return block + (k % 2) * (width / 2) + (k - block) / 2;
}

/* 1 / sqrt(mean x^2 + eps), the factor of an RMSNorm; K is a multiple of 8. */
INLINE float norm_scale(const float *x, size_t K, float eps) {
    v8f sum = {0};
    for (size_t k = 0; k < K; k += 8) sum += load8(x + k) * load8(x + k);
    return 1.0f / sqrtf(sum8(sum) / (float)K + eps);
}

/* What a norm takes from a row and then multiplies it with: of RMSNorm 0 and norm_scale, of LayerNorm
 * the mean and 1 / sqrt(mean (x - mean)^2 + eps). */
struct norm_row {
    float mean, scale;
};

INLINE struct norm_row norm_row(const float *x, size_t K, float eps, bool layer_norm) {
    if (!layer_norm) return (struct norm_row){0, norm_scale(x, K, eps)};
    v8f sum = {0}, squares = {0};
    for (size_t k = 0; k < K; k += 8) sum += load8(x + k);
    const float mean = sum8(sum) / (float)K;
    for (size_t k = 0; k < K; k += 8) squares += (load8(x + k) - mean) * (load8(x + k) - mean);
    return (struct norm_row){mean, 1.0f / sqrtf(sum8(squares) / (float)K + eps)};
}

#endif
