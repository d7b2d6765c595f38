/* The micro-kernel of prefill and of attention: a small product with all of its sums in registers. */
#ifndef KERNELS_CPU_BLOCK_H
#define KERNELS_CPU_BLOCK_H

#include <stdbool.h>
#include <stddef.h>

/* y[rows, columns] = a[rows, n] b[n, columns], or += that. f32, row-major, rows lda, ldb and ldy
 * floats apart; columns a multiple of 8; no aliasing. */
void block_product(const float *a, size_t lda, const float *b, size_t ldb, float *y, size_t ldy,
                   size_t rows, size_t columns, size_t n, bool add);

/* y[rows, 16] = a[rows, n] b[n, 16] with b a panel and y packed; of half a panel only the first
 * eight columns. n is a multiple of 8. Each y is summed as a dot product of vectors is: eight
 * chains, k = i mod 8 in chain i, which are added in ascending order. */
void block_dots(const float *a, size_t lda, const float *b, float *y, size_t rows, bool half,
                size_t n);

#endif
