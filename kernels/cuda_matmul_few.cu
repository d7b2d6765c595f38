/* Products of 2 to 64 rows in bf16 on sm_90, at the speed of memory: rows of W are the 64-row side of the
 * tensor cores' products, rows of the step the narrow side. A member of a chain of dependent launches:
 * W streams before the kernel's inputs are there. */
#include "kernels/cuda_matmul_hopper.h"
#include "kernels/cuda_wgmma.cuh"

#include <algorithm>

namespace {

enum {
    CONSUMERS = 128,              /* a warpgroup */
    THREADS = CONSUMERS + 2 * 32, /* a warp asks for W, another for the rows */
    GROUP = 8,       /* units: what work is dealt out in, since panels swizzle 8 rows */
    MOST_GROUPS = 8, /* of a tile: 64 units */
    MAX_STAGES = 16,
    /* Bytes of W on their way to a multiprocessor: 4.6 TB/s need about 35 KB, and far more would
     * queue in front of the chain's other traffic. */
    IN_FLIGHT = 48 << 10,
    /* Bytes of a block. Two neighbours of the chain fit into a multiprocessor (227 KB), so that one
     * fills its ring while the other drains, and three do not. Two of the products that ADD never
     * share one: attention leaves some multiprocessors emptier than others, two blocks of the next
     * product would move in there, and all later kernels would inherit the imbalance. */
    SHARED_BYTES = 96 << 10,
    SHARED_BYTES_ADD = 116 << 10,
    /* Of more than 16 rows, whose panels would leave such a ring two or three stages. */
    SHARED_BYTES_WIDE = 200 << 10
};

/* How the units are dealt out, in groups: `each` to a block, one more to the first `more`. A block takes
 * them in `tiles` tiles that differ by one group at most, the larger ones of `units` units. */
struct deal {
    int each, more, tiles, units;
    int stages, in_flight; /* of the ring; of W, on their way at most */
    int steps;             /* of K, in a tile */
};

/* Stages of the ring: two panels of W, [2][units][64], then panels of the rows, [1 or 2][ROWS][64].
 * With ACTIVATE the panels of W are gate and up, else two neighbouring pieces of K. */
template <int ROWS, bool ACTIVATE> struct stage_form {
    static constexpr int PIECES = ACTIVATE ? 1 : 2; /* of 64 of K */
    static constexpr int DEPTH = PIECES * PANEL_DEPTH;
    static constexpr int ROWS_BYTES = ROWS * PANEL_ROW_BYTES;
    static __host__ __device__ constexpr int bytes(int units) {
        return 2 * units * PANEL_ROW_BYTES + PIECES * ROWS_BYTES;
    }
};

struct barriers {
    uint64_t W[MAX_STAGES],
        rows[MAX_STAGES];       /* a stage's bytes have landed | they are multiplied */
    uint64_t empty[MAX_STAGES]; /* all warps' products have read it | it is refilled */
};

/* A place in the ring and the parity of its phase. */
struct place {
    int stage, parity;
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

/* The tiles of this block. */
struct tile_walk {
    int first, each, more; /* groups: of the block, of a tile; tiles that have one more */
    __device__ __forceinline__ explicit tile_walk(const deal &d) {
        const int block = (int)blockIdx.x, groups = d.each + (block < d.more);
        first = block * d.each + min(block, d.more);
        each = groups / d.tiles;
        more = groups - each * d.tiles;
    }
    /* First unit of a tile. */
    __device__ __forceinline__ int unit(int tile) const {
        return (first + tile * each + min(tile, more)) * GROUP;
    }
};

/* Asks for W, all of the block's, from before the inputs are there. tall, low: boxes of d.units units and
 * of a group less. */
template <class S>
__device__ void ask_for_weights(const CUtensorMap *tall, const CUtensorMap *low, const deal &d,
                                uint32_t ring, barriers *barrier, bool activate) {
    const tile_walk walk(d);
    place next = {0, 1}, landed = {0, 0};
    int asked = 0;
    for (int tile = 0; tile < d.tiles; tile++) {
        const int unit = walk.unit(tile), units = walk.unit(tile + 1) - unit;
        const CUtensorMap *map = units == d.units ? tall : low;
        for (int k = 0; k < d.steps * S::DEPTH; k += S::DEPTH) {
            const uint32_t full = shared_address(&barrier->W[next.stage]);
            const uint32_t to = ring + next.stage * S::bytes(d.units);
            barrier_wait(shared_address(&barrier->empty[next.stage]), next.parity);
            if (asked++ >= d.in_flight) {
                barrier_wait(shared_address(&barrier->W[landed.stage]), landed.parity);
                landed.advance(d.stages);
            }
            barrier_expect(full, 2 * units * PANEL_ROW_BYTES);
            copy_box(to, map, full, READ_ONCE, k, unit, 0);
            copy_box(to + d.units * PANEL_ROW_BYTES, map, full, READ_ONCE,
                     activate ? k : k + PANEL_DEPTH, unit, activate ? 1 : 0);
            next.advance(d.stages);
        }
    }
}

/* Asks for the rows of the step, once a tile. */
template <class S>
__device__ void ask_for_rows(const CUtensorMap *map, const deal &d, uint32_t ring,
                             barriers *barrier) {
    place next = {0, 1};
    prefetch_map(map);
    wait_for_inputs();
    for (int tile = 0; tile < d.tiles; tile++)
        for (int k = 0; k < d.steps * S::DEPTH; k += S::DEPTH) {
            const uint32_t full = shared_address(&barrier->rows[next.stage]);
            const uint32_t to =
                ring + next.stage * S::bytes(d.units) + 2 * d.units * PANEL_ROW_BYTES;
            barrier_wait(shared_address(&barrier->empty[next.stage]), next.parity);
            barrier_expect(full, S::PIECES * S::ROWS_BYTES);
#pragma unroll
            for (int piece = 0; piece < S::PIECES; piece++)
                copy_box(to + piece * S::ROWS_BYTES, map, full, READ_AGAIN, k + piece * PANEL_DEPTH,
                         0);
            next.advance(d.stages);
        }
}

/* sums[i] = panel i of W times the rows, over all of K. */
template <int ROWS, class S>
__device__ __forceinline__ void multiply_tile(float (&sums)[2][ROWS / 2], const deal &d,
                                              uint32_t ring, barriers *barrier, place &next) {
    int last = -1; /* stage whose products may still be under way */
    for (int step = 0; step < d.steps; step++) {
        const uint32_t at = ring + next.stage * S::bytes(d.units);
        const uint32_t rows_at = at + 2 * d.units * PANEL_ROW_BYTES;
        barrier_wait(shared_address(&barrier->W[next.stage]), next.parity);
        barrier_wait(shared_address(&barrier->rows[next.stage]), next.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < PANEL_DEPTH / 16; i++)
#pragma unroll
            for (int panel = 0; panel < 2; panel++)
                wgmma<ROWS>(sums[panel],
                            wgmma_panel(at + panel * d.units * PANEL_ROW_BYTES) +
                                i * WGMMA_COLUMNS_16,
                            wgmma_panel(rows_at + panel * (S::PIECES - 1) * S::ROWS_BYTES) +
                                i * WGMMA_COLUMNS_16,
                            step > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (last >= 0 && threadIdx.x % 32 == 0)
            barrier_arrive(shared_address(&barrier->empty[last]));
        last = next.stage;
        next.advance(d.stages);
    }
    wgmma_wait<0>();
    settle(sums[0]);
    settle(sums[1]);
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barrier->empty[last]));
}

/* What a thread's outputs need of other kernels, asked for before the tile's products. Output i of the
 * thread: half = i / 2 % 2 chooses the unit, 8 apart; t = i / 4 * 8 + i % 2 past its first row. */
template <int ROWS, bool ACTIVATE> struct ahead {
    float scale[ROWS / 4];
    float before[ACTIVATE ? 1 : ROWS / 2];

    __device__ __forceinline__ void load(const product &p, int t, int unit, int last) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const int row = t + i / 2 * 8 + i % 2;
            scale[i] = p.scale && row < p.T ? __ldcg(p.scale + row) : 1.0f;
        }
        if constexpr (!ACTIVATE) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                const int row = t + i / 4 * 8 + i % 2, n = unit + i / 2 % 2 * 8;
                before[i] = p.epilogue == EPILOGUE_ADD && row < p.T && n < last
                                ? __ldcg(p.y + (size_t)row * p.y_stride + n)
                                : 0.0f;
            }
        }
    }
};

