/* Products of many rows in f32: struct product, cuda.h. */
#include "kernels/cuda_tile.cuh"

/* Elements of K in a step. */
constexpr int DEPTH = STEP_BYTES / 4;
/* Threads of a block: 16 x 16, each with every 16th row of in and of W. */
constexpr int SIDE = 16;
constexpr int THREADS = SIDE * SIDE;
constexpr int APART = THREADS / STEP_CHUNKS;

/* sum += in W over the four elements of K in one chunk. in, W: addresses of this thread's first
 * row. */
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_chunk(float (&sum)[ROWS][COLUMNS], const char *in,
                                               const char *W) {
    float4 a[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) a[i] = *(const float4 *)(in + i * SIDE * STEP_BYTES);
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const float4 w = *(const float4 *)(W + j * SIDE * STEP_BYTES);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            sum[i][j] = fmaf(a[i].x, w.x, sum[i][j]);
            sum[i][j] = fmaf(a[i].y, w.y, sum[i][j]);
            sum[i][j] = fmaf(a[i].z, w.z, sum[i][j]);
            sum[i][j] = fmaf(a[i].w, w.w, sum[i][j]);
        }
    }
}

/* What      y (+)= scale in W^T, or h = act(gate) up of two such products: struct product, f32.
 * Shapes    in f32 [T, K], W f32 [N, K], scale f32 [T] or NULL, y f32 [T, y_stride], h f32 [T,
 *           N/2]; in and W start at multiples of 16 bytes, and neither y nor h overlaps them.
 * Owners    a block: 16 ROWS rows of in and 16 COLUMNS rows of W, for all of K. A thread: every
 *           16th of each. A warp's threads lie 4 x 8, so that a load of in or W reads at most 8
 *           rows.
 * Memory    a ring of STAGES steps, each 16 (ROWS + COLUMNS) rows of 128 bytes (chunk_offset):
 *           loads of 8 rows and copies meet no bank twice. Sums, and a chunk of each row of in,
 *           in registers.
 * Bound     2 T N K FLOPs. A thread loads ROWS + COLUMNS chunks for 4 ROWS COLUMNS multiply-
 *           adds.
 * Numerics  each sum is one chain of f32 multiply-adds over K in ascending order, whatever the
 *           tile, so a row's result does not depend on the rows beside it. Rows and columns past
 *           the end are computed from zeros and not stored; K is filled up with zeros.
 * Dependent launch  the first steps of W are asked for before the inputs are there.
 * Form      multiply-adds, not tensor cores: those would round the inputs to TF32. */
template <int ROWS, int COLUMNS, int STAGES>
__global__ void __launch_bounds__(THREADS, 1) matmul_f32(const struct product p) {
    start_dependents();
    extern __shared__ __align__(STEP_BYTES) char ring[];
    constexpr int TILE_T = SIDE * ROWS, TILE_N = SIDE * COLUMNS;
    constexpr uint32_t W_TILE = TILE_T * STEP_BYTES, STAGE = (TILE_T + TILE_N) * STEP_BYTES;
    static_assert(sums_bytes(TILE_T, TILE_N) <= STAGES * STAGE, "sums take the ring's place");
    const int steps = divide_up(p.K, DEPTH), thread = (int)threadIdx.x;
    const int warp = thread / 32, lane = thread % 32;
    const int t = warp / 2 * 4 + lane / 8, n = warp % 2 * 8 + lane % 8; /* first rows of in and W */

    const struct tile tile = tile_of_block(p, TILE_T, TILE_N);
    const struct tile_source<float> in = input_source<APART, float>(p, tile.t);
    const struct tile_source<float> W = weight_source<APART, float>(p, tile.column);
    const uint32_t to =
        shared_address(ring) + chunk_offset(thread / STEP_CHUNKS, thread % STEP_CHUNKS);

    for (int s = 0; s < STAGES - 1 && s < steps; s++)
        copy_step<TILE_N, APART>(to + W_TILE + s * STAGE, W, s * DEPTH, p.K);
    wait_for_inputs();
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy_step<TILE_T, APART>(to + s * STAGE, in, s * DEPTH, p.K);
        copy_async_commit(); /* one group a step; the first one has W of all these steps too */
    }

    float sum[ROWS][COLUMNS] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        /* Every thread's copies of this step | all threads load it. All threads' loads of the step
         * before | the next copies overwrite it. */
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) {
            const uint32_t stage = to + next % STAGES * STAGE;
            copy_step<TILE_T, APART>(stage, in, next * DEPTH, p.K);
            copy_step<TILE_N, APART>(stage + W_TILE, W, next * DEPTH, p.K);
        }
        copy_async_commit();
        const char *stage = ring + step % STAGES * STAGE;
#pragma unroll 2
        for (int chunk = 0; chunk < STEP_CHUNKS; chunk++)
            multiply_chunk(sum, stage + chunk_offset(t, chunk),
                           stage + W_TILE + chunk_offset(n, chunk));
    }

    float *sums = (float *)ring;
    __syncthreads(); /* all threads' loads of the last step | sums overwrite it */
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            sums[(t + SIDE * i) * sums_stride(TILE_N) + n + SIDE * j] = sum[i][j];
    __syncthreads(); /* all threads' sums | the epilogue reads whole rows */
    store_tile<TILE_T, TILE_N, THREADS, float>(p, tile, sums);
}

template <int ROWS, int COLUMNS, int STAGES> constexpr struct tile_form form(int cost) {
    constexpr int SHARED_BYTES = STAGES * SIDE * (ROWS + COLUMNS) * STEP_BYTES;
    static_assert(SHARED_BYTES <= 99 * 1024, "the smallest devices have it");
    return {SIDE * ROWS,
            SIDE * COLUMNS,
            THREADS,
            SHARED_BYTES,
            1,
            cost,
            matmul_f32<ROWS, COLUMNS, STAGES>};
}

void cuda_matmul_f32(struct cuda_backend *b, const struct product *p) {
    /* Few rows or columns, 4 x 4 sums a thread; many, 8 x 8: half the loads for a multiply-add. */
    static const struct tile_form forms[] = {form<4, 4, 4>(150), form<8, 8, 3>(100)};
    launch_tiles(b, "matmul_f32", forms, p);
}
