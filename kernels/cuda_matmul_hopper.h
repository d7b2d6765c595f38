/* What the two forms of the product on sm_90 share: cuda_matmul_few.cu, cuda_matmul_hopper.cu. */
#ifndef KERNELS_CUDA_MATMUL_HOPPER_H
#define KERNELS_CUDA_MATMUL_HOPPER_H

#include "kernels/cuda_tensor_map.h"

#include <algorithm>

/* A unit is what gives one column of the output: a row of W; with ACTIVATE a gate row and its up row. */
__host__ __device__ inline int units_of(const struct product &p) {
    return p.epilogue == EPILOGUE_ACTIVATE ? p.N / 2 : p.N;
}

/* Few rows, up to CUDA_FEW_ROWS; and the parts of a row's sum of squares that its ADD leaves. */
void cuda_matmul_few(struct cuda_backend *b, const struct product *p);
int cuda_matmul_few_parts(const struct cuda_backend *b, int N);

/* Rows that a tensor map of `in` has: whole tiles, if memory goes so far. Beyond its end the copy engine
 * fills in zeros, and takes longer than for rows that exist (down of the 8B model at 129 rows: 76 us
 * against 51). What rows past T hold reaches no result. */
inline int cuda_rows_to_read(const struct product &p, int tile) {
    return std::min(divide_up(p.T, tile) * tile, p.in_rows);
}

/* W as [K, units, side]: side 1 of ACTIVATE are the up rows. A box: 64 of K, box_units units, one
 * side. */
inline bool cuda_weight_map(struct cuda_backend *b, CUtensorMap *map, const struct product &p,
                            int box_units) {
    struct tensor_view t = {};
    t.start = p.W;
    t.rank = 3;
    t.size[0] = (uint64_t)p.K;
    t.size[1] = (uint64_t)units_of(p);
    t.size[2] = (uint64_t)(p.N / units_of(p));
    t.stride[1] = t.size[0] * 2;
    t.stride[2] = t.size[1] * t.stride[1];
    t.box[0] = 64;
    t.box[1] = (uint32_t)box_units;
    t.box[2] = 1;
    return cuda_tensor_map(b, map, &t);
}

/* W as [K, span, 2, D / (2 span), heads]: span rows of a head, and as many that lie `apart` rows from
 * them. A box: 64 of K, one such piece of so many heads. */
inline bool cuda_heads_map(struct cuda_backend *b, CUtensorMap *map, const struct product &p,
                           int span, int apart, int box_heads) {
    const uint64_t row = (uint64_t)p.K * 2; /* bytes */
    struct tensor_view t = {};
    t.start = p.W;
    t.rank = 5;
    t.size[0] = (uint64_t)p.K;
    t.size[1] = (uint64_t)span;
    t.size[2] = 2;
    t.size[3] = (uint64_t)(p.heads.D / (2 * span));
    t.size[4] = (uint64_t)(p.heads.H + 2 * p.heads.G);
    t.stride[1] = row;
    t.stride[2] = (uint64_t)apart * row;
    t.stride[3] = (uint64_t)(apart > span ? span : 2 * span) * row;
    t.stride[4] = (uint64_t)p.heads.D * row;
    t.box[0] = 64;
    t.box[1] = (uint32_t)span;
    t.box[2] = 2;
    t.box[3] = 1;
    t.box[4] = (uint32_t)box_heads;
    return cuda_tensor_map(b, map, &t);
}

#endif