/* Of the warpgroup's 64 units this thread has two: `unit` and the one 8 further, if before last. */
template <int ROWS, bool ACTIVATE>
__device__ __forceinline__ void finish_tile(const product &p, const float (&sums)[2][ROWS / 2],
                                            const ahead<ROWS, ACTIVATE> &ahead, int t, int unit,
                                            int last) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int row = t + i / 4 * 8 + i % 2, n = unit + i / 2 % 2 * 8;
        const float scale = ahead.scale[i / 4 * 2 + i % 2];
        if (row >= p.T || n >= last) continue;
        if constexpr (ACTIVATE)
            ((bf16 *)p.h)[(size_t)row * (p.N / 2) + n] =
                from_float<bf16>(silu(scale * sums[0][i]) * (scale * sums[1][i]));
        else
            p.y[(size_t)row * p.y_stride + n] = ahead.before[i] + scale * (sums[0][i] + sums[1][i]);
    }
}

/* What      the contract of struct product, 2 to ROWS rows, bf16 with f32 sums.
 * Owners    a block the units that `deal` says, tile by tile for all of K. The warpgroup: 64 units by
 *           ROWS rows; a thread two units by ROWS / 4 rows.
 * Shared    a ring of stages (stage_form), 8 KB past it, barriers. A tile of fewer than 64 units
 *           leaves the upper rows of A to what lies behind its panel, numbers or not: these reach
 *           sums of units past the tile alone, which nobody stores.
 * Bound     bytes of W, each read once. The rows come from L2, T / (units of a tile) of the bytes of W:
 *           at T = 16 half for N = 4096, a seventh for gate and up.
 * Numerics  f32 sums over K in ascending order, even and odd pieces of 64 apart (not with ACTIVATE),
 *           whatever the tile. Rows past T, units past N and K's end arrive as zeros.
 * Barriers  struct barriers; __syncthreads: barriers are ready | used.
 * Order     W is asked for at once, up to the ring's size before the inputs are there; rows, residual
 *           and scale after the wait.
 * Form      one warpgroup and few registers rather than the 384 threads of cuda_matmul_hopper.cu, so
 *           that neighbours of the chain share a multiprocessor. */
