/* The memory plan: every size of a run, computed in one place before anything is allocated. All of
 * it is one allocation, the arena; nothing is allocated while tokens are generated. */
#ifndef MODEL_PLAN_H
#define MODEL_PLAN_H

#include "model/config.h"

#include <stdbool.h>

/* What a run needs beside the model itself. */
struct limits {
    int context;    /* positions of a slot */
    int chunk;      /* rows of a step, at most */
    int slots;      /* sequences side by side */
    int classified; /* rows of a step that get logits, at most */
    int threads;
    bool device; /* the regions as the CUDA backend lays them out, else as the CPU backend does */
};

/* Rows of the regions that products of the CUDA backend read: T, filled up to whole tiles. */
int plan_device_rows(const struct limits *limits);

/* Positions that a layer's cache holds in the CUDA backend, R: position s lies at s mod R. All of the
 * context; with a window as many as the rows of a step see together. */
int plan_device_ring(const struct config *config, const struct limits *limits, int layer);

/* m is the dtype of the weights. Where the backends differ, "CPU |" comes before "CUDA". */
enum region {
    REGION_WEIGHTS, /* the tensors as they lie in the file */
    REGION_KEYS, /* f32 [L, slots, G, S/16, D, 16], S rounded up to 16: 16 positions side by side |
                    m of each layer [slots, G, R, D] */
    REGION_VALUES, /* f32 [L, slots, G, S, D] | m of each layer [slots, G, R, D] */
    REGION_ROWS,   /* i32 [3, T]: token, slot, position */
    REGION_ROPE,   /* f32 [rope_tables, T, 2, rotary_dims/2]: cosines and sines of the rows */
    REGION_X,      /* f32 [T, C], the residual stream */
    REGION_QKV, /* f32 [T, the widest of (H + 2G) D and any product whose bias, norm or activation
                      is not its kernel's: C, F or 2F] */
    REGION_Q,   /* none | m [T, H D], the queries */
    REGION_A,   /* f32 [T, H D] | m [plan_device_rows, H D], what attention found */
    REGION_H,   /* f32 [T, 2F]: gate and up; the activation overwrites gate |
                      m [plan_device_rows, F] */
    REGION_LOGITS,  /* f32 [classified, V] */
    REGION_PANELS,  /* f32, the inputs of one product as its kernel reads them: T rounded up to 16
                      times the widest of C, H D and F |
                      m [plan_device_rows, C], rows times the norm's weights; where norms follow
                      products, of one row f32 [2, C], x and the product (kernels/cuda_decode.cu) */
    REGION_SCALES,  /* none | f32 [T], the norm's factor of a row */
    REGION_SQUARES, /* none | f32 [parts, T], sums of squares of rows in parts (kernels/config.h) */
    REGION_PARTS,   /* f32 [S/CPU_PART rounded up, T up to CPU_BRIEF, H, D + 2] |
                      f32 [T up to CUDA_DECODE_ROWS, CUDA_PARTS, H, D + 2] floats, laid out as
                      each kernel likes: what attention found in parts of the cache */
    REGION_THREADS, /* f32 [threads, THREAD_FLOATS], what a thread keeps to itself | none */
    REGION_COUNTERS, /* none | u32 [CUDA_COUNTERS], zero between kernels */
    REGION_DRAWS,    /* none | u32 [CUDA_DRAW_WORDS + 2 V], the sampler's */
    REGIONS
};

enum { PLAN_ALIGN = 256 };

struct plan {
    struct limits limits;
    struct {
        size_t offset, bytes; /* of the arena; offsets are multiples of PLAN_ALIGN */
    } region[REGIONS];
    size_t bytes; /* of the arena */
};

/* EXIT_MEMORY where a size does not fit in size_t. The limits are the caller's, each at least 1. */
int plan_make(struct plan *plan, const struct config *config, uint64_t weight_bytes,
              struct limits limits, struct error *error);

/* The largest context (up to limits.context) whose plan is at most `bytes` long; 0: none. */
int plan_largest_context(const struct config *config, uint64_t weight_bytes, struct limits limits,
                         size_t bytes);

/* Rows of a step, where nobody says how many. On the CPU 512: more gain nothing there. On a device
 * 8192, which read the weights less often; halved, down to 512, while the rows, and what they add to the
 * rings of windows, take more than 1 GiB or the plan more than `bytes`. limits.chunk is not read. */
int plan_chunk(const struct config *config, uint64_t weight_bytes, struct limits limits,
               size_t bytes);

const char *region_name(enum region region);

#endif
