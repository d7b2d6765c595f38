/* Products for 2 to 16 rows in bf16 that read the weights once, at nearly the speed of one row:
 * rows of W are the 16-row side of the tensor cores' tiles, rows of the step the 8-column side. */
#include "kernels/cuda.cuh"
#include "kernels/cuda.h"

namespace {

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    DEPTH = 64, /* of K, that a warp takes at a time: 128 bytes of a row, a line of L2 */
    STRIDE = WARPS * DEPTH, /* of K, that a block takes at a time: 1 KB of a row */
    TILE = 16 * DEPTH * 2,  /* bytes of 16 rows of W in one depth */
    /* Tiles that each warp has asked for: 64 KB a multiprocessor. 4.6 TB/s need 28 to 35 KB on the
     * way at all times; far more only queues in front of all other traffic. */
    STAGES = 4,
    COLUMNS = 8, /* rows of the step in a 16x8 tile of sums */
    /* Such tiles in a warp's registers: 40 floats of the 128 registers that leave half of the file
     * to other kernels. So 80 rows of W meet 16 rows of the step, or 160 meet 8, before the inputs
     * are read again. */
    SUMS = 10,
    SUM_FLOATS = SUMS * 4, /* of each lane */
    RING_BYTES = WARPS * STAGES * TILE,
    PARTIAL_BYTES = WARPS * SUM_FLOATS * 32 * 4,
    /* What a block takes: more than half of a multiprocessor's shared memory, so that two never
     * share one. The small kernels between products leave some multiprocessors emptier than others;
     * two blocks would move in there, and all later kernels would inherit the imbalance. */
    SHARED_BYTES = 116 << 10,
    /* Fewest units of W for a block: the inputs, which every block reads, are 16 rows. */
    LEAST_UNITS = 4
};
static_assert(RING_BYTES + PARTIAL_BYTES <= SHARED_BYTES, "the ring and the sums fit");

/* What a block owns. A unit is a row of W; with ACTIVATE a gate row and its up row. */
struct share {
    int first, last; /* units */
    int tiles;       /* of `span` units, each 16 rows of W */
    int group;       /* tiles of a group, whose sums fit in registers; fewer in the last one */
    int span;        /* units of a tile */
    int below;       /* rows from an upper row of a tile (0 to 7) to its lower row (8 to 15) */
    int skip;        /* units between the two */
};

/* The next tile that a warp asks for: through the tiles of a group at one depth, then the next
 * depth. */
struct cursor {
    int start; /* of the group */
    int tile, k;
};

template <int TILES> __device__ __forceinline__ share share_of_block(const product &p) {
    const bool activate = p.epilogue == EPILOGUE_ACTIVATE;
    const long long units = activate ? p.N / 2 : p.N;
    share own;
    own.first = (int)(units * blockIdx.x / gridDim.x);
    own.last = (int)(units * (blockIdx.x + 1) / gridDim.x);
    own.span = activate ? 8 : 16;
    own.below = activate ? p.N / 2 : 8;
    own.skip = activate ? 0 : 8;
    own.tiles = (own.last - own.first + own.span - 1) / own.span;
    const int groups = (own.tiles + TILES - 1) / TILES;
    own.group = (own.tiles + groups - 1) / groups;
    return own;
}

/* Asks for this lane's part of the cursor's tile, one group of copies, and moves the cursor on.
 * The lane takes rows lane/4 and lane/4 + 8, of each the 16 bytes at 8 (lane % 4) and at 32
 * further. */
__device__ __forceinline__ void ask_for_tile(const product &p, const share &own, cursor &next,
                                             uint32_t slot, int lane, int first_k) {
    if (next.tile < own.tiles) {
        const int unit = own.first + next.tile * own.span + lane / 4;
        const int k = next.k + 8 * (lane % 4);
        const bf16 *upper = (const bf16 *)p.W + (size_t)unit * p.K + k;
        const bf16 *lower = upper + (size_t)own.below * p.K;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool inside = k + 32 * half < p.K;
            copy_async_once_16(slot + half * 512, upper + 32 * half, inside && unit < own.last);
            copy_async_once_16(slot + 1024 + half * 512, lower + 32 * half,
                               inside && unit + own.skip < own.last);
        }
        if (++next.tile == min(next.start + own.group, own.tiles)) {
            next.k += STRIDE;
            if (next.k >= p.K) {
                next.k = first_k;
                next.start = next.tile;
            }
            next.tile = next.start;
        }
    }
    copy_async_commit();
}

