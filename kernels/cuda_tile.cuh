/* Tiles of a product (struct product, cuda.h): what the kernels for many rows share. A block
 * owns the outputs of TILE_T rows of `in` and TILE_N rows of W; both come in steps of 128 bytes
 * along K. */
#ifndef KERNELS_CUDA_TILE_CUH
#define KERNELS_CUDA_TILE_CUH

#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

#include <algorithm>

/* A row of a step in shared memory: 8 chunks of 16 bytes. Chunk c of row r lies at c ^ (r mod
 * 8), so that 8 rows' chunks c, and also the 8 chunks of a row, use every bank once. */
constexpr int STEP_BYTES = 128;
constexpr int STEP_CHUNKS = 8;

/* Byte offset of a chunk. Chunk c ^ i lies at this offset ^ 16 i. */
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return row * STEP_BYTES + (chunk ^ row % 8) * 16;
}

/* The columns of the output: N, or N/2 where two rows of W give one. */
__host__ __device__ inline int output_columns(const struct product &p) {
    return p.epilogue == EPILOGUE_ACTIVATE ? p.N / 2 : p.N;
}
/* Of these, the columns of one tile. */
__host__ __device__ inline int tile_columns(const struct product &p, int tile_n) {
    return p.epilogue == EPILOGUE_ACTIVATE ? tile_n / 2 : tile_n;
}
/* First row of `in` and first output column of a block's tile. */
struct tile {
    int t, column;
};

/* Blocks that run together share operands in L2: up to TILE_GROUP tiles of rows meet one tile of
 * W before the next one, so W comes from memory once in TILE_GROUP tiles of rows. 132 tiles of
 * 128 x 192 that run together then read 16 tiles of rows and 8 of W: about as many bytes of
 * each. */
constexpr int TILE_GROUP = 16;

__device__ __forceinline__ struct tile tile_of_block(const struct product &p, int tile_t,
                                                     int tile_n) {
    const int columns = tile_columns(p, tile_n);
    const int tiles_n = divide_up(output_columns(p), columns);
    const int group = (int)blockIdx.x / (TILE_GROUP * tiles_n);
    const int in_group = (int)blockIdx.x - group * TILE_GROUP * tiles_n;
    const int rows = min(TILE_GROUP, divide_up(p.T, tile_t) - group * TILE_GROUP);
    return {(group * TILE_GROUP + in_group % rows) * tile_t, in_group / rows * columns};
}

/* What one thread copies of an operand in each step: one chunk of every APART-th row. M is float or
 * bf16. */
template <class M> struct tile_source {
    const M *from; /* the chunk in its first row, at the first step */
    size_t apart;  /* elements from one of its rows to the next */
    int rows;      /* of its rows, those that exist */
    int k;         /* where the chunk starts within a step */
};

/* Of the rows first, first + apart, ..., those below end. */
__device__ __forceinline__ int rows_below(int end, int first, int apart) {
    return first < end ? (end - first + apart - 1) / apart : 0;
}

template <int APART, class M>
__device__ __forceinline__ struct tile_source<M> input_source(const struct product &p, int t) {
    const int row = t + (int)threadIdx.x / STEP_CHUNKS;
    const int k = (int)threadIdx.x % STEP_CHUNKS * (16 / (int)sizeof(M));
    return {(const M *)p.in + (size_t)row * p.K + k, APART *(size_t)p.K,
            rows_below(p.T, row, APART), k};
}

/* With EPILOGUE_ACTIVATE the rows of a tile of W alternate: 8 of gate, the same 8 of up. APART is a
 * multiple of 16, so that a thread copies rows of one kind. */
template <int APART, class M>
__device__ __forceinline__ struct tile_source<M> weight_source(const struct product &p,
                                                               int column) {
    static_assert(APART % 16 == 0, "a thread copies rows of gate, or rows of up");
    const int row = (int)threadIdx.x / STEP_CHUNKS;
    const int k = (int)threadIdx.x % STEP_CHUNKS * (16 / (int)sizeof(M));
    const bool activate = p.epilogue == EPILOGUE_ACTIVATE;
    const bool up = activate && row / 8 % 2 == 1;
    const int n = column + (activate ? row / 16 * 8 + row % 8 : row);
    const int apart = activate ? APART / 2 : APART;
    return {(const M *)p.W + ((size_t)n + (up ? p.N / 2 : 0)) * p.K + k, apart *(size_t)p.K,
            rows_below(output_columns(p), n, apart), k};
}

/* Copies the step that starts at element `start` of K. What lies past the operand's rows or past
 * K is not read and becomes zero. to: chunk_offset(threadIdx.x / 8, threadIdx.x % 8) of the
 * operand's tile. */
template <int ROWS, int APART, class M>
__device__ __forceinline__ void copy_step(uint32_t to, const struct tile_source<M> &source,
                                          int start, int K) {
    static_assert(ROWS % APART == 0 && APART % 8 == 0, "every thread copies alike");
    const int rows = start + source.k < K ? source.rows : 0;
    const M *from = source.from + start;
#pragma unroll
    for (int i = 0; i < ROWS / APART; i++)
        copy_async_16(to + i * APART * STEP_BYTES, from + i * source.apart, i < rows);
}

/* ---- the epilogue ---- */

