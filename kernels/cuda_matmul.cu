/* Products of many rows in bf16 on tensor cores, from sm_80 on: struct product, cuda.h. */
#include "kernels/cuda_tile.cuh"

/* Elements of K in a step, and in one tensor-core instruction. */
constexpr int DEPTH = STEP_BYTES / 2;
constexpr int PART = 16;
constexpr int PARTS = DEPTH / PART;

/* A tile, the warps that share it and the ring of steps in shared memory. */
template <int T, int N, int WARPS_T, int WARPS_N, int RING, int RESIDENT> struct shape {
    static constexpr int TILE_T = T, TILE_N = N, STAGES = RING;
    static constexpr int BLOCKS = RESIDENT; /* on a multiprocessor, at least */
    static constexpr int COLUMNS_OF_WARPS = WARPS_N;
    static constexpr int THREADS = 32 * WARPS_T * WARPS_N;
    static constexpr int WARP_T = T / WARPS_T, WARP_N = N / WARPS_N;
    static constexpr int BLOCKS_16 = WARP_T / 16; /* of 16 rows of in, in a warp */
    static constexpr int OCTETS = WARP_N / 8;     /* of 8 rows of W */
    static constexpr int APART = THREADS / STEP_CHUNKS;
    static constexpr int STAGE_BYTES = (T + N) * STEP_BYTES;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
    static_assert(WARP_T % 16 == 0 && WARP_N % 16 == 0, "load_matrices brings 16 rows");
    static_assert(sums_bytes(T, N) <= SHARED_BYTES, "sums take the ring's place");
};

/* One part of K: what a warp's instructions read. */
template <class S> struct fragments {
    uint32_t in[S::BLOCKS_16][4];
    uint32_t W[S::OCTETS / 2][4]; /* two octets: b0, b1 of the first, b0, b1 of the second */
};

/* in, W: addresses of this lane's chunk of part 0 in the warp's first rows of the stage. */
template <class S>
__device__ __forceinline__ void load_part(struct fragments<S> &f, uint32_t in, uint32_t W,
                                          int part) {
    const uint32_t chunk = 16 * (PART / 8) * part;
#pragma unroll
    for (int i = 0; i < S::BLOCKS_16; i++)
        load_matrices(f.in[i], (in ^ chunk) + i * 16 * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < S::OCTETS / 2; i++)
        load_matrices(f.W[i], (W ^ chunk) + i * 16 * STEP_BYTES);
}

template <class S>
__device__ __forceinline__ void multiply_part(float (&sum)[S::BLOCKS_16][S::OCTETS][4],
                                              const struct fragments<S> &f) {
#pragma unroll
    for (int i = 0; i < S::BLOCKS_16; i++)
#pragma unroll
        for (int j = 0; j < S::OCTETS; j++)
            multiply_add(sum[i][j], f.in[i], f.W[j / 2][j % 2 * 2], f.W[j / 2][j % 2 * 2 + 1]);
}

/* A lane's sums to where the block's epilogue reads them. to: rows t and columns 2 (l%4) of the
 * warp. */
template <class S>
__device__ __forceinline__ void keep_sums(float *to,
                                          const float (&sum)[S::BLOCKS_16][S::OCTETS][4]) {
#pragma unroll
    for (int i = 0; i < S::BLOCKS_16; i++)
#pragma unroll
        for (int j = 0; j < S::OCTETS; j++) {
            float *upper = to + 16 * i * sums_stride(S::TILE_N) + 8 * j;
            float *lower = upper + 8 * sums_stride(S::TILE_N);
            *(float2 *)upper = {sum[i][j][0], sum[i][j][1]};
            *(float2 *)lower = {sum[i][j][2], sum[i][j][3]};
        }
}

/* What      y (+)= scale in W^T, or h = act(gate) up of two such products: struct product,
 *           bf16.
 * Shapes    in bf16 [T, K], W bf16 [N, K], scale f32 [T] or NULL, y f32 [T, y_stride], h bf16
 *           [T, N/2]; in and W start at multiples of 16 bytes, and neither y nor h overlaps
 *           them.
 * Owners    a block: TILE_T rows and TILE_N rows of W, for all of K. A warp: a WARP_T x WARP_N
 *           part of that. A lane: as the tensor cores hold a 16 x 8 product (multiply_add).
 * Memory    a ring of STAGES steps, each TILE_T + TILE_N rows of 128 bytes (chunk_offset): loads
 *           of 8 rows and copies meet no bank twice. Sums and two parts of K in registers: while
 *           one is multiplied the other is loaded. At the end the sums go through shared memory,
 *           so that rows of y and h are written in whole lines, aligned or not.
 * Bound     2 T N K FLOPs. A warp reads WARP_T + WARP_N rows from shared memory for WARP_T x
 *           WARP_N products: with 64 x 64 that and the tensor cores are about balanced. L2 gives
 *           a block TILE_T + TILE_N rows for TILE_T x TILE_N products. With few rows: W from
 *           memory, once.
 * Numerics  f32 sums over K in ascending order, 16 at a time, whatever the tile, so a row's
 *           result does not depend on the rows beside it. Rows and columns past the end are
 *           computed from zeros and not stored; K is filled up with zeros.
 * Dependent launch  the first steps of W are asked for before the inputs are there.
 * Form      tensor cores through mma.sync, which every device from sm_80 on has. */
