/* Tensor maps: how the copy engine of sm_90 sees a tensor. cuda_wgmma.cuh copies by them. */
#ifndef KERNELS_CUDA_TENSOR_MAP_H
#define KERNELS_CUDA_TENSOR_MAP_H

#include "kernels/cuda.h"

#include <cuda.h>

enum { TENSOR_RANK = 5 };

/* A tensor of bf16, the contiguous dimension first, and the box that one copy takes of it. A box's
 * rows are 128 bytes at most; at 128, 64 and 32 their chunks of 16 bytes are swizzled.
 * stride: bytes from one element to the next, multiples of 16; of the contiguous dimension not
 * read. box: elements, at most 256 of a dimension. */
struct tensor_view {
    const void *start; /* a multiple of 16 */
    int rank;
    uint64_t size[TENSOR_RANK]; /* elements */
    uint64_t stride[TENSOR_RANK];
    uint32_t box[TENSOR_RANK];
};

/* false: it failed, and the backend keeps the failure. */
bool cuda_tensor_map(struct cuda_backend *b, CUtensorMap *map, const struct tensor_view *tensor);

/* The same of bf16 [rows, columns], box_rows x 64 of it a copy. */
bool cuda_matrix_map(struct cuda_backend *b, CUtensorMap *map, const void *start, int rows,
                     int columns, int box_rows);

#endif