/* Sums of a tile in shared memory are f32 [TILE_T, sums_stride]: 8 more than a multiple of 32,
 * so that lanes that hold 8 columns of each of 4 rows write to 32 banks. */
__host__ __device__ constexpr int sums_stride(int tile_n) {
    return tile_n + 8;
}
__host__ __device__ constexpr int sums_bytes(int tile_t, int tile_n) {
    return tile_t * sums_stride(tile_n) * (int)sizeof(float);
}

/* Rows that a warp finishes together, so that what it loads of y is under way at once. */
constexpr int EPILOGUE_ROWS = 4;

/* y (+)= scale sums, for EPILOGUE_ROWS rows from `row` of the tile on. A lane takes every 32nd
 * column: whole lines of memory, whatever y_stride is. All loads come before all stores. */
template <int TILE_N>
__device__ __forceinline__ void store_rows(const struct product &p, const struct tile &tile,
                                           int row, const float *sums) {
    constexpr int COLUMNS = TILE_N / 32;
    const int lane = (int)threadIdx.x % 32, n = tile.column + lane;
    const int rows = p.T - tile.t - row; /* that exist, from `row` on */
    float *y = p.y + ((size_t)tile.t + row) * p.y_stride + n;
    float value[EPILOGUE_ROWS][COLUMNS] = {};
    if (p.epilogue == EPILOGUE_ADD) {
#pragma unroll
        for (int i = 0; i < EPILOGUE_ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (i < rows && n + 32 * j < p.N) value[i][j] = y[(size_t)i * p.y_stride + 32 * j];
    }
#pragma unroll
    for (int i = 0; i < EPILOGUE_ROWS; i++) {
        const float scale = p.scale && i < rows ? p.scale[tile.t + row + i] : 1.0f;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            value[i][j] += scale * sums[(row + i) * sums_stride(TILE_N) + lane + 32 * j];
    }
#pragma unroll
    for (int i = 0; i < EPILOGUE_ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (i < rows && n + 32 * j < p.N) y[(size_t)i * p.y_stride + 32 * j] = value[i][j];
}

/* h = act(gate) up, of one row. */
template <int TILE_N, class M>
__device__ __forceinline__ void activate_row(const struct product &p, const struct tile &tile,
                                             int row, const float *sums) {
    const int t = tile.t + row;
    if (t >= p.T) return;
    const float scale = p.scale ? p.scale[t] : 1.0f;
    M *h = (M *)p.h + (size_t)t * (p.N / 2);
#pragma unroll
    for (int j = 0; j < TILE_N / 2; j += 32) {
        const int column = (int)threadIdx.x % 32 + j;
        const float *s = sums + row * sums_stride(TILE_N) + column / 8 * 16 + column % 8;
        if (tile.column + column < p.N / 2)
            h[tile.column + column] =
                from_float<M>(activate(scale * s[0], p.activation == GELU_TANH) * (scale * s[8]));
    }
}

/* After a barrier behind which the sums are complete. */
template <int TILE_T, int TILE_N, int THREADS, class M>
__device__ __forceinline__ void store_tile(const struct product &p, const struct tile &tile,
                                           const float *sums) {
    static_assert(TILE_N % 64 == 0 && TILE_T % EPILOGUE_ROWS == 0, "lanes and warps take all");
    const int first = (int)threadIdx.x / 32 * EPILOGUE_ROWS;
    if (p.epilogue == EPILOGUE_ACTIVATE) {
#pragma unroll 1
        for (int row = first; row < TILE_T; row += THREADS / 32 * EPILOGUE_ROWS)
#pragma unroll
            for (int i = 0; i < EPILOGUE_ROWS; i++) activate_row<TILE_N, M>(p, tile, row + i, sums);
    } else {
#pragma unroll 1
        for (int row = first; row < TILE_T; row += THREADS / 32 * EPILOGUE_ROWS)
            store_rows<TILE_N>(p, tile, row, sums);
    }
}

/* ---- launching ---- */

/* A kernel for one shape of tiles. */
struct tile_form {
    int tile_t, tile_n, threads;
    int shared; /* bytes */
    int blocks; /* that a multiprocessor needs to be busy */
    int cost;   /* time of an output on a busy multiprocessor, in hundredths of the best form's */
    void (*kernel)(struct product);
};

/* Launches the form whose busiest multiprocessor ends first, among those whose shared memory the
 * device has. The first form is for every device. */
template <int FORMS>
void launch_tiles(struct cuda_backend *b, const char *name, const struct tile_form (&forms)[FORMS],
                  const struct product *p) {
    const struct tile_form *best = NULL;
    double least = 0;
    unsigned blocks = 0;
    for (const struct tile_form &form : forms) {
        const size_t tiles = (size_t)divide_up(p->T, form.tile_t) *
                             divide_up(output_columns(*p), tile_columns(*p, form.tile_n));
        const size_t in_turn =
            std::max((tiles + b->multiprocessors - 1) / b->multiprocessors, (size_t)form.blocks);
        const double time = (double)in_turn * form.tile_t * form.tile_n * form.cost;
        if (best && (form.shared > b->shared_bytes || time >= least)) continue;
        best = &form, least = time, blocks = (unsigned)tiles;
    }
    cuda_launch(b, name, best->kernel, dim3(blocks), best->threads, best->shared, *p);
}

#endif