template <class S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS) matmul(const struct product p) {
    start_dependents();
    extern __shared__ __align__(STEP_BYTES) unsigned char ring[];
    constexpr uint32_t END = S::STAGES * S::STAGE_BYTES, W_TILE = S::TILE_T * STEP_BYTES;
    const int steps = divide_up(p.K, DEPTH), thread = (int)threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0); /* the compiler sees it as uniform */
    const int warp_t = warp / S::COLUMNS_OF_WARPS * S::WARP_T;
    const int warp_n = warp % S::COLUMNS_OF_WARPS * S::WARP_N;

    const struct tile tile = tile_of_block(p, S::TILE_T, S::TILE_N);
    const struct tile_source<bf16> in = input_source<S::APART, bf16>(p, tile.t);
    const struct tile_source<bf16> W = weight_source<S::APART, bf16>(p, tile.column);
    const uint32_t base = shared_address(ring);
    const uint32_t to = base + chunk_offset(thread / STEP_CHUNKS, thread % STEP_CHUNKS);
    /* Rows and chunks that this lane names to load_matrices: a[0], a[1] are the rows of the first
     * chunk, a[2], a[3] of the second; b0, b1 of the first octet, then of the second. */
    const uint32_t in_at = base + chunk_offset(warp_t + lane % 16, lane / 16);
    const uint32_t W_at =
        base + W_TILE + chunk_offset(warp_n + lane / 16 * 8 + lane % 8, lane / 8 % 2);

#pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++)
        if (s < steps)
            copy_step<S::TILE_N, S::APART>(to + W_TILE + s * S::STAGE_BYTES, W, s * DEPTH, p.K);
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < S::STAGES - 1; s++) {
        if (s < steps) copy_step<S::TILE_T, S::APART>(to + s * S::STAGE_BYTES, in, s * DEPTH, p.K);
        copy_async_commit(); /* one group a step; the first one has W of all these steps too */
    }

    float sum[S::BLOCKS_16][S::OCTETS][4] = {};
    struct fragments<S> part[2];
    uint32_t stage = 0, spare = END - S::STAGE_BYTES; /* read now, and filled next: offsets */
    copy_async_wait<S::STAGES - 2>();
    __syncthreads(); /* every thread's copies of step 0 | all warps load it */
    load_part<S>(part[0], in_at, W_at, 0);
    for (int step = 0; step < steps; step++) {
        const int next = step + S::STAGES - 1; /* goes to where step - 1 was */
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            if (i == PARTS - 1) {
                copy_async_wait<S::STAGES - 2>();
                /* Every thread's copies of step + 1 | all warps load it. All warps' loads of this
                 * step | copies of the next round overwrite it. */
                __syncthreads();
                spare = stage;
                stage = stage + S::STAGE_BYTES == END ? 0 : stage + S::STAGE_BYTES;
            }
            /* After the last step this loads what nobody multiplies. */
            load_part<S>(part[(i + 1) % 2], in_at + stage, W_at + stage, (i + 1) % PARTS);
            if (i == 0 && next < steps)
                copy_step<S::TILE_T, S::APART>(to + spare, in, next * DEPTH, p.K);
            if (i == 1 && next < steps)
                copy_step<S::TILE_N, S::APART>(to + W_TILE + spare, W, next * DEPTH, p.K);
            if (i == 1) copy_async_commit();
            multiply_part<S>(sum, part[i % 2]);
        }
    }
    float *sums = (float *)ring;
    __syncthreads(); /* all warps' loads, the last one of no use | sums overwrite the ring */
    keep_sums<S>(sums + (warp_t + lane / 4) * sums_stride(S::TILE_N) + warp_n + lane % 4 * 2, sum);
    __syncthreads(); /* all warps' sums | the epilogue reads whole rows */
    store_tile<S::TILE_T, S::TILE_N, S::THREADS, bf16>(p, tile, sums);
}

/* Few rows, and W bound by its stream from memory: a block has five steps of 8 KB of W under
 * way, enough for memory with one block a multiprocessor. 96 KB of shared memory are there on
 * every device. */
using narrow = shape<64, 64, 2, 2, 6, 2>;
/* A tile for each multiprocessor or fewer: 512 rows of 4096 columns are 128. Two warps a scheduler,
 * else nothing is multiplied while a warp loads. */
using square = shape<128, 128, 4, 2, 4, 1>;
/* More tiles: two blocks share a multiprocessor, and each computes through the other's barriers. */
using paired = shape<128, 128, 2, 2, 3, 2>;
/* 512 rows of 6144 columns: 128 tiles. */
using wide = shape<128, 192, 2, 4, 4, 1>;
/* Many rows: L2 and shared memory have to give the least for an output. */
using widest = shape<128, 256, 2, 4, 3, 1>;

static_assert(narrow::SHARED_BYTES <= 99 * 1024, "sm_86 has it");
static_assert(paired::SHARED_BYTES <= 99 * 1024, "sm_86 has it");
static_assert(2 * paired::SHARED_BYTES <= 226 * 1024, "two blocks on sm_90");
static_assert(square::SHARED_BYTES <= 163 * 1024, "sm_80 has it");
static_assert(wide::SHARED_BYTES <= 163 * 1024, "sm_80 has it");
static_assert(widest::SHARED_BYTES <= 163 * 1024, "sm_80 has it");

template <class S> constexpr struct tile_form form(int cost) {
    return {S::TILE_T, S::TILE_N, S::THREADS, S::SHARED_BYTES, S::BLOCKS, cost, matmul<S>};
}

void cuda_matmul(struct cuda_backend *b, const struct product *p) {
    /* Costs: on an H200 gate and up of the 8B model took 7247, 5332, 4652, 4909, 4574 us for 8192 rows. */
    static const struct tile_form forms[] = {form<narrow>(158), form<square>(117),
                                             form<paired>(102), form<wide>(107), form<widest>(100)};
    launch_tiles(b, "matmul", forms, p);
}