/* The lane's part of the inputs at one depth: of row lane/4 of each eight, the same k as of W.
 * They were written while this kernel ran already, so they come from L2. */
template <int EIGHTS>
__device__ __forceinline__ void load_inputs(uint4 inputs[2][EIGHTS], const product &p, int k,
                                            int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            const int t = eight * COLUMNS + lane / 4, from = k + 32 * half + 8 * (lane % 4);
            inputs[half][eight] = make_uint4(0, 0, 0, 0);
            if (t < p.T && from < p.K)
                inputs[half][eight] =
                    __ldcg((const uint4 *)((const bf16 *)p.in + (size_t)t * p.K + from));
        }
}

/* sums[16 rows of W, 8 EIGHTS rows of the step] += a tile. Of the 8 neighbouring k of a lane the
 * first four go into one instruction and the others into the next: the same k in W and in the
 * inputs. */
template <int EIGHTS>
__device__ __forceinline__ void multiply_tile(float sums[EIGHTS][4], const uint4 weights[4],
                                              const uint4 inputs[2][EIGHTS]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint4 upper = weights[half], lower = weights[2 + half];
        const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y};
        const uint32_t second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++)
            multiply_add(sums[eight], first, inputs[half][eight].x, inputs[half][eight].y);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++)
            multiply_add(sums[eight], second, inputs[half][eight].z, inputs[half][eight].w);
    }
}

__device__ __forceinline__ float sum_of_warps(const float *partial, int slot, int lane) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += partial[(warp * SUM_FLOATS + slot) * 32 + lane];
    return sum;
}

/* A thread ends two sums of a tile, which some lane held of the upper and of the lower row: with
 * ACTIVATE gate and up. */
template <int EIGHTS>
__device__ __forceinline__ void finish_group(const product &p, const share &own,
                                             const float *partial, int start, int tiles) {
    const bool add = p.epilogue == EPILOGUE_ADD;
    for (int i = threadIdx.x; i < tiles * EIGHTS * 64; i += THREADS) {
        const int lane = i % 32, side = i / 32 % 2, tile = i / 64 / EIGHTS, eight = i / 64 % EIGHTS;
        const int t = eight * COLUMNS + 2 * (lane % 4) + side;
        const int unit = own.first + (start + tile) * own.span + lane / 4;
        if (t >= p.T || unit >= own.last) continue;
        const bool both = unit + own.skip < own.last;
        float *y = p.y + (size_t)t * p.y_stride + unit;
        const float upper_before = add ? __ldcg(y) : 0,
                    lower_before = add && both ? __ldcg(y + 8) : 0;
        const float scale = p.scale ? __ldcg(p.scale + t) : 1;
        const int slot = (tile * EIGHTS + eight) * 4 + side;
        const float upper = scale * sum_of_warps(partial, slot, lane);
        const float lower = scale * sum_of_warps(partial, slot + 2, lane);
        if (p.epilogue == EPILOGUE_ACTIVATE) {
            ((bf16 *)p.h)[(size_t)t * own.below + unit] = from_float<bf16>(silu(upper) * lower);
        } else {
            y[0] = upper_before + upper;
            if (both) y[8] = lower_before + lower;
        }
    }
}

