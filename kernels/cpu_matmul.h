/* Matrix products of the CPU backend: y[T, N] = x[T, K] W[N, K]^T, or += that. All members of a
 * team call the same functions with the same arguments; each owns some rows of W, that is columns
 * of y. */
#ifndef KERNELS_CPU_MATMUL_H
#define KERNELS_CPU_MATMUL_H

#include "kernels/cpu_team.h"
#include "model/config.h"

#include <stdbool.h>
#include <stddef.h>

/* The input of a product, and the matrix's dtype. */
struct input {
    const float *x; /* [T, K], rows x_stride floats apart */
    size_t x_stride, T, K;
    const float *norm;      /* [K]: a norm with these weights comes first; NULL: x as it is */
    const float *norm_bias; /* [K]: it is a LayerNorm, which adds these; NULL: RMSNorm */
    float norm_eps;
    enum dtype dtype; /* of W */
    float *shared;    /* [T rounded up to 16, K], where the members prepare x together */
    float *private;   /* [members, THREAD_FLOATS], each one's own */
};

/* Brings x into the form that matmul reads and returns it: the same address to all members, or
 * each its own copy. Waits until all of it is there. */
const float *matmul_prepare(const struct input *in, struct member me);

/* y[:, n] for the rows n of W in `own`; y is [T, N], rows y_stride floats apart. */
void matmul(const struct input *in, const float *prepared, const void *W, struct span own, float *y,
            size_t y_stride, bool add, struct member me);

#endif
