/* What      y[rows, columns] = a[rows, n] b[n, columns], or += that; and the same with the sums cut
 *           into eight chains (block_dots).
 * Bound     2 rows columns n FLOPs. The tile is 6 rows x 2 vectors: 12 sums hide the latency of a
 *           multiply-add (4 cycles, 2 a cycle) and leave 16 registers room for the operands; a step
 *           of it is 2 loads, 6 broadcasts and 12 multiply-adds. Fewer rows take more vectors, fewer
 *           columns more rows.
 * Numerics  fp32. Each y of block_product is one chain over n in ascending order that starts from y
 *           where it adds; the tiles do not show.
 * Form      a function of its own rather than inlined: within a larger one the compilers run out of
 *           registers. Sums are zeroed in a loop: `= {0}` becomes memset, and then they stay in
 *           memory. */
#include "kernels/cpu_block.h"

#include "kernels/config.h"
#include "kernels/simd.h"

/* One tile: M rows and V vectors, both constants where it is inlined, M V <= 12. */
INLINE void tile(const float *a, size_t lda, const float *b, size_t ldb, float *y, size_t ldy,
                 size_t n, bool add, int M, int V) {
    v8f sum[12], in[4];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < V; j++) {
            sum[i * V + j] = (v8f){0};
            if (add) sum[i * V + j] = load8(y + (size_t)i * ldy + j * 8);
        }
    for (size_t k = 0; k < n; k++) {
        for (int j = 0; j < V; j++) in[j] = load8(b + k * ldb + j * 8);
        for (int i = 0; i < M; i++) {
            const v8f factor = splat8(a[(size_t)i * lda + k]);
            for (int j = 0; j < V; j++) sum[i * V + j] += factor * in[j];
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < V; j++) store8(y + (size_t)i * ldy + j * 8, sum[i * V + j]);
}

/* One tile of block_dots: M rows and V vectors, M V <= 12. The eight chains come one after the
 * other, so that the sums of each stay in registers. */
INLINE void tile_dots(const float *a, size_t lda, const float *b, float *y, size_t n, int M,
                      int V) {
    v8f total[12];
    for (size_t chain = 0; chain < 8; chain++) {
        v8f sum[12], in[2];
        const float *weight = a + chain, *row = b + chain * (n / 8) * CPU_PANEL;
        for (int i = 0; i < M * V; i++) sum[i] = (v8f){0};
        for (size_t k = 0; k < n; k += 8, row += CPU_PANEL) {
            for (int j = 0; j < V; j++) in[j] = load8(row + j * 8);
            for (int i = 0; i < M; i++) {
                const v8f factor = splat8(weight[(size_t)i * lda + k]);
                for (int j = 0; j < V; j++) sum[i * V + j] += factor * in[j];
            }
        }
        for (int i = 0; i < M * V; i++) {
            if (chain > 0) sum[i] += total[i];
            total[i] = sum[i];
        }
    }
    for (int i = 0; i < M; i++)
        for (int j = 0; j < V; j++) store8(y + (size_t)i * CPU_PANEL + j * 8, total[i * V + j]);
}

void block_dots(const float *a, size_t lda, const float *b, float *y, size_t rows, bool half,
                size_t n) {
    for (size_t some; rows > 0; rows -= some, a += some * lda, y += some * CPU_PANEL) {
        if (half && rows >= 12)
            tile_dots(a, lda, b, y, n, 12, 1), some = 12;
        else if (rows >= 6)
            tile_dots(a, lda, b, y, n, 6, 2), some = 6;
        else if (rows >= 4)
            tile_dots(a, lda, b, y, n, 4, 2), some = 4;
        else if (rows >= 2)
            tile_dots(a, lda, b, y, n, 2, 2), some = 2;
        else
            tile_dots(a, lda, b, y, n, 1, 2), some = 1;
    }
}

/* Up to 6 rows and all columns. */
static void tile_row(const float *a, size_t lda, const float *b, size_t ldb, float *y, size_t ldy,
                     size_t rows, size_t columns, size_t n, bool add) {
#define TILE(M, V) tile(a, lda, b + c, ldb, y + c, ldy, n, add, M, V)
    size_t c = 0;
    if (rows <= 3)
        for (; c + 32 <= columns; c += 32) switch (rows) {
            case 1: TILE(1, 4); break;
            case 2: TILE(2, 4); break;
            default: TILE(3, 4);
            }
    for (; c + 16 <= columns; c += 16) switch (rows) {
        case 1: TILE(1, 2); break;
        case 2: TILE(2, 2); break;
        case 3: TILE(3, 2); break;
        case 4: TILE(4, 2); break;
        case 5: TILE(5, 2); break;
        default: TILE(6, 2);
        }
    if (c < columns) switch (rows) {
        case 1: TILE(1, 1); break;
        case 2: TILE(2, 1); break;
        case 3: TILE(3, 1); break;
        case 4: TILE(4, 1); break;
        case 5: TILE(5, 1); break;
        default: TILE(6, 1);
        }
#undef TILE
}

void block_product(const float *a, size_t lda, const float *b, size_t ldb, float *y, size_t ldy,
                   size_t rows, size_t columns, size_t n, bool add) {
    while (rows > 0) {
        const bool narrow = columns == 8 && rows >= 12;
        const size_t some = narrow ? 12 : rows < 6 ? rows : 6;
        if (narrow)
            tile(a, lda, b, ldb, y, ldy, n, add, 12, 1);
        else
            tile_row(a, lda, b, ldb, y, ldy, some, columns, n, add);
        a += some * lda, y += some * ldy, rows -= some;
    }
}