/* What      the contract of struct product, 1 to 8 EIGHTS rows, bf16 with f32 sums.
 * Owners    block b the units [units b / grid, units (b + 1) / grid); in a block the warps share
 *           K: warp w takes the depths w, w + 8, .. of all rows. So each input enters a
 *           multiprocessor once a group of tiles, and the warps together read 1 KB of a row at a
 *           time.
 * Form      each lane copies just those 16 bytes of W into shared memory that it multiplies
 *           itself, since any order of k will do if W and the inputs share it. So the ring needs
 *           no barrier, no ldmatrix and no warp that produces, and has no bank conflicts: a copy's
 *           wait is a lane's own. (Bulk copies of row pieces would take one instruction a row and
 *           depth, of a single lane each.)
 * Shared    ring [8 warps, 4 stages, 4, 32 lanes] of 16 bytes; partial f32 [8 warps, 40, 32
 *           lanes].
 * Bound     bytes of W, read once. Inputs come from L2: 2 T K a block and group, that is T / (rows
 *           of the group) of the bytes of W: at T = 16 half for N = 4096, a fifth for many rows.
 * Numerics  f32 sums, k in ascending depths within a warp, then the warps in order. Past T, N and
 *           K zeros are multiplied and nothing is read.
 * Order     the ring is filled before the inputs are waited for; they are loaded one depth ahead.
 * Barriers  partial[] is written by each warp | summed over all warps | overwritten in the next
 *           group. */
template <int EIGHTS> __global__ void __launch_bounds__(THREADS, 2) few_rows(product p) {
    constexpr int TILES = SUMS / EIGHTS;
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_k = warp * DEPTH;
    float *partial = (float *)(shared + RING_BYTES);
    start_dependents();
    const share own = share_of_block<TILES>(p);
    cursor next = {0, first_k < p.K ? 0 : own.tiles, first_k};
    const uint4 *ring = (const uint4 *)(shared + warp * STAGES * TILE) + lane;
    for (int stage = 0; stage < STAGES; stage++)
        ask_for_tile(p, own, next, shared_address(ring) + stage * TILE, lane, first_k);
    wait_for_inputs();

    uint4 coming[2][EIGHTS];
    load_inputs<EIGHTS>(coming, p, first_k, lane);
    int stage = 0;
    for (int start = 0; start < own.tiles; start += own.group) {
        const int tiles = min(own.group, own.tiles - start);
        float sums[TILES][EIGHTS][4] = {};
#pragma unroll 1
        for (int k = first_k; k < p.K; k += STRIDE) {
            uint4 inputs[2][EIGHTS];
#pragma unroll
            for (int i = 0; i < 2 * EIGHTS; i++)
                inputs[i / EIGHTS][i % EIGHTS] = coming[i / EIGHTS][i % EIGHTS];
            load_inputs<EIGHTS>(coming, p, k + STRIDE < p.K ? k + STRIDE : first_k, lane);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                if (tile < tiles) {
                    copy_async_wait<STAGES - 1>();
                    const uint4 *slot = ring + stage * (TILE / 16);
                    const uint4 weights[4] = {slot[0], slot[32], slot[64], slot[96]};
                    ask_for_tile(p, own, next, shared_address(slot), lane, first_k);
                    stage = (stage + 1) % STAGES;
                    multiply_tile<EIGHTS>(sums[tile], weights, inputs);
                }
        }
        if (start > 0) __syncthreads();
#pragma unroll
        for (int i = 0; i < SUM_FLOATS; i++)
            partial[(warp * SUM_FLOATS + i) * 32 + lane] =
                sums[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4];
        __syncthreads();
        finish_group<EIGHTS>(p, own, partial, start, tiles);
    }
}

} // namespace

void cuda_few_rows(struct cuda_backend *b, const struct product *p) {
    if (p->dtype != BF16 || p->T < 1 || p->T > 2 * COLUMNS || p->K % 8 || p->K < 8) {
        cuda_failed(b, "cuda_few_rows: bf16, 1 to 16 rows, K a multiple of 8",
                    cudaErrorInvalidValue);
        return;
    }
    const int units = p->epilogue == EPILOGUE_ACTIVATE ? p->N / 2 : p->N;
    const int wanted = (units + LEAST_UNITS - 1) / LEAST_UNITS;
    const dim3 grid((unsigned)(wanted < b->multiprocessors ? wanted : b->multiprocessors));
    if (p->T <= COLUMNS)
        cuda_launch(b, "few_rows", few_rows<1>, grid, THREADS, SHARED_BYTES, *p);
    else
        cuda_launch(b, "few_rows", few_rows<2>, grid, THREADS, SHARED_BYTES, *p);
}