template <int ROWS, bool ACTIVATE>
__global__ void __launch_bounds__(THREADS, 2)
    few_rows_wgmma(const __grid_constant__ CUtensorMap tall,
                   const __grid_constant__ CUtensorMap low,
                   const __grid_constant__ CUtensorMap rows, const __grid_constant__ product p,
                   const __grid_constant__ deal d) {
    using S = stage_form<ROWS, ACTIVATE>;
    extern __shared__ unsigned char ring_memory[];
    __shared__ barriers barrier;
    const uint32_t ring = panel_aligned(shared_address(ring_memory));
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    const int lane = (int)threadIdx.x % 32;
    start_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < d.stages; s++) {
            barrier_init(shared_address(&barrier.W[s]), 1);
            barrier_init(shared_address(&barrier.rows[s]), 1);
            barrier_init(shared_address(&barrier.empty[s]), CONSUMERS / 32);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warp == CONSUMERS / 32) {
        if (lane == 0) ask_for_weights<S>(&tall, &low, d, ring, &barrier, ACTIVATE);
        return;
    }
    if (warp > CONSUMERS / 32) {
        if (lane == 0) ask_for_rows<S>(&rows, d, ring, &barrier);
        return;
    }
    wait_for_inputs();
    const tile_walk walk(d);
    const int t = 2 * (lane % 4);
    place next = {0, 0};
    for (int tile = 0; tile < d.tiles; tile++) {
        const int unit = walk.unit(tile) + warp * 16 + lane / 4;
        const int last = min(walk.unit(tile + 1), units_of(p));
        float sums[2][ROWS / 2];
        ahead<ROWS, ACTIVATE> ahead;
        ahead.load(p, t, unit, last);
        multiply_tile<ROWS, S>(sums, d, ring, &barrier, next);
        finish_tile<ROWS, ACTIVATE>(p, sums, ahead, t, unit, last);
    }
}

/* ---- launching ---- */

int divide_up(int a, int b) {
    return (a + b - 1) / b;
}

template <int ROWS, bool ACTIVATE> void launch(struct cuda_backend *b, const struct product *p) {
    using S = stage_form<ROWS, ACTIVATE>;
    deal d = {};
    const int groups = divide_up(units_of(*p), GROUP);
    const int blocks = std::min(b->multiprocessors, groups), most = divide_up(groups, blocks);
    d.each = groups / blocks;
    d.more = groups % blocks;
    d.tiles = divide_up(most, MOST_GROUPS);
    d.units = divide_up(most, d.tiles) * GROUP;
    d.steps = divide_up(p->K, S::DEPTH);
    const int block = ROWS > 16                     ? SHARED_BYTES_WIDE
                      : p->epilogue == EPILOGUE_ADD ? SHARED_BYTES_ADD
                                                    : SHARED_BYTES;
    const int shared = block - (int)sizeof(barriers);
    const int beyond =
        (MOST_GROUPS * GROUP - d.units) * PANEL_ROW_BYTES; /* rows of A past a panel */
    d.stages = std::min((shared - PANEL_ALIGNMENT - beyond) / S::bytes(d.units), (int)MAX_STAGES);
    d.in_flight = std::min(divide_up(IN_FLIGHT, 2 * d.units * PANEL_ROW_BYTES), d.stages);
    CUtensorMap tall, low, rows;
    if (cuda_weight_map(b, &tall, *p, d.units) &&
        cuda_weight_map(b, &low, *p, std::max(d.units - GROUP, (int)GROUP)) &&
        cuda_matrix_map(b, &rows, p->in, p->T, p->K, ROWS))
        cuda_launch(b, "few_rows_wgmma", few_rows_wgmma<ROWS, ACTIVATE>, dim3((unsigned)blocks),
                    THREADS, (size_t)shared, tall, low, rows, *p, d);
}

template <int ROWS> void launch(struct cuda_backend *b, const struct product *p) {
    if (p->epilogue == EPILOGUE_ACTIVATE)
        launch<ROWS, true>(b, p);
    else
        launch<ROWS, false>(b, p);
}

} // namespace

void cuda_matmul_few(struct cuda_backend *b, const struct product *p) {
    if (p->T <= 8)
        launch<8>(b, p);
    else if (p->T <= 16)
        launch<16>(b, p);
    else if (p->T <= 32)
        launch<32>(b, p);
    else
        launch<64>(b, p);
}
